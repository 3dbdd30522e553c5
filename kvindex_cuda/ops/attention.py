"""Exact softmax attention on the device. With one query per head, a kernel of this package computes
it. In prefill, torch computes it."""

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
"""Registers of a thread that store weighted sums of values, for up to `HEADS` heads."""

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
    """Attend with one query per head to `R` rows (key and value) per KV head.

    Args:
        queries: `[B, H, D]`.
        keys: `[B, G, R, D]`.
        values: `[B, G, R, Dv]`.
        scale: As in `kvindex.ops.attention.attend`.
        softcap: As in `kvindex.ops.attention.attend`.
        bias: float32, broadcast to `[B, H, R]`, which is added to the logits. `-inf` hides a row,
            even one with NaN.
        return_lse: Whether to also return the log-sum-exp of the logits.

    Returns:
        Output `[B, H, Dv]` in the queries' dtype, summed in float32; 0 for a query that sees no
        row. With `return_lse` also the natural logarithm of the sum of exponentials of the logits,
        float32 `[B, H]`, which is `-inf` if no row is visible.

    Raises:
        ValueError: `R` is 0.
    """
    B, H, D = queries.shape
    G, R, Dv = keys.shape[1], keys.shape[2], values.shape[3]
    of_shape("keys", keys, B, G, R, D)
    of_shape("values", values, B, G, R, Dv)
    if H % G:
        raise ValueError(f"queries: got {H} heads, allowed is a multiple of the {G} KV heads")
    if R == 0:
        raise ValueError("keys: got no rows, allowed is at least one row")
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
        raise ValueError(
            f"D, Dv: got {D}, {Dv}, which need {needed} bytes of shared memory, allowed are up to "
            f"{SHARED_BYTES}"
        )
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
    """Attend with `T` queries per head to blocks of rows, with an online softmax. Returns `[B, H,
    T, Dv]`.

    This calls `kvindex.ops.attention.attend_blocks` with the same arguments: torch already runs the
    large products of a prefill on tensor cores.
    """
    parts = reference.attend_blocks(queries, blocks, scale=scale, softcap=softcap, return_lse=True)
    return parts if return_lse else parts[0]


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, valid: Tensor | None = None
) -> Tensor:
    """Attend causally from the newest `T` tokens to all `N` rows in one call. Returns `[B, H, T,
    Dv]`.

    This function passes its arguments to `kvindex.ops.attention.attend_causal`, because that
    function already uses torch's fused kernel.
    """
    return reference.attend_causal(queries, keys, values, scale=scale, valid=valid)
