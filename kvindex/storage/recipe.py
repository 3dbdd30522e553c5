"""Recipes: how an object is made again, as JSON. Classes by name, tensors of options by bytes."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from kvindex.storage.safetensors import DTYPES, NAMES

Recipe = dict[str, Any]
"""What `recipe()` of an index, a wrapper or a layer gives."""


def class_name(kind: type) -> str:
    """A class as `module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def as_json(value: Any) -> Any:
    """An option as JSON, for `from_json`. Raises TypeError for one that is not of these kinds:

    numbers, text, None, tensors, dtypes, tuples and dataclasses of these.
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
    """The option of type `hint` of which `as_json` gave this."""
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
    """The dataclass of which `as_json` gave this. Raises what making it raises."""
    hints = get_type_hints(kind)
    return kind(**{name: from_json(hints.get(name, Any), part) for name, part in value.items()})
