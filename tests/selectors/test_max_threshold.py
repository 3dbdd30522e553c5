import math

import pytest
import torch

from kvindex.selectors import MaxThresholdSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, prompt


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("threshold", [0.01, 0.3, 1.0])
def test_the_choice_is_that_of_the_formula(D, threshold):
    queries, keys, _ = prompt(128 * 6 + 5, D=D)

    def choose(some, before):
        scores = [
            sum(math.exp(float(q @ block.mean(0)) * D**-0.5) for q in some) for block in before
        ]
        return [j for j, score in enumerate(scores) if score >= threshold * max(scores)]

    got = chosen_by(MaxThresholdSelector(threshold), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_large_scores_do_not_overflow():
    queries, keys, _ = prompt(128 * 4)
    chosen = chosen_by(MaxThresholdSelector(), queries * 1e6, keys * 1e6)
    assert fraction(chosen) < 1


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, float("nan"), "0.9", True])
def test_a_wrong_threshold_raises(threshold):
    with pytest.raises(ValueError, match="threshold: got"):
        MaxThresholdSelector(threshold)
