"""SOCKET: the distribution over buckets, sums of probabilities, and their relation to angles."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.helpers import Case

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def of_all(index, queries, count):
    """Return the score of every token, float32 `[B, G, count]`."""
    hits = index.search(queries, k=count)
    return torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)


def soft_collisions(index, keys, queries):
    """Compute the authors' formula, one head, key, table and corner at a time."""
    config = index.config
    planes = index._planes.double().reshape(16, config.tables, config.bits)
    corners = [*itertools.product([-1, 1], repeat=config.bits)]
    sums = torch.zeros(keys.shape[:3])
    for b, h, table in itertools.product(range(2), range(2), range(config.tables)):
        heights = (queries[b, h].double() @ planes[:, table]).tanh().tolist()
        logits = [sum(c * x for c, x in zip(corner, heights, strict=True)) for corner in corners]
        chances = torch.tensor(logits).div(config.tau * math.sqrt(16)).softmax(0)
        for i, key in enumerate(keys[b, h].double()):
            corner = tuple(1 if x >= 0 else -1 for x in (key @ planes[:, table]).tolist())
            sums[b, h, i] += chances[corners.index(corner)]
    return sums


@pytest.mark.parametrize("options", [dict(bits=3, tables=5, tau=0.3), dict(bits=1, tables=4)])
def test_scores_are_the_logarithms_of_soft_collisions(options):
    keys, values = CASE.tokens(20)
    index = CASE.index("socket", **options)
    index.append(keys, values)
    want = soft_collisions(index, keys, CASE.queries()).log() / index.geometry.scale
    torch.testing.assert_close(of_all(index, CASE.queries(), 20), want, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), bits=st.integers(1, 8), tau=st.sampled_from([0.05, 0.3, 3.0]))
def test_a_query_spreads_over_all_buckets_and_most_over_its_own(seed, bits, tau):
    index = CASE.index("socket", bits=bits, tables=3, tau=tau)
    queries = CASE.queries(seed)[:, :, None]
    chances = index._chances(queries)
    assert chances.shape == (2, 2, 1, 3, 2**bits)
    torch.testing.assert_close(chances.sum(-1), torch.ones(2, 2, 1, 3))
    own = index._encode(queries, {})["buckets"].long()
    assert torch.equal(chances.gather(-1, own[..., None])[..., 0], chances.amax(-1))


def test_a_small_temperature_counts_hard_collisions():
    keys, values = CASE.tokens(60)
    index = CASE.index("socket", bits=2, tables=40, tau=1e-4)
    index.append(keys, values)
    queries = CASE.queries()[:, :, None]
    collide = index.state_dict()["codes.buckets"] == index._encode(queries, {})["buckets"]
    got = (of_all(index, queries[:, :, 0], 60) * index.geometry.scale).exp()
    torch.testing.assert_close(got, collide.sum(-1).float(), rtol=0.05, atol=1.0)


def test_scores_fall_with_the_angle():
    """Soft collisions correlate better with the cosine than hard collisions of as many bits."""
    case = Case(q_heads=1, kv_heads=1, head_dim=64, value_dim=8)
    keys, values = case.tokens(2000)
    queries = case.queries()
    cosines = torch.cosine_similarity(keys[0, 0], queries[0], dim=-1)
    told = []
    for tau in (1e-3, 0.3):
        index = case.index("socket", tau=tau, scale=1.0)
        index.append(keys, values)
        sums = of_all(index, queries, 2000)[0, 0].exp()
        told.append(torch.corrcoef(torch.stack([sums, cosines]))[0, 1])
    assert told[0] + 0.2 < told[1]
    assert told[1] > 0.8


def test_a_group_agrees_by_parts_of_the_sum():
    case = Case(q_heads=3, kv_heads=1, head_dim=16, value_dim=8, softcap=1.0)
    tokens, queries = case.tokens(30), case.queries()
    sums = []
    for head in range(3):
        alone = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=8).index("socket")
        alone.append(*tokens)
        sums.append((of_all(alone, queries[:, head : head + 1], 30) * 0.25).exp())
    index = case.index("socket")
    index.append(*tokens)
    shares = torch.stack([s / s.sum(-1, keepdim=True) for s in sums]).mean(0)
    torch.testing.assert_close(of_all(index, queries, 30).exp(), shares, rtol=1e-4, atol=1e-6)


def test_bytes_of_buckets():
    index = CASE.index("socket")
    index.append(*CASE.tokens(10))
    assert index.bytes_per_key() == {"stored": 60, "scanned": 60}


@pytest.mark.parametrize(
    "options", [dict(bits=0), dict(bits=9), dict(tables=0), dict(tau=0), dict(seed=-1)]
)
def test_options_out_of_range_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}: got {value!r}"):
        CASE.index("socket", **options)
