"""Attention of several tokens of each sequence to the rows (keys and values) that are stored in
pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import attention
from kvindex_cuda.triton.operands import DTYPES, Tile, gapless, launch, shaped

PAGE = 256
"""Tokens of a page of `kvindex_cuda.memory.block_store.BlockStore`."""

TILE = Tile(rows=64, columns=64, warps=4, stages=3)
"""Tile of a launch for up to 64 pairs of a token and a query head. `rows` is the number of pairs of
a program, and `columns` the number of keys that it reads at once. Both are smaller for few pairs or
wide keys, and keys of more than 256 bytes have fewer stages."""

LARGEST = {
    512: Tile(rows=128, columns=64, warps=8, stages=2),
    1024: Tile(rows=64, columns=32, warps=4, stages=2),
    2048: Tile(rows=32, columns=16, warps=4, stages=2),
}
"""Largest tile, by the largest number of bytes of a key or value (`wide_bytes`). Larger ones do not
fit into the shared memory of an H200."""

PROGRAMS = 256
"""Number of Triton programs that a launch should have: about two for each multiprocessor of an
H200."""


class Newest(NamedTuple):
    """The newest rows of sequences, which are not in their pages. Attention to them is causal.

    Attributes:
        table: Address of the rows of each sequence, int64 `[B, 1]`, on the device.
        lengths: Number of rows of each sequence, int64 `[B]`, on the device, with any stride. The
            last `T` are those of the queries.
        rows: The rows, `[B, G, W, D + Dv]`, contiguous.
        begin: Number of rows at the beginning that are left out, because pages contain them.
        mask: 1 for rows to attend to and 0 for the others, uint8 `[B, W]`, contiguous; None to
            attend to all. The numbers of other rows must be finite.
    """

    table: Tensor
    lengths: Tensor
    rows: Tensor
    begin: int
    mask: Tensor | None = None


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
    newest: Newest | None = None,
    valid: Tensor | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with `T` queries per head to rows that are stored in pages.

    For a query that sees no row, the output is 0 and the log-sum-exp is `-inf`.

    Args:
        queries: `[B, H, T, D]`, contiguous, or the transposed view of a contiguous tensor
            `[B, T, H, D]`. Results are stored in the same order.
        table: Addresses of pages, int64 `[B, S]`, as in `kvindex.storage.store.AddressedRows`; 0
            for a page without rows. A row is a key followed by its value, in the queries' dtype.
        lengths: Number of rows of each sequence, int64 `[B]`, up to `S · page_tokens`. It is read
            on the device, and may have any stride.
        kv_heads: KV heads, `G`.
        value_dim: Dimension of a value, `Dv`.
        scale: Multiplies the logits.
        row_bytes: Bytes from a row to the next one.
        head_bytes: Bytes from a KV head's rows of a page to the next head's.
        page_tokens: Tokens of a page.
        causal: Whether attention is causal: the queries belong to the last `T` rows, and each query
            sees its own row and earlier ones. If not, they see all rows.
        newest: Further rows to attend to, or None. Attention to the pages must not be causal then.
        valid: One bit for each row of the pages, from the lowest bit of the first word on, int32
            `[B, S · page_tokens / 32]`, contiguous; 0 for rows that are left out, whose numbers
            must be finite. None to attend to all rows.
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
    _check_lengths("lengths", lengths, B, device)
    if valid is not None:
        words = table.shape[1] * page_tokens // 32
        gapless("valid", shaped("valid", valid, B, words), torch.int32, device)
    _check_bytes("row_bytes", row_bytes, size * (D + value_dim))
    _check_bytes("head_bytes", head_bytes, page_tokens * row_bytes)
    if newest is not None:
        _check_newest(newest, queries, kv_heads, value_dim, causal)
    pairs = T * (H // kv_heads)
    if tile is None:
        tile = usual_tile(pairs, wide_bytes(D, value_dim, size))
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
    slots = splits if newest is None else 2 * splits
    by_head = queries.is_contiguous()
    output = torch.empty((B, H * T, value_dim), dtype=queries.dtype, device=device)
    lse = torch.empty((B, H * T), dtype=torch.float32, device=device)
    parts, part_lse = output, lse
    if slots > 1:
        parts = torch.empty((B, H * T, slots, value_dim), dtype=torch.float32, device=device)
        part_lse = torch.empty((B, H * T, slots), dtype=torch.float32, device=device)
    wide = max(16, next_power_of_2(value_dim))
    given = dict(queries=queries, parts=parts, lse=part_lse, scale=scale, T=T)
    given |= dict(next_head=T, next_token=1) if by_head else dict(next_head=1, next_token=H)
    given |= dict(G=kv_heads, GROUP=H // kv_heads, D=D, DV=value_dim)
    given |= dict(BLOCK_M=tile.rows, BLOCK_N=tile.columns, SPLITS=splits, SLOTS=slots)
    given |= dict(WIDE=max(16, next_power_of_2(D)), WIDE_V=wide)
    grid = cdiv(pairs, tile.rows), B * kv_heads, splits
    pages = dict(table=table, table_step=table.stride(0), lengths=lengths, PAGE=page_tokens)
    pages |= dict(head_step=head_bytes // size, row_step=row_bytes // size)
    pages |= dict(begin=0, slot=0, CAUSAL=causal, length_step=lengths.stride(0))
    pages |= _flags(valid, 32)
    launch(attention.attend_pages, grid, tile, device, **given, **pages)
    if newest is not None:
        rows = newest.rows
        pages = dict(table=newest.table, table_step=newest.table.stride(0), lengths=newest.lengths)
        pages |= dict(PAGE=next_power_of_2(max(rows.shape[2], tile.columns)))
        pages |= dict(head_step=rows.stride(1), row_step=rows.stride(2))
        pages |= dict(begin=newest.begin, slot=splits, CAUSAL=True)
        pages |= dict(length_step=newest.lengths.stride(0)) | _flags(newest.mask, 1)
        launch(attention.attend_pages, grid, tile, device, **given, **pages)
    if slots > 1:
        given = dict(parts=parts, lse=part_lse, output=output, merged_lse=lse)
        given |= dict(DV=value_dim, WIDE_V=wide, SPLITS=slots)
        launch(attention.merge_splits, (B * H * T,), tile, device, **given)
    if by_head:
        return output.view(B, H, T, value_dim), lse.view(B, H, T)
    return output.view(B, T, H, value_dim).transpose(1, 2), lse.view(B, T, H).transpose(1, 2)


def wide_bytes(dim: int, value_dim: int, size: int) -> int:
    """Return the bytes of a key or of a value in a tile, whichever is larger.

    Args:
        dim: Dimension of a key.
        value_dim: Dimension of a value.
        size: Bytes of an element.
    """
    return size * max(16, 1 << (max(dim, value_dim) - 1).bit_length())


def usual_tile(pairs: int, width: int) -> Tile:
    """Return the default tile for a number of pairs of a token and a query head, and for keys and
    values of `width` bytes (`wide_bytes`).

    Raises ValueError if no tile fits into shared memory.
    """
    largest = next((tile for most, tile in LARGEST.items() if width <= most), None)
    if largest is None:
        raise ValueError(
            f"queries: got keys or values of {width} bytes, allowed are {max(LARGEST)}"
        )
    if pairs > TILE.rows:
        return largest
    rows = min(largest.rows, max(16, next_power_of_2(pairs)))
    stages = TILE.stages if width <= 256 else largest.stages
    return TILE._replace(rows=rows, columns=largest.columns, stages=stages)


def _sizes(queries: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """Return the sizes `B, H, T, D` of queries. Raises ValueError if kernels do not support
    them."""
    if queries.ndim != 4 or not queries.numel():
        raise ValueError(f"queries: got shape {list(queries.shape)}, allowed is [B, H, T, D]")
    if queries.dtype not in DTYPES:
        raise ValueError(f"queries: got {queries.dtype}, allowed is one of {DTYPES}")
    if not (queries.is_contiguous() or queries.transpose(1, 2).is_contiguous()):
        raise ValueError(
            f"queries: got strides {queries.stride()}, allowed is a contiguous tensor, or the "
            "transposed view of one"
        )
    B, H, T, D = queries.shape
    if kv_heads < 1 or H % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, allowed is a divisor of the {H} query heads")
    return B, H, T, D


def _check_newest(
    newest: Newest, queries: Tensor, kv_heads: int, value_dim: int, causal: bool
) -> None:
    """Raise ValueError if the newest rows do not fit the queries."""
    (B, _, _, D), rows, device = queries.shape, newest.rows, queries.device
    if causal:
        raise ValueError("causal: got True with newest rows, allowed is False")
    gapless("newest.table", shaped("newest.table", newest.table, B, 1), torch.int64, device)
    _check_lengths("newest.lengths", newest.lengths, B, device)
    gapless("newest.rows", rows, queries.dtype, device)
    shaped("newest.rows", rows, B, kv_heads, rows.shape[2], D + value_dim)
    if not rows.is_contiguous():
        raise ValueError(f"newest.rows: got strides {rows.stride()}, allowed are contiguous rows")
    if newest.mask is not None:
        mask = shaped("newest.mask", newest.mask, B, rows.shape[2])
        gapless("newest.mask", mask, torch.uint8, device)


def _check_lengths(name: str, lengths: Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless `lengths` is int64 `[B]` on the device, with any stride."""
    shaped(name, lengths, batch)
    gapless(name, lengths[:1], torch.int64, device)


def _flags(flags: Tensor | None, rows: int) -> dict[str, Any]:
    """Return the kernel's arguments for flags, whose elements each have those of `rows` rows."""
    if flags is None:
        return dict(flags=None, flag_step=0, FLAGS=0)
    return dict(flags=flags, flag_step=flags.stride(0), FLAGS=rows)


def _check_bytes(name: str, value: int, least: int) -> None:
    """Raise ValueError unless a stride in bytes is a multiple of 16 and at least `least`."""
    if value < least or value % 16:
        raise ValueError(f"{name}: got {value}, allowed is a multiple of 16, at least {least}")
