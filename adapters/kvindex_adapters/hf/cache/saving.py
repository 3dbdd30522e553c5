"""Save a cache to a folder: its layers, the ids of its tokens, and the identity of its model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvindex.storage.layout import TensorSpec, check_layout
from kvindex.storage.recipe import as_json, field, geometry_from
from kvindex.storage.safetensors import DTYPES
from kvindex.storage.saved import SavedFolder, save_folder
from kvindex.storage.state import State, above, below
from kvindex_adapters.common.prompt import (
    Conversation,
    Messages,
    check_messages,
    messages_of,
)
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.layer import IndexedLayer
from kvindex_adapters.hf.cache.sliding import SlidingLayer
from kvindex_adapters.hf.model.identity import check_identity, identity
from kvindex_adapters.hf.model.info import layer_device

KIND = "cache"

TOKENS, PROBE = "tokens", "probe"
"""Names of the files with the token ids and with the probe, which identifies the model."""

MESSAGES = "messages"
"""Name of the tensor with the text of the messages, in the file of the token ids."""


def save_cache(
    folder: str | os.PathLike[str],
    layers: Sequence[Any],
    ids: Tensor | None,
    decoder: nn.Module,
    config: Any,
    conversation: Conversation | None = None,
) -> None:
    """Write a cache's layers to a new folder. One layer at a time is copied.

    Args:
        folder: A new folder.
        layers: The layers of the cache.
        ids: Int64 `[N]`, the ids of its tokens, or None if unknown.
        decoder: The model's decoder.
        config: The model's configuration.
        conversation: Written if its ids are `ids` and its messages can be written as JSON.

    Raises:
        UnsupportedError: A layer has an attribute that is neither a tensor nor a number.
        OSError, ValueError, RuntimeError: As in `kvindex.storage.saved.save_folder`,
            `AttentionLayer.state_dict` and `probe`.
    """
    model, computed = identity(decoder, config)
    about = {
        "model": model,
        "ids": ids is not None,
        "layers": [_described(layer) for layer in layers],
    }
    parts: dict[str, Callable[[], State]] = {
        _name(number): partial(_tensors, layer) for number, layer in enumerate(layers)
    }
    parts[PROBE] = lambda: computed
    if ids is not None:
        parts[TOKENS] = lambda: {"ids": ids, **_as_bytes(messages_of(ids, conversation))}
    save_folder(folder, KIND, about, parts)


def open_cache(folder: str | os.PathLike[str]) -> SavedFolder:
    """Open a saved cache without reading its tensors. Raises as `SavedFolder.open`."""
    return SavedFolder.open(folder, [KIND])


def load_cache(
    folder: str | os.PathLike[str], layers: Sequence[Any], decoder: nn.Module, config: Any
) -> tuple[Tensor | None, Conversation | None]:
    """Fill the empty layers of a cache from a saved folder.

    Args:
        folder: A folder that `save_cache` has written.
        layers: The empty layers. They must not be used if this raises an error.
        decoder: The model's decoder.
        config: The model's configuration.

    Returns:
        Ids int64 `[N]` of the tokens, and their conversation; each is None if unknown.

    Raises:
        ValueError: The folder has changed since it was saved, or belongs to another model or
            another index.
        RuntimeError: The model fails, as in `probe`.
    """
    saved = open_cache(folder)
    of_layers = field(saved.about, "layers", list, where="about")
    has_ids = field(saved.about, "ids", bool, where="about")
    try:
        model = field(saved.about, "model", dict, where="about")
        check_identity(model, partial(saved.part, PROBE), decoder, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"about.model: got fields that cannot be compared ({error!r}), allowed are the fields "
            "that save() wrote"
        ) from error
    if len(of_layers) != len(layers):
        got = len(of_layers)
        raise ValueError(f"folder: got a cache of {got} layers, allowed is {len(layers)}")
    for number, (layer, described) in enumerate(zip(layers, of_layers, strict=True)):
        device = layer_device(decoder, number)
        try:
            _restore(layer, described, saved, _name(number), device)
        except ValueError as error:
            raise ValueError(
                f"cache: layer {number} of {str(folder)!r} does not fit: {error}"
            ) from (error)
    lengths = {len(layer.attention) for layer in layers if _attention(layer) is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"folder: got {str(folder)!r}, whose layers store {sorted(lengths)} tokens, allowed is "
            "the same number in all layers"
        )
    if not has_ids:
        return None, None
    tokens, length = saved.part(TOKENS), max(lengths, default=None)
    layout = {
        "ids": TensorSpec("n" if length is None else str(length), torch.int64, least=0),
        MESSAGES: TensorSpec("m", torch.uint8, optional=True),
    }
    check_layout(layout, tokens, {})
    messages = _from_bytes(tokens[MESSAGES]) if MESSAGES in tokens else None
    return tokens["ids"], None if messages is None else Conversation(tokens["ids"], messages)


def _as_bytes(messages: Messages | None) -> State:
    """Convert messages to a tensor of bytes; {} if they are unknown or not possible as JSON."""
    if messages is None:
        return {}
    try:
        text = json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return {}  # with images, for example; the conversation can still be continued by its ids
    return {MESSAGES: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _from_bytes(text: Tensor) -> Messages:
    """Convert the tensor of `_as_bytes` to messages. Raises ValueError for other tensors."""
    try:
        return check_messages(json.loads(text.numpy().tobytes()))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"folder: got messages that changed since they were saved: {error}") from (
            error
        )


def _name(number: int) -> str:
    return f"layer-{number:03}"


# Saving and restoring one layer: its attributes, and its attention layer if it has an index


def _described(layer: Any) -> dict[str, Any]:
    """Describe a layer for JSON: class, attributes, and the geometry of its index if it has one."""
    described = {"class": _class(layer), "attributes": _packed(_attributes(layer), {})}
    if isinstance(layer, IndexedLayer) and layer.attention is not None:
        geometry = layer.attention.index.geometry.options()
        for name in ("device", "rope"):  # the attached model determines them
            geometry.pop(name)
        described["geometry"] = {name: as_json(value) for name, value in geometry.items()}
    return described


def _tensors(layer: Any) -> State:
    state: State = {}
    _packed(_attributes(layer), state)
    if isinstance(layer, IndexedLayer) and layer.attention is not None:
        state |= above("attention", layer.attention.state_dict())
    return state


def _attention(layer: Any) -> Any:
    return layer.attention if isinstance(layer, IndexedLayer) else None


def _restore(
    layer: Any, described: Any, saved: SavedFolder, part: str, device: torch.device
) -> None:
    """Restore an empty layer from the results of `_described` and `_tensors`."""
    kind = field(described, "class", str, where="layer")
    if kind != _class(layer):
        raise ValueError(
            f"layer: got a {kind}, allowed is {_class(layer)} "
            "(attach(dense_layers=…) determines which layers have an index)"
        )
    made = None
    if "geometry" in described:
        if not isinstance(layer, IndexedLayer):
            raise ValueError(f"layer.geometry: got one, allowed is none of a {kind}")
        sizes = field(described, "geometry", dict, where="layer") | {"rope": None}
        geometry = geometry_from(sizes, None, {})
        geometry.pop("rope")  # the attached model determines it
        made = layer.make(**geometry, device=device)
        made.check_state(
            below("attention", saved.outline(part))
        )  # a mismatch raises before a large file is read
    state = saved.part(part)
    if made is not None:
        made.load_state_dict(below("attention", state))
        layer.attention = made
    values = _unpacked(field(described, "attributes", dict, where="layer"), state, device)
    _check_attributes(layer, values)
    for name, value in values.items():
        setattr(layer, name, value)


def _check_attributes(layer: Any, values: Any) -> None:
    """Raise ValueError unless values are attributes of a layer, with keys and values that fit."""
    if not isinstance(values, dict):
        raise ValueError(f"layer.attributes: got {values!r}, allowed is a dict")
    methods = {
        name for kind in type(layer).__mro__ for name, part in vars(kind).items() if callable(part)
    }
    for name in values:
        if not isinstance(name, str) or name in methods:
            raise ValueError(f"layer.attributes: got {name!r}, allowed are names of its state")
    rows = [values[name] for name in ("keys", "values") if values.get(name) is not None]
    fits = [isinstance(part, Tensor) and part.ndim == 4 for part in rows]
    if rows and not (len(rows) == 2 and all(fits) and rows[0].shape[:3] == rows[1].shape[:3]):
        got = [list(part.shape) if isinstance(part, Tensor) else part for part in rows]
        raise ValueError(
            f"layer.keys, layer.values: got {got}, allowed are tensors [B, G, N, D] and "
            "[B, G, N, Dv], or neither"
        )


def _class(layer: Any) -> str:
    return SlidingLayer.saved_as if isinstance(layer, SlidingLayer) else type(layer).__name__


def _attributes(layer: Any) -> dict[str, Any]:
    if isinstance(layer, SlidingLayer):
        return layer.attributes()
    ours = IndexedLayer.ours if isinstance(layer, IndexedLayer) else frozenset()
    return {name: value for name, value in vars(layer).items() if name not in ours}


def _packed(value: Any, state: State, name: str = "own") -> Any:
    """Convert a value to JSON. Tensors are put into `state`, and replaced by their names there."""
    if isinstance(value, Tensor):
        state[name] = value
        return {"tensor": name}
    if isinstance(value, torch.device):
        return {"device": "the layer's"}
    if isinstance(value, torch.dtype):
        return {"dtype": as_json(value)}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(one, state, f"{name}.{key}")] for key, one in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(
        f"cache: got a layer whose {name} is a {type(value).__name__}, allowed to be saved are "
        "tensors and numbers"
    )


def _unpacked(value: Any, state: State, device: torch.device) -> Any:
    """Convert the result of `_packed` back to the value."""
    if not isinstance(value, dict):
        return value
    ((kind, one),) = value.items() if len(value) == 1 else ((None, value),)
    if kind == "tensor" and isinstance(one, str) and one in state:
        return state[one].to(device)
    if kind == "dict" and isinstance(one, list) and all(_is_item(part) for part in one):
        return {key: _unpacked(part, state, device) for key, part in one}
    if kind == "device":
        return device
    if kind == "dtype" and isinstance(one, str) and one in DTYPES:
        return DTYPES[one]
    raise ValueError(
        f"layer.attributes: got {value}, allowed is a tensor of the file, a dtype, a device or a "
        "dict of these"
    )


def _is_item(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and isinstance(part[0], str | int)
