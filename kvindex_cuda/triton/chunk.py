"""Element-wise parts of a layer of a language model, for all tokens of a chunk of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import chunk as kernels
from kvindex_cuda.triton.operands import DTYPES, Norm, Tile, gapless, launch, like, shaped

ROTATED = Tile(rows=16, columns=128, warps=4, stages=1)
"""Tile of `rotate_heads`: `rows` is the number of tokens per program."""

GATED = Tile(rows=1, columns=2048, warps=4, stages=1)
"""Tile of `swiglu`: `columns` is the number of elements per program."""


def rotate_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    tile: Tile = ROTATED,
) -> None:
    """Compute the queries, keys and values of a chunk of a prompt from their projections.

    Each query and key head is RMS-normalized (optional) and rotated by the rotary embedding, which
    pairs coordinate `i` with `i + D/2` (Su et al., 2021). Values are copied. Results are computed
    in float32 and rounded once.

    Args:
        query: Projected queries, `[B, T, H·D]`.
        key: Projected keys, `[B, T, G·D]`.
        value: Projected values, `[B, T, G·D]`.
        cos: Cosines for the tokens' positions, `[B, T, D]`, of any floating-point dtype.
        sin: Sines for the tokens' positions, with the shape, dtype and strides of `cos`.
        queries: Tensor for the queries, `[B, H, T, D]`.
        keys: Tensor for the keys, `[B, G, T, D]`.
        values: Tensor for the values, `[B, G, T, D]`.
        query_norm: Normalization of each query head, factors `[D]`.
        key_norm: Normalization of each key head, factors `[D]`.
        tile: Sizes of the launch.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if queries.ndim != 4 or keys.ndim != 4:
        dimensions = [queries.ndim, keys.ndim]
        raise ValueError(f"queries, keys: got {dimensions} dimensions, allowed are [4, 4]")
    (B, H, T, D), G = queries.shape, keys.shape[1]
    if D % 2:
        raise ValueError(f"D: got {D}, allowed is an even number")
    if queries.dtype not in DTYPES:
        raise ValueError(f"queries: got {queries.dtype}, allowed is one of {DTYPES}")
    gapless("queries", queries, queries.dtype, queries.device)
    like("keys", keys, queries, B, G, T, D)
    like("values", values, queries, B, G, T, D)
    like("query", query, queries, B, T, H * D)
    like("key", key, queries, B, T, G * D)
    like("value", value, queries, B, T, G * D)
    gapless("cos", shaped("cos", cos, B, T, D), cos.dtype, queries.device)
    gapless("sin", shaped("sin", sin, B, T, D), cos.dtype, queries.device)
    if sin.stride() != cos.stride():
        raise ValueError(f"sin: got strides {sin.stride()}, but cos has strides {cos.stride()}")
    for name, one in dict(query_norm=query_norm, key_norm=key_norm).items():
        if one is not None:
            like(name, one.weight, queries, D)
    if not queries.numel():
        return
    launch(
        kernels.rotate_heads,
        (cdiv(T, tile.rows), H + 2 * G, B),
        tile,
        queries.device,
        query=query,
        key=key,
        value=value,
        **_from("query", query),
        **_from("key", key),
        **_from("value", value),
        cos=cos,
        sin=sin,
        angle_batch=cos.stride(0),
        angle_token=cos.stride(1),
        query_norm=None if query_norm is None else query_norm.weight,
        query_eps=0.0 if query_norm is None else query_norm.eps,
        key_norm=None if key_norm is None else key_norm.weight,
        key_eps=0.0 if key_norm is None else key_norm.eps,
        queries=queries,
        keys=keys,
        values=values,
        **_to("query", queries),
        **_to("key", keys),
        **_to("value", values),
        T=T,
        H=H,
        G=G,
        D=D,
        WIDE=next_power_of_2(D // 2),
        BLOCK=tile.rows,
    )


def swiglu(gate: Tensor, up: Tensor, *, tile: Tile = GATED) -> Tensor:
    """Compute `silu(gate) · up` in float32, and round it once.

    Args:
        gate: `[M, N]`, contiguous in the last dimension.
        up: `[M, N]`, contiguous in the last dimension.
        tile: Sizes of the launch.

    Returns:
        `[M, N]`, contiguous, in the dtype of `gate`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    if gate.ndim != 2 or gate.dtype not in DTYPES:
        raise ValueError(
            f"gate: got {gate.dtype} of shape {list(gate.shape)}, allowed is [M, N] of one of "
            f"{DTYPES}"
        )
    gapless("gate", gate, gate.dtype, gate.device)
    M, N = gate.shape
    like("up", up, gate, M, N)
    output = torch.empty((M, N), dtype=gate.dtype, device=gate.device)
    if not output.numel():
        return output
    # rows are in the second dimension of the grid, which allows up to 65,535
    for first in range(0, M, 65_535):
        some = slice(first, first + 65_535)
        launch(
            kernels.swiglu,
            (cdiv(N, tile.columns), len(gate[some])),
            tile,
            gate.device,
            gate=gate[some],
            up=up[some],
            gate_row=gate.stride(0),
            up_row=up.stride(0),
            output=output[some],
            N=N,
            BLOCK=tile.columns,
        )
    return output


def _from(name: str, projected: Tensor) -> dict[str, int]:
    """Return the strides of a projection `[B, T, heads·D]`, keyed by the kernel's parameters."""
    return {f"{name}_in_batch": projected.stride(0), f"{name}_in_token": projected.stride(1)}


def _to(name: str, heads: Tensor) -> dict[str, int]:
    """Return the strides of heads `[B, heads, T, D]`, keyed by the kernel's parameters."""
    return {
        f"{name}_{part}": heads.stride(at) for at, part in enumerate(("batch", "head", "token"))
    }
