"""Argument checks. Each message names the argument, the value received, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

LARGEST = 2.0**48
"""Of a number in a key or a query: products of two such vectors, and sums of their squares over
2^20 tokens, stay finite in float32 (`D` up to 2^12)."""

SCALES = 2.0**-126, 2.0**16
"""The least and the largest `scale`: a normal number of float32, and one by which logits of numbers
up to `LARGEST` stay below 2^124 in float32 (`D` up to 2^12)."""

SOFTCAPS = 2.0**-126, 2.0**64
"""The least and the largest `softcap`, which are normal numbers of float32."""

MOST_ROWS = 2**24
"""That a search may be asked for: above what is counted exactly in float32."""


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
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ValueError(f"{name}: got {kind}, allowed is a dense tensor ({torch.strided})")
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


def kind(value: object) -> object:
    """Shape, dtype and device of a dense tensor: where they are as before, so is what `tensor`
    finds. Anything else equals nothing.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return object()
    return value.shape, value.dtype, value.device


def at_least(name: str, value: object, minimum: int) -> int:
    """`value`, if it is an integer of at least `minimum`. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, allowed is an integer of at least {minimum}")
    return value


def wanted_rows(value: object) -> int:
    """`k`, if it is an integer from 1 to `MOST_ROWS`. Raises ValueError."""
    k = at_least("k", value, 1)
    if k > MOST_ROWS:
        raise ValueError(f"k: got {value}, allowed is 1 to {MOST_ROWS}")
    return k


def seed(value: object, bits: int = 63) -> int:
    """`value`, if it is an integer from 0 to below `2**bits`. Raises ValueError."""
    number = at_least("seed", value, 0)
    if number >= 2**bits:
        raise ValueError(f"seed: got {number}, allowed is an integer below 2**{bits}")
    return number


def flag(name: str, value: object) -> bool:
    """`value`, if it is True or False. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, allowed is True or False")
    return value


def positive(name: str, value: object) -> float:
    """`value`, if it is a positive finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value!r}, allowed is a positive finite number")
    return float(value)


def factor(name: str, value: object, limits: tuple[float, float]) -> float:
    """`value`, if it is a number within `limits`, which are powers of two. Raises ValueError."""
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        least, largest = (math.frexp(limit)[1] - 1 for limit in limits)
        raise ValueError(
            f"{name}: got {value!r}, allowed is a positive number from 2^{least} to 2^{largest}, "
            "so that logits are finite in float32"
        )
    return float(value)


def text(name: str, value: object) -> str:
    """`value`, if it is a string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {value!r}, allowed is a string")
    return value


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    """`value`, if it is one of the allowed names. Raises ValueError."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed is one of {sorted(allowed)}")
    return value


def within(name: str, value: object, low: float, high: float) -> float:
    """`value`, if it is a number in `(low, high]`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed is a number in ({low}, {high}]")
    return float(value)


def below_one(name: str, value: object) -> float:
    """`value`, if it is a number in `[0, 1)`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}: got {value!r}, allowed is a number in [0, 1)")
    return float(value)


def rows(name: str, value: object, batch: int | None) -> Tensor:
    """`value`, if it is an int64 tensor `[B']` of rows of the batch. Raises as `tensor`.

    batch: its size, or None while it is unknown.
    """
    indices = tensor(name, value, {"B": None}, torch.int64)
    wrong = indices < 0 if batch is None else (indices < 0) | (indices >= batch)
    if len(indices) == 0 or bool(wrong.any()):
        last = "" if batch is None else f" to {batch - 1}"
        raise ValueError(
            f"{name}: got {indices.tolist()}, allowed are rows from 0{last}, at least one"
        )
    return indices


ALLOWED_NUMBER = "a finite number of at most 2^48 in magnitude"
"""What a number in a key or a query may be."""


LIMITS = {torch.float16: torch.finfo(torch.float16).max}
"""Below `LARGEST`, of types that hold no number so large."""


def out_of_range(value: Tensor) -> Tensor:
    """Which numbers of keys or queries are not allowed: NaN, infinite, or above `LARGEST`; bool."""
    return ~(value.abs() <= LIMITS.get(value.dtype, LARGEST))


def in_range(value: Tensor) -> bool:
    """Whether `out_of_range` finds nothing: one operation (on a GPU it waits for the device)."""
    if not value.numel():
        return True
    low, high = value.aminmax()  # NaN where there is one
    limit = LIMITS.get(value.dtype, LARGEST)
    return -limit <= low.item() and high.item() <= limit


def finite(name: str, value: Tensor) -> None:
    """Raises ValueError if `out_of_range` finds a number (on a GPU this waits for the device)."""
    if not in_range(value):
        wrong = value[out_of_range(value)][0].item()
        raise ValueError(f"{name}: got {wrong}, allowed is {ALLOWED_NUMBER}")


def in_keys(values: Tensor, keys: Tensor) -> None:
    """Raises ValueError if `not_in_keys` finds a number (on a GPU this waits for the device)."""
    wrong = not_in_keys(values, keys)
    if bool(wrong.any()):
        raise ValueError(f"values: got {values[wrong][0].item()}, allowed is {ALLOWED_IN_KEYS}")


ALLOWED_IN_KEYS = "the beginning of its key, as value_in_key says"
"""What a value may be where a geometry says so."""


def not_in_keys(values: Tensor, keys: Tensor) -> Tensor:
    """Which numbers of values `[…, Dv]` are not those that keys `[…, D]` begin with; bool.

    What is not a number in a key, as an invalid token's may not be, is like anything.
    """
    own = keys[..., : values.shape[-1]]
    return (values != own) & ~own.isnan()


def _pattern(shape: dict[str, int | None]) -> str:
    parts = [letter if size is None else f"{letter}={size}" for letter, size in shape.items()]
    return "[" + ", ".join(parts) + "]"
