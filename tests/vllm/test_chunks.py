"""Chunked local attention (Llama 4): in some layers, tokens attend only to their own chunk.

These layers use vLLM's own attention. The layers with full attention search.
"""

import pytest

from kvindex_adapters.vllm.unsupported import can_pack
from tests.vllm.conftest import EVERY, answers, prompt, settings, tokens

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(not can_pack(), reason="not tested with vLLM before 0.28")

CHUNK = 512

CHUNKED = dict(
    num_hidden_layers=4,
    attention_chunk_size=CHUNK,
    no_rope_layers=[1, 0, 1, 0],
    interleave_moe_layer_step=5,  # no experts: vLLM needs them in the first model of a process
    intermediate_size_mlp=192,
)

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 505, 20, 1500))]
"""Some are longer than a chunk, and one answer crosses the end of a chunk."""

FEW = EVERY | {"k": 1, "sink": 0, "local_window": 1}

BLOCKS = dict(num_gpu_blocks_override=32)


@pytest.fixture(scope="module")
def chunked(saved):
    return saved("Llama4Text", model="Llama4ForCausalLM", **CHUNKED)


def groups_of(llm):
    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.kv_cache_config.kv_cache_groups


@pytest.mark.parametrize("manager", [False, True])
def test_tokens_are_those_of_vllm(engine, chunked, manager):
    """With vLLM's hybrid KV cache manager, codes are in the pages of keys and values."""
    from kvindex_adapters.vllm.backend import LocalAttention, SearchingAttention
    from kvindex_adapters.vllm.engine import attention_layers

    options = BLOCKS | dict(disable_hybrid_kv_cache_manager=not manager)
    stock, mine = engine(chunked, **options), engine(chunked, EVERY, **options)
    expected = tokens(stock, PROMPTS)
    assert tokens(mine, PROMPTS) == expected
    assert tokens(engine(chunked, FEW, **options), PROMPTS) != expected
    assert (len(groups_of(mine)) > 1) is manager
    layers = attention_layers(mine.llm_engine.vllm_config.compilation_config.static_forward_context)
    assert [type(layer.impl) for layer in layers.values()] == [
        LocalAttention,
        SearchingAttention,
    ] * 2


def test_cached_prefixes(engine, chunked):
    stock, mine = engine(chunked, **BLOCKS), engine(chunked, EVERY, **BLOCKS)
    start, hits = prompt(1100, seed=10), 0
    for length in (5, 150):
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(mine, ids)
        assert [list(outcome.outputs[0].token_ids)] == tokens(stock, ids)[0]
        hits += outcome.num_cached_tokens
    assert hits


def test_a_chunk_has_whole_blocks(chunked):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match="kvindex: block_size: got 1024, allowed is a divisor of"):
        EngineArgs(**settings(chunked, EVERY, block_size=1024)).create_engine_config()


def test_on_a_gpu_chunked_layers_use_flash_attention(engine, chunked):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.chunked_local_attention import (
        create_chunked_local_attention_backend,
    )
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from kvindex_adapters.vllm.gpu import SearchingFlashBackend
    from kvindex_adapters.vllm.gpu_layer import LocalFlashAttention, SearchingFlashAttention

    derived = create_chunked_local_attention_backend(SearchingFlashBackend, CHUNK)
    for asked in (None, EVERY):
        config = EngineArgs(**settings(chunked, asked)).create_engine_config()
        with set_current_vllm_config(config):
            kinds = [one.get_impl_cls() for one in (derived, SearchingFlashBackend)]
        own = [FlashAttentionImpl] * 2 if asked is None else [LocalFlashAttention]
        assert kinds[: len(own)] == own
        assert (kinds[1] is SearchingFlashAttention) is (asked is not None)
