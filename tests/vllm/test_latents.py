"""Multi-head latent attention (DeepSeek and others), whose decode steps search latents.

vLLM's own attention over latents on a CPU has no chunks of prompts, no cached prefixes and blocks
of 16 tokens. The plug-in has all of these.
"""

from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm.unsupported import can_pack
from tests.vllm.conftest import EVERY, answers, prompt, settings, tokens
from tests.vllm.processes import printed_tokens, run

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(
    not can_pack(), reason="vLLM before 0.28 gives codes no place in the pages of latents"
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""A rotary embedding as in DeepSeek's models. On a CPU, vLLM's kernel for others ignores that the
rotated coordinates are a part of each query, and gives other results in other batches."""

LATENTS = dict(
    rope_parameters=YARN,
    q_lora_rank=None,
    kv_lora_rank=512,  # on a CPU, vLLM supports no other size
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    head_dim=64,
    num_key_value_heads=4,
    num_hidden_layers=3,
    first_k_dense_replace=3,  # no experts: vLLM needs them in the first model of a process
    num_mtp_layers=0,
)

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000))]

FEW = EVERY | {"k": 1, "sink": 0, "local_window": 1}


@pytest.fixture(scope="module")
def latents(saved):
    return saved("DeepseekV3", **LATENTS)


@pytest.fixture(scope="module")
def stock(engine, latents):
    """vLLM's backend for all CPUs. The one that it prefers on CPUs with AMX has no float32."""
    return engine(latents, attention_backend="CPU_MLA", num_gpu_blocks_override=600)  # of 16 tokens


@pytest.fixture(scope="module")
def searching(engine, latents):
    return engine(latents, EVERY)


def layers_of(llm):
    from kvindex_adapters.vllm.engine import attention_layers

    return attention_layers(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def test_tokens_are_those_of_vllm(stock, searching, engine, latents):
    from kvindex_adapters.vllm.latents import LatentAttention

    expected = tokens(stock, PROMPTS)
    assert tokens(searching, PROMPTS) == expected
    assert tokens(engine(latents, FEW), PROMPTS) != expected
    config, layers = searching.llm_engine.vllm_config, layers_of(searching)
    assert config.cache_config.block_size == 256
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_batched_tokens == 512  # prompts are read in chunks
    assert len(layers) == 3
    for layer in layers.values():
        assert type(layer.impl) is LatentAttention
        assert layer.impl.codes.records.any()
        assert layer.kv_cache.shape[1:] == (256, 576 + layer.impl.codes.token_bytes // 4)
    assert {type(layer.impl).__name__ for layer in layers_of(stock).values()} == {"CPUMLAImpl"}


def test_steps_are_counted(searching):
    from prometheus_client import REGISTRY

    from kvindex_adapters.vllm import metrics

    def values():
        names = [f"{name}_total" for name in metrics.COUNTERS]
        return [REGISTRY.get_sample_value(name, {"engine": "0"}) for name in names]

    before = values()
    tokens(searching, [prompt(700, 2)], count=11)
    found = [now - then for now, then in zip(values(), before, strict=True)]
    assert found == [10, 0, sum(range(701, 711)), sum(range(701, 711))]


def test_cached_prefixes(stock, searching):
    start, hits = prompt(1100, seed=10), 0
    for length in (5, 150):
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(searching, ids)
        assert [list(outcome.outputs[0].token_ids)] == tokens(stock, ids)[0]
        hits += outcome.num_cached_tokens
    assert hits >= 1024


def test_preempted_sequences(stock, engine, latents):
    crowd = [prompt(500 + length, seed=20 + length) for length in range(8)]
    mine = engine(latents, EVERY, disable_log_stats=False)
    assert tokens(mine, crowd, 30) == tokens(stock, crowd, 30)
    counted = {one.name: one.value for one in mine.get_metrics() if hasattr(one, "value")}
    assert counted["vllm:num_preemptions"] > 0


def test_larger_blocks(stock, engine, latents):
    found = tokens(engine(latents, EVERY, block_size=512), PROMPTS)
    assert found == tokens(stock, PROMPTS)


def test_bfloat16(engine, latents):
    """Rounding may decide a token, so log probabilities of a decode step are compared."""

    def steps(asked, **options):
        found = answers(engine(latents, asked, dtype="bfloat16", **options), PROMPTS, 2, logprobs=9)
        return [one.outputs[0] for one in found]

    differences = []
    for mine, theirs in zip(steps(EVERY), steps(None, num_gpu_blocks_override=600), strict=True):
        if mine.token_ids[0] == theirs.token_ids[0]:
            one, other = mine.logprobs[1], theirs.logprobs[1]
            both = one.keys() & other.keys()
            differences += [abs(one[token].logprob - other[token].logprob) for token in both]
    assert len(differences) > 10
    assert max(differences) < 0.2


def test_two_processes(searching, latents, tmp_path):
    """Each has all latents, and half of the query heads."""
    done = run(tmp_path, settings(latents, EVERY, tensor_parallel_size=2), PROMPTS)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(searching, PROMPTS)
    assert (done.stdout + done.stderr).count("3 of 3 attention layers search") == 1


@pytest.mark.parametrize("asked", [EVERY, EVERY | {"k": 8}])
def test_drafts_do_not_change_tokens(engine, latents, tmp_path, asked):
    from tests.vllm import test_speculation as speculation

    prompts = speculation.PROMPTS
    expected = tokens(engine(latents, asked), prompts, 24)
    found, drafted, accepted = speculation.speculated(tmp_path, latents, asked, 24, prompts)
    assert found == expected
    assert drafted > accepted > 0


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        (EVERY, {"block_size": 128}, "block_size: got 128, allowed is a multiple of 256"),
        ({"rows": "host"}, {}, "rows: got host, allowed is 'device' on a CPU"),
        (EVERY, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got fp8"),
    ],
)
def test_what_is_not_supported(engine, latents, asked, options, said):
    with pytest.raises(ValueError, match=said):
        engine(latents, asked, **options)


def test_a_model_with_a_trained_indexer(engine, saved):
    """vLLM has no such attention on a CPU. The plug-in says why it cannot search before vLLM does
    so."""
    sizes = dict(q_lora_rank=64, index_topk=64, index_n_heads=4, index_head_dim=64)
    folder = saved("DeepseekV32", **LATENTS | sizes)
    said = r"model: got multi-head latent attention with a trained indexer.*\(index_topk=64\)"
    with pytest.raises(ValueError, match=said):
        engine(folder, EVERY)


def test_numbers_of_rows_from_the_error(engine, latents):
    """vLLM computes prompts without latents, so no output over latents would be measured."""
    said = "k: got 'auto', allowed is a number for multi-head latent attention, because vLLM"
    with pytest.raises(ValueError, match=said):
        engine(latents, EVERY | {"k": "auto"})


def test_engines_without_the_backend_have_vllms_own_classes(stock, latents):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvindex_adapters.vllm.latents import LatentAttention

    for asked in (None, EVERY):
        config = EngineArgs(**settings(latents, asked)).create_engine_config()
        if asked is None:
            assert config.cache_config.block_size in (16, 256)  # 256 with AMX
        with set_current_vllm_config(config):
            for name, own in (("CPU_MLA", CPUMLAImpl), ("AMX_MLA", AMXMLAImpl)):
                made = AttentionBackendEnum[name].get_class()
                assert made.get_name() == name
                assert made.get_impl_cls() is (own if asked is None else LatentAttention)


def test_a_copy_of_the_pages_of_prompts():
    from kvindex_adapters.vllm.latents import copied

    rows = torch.arange(7 * 4 * 3).view(7, 4, 3)
    context = SimpleNamespace(context_lens_list=[5, 0, 9])
    table = torch.tensor([[6, 2, 0, 9], [3, 9, 9, 9], [2, 1, 5, 9]]).int()
    prefill = SimpleNamespace(chunked_context=context, block_table=table)
    # stale entries after the end of a sequence are numbers of other blocks
    table[1, 1:] = 0
    pages, places = copied(rows, prefill)
    assert places.dtype == table.dtype
    assert torch.equal(pages[places.long()], rows[table[:, :3].long()])
    assert len(pages) == 6


@pytest.mark.parametrize("more", [(), (True,)])
def test_pages_are_written_with_the_arguments_of_each_version(monkeypatch, more):
    """vLLM 0.33 passes one argument more than 0.32."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    from kvindex_adapters.vllm.latents import LatentAttention

    layer, passed, written = object.__new__(LatentAttention), [], []
    for kind, name, seen in (
        (CPUMLAImpl, "do_kv_cache_update", passed),
        (LatentAttention, "write", written),
    ):
        monkeypatch.setattr(kind, name, lambda layer, *given, seen=seen: seen.append(given))
    given = (torch.ones(2, 4), torch.zeros(2, 1, 3), torch.zeros(1, 8), torch.arange(2), "auto")
    layer.codes = None
    layer.do_kv_cache_update(*given, torch.ones(()), *more)
    assert passed[0][6:] == more
    layer.codes = object()
    layer.do_kv_cache_update(*given, torch.ones(()), *more)
    assert written[0][2].shape == (2, 1, 7)
    assert len(passed) == len(written) == 1
