"""Make the attention of each layer: through an index, or to all tokens."""

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
    """Make one attention object per layer, without tokens.

    Args:
        config: Sizes of the model.
        ropes: Rotary frequencies of each layer.
        like: A weight of the model. Keys and values get its dtype and device.
        options: Options of `attach`, or None for full attention in all layers.

    Raises:
        ValueError: An option does not fit the model.
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
    """Return the model's sizes that `kvindex.create` needs for the index of a layer."""
    sizes = dict(q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    where = dict(dtype=like.dtype, device=like.device)
    return {**sizes, "value_dim": config.head_dim, "scale": config.scale, **where}
