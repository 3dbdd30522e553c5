"""Rows on the host, in vLLM's own classes and its engine, with kernels emulated on a CPU."""

import pytest
import torch

from kvindex.ops.attention import attend
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.fp8 import Scales
from tests.cuda import emulator
from tests.vllm.conftest import answers, kernels_on_a_cpu, prompt, settings, tokens
from tests.vllm.gpu_layers import (
    BLOCKS,
    EVERY,
    LAYERS,
    LENGTHS,
    D,
    G,
    H,
    builder_of,
    common,
    entered,
    flash_fp8,
    layers_of,
    slots_of,
)
from tests.vllm.processes import printed_tokens, run

pytest.importorskip("vllm")

from tests.vllm.on_a_cpu import environment as on_a_cpu_in

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")

HOST = {**EVERY, "rows": "host", "cached_rows": 1024}

SCALES = [None, (0.37, 0.02)]
"""Scales of rows in the model's dtype, and of rows in FP8."""

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512 for FP8 on a CPU"
)

__all__ = ["entered", "flash_fp8"]  # fixtures


@pytest.fixture
def on_a_cpu(stock):
    """Put the GPU backend in place of the CPU's, with emulated kernels."""
    with kernels_on_a_cpu():
        yield


@pytest.mark.parametrize(
    ("dtype", "size"), [("auto", 4), pytest.param("fp8", 1, marks=needs_avx512)]
)
def test_layers_say_pages_of_codes_alone(on_a_cpu, entered, flash_fp8, dtype, size):
    from vllm.model_executor.layers.attention import Attention

    config = entered(HOST, kv_cache_dtype=dtype)
    made = Attention(H, D, D**-0.5, G, prefix="layers.0", cache_config=config.cache_config)
    before = made.get_kv_cache_spec(config).page_size_bytes
    made.process_weights_after_loading(torch.float32)
    after = made.get_kv_cache_spec(config).page_size_bytes
    codes = made.impl.codes.get_kv_cache_spec(config).page_size_bytes
    assert before == 256 * G * 2 * D * size
    assert after == 256 * 2
    assert after + codes < 0.8 * before / size
    assert made.impl.host.scratch.dtype == (torch.float32 if size == 4 else torch.uint8)


@pytest.mark.parametrize("scales", SCALES)
def test_a_batch_searches_for_first_tokens_and_copies_rows_of_others(entered, flash_fp8, scales):
    from tests.vllm.on_a_cpu import Attention

    config = entered(HOST)
    layers = layers_of(config, Attention, scales)
    convert = Scales(*scales, torch.float32) if scales else None
    builder = builder_of(config, layers)
    assert builder.reorder_batch_threshold == 1
    assert (builder.num_heads_kv, builder.headdim) == (G, D)
    tables = torch.tensor([[3, 7, 1], [4, 2, 0], [9, 0, 0], [5, 6, 8]]).int()
    lengths = (*LENGTHS[:3], 600)
    most = [(0, length - 1) for length in lengths[:3]] + [(0, 590)]
    rest = [(length - 1, length) for length in lengths[:3]] + [(590, 600)]
    for bounds in (most, rest):
        slots = slots_of(tables, bounds)
        counts, ends = [stop - start for start, stop in bounds], [stop for _, stop in bounds]
        metadata = builder.build(0, common(tables, ends, counts, slots))
        before = Attention.copied
        for layer in layers.values():
            keys, values = (torch.randn(len(slots), G, D) for _ in range(2))
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            queries, output = torch.randn(len(slots), H, D), torch.full((len(slots), H, D), 9.0)
            layer.impl.forward(layer, queries, keys, values, layer.kv_cache, metadata, output)
            rows = layer.impl.host.pages.rows[layer.impl.number]
            assert rows.dtype == layer.kv_cache.dtype
            for b, last in enumerate(torch.tensor(counts).cumsum(0) - 1):
                seen = pages.read_rows(rows, tables[b], 0, ends[b], scales=convert)
                expected = attend(queries[last, None], seen.keys, seen.values, scale=D**-0.5)
                torch.testing.assert_close(output[last, None], expected, rtol=1e-4, atol=1e-5)
        assert Attention.copied - before == LAYERS * (4 if bounds is most else 1)
    assert not any(layer.kv_cache.any() for layer in layers.values())


