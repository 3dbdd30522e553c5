import pytest
import torch

from kvindex.selectors import AntidiagonalSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, naive_top, prompt


def tile_logits(some, keys, stride, scale):
    """Return the mean logit on each antidiagonal, by loops. A tile may have fewer queries."""
    logits = some @ keys.mT * scale
    rows = []
    for x in range(0, len(some), stride):
        here = range(x, min(x + stride, len(some)))
        row = [
            sum(float(logits[i, y + x + stride - 1 - i]) for i in here) / len(here)
            for y in range(0, len(keys), stride)
        ]
        rows.append(row)
    return torch.tensor(rows).double()


@pytest.mark.parametrize(
    ("D", "stride"), [(16, 16), (64, 16), (96, 16), (128, 64), (256, 16), (16, 8), (16, 128)]
)
@pytest.mark.parametrize(("mass", "tail"), [(0.3, 5), (0.9, 70)])
def test_the_choice_is_that_of_the_formula(D, stride, mass, tail):
    queries, keys, _ = prompt(128 * 4 + tail, D=D, H=2, G=1)

    def choose(some, before):
        rows = tile_logits(some, before.flatten(0, 1), stride, D**-0.5).softmax(-1)
        return naive_top(rows.sum(0).view(len(before), -1).sum(-1), mass)

    got = chosen_by(AntidiagonalSelector(mass, stride), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_with_a_stride_of_1_weights_are_exact():
    queries, keys, _ = prompt(128 * 3 + 5, B=1, H=1, G=1)

    def choose(some, before):
        rows = (some @ before.flatten(0, 1).mT / 4).softmax(-1)
        return naive_top(rows.sum(0).view(len(before), 128).sum(-1), 0.4)

    got = chosen_by(AntidiagonalSelector(0.4, 1), queries, keys)
    assert torch.equal(got, naive_choice(queries, keys, choose))


def test_the_antidiagonal_pairs_the_last_query_with_the_first_key():
    some, keys = torch.zeros(2, 1), torch.zeros(4, 1)
    some[1], keys[2] = 3, 5
    assert tile_logits(some, keys, 2, 1.0).tolist() == [[0, 15 / 2]]


def test_a_summary_has_the_keys_of_a_tile_in_one_row():
    keys = torch.zeros(1, 1, 128, 8)
    keys[0, 0, 2] = 1
    tiles = AntidiagonalSelector(0.5, 2).summarize(keys)
    assert tiles.shape == (1, 1, 1, 64, 16)
    assert tiles[0, 0, 0, 1].tolist() == 8 * [1] + 8 * [0]
    assert float(tiles.sum()) == 8


@pytest.mark.parametrize("given", [{"mass": 0.0}, {"stride": 0}, {"stride": 48}, {"stride": 2.0}])
def test_a_wrong_option_raises(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
        AntidiagonalSelector(**given)
