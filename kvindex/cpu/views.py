"""Tensors as arrays that kernels take: contiguous, on a CPU, of one dtype."""

from __future__ import annotations

from math import prod

import numpy as np
from torch import Tensor

PARTS_FROM = 2**16
"""Numbers that one thread works on while another begins."""


def array(tensor: Tensor, *shape: int) -> np.ndarray:
    """The numbers of a tensor as an array of that shape, which may be a copy."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    made: np.ndarray = plain.contiguous().numpy()
    return made.reshape(shape)


def dense_rows(tensor: Tensor) -> bool:
    """Whether entries `[...]` of a tensor `[B, G, N, ...]` have no gaps."""
    shape, steps = tensor.shape[3:], tensor.stride()[3:]
    return all(
        size == 1 or step == prod(shape[i + 1 :])
        for i, (size, step) in enumerate(zip(shape, steps, strict=True))
    )


def on_cpu(*tensors: Tensor) -> bool:
    """Whether kernels can read the memory of all."""
    return all(tensor.is_cpu for tensor in tensors)


def parts(work: int, most: int) -> int:
    """Threads that so many numbers are worth, up to `most`."""
    return most if work > PARTS_FROM else 1
