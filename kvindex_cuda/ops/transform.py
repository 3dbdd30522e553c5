"""Normalize and rotate vectors on the device (ParisKV paper, A.1): `k̃ = R k/‖k‖`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.transform import LONGEST, rotation
from kvindex_cuda.runtime.arguments import CODES, contiguous_rows, of_shape, of_type, strides
from kvindex_cuda.runtime.constants import ROTATE_BROAD, ROTATE_TALL
from kvindex_cuda.runtime.launch import launch

__all__ = ["LONGEST", "normalize", "rotate", "rotation"]

WARPS = 8
"""Warps of a thread block of `normalize`. Each warp processes a vector."""


def normalize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions, float32 `[..., D]`, and the norms, float32 `[...]`, of vectors `[...,
    D]`.

    Unlike `kvindex.ops.transform.normalize`, the kernel sums squares in double precision and in
    another order. Raises ValueError for a dtype other than float32, float16 and bfloat16.
    """
    given, shape = _outer(vectors)
    directions = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    norms = torch.empty(vectors.shape[:-1], dtype=torch.float32, device=vectors.device)
    launch(
        "ops/transform.cu",
        "normalize",
        (-(-norms.numel() // WARPS),),
        (32 * WARPS,),
        arguments=dict(
            vectors=given,
            directions=directions,
            norms=norms,
            count=norms.numel(),
            dim=vectors.shape[-1],
            **shape,
        ),
        DTYPE=CODES[vectors.dtype],
    )
    return directions, norms


def rotate(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Return `R x` for each vector `x`, float32 `[..., D]`. matrix: The matrix `R`, float32 `[D,
    D]`."""
    given, shape = _outer(vectors)
    D = vectors.shape[-1]
    of_shape("matrix", of_type("matrix", matrix, torch.float32), D, D)
    rotated = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    count = vectors[..., 0].numel()
    launch(
        "ops/transform.cu",
        "rotate",
        (-(-count // ROTATE_TALL), -(-D // ROTATE_BROAD)),
        (256,),
        arguments=dict(
            vectors=given,
            matrix=matrix.contiguous(),
            rotated=rotated,
            count=count,
            dim=D,
            **shape,
        ),
        DTYPE=CODES[vectors.dtype],
    )
    return rotated


def _outer(vectors: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Return vectors as a tensor `[A, B, C, D]`, and its sizes and strides as arguments for the
    kernels. Vectors are copied if their strides do not allow a view of this shape."""
    given = contiguous_rows(of_type("vectors", vectors, *CODES), 1)
    while given.ndim < 4:
        given = given[None]
    if given.ndim > 4:
        given = given.flatten(0, -4)
    sizes = dict(second=given.shape[1], third=given.shape[2])
    return given, sizes | strides("outer", given, "first", "second", "third")
