"""Save and load sessions. The folders have the same format as those of `attach`'s caches."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt import Conversation
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.hf.cache.layer import IndexedLayer
from kvindex_adapters.hf.cache.padding import Padding
from kvindex_adapters.hf.cache.saving import load_cache, save_cache
from kvindex_adapters.hf.model.info import find_decoder


def save_session(
    folder: str | os.PathLike[str],
    attentions: Sequence[AttentionLayer | DenseAttention],
    ids: Tensor | None,
    model: PreTrainedModel,
    conversation: Conversation | None = None,
) -> None:
    """Write layers that store tokens of one sequence to a new folder, and their ids, if known.

    Args:
        folder: A new folder.
        attentions: One per layer, with tokens.
        ids: Int64 `[N]`, or None if unknown.
        model: The model that read the tokens.
        conversation: The messages of these ids, or None.

    Raises:
        ValueError, OSError, RuntimeError: See `kvindex_adapters.hf.cache.saving.save_cache`.
    """
    layers = [_cache_layer(attention) for attention in attentions]
    save_cache(folder, layers, ids, find_decoder(model), model.config, conversation)


def load_session(
    folder: str | os.PathLike[str],
    attentions: Sequence[AttentionLayer | DenseAttention],
    model: PreTrainedModel,
) -> tuple[Tensor | None, Conversation | None]:
    """Fill layers that have no tokens yet from a saved folder.

    Args:
        folder: A folder of `save_session`, or of a cache.
        attentions: One per layer, without tokens.
        model: The model that read the tokens.

    Returns:
        Ids int64 `[N]` of the tokens, and their conversation; each is None if unknown.

    Raises:
        ValueError, OSError, RuntimeError: See `kvindex_adapters.hf.cache.saving.load_cache`. Some
            layers may then contain tokens.
    """
    layers = [_cache_layer(attention) for attention in attentions]
    known = load_cache(folder, layers, find_decoder(model), model.config)
    for attention, layer in zip(attentions, layers, strict=True):
        if isinstance(attention, DenseAttention) and isinstance(layer, DynamicLayer):
            attention.append(layer.keys, layer.values)
        if attention.batch_size != 1:
            raise ValueError(
                f"folder: got {str(folder)!r} of {attention.batch_size} sequences, allowed is one"
            )
    return known


def _cache_layer(attention: AttentionLayer | DenseAttention) -> IndexedLayer | DynamicLayer:
    """Make a layer of a transformers cache with the same tensors, without copying them."""
    if isinstance(attention, AttentionLayer):
        indexed = IndexedLayer(lambda **_: attention, Padding())
        indexed.attention = attention if len(attention) else None
        return indexed
    dense = DynamicLayer()
    if len(attention):
        rows = attention.rows
        dense.lazy_initialization(rows.keys, rows.values)
        dense.keys, dense.values = rows.keys, rows.values
    return dense
