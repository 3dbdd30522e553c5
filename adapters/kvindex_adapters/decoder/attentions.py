"""Make the attention object of each model layer: with an index, or with full attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.layer_options import LayerOptions, Ropes
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.hf.unsupported import check_dense


def make_attentions(
    config: DecoderConfig, ropes: Ropes, like: Tensor, options: LayerOptions | None
) -> list[AttentionLayer | DenseAttention]:
    """Make one attention object per model layer. The objects contain no tokens yet.

    Args:
        config: Sizes of the model.
        ropes: Inverse rotary frequencies of each layer.
        like: Any weight of the model. Keys and values get the dtype and device of this tensor.
        options: Options of `kvhf.attach`, or None for full attention in all layers.

    Raises:
        ValueError: A value in `options` is wrong or does not suit the model.
    """
    numbers = list(range(config.layers))
    if options is None:
        return [DenseAttention(config.scale) for _ in numbers]
    check_dense(options.dense_layers, len(numbers), numbers, {})
    indexed = {i: rope for i, rope in ropes.items() if i not in options.dense_layers}
    geometry = _geometry(config, like)
    options.probe(indexed, lambda number: geometry)
    return [
        options.make(indexed, i, **geometry) if i in indexed else DenseAttention(config.scale)
        for i in numbers
    ]


def _geometry(config: DecoderConfig, like: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of `kvindex.create` that the model determines."""
    sizes = dict(q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    where = dict(dtype=like.dtype, device=like.device)
    return {**sizes, "value_dim": config.head_dim, "scale": config.scale, **where}
