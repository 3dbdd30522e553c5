"""Codes in blocks: a `Columns` whose data stays at the same addresses."""

import pytest
import torch

from kvindex.storage.columns import BlockColumns, Columns
from kvindex_cuda.memory.code_blocks import AHEAD_BYTES, CodeBlocks, Fill
from kvindex_cuda.memory.layout import BLOCK, Layout

LAYOUT = Layout(40, 3)


def codes(count, batch=2, heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def bytes_of(*shape):
        full = (batch, heads, count, *shape)
        return torch.randint(0, 256, full, generator=generator).to(torch.uint8)

    return {
        "signs": bytes_of(5),
        "magnitudes": bytes_of(3, 5),
        "weights": bytes_of(1),
        "fractions": bytes_of(1),
    }


def both(*pieces):
    blocks, columns = CodeBlocks(LAYOUT, 3, torch.device("cpu"), 4096), Columns()
    for part in pieces:
        blocks.append(part)
        columns.append(part)
    return blocks, columns


def assert_same(blocks, columns):
    assert len(blocks) == len(columns)
    assert set(blocks) == set(columns)
    for name in columns:
        assert torch.equal(blocks[name], columns[name]), name


@pytest.mark.parametrize("counts", [[1], [255], [256], [257], [1, 255, 1], [300, 0, 900]], ids=str)
def test_what_is_appended_is_there(counts):
    assert_same(*both(*[codes(count, seed=i) for i, count in enumerate(counts)]))


@pytest.mark.parametrize("stride", [1, 4, 256, 1024])
def test_every_so_many_keys_are_found(stride):
    blocks, columns = both(*[codes(count, seed=count) for count in (300, 900, 1000)])
    for name in columns:
        want = columns[name][:, :, :2048:stride]
        for some in (blocks, columns, blocks.reordered(torch.tensor([0, 1]))):
            assert torch.equal(some.every(name, 2048, stride), want), name


def test_blocks_do_not_move_when_there_are_more():
    blocks, _ = both(codes(300))
    before, table = blocks.table.clone(), blocks.table
    for seed in range(5):
        blocks.append(codes(400, seed=seed))
    assert blocks.table is table
    assert torch.equal(blocks.table[:, :2], before[:, :2])
    used = blocks.table[:, : -(-len(blocks) // BLOCK)].flatten()
    assert used.unique().numel() == used.numel()
    assert (used > 0).all()


def test_truncated_blocks_are_filled_again():
    blocks, columns = both(codes(700))
    table = blocks.table.clone()
    for part in (blocks, columns):
        part.truncate(300)
        part.append(codes(100, seed=3))
    assert_same(blocks, columns)
    assert torch.equal(blocks.table, table)


@pytest.mark.parametrize("order", [[1, 0], [0], [1, 1, 0]], ids=str)
def test_a_reordered_copy_is_on_its_own(order):
    blocks, columns = both(codes(300))
    order = torch.tensor(order)
    mine, theirs = blocks.reordered(order), columns.reordered(order)
    assert_same(mine, theirs)
    more = codes(300, batch=len(order), seed=5)
    mine.append(more)
    theirs.append(more)
    assert_same(mine, theirs)
    assert_same(blocks, columns)


def test_a_view_repeats_the_one_row():
    blocks, columns = both(codes(300, batch=1))
    assert_same(blocks.expand_batch(3), columns.expand_batch(3))


def centered(count, seed=0):
    """Codes of whole blocks, with centers."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(2, 3, -(-count // BLOCK), 40, generator=generator).bfloat16()
    return {**codes(count, seed=seed), "centers": centers}


def whole_blocks():
    options = dict(unit=BLOCK, centered=True)
    return CodeBlocks(LAYOUT, 3, torch.device("cpu"), 4096, **options), BlockColumns(BLOCK)


def test_whole_blocks_come_and_go_with_their_centers():
    blocks, columns = pair = whole_blocks()
    for count in (256, 768, 512):
        for each in pair:
            each.append(centered(count, seed=count))
        assert_same(blocks, columns)
    for length in (1535, 700, 256):
        for each in pair:
            each.truncate(length)
        assert len(blocks) == length // BLOCK * BLOCK
        assert_same(blocks, columns)
    assert_same(blocks.reordered(torch.tensor([1])), columns.reordered(torch.tensor([1])))
    assert blocks.nbytes() == 2 * 3 * (256 * (8 + 24 + 3) + 80)


def test_an_open_block_follows_and_is_not_counted():
    blocks, columns = pair = whole_blocks()
    for each in pair:
        each.append(centered(512))
    new = centered(100, seed=1)
    blocks.reserve_open(2)
    blocks.put_open(new)
    assert_same(blocks, columns)
    held = blocks._shallow()
    held._length = 768
    assert torch.equal(held["signs"][:, :, 512:612], new["signs"])
    assert torch.equal(held["centers"][:, :, 2:], new["centers"])


def test_a_kernel_may_write_the_codes():
    blocks, columns = both(codes(300))
    new, seen = codes(400, seed=1), []

    def write(table):
        seen.append(table)
        blocks._copy(new, 300, 400)

    before = blocks.table.clone()
    blocks.reserve(Fill(2, 400, write))
    assert len(blocks) == 300
    assert torch.equal(blocks.table[:, :2], before[:, :2])
    blocks.append(Fill(2, 400, write))
    columns.append(new)
    assert_same(blocks, columns)
    assert seen[0] is blocks.table


def test_what_comes_late_is_written_as_it_is_appended():
    blocks, written = both(codes(256))[0], []
    fill = Fill(2, 256, lambda table: written.append(len(blocks)), late=True, beyond=1)
    blocks.reserve(fill)
    assert blocks._blocks == 3
    blocks.write(fill)
    assert not written
    blocks.append(fill)
    assert written == [256]


def test_a_kernel_that_fails_changes_nothing():
    blocks, columns = both(codes(300))

    def write(table):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        blocks.append(Fill(2, 400, write))
    assert_same(blocks, columns)
    blocks.append(codes(400, seed=2))
    columns.append(codes(400, seed=2))
    assert_same(blocks, columns)


def test_blocks_that_follow_one_another_are_one_run():
    blocks = CodeBlocks(LAYOUT, 3, torch.device("cpu"))
    slab = AHEAD_BYTES // blocks._block_bytes
    blocks.append(Fill(1, slab * BLOCK, lambda table: None))
    for _ in range(40):
        blocks.append(Fill(1, BLOCK, lambda table: None))
    assert [run.blocks for run in blocks._held[0]] == [slab, 40]
    steps = blocks.table[0, : slab + 40].diff()
    assert int((steps != blocks._block_bytes).sum()) <= 1


def test_memory_is_taken_a_quarter_ahead_and_as_it_is_reserved():
    blocks = CodeBlocks(LAYOUT, 3, torch.device("cpu"))

    def room():
        return sum(len(slab) for slab in blocks._slabs)

    blocks.append(Fill(1, 100 * BLOCK, lambda table: None))
    assert room() == 100
    blocks.append(Fill(1, BLOCK, lambda table: None))
    assert room() == 125
    blocks.reserve_tokens(130 * BLOCK)
    assert room() == 130
    assert len(blocks.reordered(torch.tensor([0, 0]))._slabs[0]) == 2 * 101


def test_too_many_tokens_change_nothing():
    blocks, columns = both(codes(300))
    with pytest.raises(ValueError, match="max_tokens: got 4300 tokens, allowed are up to 4096"):
        blocks.append(codes(4000))
    assert_same(blocks, columns)


def test_bytes_of_a_key():
    blocks, _ = both(codes(300))
    assert blocks.nbytes() == 2 * 3 * 300 * (8 + 24 + 3)  # 5 bytes padded to 8
