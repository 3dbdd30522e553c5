"""Models with several kinds of state, whose codes are in the pages of keys and values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm.unsupported import can_pack
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, answers, kernels_on_a_cpu, prompt, settings, tokens
from tests.vllm.processes import printed_tokens, run

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(
    not can_pack(), reason="vLLM before 0.28 gives codes no place in the pages of keys and values"
)

OLDER = tuple(int(part) for part in vllm.__version__.split(".")[:2]) < (0, 32)

HYBRID = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_n_groups=1,
    mamba_d_state=16,
    num_local_experts=0,
    shared_intermediate_size=192,
    position_embedding_type="rope",
)

CONVOLUTIONS = dict(
    num_hidden_layers=4,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
    block_dim=128,
    conv_dim=128,
)

SLIDING = dict(
    sliding_window=64,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000))]

OPTIONS = {
    # on a CPU, vLLM cannot cache the states of this model
    "hybrid": dict(enable_prefix_caching=False),
    "sliding": dict(num_gpu_blocks_override=28),
}
"""Name of a model -> options of its engines."""

FEW = EVERY | {"k": 1, "sink": 0, "local_window": 1}


def skip_without_convolutions():
    if OLDER and torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("vLLM 0.29 has bfloat16 convolutions only on CPUs with AVX-512 BF16")


@pytest.fixture(scope="module")
def hybrid(saved):
    skip_without_convolutions()
    return saved("GraniteMoeHybrid", **HYBRID)


@pytest.fixture(scope="module")
def sliding(saved):
    return saved("Olmo3", **SLIDING)


@pytest.fixture(scope="module")
def convolutions(saved):
    skip_without_convolutions()
    return saved("Lfm2", **CONVOLUTIONS)


def groups_of(llm):
    """Return vLLM's KV cache groups of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.kv_cache_config.kv_cache_groups


def codes_of(llm):
    from kvindex_adapters.vllm.engine import CodesLayer

    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if isinstance(layer, CodesLayer)]


