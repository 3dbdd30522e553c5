"""Attention to pages of rows on a CPU, in place of the Triton kernel, which cannot run there."""

from __future__ import annotations

import ctypes
from math import prod

import pytest
import torch
from torch import Tensor

import kvindex_cuda.memory.block_store as stores


def at_address(address, shape, dtype):
    """Return a copy of the tensor that is at an address."""
    size = prod(shape) * dtype.itemsize
    raw = (ctypes.c_char * size).from_address(int(address))
    return torch.frombuffer(raw, dtype=dtype).view(shape).clone()


def attend_pages(
    queries, table, lengths, *, kv_heads, value_dim, scale, newest=None, valid=None, **sizes
):
    """Do what `kvindex_cuda.triton.attend_pages` does, without causal attention to the pages."""
    width, tokens = queries.shape[3] + value_dim, sizes["page_tokens"]
    assert sizes["row_bytes"] == width * queries.element_size()
    assert sizes["head_bytes"] == tokens * sizes["row_bytes"]
    assert not sizes["causal"]
    more = (None, None, None, 0, None) if newest is None else newest
    given = queries, table, lengths, kv_heads, value_dim, scale, tokens
    return _attend_pages(*given, *more, valid)


@torch.library.custom_op("kvindex_tests::attend_pages", mutates_args=())
def _attend_pages(
    queries: Tensor,
    table: Tensor,
    lengths: Tensor,
    kv_heads: int,
    value_dim: int,
    scale: float,
    tokens: int,
    places: Tensor | None,
    ends: Tensor | None,
    newest: Tensor | None,
    begin: int,
    mask: Tensor | None,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A single operation, so that a recorded graph (`graphs.py`) contains it as a whole."""
    from kvindex.pariskv.block_layout import flags_of
    from kvindex_cuda.triton import reference

    outputs, width = [], queries.shape[3] + value_dim
    for b, length in enumerate(lengths.tolist()):
        shape = kv_heads, tokens, width
        pages = [at_address(one, shape, queries.dtype) for one in table[b, : -(-length // tokens)]]
        rows = torch.cat(pages, 1)[None, :, :length]
        if valid is not None:
            rows = rows[:, :, flags_of(valid[b : b + 1].unflatten(1, (-1, 8)), length)[0]]
        if newest is not None:
            assert places[b].tolist() == [newest[b].data_ptr()]
            shown = slice(begin, int(ends[b]))
            own = newest[b : b + 1, :, shown]
            if mask is not None:
                own = own[:, :, mask[b, shown].bool()]
            rows = torch.cat([rows, own], 2)
        end = rows.shape[2]
        parts = rows.split([queries.shape[3], value_dim], dim=3)
        given = queries[b : b + 1], *parts, torch.tensor([end])
        causal = newest is not None
        outputs.append(reference.attend_pages(*given, scale=scale, causal=causal))
    output, lse = zip(*outputs, strict=True)
    return torch.cat(output), torch.cat(lse)


def let_read_pages(monkeypatch):
    """Let stores on a CPU attend to all of their rows."""
    monkeypatch.setattr("kvindex_cuda.triton.attend_pages", attend_pages)
    monkeypatch.setattr("kvindex_cuda.triton.pages.attend_pages", attend_pages)
    monkeypatch.setattr(stores.BlockStore, "most_tokens", 32)


@pytest.fixture
def reads_pages(device, monkeypatch):
    """Let stores attend to all of their rows on a CPU, too."""
    pytest.importorskip("triton")
    if device == "cpu":
        let_read_pages(monkeypatch)
