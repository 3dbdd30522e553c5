"""Save and load a cache: its layers, its token ids, and the identity of its model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from kvindex import registry
from kvindex.core.capability import capability
from kvindex.core.protocol import KeepsState
from kvindex.layer.attention_layer import SPARSE
from kvindex.storage.layout import TensorSpec, check_layout
from kvindex.storage.recipe import as_json, field, geometry_from
from kvindex.storage.safetensors import DTYPES
from kvindex.storage.saved import SavedFolder, save_folder
from kvindex.storage.state import ABOUT, State, above, below
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
"""Names of two files in the folder: the token ids, and a tensor that identifies the model (the
probe)."""

MESSAGES = "messages"
"""Name of the tensor with the chat messages (JSON as bytes), in the file with the token ids."""


def save_cache(
    folder: str | os.PathLike[str],
    layers: Sequence[Any],
    ids: Tensor | None,
    decoder: nn.Module,
    config: Any,
    conversation: Conversation | None = None,
) -> None:
    """Save the layers of a cache to a new folder.

    Only one layer at a time is copied to host memory.

    Args:
        folder: Path of a folder that does not exist yet.
        layers: The layers of the cache.
        ids: Int64 `[N]`, the ids of the tokens, or None if unknown.
        decoder: The model's decoder.
        config: The model's configuration.
        conversation: The chat messages. They are saved if `conversation.ids` is the tensor `ids`
            and the messages can be converted to JSON.

    Raises:
        UnsupportedError: A layer has an attribute that cannot be saved.
        OSError: The folder exists already, or cannot be written.
        ValueError: The state of an index cannot be saved.
        RuntimeError: The model failed when it was run on a few fixed tokens to identify it.
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
    """Open a saved cache without reading its tensors.

    Raise FileNotFoundError or ValueError if the folder does not contain a saved cache.
    """
    return SavedFolder.open(folder, [KIND])


def saved_index(folder: str | os.PathLike[str]) -> str | None:
    """Return the index with which a cache was saved, with its options, as for `kvindex.create`.

    If the layers have different indexes, it is that of the first layer that has one. Return None if
    no layer has an index, or if the index has no name in the registry.
    """
    saved = open_cache(folder)
    for number, described in enumerate(field(saved.about, "layers", list, where="about")):
        if isinstance(described, dict) and "geometry" in described:
            spec = _spec(below("index", below("attention", saved.outline(_name(number)))))
            return spec if spec is not None and _is_named(spec) else None
    return None


