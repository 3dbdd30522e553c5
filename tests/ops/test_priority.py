"""Priority sampling: its distribution, its sums and their variance, with one and two samples.

Means must be within 6 of their standard errors. By the normal approximation, each one fails with
probability below 2e-9 for a new seed; there are about 50. The distribution of `noise` is checked
with probability 1 - 1e-9 (Dvoretzky–Kiefer–Wolfowitz).
"""

import math

import numpy as np
import pytest
import torch

from kvindex.ops import priority
from tests.support.helpers import slow

SEEDS, ROWS = 20_000, 60


@pytest.fixture(scope="module")
def noises():
    """Return the noise of every row for each seed, `[SEEDS, ROWS]`."""
    seeds = torch.arange(SEEDS)[:, None] * 12_345_677
    return nats(priority.noise(torch.arange(ROWS), seeds))


def nats(noise):
    return (noise * priority.NATS).float()


def sizes(seed, spread=2.0):
    """Return logarithms of random sizes, `[ROWS]`."""
    return spread * torch.randn(ROWS, generator=torch.Generator().manual_seed(seed))


def sums(positions, log_chances, values):
    """Sum values `[ROWS]` over the sampled rows, weighted with `1 / π`: float64 `[SEEDS]`."""
    weights = torch.where(positions < 0, 0, (-log_chances.double()).exp())
    return (weights * values.double()[positions.clamp_min(0)]).sum(-1)


def variances(positions, log_chances, values):
    """Estimate the variance of `sums` from each sample, float64 `[SEEDS]`: Σ x² (1 - π) / π².

    For sizes `w = x` this is the estimator Σ τ max(0, τ - w) of Duffield, Lund and Thorup.
    """
    chances = log_chances.double().exp()
    squares = values.double()[positions.clamp_min(0)].square()
    return (squares * (1 - chances) / chances.square()).masked_fill(positions < 0, 0).sum(-1)


def assert_unbiased(found, true):
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - true) <= 6 * error + 1e-9 * abs(true)


def assert_estimates_its_variance(sampled, values):
    squares = (sums(*sampled, values) - values.double().sum()).square()
    assert_unbiased(variances(*sampled, values) - squares, 0.0)


def sampled_twice(coarse, fine, noises, candidates, k):
    """Sample candidates, then rows `[SEEDS, k]` from them. Return both, each with its `log π`."""
    _, found, chances = priority.sample(coarse.expand(SEEDS, -1), noises, candidates)
    _, at, last = priority.sample(fine[found], noises.gather(1, found), k)
    return (found.gather(1, at), torch.minimum(last, chances.gather(1, at))), (found, chances)


def test_noise_is_the_logarithm_of_uniform_numbers_whatever_the_order():
    ids, seed = torch.arange(100_000), torch.tensor([7])
    noise = nats(priority.noise(ids, seed))
    u = np.sort(np.exp(-noise.double().numpy()))
    gap = np.abs(u - np.arange(1, len(u) + 1) / len(u)).max()
    assert gap <= math.sqrt(math.log(2e9) / (2 * len(u))) + 1 / len(u)
    assert torch.equal(nats(priority.noise(ids.flip(0), seed)), noise.flip(0))
    others = nats(priority.noise(ids, seed + 1))
    assert abs(float(torch.corrcoef(torch.stack([noise, others]))[0, 1])) < 6 / math.sqrt(len(u))


@pytest.mark.parametrize("k", [2, 8, 30])
def test_sums_over_sampled_rows_are_unbiased(k, noises):
    own = sizes(0)
    _, *sampled = priority.sample(own.expand(SEEDS, -1), noises, k)
    for seed in range(3):
        values = sizes(seed).exp() * torch.randn(
            ROWS, generator=torch.Generator().manual_seed(9 + seed)
        )
        assert_unbiased(sums(*sampled, values), values.double().sum())


def test_rows_of_a_sample_are_not_correlated_and_their_variance_is_bounded(noises):
    """The sum of variances Σ Var(ŵ) is the variance of the sum, at most W² / (k - 1) (Szegedy,
    2006)."""
    own, k = sizes(1), 12
    _, positions, log_chances = priority.sample(own.expand(SEEDS, -1), noises, k)
    weights = torch.zeros(SEEDS, ROWS, dtype=torch.float64)
    weights.scatter_(1, positions, (own[positions] - log_chances).double().exp())
    total, each = weights.sum(1).var(), weights.var(0).sum()
    assert abs(total / each - 1) < 0.1
    assert total <= own.double().exp().sum().square() / (k - 1)


