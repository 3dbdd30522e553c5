"""Conversion of an object's attributes to named tensors (its state), and back.

Names are joined by dots, as in `statistics.observed.queries`. A number becomes a tensor without
dimensions, and an attribute that is None becomes no tensor. The tensor `about` contains JSON text
as uint8: class and options of the object to which the state belongs, and dtype and shape of each
tensor. Loading a state into another kind of object raises ValueError.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from kvindex.storage.columns import Columns, Valid
from kvindex.storage.layout import Layout, TensorSpec, scalar

State: TypeAlias = dict[str, Tensor]

OnHost: TypeAlias = Annotated[Tensor, "host"]
"""A tensor that is always on the CPU, even if the index is on another device."""

ABOUT = "about"


class NamedState:
    """Base of objects that save some of their attributes as named tensors.

    The class must annotate the types of these attributes. Allowed are `Tensor`, `OnHost`, `bool`,
    `int`, `float`, tuples, dataclasses, `Columns` and `Valid`, and each of these with `| None`.
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that this class adds to the state of its base classes."""

    def _packed(self) -> State:
        """Return the saved attributes as tensors, under their names without leading underscores."""
        state: State = {}
        for name in self._names():
            state |= packed(name.lstrip("_"), vars(self)[name])
        return state

    def _unpack(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Set the attributes from tensors that `_packed` returned."""
        hints = get_type_hints(type(self), include_extras=True)
        for name in self._names():
            setattr(self, name, unpacked(name.lstrip("_"), hints[name], state, device))

    def _layout_of_attributes(self, state: Mapping[str, Tensor]) -> Layout:
        """Return the required shape and dtype of each tensor of the saved attributes.

        They follow from the annotated types of the attributes.
        """
        hints = get_type_hints(type(self), include_extras=True)
        layout: Layout = {}
        for name in self._names():
            layout |= annotated(name.lstrip("_"), hints[name], state)
        return layout

    def _names(self) -> list[str]:
        kinds = reversed(type(self).__mro__)
        return [name for kind in kinds for name in vars(kind).get("statistics", ())]


def packed(name: str, value: Any) -> State:
    """Convert a value to tensors called `name`, or `name.part` if the value has several parts."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Valid):
        return packed(name, None if value.flags is None else value.flags.clone())
    if isinstance(value, bool | int | float):
        return {name: torch.tensor(value, dtype=torch.float64 if type(value) is float else None)}
    if isinstance(value, tuple) and all(isinstance(part, int) for part in value):
        return {name: torch.tensor(value, dtype=torch.int64)}
    state: State = {}
    for part, one in _parts(value):
        state |= packed(f"{name}.{part}", one)
    return state


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Columns):
        return [(part, value[part].clone()) for part in value]  # later appends change the original
    if isinstance(value, tuple):
        return [(str(place), one) for place, one in enumerate(value)]
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def unpacked(name: str, hint: Any, state: Mapping[str, Tensor], device: torch.device) -> Any:
    """Convert tensors from `packed` back to a value, given the value's annotated type `hint`."""
    origin, inner = get_origin(hint), get_args(hint)
    parts = below(name, state)
    if NoneType in inner:  # X | None
        if name not in state and not parts:
            return None
        (hint,) = (one for one in inner if one is not NoneType)
        return unpacked(name, hint, state, device)
    if origin is Annotated:
        return state[name].cpu()
    if hint is Tensor:
        return state[name].to(device)
    if hint in (bool, int, float):
        return hint(state[name].item())
    if hint is Valid:
        return Valid.of(state[name].to(device)) if name in state else Valid()
    if hint is Columns:
        columns = Columns()
        columns.append({part: tensor.to(device) for part, tensor in parts.items()})
        return columns
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(state[name].tolist())
    if origin is tuple:
        each = enumerate(inner)
        return tuple(unpacked(f"{name}.{place}", one, state, device) for place, one in each)
    hints = get_type_hints(hint, include_extras=True)
    fields = {
        field.name: unpacked(f"{name}.{field.name}", hints[field.name], state, device)
        for field in dataclasses.fields(hint)
    }
    return hint(**fields)


