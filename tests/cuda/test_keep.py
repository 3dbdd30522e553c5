"""Rows that a kernel puts into blocks, against copies by torch."""

import pytest
import torch

from kvindex.geometry import Geometry
from kvindex.store import Store
from kvindex_cuda import fetch, host_store, keep
from kvindex_cuda.device_store import DeviceStore
from kvindex_cuda.keep import keep as kept
from kvindex_cuda.layout import BLOCK
from tests.cuda.host_memory import SLAB, append, assert_same, tokens

B, G = 2, 3


def blocks_of(device, row_bytes, slots=3):
    """Memory of blocks `[B, slots, G, 256, row_bytes]` full of sevens, and a table of it."""
    memory = torch.full((B, slots, G, BLOCK, row_bytes), 7, dtype=torch.uint8, device=device)
    size, order = G * BLOCK * row_bytes, torch.arange(B * slots).view(slots, B).T.contiguous()
    memory = memory.view(B * slots, G, BLOCK, row_bytes)
    return memory, order, (memory.data_ptr() + order * size).to(device)


@pytest.mark.parametrize("row_bytes", [16, 48, 512])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 256), (100, 256), (255, 1), (256, 30), (10, 600), (0, 0)]
)
def test_rows_lie_where_they_should_and_nothing_else_changes(device, row_bytes, start, count):
    memory, order, table = blocks_of(device, row_bytes)
    rows = torch.randint(256, (B, G, count, row_bytes), dtype=torch.uint8, device=device)
    kept(rows, table, start)
    held = memory[order.to(device)].transpose(1, 2).flatten(2, 3)  # [B, G, slots · 256, row_bytes]
    assert torch.equal(held[:, :, start : start + count], rows)
    assert (held[:, :, :start] == 7).all()
    assert (held[:, :, start + count :] == 7).all()
    sizes = dict(kv_heads=G, row_bytes=row_bytes, tokens=3 * BLOCK)
    ids = torch.arange(start, start + count, device=device).expand(B, G, -1)
    assert torch.equal(fetch.gather_blocks(table, ids, **sizes), rows)


def test_rows_with_gaps(device, monkeypatch):
    memory, order, table = blocks_of(device, 32)
    rows = torch.randint(256, (B, 256, G, 32), dtype=torch.uint8, device=device).transpose(1, 2)
    monkeypatch.setattr(keep, "MOST_BLOCKS", 2)  # which go round several times
    kept(rows, table, 0)
    assert torch.equal(memory[order[:, 0].to(device)], rows)


def test_a_store_keeps_few_rows_by_it_and_others_by_copies(device, monkeypatch):
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=8, value_dim=3, device=device)
    store, reference = DeviceStore(geometry, slab_bytes=SLAB, max_tokens=4096), Store(geometry)
    store._launched, names = True, []  # as on a GPU
    monkeypatch.setattr(host_store, "keep", lambda *given: names.append(kept(*given)))
    for seed, count in enumerate((300, 1, 256, 700, 100)):
        piece = tuple(part.to(device) for part in tokens(count, seed))
        append(store, piece)
        append(reference, piece)
    assert len(names) == 3
    if device == "cpu":
        assert_same(store, reference)
    order = torch.tensor([1, 1, 0])
    ids = torch.arange(len(store), device=device).expand(3, 2, -1)
    got, want = (each.reordered(order).gather(ids) for each in (store, reference))
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)


@pytest.mark.parametrize(
    ("rows", "table", "start", "message"),
    [
        ((B, G, 4, 24), (B, 3), 0, "rows: got rows of 24 bytes, allowed are multiples of 16"),
        ((B, G, 4, 16), (B, 3), 765, "rows: got 2 times 4 tokens from 765 on, allowed are 2 times"),
        ((B, G, 4, 16), (B, 3), -1, "from -1 on"),
        ((B, G, 4, 16), (1, 3), 0, "allowed are 1 times 768"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(rows, table, start, message):
    with pytest.raises(ValueError, match=message):
        kept(torch.zeros(rows, dtype=torch.uint8), torch.zeros(table, dtype=torch.int64), start)
