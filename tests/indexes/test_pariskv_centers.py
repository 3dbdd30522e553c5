"""A center that is far from its keys costs accuracy, but results stay correct."""

import pytest
import torch

import kvindex
from tests.support.helpers import ROUNDED, assert_well_formed

CENTERED = ["fast", "accurate", "precise", "scan"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indexed(preset, *chunks, **options):
    geometry = dict(q_heads=2, kv_heads=2, head_dim=32)
    index = kvindex.create("pariskv", preset=preset, beta=1.0, **geometry, **options)
    for chunk in chunks:
        index.append(chunk, chunk)
    return index


def far_keys(norms, count=200, seed=1):
    """Return keys `[1, 2, count, 32]`, shifted in one direction by a multiple of their norm."""
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
    """The right center is the mean of the keys that are searched."""
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
    """`|q·k̂ - q·k| ≤ ‖q‖ ‖k̂ - k‖`, and a code's error is below a quarter of `‖k - center‖`.

    All 250 keys are in one block, whose center is between the first 50 keys and the other 200.
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
    later = far_keys(10, count=20).repeat(1, 1, 5, 1)  # five copies of each key
    index, queries = indexed(preset, first, later), normal(1, 2, 32, seed=2)
    hits = index.search(queries, k=150)
    assert_well_formed(hits, index, 1, 150)
    scores = torch.zeros(1, 2, 150).scatter_(2, hits.ids, hits.scores)
    copies = scores[..., 50:].unflatten(2, (5, 20))
    assert (copies - copies[:, :, :1]).abs().max() <= ROUNDED * copies.abs().max()
