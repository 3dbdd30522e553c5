"""Prompts that are read with sparse attention, in vLLM's engine on a CPU."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from kvindex_adapters.vllm.attention import PagedAttention
from kvindex_adapters.vllm.reading import Prompt, Prompts, Reading
from kvindex_adapters.vllm.unsupported import can_align, can_pack, sparse_reasons
from tests.vllm.conftest import EVERY, answers, prompt, settings, tokens
from tests.vllm.processes import printed_tokens, run
from tests.vllm.test_attention import D, G, H, queries, served

exceptions = pytest.importorskip("vllm.exceptions")

from kvindex_adapters.vllm import request_hooks  # noqa: E402
from tests.vllm.test_engine import LATENT  # noqa: E402
from tests.vllm.test_packed import HYBRID, OPTIONS, SLIDING  # noqa: E402

pytestmark = pytest.mark.skipif(not can_align(), reason="this vLLM cannot align chunks")

SPARSE = EVERY | {"prefill": "sparse", "prefill_mass": 0.4, "prefill_last": 64}

LENGTHS = 1000, 300, 20, 700, 513

PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


WIDE = dict(head_dim=512, value_dim=512, softcap=None, value_in_key=False)


@pytest.fixture(scope="module")
def sparse(engine, model):
    return engine(model, SPARSE)


def likely(llm, prompts, count=8, extra=None):
    """Return the tokens of answers, and their log probabilities."""
    found = []
    for outcome in answers(llm, prompts, count, logprobs=1, extra_args=extra):
        (output,) = outcome.outputs
        steps = zip(output.token_ids, output.logprobs, strict=True)
        found.append([(token, step[token].logprob) for token, step in steps])
    return found


def assert_same(mine, theirs):
    """Compare tokens, and log probabilities up to rounding."""
    for one, other in zip(mine, theirs, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        torch.testing.assert_close(*(torch.tensor([p for _, p in x]) for x in (one, other)))


@pytest.mark.parametrize("selector", ["sampled", "pooled"])
@pytest.mark.parametrize("last", [0, 64, 128, 300])
@pytest.mark.parametrize("chunks", [(0, 1100), (0, 256, 384, 1100), (0, 640, 1040, 1100)])
def test_a_layer_over_pages_reads_as_one_with_an_index(selector, last, chunks):
    paged, sequence, keys, values = served(1100, tokens=512)
    asked, length = queries(1100), 1090
    reading = Reading("sparse", selector, 0.5, last)
    index = kvindex.create("exact", q_heads=H, kv_heads=G, head_dim=D, backend="torch")
    options = dict(prefill="sparse", prefill_selector=selector, prefill_mass=0.5)
    layer = AttentionLayer(index, **options, prefill_last=last, k=4)
    layer.expect_prompt(length)
    expected = layer.step(asked[None].transpose(1, 2), keys, values)[0].transpose(0, 1)
    found = []
    for start, stop in pairwise(chunks):
        part = replace(sequence, length=stop)
        found.append(paged.attend(asked[start:stop], part, sparse=Prompt(length, reading)))
    torch.testing.assert_close(torch.cat(found), expected)
    dense = paged.attend_dense(asked, sequence)
    assert (dense - expected).abs().max() > 0.01


def test_chunks_end_where_blocks_do_or_near_the_end_of_the_prompt():
    plan = Prompt(1000, Reading("sparse", prefill_last=64))
    assert plan.dense_from == 896
    ends = {300: 256, 384: 384, 895: 768, 896: 896, 897: 897, 999: 999, 1000: 1000, 1040: 1040}
    for end, wanted in ends.items():
        assert plan.chunk_end(0, end) == wanted
    assert plan.chunk_end(256, 383) == 256  # it waits for a step with more room
    assert plan.chunk_end(999, 1000) == 1000  # all other tokens are cached
    assert plan.chunk_end(1000, 1001) == 1001  # a decode step


def test_salts_differ_wherever_the_reading_differs():
    readings = [
        Reading(),
        *(Reading("sparse", *how) for how in (("pooled",), ("sampled", 0.9), ("sampled", 0.95, 7))),
        Reading("sparse"),
    ]
    own = [None, "mine", *(one.salted(user) for one in readings for user in (None, "mine"))]
    own = sorted({salt or "" for salt in own})
    salted = [reading.salted(salt) or "" for reading in readings for salt in own]
    assert len(set(salted)) == len(readings) * len(own)
    assert Reading().salted("mine") == "mine"  # as without the plug-in
    assert Reading("sparse", prefill_mass=1).salted("") == Reading(
        "sparse", prefill_mass=1.0
    ).salted(None)


def test_the_size_of_chunks_changes_nothing(engine, model, sparse, stock):
    whole = engine(model, SPARSE, max_num_batched_tokens=4096, num_gpu_blocks_override=24)
    expected = [likely(whole, [ids])[0] for ids in PROMPTS]
    assert_same(likely(whole, PROMPTS), expected)
    assert sparse.reset_prefix_cache()
    assert_same(likely(sparse, PROMPTS), expected)  # chunks of at most 512 tokens, in one batch
    assert_same(likely(sparse, PROMPTS), expected)  # cached prefixes
    small = engine(model, SPARSE, max_num_batched_tokens=264, num_gpu_blocks_override=24)
    assert_same(likely(small, PROMPTS), expected)
    dense = likely(stock, PROMPTS)
    assert_same(expected[1:3], dense[1:3])  # all blocks of short prompts are always read
    assert [token for token, _ in expected[0]] != [token for token, _ in dense[0]]


def test_all_of_the_weight_gives_full_attention(engine, model, stock):
    every = engine(model, SPARSE | {"prefill_mass": 1.0})
    assert tokens(every, PROMPTS) == tokens(stock, PROMPTS)


TRANSFORMERS = """
import json, sys
import torch, transformers
import kvindex_adapters.hf as kvhf

