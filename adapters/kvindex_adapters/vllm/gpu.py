"""`SearchingFlashBackend`: vLLM's FlashAttention on a GPU, with search in decode steps.

The plug-in registers it in place of vLLM's own backend. For an engine that does not use kvindex, it
is identical to that backend.

FlashAttention computes prompts, chunks of prompts and mixed batches over the same pages. A batch
that contains only decode steps runs as one fused step per layer, which vLLM captures in its CUDA
graphs. If rows are stored on the host, FlashAttention reads a copy of a sequence's rows, and decode
steps in mixed batches search as well.
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from kvindex_adapters.vllm.engine import options_of
from kvindex_adapters.vllm.gpu_batch import SearchingFlashBuilder
from kvindex_adapters.vllm.gpu_layer import SearchingFlashAttention


class SearchingFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend. Layers search if `additional_config` has the key "kvindex"."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """See vLLM's base class."""
        if options_of(get_current_vllm_config()) is None:
            return FlashAttentionImpl
        return SearchingFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """See vLLM's base class."""
        return SearchingFlashBuilder