@pytest.mark.parametrize("k", [6, 12, 30])
def test_a_sample_estimates_the_variance_of_its_sums(k, noises):
    own = sizes(1)
    _, *sampled = priority.sample(own.expand(SEEDS, -1), noises, k)
    signs = torch.randn(ROWS, generator=torch.Generator().manual_seed(9))
    for values in (own.exp(), own.exp() * signs):
        assert_estimates_its_variance(sampled, values)
    threshold = (own[sampled[0]] - sampled[1]).double().exp()  # τ, or the size where it is above
    w = own.double().exp()[sampled[0]]
    theirs = (threshold * (threshold - w)).sum(-1)
    torch.testing.assert_close(variances(*sampled, own.exp()), theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("error", [0.0, 0.7])
def test_a_sample_among_sampled_candidates_is_unbiased(error, noises):
    """Candidates and rows are sampled with different, inexact sizes; `π` is the smaller
    probability."""
    sampled, _ = sampled_twice(sizes(2), sizes(2) + error * sizes(3, 1.0), noises, 24, 8)
    for seed in range(3):
        values = torch.randn(ROWS, generator=torch.Generator().manual_seed(20 + seed))
        values = values * sizes(2).exp()
        assert_unbiased(sums(*sampled, values), values.double().sum())
        assert_estimates_its_variance(sampled, values)


def test_candidates_tell_what_they_leave_out(noises):
    """On average, Σ w (1 / π - 1) over candidates is the sum of `w` over the rows left out.

    The same holds for the sampled rows instead of the candidates.
    """
    own = sizes(2) + sizes(3, 0.7)
    rows, candidates = sampled_twice(sizes(2), own, noises, 16, 8)
    w = own.double().exp()
    inside = torch.zeros(SEEDS, ROWS, dtype=torch.float64).scatter_(1, candidates[0], 1.0) @ w
    outside = w.sum() - inside
    assert 0.05 < outside.mean() / w.sum() < 0.5
    assert_unbiased(sums(*candidates, w) - inside - outside, 0.0)
    assert_unbiased(sums(*rows, w) - inside - outside, 0.0)


def test_a_ratios_bias_is_bounded_and_falls_as_the_sample_grows(noises):
    """The bias of a ratio falls at least as fast as 1 / k.

    By Hartley and Ross (1954) it is at most the ratio's standard deviation times the denominator's
    relative standard deviation, which is below 1 / √(k - 1) (Szegedy, 2006).
    """
    # weights whose sizes have errors that correlate with the values
    own, off = sizes(4, 0.5), sizes(6, 1.0)
    weights = (own + 0.7 * off).exp()
    true, found = (weights.double() * off).sum() / weights.double().sum(), {}
    for k in (4, 8, 16, 32):
        _, *sampled = priority.sample(own.expand(SEEDS, -1), noises, k)
        total = sums(*sampled, weights)
        ratio = sums(*sampled, weights * off) / total - true
        error = 6 * ratio.std() / math.sqrt(SEEDS)
        found[k] = ratio.mean().abs(), error
        assert found[k][0] <= ratio.std() * total.std() / weights.double().sum() + error
    assert found[4][0] > found[4][1]
    for k in (4, 8, 16):
        assert found[2 * k][0] - found[2 * k][1] <= (found[k][0] + found[k][1]) / 2


def test_few_rows_are_all_sure_and_none_stays_none(noises):
    own = sizes(5)
    own[10:] = -math.inf
    priorities, positions, log_chances = priority.sample(own, noises[0], 16)
    assert (priorities[:-1] >= priorities[1:]).all()
    assert sorted(positions[:10].tolist()) == list(range(10))
    assert (log_chances[:10] == 0).all()
    assert (positions[10:] == -1).all()
    assert (log_chances[10:] == -math.inf).all()


def test_the_size_of_a_group_is_least_in_variance():
    """No other size gives probabilities with a smaller Σ p² / π over rows and heads."""
    heads_weights = torch.randn(
        1, 1, 3, ROWS, generator=torch.Generator().manual_seed(6)
    ).log_softmax(-1)
    ways = {
        "rms": priority.root_mean_square(heads_weights)[0, 0].exp(),
        "mean": heads_weights.exp().mean(2)[0, 0],
        "max": heads_weights.exp().amax(2)[0, 0],
    }
    spread = {
        name: (heads_weights[0, 0].exp().square() / (size / size.sum())).sum()
        for name, size in ways.items()
    }
    assert min(spread, key=spread.get) == "rms"


def test_the_size_of_a_group_is_the_root_of_the_mean_square():
    """The size is not just proportional to it: if all heads agree, the size is their common
    weight."""
    heads_weights = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
    found = priority.root_mean_square(heads_weights.log()[None, None])[0, 0].exp()
    torch.testing.assert_close(found, heads_weights.square().mean(0).sqrt())


def test_noise_is_a_logarithm_in_integers():
    """Noise is within four units of -log2 of an odd multiple of 2^-32, also at both ends."""
    numbers = torch.cat([torch.arange(300_000), torch.tensor([0, 2**32 - 1])])
    u = ((priority.hashed(numbers) | 1).double()) / 2.0**32
    exact = -u.log2() * priority.UNIT
    assert ((priority.noise_of(numbers) - exact).abs() <= 4).all()


@pytest.mark.parametrize("limit", [8, 20])
def test_candidates_that_reach_a_threshold_are_right_on_average(limit, noises):
    """Probabilities are exact although sizes are integers and the threshold is rounded down."""
    own = (sizes(7) / priority.NATS).round().long()
    seeds = torch.arange(4000)[:, None] * 12_345_677
    sampled = own + priority.noise(torch.arange(ROWS), seeds)
    limits = torch.full((len(sampled),), limit)
    thresholds, least = priority.thresholds(sampled[:, None], limits)[:, 0].split(1, dim=1)
    assert (thresholds % priority.STEP == 0).all()
    chosen = sampled >= least
    assert (chosen.sum(1) >= limit).all()
    assert ((chosen.sum(1) == limit) | (least == thresholds)[:, 0]).all()
    weights = (-priority.log_chances(own.expand_as(sampled), thresholds)).exp().double() * chosen
    for seed in range(3):
        values = torch.randn(ROWS, generator=torch.Generator().manual_seed(40 + seed))
        values = (values * sizes(7).exp()).double()
        assert_unbiased((weights * values).sum(1), values.sum())


def test_all_keys_are_candidates_where_there_are_no_more():
    sampled = torch.tensor([5, 700_000, priority.LEAST, -3], dtype=torch.int32)
    limits, same = torch.tensor([3, 1, 2, 9]), sampled.expand(4, 1, 4)
    every = [priority.LEAST, priority.LEAST + 1]
    want = [every, [0, priority.STEP], [-priority.STEP, 0], every]
    assert priority.thresholds(same, limits)[:, 0].tolist() == want


def tempered_bias(sizes, k, noises):
    """Return how much tempered sums are below the true sum on average, and the standard error.

    Both are fractions of the true sum. Sizes are float32 `[n]`, noises `[SEEDS, n]`.
    """
    _, positions, chances = priority.sample(sizes.expand(len(noises), -1), noises, k)
    weights = (-chances.double() * priority.temper(k)).exp()
    parts = weights * sizes.double().softmax(-1)[positions.clamp_min(0)]
    lacks = 1 - torch.where(positions < 0, 0, parts).sum(-1)
    return float(lacks.mean()), float(lacks.std()) / math.sqrt(len(noises))


def most_tempered_bias(k, n):
    """Return the bound of the bias from docs/pipeline/rerank.md."""
    return 1 - ((k - 0.5) / n) ** (1 / math.sqrt(k))


@pytest.mark.parametrize(
    ("n", "k"),
    [slow(300, 16), slow(300, 64), (60, 8), (60, 2), (60, 1)],
)
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, "one large", "two kinds"])
def test_tempered_sums_lack_no_more_than_the_bound(n, k, spread):
    """The bound holds for weights of any distribution.

    Means are within 6 of their standard errors.
    """
    own, numbers = torch.zeros(n), torch.randn(n, generator=torch.Generator().manual_seed(n))
    if spread == "one large":
        own[7] = 5.0
    elif spread == "two kinds":
        own[::10] = 3.0
    else:
        own = spread * numbers
    ids, seeds = torch.arange(n), torch.arange(6_000)[:, None] * 12_345_677
    lacks, error = tempered_bias(own, k, nats(priority.noise(ids, seeds)))
    assert lacks >= -6 * error  # sums are never too large
    assert lacks <= most_tempered_bias(k, n) + 6 * error + 1e-6
    if spread == 0.0 and k > 1:  # equal weights nearly reach the bound
        assert lacks >= 1 - (k / n) ** (1 / math.sqrt(k)) - 6 * error


def test_the_bound_is_as_docs_say():
    assert round(most_tempered_bias(16, 300), 2) == 0.52
    assert round(most_tempered_bias(100, 131_072), 2) == 0.51
    assert round(most_tempered_bias(1_000, 131_072), 2) == 0.14
    assert most_tempered_bias(2**20, 2**20) < 1e-6
