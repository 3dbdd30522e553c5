"""An index whose rows are in a user's store with pages."""

import pytest
import torch

import kvindex
from kvindex.core.geometry import Geometry
from kvindex.storage.store import METHODS, AddressedRows, RowStore, TensorStore
from tests.support.helpers import Case, assert_same_snapshot, left_padding, part, snapshot
from tests.support.pages import AddressedPages, Pages

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)
GEOMETRY = Geometry.of(q_heads=4, kv_heads=2, head_dim=16, value_dim=8)
TOKENS, QUERIES = CASE.tokens(300), CASE.queries()


def pair(name):
    """Make the index over the user's pages, and over the default store."""
    return CASE.index(name, store=Pages(GEOMETRY)), CASE.index(name)


ROUNDING = 1e-6
"""Tolerance of scores, 8 units of float32, because products are summed in another order."""


def assert_same(mine, theirs, queries=QUERIES):
    (*got, my_scores, my_keys, my_values), (*want, scores, keys, values) = (
        snapshot(index, queries) for index in (mine, theirs)
    )
    torch.testing.assert_close(my_scores, scores, rtol=ROUNDING, atol=0)
    assert_same_snapshot((*got, scores, my_keys, my_values), (*want, scores, keys, values))
    hits = mine.search(queries, k=9)
    rows = [index.fetch(hits) for index in (mine, theirs)]
    assert torch.equal(rows[0].keys, rows[1].keys)
    assert torch.equal(rows[0].values, rows[1].values)


@pytest.mark.parametrize("name", ["exact", "pariskv", "quest", "pqcache"])
def test_ids_and_rows_are_those_of_the_built_in_store(name):
    both = pair(name)
    for index in both:
        index.append(*part(TOKENS, 0, 200), valid=left_padding([0, 30], 200))
        index.end_prompt()
        index.append(*part(TOKENS, 200, 201))
    assert_same(*both)
    for index in both:
        index.truncate(150)
        index.reorder(torch.tensor([1, 0]))
        index.append(*part(TOKENS, 150, 300))
    assert_same(*both)
    for index in both:
        index.reset()
        index.append(*(piece[:1] for piece in part(TOKENS, 0, 40)))
    assert_same(*(index.expand_batch(2) for index in both))


def test_an_append_that_fails_leaves_its_rows_as_they_were(monkeypatch):
    mine, theirs = pair("exact")
    for index in (mine, theirs):
        index.append(*part(TOKENS, 0, 100))
    with monkeypatch.context() as patch:
        patch.setattr(type(mine._valid), "append", lambda *given, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mine.append(*part(TOKENS, 100, 120))
    assert len(mine._store) == 100
    assert_same(mine, theirs)


def test_an_index_over_them_is_named_tensors_as_any_other():
    mine, theirs = pair("pariskv")
    for index in (mine, theirs):
        index.append(*part(TOKENS, 0, 100))
    again = pair("pariskv")[0]
    again.load_state_dict(theirs.state_dict())
    assert_same(mine, again)
    again = pair("pariskv")[1]
    again.load_state_dict(mine.state_dict())
    assert_same(again, theirs)


def test_a_checkpoint_holds_for_them():
    mine, theirs = pair("exact")
    for index in (mine, theirs):
        index.append(*part(TOKENS, 0, 100))
    before = mine.checkpoint()
    mine.append(*part(TOKENS, 100, 300))
    mine.rollback(before)
    assert_same(mine, theirs)


class Half:
    """A store with only some of the methods."""

    def gather(self, ids):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("disk", "store: got 'disk', allowed is 'device', 'host', 'auto', or an object"),
        (None, "store: got None, which lacks .*append.* allowed is 'device', 'host'"),
        (Half(), "store: got .*Half.*, which lacks __len__, append, blocks, .*, write, allowed"),
    ],
)
def test_what_is_no_store_is_refused(store, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("exact", store=store)


def test_a_store_that_holds_rows_or_has_another_codec_is_refused():
    full = Pages(GEOMETRY)
    full.append(full.join(*TOKENS))
    with pytest.raises(ValueError, match="store: got a store that has 300 tokens, allowed"):
        CASE.index("exact", store=full)
    with pytest.raises(ValueError, match=r"row_codec: got 'int8', allowed is .*'plain'"):
        CASE.index("exact", store=Pages(GEOMETRY), row_codec="int8")


def test_the_protocols_are_told_apart():
    assert {"__len__", "gather", "append", "row_bytes"} <= METHODS
    for store in (TensorStore(GEOMETRY), Pages(GEOMETRY), AddressedPages(GEOMETRY)):
        assert isinstance(store, RowStore)
        assert isinstance(store, AddressedRows) == (type(store) is AddressedPages)


def test_an_index_says_where_its_rows_are():
    assert "store: Pages, row_codec 'plain'" in pair("exact")[0].explain()
    sizes = dict(q_heads=2, kv_heads=2, head_dim=8)
    line = kvindex.create("exact", **sizes, backend="torch", row_codec="int8").explain()
    assert "store: TensorStore, row_codec 'int8'" in line
