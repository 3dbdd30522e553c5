"""`check_layout`: checks the tensors of a saved state before an index loads them.

A saved state may come from a file that someone else wrote, so its contents are not trusted. An
index declares the tensors that it expects (`Hooks._layout`). `check_layout` compares a state with
this declaration: first names, then shapes and dtypes, then numbers. The check allocates no more
memory than the state takes, and changes nothing. For a tensor on the meta device
(`SavedFolder.outline`), it checks only shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Callable[[Mapping[str, Tensor]], bool | Tensor]
"""A function that returns True if the numbers of a state are consistent with each other.

It is called after all shapes have been checked."""


@dataclass(frozen=True)
class TensorSpec:
    """Required shape, dtype and range of numbers for one tensor of a saved state.

    A floating-point tensor must not contain NaN.

    Args:
        axes: The shape, as sizes separated by blanks. A size is a number ("16") or a name ("B"). A
            name without a known size gets its size from the first tensor that uses the name.
            "C<=64" limits the size; "..." at the end stands for any further axes.
        dtype: Required dtype; None for any.
        least: Smallest allowed number.
        most: Largest allowed number.
        infinite: True if the tensor may contain infinity.
        optional: True if the tensor may be missing.
        allowed: What `rule` requires, as the end of the error message "allowed is …".
        rule: A function that compares the numbers of this tensor with those of other tensors.
    """

    axes: str
    dtype: torch.dtype | None = None
    least: float | None = None
    most: float | None = None
    infinite: bool = False
    optional: bool = False
    allowed: str = ""
    rule: Rule | None = None


Layout: TypeAlias = dict[str, TensorSpec]
"""Name of a tensor -> its specification."""


@dataclass(frozen=True)
class StateSizes:
    """Sizes and names of the tensors in a saved state that an index is about to load.

    To check the state, the index derives from these sizes which tensors the state must contain.

    Args:
        batch: Number of sequences, or None before the first append.
        length: Number of tokens.
        counts: Number of valid tokens of each sequence, int64 `[B]`, or None if not known yet.
        state: The tensors by name.
    """

    batch: int | None
    length: int
    counts: Tensor | None
    state: Mapping[str, Tensor]

    def has(self, name: str) -> bool:
        """Return True if the state has a tensor called `name`, or one with the prefix `name.`."""
        return any(other == name or other.startswith(f"{name}.") for other in self.state)

    def units(self, tokens: int) -> str:
        """Return the size of a tensor's axis that has one entry for every `tokens` valid tokens.

        An axis of pages is an example, where `tokens` is the size of a page. The sequence with the
        most valid tokens determines the size. If the number of valid tokens is not known, the
        result is an upper limit ("U<=…").
        """
        if self.counts is None:
            return f"U<={-(-self.length // tokens)}"
        most = int(self.counts.max()) if self.counts.numel() else 0
        return str(-(-most // tokens))


def check_layout(
    layout: Mapping[str, TensorSpec], state: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> None:
    """Raise ValueError if a tensor of a saved state does not meet its `TensorSpec`.

    Args:
        layout: Name -> `TensorSpec` of all tensors that the state may have.
        state: The tensors by name.
        sizes: Name of an axis -> known size.

    Raises:
        ValueError: A tensor is missing, unknown, or does not meet its `TensorSpec`. The message
            names the tensor.
    """
    for name in state.keys() - layout.keys():
        raise ValueError(
            f"state[{name!r}]: got {_described(state[name])}, allowed is no tensor of this name"
        )
    known = dict(sizes)
    for name, spec in layout.items():
        if name in state:
            _check_shape(name, state[name], spec, known)
        elif not spec.optional:
            raise ValueError(f"state[{name!r}]: got none, allowed is {_wanted(spec, known)}")
    for name, spec in layout.items():
        if name in state:
            _check_numbers(name, state[name], spec)
    if any(tensor.is_meta for tensor in state.values()):
        return
    for name, spec in layout.items():
        if name in state and spec.rule is not None and not bool(spec.rule(state)):
            raise ValueError(f"state[{name!r}]: got wrong numbers, allowed is {spec.allowed}")


def scalar(name: str, state: Mapping[str, Tensor], *, least: int = 0, most: int = 2**62) -> int:
    """Return the integer `name` of a saved state, a dict of tensors.

    Raise ValueError if the integer is missing or out of range.
    """
    spec = TensorSpec("", torch.int64, least=least, most=most)
    check_layout({name: spec}, {other: state[other] for other in state if other == name}, {})
    return int(state[name])


def distinct(ids: Tensor) -> Tensor:
    """Return True if no id occurs twice along the last axis of `ids`. The value -1 is not an id."""
    ordered = ids.sort(-1).values
    return ~((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()


def ascending(numbers: Tensor) -> Tensor:
    """Return True if the numbers `[n]` are strictly ascending."""
    return (numbers[1:] > numbers[:-1]).all()


def below(numbers: Tensor, most: Tensor | int) -> bool:
    """Return True if all numbers are less than `most`."""
    return bool((numbers < most).all())


def _check_shape(name: str, tensor: Tensor, spec: TensorSpec, known: dict[str, int]) -> None:
    axes, shape = spec.axes.split(), tensor.shape
    rest = axes[-1:] == ["..."]
    axes = axes[:-1] if rest else axes
    fits = len(shape) == len(axes) or (rest and len(shape) > len(axes))
    for axis, size in zip(axes, shape, strict=False) if fits else ():
        letter, _, most = axis.partition("<=")
        want = int(letter) if letter.isdigit() else known.setdefault(letter, size)
        fits = fits and size == want and (not most or size <= int(most))
    if not fits or (spec.dtype is not None and tensor.dtype != spec.dtype):
        got, want_text = _described(tensor), _wanted(spec, known)
        raise ValueError(f"state[{name!r}]: got {got}, allowed is {want_text}")


def _check_numbers(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    if tensor.is_meta or not tensor.numel():
        return
    if tensor.dtype == torch.bool:  # a damaged file may contain bytes other than 0 and 1
        byte = int(tensor.contiguous().view(torch.uint8).max())
        if byte > 1:
            raise ValueError(f"state[{name!r}]: got the byte {byte}, allowed is 0 or 1")
        return
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = (bound.item() for bound in numbers.aminmax())  # NaN if any number is NaN
    least = float("-inf") if spec.least is None else spec.least
    most = float("inf") if spec.most is None else spec.most
    finite = spec.infinite or max(abs(low), abs(high)) < float("inf")
    if not (least <= low and high <= most and finite):
        wrong = high if least <= low and low > float("-inf") else low
        raise ValueError(f"state[{name!r}]: got {wrong}, allowed is {_range(spec)}")


def _range(spec: TensorSpec) -> str:
    bounds = [
        *([] if spec.least is None else [f"at least {spec.least}"]),
        *([] if spec.most is None else [f"at most {spec.most}"]),
    ]
    return f"a number of {' and '.join(bounds)}" if bounds else "a finite number"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _wanted(spec: TensorSpec, known: Mapping[str, int]) -> str:
    axes = []
    for axis in spec.axes.split():
        letter, _, most = axis.partition("<=")
        size = f"{letter}={known[letter]}" if letter in known else letter
        axes.append(f"{size} (at most {most})" if most else size)
    return f"{spec.dtype or 'any dtype'} [{', '.join(axes)}]"
