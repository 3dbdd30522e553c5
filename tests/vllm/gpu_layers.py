"""Layers and builders of the GPU backend as vLLM makes them, and metadata of a batch."""

import pytest
import torch

from tests.cuda import emulator
from tests.vllm.conftest import settings

H, G, D, BLOCKS, LAYERS = 4, 2, 32, 12, 2

LENGTHS = 700, 300, 5, 0
"""Lengths of sequences. The last one is padding."""

EVERY = {"index": "pariskv:preset=fast", "k": 1024, "dense_below": 400, "sink": 4}


@pytest.fixture
def entered(model):
    """Enter the configuration of an engine on a GPU, and return it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    left = []

    def enter(asked=EVERY, **options):
        made = EngineArgs(**settings(model, asked, **options)).create_engine_config()
        left.append(set_current_vllm_config(made))
        left[-1].__enter__()
        return made

    with emulator.emulated():
        yield enter
    for one in left:
        one.__exit__(None, None, None)


@pytest.fixture
def flash_fp8(monkeypatch):
    """Let vLLM construct FlashAttention layers for FP8 without a GPU."""
    from vllm.v1.attention.backends import flash_attn

    for name in ("flash_attn_supports_kv_cache_dtype", "flash_attn_supports_quant_query_input"):
        monkeypatch.setattr(flash_attn, name, lambda *given, **named: True, raising=False)
    return flash_attn.FlashAttentionImpl


def layers_of(config, kind=None, scales=None):
    """Make layers with caches in vLLM's layout: tokens of a page before heads.

    With scales of keys and of values, keys and values are in FP8.
    """
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    made, kind = {}, kind or SearchingFlashAttention
    for number in range(LAYERS):
        impl = kind(H, D, D**-0.5, G, None, None, "fp8" if scales else "auto")
        layer, dtype = torch.nn.Module(), torch.uint8 if scales else torch.float32
        layer.impl = impl
        if impl.codes.kv_cache is None:  # codes are in the pages of keys and values
            more = impl.codes.token_bytes // dtype.itemsize
            layer.kv_cache = torch.zeros(BLOCKS, G, 256, 2 * D + more, dtype=dtype)
            impl.codes._layer = layer
        else:
            impl.codes.kv_cache = torch.zeros(
                impl.codes.get_kv_cache_spec(config).page_size_bytes * BLOCKS, dtype=torch.uint8
            ).view(BLOCKS, G, 256, -1)
            layer.kv_cache = torch.zeros(BLOCKS, 256, G, 2 * D, dtype=dtype).transpose(1, 2)
        for name, scale in zip("kv", scales or (), strict=False):
            layer.register_buffer(f"_{name}_scale", torch.tensor(scale))
            vars(layer)[f"_{name}_scale_float"] = scale
        made[f"layers.{number}"] = layer
    config.compilation_config.static_forward_context.update(made)
    return made


def builder_of(config, layers):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvindex_adapters.vllm.gpu import SearchingFlashBackend

    spec = FullAttentionSpec(block_size=256, num_kv_heads=G, head_size=D, dtype=torch.float32)
    made = SearchingFlashBackend.get_builder_cls()
    return made(spec, list(layers), config, torch.device("cpu"))


def common(tables, lengths, counts, slots, **more):
    """Return vLLM's metadata of a step with a number of new tokens of each sequence."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths).int(),
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=tables,
        slot_mapping=slots,
        causal=True,
        **more,
    )


def slots_of(tables, bounds):
    """Return the slots of each sequence's tokens in a range, -1 for a padded sequence."""
    found = []
    for table, (start, stop) in zip(tables, bounds, strict=True):
        places = torch.arange(start, stop)
        found.append(table.long()[places // 256] * 256 + places % 256)
    return torch.cat([part if len(part) else torch.tensor([-1]) for part in found])
