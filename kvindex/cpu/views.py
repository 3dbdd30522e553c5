"""Convert tensors to contiguous numpy arrays, which kernels accept."""

from __future__ import annotations

from math import prod

import numpy as np
from torch import Tensor

PARTS_FROM = 2**16
"""Number of tensor elements to process above which several threads are faster than one."""


def array(tensor: Tensor, *shape: int) -> np.ndarray:
    """Return the tensor as a numpy array of the given shape.

    The numbers are copied only if the tensor is not contiguous.
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    made: np.ndarray = plain.contiguous().numpy()
    return made.reshape(shape)


def dense_rows(tensor: Tensor) -> bool:
    """Return True if each `tensor[b, g, n]` of a tensor `[B, G, N, ...]` is contiguous."""
    shape, steps = tensor.shape[3:], tensor.stride()[3:]
    return all(
        size == 1 or step == prod(shape[i + 1 :])
        for i, (size, step) in enumerate(zip(shape, steps, strict=True))
    )


def on_cpu(*tensors: Tensor) -> bool:
    """Return True if all tensors are in the CPU's memory."""
    return all(tensor.is_cpu for tensor in tensors)


def parts(work: int, most: int) -> int:
    """Return how many threads are useful to process `work` tensor elements: 1 or `most`."""
    return most if work > PARTS_FROM else 1
