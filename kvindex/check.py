"""Checks of arguments. Each message names the argument, the value received, what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor(
    name: str,
    value: object,
    shape: dict[str, int | None],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`value`, if it is a tensor of that shape (letter -> size, None for any), dtype and device.

    Raises TypeError or ValueError.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, allowed is a torch.Tensor")
    sizes = list(shape.values())
    fits = value.ndim == len(sizes) and all(
        want is None or want == got for want, got in zip(sizes, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: got shape {list(value.shape)}, allowed is {_pattern(shape)}")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"{name}: got dtype {value.dtype}, allowed is {dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got device {value.device}, allowed is {device}")
    return value


def at_least(name: str, value: object, minimum: int) -> int:
    """`value`, if it is an integer of at least `minimum`. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, allowed is an integer of at least {minimum}")
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """`value`, if it is one of the allowed names. Raises ValueError."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed is one of {sorted(allowed)}")
    return str(value)


def within(name: str, value: object, low: float, high: float) -> float:
    """`value`, if it is a number in `(low, high]`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed is a number in ({low}, {high}]")
    return float(value)


def rows(name: str, value: object, batch: int) -> Tensor:
    """`value`, if it is an int64 tensor `[B']` of rows of the batch. Raises as `tensor`."""
    indices = tensor(name, value, {"B": None}, torch.int64)
    if len(indices) == 0 or bool(((indices < 0) | (indices >= batch)).any()):
        raise ValueError(
            f"{name}: got {indices.tolist()}, allowed are rows 0 to {batch - 1}, at least one"
        )
    return indices


def finite(name: str, value: Tensor) -> None:
    """Raises ValueError if `value` holds NaN or infinity (on a GPU this waits for the device)."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name}: got NaN or infinity, allowed are finite numbers")


def _pattern(shape: dict[str, int | None]) -> str:
    parts = [letter if size is None else f"{letter}={size}" for letter, size in shape.items()]
    return "[" + ", ".join(parts) + "]"