folder, selector, ids = json.loads(sys.argv[1])[0] + json.loads(sys.argv[1])[1]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
options = dict(prefill="sparse", prefill_selector=selector, prefill_mass=0.4, prefill_last=64)
with kvhf.attach(model, index="exact", k=2048, **options) as cache, torch.no_grad():
    logits = model(torch.tensor([ids]), past_key_values=cache).logits[0, -1]
best = logits.log_softmax(-1).max(-1)
print("BEST", json.dumps([int(best.indices), float(best.values)]))
"""
"""Read a prompt with transformers. Print the most likely next token and its log probability."""


@pytest.mark.parametrize("selector", ["sampled", "pooled"])
def test_the_answers_are_those_of_transformers(engine, model, tmp_path, selector):
    asked = {"prefill_selector": selector}
    ((mine,),) = likely(engine(model, SPARSE | asked), [PROMPTS[0]], 1)
    done = run(tmp_path, [model, selector], [PROMPTS[0]], TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    token, value = json.loads(done.stdout.rpartition("BEST ")[2])
    assert mine == (token, pytest.approx(value, abs=1e-4))


def test_no_cached_prefix_is_used_for_another_reading(sparse):
    start = prompt(600, seed=90)

    def cached(number, extra=None, salt=None):
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, detokenize=False, extra_args=extra)
        given = {"prompt_token_ids": start + prompt(9, number)}
        given |= {} if salt is None else {"cache_salt": salt}
        (outcome,) = sparse.generate([given], params, use_tqdm=False)
        return outcome.num_cached_tokens

    own = Reading("sparse", prefill_mass=0.4, prefill_last=64)
    others = [
        {},
        {"kvindex_prefill": "dense"},
        {"kvindex_prefill_mass": 0.5},
        {"kvindex_prefill_selector": "pooled"},
        {"kvindex_prefill_last": 65},
    ]
    for number, extra in enumerate(others):
        assert cached(number, extra) == 0
        assert cached(10 + number, extra) == 512
    assert cached(20, {"kvindex_prefill": "sparse", "kvindex_prefill_mass": 0.4}) == 512
    # a salt of the user that equals one of the plug-in's
    assert cached(21, {"kvindex_prefill": "dense"}, own.salted(None)) == 0
    assert cached(22, {"kvindex_prefill": "dense"}, own.salted(None)) == 512
    assert cached(23, {}, own.salted(None)) == 0
    assert cached(24, {}, "mine") == 0
    assert cached(25, {}, "mine") == 512


def test_a_request_that_asks_for_full_attention(sparse, stock):
    dense = {"kvindex_prefill": "dense"}
    expected = likely(stock, PROMPTS)
    assert_same(likely(sparse, PROMPTS, extra=dense), expected)
    from vllm import SamplingParams

    options = dict(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    params = [SamplingParams(**options, extra_args=extra) for extra in (dense, {}, dense)]
    given = [{"prompt_token_ids": PROMPTS[0]} for _ in params]
    found = sparse.generate(given, params, use_tqdm=False)
    first, second, third = (list(one.outputs[0].token_ids) for one in found)
    assert first == third == [token for token, _ in expected[0]]
    assert second == [token for token, _ in likely(sparse, [PROMPTS[0]])[0]]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kvindex_prefil": "dense"}, "extra_args: got 'kvindex_prefil', allowed is one of"),
        ({"kvindex_prefill": "none"}, "kvindex_prefill: got 'none', allowed is one of"),
        ({"kvindex_prefill_mass": 0}, "kvindex_prefill_mass: got 0, allowed is a number in"),
        ({"kvindex_prefill_last": "9"}, "kvindex_prefill_last: got '9', allowed is an integer"),
    ],
)
def test_options_of_a_request_that_are_not_supported(sparse, stock, extra, said):
    with pytest.raises(exceptions.VLLMValidationError, match=said):
        tokens(sparse, [prompt(20)], 1, extra_args=extra)
    assert tokens(sparse, [prompt(20)], 1)
    assert tokens(stock, [prompt(20)], 1, extra_args=extra)  # vLLM does not look at them


def test_sparse_attention_is_an_option_of_the_engine(searching):
    said = "kvindex_prefill: got 'sparse' for an engine with prefill='dense', allowed is 'dense'"
    with pytest.raises(exceptions.VLLMValidationError, match=said):
        tokens(searching, [prompt(20)], 1, extra_args={"kvindex_prefill": "sparse"})
    said = "kvindex_prefill_mass: got 0.9 for a prompt with prefill='dense', which does not use it"
    with pytest.raises(exceptions.VLLMValidationError, match=said):
        tokens(searching, [prompt(20)], 1, extra_args={"kvindex_prefill_mass": 0.9})


def test_sequences_that_are_preempted(engine, model, sparse):
    large = engine(model, SPARSE, num_gpu_blocks_override=40)
    prompts = [prompt(length, seed=20 + length) for length in (1010, 1000, 750)]
    expected = tokens(large, prompts, count=40)
    assert tokens(sparse, prompts, count=40) == expected


def test_in_worker_processes(model, sparse, tmp_path):
    done = run(tmp_path, settings(model, SPARSE), PROMPTS)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(sparse, PROMPTS)
    assert "prefill attends to blocks of 128 tokens that 'sampled' chooses" in done.stderr + (
        done.stdout
    )


@pytest.mark.parametrize("given", [{}, {"kvindex_prefill_mass": 0.9}])
@pytest.mark.parametrize(
    ("more", "sparse"),
    [({}, True), ({"mm_features": ["an image"]}, False), ({"resumable": True}, False)],
)
def test_prompts_with_images_or_with_more_tokens_to_come_are_dense(more, sparse, given):
    """The engine core sets the salt, and an option that the model runner reads."""
    from vllm import SamplingParams

    class Core:
        """The method of vLLM's engine core that the plug-in wraps."""

        @request_hooks._salting
        def preprocess_add_request(self, request):
            return request

    core, reading = Core(), Reading("sparse")
    vars(core)["kvindex_reading"] = reading
    params = SamplingParams(extra_args={"other": 1, **given})
    fields = dict(mm_features=[], resumable=False, cache_salt="mine", sampling_params=params)
    wanted = reading.of_request(params.extra_args)
    request = core.preprocess_add_request(SimpleNamespace(**fields | more))
    assert request.cache_salt == (wanted.salted("mine") if sparse else "mine")
    asked = reading.of_request(request.sampling_params.extra_args)
    assert asked == (wanted if sparse else Reading())
    assert request.sampling_params.extra_args["other"] == 1


