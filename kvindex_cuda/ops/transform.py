"""Normalize and rotate (paper, A.1): `k̃ = R k/‖k‖`; `kvindex.ops.transform` on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.transform import LONGEST, rotation
from kvindex_cuda.runtime.arguments import CODES, contiguous_rows, of_shape, of_type
from kvindex_cuda.runtime.launch import launch

__all__ = ["LONGEST", "normalize", "rotate", "rotation"]

WARPS, TALL, BROAD = 8, 32, 64
"""Of a block: vectors that `normalize` and `rotate` take, and outputs (`transform.cu`)."""


def normalize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Directions float32 `[..., D]` and norms float32 `[...]` of vectors `[..., D]`.

    As `kvindex.ops.transform.normalize`; sums of squares in double, in another order. Raises
    ValueError for a dtype other than float32, float16 and bfloat16.
    """
    given, shape = _outer(vectors)
    directions = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    norms = torch.empty(vectors.shape[:-1], dtype=torch.float32, device=vectors.device)
    launch(
        "ops/transform.cu",
        "normalize",
        (-(-norms.numel() // WARPS),),
        (32 * WARPS,),
        *(given, directions, norms, norms.numel(), vectors.shape[-1]),
        *shape,
        DTYPE=CODES[vectors.dtype],
    )
    return directions, norms


def rotate(vectors: Tensor, matrix: Tensor) -> Tensor:
    """`R x` for each vector: float32 `[..., D]`. matrix: float32 `[D, D]`."""
    given, shape = _outer(vectors)
    D = vectors.shape[-1]
    of_shape("matrix", of_type("matrix", matrix, torch.float32), D, D)
    rotated = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    count = vectors[..., 0].numel()
    launch(
        "ops/transform.cu",
        "rotate",
        (-(-count // TALL), -(-D // BROAD)),
        (256,),
        *(given, matrix.contiguous(), rotated, count, D),
        *shape,
        DTYPE=CODES[vectors.dtype],
    )
    return rotated


def _outer(vectors: Tensor) -> tuple[Tensor, list[int]]:
    """Vectors as `[A, B, C, D]`; `B`, `C` and three strides. Copied where those cannot say it."""
    given = contiguous_rows(of_type("vectors", vectors, *CODES), 1)
    while given.ndim < 4:
        given = given[None]
    if given.ndim > 4:
        given = given.flatten(0, -4)
    return given, [*given.shape[1:3], *given.stride()[:3]]