@pytest.mark.parametrize("scales", SCALES)
def test_a_prompt_whose_prefix_comes_in_the_same_step_does_not_search(entered, flash_fp8, scales):
    """vLLM gives such a prompt blocks that the same step is about to fill, except for its last
    token."""
    from tests.vllm.on_a_cpu import Attention

    config = entered({**HOST, "k": 1, "local_window": 2})
    layers = layers_of(config, Attention, scales)
    convert = Scales(*scales, torch.float32) if scales else None
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [3, 7, 5], [9, 0, 0]]).int()
    bounds = (512, 513), (0, 513), (0, 7)  # the first sequence's prefix is filled by the second
    slots, counts = slots_of(tables, bounds), [1, 513, 7]
    told = dict(is_prefilling=torch.ones(3, dtype=torch.bool))
    metadata = builder.build(0, common(tables, [513, 513, 7], counts, slots, **told))
    for layer in layers.values():
        keys, values = (torch.randn(len(slots), G, D) for _ in range(2))
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        queries, output = torch.randn(len(slots), H, D), torch.full((len(slots), H, D), 9.0)
        layer.impl.forward(layer, queries, keys, values, layer.kv_cache, metadata, output)
        rows = layer.impl.host.pages.rows[layer.impl.number]
        for b, (last, end) in enumerate(((0, 513), (513, 513), (520, 7))):
            seen = pages.read_rows(rows, tables[b], 0, end, scales=convert)
            expected = attend(queries[last, None], seen.keys, seen.values, scale=D**-0.5)
            torch.testing.assert_close(output[last, None], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def emulated_engine(on_a_cpu, engine, model):
    return engine(model, {**HOST, "dense_below": 350, "local_window": 40})


def test_the_engine_decodes_from_rows_on_the_host(emulated_engine, stock):
    """The batch has mixed lengths, blocks that fill, cached prefixes, and preempted sequences."""
    from prometheus_client import REGISTRY

    from tests.vllm.on_a_cpu import Attention

    def lookups():
        names = [f"vllm:kvindex_rows_{kind}_total" for kind in ("looked_up", "cached")]
        return [REGISTRY.get_sample_value(name, {"engine": "0"}) for name in names]

    before = lookups()
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]
    assert tokens(emulated_engine, prompts, 8) == tokens(stock, prompts, 8)
    assert Attention.searched >= 2 * 4
    start = prompt(600, seed=10)
    for length in (5, 164):  # the second sequence fills a block and searches it
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(emulated_engine, ids, 46 if length > 5 else 4)
        expected = tokens(stock, ids, 46 if length > 5 else 4)[0]
        assert [list(outcome.outputs[0].token_ids)] == expected
        assert outcome.num_cached_tokens == (512 if length > 5 else 0)
    lengths = 1010, 1000, 750  # these fill all 11 blocks; each needs one more soon
    prompts = [prompt(length, seed=20 + length) for length in lengths]
    expected = [tokens(stock, [ids], 20)[0] for ids in prompts]
    assert tokens(emulated_engine, prompts, 20) == expected
    looked_up, cached = (new - old for new, old in zip(lookups(), before, strict=True))
    assert looked_up > cached > looked_up / 2  # most rows are read again in the next step


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_processes_divide_the_memory_of_the_host(stock, model, tmp_path, kind):
    """Each process has its own KV heads or layers, in its own memory."""
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]
    options = {f"{kind}_parallel_size": 2, "enforce_eager": kind == "tensor"}
    asked = {**HOST, "dense_below": 350, "local_window": 40}
    environment = on_a_cpu_in(tmp_path)
    done = run(tmp_path, settings(model, asked, **options), prompts, env=environment)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(stock, prompts)
    # 12 pages of 256 tokens, with half of the 2 KV heads and 2 layers, keys and values in float32
    half = f"rows of 12 pages are on the host, {12 * 256 * 2 * 64 * 4 / 1e9:.2f} GB pinned"
    assert half in done.stdout + done.stderr


def test_a_process_may_pin_its_part_of_the_memory(entered, monkeypatch):
    from kvindex_cuda.memory import host_pages
    from kvindex_cuda.memory.budget import Budget
    from kvindex_cuda.pariskv.steps import host_rows

    pages_bytes = BLOCKS * 256 * G * 2 * D * 4 * LAYERS
    for module in (host_pages, host_rows):
        monkeypatch.setattr(module, "shared_budget", lambda: Budget(2 * pages_bytes - 1))
    for processes in (1, 2):
        config = entered(HOST)
        config.parallel_config.data_parallel_size_local = processes
        layers = layers_of(config)
        builder = builder_of(config, layers)
        given = common(torch.tensor([[1]]).int(), [1], [1], torch.tensor([256]))
        if processes == 1:
            builder.build(0, given)
            continue
        with pytest.raises(ValueError, match=f"got {BLOCKS} pages .*use up to {BLOCKS - 1} pages"):
            builder.build(0, given)


def test_more_pages_than_the_host_has_room_for_are_refused(entered, monkeypatch):
    from kvindex_cuda.memory import host_pages
    from kvindex_cuda.memory.budget import Budget

    config = entered(HOST)
    layers = layers_of(config)
    builder = builder_of(config, layers)
    monkeypatch.setattr(host_pages, "shared_budget", lambda: Budget(10**6))
    slots = torch.tensor([256])
    with pytest.raises(ValueError, match=f"got {BLOCKS} pages .*num_gpu_blocks_override"):
        builder.build(0, common(torch.tensor([[1]]).int(), [1], [1], slots))


def test_rows_that_come_before_there_are_pages_go_nowhere(entered):
    layer = layers_of(entered(HOST))["layers.0"]
    rows = torch.ones(2, 1, G, D)
    layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, torch.tensor([-1]))


def test_layers_with_and_without_fp8_are_refused(entered, flash_fp8):
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    entered(HOST)
    given = H, D, D**-0.5, G, None, None
    SearchingFlashAttention(*given, "fp8")
    with pytest.raises(ValueError, match='rows: got "host" for layers that differ'):
        SearchingFlashAttention(*given, "auto")


def test_the_cpu_backend_has_one_memory(engine, model):
    with pytest.raises(ValueError, match="rows: got host, allowed is 'device' on a CPU"):
        engine(model, {"rows": "host"})
