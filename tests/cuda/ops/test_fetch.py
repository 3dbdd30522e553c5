"""Gathering rows by a kernel equals the torch reference bit by bit."""

import pytest
import torch

from kvindex.ops import fetch as reference
from kvindex_cuda.ops import fetch
from tests.cuda import emulator
from tests.cuda.devices import on, on_devices


def drawn(seed, *shape):
    """A table of bytes, with ids of its rows and -1."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    ids = torch.randint(-1, shape[2], (*shape[:2], 300), generator=generator)
    ids[0, 0, :3] = torch.tensor([-1, -7, shape[2] - 1])
    return table, ids


def agree(table, ids, device, **settings):
    """Return True if the kernel returns what the reference does."""
    table, ids = table.to(device), ids.to(device)
    with on(device, **settings):
        got = fetch.gather_rows(table, ids)
    want = reference.gather_rows(table, ids)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    return torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


TYPES = [torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64]


@on_devices
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(8,), (3, 16), (5, 1), (256,)])
def test_any_type_and_shape_of_a_row(shape, dtype, device):
    size = torch.empty(0, dtype=dtype).element_size()
    table, ids = drawn(len(shape), 2, 3, 70, *shape[:-1], shape[-1] * size)
    assert agree(table.view(dtype), ids, device)


@on_devices
@pytest.mark.parametrize("width", [1, 2, 6, 12, 16, 24, 32, 272])
def test_rows_of_a_table_with_room_for_more(width, device):
    table, ids = drawn(width, 2, 2, 90, width)
    assert agree(table[:, :, :70], ids.clamp_max(69), device)
    assert agree(table[:, :, 3:], ids.clamp_max(86), device)


@on_devices
def test_strides_of_every_kind(device):
    table, ids = drawn(1, 2, 3, 50, 4, 32)
    assert agree(table[:, :, ::2], ids.clamp_max(24), device)
    assert agree(table[..., 5:17], ids, device)
    assert agree(table[:1].expand(2, -1, -1, -1, -1), ids, device)
    assert agree(table.transpose(3, 4), ids, device)
    assert agree(table, ids[:, :, ::3], device)


@on_devices
def test_bool_rows_and_rows_that_are_numbers(device):
    table, ids = drawn(2, 2, 3, 50)
    assert agree(table, ids, device)
    assert agree(table > 100, ids, device)


@on_devices
def test_nothing_to_gather(device):
    table, ids = drawn(3, 2, 2, 10, 0, 8)
    assert agree(table, ids, device)
    assert agree(drawn(3, 2, 2, 10, 8)[0], ids[..., :0], device)
    with on(device):
        none = fetch.gather_rows(torch.ones(2, 2, 0, 5, device=device), -torch.ones_like(ids))
    assert torch.equal(none, torch.zeros(2, 2, 300, 5, device=device))


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_whatever_the_order_of_threads_and_blocks():
    table, ids = drawn(4, 1, 2, 40, 48)
    assert all(agree(table, ids, "cpu", order=order, seed=2) for order in emulator.ORDERS)


@on_devices
def test_offsets_past_32_bits(device):
    count = 2**29 + 7  # rows of 8 bytes: 4 GB, of which few pages are accessed
    table = torch.empty((1, 1, count, 8), dtype=torch.uint8, device=device)
    ids = torch.tensor([[[5, 2**28, 2**28 + 3, 2**29 + 6, -1]]], device=device)
    some = torch.randint(256, (5, 8), dtype=torch.uint8, device=device)
    some[4] = 0
    table[0, 0, ids[0, 0, :4]] = some[:4]
    with on(device):
        assert torch.equal(fetch.gather_rows(table, ids)[0, 0], some)


@on_devices
def test_ids_beyond_the_table_read_nothing(device):
    table, ids = (part.to(device) for part in drawn(5, 1, 2, 40, 48))
    ids[:, :, 7], ids[:, :, 8] = 40, 2**40
    with on(device):
        rows = fetch.gather_rows(table, ids)
    assert not rows[:, :, 7:9].any()


@on_devices
def test_the_comparison_can_fail(device):
    table, ids = (part.to(device) for part in drawn(6, 1, 2, 40, 48))
    with on(device):
        got = fetch.gather_rows(table, ids)
    assert torch.equal(got, reference.gather_rows(table, ids))
    ids[0, 1, 200] = (ids[0, 1, 200] + 1) % 40
    assert not torch.equal(got, reference.gather_rows(table, ids))


def in_blocks(rows):
    """Rows uint8 `[B, G, N, row_bytes]` in scattered blocks, and the table of their addresses."""
    B, G, N, width = rows.shape
    S = -(-N // 256)
    padded = torch.full((B, G, S * 256, width), 0xEE, dtype=torch.uint8, device=rows.device)
    padded[:, :, :N] = rows
    order = torch.randperm(B * S, generator=torch.Generator().manual_seed(3))
    blocks = torch.empty((B * S, G, 256, width), dtype=torch.uint8, device=rows.device)
    blocks[order] = padded.view(B, G, S, 256, width).transpose(1, 2).reshape(blocks.shape)
    return blocks, (blocks.data_ptr() + order * blocks[0].numel()).view(B, S).to(rows.device)


@on_devices
@pytest.mark.parametrize("width", [16, 48, 512])
@pytest.mark.parametrize("count", [1, 256, 700])
def test_rows_in_blocks(count, width, device):
    rows, ids = (part.to(device) for part in drawn(width, 2, 3, count, width))
    _kept, table = in_blocks(rows)
    sizes = dict(kv_heads=3, row_bytes=width, tokens=count)
    with on(device):
        got = fetch.gather_blocks(table, ids, **sizes)
        of_one = fetch.gather_blocks(table[:1].expand(2, -1), ids, **sizes)
    assert torch.equal(got, reference.gather_rows(rows, ids))
    assert torch.equal(of_one, reference.gather_rows(rows[:1].expand(2, -1, -1, -1), ids))
    with on(device):
        none = fetch.gather_blocks(table, ids.clamp_min(0) + count, **sizes)
        empty = fetch.gather_blocks(table, ids[..., :0], **sizes)
    assert not none.any()
    assert empty.shape == (2, 3, 0, width)


def test_what_the_kernel_does_not_serve_is_refused():
    table, ids = drawn(7, 1, 2, 40, 48)
    with pytest.raises(ValueError, match=r"ids: got torch.int32, allowed is torch.int64"):
        fetch.gather_rows(table, ids.int())
    with pytest.raises(ValueError, match="ids: got shape"):
        fetch.gather_rows(table, ids[:, :1])
    with pytest.raises(ValueError, match="allowed is a CUDA device"):
        fetch.gather_rows(table, ids)
