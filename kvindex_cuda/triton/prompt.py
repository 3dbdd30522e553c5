"""Attention of a chunk of a prompt to the keys and values that a store has in its pages."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import attention
from kvindex_cuda.triton.operands import DTYPES, Tile, gapless, launch, shaped

PAGE = 256
"""Tokens of a page of `kvindex_cuda.memory.block_store.BlockStore`."""

TILE = Tile(rows=64, columns=64, warps=4, stages=2)
"""Tile of the launch. `rows` is the number of (token, head) pairs per program, and `columns` the
number of keys that it reads at once."""


def attend_prompt(
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
    tile: Tile = TILE,
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
        tile: Sizes of the launch.

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
    for name, value in dict(rows=tile.rows, columns=tile.columns).items():
        if value < 16:
            raise ValueError(f"{name}: got {value}, allowed is at least 16")
    if page_tokens % tile.columns:
        raise ValueError(f"page_tokens: got {page_tokens}, allowed is a multiple of {tile.columns}")
    output = torch.empty((B, H, T, value_dim), dtype=queries.dtype, device=device)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=device)
    launch(
        attention.attend_prompt,
        (cdiv(T * (H // kv_heads), tile.rows), B * kv_heads),
        tile,
        device,
        queries=queries,
        table=table,
        table_step=table.stride(0),
        lengths=lengths,
        output=output,
        lse=lse,
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
        WIDE_V=max(16, next_power_of_2(value_dim)),
        CAUSAL=causal,
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
