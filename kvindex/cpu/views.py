"""Convert tensors to arrays that kernels accept: contiguous, on a CPU, of one dtype."""

from __future__ import annotations

from math import prod

import numpy as np
from torch import Tensor

PARTS_FROM = 2**16
"""Amount of work, in numbers, above which several threads are faster than one."""


def array(tensor: Tensor, *shape: int) -> np.ndarray:
    """Return a tensor's numbers as an array of this shape, which may be a copy."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    made: np.ndarray = plain.contiguous().numpy()
    return made.reshape(shape)


def dense_rows(tensor: Tensor) -> bool:
    """Return True if each entry `[...]` of a tensor `[B, G, N, ...]` is contiguous in memory."""
    shape, steps = tensor.shape[3:], tensor.stride()[3:]
    return all(
        size == 1 or step == prod(shape[i + 1 :])
        for i, (size, step) in enumerate(zip(shape, steps, strict=True))
    )


def on_cpu(*tensors: Tensor) -> bool:
    """Return True if kernels can read the memory of all tensors."""
    return all(tensor.is_cpu for tensor in tensors)


def parts(work: int, most: int) -> int:
    """Return how many threads are worthwhile for an amount of work, at most `most`."""
    return most if work > PARTS_FROM else 1
