"""Attention of several tokens of each sequence to the rows (keys and values) that are stored in
pages."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import attention
from kvindex_cuda.triton.operands import DTYPES, Tile, gapless, launch, shaped

PAGE = 256
"""Tokens of a page of `kvindex_cuda.memory.block_store.BlockStore`."""

TILE = Tile(rows=64, columns=64, warps=4, stages=2)
"""Tile of a launch for up to 64 pairs of a token and a query head. `rows` is the number of pairs of
a program, and `columns` the number of keys that it reads at once."""

WIDE_TILE = Tile(rows=128, columns=64, warps=8, stages=2)
"""Tile of a launch for more pairs."""

PROGRAMS = 512
"""Number of Triton programs that a launch should have: about four for each multiprocessor of an
H200."""


def attend_pages(
    queries: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    kv_heads: int,
    value_dim: int,
    scale: float,
    row_bytes: int,
    head_bytes: int,
    page_tokens: int = PAGE,
    causal: bool = True,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with `T` queries per head to rows that are stored in pages.

    For a query that sees no row, the output is 0 and the log-sum-exp is `-inf`.

    Args:
        queries: `[B, H, T, D]`, contiguous.
        table: Addresses of pages, int64 `[B, S]`, as in `kvindex.storage.store.AddressedRows`; 0
            for a page without rows. A row is a key followed by its value, in the queries' dtype.
        lengths: Number of rows of each sequence, int64 `[B]`, up to `S · page_tokens`. It is read
            on the device.
        kv_heads: KV heads, `G`.
        value_dim: Dimension of a value, `Dv`.
        scale: Multiplies the logits.
        row_bytes: Bytes from a row to the next one.
        head_bytes: Bytes from a KV head's rows of a page to the next head's.
        page_tokens: Tokens of a page.
        causal: Whether attention is causal: the queries belong to the last `T` rows, and each query
            sees its own row and earlier ones. If not, they see all rows.
        splits: Number of parts into which the rows of a sequence are split, a power of two. Each
            part is processed by one program, and a second launch merges the results
            (Flash-Decoding: Dao et al., 2023). None for as many as keep a GPU busy.
        tile: Sizes of the launch. None for the default, with few rows for few queries.

    Returns:
        Output `[B, H, T, Dv]`, and the natural logarithm of the sum of exponentials, float32
        `[B, H, T]`.

    Raises:
        ValueError: Shapes, dtypes, sizes or devices do not fit.
    """
    B, H, T, D = _sizes(queries, kv_heads)
    size, device = queries.element_size(), queries.device
    if table.ndim != 2 or len(table) != B:
        raise ValueError(f"table: got shape {list(table.shape)}, allowed is [{B}, S]")
    gapless("table", table, torch.int64, device)
    gapless("lengths", shaped("lengths", lengths, B), torch.int64, device)
    _check_bytes("row_bytes", row_bytes, size * (D + value_dim))
    _check_bytes("head_bytes", head_bytes, page_tokens * row_bytes)
    pairs = T * (H // kv_heads)
    if tile is None:
        few = TILE._replace(rows=max(16, next_power_of_2(pairs)))
        tile = few if pairs <= TILE.rows else WIDE_TILE
    for name, value in dict(rows=tile.rows, columns=tile.columns).items():
        if value < 16:
            raise ValueError(f"{name}: got {value}, allowed is at least 16")
    if page_tokens % tile.columns:
        raise ValueError(f"page_tokens: got {page_tokens}, allowed is a multiple of {tile.columns}")
    programs = cdiv(pairs, tile.rows) * B * kv_heads
    if splits is None:
        splits = next_power_of_2(max(1, PROGRAMS // programs))
    if splits < 1 or splits & (splits - 1):
        raise ValueError(f"splits: got {splits}, allowed is a power of two")
    output = torch.empty((B, H, T, value_dim), dtype=queries.dtype, device=device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=device)
    parts, part_lse = output, lse
    if splits > 1:
        parts = torch.empty((B, H, T, splits, value_dim), dtype=torch.float32, device=device)
        part_lse = torch.empty((B, H, T, splits), dtype=torch.float32, device=device)
    wide = max(16, next_power_of_2(value_dim))
    launch(
        attention.attend_pages,
        (cdiv(pairs, tile.rows), B * kv_heads, splits),
        tile,
        device,
        queries=queries,
        table=table,
        table_step=table.stride(0),
        lengths=lengths,
        parts=parts,
        lse=part_lse,
        scale=scale,
        T=T,
        head_step=head_bytes // size,
        row_step=row_bytes // size,
        G=kv_heads,
        GROUP=H // kv_heads,
        D=D,
        DV=value_dim,
        PAGE=page_tokens,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        WIDE=max(16, next_power_of_2(D)),
        WIDE_V=wide,
        SPLITS=splits,
        CAUSAL=causal,
    )
    if splits > 1:
        launch(
            attention.merge_splits,
            (B * H * T,),
            tile,
            device,
            parts=parts,
            lse=part_lse,
            output=output,
            merged_lse=lse,
            DV=value_dim,
            WIDE_V=wide,
            SPLITS=splits,
        )
    return output, lse


def _sizes(queries: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """Return the sizes `B, H, T, D` of queries. Raises ValueError if kernels do not support
    them."""
    if queries.ndim != 4 or not queries.numel():
        raise ValueError(f"queries: got shape {list(queries.shape)}, allowed is [B, H, T, D]")
    if queries.dtype not in DTYPES:
        raise ValueError(f"queries: got {queries.dtype}, allowed is one of {DTYPES}")
    if not queries.is_contiguous():
        raise ValueError(f"queries: got strides {queries.stride()}, allowed is a contiguous tensor")
    B, H, T, D = queries.shape
    if kv_heads < 1 or H % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, allowed is a divisor of the {H} query heads")
    return B, H, T, D


def _check_bytes(name: str, value: int, least: int) -> None:
    """Raise ValueError unless a stride in bytes is a multiple of 16 and at least `least`."""
    if value < least or value % 16:
        raise ValueError(f"{name}: got {value}, allowed is a multiple of 16, at least {least}")
