"""The plug-in in vLLM's engine on a GPU: with as many rows as there are, FlashAttention's tokens.

In bfloat16, where a rounding may decide a token whose first and second choice are close.
"""

import pytest

from tests.vllm.conftest import answers, prompt

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

EVERY = {"index": "pariskv:preset=fast", "k": 2048, "dense_below": 0, "sink": 4, "local_window": 16}

LENGTHS = 700, 300, 20, 1000, 1500

CLOSE = 0.1
"""Between logarithms of probabilities of two tokens."""

GRAPHS = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8])


@pytest.fixture(scope="module")
def wide(saved):
    return saved(hidden_size=256, intermediate_size=384, head_dim=128)


@pytest.fixture(scope="module")
def made(engine, wide):
    """Makes an engine; its blocks are few, so that sequences are preempted."""

    def make(asked=None, graphs=False, **options):
        how = dict(enforce_eager=not graphs, dtype="bfloat16", gpu_memory_utilization=0.2)
        if graphs:
            how |= dict(compilation_config=GRAPHS)
        return engine(wide, asked, **how, **options)

    return make


@pytest.fixture(scope="module")
def exact(made):
    return made()


def agree(mine, stock, prompts, count=40):
    """Tokens are equal, up to one that roundings may decide: how many of how many."""
    theirs = answers(stock, prompts, count, logprobs=2)
    equal = total = 0
    for one, other in zip(answers(mine, prompts, count), theirs, strict=True):
        (found,), (expected,) = one.outputs, other.outputs
        pairs = zip(found.token_ids, expected.token_ids, expected.logprobs, strict=True)
        for token, known, step in pairs:
            sizes = sorted(entry.logprob for entry in step.values())
            if token != known:
                assert sizes[-1] - sizes[-2] < CLOSE, (equal, token, known, sizes)
                break
            equal += 1
        total += count
    print(f"{equal} of {total} tokens are equal")
    return equal / total


@pytest.mark.parametrize("graphs", [False, True])
def test_as_many_rows_as_there_are_give_the_engines_own_tokens(made, exact, graphs):
    """By the model runner that VLLM_USE_V2_MODEL_RUNNER says (0 or 1)."""
    mine = made(EVERY, graphs)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    for ids in prompts:
        assert agree(mine, exact, [ids]) > 0.2
    assert agree(mine, exact, prompts) > 0.5  # in a batch, preempted, and its prefixes found again
    start = prompt(600, seed=10)
    shared = [start + prompt(length, seed=11 + length) for length in (5, 150, 400)]
    for ids in shared:
        assert agree(mine, exact, [ids]) > 0.2


@pytest.mark.parametrize("index", ["pariskv:preset=precise", "pariskv:signs=alone"])
def test_other_presets(made, exact, index):
    mine = made(EVERY | {"index": index}, True, block_size=512)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    assert agree(mine, exact, prompts) > 0.5


def test_few_rows_give_other_tokens_and_graphs_the_same(made, exact):
    few = EVERY | {"k": 1, "sink": 0, "local_window": 1}
    prompts = [prompt(1500, seed=20)]
    options = dict(count=40)
    eager, graphs, full = (
        list(answers(one, prompts, **options)[0].outputs[0].token_ids)
        for one in (made(few), made(few, True), exact)
    )
    assert eager == graphs
    assert eager != full
