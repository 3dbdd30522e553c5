import pytest
import torch

from kvindex.selectors import OracleSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, naive_top, prompt


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("mass", [0.3, 0.9])
def test_the_choice_is_that_of_the_formula(D, mass):
    queries, keys, _ = prompt(128 * 6 + 5, D=D)

    def choose(some, before):
        weights = [0.0] * len(before)
        for query in some:
            row = (before.flatten(0, 1) @ query * D**-0.5).softmax(0)
            for j in range(len(before)):
                weights[j] += float(row[128 * j : 128 * j + 128].sum())
        return naive_top(torch.tensor(weights).double(), mass)

    got = chosen_by(OracleSelector(mass), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_a_summary_is_the_keys_in_their_dtype():
    keys = prompt(256)[1].bfloat16()
    summaries = OracleSelector().summarize(keys)
    assert torch.equal(summaries.flatten(2, 3), keys)


@pytest.mark.parametrize("mass", [0.0, 1.1])
def test_a_wrong_mass_raises(mass):
    with pytest.raises(ValueError, match="mass: got"):
        OracleSelector(mass)
