"""Rows that a kernel writes into blocks, compared with copies by torch."""

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory import block_store, write_rows
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.memory.write_rows import fits
from kvindex_cuda.memory.write_rows import write_rows as kept
from kvindex_cuda.ops import fetch
from tests.cuda.host_memory import SLAB, append, assert_same, tokens

B, G = 2, 3


def blocks_of(device, row_bytes, slots=3):
    """Memory of blocks `[B, slots, G, 256, row_bytes]` filled with sevens, and a table of its
    addresses.
    """
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
    kept([rows], table, start)
    held = memory[order.to(device)].transpose(1, 2).flatten(2, 3)  # [B, G, slots · 256, row_bytes]
    assert torch.equal(held[:, :, start : start + count], rows)
    assert (held[:, :, :start] == 7).all()
    assert (held[:, :, start + count :] == 7).all()
    sizes = dict(kv_heads=G, row_bytes=row_bytes, tokens=3 * BLOCK)
    ids = torch.arange(start, start + count, device=device).expand(B, G, -1)
    assert torch.equal(fetch.gather_blocks(table, ids, **sizes), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_as_a_model_leaves_them(device, dtype, monkeypatch):
    memory, order, table = blocks_of(device, 40 * dtype.itemsize)
    both = torch.randn((B, 256, G, 40), device=device).to(dtype).transpose(1, 2)
    monkeypatch.setattr(write_rows, "MOST_BLOCKS", 2)  # the rows that go around several times
    kept([both[..., :32], both[..., 32:]], table, 0)
    assert torch.equal(memory[order[:, 0].to(device)], both.contiguous().view(torch.uint8))
    if dtype is torch.bfloat16:
        assert not fits(both[..., 4:12])  # a key or value at a multiple of 8 bytes only
    assert not fits(both[..., :3])
    assert not fits(both[..., ::2])


@pytest.mark.parametrize(("value_dim", "rows"), [(8, "plain"), (3, "plain"), (8, "int8")])
def test_a_store_keeps_few_rows_by_it_and_others_by_copies(device, value_dim, rows, monkeypatch):
    sizes = dict(q_heads=4, kv_heads=2, head_dim=8, value_dim=value_dim)
    geometry = Geometry.of(**sizes, device=device)
    store, reference = (
        block_store.BlockStore(
            geometry, DeviceAllocator(geometry.device), slab_bytes=SLAB, row_codec=rows
        ),
        TensorStore(geometry, row_codec=rows),
    )
    store._launched, names = True, []  # as on a GPU
    monkeypatch.setattr(block_store, "write_rows", lambda *given: names.append(kept(*given)))
    for seed, count in enumerate((300, 1, 256, 700, 100)):
        piece = tuple(part.to(device) for part in tokens(count, seed, geometry=geometry))
        joined = value_dim == 3 or rows == "int8" or count > 256
        assert ("keys" in store.join(*piece)) != joined
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
        (
            (B, G, 4, 24),
            (B, 3),
            0,
            r"rows: got torch.uint8 \(2, 3, 4, 24\) with strides .*16 bytes",
        ),
        ((B, G, 4, 16), (B, 3), 765, "rows: got 4 tokens of 2 sequences from position 765 on, but"),
        ((B, G, 4, 16), (B, 3), -1, "from position -1 on"),
        ((B, G, 4, 16), (1, 3), 0, "has room for 768 tokens of 1 sequences"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(rows, table, start, message):
    with pytest.raises(ValueError, match=message):
        kept([torch.zeros(rows, dtype=torch.uint8)], torch.zeros(table, dtype=torch.int64), start)