def load_cache(
    folder: str | os.PathLike[str], layers: Sequence[Any], decoder: nn.Module, config: Any
) -> tuple[Tensor | None, Conversation | None]:
    """Load a saved cache into empty layers.

    Args:
        folder: A folder that `save_cache` has written.
        layers: The empty layers. After an error they must not be used.
        decoder: The model's decoder.
        config: The model's configuration.

    Returns:
        Ids int64 `[N]` of the tokens, and the chat messages. Each is None if unknown.

        Raises:
            ValueError: The folder was modified after it was saved, or was saved with another model
                or another index.
            RuntimeError: The model failed when it was run on a few fixed tokens to identify it.
    """
    saved = open_cache(folder)
    of_layers = field(saved.about, "layers", list, where="about")
    has_ids = field(saved.about, "ids", bool, where="about")
    try:
        model = field(saved.about, "model", dict, where="about")
        check_identity(model, partial(saved.part, PROBE), decoder, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"about.model: got fields that cannot be compared ({error!r}); pass a folder that was "
            "not modified after save()"
        ) from error
    if len(of_layers) != len(layers):
        got = len(of_layers)
        raise ValueError(f"folder: got a cache of {got} layers, but the model has {len(layers)}")
    for number, (layer, described) in enumerate(zip(layers, of_layers, strict=True)):
        device = layer_device(decoder, number)
        try:
            _restore(layer, described, saved, _name(number), device)
        except ValueError as error:
            raise ValueError(
                f"folder: got {str(folder)!r}, whose layer {number} cannot be loaded: {error}"
            ) from (error)
    lengths = {length for layer in layers if (length := _length(layer)) is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"folder: got {str(folder)!r}, whose layers have different numbers of tokens "
            f"({sorted(lengths)}); all layers must have the same number"
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
    """Convert messages to JSON in a byte tensor. Return {} if there are no messages, or JSON cannot
    express them."""
    if messages is None:
        return {}
    try:
        text = json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return {}  # for example messages with images; the token ids are saved nevertheless
    return {MESSAGES: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _from_bytes(text: Tensor) -> Messages:
    """Convert the byte tensor of `_as_bytes` to messages. Raise ValueError if it was modified."""
    try:
        return check_messages(json.loads(text.numpy().tobytes()))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"folder: got messages that were modified after save(): {error}") from (
            error
        )


def _name(number: int) -> str:
    return f"layer-{number:03}"


# Save and restore one layer: its attributes, and its attention layer if it has an index


def _described(layer: Any) -> dict[str, Any]:
    """Describe a layer as JSON: its class, its attributes, and the geometry of its index, if it has
    an index."""
    described = {"class": _class(layer), "attributes": _packed(_attributes(layer), {})}
    if isinstance(layer, IndexedLayer) and layer.attention is not None:
        geometry = layer.attention.index.geometry.options()
        for name in ("device", "rope"):  # the attached model determines these two
            geometry.pop(name)
        described["geometry"] = {name: as_json(value) for name, value in geometry.items()}
    return described


def _tensors(layer: Any) -> State:
    state: State = {}
    _packed(_attributes(layer), state)
    if isinstance(layer, IndexedLayer) and layer.attention is not None:
        state |= above("attention", layer.attention.state_dict())
    return state


def _length(layer: Any) -> int | None:
    """Return the number of tokens in a layer. None if the layer does not count them, or if its
    index does not exist yet."""
    if isinstance(layer, IndexedLayer):
        return None if layer.attention is None else len(layer.attention)
    return int(layer.get_seq_length()) if isinstance(layer, DynamicLayer) else None


def _restore(
    layer: Any, described: Any, saved: SavedFolder, part: str, device: torch.device
) -> None:
    """Restore an empty layer from its saved description (`_described`) and tensors (`_tensors`)."""
    kind = field(described, "class", str, where="layer")
    if kind != _class(layer):
        raise ValueError(
            f"layer: got a saved {kind}, but this cache has a {_class(layer)}; pass the same "
            "dense_layers to attach() as for the saved cache"
        )
    made = None
    if "geometry" in described:
        if not isinstance(layer, IndexedLayer):
            raise ValueError(f"layer.geometry: got a geometry for a {kind}, which has no index")
        sizes = field(described, "geometry", dict, where="layer") | {"rope": None}
        geometry = geometry_from(sizes, None, {})
        geometry.pop("rope")  # the attached model determines the rotary frequencies
        made = layer.make(**geometry, device=device)
        outline = below("attention", saved.outline(part))  # the sizes in a large file
        _check_options(made, outline)
        made.check_state(outline)
    state = saved.part(part)
    if made is not None:
        made.load_state_dict(below("attention", state))
        layer.attention = made
    values = _unpacked(field(described, "attributes", dict, where="layer"), state, device)
    _check_attributes(layer, values)
    for name, value in values.items():
        setattr(layer, name, value)


def _check_options(layer: Any, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a saved state belongs to a layer with another index or other sizes, or if
    its tokens were read with sparse attention, and the layer has `prefill="dense"`.

    The error says which option of `attach` to pass. If the options of either layer are unknown,
    there is no error.

    Args:
        layer: The empty `AttentionLayer`.
        state: The saved state of an attention layer.
    """
    index = capability(layer.index, KeepsState)
    saved = {"index": _spec(below("index", state)), **_whose(state).get("layer", {})}
    own: dict[str, Any] = {"index": None if index is None else _spec(index.state_dict())}
    if SPARSE in state:  # tokens that were read densely fit both values of `prefill`
        saved["prefill"] = "sparse"
    for name in ("sink", "local_window", "update_every", "prefill"):
        own[name] = vars(layer)[name]
    for name, value in saved.items():
        if None not in (value, own.get(name)) and value != own[name]:
            option = "--" + name.replace("_", "-")
            how = f"{name}={value!r} to attach(), or {option} {value} to the command"
            if name == "index" and not _is_named(value):
                how = "the same index to attach()"
            raise ValueError(
                f"{name}: got {own[name]!r}, but the folder was saved with {value!r}; pass {how}"
            )


def _whose(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return class and options of the object that a state belongs to. {} if they are unknown."""
    try:
        return dict(json.loads(state[ABOUT].cpu().numpy().tobytes())["whose"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return {}


def _spec(state: Mapping[str, Tensor]) -> str | None:
    """Return name and options of the index that a state belongs to, as for `kvindex.create`.

    Options with their default values are left out, and so are those that a string cannot express.
    For an index that has no name, the name of its class is used. Return None if the state does not
    contain name and options.
    """
    whose = _whose(state)
    if "wrapper" in whose:
        inner = _spec(below("inner", state))
        return None if inner is None else f"{inner}+{_wrapper_name(whose['wrapper'])}"
    try:
        name, kind = _index_name(whose["index"])
        parts = [name] if kind is None else [name, *_options(kind, whose["config"])]
        codec = whose["row_codec"]
    except (KeyError, TypeError, ValueError, AttributeError, ImportError):
        return None
    return ":".join([*parts, *([] if codec == "plain" else [f"row_codec={codec}"])])


def _options(kind: Any, config: Mapping[str, Any]) -> list[str]:
    """Return the shortest list of options, as `name=value`, that gives an index this configuration.

    Args:
        kind: Class of the index.
        config: Name of each field of the configuration -> its value as JSON.
    """
    found = []
    for preset in (None, *kind.presets):
        base = dataclasses.asdict(kind.Config(**({} if preset is None else kind.presets[preset])))
        changed = {
            name: value
            for name, value in config.items()
            if isinstance(value, bool | int | float | str | None) and base[name] != value
        }
        first = [] if preset is None else [f"preset={preset}"]
        found.append([*first, *(f"{name}={value}" for name, value in changed.items())])
    return min(found, key=len)


def _index_name(class_name: str) -> tuple[str, Any]:
    """Return the name and the class of the index whose class has this name.

    If no index has such a class, return `class_name` itself and None.
    """
    for name in registry.usable():
        if name.replace("-", "") == class_name.lower():
            return name, registry.get(name)
    return class_name, None


def _is_named(spec: str) -> bool:
    """Return True if an index, given with its options and wrappers, is in the registry."""
    return re.split(r"[:+]", spec)[0] in registry.usable()


def _wrapper_name(class_name: str) -> str:
    named = {kind.__name__: name for name, kind in registry.wrapper_classes().items()}
    return named.get(class_name, class_name)


def _check_attributes(layer: Any, values: Any) -> None:
    """Check saved attributes of a layer.

    Raises ValueError if `values` is not a dict from names of attributes of `layer` to their values.
    Also raises it if the attributes `keys` and `values` have shapes that do not belong together.
    """
    if not isinstance(values, dict):
        raise ValueError(f"layer.attributes: got {values!r}, allowed is a dict")
    methods = {
        name for kind in type(layer).__mro__ for name, part in vars(kind).items() if callable(part)
    }
    for name in values:
        if not isinstance(name, str) or name in methods:
            raise ValueError(
                f"layer.attributes: got {name!r}, allowed are names of data attributes of "
                f"{type(layer).__name__}"
            )
    rows = [values[name] for name in ("keys", "values") if values.get(name) is not None]
    fits = [isinstance(part, Tensor) and part.ndim == 4 for part in rows]
    if rows and not (len(rows) == 2 and all(fits) and rows[0].shape[:3] == rows[1].shape[:3]):
        got = [list(part.shape) if isinstance(part, Tensor) else part for part in rows]
        raise ValueError(
            f"layer.keys, layer.values: got {got}, allowed are tensors [B, G, N, D] and "
            "[B, G, N, Dv], or None for both"
        )


def _class(layer: Any) -> str:
    return SlidingLayer.saved_as if isinstance(layer, SlidingLayer) else type(layer).__name__


def _attributes(layer: Any) -> dict[str, Any]:
    if isinstance(layer, SlidingLayer):
        return layer.attributes()
    ours = IndexedLayer.ours if isinstance(layer, IndexedLayer) else frozenset()
    return {name: value for name, value in vars(layer).items() if name not in ours}


def _packed(value: Any, state: State, name: str = "own") -> Any:
    """Convert a layer's attribute to a value that JSON can express.

    Each tensor in it is added to the dict `state`, and replaced by its name there.
    """
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
        f"cache: got a layer whose attribute {name} is a {type(value).__name__}; allowed are "
        "tensors, numbers, strings, dtypes, devices, and dicts of these"
    )


def _unpacked(value: Any, state: State, device: torch.device) -> Any:
    """Undo `_packed`: convert the JSON form of a layer's attribute to the attribute."""
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
        f"layer.attributes: got {value}, allowed is the name of a tensor in the file, a dtype, a "
        "device, or a dict of these"
    )


def _is_item(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and isinstance(part[0], str | int)
