"""`SearchingFlashBackend`: vLLM's FlashAttention on a GPU, whose decoded tokens search.

Registered in the place of vLLM's own, which it is unless the engine asks for kvindex. Prompts,
chunks of them and mixed batches are FlashAttention's, over the same pages; a batch of decoded
tokens alone is a fused step of each layer, which vLLM captures in its graphs. Where rows lie on the
host, FlashAttention has a copy of a sequence's, and decoded tokens of mixed batches search, too.
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
    """vLLM's own; layers search where `additional_config` has "kvindex"."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """As the base."""
        if options_of(get_current_vllm_config()) is None:
            return FlashAttentionImpl
        return SearchingFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """As the base."""
        return SearchingFlashBuilder
