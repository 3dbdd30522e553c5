"""Exact softmax attention on the device. A kernel serves one query per head, torch a prefill."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Literal, overload

import torch
from torch import Tensor

from kvindex.ops import attention as reference
from kvindex.ops.attention import Block, cap, merge
from kvindex_cuda.runtime.arguments import CODES, busy, contiguous_rows, of_shape, steps, strides
from kvindex_cuda.runtime.launch import launch

__all__ = ["attend", "attend_blocks", "attend_causal", "cap", "merge"]

THREADS, WARPS = 256, 8

SUMS = 64
"""Registers of a thread for sums of values of up to `HEADS` heads."""

HEADS = 8

SHARED_BYTES = 48 * 1024


@overload
def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One query per head over `R` rows per KV head: `[B, H, Dv]` in the queries' dtype.

    queries `[B, H, D]`, keys `[B, G, R, D]`, values `[B, G, R, Dv]`; bias float32, broadcast to
    `[B, H, R]`, is added to the logits and `-inf` hides a row, whatever it holds. A query that
    sees no row gives 0. Accumulation is float32. return_lse: the natural logarithm of the sum of
    exponentials of the logits, too, float32 `[B, H]`, `-inf` where no row is visible. Raises
    ValueError for no rows at all.
    """
    B, H, D = queries.shape
    G, R, Dv = keys.shape[1], keys.shape[2], values.shape[3]
    of_shape("keys", keys, B, G, R, D)
    of_shape("values", values, B, G, R, Dv)
    if H % G:
        raise ValueError(f"queries: got {H} heads for {G} KV heads, allowed are multiples")
    if R == 0:
        raise ValueError("blocks: got no rows at all, allowed is at least one row")
    asked, device, g = queries.dtype, queries.device, H // G
    if asked not in CODES or {keys.dtype, values.dtype} != {asked}:
        queries, keys, values = queries.float(), keys.float(), values.float()
    keys, values = contiguous_rows(keys, 1), contiguous_rows(values, 1)
    if bias is not None:
        bias = bias.float().expand(B, H, R)
    size = keys.element_size()
    apart = [size * step for part in (keys, values) for step in steps(part)[:3]]
    piece = gcd(16, size * D, size * Dv, keys.data_ptr(), values.data_ptr(), *apart)
    width = piece // size
    lanes = min(32, 2 ** (max(D, Dv) // width - 1).bit_length())
    loads = -(-Dv // (width * lanes))
    heads = max(1, min(g, HEADS, SUMS // (loads * width)))
    if (needed := 4 * (D * heads + WARPS * (Dv + 2))) > SHARED_BYTES:
        raise ValueError(f"D, Dv: got {D}, {Dv}, for {needed} bytes of {SHARED_BYTES} allowed")
    tiles = -(-g // heads)
    splits = busy(device, B * G * tiles, R, WARPS * (32 // lanes), blocks=2)
    partial = torch.empty((B * G, tiles, splits, heads, Dv + 2), device=device)
    tickets = torch.zeros((B * G, tiles), dtype=torch.int32, device=device)
    output = torch.empty((B, H, Dv), dtype=queries.dtype, device=device)
    lse = torch.empty((B, H), device=device) if return_lse else None
    launch(
        "ops/attention.cu",
        "attend",
        (B * G, splits, tiles),
        (THREADS,),
        arguments=dict(
            queries=queries.contiguous(),
            keys=keys,
            values=values,
            bias=bias,
            partial=partial,
            output=output,
            lse=lse,
            tickets=tickets,
            **strides("keys", keys, "batch", "head", "row"),
            **strides("values", values, "batch", "head", "row"),
            **strides("bias", bias, "batch", "head", "row"),
            rows=R,
            heads=g,
            kv_heads=G,
            scale=float(scale),
            softcap=float(softcap or 0),
        ),
        D=D,
        DV=Dv,
        HEADS=heads,
        DTYPE=CODES[queries.dtype],
        SOFTCAP=int(softcap is not None),
        WIDTH=width,
        LANES=lanes,
    )
    return output.to(asked) if lse is None else (output.to(asked), lse)


def attend_blocks(
    queries: Tensor,
    blocks: Iterable[Block],
    *,
    scale: float,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`T` queries per head over blocks of rows, with a running softmax: `[B, H, T, Dv]`.

    This is the reference implementation, since torch runs the large products of a prefill on the
    matrix units. Arguments as `kvindex.ops.attention.attend_blocks`.
    """
    parts = reference.attend_blocks(queries, blocks, scale=scale, softcap=softcap, return_lse=True)
    return parts if return_lse else parts[0]


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, valid: Tensor | None = None
) -> Tensor:
    """The newest `T` tokens over all `N` rows, causally, in one piece: `[B, H, T, Dv]`.

    This is the reference implementation, torch's fused kernel. Arguments as
    `kvindex.ops.attention.attend_causal`.
    """
    return reference.attend_causal(queries, keys, values, scale=scale, valid=valid)
