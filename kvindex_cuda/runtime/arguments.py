"""Helpers of functions that launch kernels: check tensors, and compute strides and grid sizes."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""dtype -> value of the macro `DTYPE` in the kernels' sources."""

EMULATED = 4
"""Number of multiprocessors to assume without a GPU. It is large enough that several thread blocks
share a row."""


def of_type(name: str, tensor: Tensor, *allowed: torch.dtype) -> Tensor:
    """Return `tensor` unchanged. Raises ValueError unless its dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: got {tensor.dtype}, allowed is {names}")
    return tensor


def of_shape(name: str, tensor: Tensor, *shape: int) -> Tensor:
    """Return `tensor` unchanged. Raises ValueError unless it has the given shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, allowed is {shape}")
    return tensor


def contiguous_rows(tensor: Tensor, inner: int, aligned: int = 1) -> Tensor:
    """Return `tensor`, or a contiguous copy if one is needed.

    A copy is needed if the last `inner` dimensions are not contiguous, or if such a contiguous part
    does not begin at a multiple of `aligned` bytes.
    """
    if inner == aligned == 1 and tensor.stride(-1) == 1:
        return tensor  # the most frequent case
    outer = tensor.ndim - inner
    whole, expected = True, 1
    for size, step in zip(tensor.shape[outer:][::-1], tensor.stride()[outer:][::-1], strict=True):
        whole &= size == 1 or step == expected
        expected *= size
    starts = gcd(*(step * tensor.element_size() for step in steps(tensor)[:outer]), aligned)
    if whole and starts == aligned and tensor.data_ptr() % aligned == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def steps(tensor: Tensor) -> list[int]:
    """Return the strides of a tensor in elements, with 0 for dimensions of size 1."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [step if size > 1 else 0 for size, step in pairs]


def strides(name: str, tensor: Tensor | None, *dimensions: str) -> dict[str, int]:
    """Return the strides of a tensor's first dimensions, keyed by `{name}_{dimension}`. If the
    tensor is None, all strides are 0."""
    found = [0] * len(dimensions) if tensor is None else steps(tensor)
    return {f"{name}_{part}": step for part, step in zip(dimensions, found, strict=False)}


def wide(rows: Tensor) -> bool:
    """Return True if each row (last dimension) of a tensor begins at a multiple of 16 bytes."""
    places, size = rows.data_ptr(), rows.element_size()
    for count, step in zip(rows.shape[:-1], rows.stride()[:-1], strict=True):
        if count > 1:
            places |= step * size
    return places % 16 == 0


def busy(device: torch.device, rows: int, work: int, each: int, blocks: int = 4) -> int:
    """Return how many thread blocks to launch for each of `rows` parts of the work, if each part
    has `work` items.

    All parts together get about `blocks` thread blocks per multiprocessor, but each thread block
    gets at least `each` items.
    """
    wanted = -(-blocks * multiprocessors(device) // max(1, rows))
    return max(1, min(wanted, -(-work // each), 65535))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, from which grid sizes are computed."""
    if device.type != "cuda":
        return EMULATED
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
