"""Recipes: JSON from which an equal, empty index, wrapper or layer can be made."""

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
no more dimensions, and making an index with 2^20 dimensions would take minutes."""

T = TypeVar("T")


def field(value: Any, name: str, kind: type[T], *, where: str) -> T:
    """Return a field of a JSON object after a check of its type.

    Args:
        value: An object that should have the field. Any type is allowed.
        name: The field's name.
        kind: The Python type of its JSON value.
        where: The object's name in error messages.

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
    """Return the options of a saved geometry, without its device.

    The sizes are compared with the rows of the index's state. Nothing is allocated that depends on
    sizes in the file.

    Args:
        value: JSON that `as_json` made of `Geometry.options()`.
        row_codec: Name of the index's row codec, or None if it is not known.
        state: The index's state, or its outline.

    Raises:
        ValueError: A field is missing, unknown or of another type, or the rows have another size.
    """
    named = {name: field(value, name, int, where="geometry") for name in SIZES}
    known = {part.name for part in dataclasses.fields(Geometry)} - {"device"}
    for name in [*(known - {"value_in_key"} - value.keys()), *(value.keys() - known)]:
        got, allowed = ("none", "one") if name in known else ("one", "none")
        raise ValueError(f"geometry.{name}: got {got}, allowed is {allowed}")
    for name, size in named.items():
        if not 1 <= size <= MOST_DIM:
            raise ValueError(f"geometry.{name}: got {size}, allowed is 1 to {MOST_DIM}")
    try:
        options = {name: from_json(_OF_GEOMETRY.get(name, Any), one) for name, one in value.items()}
        geometry = Geometry.of(**options)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"geometry: got one that cannot be read ({error!r}), allowed is what save() made"
        ) from error
    rows = state.get("rows")
    if rows is not None and row_codec is not None:
        heads, nbytes = geometry.kv_heads, codec(row_codec, geometry).row_bytes
        if rows.ndim != 4 or (rows.shape[1], rows.shape[3]) != (heads, nbytes):
            raise ValueError(
                f"state['rows']: got {list(rows.shape)}, allowed by the geometry is [B, {heads}, "
                f"N, {nbytes}]"
            )
    return options


SIZES = ("q_heads", "kv_heads", "head_dim", "value_dim")

_OF_GEOMETRY: dict[str, Any] = {"rope": Tensor | None, "dtype": torch.dtype}


def class_name(kind: type) -> str:
    """Return the name of a class as `module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def as_json(value: Any) -> Any:
    """Return an option as JSON, for `from_json`.

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
    """Return the option of type `hint` that `as_json` turned into `value`."""
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
    """Return the dataclass that `as_json` turned into `value`.

    Raises ValueError for a field that is missing, unknown or of another type.
    """
    hints = get_type_hints(kind)
    known = {part.name for part in dataclasses.fields(kind)}
    for name in sorted(known ^ value.keys()):
        got, allowed = ("none", "one") if name in known else ("one", "none")
        raise ValueError(f"{kind.__name__}.{name}: got {got}, allowed is {allowed}")
    try:
        return _made(kind, value, hints)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{kind.__name__}: got fields that do not fit ({error!r}), allowed is what save() made"
        ) from error


def _made(kind: Any, value: Mapping[str, Any], hints: Mapping[str, Any]) -> Any:
    return kind(**{name: from_json(hints.get(name, Any), part) for name, part in value.items()})
