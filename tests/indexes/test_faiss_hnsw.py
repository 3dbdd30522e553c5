"""FAISS HNSW: its recall on clustered keys, and a graph that does not depend on the appends."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.support.helpers import Case, assert_same_hits, part

faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
ONE = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=8)
CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def clustered(count):
    """Return keys `[1, 1, count, 16]` around 40 points of a sphere, and queries near some of
    them."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    centers = 4 * torch.nn.functional.normalize(normal(40, 16), dim=-1)
    keys = centers[torch.randint(40, (count,), generator=generator)] + 0.5 * normal(count, 16)
    return keys[None, None], keys[:32] + 0.5 * normal(32, 16)


def recall(keys, queries, k, **options):
    index, exact = ONE.index("faiss-hnsw", **options), ONE.index("exact")
    for each in (index, exact):
        each.append(keys, keys[..., :8])
    got = index.expand_batch(32).search(queries[:, None], k=k).ids
    want = exact.expand_batch(32).search(queries[:, None], k=k).ids
    return (got[..., None] == want[..., None, :]).any(-1).float().mean().item()


def test_recall_on_clustered_keys():
    keys, queries = clustered(3000)
    best = recall(keys, queries, 10)
    assert best > 0.9
    assert recall(keys, queries, 10, neighbors=2, ef_construction=4, ef_search=10) < best


@pytest.mark.parametrize("cuts", [[0, 1, 250, 400], [0, 100, 101, 102, 400]], ids=str)
def test_its_graph_does_not_depend_on_how_keys_came(cuts):
    tokens = CASE.tokens(400)
    whole, pieces = CASE.index("faiss-hnsw"), CASE.index("faiss-hnsw")
    whole.append(*tokens)
    for start, stop in pairwise(cuts):
        pieces.append(*part(tokens, start, stop))
    links = [
        faiss.vector_to_array(index._faiss_indexes[1][1].hnsw.neighbors)
        for index in (whole, pieces)
    ]
    assert (links[0] == links[1]).all()
    queries = CASE.queries()
    assert_same_hits(pieces.search(queries, k=20), whole.search(queries, k=20))


def test_truncated_it_is_the_graph_of_the_tokens_that_are_left():
    tokens = CASE.tokens(400)
    index, short = CASE.index("faiss-hnsw"), CASE.index("faiss-hnsw")
    index.append(*tokens)
    index.truncate(250)
    short.append(*part(tokens, 0, 250))
    queries = CASE.queries()
    assert_same_hits(index.search(queries, k=20), short.search(queries, k=20))


def test_more_rows_than_ef_search_are_found():
    keys, queries = clustered(500)
    assert recall(keys, queries, 200, ef_search=10) > 0.9


def test_bytes_are_what_faiss_holds():
    index = ONE.index("faiss-hnsw")
    index.append(*ONE.tokens(3000))
    graph = index._faiss_indexes[0][0].hnsw
    held = 3000 * 64 + 4 * graph.neighbors.size() + 4 * graph.levels.size()
    held += 8 * graph.offsets.size()
    assert index.nbytes()["codes"] == pytest.approx(held, rel=0.01)


def test_a_search_reads_less_the_fewer_candidates_it_keeps():
    scanned = []
    for ef_search in (16, 256, 3000):
        index = ONE.index("faiss-hnsw", ef_search=ef_search)
        index.append(*ONE.tokens(3000))
        scanned.append(index.bytes_per_key()["scanned"])
    assert scanned[0] < scanned[1] / 2 < scanned[2] / 4
    assert scanned[2] >= 64  # if it returns all keys, it compares all


def test_a_copy_reads_as_much_before_its_first_search():
    index = ONE.index("faiss-hnsw")
    index.append(*ONE.tokens(300))
    assert copy.deepcopy(index).bytes_per_key() == index.bytes_per_key()


def test_there_is_none_on_a_gpu():
    with pytest.raises(ValueError, match=r"where: got 'gpu', allowed is one of \['cpu'\]"):
        ONE.index("faiss-hnsw", where="gpu")


@pytest.mark.parametrize("name", ["neighbors", "ef_construction", "ef_search"])
def test_bad_options_are_named(name):
    with pytest.raises(ValueError, match=f"{name}: got 0, allowed is an integer of at least"):
        ONE.index("faiss-hnsw", **{name: 0})
