"""Engines with keys and values in FP8 (`kv_cache_dtype="fp8"`).

vLLM on a CPU rounds them as the plug-in does, and needs AVX-512 for it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvindex_adapters.vllm import fp8
from kvindex_adapters.vllm.fp8 import FP8
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, prompt, tokens
from tests.vllm.gpu_layers import D, G, H, entered, flash_fp8
from tests.vllm.test_host_rows import HOST, needs_avx512, on_a_cpu

__all__ = ["entered", "flash_fp8", "on_a_cpu"]  # fixtures

KERNELS = EVERY | {"index": "pariskv:preset=fast", "dense_below": 350, "local_window": 40}

SCHEME = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)


@pytest.fixture(scope="module")
def stock_fp8(engine, model):
    return engine(model, kv_cache_dtype="fp8")


@needs_avx512
def test_tokens_are_those_of_vllm(engine, model, stock, stock_fp8):
    searching = engine(model, EVERY, kv_cache_dtype="fp8")
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000))]
    expected = tokens(stock_fp8, prompts)
    assert tokens(searching, prompts) == expected
    assert tokens(searching, prompts) == expected  # with cached prefixes
    assert tokens(stock, prompts) != expected  # rounding to FP8 changes tokens


@needs_avx512
def test_few_rows_of_fp8(engine, model, stock_fp8):
    few = engine(
        model, {"k": 1, "dense_below": 0, "sink": 0, "local_window": 0}, kv_cache_dtype="fp8_e4m3"
    )
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000))]
    found, exact = tokens(few, prompts), tokens(stock_fp8, prompts)
    assert found[2] == exact[2]  # the sequence is shorter than a block
    assert found != exact


@needs_avx512
def test_sparse_prompts_of_fp8(engine, model, stock_fp8):
    options = EVERY | {"prefill": "sparse", "prefill_mass": 1.0}
    searching = engine(model, options, kv_cache_dtype="fp8", max_num_batched_tokens=1024)
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 1000))]
    assert tokens(searching, prompts) == tokens(stock_fp8, prompts)


@needs_avx512
@pytest.mark.parametrize("skipped", [[], ["sliding_window"]])
def test_one_page_for_rows_and_codes_in_fp8(engine, saved, skipped):
    types = ["sliding_attention", "full_attention"]
    folder = saved("Gemma2", sliding_window=256, layer_types=types, query_pre_attn_scalar=32)
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 1000))]
    options = dict(kv_cache_dtype="fp8", num_gpu_blocks_override=24)
    options |= dict(kv_cache_dtype_skip_layers=skipped)
    expected = tokens(engine(folder, **options), prompts)
    assert tokens(engine(folder, EVERY, **options), prompts) == expected


def scaled(llm, key, value):
    """Set the scales of all layers of an engine, and return the engine."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        if "_k_scale_float" in vars(layer):
            layer._k_scale_float, layer._v_scale_float = key, value
            layer._k_scale.fill_(key)
            layer._v_scale.fill_(value)
    llm.reset_prefix_cache()
    return llm


@needs_avx512
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_kernels_for_gpus_read_fp8(flash_fp8, on_a_cpu, engine, model, stock_fp8):
    from tests.vllm.on_a_cpu import Attention

    searching = engine(model, KERNELS, kv_cache_dtype="fp8")
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]
    found = []
    for scales in ((1.0, 1.0), (0.37, 0.02)):
        searched = Attention.searched
        found.append(tokens(scaled(searching, *scales), prompts, 8))
        assert found[-1] == tokens(scaled(stock_fp8, *scales), prompts, 8)
        assert Attention.searched >= searched + 2 * 4
    scaled(stock_fp8, 1.0, 1.0)
    assert found[0] != found[1]  # other numbers are rounded


@needs_avx512
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_rows_on_the_host_are_those_on_the_device(flash_fp8, on_a_cpu, engine, model, monkeypatch):
    """The batch has mixed lengths, blocks that fill, cached prefixes, and preempted sequences."""
    few, cached = {"k": 16, "local_window": 1}, {"rows": "host", "cached_rows": 64}
    # as vLLM does on a GPU; on a CPU it rounds towards zero
    monkeypatch.setattr(
        fp8, "rounded", lambda x: x.clamp(-fp8.LARGEST, fp8.LARGEST).to(FP8).view(torch.uint8)
    )
    start = prompt(600, seed=10)
    alone = [([start + prompt(length, seed=11 + length)], 8) for length in (5, 164, 1)]
    long = [prompt(length, seed=20 + length) for length in (1010, 1000, 750)]
    # if a batch also contains prompts, only the engine with rows on the host searches
    for options, batches in ((few, alone), ({}, [(long, 12)])):
        device = scaled(engine(model, KERNELS | options, kv_cache_dtype="fp8"), 0.05, 0.02)
        options |= cached
        host = scaled(engine(model, KERNELS | options, kv_cache_dtype="fp8"), 0.05, 0.02)
        for batch, count in batches:
            assert tokens(host, batch, count) == tokens(device, batch, count)


