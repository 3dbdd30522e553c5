"""Checks of arguments.

A failed check raises an error that names the argument, the received value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

LARGEST = 2.0**48
"""Largest magnitude of a number in a key or query. Products of two such vectors, and sums of their
squares over 2^20 tokens, are then finite in float32 (for `D` up to 2^12)."""

SCALES = 2.0**-126, 2.0**16
"""Smallest and largest `scale`: the smallest normal float32, and a number with which logits of keys
and queries up to `LARGEST` stay below 2^124 (for `D` up to 2^12)."""

SOFTCAPS = 2.0**-126, 2.0**64
"""Smallest and largest `softcap`, which are normal numbers of float32."""

MOST_ROWS = 2**24
"""Largest `k` of a search, because float32 counts exactly only up to this number."""


def tensor(
    name: str,
    value: object,
    shape: dict[str, int | None],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return `value` if it is a dense tensor of this shape, dtype and device.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        shape: Letter of each axis -> required size; None for any size.
        dtype: Required dtype; None for any dtype.
        device: Required device; None for any device.

    Raises:
        TypeError: The value is not a tensor.
        ValueError: The tensor is not dense, or its shape, dtype or device is wrong.
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
    """Return the shape, dtype and device of a dense tensor.

    With this result, a caller can skip the check by the function `tensor`: if an earlier tensor
    passed the check and had an equal result, the new tensor would pass as well. For a value that is
    not a dense tensor, the result is a new object that equals no other result. So the check of such
    a value is never skipped.
    """
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return object()
    return value.shape, value.dtype, value.device


def at_least(name: str, value: object, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`, otherwise raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, allowed is an integer of at least {minimum}")
    return value


def wanted_rows(value: object) -> int:
    """Return `k` if it is an integer from 1 to `MOST_ROWS`, otherwise raise ValueError."""
    k = at_least("k", value, 1)
    if k > MOST_ROWS:
        raise ValueError(f"k: got {value}, allowed is 1 to {MOST_ROWS}")
    return k


def seed(value: object, bits: int = 63) -> int:
    """Return `value` if it is an integer from 0 to `2**bits - 1`, otherwise raise ValueError."""
    number = at_least("seed", value, 0)
    if number >= 2**bits:
        raise ValueError(f"seed: got {number}, allowed is an integer below 2**{bits}")
    return number


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, otherwise raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, allowed is True or False")
    return value


def positive(name: str, value: object) -> float:
    """Return `value` if it is a positive finite number, otherwise raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value!r}, allowed is a positive finite number")
    return float(value)


def factor(name: str, value: object, limits: tuple[float, float]) -> float:
    """Return `value` if it is between `limits[0]` and `limits[1]`, otherwise raise ValueError."""
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        least, largest = (math.frexp(limit)[1] - 1 for limit in limits)
        raise ValueError(
            f"{name}: got {value!r}, allowed is a positive number from 2^{least} to 2^{largest}, "
            "so that logits are finite in float32"
        )
    return float(value)


def text(name: str, value: object) -> str:
    """Return `value` if it is a string, otherwise raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {value!r}, allowed is a string")
    return value


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    """Return `value` if it is one of the allowed names, otherwise raise ValueError."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed is one of {sorted(allowed)}")
    return value


def within(name: str, value: object, low: float, high: float) -> float:
    """Return `value` if it is a number in `(low, high]`, otherwise raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed is a number in ({low}, {high}]")
    return float(value)


def below_one(name: str, value: object) -> float:
    """Return `value` if it is a number in `[0, 1)`, otherwise raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{name}: got {value!r}, allowed is a number in [0, 1)")
    return float(value)


def rows(name: str, value: object, batch: int | None) -> Tensor:
    """Return `value` if it is a non-empty int64 tensor of indices into the batch.

    batch: the batch size, or None if it is not known yet. If it is None, all indices of at least 0
    are allowed. Raises TypeError or ValueError.
    """
    indices = tensor(name, value, {"B": None}, torch.int64)
    wrong = indices < 0 if batch is None else (indices < 0) | (indices >= batch)
    if len(indices) == 0 or bool(wrong.any()):
        last = "" if batch is None else f" to {batch - 1}"
        raise ValueError(
            f"{name}: got {indices.tolist()}, allowed is a non-empty list of batch indices from "
            f"0{last}"
        )
    return indices


ALLOWED_NUMBER = "a finite number of at most 2^48 in magnitude"
"""Text for error messages: the numbers that a key or query may contain."""


LIMITS = {torch.float16: torch.finfo(torch.float16).max}
"""Dtypes that cannot represent `LARGEST` -> the limit that `out_of_range` uses instead."""


def out_of_range(value: Tensor) -> Tensor:
    """Return True for numbers that are NaN, infinite, or larger in magnitude than `LARGEST`."""
    return ~(value.abs() <= LIMITS.get(value.dtype, LARGEST))


def in_range(value: Tensor) -> bool:
    """Return True if no number is NaN, infinite, or larger in magnitude than `LARGEST`.

    This reads the tensor once. On a GPU, it waits for the device.
    """
    if not value.numel():
        return True
    low, high = value.aminmax()  # NaN if any number is NaN
    limit = LIMITS.get(value.dtype, LARGEST)
    return -limit <= low.item() and high.item() <= limit


def finite(name: str, value: Tensor) -> None:
    """Raise ValueError if a number is NaN, infinite, or larger in magnitude than `LARGEST`.

    On a GPU, this waits for the device.
    """
    if not in_range(value):
        wrong = value[out_of_range(value)][0].item()
        raise ValueError(f"{name}: got {wrong}, allowed is {ALLOWED_NUMBER}")


def in_keys(values: Tensor, keys: Tensor) -> None:
    """Raise ValueError if a value is not equal to the first `Dv` coordinates of its key.

    On a GPU, this waits for the device.
    """
    wrong = not_in_keys(values, keys)
    if bool(wrong.any()):
        raise ValueError(f"values: got {values[wrong][0].item()}, allowed is {ALLOWED_IN_KEYS}")


ALLOWED_IN_KEYS = "the same number as in the key, because value_in_key is True"
"""Text for error messages: what a value must equal if `Geometry.value_in_key` is True."""


def not_in_keys(values: Tensor, keys: Tensor) -> Tensor:
    """Compare each value `[…, Dv]` with the first `Dv` coordinates of its key `[…, D]`.

    Return a bool tensor `[…, Dv]` that is True where the coordinates differ. A NaN in a key counts
    as equal to any number, because keys of padded tokens may contain NaN.
    """
    own = keys[..., : values.shape[-1]]
    return (values != own) & ~own.isnan()


def _pattern(shape: dict[str, int | None]) -> str:
    parts = [letter if size is None else f"{letter}={size}" for letter, size in shape.items()]
    return "[" + ", ".join(parts) + "]"
