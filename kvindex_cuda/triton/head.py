"""The output head: logits of all tokens, their maxima by blocks, and the likeliest token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from kvindex_cuda.triton.kernels import head as kernels
from kvindex_cuda.triton.operands import (
    Matrix,
    Norm,
    Tile,
    gapless,
    launch,
    like,
    of_matrix,
    rows_of,
    shaped,
)
from kvindex_cuda.triton.products import TILE, of_product

BLOCK = 1024
"""Maxima that a program of `argmax` compares at once."""


class Peaks(NamedTuple):
    """The highest logit of each block of tokens, float32 `[B, blocks]`, and its id, int32."""

    values: Tensor
    places: Tensor


def head(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    *,
    logits: Tensor | None = None,
    peaks: Peaks | None = None,
    tile: Tile = TILE,
) -> Peaks:
    """The maxima of the logits of activations `[B, K]`, after a norm, by blocks of `tile.rows`.

    matrix `[V, K]`; logits `[B, V]` of x's dtype, where all of them go if they are wanted; peaks:
    where the maxima go, `[B, ceil(V / tile.rows)]`. Maxima are of the rounded logits, the lowest
    id of equals. Raises as `norm_linear`.
    """
    B = rows_of("x", x, matrix.weight.shape[-1])
    like("norm", norm.weight, x, x.shape[1])
    V = of_matrix(matrix, x, x.shape[1])
    if logits is not None:
        like("logits", logits, x, B, V)
    if peaks is None:
        empty = torch.empty((B, cdiv(V, tile.rows)), dtype=torch.float32, device=x.device)
        peaks = Peaks(empty, torch.empty_like(empty, dtype=torch.int32))
    _check(peaks, B, int(cdiv(V, tile.rows)), x.device)
    launch(
        kernels.head,
        (cdiv(V, tile.rows),),
        tile,
        x.device,
        **of_product(x, norm, matrix, tile),
        logits=logits,
        logits_step=0 if logits is None else logits.stride(0),
        values=peaks.values,
        places=peaks.places,
    )
    return peaks


def argmax(peaks: Peaks, *, out: Tensor | None = None, overlap: bool = False) -> Tensor:
    """The likeliest token of each row from its maxima: int64 `[B]`.

    out: where it goes; overlap: as of `Tile`. Raises ValueError for tensors of another kind.
    """
    values = peaks.values
    if values.ndim != 2 or not values.numel():
        raise ValueError(f"values: got shape {list(values.shape)}, allowed is [B, blocks]")
    B, blocks = values.shape
    _check(peaks, B, blocks, values.device)
    tokens = torch.empty(B, dtype=torch.int64, device=values.device) if out is None else out
    gapless("out", shaped("out", tokens, B), torch.int64, values.device)
    named = dict(values=values, places=peaks.places, tokens=tokens, blocks=blocks, BLOCK=BLOCK)
    launch(kernels.argmax, (B,), Tile(overlap=overlap), values.device, **named)
    return tokens


def _check(peaks: Peaks, B: int, blocks: int, device: torch.device) -> None:
    """Raises ValueError for maxima that are no contiguous tensors of this shape."""
    for name, part, dtype in zip(
        ("values", "places"), peaks, (torch.float32, torch.int32), strict=True
    ):
        gapless(name, shaped(name, part, B, blocks), dtype, device)
        if not part.is_contiguous():
            raise ValueError(f"{name}: got strides {part.stride()}, allowed is contiguous")
