"""Copy a filled cache of transformers into the layers of an `IndexCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from kvindex.core import check
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.layer import IndexedLayer
from kvindex_adapters.hf.cache.layer_kinds import ChosenLayer, HybridLayer
from kvindex_adapters.hf.cache.sliding import SlidingLayer

ROWS = ("keys", "values")


def check_past(
    past: object, ids: object, attention_mask: object
) -> tuple[Tensor | None, Tensor | None]:
    """Check the arguments of `IndexCache.from_cache`.

    Args:
        past: The filled cache.
        ids: Token ids, int64 `[B, N]` (or `[N]` for one sequence), or None.
        attention_mask: `[B, N]`, 0 for padding, or None.

    Returns:
        Token ids int64 `[B, N]`, or None. And a mask, bool `[B, N]`, False for padding, or None if
        no token is padding.

    Raises:
        TypeError: `past` is not a `DynamicCache`, or another argument is not a tensor.
        ValueError: `past` is empty, or the shape of another argument does not match `past`.
    """
    layers = getattr(past, "layers", None)
    if not isinstance(past, DynamicCache) or not layers or any(map(_is_indexed, layers)):
        raise TypeError(
            f"past: got {type(past).__name__}, allowed is a DynamicCache that a model has filled; "
            "to copy a cache of attach(), call its method fork()"
        )
    length = past.get_seq_length()
    check.at_least("past.get_seq_length()", length, 1)
    rows = [getattr(layer, "keys", None) for layer in layers]
    batch = next((len(keys) for keys in rows if isinstance(keys, Tensor)), 1)
    sizes: dict[str, int | None] = {"B": batch, "N": length}
    if ids is not None:
        if isinstance(ids, Tensor) and ids.ndim == 1 and batch == 1:
            ids = ids[None]
        ids = check.tensor("ids", ids, sizes, torch.int64)
    if attention_mask is None:
        return ids, None
    mask = check.tensor("attention_mask", attention_mask, sizes)
    return ids, None if bool(mask.all()) else mask.bool()


def fill(
    layers: Sequence[Any],
    past: DynamicCache,
    probe: Sequence[Any],
    ids: Tensor | None,
    valid: Tensor | None,
) -> None:
    """Copy the contents of `past` into the empty layers of an `IndexCache`.

    Args:
        layers: The empty layers. After an error they must not be used.
        past: The filled cache.
        probe: Other layers of the same classes, filled by a run of the model on two tokens. They
            show which shapes, dtypes and devices the model requires.
        ids: Token ids, int64 `[B, N]`, or None.
        valid: Bool `[B, N]`, False for padding, or None.

    Raises:
        ValueError: A layer of `past` does not match this model.
    """
    length = past.get_seq_length()
    if len(past.layers) > len(layers):
        got = len(past.layers)
        raise ValueError(f"past: got a cache of {got} layers, but the model has {len(layers)}")
    for number, (layer, like) in enumerate(zip(layers, probe, strict=True)):
        if not _has_tokens(like):
            continue  # this layer uses the keys of another layer
        if number >= len(past.layers) or not _has_tokens(past.layers[number]):
            raise ValueError(
                f"past: layer {number}: got 0 tokens, but other layers of this cache have {length} "
                "tokens"
            )
        try:
            _fill(layer, past.layers[number], like, length, ids, valid)
        except ValueError as error:
            raise type(error)(f"past: layer {number}: {error}") from error


def _fill(
    layer: Any, given: Any, like: Any, length: int, ids: Tensor | None, valid: Tensor | None
) -> None:
    if isinstance(layer, ChosenLayer):
        raise UnsupportedError(
            "got a layer with a trained indexer, and the keys of this indexer cannot be copied; do "
            "not pass a filled cache, but run the model on the prompt inside attach()"
        )
    kind = _kind(layer, given)
    if kind is None:
        raise ValueError(f"got a {type(given).__name__}, allowed is a {_source_class(layer)}")
    if kind is DynamicSlidingWindowLayer:
        _check_rows(given, like)
        newest = max(layer.sliding_window - 1, 1)
        layer.lazy_initialization(given.keys, given.values)
        for name in ROWS:
            setattr(layer, name, getattr(given, name)[:, :, -newest:].detach().clone())
        layer.cumulative_length = given.get_seq_length()
    elif isinstance(layer, IndexedLayer):
        _fill_index(layer, given, like, ids, valid)
    else:
        _copy(layer, given, like)
    if isinstance(layer, DynamicLayer | IndexedLayer) and layer.get_seq_length() != length:
        raise ValueError(
            f"got {layer.get_seq_length()} tokens in the layer, but the cache has {length} tokens"
        )


def _fill_index(
    layer: IndexedLayer, given: Any, like: IndexedLayer, ids: Tensor | None, valid: Tensor | None
) -> None:
    assert like.attention is not None
    geometry = like.attention.index.geometry.options()
    geometry.pop("rope")  # `layer.make` sets the frequencies of the attached model
    keys, values = given.keys, given.values
    if geometry.get("value_in_key"):  # `keys` contains the latents, `values` the rotated keys
        keys, values = torch.cat([keys, values], dim=-1), keys
    made = layer.make(**geometry)
    made.append(keys, values, valid=None if valid is None else valid.to(keys.device))
    if ids is not None:
        made.index.observe_tokens(ids.to(keys.device), first=0)
    if isinstance(layer, HybridLayer):
        _copy(layer, given, like)
    layer.attention = made


def _copy(layer: Any, given: Any, like: Any) -> None:
    """Copy the attributes of a transformers layer, except keys and values that are in an index."""
    skipped = {*IndexedLayer.ours, *ROWS, "is_initialized"} if _is_indexed(layer) else set()
    for name, value in vars(given).items():
        if name not in skipped:
            _check_like(name, value, vars(like).get(name))
            setattr(layer, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value


def _check_like(name: str, value: Any, like: Any) -> None:
    """Check the shape, dtype and device of a tensor that is to be copied into a layer.

    Raise ValueError if they differ from those of `like`, the tensor that the model itself made when
    it was run on two tokens.
    """
    if isinstance(value, dict) and isinstance(like, dict):
        for key, one in value.items():
            _check_like(f"{name}[{key!r}]", one, like.get(key))
    elif isinstance(like, Tensor):
        shape: dict[str, int | None] = dict.fromkeys(map(str, range(like.ndim)))
        axes = shape if name not in ROWS else ("1", "3")
        shape |= {axis: like.shape[int(axis)] for axis in axes if axis != "0"}
        check.tensor(name, value, shape, like.dtype, like.device)


def _check_rows(given: Any, like: Any) -> None:
    for name in ROWS:
        _check_like(name, getattr(given, name), getattr(like, name))


def _kind(layer: Any, given: Any) -> type | None:
    """Return the transformers class whose attributes are copied from one cache layer to another.

    Args:
        layer: Empty layer of an `IndexCache`, to which attributes are copied.
        given: Layer of the user's `DynamicCache`, from which they are copied.

    Returns:
        The class, or None if `given` is not a layer of the kind that `layer` replaces.
    """
    kind = type(given)
    if isinstance(layer, SlidingLayer) or type(layer) is DynamicSlidingWindowLayer:
        window = getattr(given, "sliding_window", layer.sliding_window)
        whole = kind is DynamicLayer  # a cache made without a configuration stores all tokens
        same = kind is DynamicSlidingWindowLayer and window == layer.sliding_window
        return DynamicSlidingWindowLayer if whole or same else None
    if isinstance(layer, HybridLayer):
        return kind if kind is LinearAttentionAndFullAttentionLayer else None
    wanted = DynamicLayer if isinstance(layer, IndexedLayer) else type(layer)
    return kind if kind is wanted else None


def _source_class(layer: Any) -> str:
    """Return, for an error message, the class that the layer of `past` must have.

    `past` is the cache whose tokens are taken over. `layer` is the layer that receives the tokens.
    """
    if isinstance(layer, SlidingLayer) or type(layer) is DynamicSlidingWindowLayer:
        return f"DynamicSlidingWindowLayer of {layer.sliding_window} tokens, or a DynamicLayer"
    if isinstance(layer, HybridLayer):
        return LinearAttentionAndFullAttentionLayer.__name__
    return "DynamicLayer" if isinstance(layer, IndexedLayer) else type(layer).__name__


def _is_indexed(layer: Any) -> bool:
    return isinstance(layer, IndexedLayer)


def _has_tokens(layer: Any) -> bool:
    """Return True if a layer contains tokens."""
    if isinstance(layer, IndexedLayer):
        return layer.attention is not None
    if isinstance(layer, DynamicLayer):
        return layer.get_seq_length() > 0
    return True