def test_queries_of_full_attention_are_converted(flash_fp8, entered, monkeypatch):
    """vLLM's kernel needs queries in FP8 too, and searches do not."""
    from kvindex_adapters.vllm import gpu_layer

    seen = []
    monkeypatch.setattr(flash_fp8, "forward", lambda self, layer, *given: seen.append(given[0]))

    convert = gpu_layer.QuantFP8
    monkeypatch.setattr(convert, "forward_cuda", convert.forward_native)
    entered(kv_cache_dtype="fp8")
    impl = gpu_layer.SearchingFlashAttention(H, D, D**-0.5, G, None, None, "fp8")
    assert not impl.supports_quant_query_input  # vLLM leaves queries as they are
    impl.process_weights_after_loading(torch.float32)
    assert impl.supports_quant_query_input  # vLLM passes their scale to the kernel
    layer = torch.nn.Module()
    layer.register_buffer("_q_scale", torch.tensor(2.0))
    queries = torch.full((3, H, D), 6.0)
    impl.forward(layer, queries, None, None, torch.empty(0), None, torch.empty(0))
    (found,) = seen
    assert found.dtype == FP8
    assert torch.equal(found.float(), torch.full((3, H, D), 3.0))


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """Make a checkpoint that chooses FP8 for its keys and values, and has their scales."""
    safetensors = pytest.importorskip("safetensors.torch")

    def make(strategy="tensor"):
        folder = tmp_path_factory.mktemp("fp8") / "model"
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = dict(
            quant_method="compressed-tensors",
            format="float-quantized",
            config_groups={},
            ignore=[],
            kv_cache_scheme=SCHEME | {"strategy": strategy},
            quantization_status="compressed",
        )
        (folder / "config.json").write_text(json.dumps(config))
        (weights,) = Path(folder).glob("*.safetensors")
        tensors = safetensors.load_file(weights)
        for number in range(config["num_hidden_layers"]):
            for kind, scale in (("k", 0.05), ("v", 0.02)):
                size = (1,) if strategy == "tensor" else (G, 1, 1)
                name = f"model.layers.{number}.self_attn.{kind}_scale"
                tensors[name] = torch.full(size, scale)
        safetensors.save_file(tensors, weights, metadata={"format": "pt"})
        return str(folder)

    return make


@needs_avx512
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_a_checkpoint_chooses_fp8_for_one_of_two_layers(engine, checkpoint, flash_fp8, on_a_cpu):
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    from tests.vllm.on_a_cpu import Attention

    folder, skipped = checkpoint(), dict(kv_cache_dtype_skip_layers=["0"])
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]
    searching = engine(folder, KERNELS, **skipped)
    before = Attention.searched
    found = tokens(searching, prompts, 8)
    assert Attention.searched > before
    own = registry.AttentionBackendEnum.CPU_ATTN
    path = own.get_path()
    registry.register_backend(own, "kvindex_adapters.vllm.backend.SearchingBackend")
    selector._cached_get_attn_backend.cache_clear()
    try:
        expected = tokens(engine(folder, **skipped), prompts, 8)
        on_cpu = engine(folder, EVERY, **skipped)
        everywhere = tokens(engine(folder), prompts, 8)
    finally:
        registry.register_backend(own, path)
        selector._cached_get_attn_backend.cache_clear()
    context = on_cpu.llm_engine.vllm_config.compilation_config.static_forward_context
    kinds = [layer.kv_cache_dtype for layer in context.values() if hasattr(layer, "impl")]
    assert sorted(kinds) == ["auto", "fp8"]
    assert found == expected
    assert tokens(on_cpu, prompts, 8) == expected
    assert everywhere != expected


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize(
    ("strategy", "asked", "skipped", "said"),
    [
        ("tensor", HOST, ["0"], r"kv_cache_dtype_skip_layers: got \['0'\] with rows='host'"),
        (
            "attn_head",
            {},
            [],
            "kv_cache_dtype: got fp8 with a scale for each head, allowed is auto",
        ),
    ],
)
def test_what_a_checkpoint_chooses_is_checked(
    flash_fp8, on_a_cpu, engine, checkpoint, strategy, asked, skipped, said
):
    """vLLM changes the dtype of the cache only while it makes layers."""
    with pytest.raises(ValueError, match=said):
        engine(checkpoint(strategy), KERNELS | asked, kv_cache_dtype_skip_layers=skipped)


@needs_avx512
def test_a_scale_for_each_head_on_a_cpu(engine, checkpoint):
    with pytest.raises(ValueError, match="kv_cache_dtype: got fp8 with a scale for each head"):
        engine(checkpoint("attn_head"), EVERY)
