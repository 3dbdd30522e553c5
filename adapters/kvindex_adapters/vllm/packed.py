"""Pages of vLLM that contain the keys, the values and the codes (compressed keys) of a layer.

In most engines, codes have pages of their own (`engine.CodesLayer`). But if a model has several
kinds of state, for example linear attention or sliding windows in some of its layers, vLLM requires
that the pages of all layers have the same size, and pages of codes are smaller than others. Then
codes and rows share a page: each token of a KV head takes more bytes, and the additional bytes of
all tokens of a page are at the end of each head's part of the page. So do they in models with
multi-head latent attention, and in engines with a KV connector, which expects one cache for each
attention layer.

```
page: head 0: [ row 0 | row 1 | … | row n-1 | record 0 | … ] head 1: [ … ] …
```

A row is the key and the value of a token. A record contains the codes of 256 tokens. In multi-head
latent attention there is one KV head, whose keys contain their values, so a row is the key alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    MultipleOf,
)

from kvindex.core.geometry import Geometry
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm.engine import (
    CodesLayer,
    PluginAttention,
    attention_layers,
    counting,
    options_of,
)
from kvindex_adapters.vllm.unsupported import packs, refuse


def codes_layer(
    config: VllmConfig, geometry: Geometry, record_bytes: int, target: str | None
) -> CodesLayer:
    """Return the codes of one attention layer.

    A layer that reads the keys and values of an earlier layer also reads the codes of that layer.
    For any other layer this function creates codes: in the pages of its keys and values if the
    engine needs this, otherwise in pages of their own.

    Args:
        config: The engine's configuration.
        geometry: Geometry of the attention layer.
        record_bytes: Size of the codes of 256 tokens of one KV head.
        target: Name of the layer whose keys and values this layer reads, or None.

    Raises:
        ValueError: There is no layer `target` with codes.
    """
    if target is not None:
        layer = config.compilation_config.static_forward_context.get(target)
        codes: CodesLayer | None = None if layer is None else layer.impl.codes
        if codes is None:
            refuse(
                f"kv_sharing_target_layer_name: got {target}, allowed is the name of an earlier "
                "layer with full attention"
            )
        assert codes is not None  # refuse has raised an error otherwise
        return codes
    options = options_of(config)
    assert options is not None  # an engine with an index has options
    if packs(config, options):
        return PackedCodes(config, geometry, record_bytes)
    return CodesLayer(config, geometry.kv_heads, record_bytes)


class PackedCodes(CodesLayer):
    """The codes of one attention layer, which are in the same pages as its keys and values.

    Later layers that read these keys and values use the same object. vLLM gives it no pages of its
    own.
    """

    def __init__(self, config: VllmConfig, geometry: Geometry, record_bytes: int) -> None:
        super().__init__(config, geometry.kv_heads, record_bytes)
        size = torch.empty((), dtype=geometry.dtype).element_size()
        # vLLM views a page as numbers of the model's dtype, so the bytes must be a multiple of it
        self.token_bytes = -(-self.token_bytes // size) * size
        values = 0 if geometry.value_in_key else geometry.value_dim
        self._row = geometry.head_dim + values
        self._layer: Any = None
        self._context = config.compilation_config.static_forward_context

    @property
    def kv_cache(self) -> None:
        """None, because KV connectors of vLLM skip a layer whose cache is None."""

    @kv_cache.setter
    def kv_cache(self, value: object) -> None:
        """Do nothing. After vLLM has measured the memory of CUDA graphs, it removes the caches of
        all layers. It would set this attribute to an empty list."""

    @property
    def records(self) -> Tensor:
        """A view of the pages, uint8 `[blocks, G, tokens / 256, bytes]`."""
        pages = with_heads(self._layer.kv_cache)
        parts = pages.flatten(2)[..., pages.shape[2] * self._row :].view(torch.uint8)
        parts = parts.view(*pages.shape[:2], -1, BLOCK * self.token_bytes)
        return parts[..., : self.record_bytes]

    def rows(self, kv_cache: Tensor) -> Tensor:
        """Return the part of an attention layer's pages that contains keys and values, `[blocks,
        G, tokens, 2 D]`."""
        pages = with_heads(kv_cache)
        rows = pages.flatten(2)[..., : pages.shape[2] * self._row]
        return rows.view(*pages.shape[:3], self._row)

    def join(self, impl: Any, context: dict[str, Any]) -> None:
        """Give the attention layer a backend whose pages also contain codes."""
        layers = attention_layers(context).items()
        name, layer = next(pair for pair in layers if pair[1].impl is impl)
        if impl.kv_sharing_target_layer_name is None:
            self.counted_with, self._layer = name, layer
        if layer.attn_backend.__module__ != __name__:  # vLLM may load weights repeatedly
            layer.attn_backend = packing(layer.attn_backend, self.token_bytes)

    def _join_layers(self) -> None:
        """Join the attention layers, if none has done so itself.

        vLLM before 0.32 does not call `process_weights_after_loading` for the attention layers of
        its modeling backend for transformers, because they are not modules of the model.
        """
        if self._layer is None:
            for layer in attention_layers(self._context).values():
                if isinstance(layer.impl, PluginAttention) and layer.impl.codes is self:
                    self.join(layer.impl, self._context)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the class of the attention layer's backend."""
        self._join_layers()
        backend: type[AttentionBackend] = self._layer.attn_backend
        return backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        """Return None, because this layer has no pages of its own. vLLM asks this layer before the
        attention layer."""
        self._join_layers()


def with_heads(pages: Tensor) -> Tensor:
    """Return pages `[blocks, G, tokens, C]`. vLLM gives a layer of multi-head latent attention
    pages without the dimension of KV heads."""
    return pages[:, None] if pages.ndim == 3 else pages


@cache
def packing(backend: Any, token_bytes: int) -> type[AttentionBackend]:
    """Return an attention backend whose pages also contain codes.

    vLLM asks the backend of a layer for the size of its pages. So layers with codes of different
    sizes need different classes.

    Args:
        backend: The plug-in's backend class.
        token_bytes: Number of bytes for the codes of each token of a KV head.
    """

    class Packing(backend):
        """The backend of layers whose codes are in the same pages as their keys and values."""

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            """Return vLLM's specification of a page, with room for codes."""
            found = super().customize_spec(spec)
            return replace(found, state_content_bytes=found.state_content_size_bytes + token_bytes)

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
            """Return the supported block sizes: all multiples of 256 tokens."""
            return [MultipleOf(BLOCK)]

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
            """Return the orders of dimensions in which a head's part of a page is contiguous."""
            layouts = kv_cache_interface.KVCacheLayout
            return layouts.LBHNC, layouts.BLHNC

        @staticmethod
        def get_builder_cls() -> Any:
            """Return the class that builds the metadata of a batch and counts its steps."""
            return counting(backend.get_builder_cls())

    Packing.__qualname__ = f"Packing{token_bytes}"  # vLLM compares backends by their names
    return Packing
