"""LeoAM: bounds of chunks and of their parts, and the rows that splitting finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.indexes.leoam import LeoAM, LeoAMConfig
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
SMALL = dict(page=16, leaf=2)


def bounds_of(index, queries):
    """Return bounds of all chunks, `[B, G, chunks]` for each level; one head per group."""
    folded, pages = queries[:, :, None].float(), index._codes["low"].shape[2]
    for level in range(len(index.config.sizes)):
        chunks = torch.arange(pages << level).expand(len(queries), queries.shape[1], -1)
        yield index._bounds(folded, chunks, level)[:, :, 0]


def whole_numbers(seed, *shape):
    """Return small integers as float32, whose products are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def assert_bounded(kind, seed, count):
    keys, queries = whole_numbers(seed, 2, 2, count, 16), whole_numbers(seed + 1, 2, 2, 16)
    index = kind(q_heads=2, kv_heads=2, head_dim=16, value_dim=16, **SMALL)
    cut = count // 3
    index.append(keys[:, :, :cut], keys[:, :, :cut])
    index.append(keys[:, :, cut:], keys[:, :, cut:])
    products, before = (keys @ queries[..., None])[..., 0], None
    for size, bounds in zip(index.config.sizes, bounds_of(index, queries), strict=True):
        assert (bounds.repeat_interleave(size, -1)[..., :count] >= products).all()
        if before is not None:  # compare with the chunk of twice the size
            real = -(-count // size)
            assert (before.repeat_interleave(2, -1) >= bounds)[..., :real].all()
        before = bounds


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 70))
def test_a_chunk_bounds_its_keys_and_its_halves(seed, count):
    assert_bounded(LeoAM, seed, count)


class ForgetsTheLastHalf(LeoAM):
    def _summaries_of(self, keys, present, marks):
        boxes = super()._summaries_of(keys, present, marks)
        return {name: box.index_fill(3, torch.tensor([2]), 0) for name, box in boxes.items()}


def test_the_bound_can_fail():
    with pytest.raises(AssertionError):
        assert_bounded(ForgetsTheLastHalf, 0, 40)


@pytest.mark.parametrize("pads", [[0, 0], [0, 11]])
def test_where_all_is_split_it_is_quest(pads):
    tokens, valid = CASE.tokens(90), left_padding(pads, 90)
    index, quest = CASE.index("leoam", spread=100.0, **SMALL), CASE.index("quest", page=2)
    for each in (index, quest):
        each.append(*part(tokens, 0, 33), valid=valid[:, :33])
        each.append(*part(tokens, 33, 90), valid=valid[:, 33:])
    for k in (1, 7, 30, 90):
        got, want = (each.search(CASE.queries(), k=k) for each in (index, quest))
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.scores, want.scores)


def test_slots_are_filled_as_long_as_there_are_tokens():
    index = CASE.index("leoam", spread=1.0, **SMALL)
    index.append(*CASE.tokens(75))
    for k in (1, 9, 40, 74, 75):
        assert (index.search(CASE.queries(), k=k).ids >= 0).all()


def test_recall_rises_with_what_is_split():
    case = Case(q_heads=2, kv_heads=2, head_dim=32, value_dim=8)
    tokens, queries = case.tokens(2000), case.queries()
    quest = case.index("quest", page=8)
    quest.append(*tokens)
    want, found = quest.search(queries, k=64).ids, []
    for spread in (1.0, 4.0, 30.0):
        index = case.index("leoam", page=64, leaf=8, spread=spread)
        index.append(*tokens)
        ids = index.search(queries, k=64).ids
        found.append((ids[..., None] == want[..., None, :]).any(-1).float().mean())
    assert found == sorted(found)
    assert found[0] < found[-1] == 1


def test_bytes_of_all_chunks_and_of_the_largest():
    case = Case(q_heads=2, kv_heads=2, head_dim=64, value_dim=64, dtype=torch.bfloat16)
    index = case.index("leoam")
    index.append(*case.tokens(256))
    assert index.bytes_per_key() == {"stored": 15 * 4 * 64 / 128, "scanned": 4 * 64 / 128}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(page=0), "page: got 0"),
        (dict(leaf=0), "leaf: got 0"),
        (dict(page=48, leaf=16), "leaf: got 16, allowed is the page of 48 tokens divided by"),
        (dict(page=16, leaf=32), "leaf: got 32"),
        (dict(spread=0.5), "spread: got 0.5, allowed is at least 1"),
        (dict(group="x"), "group: got 'x'"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("leoam", **options)


def test_sizes_are_halved_down_to_the_smallest():
    assert LeoAMConfig(page=24, leaf=3).sizes == [24, 12, 6, 3]
    assert LeoAMConfig(page=8, leaf=8).sizes == [8]
