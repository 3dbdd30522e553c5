"""vAttention: best rows and a uniform sample, unbiased sums, and the sample size from ε and δ.

Means must be within 6 of their standard errors: by the normal approximation, each one fails with
probability 2e-9 for a new seed; there are 18.
"""

import math
from statistics import NormalDist

import pytest
import torch

from kvindex.wrappers import VAttention
from tests.support.helpers import Case, assert_well_formed, left_padding, mostly_slow

CASE = Case(q_heads=6, kv_heads=2, head_dim=32, value_dim=32, batch=2)
ALONE = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=16)
COUNT, SEEDS = 400, 300


def filled(case=CASE, name="exact", count=COUNT, strength=1.0, **options):
    keys, values = case.tokens(count)
    index = VAttention(case.index(name), **options)
    index.append(keys * strength, values)
    return index


@pytest.mark.parametrize("name", ["exact", "pariskv:preset=fast", "pariskv:preset=paper:beta=1"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_best_rows_are_sure_and_the_others_have_equal_weights(name, share):
    index = filled(name=name, share=share)
    hits = index.search(CASE.queries(), k=40)
    assert_well_formed(hits, index, 2, 40)
    sure = 40 - int(40 * share)
    best = index.inner.search(CASE.queries(), k=COUNT)
    assert torch.equal(hits.ids[..., :sure], best.ids[..., :sure])
    assert (hits.log_weight[..., :sure] == 0).all()
    each = torch.tensor((COUNT - sure) / (40 - sure)).log()
    torch.testing.assert_close(
        hits.log_weight[..., sure:], each.expand(2, 6, 40 - sure), rtol=1e-6, atol=0
    )
    again = index.search(CASE.queries(), k=40)
    assert torch.equal(hits.ids, again.ids)


def test_fewer_tokens_than_rows_are_all_taken():
    hits = filled(count=30).search(CASE.queries(), k=40)
    assert (hits.ids[..., :30].sort(-1).values == torch.arange(30)).all()
    assert (hits.log_weight[..., :30] == 0).all()
    assert (hits.ids[..., 30:] == -1).all()


def test_an_empty_index_gives_nothing():
    hits = VAttention(CASE.index("exact")).search(CASE.queries(), k=5)
    assert (hits.ids == -1).all()
    assert (hits.log_weight == float("-inf")).all()


@pytest.mark.parametrize(
    ("name", "epsilon"),
    mostly_slow([("exact", 0.01), ("exact", 0.2), ("pariskv:preset=fast", 0.2)], ("exact", 0.2)),
)
def test_sums_over_the_rows_are_those_over_all_keys_on_average(name, epsilon):
    """This holds for numerator and denominator of each head, also if ε needs fewer rows than k."""
    case = Case(q_heads=3, kv_heads=1, head_dim=16, value_dim=1)
    index = filled(case, name, count=200, epsilon=epsilon, base_rate=0.02)
    keys, values = (part[0, 0].double() for part in case.tokens(200))
    queries, found, rows = case.queries(), [], 0
    shares = (case.index("exact").geometry.scale * queries[0].double() @ keys.T).softmax(-1)
    for seed in range(SEEDS):
        index.seed = seed
        hits = index.search(queries, k=48)
        ids, real = hits.ids[0, 0].clamp_min(0), hits.ids[0, 0] >= 0
        weights = shares[:, ids] * hits.log_weight[0].double().exp() * real
        found.append(torch.stack([weights.sum(-1), weights @ values[ids, 0]]))
        rows += int(real.sum())
    assert (rows > 47 * SEEDS) == (epsilon < 0.1)
    found = torch.stack(found)
    off = found.mean(0) - torch.stack([shares.sum(-1), shares @ values[:, 0]])
    assert (off.abs() <= 6 * found.std(0) / math.sqrt(SEEDS)).all()


def many(strength=1.5, **options):
    return filled(ALONE, count=4000, strength=strength, share=1.0, **options)


def drawn(**options):
    """Return the rows of a sample of all rows, of which 40 are the pilot sample."""
    hits = many(base_rate=0.01, **options).search(ALONE.queries(), k=3000)
    return int((hits.ids >= 0).sum())


def test_half_of_epsilon_takes_four_times_the_rows_and_delta_as_the_normal_says():
    few = drawn(epsilon=0.2, delta=0.1)
    assert 40 < few < 700, "between the pilot and all"
    assert abs(drawn(epsilon=0.1, delta=0.1) - 4 * few) <= 4
    ratio = NormalDist().inv_cdf(1 - 0.01 / 2) / NormalDist().inv_cdf(1 - 0.1 / 2)
    assert abs(drawn(epsilon=0.2, delta=0.01) - ratio**2 * few) <= ratio**2 + 1


def test_the_sample_has_no_fewer_rows_than_the_pilot():
    assert drawn(epsilon=1.0, strength=0.01) == 40


def test_the_denominator_is_within_epsilon_but_for_delta():
    """For at most 1.5 · δ of 300 seeds, the error exceeds ε.

    If the true fraction is δ, this fails with probability 1e-5 (normal approximation).
    """
    epsilon, delta, off = 0.12, 0.2, 0
    index = many(1.0, epsilon=epsilon, delta=delta)
    keys, g = ALONE.tokens(4000)[0][0, 0].double(), index.geometry
    shares = (g.scale * ALONE.queries()[0].double() @ keys.T).softmax(-1)[0]
    for seed in range(300):
        index.seed = seed
        hits = index.search(ALONE.queries(), k=1500)
        real = hits.ids[0, 0] >= 0
        assert not real.all(), "ε and δ ask for fewer"
        total = (shares[hits.ids[0, 0].clamp_min(0)] * hits.log_weight[0, 0].double().exp())[real]
        off += abs(float(total.sum()) - 1) > epsilon
    assert off <= 1.5 * delta * 300


def test_padding_and_a_batch_change_no_sample():
    padded, alone = (VAttention(CASE.index("exact")) for _ in range(2))
    keys, values = CASE.tokens(COUNT)
    padded.append(keys, values, valid=left_padding([0, 7], COUNT))
    alone.append(keys[1:, :, 7:], values[1:, :, 7:])
    want = alone.search(CASE.queries()[1:], k=40)
    got = padded.search(CASE.queries(), k=40)
    assert torch.equal(got.ids[1:], want.ids + 7)
    assert torch.equal(got.log_weight[1:], want.log_weight)


def test_rows_are_sampled_again_when_tokens_come_and_by_each_head():
    index = filled()
    first = index.search(CASE.queries(), k=40)
    index.append(*CASE.tokens(1, seed=1))
    drawn = [hits.ids[0, :, 20:] for hits in (first, index.search(CASE.queries(), k=40))]
    rows = [set(ids.tolist()) for pair in drawn for ids in pair]
    # two samples share 1 row on average
    assert all(len(a & b) < 10 for i, a in enumerate(rows) for b in rows[:i])


@pytest.mark.parametrize("option", ["epsilon", "delta", "base_rate", "share"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_sizes_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}: got {value}"):
        VAttention(CASE.index("exact"), **{option: value})


def test_what_sample_refuses_is_refused():
    with pytest.raises(ValueError, match="inner: got an index with group='union'"):
        VAttention(CASE.index("exact", group="union"))
    with pytest.raises(ValueError, match="whose rows have weights already"):
        CASE.index("exact+sample+vattention")
    with pytest.raises(ValueError, match=r"coverage: got 0\.9, allowed is None"):
        filled().search(CASE.queries(), k=5, coverage=0.9)
