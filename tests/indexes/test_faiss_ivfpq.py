"""FAISS IVF-PQ: its estimates, exact where codes are, and its recall on clustered keys."""

from functools import partial

import pytest
import torch

from tests.contract import CHECKS
from tests.support.helpers import Case, assert_same_hits

faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)
ONE = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=8)


def clustered(count, clusters, spread, seed=0):
    """Return keys `[1, 1, count, 16]` around points of a sphere, and queries near some of the
    keys."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    centers = 4 * torch.nn.functional.normalize(normal(clusters, 16), dim=-1)
    keys = centers[torch.randint(clusters, (count,), generator=generator)]
    keys = keys + spread * normal(count, 16)
    return keys[None, None], keys[:32] + spread * normal(32, 16)


def recall(name, keys, queries, k, **options):
    index, exact = ONE.index(name, **options), ONE.index("exact")
    for each in (index, exact):
        each.append(keys, keys[..., :8])
    asked = queries[:, None]
    got = index.expand_batch(len(queries)).search(asked, k=k).ids
    want = exact.expand_batch(len(queries)).search(asked, k=k).ids
    return (got[..., None] == want[..., None, :]).any(-1).float().mean().item()


def test_recall_on_clustered_keys():
    keys, queries = clustered(4000, 40, 0.5)
    best = recall("faiss-ivfpq", keys, queries, 20, lists=40, probes=8, subspaces=8)
    assert best > 0.85
    assert recall("faiss-ivfpq", keys, queries, 20, lists=40, probes=1, subspaces=2) < best


def test_scores_are_those_that_faiss_gives():
    keys, queries = clustered(2000, 20, 0.5)
    index = ONE.index("faiss-ivfpq", lists=20, probes=20, subspaces=4)
    index.append(keys, keys[..., :8])
    scores, ids = index._faiss_indexes[0][0].search(queries.numpy(), 10)
    hits = index.expand_batch(32).search(queries[:, None], k=10)
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hits.scores[:, 0], torch.from_numpy(scores), **close)
    assert (hits.ids[:, 0] == torch.from_numpy(ids)).float().mean() > 0.95  # equal codes tie


def test_codes_made_again_from_keys_stand_for_what_faiss_reconstructs():
    """Scoring on a GPU relies on this."""
    tokens = CASE.tokens(500)
    index = CASE.index("faiss-ivfpq", lists=7, subspaces=4, bits=6)
    index.append(*tokens)
    queries = CASE.queries().unflatten(1, (2, 2))
    ids, keys = index._candidates(queries, 40)
    gathered = index._store.gather(ids).keys.float()
    same = (index._reconstructed(gathered, ids) - keys).abs().amax(-1) < 1e-4
    assert same.float().mean() > 0.99  # a key between two centroids may go to either


def test_few_keys_are_their_own_codes():
    tokens = CASE.tokens(200)
    hits = {}
    for name, options in (("faiss-ivfpq", dict(lists=1)), ("faiss-flat", {})):
        index = CASE.index(name, **options)
        index.append(*tokens)
        hits[name] = index.search(CASE.queries(), k=20)
    assert_same_hits(hits["faiss-ivfpq"], hits["faiss-flat"], close=1e-4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds_with_several_lists(check):
    check(partial(CASE.index, "faiss-ivfpq", lists=4, probes=4), CASE)


def test_two_runs_train_the_same():
    keys = clustered(2000, 20, 0.5)[0]
    first, second = (ONE.index("faiss-ivfpq", lists=20) for _ in range(2))
    for index in (first, second):
        index.append(keys, keys[..., :8])
    for name in ("centroids", "codebooks"):
        assert torch.equal(first._learned[name], second._learned[name])


def test_its_codebooks_are_those_that_faiss_trains():
    keys = clustered(2000, 20, 0.5)[0]
    index = ONE.index("faiss-ivfpq", lists=1, subspaces=8, code_iterations=5)
    index.append(keys, keys[..., :8])
    theirs = faiss.ProductQuantizer(16, 8, 8)
    theirs.cp.niter, theirs.cp.seed, theirs.cp.min_points_per_centroid = 5, 1234, 1
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    theirs.train((keys[0, 0] - index._learned["centroids"][0, 0]).numpy())
    faiss.omp_set_num_threads(before)
    want = torch.from_numpy(faiss.vector_to_array(theirs.centroids)).view(8, 256, 2)
    assert torch.equal(index._learned["codebooks"][0, 0], want)


def test_bytes():
    index = CASE.index("faiss-ivfpq", lists=2, subspaces=8, bits=6)
    index.append(*CASE.tokens(400))
    learned = 2 * 2 * (2 * 64 + 64 * 64) + 16
    assert index.nbytes()["codes"] == 2 * 2 * 400 * (6 + 8) + learned


@pytest.mark.parametrize(
    ("bad", "allowed"),
    [
        (dict(subspaces=5), "a divisor of head_dim = 16"),
        (dict(bits=9), "1 to 8"),
        (dict(bits=0), "of"),
    ],
)
def test_bad_options_are_named(bad, allowed):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: got .* allowed .*{allowed}"):
        CASE.index("faiss-ivfpq", **bad)
