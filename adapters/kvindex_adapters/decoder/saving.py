"""Save and load sessions, in the same folder format as caches of `kvhf.attach`."""

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
    """Save the layers and token ids of one sequence to a new folder.

    Args:
        folder: Path of a folder that does not exist yet.
        attentions: The attention object of each layer, which contains the keys and values to save.
        ids: Ids of the saved tokens, int64 `[N]`, or None if unknown.
        model: The model that read the tokens.
        conversation: The messages that the saved tokens encode, or None if unknown.

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
    """Load a saved sequence into empty layers.

    Args:
        folder: A folder that `save_session` or a cache of `kvhf.attach` has written.
        attentions: The attention object of each layer, which must be empty.
        model: The model that read the tokens.

    Returns:
        Ids int64 `[N]` of the tokens, and their conversation; each is None if unknown.

    Raises:
        ValueError, OSError, RuntimeError: See `kvindex_adapters.hf.cache.saving.load_cache`. After
            an error, some layers may already contain tokens.
    """
    layers = [_cache_layer(attention) for attention in attentions]
    known = load_cache(folder, layers, find_decoder(model), model.config)
    for attention, layer in zip(attentions, layers, strict=True):
        if isinstance(attention, DenseAttention) and isinstance(layer, DynamicLayer):
            attention.append(layer.keys, layer.values)
        if attention.batch_size != 1:
            raise ValueError(
                f"folder: got {str(folder)!r}, which contains {attention.batch_size} sequences; a "
                "session needs a folder with one sequence"
            )
    return known


def _cache_layer(attention: AttentionLayer | DenseAttention) -> IndexedLayer | DynamicLayer:
    """Wrap the tensors of an attention object, without a copy, in a layer of a transformers
    cache."""
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
