"""`SearchingFlashBackend`: vLLM's FlashAttention backend, with an index for decode steps.

The plug-in registers it under the name "KVINDEX". In an engine that does not use kvindex, it
behaves exactly like vLLM's own FlashAttention backend.

A batch of only decode steps runs as one fused step per layer, which vLLM captures in its CUDA
graphs. FlashAttention computes all other batches (prompts, chunks of prompts, mixed batches) with
the same pages. Prompts that are read with sparse attention (`prefill="sparse"`) are an exception:
Triton kernels compute them, over copies of their keys and values. If keys and values are in host
memory, FlashAttention reads a temporary copy on the device, and decode steps in mixed batches
search as well.
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from kvindex_adapters.vllm.engine import is_chunked, options_of
from kvindex_adapters.vllm.gpu_batch import SearchingFlashBuilder
from kvindex_adapters.vllm.gpu_layer import LocalFlashAttention, SearchingFlashAttention


class SearchingFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend, with an index if the engine's backend is "KVINDEX"."""

    # vLLM 0.33 asks for this: a model must not write keys and values in place of the layer
    supports_kv_cache_update_bypass = False

    @classmethod
    def get_impl_cls(cls) -> type[FlashAttentionImpl]:
        """Return the attention class: vLLM's own for engines without kvindex, or the plug-in's."""
        if options_of(get_current_vllm_config()) is None:
            return FlashAttentionImpl
        return LocalFlashAttention if is_chunked(cls) else SearchingFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return the class that builds the metadata of a batch."""
        return SearchingFlashBuilder
