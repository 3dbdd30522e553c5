import math

import pytest
import torch

from kvindex.selectors import SkipSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, prompt


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_the_choice_is_that_of_a_running_maximum(D, threshold):
    queries, keys, _ = prompt(128 * 8 + 5, D=D, spread=3)

    def choose(some, before):
        largest, kept = [-math.inf] * len(some), []
        for j, block in enumerate(before):
            peaks = [float((block @ query).max()) * D**-0.5 for query in some]
            largest = [max(pair) for pair in zip(largest, peaks, strict=True)]
            pairs = zip(peaks, largest, strict=True)
            if not all(peak < top - math.log(1 / threshold) for peak, top in pairs):
                kept.append(j)
        return kept

    got = chosen_by(SkipSelector(threshold), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_weights_that_are_left_out_are_below_the_threshold():
    queries, keys, _ = prompt(128 * 10, B=1, H=1, G=1, spread=4)
    chosen = chosen_by(SkipSelector(0.01), queries, keys)[0, 0]
    logits = 0.25 * queries[0, 0] @ keys[0, 0].mT
    weights = logits.masked_fill(torch.ones(1280, 1280).triu(1) > 0, -math.inf).softmax(-1)
    out = ~chosen.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (weights * out > 0).any()
    assert (weights * out < 0.01 * weights.amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_a_wrong_threshold_raises(threshold):
    with pytest.raises(ValueError, match="threshold: got"):
        SkipSelector(threshold)
