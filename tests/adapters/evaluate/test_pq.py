"""Product quantization, which goes stale; and a wrong center, which costs accuracy alone."""

import pytest
import torch

import kvindex
from kvindex_adapters.evaluate.pq import PQ, Quantized
from tests.support.helpers import ROUNDED, assert_well_formed

CENTERED = ["fast", "accurate", "precise", "scan"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(pq, keys):
    return (pq.decode(pq.encode(keys)) - keys).square().mean()


# product quantization


def test_a_code_names_the_nearest_centroid_of_each_subspace():
    keys = normal(2, 300, 16)
    pq = PQ.train(keys, subspace=4, clusters=20)
    assert pq.codebooks.shape == (2, 4, 20, 4)
    codes = pq.encode(keys)
    assert (codes.shape, codes.dtype) == ((2, 300, 4), torch.uint8)
    for g in range(2):
        for b in range(4):
            part = keys[g, :, 4 * b : 4 * b + 4]
            nearest = torch.cdist(part.double(), pq.codebooks[g, b].double()).argmin(1)
            assert torch.equal(codes[g, :, b].long(), nearest)


def test_scores_are_the_sums_of_table_entries():
    keys, queries = normal(2, 200, 16), normal(2, 5, 16, seed=1)
    pq = PQ.train(keys, subspace=8, clusters=30)
    codes = pq.encode(keys)
    table = torch.einsum("gtbm,gbcm->gtbc", queries.unflatten(2, (2, 8)), pq.codebooks)
    want = torch.zeros(2, 5, 200)
    for b in range(2):
        index = codes[:, None, :, b].long().expand(-1, 5, -1)
        want += table[:, :, b].gather(2, index)
    torch.testing.assert_close(pq.scores(queries, codes), want, atol=1e-4, rtol=1e-5)


def test_scores_are_q_dot_k_where_keys_are_what_codes_stand_for():
    pq = PQ.train(normal(1, 300, 8), subspace=2, clusters=256)
    keys = pq.decode(torch.randint(256, (1, 50, 4), generator=torch.Generator().manual_seed(0)))
    queries = normal(1, 3, 8, seed=1)
    torch.testing.assert_close(pq.scores(queries, pq.encode(keys)), queries @ keys.mT)


def test_smaller_subspaces_and_more_clusters_err_less():
    keys = normal(1, 2000, 16)
    coarse, fine = PQ.train(keys, subspace=8), PQ.train(keys, subspace=2)
    assert error(fine, keys) < 0.1 * error(coarse, keys)
    assert error(coarse, keys) < 0.8 * error(PQ.train(keys, clusters=16), keys)


def test_training_is_the_same_from_run_to_run_whatever_the_dtype_of_equal_keys():
    keys = normal(1, 300, 16).bfloat16()
    assert torch.equal(PQ.train(keys).codebooks, PQ.train(keys.float()).codebooks)


def test_codes_of_shifted_keys_go_stale_until_trained_again():
    keys, later = normal(1, 600, 16), 3 + normal(1, 600, 16, seed=1)
    pq = PQ.train(keys)
    assert error(pq, later) > 3 * error(pq, normal(1, 600, 16, seed=2))
    assert error(PQ.train(later), later) < error(pq, later) / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(subspace=5), "subspace: got 5, allowed divides head_dim 16"),
        (dict(subspace=0), "subspace: got 0, allowed is an integer of at least 1"),
        (dict(clusters=257), "clusters: got 257, allowed is 1 to 256"),
        (dict(clusters=201), "clusters: got 201, allowed is 1 to the 200 points"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        PQ.train(normal(1, 200, 16), **options)


def test_keys_of_another_shape_are_refused_in_words():
    pq = PQ.train(normal(2, 200, 16), clusters=8)
    with pytest.raises(ValueError, match=r"keys: got shape \[2, 5, 8\], allowed is \[G=2, N, D=16"):
        pq.encode(normal(2, 5, 8))


def test_a_search_finds_what_the_scores_order_and_trains_but_once():
    keys, queries = normal(2, 700, 16), normal(6, 4, 16, seed=1)
    searched = Quantized(subspace=2)
    with pytest.raises(ValueError, match="keys: got none"):
        searched.find(queries, 10)
    searched.add(keys[:, :400])
    searched.add(keys[:, 400:])
    pq = PQ.train(keys[:, :400], subspace=2)
    wide = pq.decode(pq.encode(keys)).repeat_interleave(3, 0)  # query heads 0, 1, 2 read head 0
    want = (queries @ wide.mT).topk(10).indices
    assert torch.equal(searched.find(queries, 10), want)
    assert searched.bytes() == {"kept": 8, "scanned": 8}
    searched.truncate(400)
    assert searched.find(queries, 400).max() == 399


# a wrong center


def indexed(preset, *pieces, **options):
    geometry = dict(q_heads=2, kv_heads=2, head_dim=32)
    index = kvindex.create("pariskv", preset=preset, beta=1.0, **geometry, **options)
    for piece in pieces:
        index.append(piece, piece)
    return index


def far_keys(norms, count=200, seed=1):
    """Keys `[1, 2, count, 32]`, shifted by so many of their norms in one direction."""
    keys = normal(1, 2, count, 32, seed=seed)
    direction = torch.nn.functional.normalize(normal(1, 2, 1, 32, seed=9), dim=-1)
    return keys + norms * keys.norm(dim=-1).mean() * direction


def top(scores, k):
    return {(g, i) for g, row in enumerate(scores.topk(k).indices.tolist()) for i in row}


@pytest.mark.parametrize("preset", CENTERED)
@pytest.mark.parametrize("norms", [1, 10, 1000])
def test_a_wrong_center_never_costs_correctness(preset, norms):
    first, later = normal(1, 2, 50, 32), far_keys(norms)
    index, queries = indexed(preset, first, later), normal(1, 2, 32, seed=2)
    for k in (7, 250, 300):
        hits = index.search(queries, k=k)
        assert_well_formed(hits, index, 1, k)
        assert (hits.ids >= 0).sum(-1).eq(min(k, 250)).all()
    assert torch.equal(hits.ids[..., :250].sort().values[0, 0], torch.arange(250))
    rows = index.fetch(hits)
    both = torch.cat([first, later], 2)
    for g in range(2):
        assert torch.equal(rows.keys[0, g, :250], both[0, g, hits.ids[0, g, :250]])
    assert hits.scores[..., :250].isfinite().all()


@pytest.mark.parametrize("preset", CENTERED)
def test_a_wrong_center_costs_accuracy(preset):
    """The right one is of the very keys that are searched."""
    first, later = normal(1, 2, 50, 32), far_keys(10)
    found = {"wrong": 0.0, "right": 0.0}
    for seed in range(8):
        queries = normal(1, 2, 32, seed=100 + seed)
        true = (later @ queries[..., None])[0, ..., 0]  # [G, N]
        for name, index in (
            ("wrong", indexed(preset, first, later)),
            ("right", indexed(preset, later)),
        ):
            hits = index.search(queries, k=len(index))
            estimates = torch.full((2, len(index)), -torch.inf)
            estimates.scatter_(1, hits.ids[0], hits.scores[0])
            ours = top(estimates[:, -200:], 20)
            found[name] += len(ours & top(true, 20)) / 40 / 8
    assert found["wrong"] < found["right"]
    assert found["right"] > 0.85


@pytest.mark.parametrize("preset", CENTERED)
@pytest.mark.parametrize("norms", [0, 0.5, 1, 10])
def test_scores_stay_within_the_codes_error(preset, norms):
    """`|q·k̂ - q·k| ≤ ‖q‖ ‖k̂ - k‖`, and the codes err by less than a quarter of `‖k - center‖`.

    All 250 lie in one block, whose center is between the first 50 and the others.
    """
    first, later = normal(1, 2, 50, 32), far_keys(norms)
    index, queries = indexed(preset, first, later), normal(1, 2, 32, seed=2)
    keys = torch.cat([first, later], 2)
    hits = index.search(queries, k=250)
    scores = torch.zeros(1, 2, 250).scatter_(2, hits.ids, hits.scores)
    true = (keys @ queries[..., None])[..., 0]
    (codes,) = index._parts()
    radius = (keys - codes["centers"].float()).norm(dim=-1)
    assert ((scores - true).abs() <= queries.norm(dim=-1)[..., None] * radius / 4).all()


@pytest.mark.parametrize("preset", CENTERED)
def test_duplicates_are_all_found_under_a_wrong_center(preset):
    first = normal(1, 2, 50, 32)
    later = far_keys(10, count=20).repeat(1, 1, 5, 1)  # five of each
    index, queries = indexed(preset, first, later), normal(1, 2, 32, seed=2)
    hits = index.search(queries, k=150)
    assert_well_formed(hits, index, 1, 150)
    scores = torch.zeros(1, 2, 150).scatter_(2, hits.ids, hits.scores)
    copies = scores[..., 50:].unflatten(2, (5, 20))
    assert (copies - copies[:, :, :1]).abs().max() <= ROUNDED * copies.abs().max()