@pytest.mark.parametrize("tokens_of_a_page", [256, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_has_a_place_for_each_row_and_record(tokens_of_a_page, dtype):
    from kvindex_adapters.vllm.packed import PackedCodes

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=32, scale=1.0, dtype=dtype)
    codes, size = PackedCodes(config, geometry, 4355), torch.empty((), dtype=dtype).element_size()
    assert codes.token_bytes >= 4355 / 256
    assert codes.token_bytes % size == 0
    width = 64 + codes.token_bytes // size
    pages = torch.zeros(5, 3, 2, tokens_of_a_page, width, dtype=dtype)[:, 1]  # between other layers
    codes._layer = SimpleNamespace(kv_cache=pages)
    rows, records = codes.rows(pages), codes.records
    assert rows.shape == (5, 2, tokens_of_a_page, 64)
    assert records.shape == (5, 2, tokens_of_a_page // 256, 4355)
    rows[:] = 1
    assert not records.any()
    records[:] = 255
    assert (rows == 1).all()
    assert torch.equal(codes.records, torch.full_like(records, 255))
    assert codes.get_kv_cache_spec(config) is None
    codes.kv_cache = []  # as vLLM does after it has measured the memory of CUDA graphs
    assert codes.kv_cache is None


@pytest.mark.parametrize("name", ["hybrid", "sliding"])
def test_tokens_are_those_of_vllm(engine, request, name):
    folder, options = request.getfixturevalue(name), OPTIONS[name]
    stock, mine = engine(folder, **options), engine(folder, EVERY, **options)
    expected = tokens(stock, PROMPTS)
    assert tokens(mine, PROMPTS) == expected
    assert tokens(engine(folder, FEW, **options), PROMPTS) != expected
    groups = groups_of(mine)
    assert len(groups) > 1
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    assert all(codes.kv_cache is None for codes in codes_of(mine))
    assert all(codes.records.any() for codes in codes_of(mine))


def test_layers_whose_weights_vllm_does_not_process(engine, sliding, monkeypatch):
    """As in vLLM 0.29, in models that it runs by classes of transformers."""
    from kvindex_adapters.vllm.backend import TorchAttention

    expected = tokens(engine(sliding, **OPTIONS["sliding"]), PROMPTS)
    monkeypatch.setattr(TorchAttention, "set_backend", lambda attention: None)
    mine = engine(sliding, EVERY, **OPTIONS["sliding"])
    assert tokens(mine, PROMPTS) == expected
    assert all(codes.records.any() for codes in codes_of(mine))


def test_sliding_layers_free_blocks_before_their_window(engine, sliding):
    """Without the hybrid manager, they keep the keys and values of all tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    mine = engine(sliding, EVERY, **OPTIONS["sliding"])
    kinds = [type(group.kv_cache_spec) for group in groups_of(mine)]
    assert sorted(kinds, key=str) == [FullAttentionSpec, SlidingWindowSpec]
    mine = engine(sliding, EVERY, disable_hybrid_kv_cache_manager=True)
    assert len(groups_of(mine)) == 1
    assert all(codes.kv_cache.numel() for codes in codes_of(mine))


@pytest.mark.parametrize("name", ["convolutions", "sliding"])
def test_cached_prefixes_and_preempted_sequences(engine, request, name):
    options = dict(enable_prefix_caching=True, num_gpu_blocks_override=28)
    folder = request.getfixturevalue(name)
    stock, mine = engine(folder, **options), engine(folder, EVERY, **options)
    start, hits = prompt(1100, seed=10), 0
    for length in (5, 150):
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(mine, ids)
        assert [list(outcome.outputs[0].token_ids)] == tokens(stock, ids)[0]
        hits += outcome.num_cached_tokens
    assert hits
    if name == "convolutions":
        return  # vLLM's own tokens differ between batches and single sequences on a CPU
    crowd = [prompt(1000 + length, seed=20 + length) for length in range(8)]
    expected = [tokens(stock, [ids], 30)[0] for ids in crowd]
    assert tokens(mine, crowd, 30) == expected


def test_steps_are_counted_once(engine, hybrid):
    from prometheus_client import REGISTRY

    from kvindex_adapters.vllm import metrics

    def values():
        names = [f"{name}_total" for name in metrics.COUNTERS]
        return np.array([REGISTRY.get_sample_value(name, {"engine": "0"}) for name in names])

    mine = engine(hybrid, EVERY, **OPTIONS["hybrid"])
    before = values()
    tokens(mine, [prompt(700, 2)], count=11)
    searched, dense, read, stored = values() - before
    assert (searched, dense) == (10, 0)
    assert read == stored == sum(range(701, 711))


@pytest.mark.parametrize("name", ["hybrid", "sliding"])
def test_two_processes(engine, request, tmp_path, name):
    if OLDER and name == "sliding":
        pytest.skip("two processes of vLLM 0.29 crash with this model, also without the plug-in")
    folder, options = request.getfixturevalue(name), OPTIONS[name]
    done = run(tmp_path, settings(folder, EVERY, tensor_parallel_size=2, **options), PROMPTS)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(engine(folder, **options), PROMPTS)
    assert (done.stdout + done.stderr).count("2 of ") == 1


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_the_engine_decodes_by_the_kernels(stock, engine, hybrid):
    """GPU kernels read codes and rows from the same pages."""
    from tests.vllm.on_a_cpu import Attention

    options = OPTIONS["hybrid"]
    expected = tokens(engine(hybrid, **options), PROMPTS, 8)
    with kernels_on_a_cpu():
        asked = {**EVERY, "index": "pariskv:preset=fast"}
        mine, count = engine(hybrid, asked, **options), Attention.searched
        assert tokens(mine, PROMPTS, 8) == expected
        assert Attention.searched > count
        assert all(codes.records.any() for codes in codes_of(mine))
