"""The plug-in in vLLM's engine on a GPU gives FlashAttention's tokens if all rows are retrieved.

Models run in bfloat16, and their best token leads by far, so that rounding does not decide a token.
"""

import pytest
import torch

from kvindex_adapters.vllm.unsupported import can_pack
from kvindex_cuda.pariskv.steps.page_limits import PageLimits
from tests.vllm.conftest import SMALL, prompt, tokens

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

EVERY = {"index": "pariskv:preset=fast", "k": 2048, "dense_below": 0, "sink": 4, "local_window": 16}

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000, 1500))]

SHARED = [prompt(600, seed=10) + prompt(length, seed=11 + length) for length in (5, 150, 400)]

ALONE = prompt(1500, seed=20)

COUNT = 40
"""Tokens of an answer."""

GRAPHS = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8])


def teach(folder, prompts):
    """Train the model's head to write a random text after each prompt, and return the texts.

    Only attention distinguishes the tokens of a text. In a model without a fifth of a prompt's
    rows, most of its text differs.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    size, rng = SMALL["vocab_size"], torch.Generator().manual_seed(0)
    texts = torch.randint(3, size, (len(prompts), COUNT), generator=rng)
    with torch.no_grad():
        states = []
        for ids, text in zip(prompts, texts, strict=True):
            read = torch.cat([torch.tensor(ids), text[:-1]])
            states.append(model.model(read[None]).last_hidden_state[0, -COUNT:])
        wanted = 10.0 * torch.nn.functional.one_hot(texts.flatten(), size)
        model.lm_head.weight.copy_(torch.linalg.lstsq(torch.cat(states), wanted).solution.T)
    model.save_pretrained(folder)
    return texts.tolist()


@pytest.fixture(scope="module")
def wide(saved):
    return saved(hidden_size=512, intermediate_size=384, head_dim=128, initializer_range=0.1)


@pytest.fixture(scope="module")
def taught(wide):
    """Return the texts after PROMPTS, SHARED and ALONE."""
    return teach(wide, [*PROMPTS, *SHARED, ALONE])


def maker(engine, folder, **stock):
    """Return a function that makes an engine with few blocks, so that sequences are preempted.

    `stock` are options of an engine without the plug-in.
    """

    def make(asked=None, graphs=False, **options):
        from vllm.platforms import current_platform

        type(current_platform)._global_graph_pool = None  # graphs of an engine in a pool of its own
        how = dict(enforce_eager=not graphs, dtype="bfloat16", gpu_memory_utilization=0.2)
        if graphs:
            how |= dict(compilation_config=GRAPHS)
        return engine(folder, asked, **how, **(stock if asked is None else {}), **options)

    return make


@pytest.fixture(scope="module")
def made(engine, wide, taught):
    return maker(engine, wide)


@pytest.fixture(scope="module")
def exact(made):
    return made()


def written(engine, prompts):
    """Return each prompt's answer."""
    return [answer for (answer,) in tokens(engine, prompts, COUNT)]


def test_the_engine_by_itself_writes_what_was_taught(exact, taught):
    assert written(exact, [*PROMPTS, *SHARED, ALONE]) == taught


@pytest.mark.parametrize("graphs", [False, True])
def test_as_many_rows_as_there_are_give_the_engines_own_tokens(made, taught, graphs):
    """The test uses the model runner that VLLM_USE_V2_MODEL_RUNNER selects (0 or 1)."""
    mine = made(EVERY, graphs)
    for ids, text in zip(PROMPTS + SHARED, taught, strict=False):
        assert written(mine, [ids]) == [text]
    # in a batch with preemption and cached prefixes
    assert written(mine, PROMPTS) == taught[: len(PROMPTS)]


@pytest.mark.parametrize("dense_graphs", [False, "auto"])
def test_short_batches_have_graphs_with_flash_attention(made, taught, dense_graphs):
    """FlashAttention computes them there. In graphs that search, sequences of fewer than 2,048
    tokens get full attention too.

    The test uses the model runner that VLLM_USE_V2_MODEL_RUNNER selects (0 or 1).
    """
    asked = {"index": "pariskv:preset=fast", "k": 1, "dense_graphs": dense_graphs}
    mine = made(asked, True)
    assert written(mine, PROMPTS) == taught[: len(PROMPTS)]
    assert written(mine, [ALONE]) == [taught[-1]]


@pytest.mark.parametrize("index", ["pariskv:preset=precise", "pariskv:sign_decoder=mean"])
def test_other_presets(made, taught, index):
    mine = made(EVERY | {"index": index}, True, block_size=512)
    assert written(mine, PROMPTS) == taught[: len(PROMPTS)]


AUTO = EVERY | {"index": "pariskv:sign_decoder=mean", "k": "auto"}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_tiny_error_gives_the_engines_own_tokens(made, taught, graphs):
    """Graphs are captured before a prompt is measured. Then their steps use full attention."""
    mine = made(AUTO | {"error": 1e-6}, graphs)
    few = [number for number, ids in enumerate(PROMPTS) if len(ids) <= 1000]
    for number in few:
        assert written(mine, [PROMPTS[number]]) == [taught[number]]
    assert written(mine, [PROMPTS[number] for number in few]) == [taught[one] for one in few]


@pytest.fixture
def limits(monkeypatch):
    """Return a list with the limits of the engine that has made the newest step."""
    newest, begin = [], PageLimits.begin_step

    def begin_step(self, *given, **named):
        newest[:] = [self]
        return begin(self, *given, **named)

    monkeypatch.setattr(PageLimits, "begin_step", begin_step)
    return newest


def test_a_large_error_reads_few_rows_and_graphs_the_same(made, limits):
    """The model writes the same text from 16 sampled rows, so tokens do not show how many."""
    auto = AUTO | {"error": 4.0, "sink": 0, "local_window": 1}
    answers, rows = [], []
    for graphs in (False, True):
        answers += written(made(auto, graphs), [ALONE])
        found = limits[0].found
        rows.append(found.sum().item() / ((COUNT - 1) * found[:, 0].numel()))
    assert answers[0] == answers[1]
    assert rows[0] == rows[1]
    assert 8 < rows[0] < 64


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_give_the_engines_own_tokens(made, taught, graphs):
    """Each token of the vocabulary is in the prompts, so n-grams of one token give drafts, most of
    which are wrong. Alone, a sequence verifies as many drafts in each step, which is a graph."""
    ngram = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=1)
    mine = made(EVERY, graphs, speculative_config=ngram)
    for number, ids in enumerate(PROMPTS):
        assert written(mine, [ids]) == [taught[number]]
    assert written(mine, PROMPTS) == taught[: len(PROMPTS)]


@pytest.mark.skipif(not can_pack(), reason="connectors need vLLM 0.28")
@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_pages_in_host_memory(made, taught, name):
    from tests.vllm.connected import Connected, transfer

    given = transfer(name, cpu_bytes_to_use=1 << 30)
    mine = Connected(lambda: made(EVERY, True, kv_transfer_config=given))
    with mine.entered():
        for _ in range(2):
            assert written(mine.llm, PROMPTS) == taught[: len(PROMPTS)]
            assert mine.llm.reset_prefix_cache()


def test_few_rows_give_other_tokens_and_graphs_the_same(made, taught):
    few = EVERY | {"index": "pariskv:preset=fast", "k": 1, "sink": 0, "local_window": 1}
    (eager,), (graphs,) = (written(one, [ALONE]) for one in (made(few), made(few, True)))
    assert eager == graphs
    assert eager != taught[-1]