SCALARS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Type of a number -> dtype of its tensor."""


def annotated(name: str, hint: Any, state: Mapping[str, Tensor]) -> Layout:
    """Return the shape and dtype that the saved tensors of an attribute must have.

    name: the attribute's name. The names of its tensors in `state` begin with this name.
    hint: the attribute's annotated type, which determines shapes and dtypes.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if NoneType in inner:  # X | None
        if name not in state and not below(name, state):
            return {}
        (hint,) = (one for one in inner if one is not NoneType)
        return annotated(name, hint, state)
    if origin is Annotated or hint is Tensor:
        return {name: TensorSpec("...")}
    if hint in SCALARS:
        return {name: TensorSpec("", SCALARS[hint])}
    if hint is Valid:
        return {name: TensorSpec("B N", torch.bool, optional=True)}
    if hint is Columns:
        return {f"{name}.{part}": TensorSpec("...") for part in below(name, state)}
    if origin is tuple and inner[-1] is Ellipsis:
        return {name: TensorSpec("n", torch.int64)}
    if origin is tuple:
        parts = [(str(place), one) for place, one in enumerate(inner)]
    else:
        hints = get_type_hints(hint, include_extras=True)
        parts = [(field.name, hints[field.name]) for field in dataclasses.fields(hint)]
    layout: Layout = {}
    for part, one in parts:
        layout |= annotated(f"{name}.{part}", one, state)
    return layout


def above(name: str, state: Mapping[str, Tensor]) -> State:
    """Return the tensors of `state`, with the prefix `name.` added to each name."""
    return {f"{name}.{part}": tensor for part, tensor in state.items()}


def below(name: str, state: Mapping[str, Tensor]) -> State:
    """Return those tensors of `state` whose names begin with `name.`; their names in the result
    lack this prefix."""
    return {
        part.removeprefix(f"{name}."): tensor
        for part, tensor in state.items()
        if part.startswith(f"{name}.")
    }


def length_and_batch(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of tokens `N` and the number of sequences `B` that a state contains.

    A number that the state does not contain is left out. The state of a wrapper contains the state
    of the wrapped index, from which the numbers are then taken.
    """
    while "length" not in state and (inner := below("inner", state)):
        state = inner
    known = (("N", "length"), ("B", "batch"))
    return {letter: scalar(name, state) for letter, name in known if name in state}


# Functions for the tensor `about`, which contains the class and options of the saved object


def signed(whose: Mapping[str, Any], state: State) -> State:
    """Add a tensor with the name "about" to a saved state, for later checks by `check_signed`.

    The tensor contains the class and options of the saved object, and dtype and shape of each
    tensor, as JSON text.

    Args:
        whose: Class and options of the saved object.
        state: The tensors by name.
    """
    text = json.dumps({"whose": _plain(whose), "tensors": _likes(state)}, sort_keys=True)
    return {**state, ABOUT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def extended(state: State, more: State) -> State:
    """Add tensors to a state that `signed` returned, and update its tensor named "about"."""
    whose = json.loads(bytes(state[ABOUT].tolist()))["whose"]
    return signed(whose, {name: t for name, t in (state | more).items() if name != ABOUT})


def check_signed(whose: Mapping[str, Any], state: Any) -> None:
    """Check that a saved state is complete and unchanged, and fits the object that loads it.

    Raise TypeError or ValueError if not.

    Args:
        whose: Class and options of the index or layer that loads the state. They must equal those
            of the object that saved the state.
        state: The tensors by name.
    """
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise TypeError(f"state: got {type(state).__name__}, allowed is a dict of named tensors")
    try:
        about = json.loads(_text(state[ABOUT]))
        owner, likes = dict(about["whose"]), dict(about["tensors"])
    except (KeyError, ValueError, TypeError, RecursionError, NotImplementedError) as error:
        raise ValueError(
            f"state: got no {ABOUT!r} tensor that names its owner; pass the result of state_dict()"
        ) from error
    got, want = _flat(owner), _flat(_plain(whose))
    for name in dict.fromkeys([*want, *got]):
        if got.get(name) != want.get(name):
            raise ValueError(
                f"state: got a state with {name} = {got.get(name)!r}, allowed is {want.get(name)!r}"
            )
    found = _likes({name: tensor for name, tensor in state.items() if name != ABOUT})
    for name in sorted(found.keys() | likes.keys()):
        if found.get(name) != likes.get(name):
            raise ValueError(
                f"state[{name!r}]: got {found.get(name, 'none')}, allowed is "
                f"{likes.get(name, 'none')}, as saved"
            )


def _text(about: Tensor) -> bytes:
    if about.dtype != torch.uint8 or about.ndim != 1 or about.is_meta:
        raise ValueError(f"{about.dtype} {list(about.shape)}")
    return about.cpu().contiguous().numpy().tobytes()


def _likes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state.items()}


def _plain(value: Any) -> Any:
    """Convert a value to JSON, with dtype, shape and a digest in place of a tensor."""
    if isinstance(value, Tensor):
        words = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(words).hexdigest()[:16]}"
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str | NoneType) else str(value)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for part, one in value.items():
        flat |= _flat(one, f"{name}.{part}" if name else part)
    return flat
