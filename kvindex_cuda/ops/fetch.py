"""Gather rows (keys and values) by token id on the device (ParisKV paper, B.3)."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kvindex_cuda.runtime.arguments import contiguous_rows, of_shape, of_type, steps
from kvindex_cuda.runtime.launch import launch

THREADS, PIECE = 256, 16

MOST_BLOCKS = 2**31 - 1


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of a table by token id.

    Args:
        table: `[B, G, N, ...]` of any dtype.
        ids: int64 `[B, G, K]`.

    Returns:
        Rows `[B, G, K, ...]`. An id below 0 or from `N` on gives zeros rather than an error,
        because checking ids would make the host wait for the device.
    """
    B, G, N = table.shape[:3]
    K = ids.shape[-1]
    of_shape("ids", of_type("ids", ids, torch.int64), B, G, K)
    out = torch.empty((B, G, K, *table.shape[3:]), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    if N == 0:
        return out.zero_()
    table = contiguous_rows(table, table.ndim - 3)
    size = table.element_size()
    row_bytes = size * table[0, 0, 0].numel()
    strides = [size * step for step in steps(table)[:3]]
    piece = gcd(PIECE, row_bytes, table.data_ptr(), *strides)
    pieces = row_bytes // piece
    total = B * G * K * pieces
    launch(
        "ops/fetch.cu",
        "gather_rows",
        (min(-(-total // THREADS), MOST_BLOCKS),),
        (THREADS,),
        arguments=dict(
            rows=table,
            ids=ids.contiguous(),
            gathered=out,
            rows_batch=strides[0] // piece,
            rows_head=strides[1] // piece,
            rows_token=strides[2] // piece,
            pieces=pieces,
            count=K,
            n=N,
            kv_heads=G,
            total=total,
        ),
        PIECE=piece,
    )
    return out


def gather_blocks(
    table: Tensor, ids: Tensor, *, kv_heads: int, row_bytes: int, tokens: int
) -> Tensor:
    """Gather rows by token id from the blocks of a store, as bytes `[B, G, K, row_bytes]`.

    Args:
        table: Addresses of blocks `[G, 256, row_bytes]`, int64 `[B, S]`, each a multiple of 16.
        ids: int64 `[B, G, K]`. An id below 0 or from `tokens` on gives a row of zeros.
        tokens: Number of tokens in the store.
        kv_heads: KV heads, `G`.
        row_bytes: Bytes of a row, a multiple of 16.
    """
    B, K = len(of_type("table", table, torch.int64)), ids.shape[-1]
    of_shape("ids", of_type("ids", ids, torch.int64), B, kv_heads, K)
    shape = (B, kv_heads, K, row_bytes)
    out = torch.empty(shape, dtype=torch.uint8, device=ids.device)
    pieces = row_bytes // PIECE
    total = B * kv_heads * K * pieces
    launch(
        "ops/fetch.cu",
        "gather_blocks",
        (min(-(-total // THREADS), MOST_BLOCKS),),
        (THREADS,),
        arguments=dict(
            rows=table,
            ids=ids.contiguous(),
            gathered=out,
            rows_batch=table.stride(0),
            pieces=pieces,
            count=K,
            n=tokens,
            kv_heads=kv_heads,
            total=total,
        ),
        PIECE=PIECE,
    )
    return out
