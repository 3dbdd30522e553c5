"""Pages by a block table: writing, reading, and when a block's codes are due."""

import pytest
import torch

from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm import pages

G, D = 2, 8


def scattered(tokens, length, seed=0):
    """Put rows `[length, G, D]` into pages with an unordered table, and return their slots."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-length // tokens)
    table = torch.randperm(blocks + 3, generator=generator)[:blocks].int()
    memory = torch.full((blocks + 3, G, tokens, 2 * D), torch.nan)
    keys, values = torch.randn(2, length, G, D, generator=generator)
    places = torch.arange(length)
    slots = table.long()[places // tokens] * tokens + places % tokens
    return memory, table, slots, keys, values


@pytest.mark.parametrize("tokens", [256, 512])
def test_rows_come_back_from_where_they_were_put(tokens):
    memory, table, slots, keys, values = scattered(tokens, 1100)
    for start, stop in ((0, 700), (700, 701), (701, 1100)):
        some = slice(start, stop)
        pages.write_rows(memory, slots[some], keys[some], values[some])
    for start, stop in ((0, 1100), (255, 257), (600, 1100), (512, 512)):
        rows = pages.read_rows(memory, table, start, stop)
        assert torch.equal(rows.keys[0], keys[start:stop].transpose(0, 1))
        assert torch.equal(rows.values[0], values[start:stop].transpose(0, 1))
    ids = torch.tensor([[[3, 1099, 0, 512], [700, -1, 255, 256]]])
    rows = pages.gather_rows(memory, table, ids)
    for head in range(G):
        assert torch.equal(rows.keys[0, head], keys[ids[0, head].clamp_min(0), head])
        assert torch.equal(rows.values[0, head], values[ids[0, head].clamp_min(0), head])


def test_a_slot_of_padding_writes_nothing():
    memory, _, slots, keys, values = scattered(256, 3)
    pages.write_rows(memory, torch.tensor([-1, int(slots[1]), -1]), keys, values)
    assert memory.isnan().logical_not().sum() == 2 * D * G
    assert pages.filled(torch.tensor([-1, -1])).numel() == 0


def test_a_block_is_due_when_its_last_key_comes():
    assert pages.filled(torch.arange(0, 255)).tolist() == []
    assert pages.filled(torch.tensor([255])).tolist() == [0]
    assert pages.filled(torch.tensor([1023, 4, 511, -1])).tolist() == [3, 1]


@pytest.mark.parametrize("tokens", [256, 768])
def test_records_follow_the_table(tokens):
    memory, table, slots, keys, values = scattered(tokens, 1100)
    pages.write_rows(memory, slots, keys, values)
    segments = pages.filled(slots)
    own = pages.segment_keys(memory, segments)
    assert torch.equal(own.transpose(1, 2).flatten(0, 1), keys[: 4 * BLOCK])
    records = torch.zeros((len(memory), G, tokens // BLOCK, 5), dtype=torch.uint8)
    codes = torch.randint(1, 256, (4, G, 5), dtype=torch.uint8)
    pages.write_records(records, segments, codes)
    for count in range(5):
        assert torch.equal(pages.read_records(records, table, count), codes[:count])
    assert (records != 0).any(-1).sum() == 4 * G


def test_reading_rows_does_not_copy_all_pages():
    some = torch.randn(1, 2, 256, 16)
    memory = some.expand(2**26, -1, -1, -1)  # a terabyte, if it were copied
    rows = pages.read_rows(memory, torch.tensor([2**25, 7]), 100, 500)
    both = torch.cat([some[0], some[0]], dim=1)[None, :, 100:500]
    assert torch.equal(torch.cat([rows.keys, rows.values], dim=-1), both)
