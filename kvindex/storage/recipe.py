"""Recipes: JSON that describes how to create an empty index, wrapper or layer.

A recipe contains the class, the geometry and the configuration.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.storage.codecs import codec
from kvindex.storage.safetensors import DTYPES, NAMES

Recipe = dict[str, Any]
"""The result of `recipe()` of an index, a wrapper or a layer."""


MOST_DIM = 2**12
"""Largest number of dimensions or heads that a saved index may have. `core.check.LARGEST` assumes
no more dimensions, and creating an index with 2^20 dimensions would take minutes."""

T = TypeVar("T")


def field(value: Any, name: str, kind: type[T], *, where: str) -> T:
    """Return a field of a JSON object. Raise ValueError if it is missing or has a wrong type.

    Args:
        value: An object that should have the field. Any type is allowed.
        name: Name of the field.
        kind: Python type of the field's JSON value.
        where: Name of the object in error messages.

    Raises:
        ValueError: The field is missing or has another type.
    """
    found = value.get(name) if isinstance(value, Mapping) else None
    right = isinstance(found, kind) and (kind is bool or not isinstance(found, bool))
    if not right:
        got = "none" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"{where}.{name}: got {got}, allowed is a {kind.__name__}")
    return found  # type: ignore[return-value]  # which `right` says


def geometry_from(value: Any, row_codec: str | None, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved geometry as keyword arguments for the constructor of an index.

    The device is not included. The sizes in the file are not trusted. They are compared with the
    shape of the stored keys and values in `state`, and they do not determine how much memory is
    allocated.

    Args:
        value: JSON that `as_json` made of `Geometry.options()`.
        row_codec: Name of the index's row codec, or None if it is not known.
        state: The saved state of the index, possibly with tensors on the meta device.

    Raises:
        ValueError: A field is missing, unknown or of another type, or the rows have another size.
    """
    named = {name: field(value, name, int, where="geometry") for name in SIZES}
    known = {part.name for part in dataclasses.fields(Geometry)} - {"device"}
    for name in [*(known - {"value_in_key"} - value.keys()), *(value.keys() - known)]:
        got = "no value, but it is required" if name in known else "an unknown field"
        raise ValueError(f"geometry.{name}: got {got}")
    for name, size in named.items():
        if not 1 <= size <= MOST_DIM:
            raise ValueError(f"geometry.{name}: got {size}, allowed is 1 to {MOST_DIM}")
    try:
        options = {name: from_json(_OF_GEOMETRY.get(name, Any), one) for name, one in value.items()}
        geometry = Geometry.of(**options)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"geometry: got values that cannot be read ({error!r}); only folders that save() wrote "
            "can be loaded"
        ) from error
    rows = state.get("rows")
    if rows is not None and row_codec is not None:
        heads, nbytes = geometry.kv_heads, codec(row_codec, geometry).row_bytes
        if rows.ndim != 4 or (rows.shape[1], rows.shape[3]) != (heads, nbytes):
            raise ValueError(
                f"state['rows']: got shape {list(rows.shape)}, allowed with this geometry is "
                f"[B, {heads}, N, {nbytes}]"
            )
    return options


SIZES = ("q_heads", "kv_heads", "head_dim", "value_dim")

_OF_GEOMETRY: dict[str, Any] = {"rope": Tensor | None, "dtype": torch.dtype}


def class_name(kind: type) -> str:
    """Return module and name of a class in the form `module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def as_json(value: Any) -> Any:
    """Convert an option to JSON, which `from_json` converts back.

    Raises TypeError unless it is a number, text, None, a tensor, a dtype, or a tuple or dataclass
    of these.
    """
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        text = base64.b64encode(raw).decode()
        return {"dtype": NAMES[value.dtype], "shape": list(value.shape), "bytes": text}
    if isinstance(value, torch.dtype):
        return NAMES[value]
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(vars(value)[field.name]) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [as_json(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"recipe: got {value!r}, allowed are numbers, text, None, tensors, tuples and dataclasses "
        "of these"
    )


def from_json(hint: Any, value: Any) -> Any:
    """Convert JSON from `as_json` back to an option, given the option's annotated type `hint`."""
    kinds = get_args(hint) or (hint,)
    if isinstance(value, list):
        return tuple(from_json(Any, part) for part in value)
    if isinstance(value, str) and torch.dtype in kinds:
        return DTYPES[value]
    if not isinstance(value, Mapping):
        return value
    if Tensor in kinds:
        raw = bytearray(base64.b64decode(value["bytes"]))
        return torch.frombuffer(raw, dtype=DTYPES[value["dtype"]]).view(value["shape"])
    (kind,) = (one for one in kinds if dataclasses.is_dataclass(one))
    return dataclass_from(kind, value)


def dataclass_from(kind: Any, value: Mapping[str, Any]) -> Any:
    """Convert JSON from `as_json` back to a dataclass.

    Raises ValueError if a field is missing, unknown or of another type.
    """
    hints = get_type_hints(kind)
    known = {part.name for part in dataclasses.fields(kind)}
    for name in sorted(known ^ value.keys()):
        got = "no value, but it is required" if name in known else "an unknown field"
        raise ValueError(f"{kind.__name__}.{name}: got {got}")
    try:
        return _made(kind, value, hints)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{kind.__name__}: got values that cannot be read ({error!r}); only folders that "
            "save() wrote can be loaded"
        ) from error


def _made(kind: Any, value: Mapping[str, Any], hints: Mapping[str, Any]) -> Any:
    return kind(**{name: from_json(hints.get(name, Any), part) for name, part in value.items()})
