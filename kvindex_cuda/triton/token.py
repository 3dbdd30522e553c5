"""Attention of one token per sequence to a range of rows (keys and values). The kernel reads the
first and the last position of the range on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from kvindex_cuda.triton.kernels import attention
from kvindex_cuda.triton.operands import DTYPES, Tile, gapless, launch, like, shaped

TILE = Tile(rows=16, columns=64, warps=4, stages=3)
"""Tile of the launch. `columns` is the number of rows that a program reads at once."""

PROGRAMS = 512
"""Number of Triton programs that a launch should have: about four for each multiprocessor of an
H200."""


def attend_token(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    scale: float,
    splits: int | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """Attend with one query per head to the rows from `starts[b]` to `ends[b] - 1`.

    Sums are computed in float32. For a sequence without rows, the output is 0.

    Args:
        queries: `[B, H, D]`.
        keys: `[B, G, C, D]`, contiguous in the last dimension; other strides are arbitrary.
        values: `[B, G, C, Dv]`, contiguous in the last dimension.
        starts: int64 `[B]`, read on the device.
        ends: int64 `[B]`, read on the device. It may be one number for all sequences (a stride of
            0).
        splits: Number of parts into which a group's rows are split, a power of two. Each part is
            processed by one program, and a second launch merges the results (Flash-Decoding: Dao et
            al., 2023).

    Returns:
        Output `[B, H, Dv]`.

    Raises:
        ValueError: Shapes, dtypes, sizes or devices do not fit.
    """
    if queries.ndim != 3 or keys.ndim != 4 or values.ndim != 4 or not queries.numel():
        dimensions = [queries.ndim, keys.ndim, values.ndim]
        raise ValueError(
            f"queries, keys, values: got {dimensions} dimensions, allowed are [3, 4, 4]"
        )
    if queries.dtype not in DTYPES or not queries.is_contiguous():
        raise ValueError(
            f"queries: got {queries.dtype} with strides {queries.stride()}, allowed is a "
            f"contiguous tensor of one of {DTYPES}"
        )
    (B, H, D), (G, C), Dv = queries.shape, keys.shape[1:3], values.shape[3]
    if H % G:
        raise ValueError(f"queries: got {H} heads, allowed is a multiple of the {G} KV heads")
    like("keys", keys, queries, B, G, C, D)
    like("values", values, queries, B, G, C, Dv)
    gapless("starts", shaped("starts", starts, B), torch.int64, queries.device)
    if ends.dtype != torch.int64 or ends.device != queries.device:
        raise ValueError(
            f"ends: got {ends.dtype} on {ends.device}, allowed is torch.int64 on {queries.device}"
        )
    shaped("ends", ends, B)
    if splits is None:
        splits = next_power_of_2(max(1, PROGRAMS // (B * G)))
    if splits < 1 or splits & (splits - 1):
        raise ValueError(f"splits: got {splits}, allowed is a power of two")
    parts = torch.empty((B, H, splits, Dv), dtype=torch.float32, device=queries.device)
    lse = torch.empty((B, H, splits), dtype=torch.float32, device=queries.device)
    output = torch.empty((B, H, Dv), dtype=queries.dtype, device=queries.device)
    sizes = dict(DV=Dv, WIDE_V=max(16, next_power_of_2(Dv)), SPLITS=splits)
    steps = {
        f"{name}_{part}": rows.stride(at)
        for name, rows in dict(key=keys, value=values).items()
        for at, part in enumerate(("batch", "head", "row"))
    }
    launch(
        attention.attend_split,
        (splits, B * G),
        tile,
        queries.device,
        queries=queries,
        keys=keys,
        values=values,
        starts=starts,
        ends=ends,
        end_step=ends.stride(0),
        parts=parts,
        lse=lse,
        scale=scale,
        **steps,
        G=G,
        GROUP=H // G,
        D=D,
        ROWS=max(16, next_power_of_2(H // G)),
        BLOCK_N=tile.columns,
        WIDE=max(16, next_power_of_2(D)),
        STAGES=tile.stages,
        **sizes,
    )
    launch(
        attention.merge_splits,
        (B * H,),
        tile,
        queries.device,
        parts=parts,
        lse=lse,
        output=output,
        merged_lse=None,
        **sizes,
    )
    return output
