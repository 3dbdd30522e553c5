"""Compute the queries, keys and values of one token per sequence, and write them to the tensors
that attention reads."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv

from kvindex_cuda.triton.kernels import heads as kernels
from kvindex_cuda.triton.operands import (
    DTYPES,
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


def project_heads(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tickets: Tensor,
    *,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    tile: Tile = TILE,
) -> None:
    """Compute the queries, keys and values of one token per sequence, and write them to given
    tensors. The positions of keys and values in these tensors are read on the device.

    Activations are RMS-normalized and multiplied by a matrix, as in `norm_linear`. Then each query
    and key head is RMS-normalized (optional) and rotated by the rotary embedding, which pairs
    coordinate `i` with `i + D/2` (Su et al., 2021).

    Args:
        x: Activations `[B, K]`.
        norm: RMS normalization of the activations.
        matrix: `[(H + 2G)·D, K]`: matrix rows for queries, then keys, then values.
        cos: Cosines for the token's position, `[B, D]`, of any floating-point dtype.
        sin: Sines for the token's position, with the shape, dtype and strides of `cos`.
        slots: Token position in `keys` and `values` to write to, int64 `[B]`. If it is out of
            range, no key and value are written.
        queries: Tensor for the queries, `[B, H, D]`, contiguous.
        keys: Tensor for the keys, `[B, G, C, D]`, contiguous in the last dimension.
        values: Tensor for the values, `[B, G, C, D]`, contiguous in the last dimension.
        tickets: Counters, int32, at least one for each of `H + 2G` heads. They are 0 before and
            after the launch. Launches that run concurrently need separate tickets.
        query_norm: Normalization of each query head, factors `[D]`.
        key_norm: Normalization of each key head, factors `[D]`.
        tile: Sizes of the launch. A Triton program computes rows of one head.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if queries.ndim != 3 or keys.ndim != 4 or values.ndim != 4:
        dimensions = [queries.ndim, keys.ndim, values.ndim]
        raise ValueError(
            f"queries, keys, values: got {dimensions} dimensions, allowed are [3, 4, 4]"
        )
    (H, D), (G, C) = queries.shape[1:], keys.shape[1:3]
    if D % 2:
        raise ValueError(f"D: got {D}, allowed is an even number")
    B = rows_of("x", x, matrix.weight.shape[-1], len(queries))
    like("norm", norm.weight, x, x.shape[1])
    N, heads = of_matrix(matrix, x, x.shape[1]), H + 2 * G
    if heads * D != N:
        raise ValueError(
            f"weight: got {N} rows, allowed are {heads * D} ({heads} heads of dimension {D})"
        )
    like("queries", queries, x, B, H, D)
    if not queries.is_contiguous():
        raise ValueError(f"queries: got strides {queries.stride()}, allowed is a contiguous tensor")
    like("keys", keys, x, B, G, C, D)
    like("values", values, x, B, G, C, D)
    _check_angles(cos, sin, B, D, x.device)
    gapless("slots", shaped("slots", slots, B), torch.int64, x.device)
    gapless("tickets", tickets, torch.int32, x.device)
    if tickets.ndim != 1 or len(tickets) < heads:
        raise ValueError(f"tickets: got shape {list(tickets.shape)}, allowed is [{heads} or more]")
    for name, one in dict(query_norm=query_norm, key_norm=key_norm).items():
        if one is not None:
            like(name, one.weight, x, D)
    tile = tile._replace(rows=min(tile.rows, D & -D))
    launch(
        kernels.project_heads,
        (cdiv(N, tile.rows),),
        tile,
        x.device,
        **of_product(x, norm, matrix, tile),
        projected=x.new_empty(B, N),
        tickets=tickets,
        cos=cos,
        sin=sin,
        angle_step=cos.stride(0),
        query_norm=None if query_norm is None else query_norm.weight,
        query_eps=0.0 if query_norm is None else query_norm.eps,
        key_norm=None if key_norm is None else key_norm.weight,
        key_eps=0.0 if key_norm is None else key_norm.eps,
        slots=slots,
        queries=queries,
        keys=keys,
        values=values,
        **_steps("key", keys),
        **_steps("value", values),
        C=C,
        H=H,
        G=G,
        D=D,
    )


def _check_angles(cos: Tensor, sin: Tensor, B: int, D: int, device: torch.device) -> None:
    """Raise ValueError unless cosines and sines are `[B, D]` with the same dtype, device and
    strides."""
    if cos.dtype not in DTYPES:
        raise ValueError(f"cos: got {cos.dtype}, allowed is one of {DTYPES}")
    gapless("cos", shaped("cos", cos, B, D), cos.dtype, device)
    gapless("sin", shaped("sin", sin, B, D), cos.dtype, device)
    if sin.stride() != cos.stride():
        raise ValueError(f"sin: got strides {sin.stride()}, but cos has strides {cos.stride()}")


def _steps(name: str, rows: Tensor) -> dict[str, int]:
    """Return the strides of keys or values `[B, G, C, D]`, keyed by the names of the kernel's
    parameters."""
    return {f"{name}_{part}": rows.stride(at) for at, part in enumerate(("batch", "head", "row"))}
