"""Intervals have the coverage that they claim, and tests and corrections are those of textbooks."""

import numpy as np
import pytest

from kvindex_adapters.evaluate.compare.statistics import (
    bootstrap,
    bootstrap_ratio,
    holm,
    in_blocks,
    sign_test,
    wilson,
)


def covers(interval, truth):
    return interval[0] <= truth <= interval[1]


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.97])
def test_wilsons_interval_covers_the_rate_in_about_95_of_100_samples(rate):
    """The test uses 2,000 samples and a fixed seed.

    If the coverage is 95%, a new seed would give less than 93% once in 10^5 runs.
    """
    scores = np.random.default_rng(0).random((2000, 50)) < rate
    assert np.mean([covers(wilson(row), rate) for row in scores]) > 0.93


def test_wilsons_interval_is_narrower_with_more_answers_and_stays_within_0_and_1():
    few, many = wilson([1.0] * 5), wilson([1.0] * 500)
    assert few[0] < many[0] < few[1] <= many[1] <= 1
    assert wilson([0.0] * 5) == pytest.approx((0, 1 - few[0]))
    assert wilson([0.5] * 8) == wilson([0.0, 1.0] * 4)


def test_the_bootstrap_covers_the_mean_and_is_the_same_each_time():
    """The test uses 300 samples of 40 numbers and a fixed seed.

    If the coverage is 94%, a new seed would give less than 90% once in 10^4 runs.
    """
    samples = np.random.default_rng(1).integers(-1, 2, (300, 40))
    assert np.mean([covers(bootstrap(row), 0) for row in samples]) > 0.9
    assert bootstrap(samples[0]) == bootstrap(samples[0])
    assert bootstrap([0.25] * 9) == (0.25, 0.25)
    (low, high), (lower, higher) = bootstrap(samples[0]), bootstrap(samples[0], comparisons=9)
    assert lower < low < high < higher


def test_a_ratio_of_paired_values_knows_that_they_are_paired():
    values = np.random.default_rng(2).lognormal(size=50)
    assert bootstrap_ratio(values / 2, values) == pytest.approx((0.5, 0.5), rel=1e-5)
    low, high = bootstrap_ratio(values[::-1] / 2, values)
    assert low < 0.5 < high


def test_blocks_are_means_of_neighbors():
    assert in_blocks([1, 3, 5, 7], 2) == [2, 6]
    assert in_blocks([1, 3], 16) == [2]


def test_the_sign_test_is_mcnemars():
    assert sign_test([1] * 6 + [0] * 10) == 2 / 2**6
    assert sign_test([1, -1, 0]) == 1
    assert sign_test([0, 0]) == sign_test([]) == 1
    assert sign_test([1] * 9 + [-1]) == pytest.approx(2 * 11 / 2**10)
    assert sign_test([-1] * 2000) < 1e-300


def test_holms_correction():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
