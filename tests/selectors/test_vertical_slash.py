import pytest
import torch

from kvindex.selectors import VerticalSlashSelector
from kvindex.selectors.vertical_slash import slash_blocks, slash_sums
from tests.support.selecting import chosen_by, fraction, naive_choice, naive_top, prompt


def naive(some, before, vertical, slash):
    """Return the blocks that lines cross, by loops over all weights and all queries."""
    keys, T = before.flatten(0, 1), len(some)
    R, K = min(T, 64), len(keys)
    weights = (some[T - R :] @ keys.mT * some.shape[1] ** -0.5).softmax(-1)
    distances = {}
    for r in range(R):
        for k in range(K):
            distance = (K + T - R + r) - k  # positions of the query and the key
            distances[distance] = distances.get(distance, 0.0) + float(weights[r, k])
    columns = naive_top(weights.sum(0), vertical)
    order = sorted(distances)
    sums = torch.tensor([distances[distance] for distance in order]).double()
    kept = {k // 128 for k in columns}
    for line in naive_top(sums, slash):
        keys_on_line = [K + t - order[line] for t in range(T)]
        kept |= {k // 128 for k in keys_on_line if 0 <= k < K}
    return sorted(kept)


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize(("vertical", "slash", "tail"), [(0.01, 0.01, 5), (0.1, 0.005, 70)])
def test_the_choice_is_that_of_the_formula(D, vertical, slash, tail):
    queries, keys, _ = prompt(128 * 4 + tail, D=D, B=1, H=2, G=1, spread=2)
    got = chosen_by(VerticalSlashSelector(vertical, slash), queries, keys)
    want = naive_choice(queries, keys, lambda some, before: naive(some, before, vertical, slash))
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_sums_along_slash_lines():
    weights = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]])
    # entry c: key c of the last query, key c - 1 of the query before, key c - 2 of the first
    assert slash_sums(weights).tolist() == [100, 210, 321, 432, 43, 4]


def test_a_slash_line_crosses_the_blocks_of_all_queries():
    kept = torch.zeros(64 + 384 - 1, dtype=torch.bool)
    kept[300] = True  # key 300 for the last query of 128, key 173 for the first
    assert slash_blocks(kept, 128).tolist() == [False, True, True]
    kept = torch.zeros(64 + 384 - 1, dtype=torch.bool)
    kept[255] = True  # key 255 for the last query, key 128 for the first
    assert slash_blocks(kept, 128).tolist() == [False, True, False]
    kept = torch.zeros(64 + 384 - 1, dtype=torch.bool)
    kept[400] = True  # only the first queries have such a key before the own block
    assert slash_blocks(kept, 128).tolist() == [False, False, True]


@pytest.mark.parametrize("given", [{"vertical": 0.0}, {"slash": 1.5}])
def test_a_wrong_option_raises(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
        VerticalSlashSelector(**given)