def test_the_prompts_of_a_batch():
    params = SimpleNamespace(extra_args={"kvindex_prefill": "dense"})
    new = [
        SimpleNamespace(req_id="a", sampling_params=None, prompt_token_ids=[1] * 9),
        SimpleNamespace(req_id="b", sampling_params=params, prompt_token_ids=[1] * 9),
        SimpleNamespace(
            req_id="c", sampling_params=None, prompt_token_ids=None, prompt_embeds=torch.ones(5, 2)
        ),
    ]
    reading = Reading("sparse")
    prompts = Prompts(reading, lambda: ["c", "b", "a"])
    prompts.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))
    assert prompts.of_batch() == [Prompt(5, reading), None, Prompt(9, reading)]
    prompts.update(SimpleNamespace(finished_req_ids={"c"}, scheduled_new_reqs=[]))
    assert prompts.of_batch() == [None, None, Prompt(9, reading)]
    assert request_hooks.sparse_prompts() == []


def test_the_runner_that_lists_a_batch_late(monkeypatch):
    """vLLM's V2 model runner, which needs Triton, passes the order of a batch to a method."""
    seen, reading = [], Reading("sparse")

    class Runner:
        """The two methods of vLLM's runner that the plug-in wraps."""

        def execute_model(self, scheduled, tensors=None, dummy_run=False):
            if not dummy_run:
                names = list(reversed(scheduled.num_scheduled_tokens))
                self.prepare_attn(SimpleNamespace(req_ids=names))
            seen.append(request_hooks.sparse_prompts())

        def prepare_attn(self, input_batch):
            return None

    module = SimpleNamespace(GPUModelRunner=Runner)
    monkeypatch.setitem(sys.modules, request_hooks.RUNNERS[1], module)
    for _ in range(2):
        request_hooks.install_runner(SimpleNamespace(use_v2_model_runner=True))
    runner = Runner()
    runner.kvindex_reading = reading
    new = [
        SimpleNamespace(req_id=name, sampling_params=None, prompt_token_ids=[1] * length)
        for name, length in (("a", 5), ("b", 7))
    ]
    step = SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=new, num_scheduled_tokens={"a": 5, "b": 7}
    )
    runner.execute_model(step)
    runner.execute_model(step, None, True)
    runner.execute_model(step, dummy_run=True)
    assert seen == [[Prompt(7, reading), Prompt(5, reading)], [], []]
    del Runner.prepare_attn
    with pytest.raises(
        ValueError, match="got 'sparse' or a connector for a model runner of vLLM without"
    ):
        request_hooks.install_runner(SimpleNamespace(use_v2_model_runner=True))


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ({}, dict(max_num_batched_tokens=256), "max_num_batched_tokens: got 256, allowed is at"),
        ({}, dict(long_prefill_token_threshold=100), "long_prefill_token_threshold: got 100"),
        ({"rows": "host"}, {}, "prefill: got 'sparse' with rows='host', allowed is 'dense'"),
        ({"prefill_mass": 0}, {}, "prefill_mass: got 0, allowed is a number in"),
        ({"prefill_last": -1}, {}, "prefill_last: got -1, allowed is an integer of at least 0"),
        ({"prefill_selector": "all"}, {}, "prefill_selector: got 'all', allowed is one of"),
        ({"prefill": "dense", "prefill_mass": 0.5}, {}, "prefill_mass: got 0.5 together with"),
        ({"prefill": "x"}, {}, "prefill: got 'x', allowed is one of"),
    ],
)
def test_settings_that_are_not_supported(engine, model, asked, options, said):
    with pytest.raises(ValueError, match=said):
        engine(model, SPARSE | asked, **options)


