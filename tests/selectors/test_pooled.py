import pytest
import torch

from kvindex.selectors import PooledSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, naive_top, prompt, whole


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("mass", [0.3, 0.9])
def test_the_choice_is_that_of_the_formula(D, mass):
    queries, keys, _ = prompt(128 * 6 + 5, D=D)

    def choose(some, before):
        scores = [float(some.mean(0) @ block.mean(0)) * D**-0.5 for block in before]
        return naive_top(torch.tensor(scores).double().softmax(0), mass)

    got = chosen_by(PooledSelector(mass), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_a_summary_is_the_mean_key_of_a_block():
    _, keys, _ = prompt(256)
    summaries = PooledSelector().summarize(whole(keys))
    assert summaries.shape == (2, 2, 2, 16)
    torch.testing.assert_close(summaries[:, :, 1], keys[:, :, 128:].mean(2))


@pytest.mark.parametrize("mass", [0.0, -1.0, 1.1, float("nan"), "0.9", True])
def test_a_wrong_mass_raises(mass):
    with pytest.raises(ValueError, match="mass: got"):
        PooledSelector(mass)
