"""Rotary embedding of a token's queries and keys, written where attention reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from kvindex_cuda.triton.kernels import rotate as kernels
from kvindex_cuda.triton.operands import DTYPES, Norm, Tile, gapless, launch, like, rows_of, shaped


def rotate_heads(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    overlap: bool = False,
) -> None:
    """Write a token's queries, and its key and value at a place that the device knows.

    projected `[B, H·D + G·D + G·Dv]`: queries, keys and values as one product gives them; cos, sin
    `[B, D]` of the token's position, of any float dtype; slots int64 `[B]`: rows of keys
    `[B, G, C, D]` and values `[B, G, C, Dv]`, of any strides but 1 at the end; one outside writes
    no key and no value. queries `[B, H, D]`, contiguous. query_norm, key_norm: of each head before
    it is rotated, factors `[D]`. Coordinate `i` is paired with `i + D/2` (Su et al., 2021).
    overlap: as of `Tile`: projected alone may be of the launch before, and the launch after may
    begin, up to its own wait, before that one has ended. Raises ValueError for other shapes, dtypes
    or devices.
    """
    if queries.ndim != 3 or keys.ndim != 4 or values.ndim != 4:
        dimensions = [queries.ndim, keys.ndim, values.ndim]
        raise ValueError(f"queries, keys, values: got {dimensions} dimensions, allowed is 3, 4, 4")
    (H, D), (G, C), Dv = queries.shape[1:], keys.shape[1:3], values.shape[3]
    if D % 2:
        raise ValueError(f"D: got {D}, allowed is an even number")
    B = rows_of("projected", projected, (H + G) * D + G * Dv, len(queries))
    like("queries", queries, projected, B, H, D)
    if not queries.is_contiguous():
        raise ValueError(f"queries: got strides {queries.stride()}, allowed is contiguous")
    like("keys", keys, projected, B, G, C, D)
    like("values", values, projected, B, G, C, Dv)
    _check_angles(cos, sin, B, D, projected.device)
    gapless("slots", shaped("slots", slots, B), torch.int64, projected.device)
    for name, norm in dict(query_norm=query_norm, key_norm=key_norm).items():
        if norm is not None:
            like(name, norm.weight, projected, D)
    launch(
        kernels.rotate_heads,
        (B, H + 2 * G),
        Tile(warps=1, overlap=overlap),
        projected.device,
        projected=projected,
        projected_step=projected.stride(0),
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
        DV=Dv,
        HALF=next_power_of_2(D // 2),
        WIDE=next_power_of_2(Dv),
    )


def _check_angles(cos: Tensor, sin: Tensor, B: int, D: int, device: torch.device) -> None:
    """Raises ValueError unless both are `[B, D]`, alike."""
    if cos.dtype not in DTYPES:
        raise ValueError(f"cos: got {cos.dtype}, allowed is one of {DTYPES}")
    gapless("cos", shaped("cos", cos, B, D), cos.dtype, device)
    gapless("sin", shaped("sin", sin, B, D), cos.dtype, device)
    if sin.stride() != cos.stride():
        raise ValueError(f"sin: got strides {sin.stride()}, allowed are cos's, {cos.stride()}")


def _steps(name: str, rows: Tensor) -> dict[str, int]:
    """Strides of rows `[B, G, C, D]`, by the kernel's names."""
    return {f"{name}_{part}": rows.stride(at) for at, part in enumerate(("batch", "head", "row"))}