def test_layers_that_are_not_supported(engine, saved):
    with pytest.raises(ValueError, match=r"prefill: got 'sparse' for a layer with softcap=5\.0"):
        engine(saved("Gemma2", sliding_window=64, attn_logit_softcapping=5.0), SPARSE)
    with pytest.raises(ValueError, match="prefill: got 'sparse' for a layer with learned sinks"):
        engine(saved("GraniteSWA", sliding_window=64), SPARSE, num_gpu_blocks_override=24)
    with pytest.raises(ValueError, match=r"prefill: got 'sparse' for a model with latent atten"):
        engine(saved("DeepseekV3", **LATENT), SPARSE, block_size=None)
    wide = SimpleNamespace(**WIDE, device=torch.device("cuda"))
    (reason,) = sparse_reasons(wide, None)
    assert reason.startswith("prefill: got 'sparse' for a head dimension of 512 on a GPU, allowed")
    assert sparse_reasons(SimpleNamespace(**WIDE, device=torch.device("cpu")), None) == []


def test_watched_layers(sparse, monkeypatch):
    """Only whole blocks of prompts are sparse, and every layer reads them so."""
    seen, attend = [], PagedAttention.attend

    def watch(self, asked, sequence, sinks=None, **given):
        seen.append((sequence.length - len(asked), sequence.length, given["sparse"]))
        return attend(self, asked, sequence, sinks, **given)

    monkeypatch.setattr(PagedAttention, "attend", watch)
    tokens(sparse, [prompt(1000, 70), prompt(700, 71)], 4)
    read = [(start, end) for start, end, plan in seen if plan and start < plan.length]
    assert {end for _, end in read if end % 128} == {1000, 700}
    assert all(start % 128 == 0 for start, end in read)


@pytest.mark.skipif(not can_pack(), reason="the models have several kinds of state")
@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
def test_models_with_several_kinds_of_state(engine, saved, kind):
    """Layers of linear attention and sliding layers stay as they are."""
    families = {"hybrid": "GraniteMoeHybrid", "sliding": "Olmo3"}
    sizes = {"hybrid": HYBRID, "sliding": SLIDING}
    folder, options = saved(families[kind], **sizes[kind]), OPTIONS.get(kind, {})
    stock = likely(engine(folder, **options), PROMPTS)
    every = engine(folder, SPARSE | {"prefill_mass": 1.0}, **options)
    assert_same(likely(every, PROMPTS), stock)
    mine = engine(folder, SPARSE, **options)
    expected = [likely(mine, [ids])[0] for ids in PROMPTS]
    gaps = [abs(a[1] - b[1]) for a, b in zip(expected[0], stock[0], strict=True)]
    assert max(gaps) > 0.01
    assert_same(likely(mine, PROMPTS), expected)
