"""FAISS indexes and checkpoints: kept if nothing has changed, and built again otherwise."""

import copy

import pytest
import torch

from tests.support.helpers import Case, assert_same_hits, part

pytest.importorskip("faiss", reason="needs faiss-cpu")
CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)
NAMES = ("faiss-flat", "faiss-hnsw", "faiss-ivf", "faiss-ivfpq")


def filled(name):
    index = CASE.index(name)
    index.append(*part(CASE.tokens(300), 0, 200))
    return index


@pytest.mark.parametrize("name", NAMES)
def test_a_rollback_without_changes_keeps_them(name):
    index, queries = filled(name), CASE.queries()
    before, hits = index.checkpoint(), index.search(queries, k=20)
    held = [list(rows) for rows in index._faiss_indexes]
    for _ in range(2):
        index.rollback(before)
        assert_same_hits(index.search(queries, k=20), hits)
        assert index._faiss_indexes == held


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["append", "truncate", "reorder"])
def test_a_rollback_undoes_changes(name, change):
    index, queries = filled(name), CASE.queries()
    before, hits = index.checkpoint(), index.search(queries, k=20)
    for _ in range(2):
        if change == "truncate":
            index.truncate(150)
        if change == "reorder":  # both sequences share FAISS indexes, until tokens are added
            index.reorder(index.counts.new_tensor([1, 1]))
        if change != "truncate":
            index.append(*part(CASE.tokens(300), 200, 300))
        index.search(queries, k=20)
        index.rollback(before)
        assert_same_hits(index.search(queries, k=20), hits)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_from_before_a_rollback_is_still_valid(name):
    index, queries = filled(name), CASE.queries()
    early, hits = index.checkpoint(), index.search(queries, k=20)
    index.append(*part(CASE.tokens(300), 200, 250))
    late, more = index.checkpoint(), index.search(queries, k=20)
    index.rollback(early)
    assert_same_hits(index.search(queries, k=20), hits)
    index.append(*part(CASE.tokens(300), 200, 250))
    index.rollback(late)
    assert_same_hits(index.search(queries, k=20), more)


@pytest.mark.parametrize("name", NAMES)
def test_other_tokens_after_a_rollback_are_those_that_are_found(name):
    index, plain, queries = filled(name), filled(name), CASE.queries()
    before = index.checkpoint()
    index.append(*part(CASE.tokens(300), 200, 250))
    index.rollback(before)
    for each in (index, plain):
        each.append(*part(CASE.tokens(300), 250, 300))
    assert_same_hits(index.search(queries, k=20), plain.search(queries, k=20))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_with_a_sequence_that_is_empty_or_shares_its_faiss_indexes(name, shared):
    tokens, found = CASE.tokens(300), []
    first, only_first = torch.tensor([[False], [True]]), torch.tensor([[True], [False]])
    for undone in (False, True):
        index = CASE.index(name)
        if shared:
            index.append(*part(tokens, 0, 200))
            index.reorder(torch.tensor([0, 0]))
        else:
            index.append(*part(tokens, 0, 200), valid=first.expand(2, 200))
        before = index.checkpoint()
        if undone:
            index.append(*part(tokens, 200, 250), valid=only_first.expand(2, 50))
            index.rollback(before)
        index.append(*part(tokens, 250, 300), valid=only_first.expand(2, 50))
        found.append(index.search(CASE.queries(), k=20))
    assert_same_hits(*found)


def test_faiss_indexes_whose_construction_failed_are_not_kept(monkeypatch):
    """A checkpoint may be made while another thread builds them."""
    index, seen, queries = filled("faiss-flat"), [], CASE.queries()
    hits, fill = index.search(queries, k=20), type(index)._fill
    index = copy.deepcopy(index)  # builds its FAISS indexes in the next search

    def failing(self, counts):
        seen.append(self.checkpoint())
        fill(self, counts)
        self._faiss_indexes[1][1].remove_ids(self._faiss.IDSelectorRange(0, 5))
        raise MemoryError

    monkeypatch.setattr(type(index), "_fill", failing)
    with pytest.raises(MemoryError):
        index.search(queries, k=20)
    monkeypatch.undo()
    index.rollback(seen[0])
    assert_same_hits(index.search(queries, k=20), hits)
