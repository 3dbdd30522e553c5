import pytest
import torch

from kvindex.ops import codes, transform
from kvindex.selectors import IndexSelector
from tests.support.selecting import chosen_by, fraction, naive_choice, naive_top, prompt


def estimated_keys(block):
    """Return the keys `[128, D]` that the codes of a block represent, key by key."""
    D = block.shape[1]
    mean = block.mean(0).bfloat16().double()
    rotation = transform.rotation(D, 0).double()
    level, found = codes.lloyd_max(D, 0)[0], []
    for key in block:
        difference = key - mean
        norm = difference.norm()
        rotated = rotation @ difference / norm
        signs = torch.where(rotated >= 0, 1.0, -1.0).double()
        weight = norm / (level * signs @ rotated)
        found.append(mean + rotation.T @ (weight * level * signs))
    return torch.stack(found)


@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize(("mass", "samples", "tail"), [(0.3, 1, 5), (0.8, 8, 70)])
def test_the_choice_is_that_of_the_estimates(D, mass, samples, tail):
    queries, keys, _ = prompt(128 * 4 + tail, D=D, H=2, G=1)

    def choose(some, before):
        estimates = torch.cat([estimated_keys(block) for block in before])
        total = torch.zeros(len(before), dtype=torch.float64)
        for part in some.split(128 // samples):
            row = (estimates @ part[-1] * D**-0.5).softmax(0)
            total += row.view(len(before), 128).sum(-1)
        return naive_top(total, mass)

    got = chosen_by(IndexSelector(mass, samples), queries, keys)
    want = naive_choice(queries, keys, choose)
    assert torch.equal(got, want)
    assert fraction(want) < 1


def test_a_single_key_with_a_large_logit_is_found():
    queries, keys, _ = prompt(128 * 9, B=1, H=1, G=1, D=64, spread=0)
    queries = 0.1 * queries + 4
    keys = 0.1 * keys
    keys[0, 0, 128 * 3 + 50] = 4
    chosen = chosen_by(IndexSelector(0.5), queries, keys)[0, 0, 8]
    assert chosen.nonzero()[:, 0].tolist() == [0, 3, 7, 8]


def test_a_summary_has_one_bit_per_number_and_two_bytes_per_key():
    keys = prompt(256, D=64)[1]
    summaries = IndexSelector().summarize(keys)
    assert summaries.dtype == torch.uint8
    assert summaries.shape == (2, 2, 2, 128 * 64 // 8 + 2 * 128 + 2 * 64)


def test_wrong_summaries_and_options_raise():
    queries, keys, _ = prompt(256)
    summaries = IndexSelector().summarize(keys)
    with pytest.raises(ValueError, match=r"summaries: got dtype torch.float32, allowed"):
        IndexSelector().choose(queries, summaries.float(), 0, scale=0.25)
    with pytest.raises(ValueError, match=r"keys: got D=12, allowed is a multiple of 8"):
        IndexSelector().summarize(keys[..., :12])
    for given in ({"mass": 0.0}, {"samples": 0}, {"samples": 3}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
            IndexSelector(**given)
