"""The cache of codes as vLLM sees it: a layer with pages of its own under the same block table.

What differs between versions of vLLM is here (this is 0.32's): a version before 0.28 asks the
backend for the shape of its cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from kvindex.ops.block_layout import BLOCK


class CodesLayer(AttentionLayerBase):
    """Pages of codes for one layer's rows: one record for each KV head and 256 tokens of a block.

    Full attention's, so that vLLM puts them into the group of these rows: one block table, shared,
    copied and forgotten with the rows.
    """

    def __init__(self, config: VllmConfig, kv_heads: int, record_bytes: int) -> None:
        layers = config.compilation_config.static_forward_context
        number = sum(isinstance(layer, CodesLayer) for layer in layers.values())
        layers[f"kvindex.codes.{number}"] = self  # vLLM reads one integer in a layer's name
        self.kv_heads, self.record_bytes = kv_heads, record_bytes
        self.token_bytes = -(-record_bytes // BLOCK)
        self.kv_cache = torch.empty(0)

    @property
    def records(self) -> Tensor:
        """uint8 `[blocks, G, tokens / 256, bytes]`, a view of the pages."""
        blocks, heads, _, token_bytes = self.kv_cache.shape
        records = self.kv_cache.view(blocks, heads, -1, BLOCK * token_bytes)
        return records[..., : self.record_bytes]

    def get_attn_backend(self) -> type[AttentionBackend]:
        """As the base."""
        return CodesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """As the base: a "key" of bytes, and no value."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.token_bytes,
            head_size_v=0,
            dtype=torch.uint8,
        )


class CodesBackend(AttentionBackend):
    """Of a cache that nobody attends to by itself."""

    @staticmethod
    def get_name() -> str:
        """As the base."""
        return "KVINDEX_CODES"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """As the base."""
        return [MultipleOf(BLOCK)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """As the base: a block's heads one after the other, each in one piece."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> Any:
        """As the base. Raises NotImplementedError."""
        raise NotImplementedError("kvindex: codes are read by the layer whose rows they are of")

    @staticmethod
    def get_builder_cls() -> type[CodesBuilder]:
        """As the base."""
        return CodesBuilder


class CodesBuilder(AttentionMetadataBuilder[Any]):
    """Of metadata that nobody reads: the layer of the rows has the block table."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        """As the base."""
        return common_attn_metadata
