import pytest
import torch

from kvindex.ops import learn


def keys_of(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_centre_is_the_mean_of_valid_keys_and_kept():
    keys = keys_of(0, 3, 2, 10, 8)
    valid = torch.arange(10) >= torch.tensor([0, 4, 10])[:, None]
    got = learn.centre(keys, valid, {})
    assert got["seen"].tolist() == [True, True, False]
    torch.testing.assert_close(got["centre"][0], keys[0].mean(1))
    torch.testing.assert_close(got["centre"][1], keys[1, :, 4:].mean(1))
    assert not got["centre"][2].any()
    again = learn.centre(5 + keys, None, got)
    assert torch.equal(again["centre"][:2], got["centre"][:2])
    torch.testing.assert_close(again["centre"][2], 5 + keys[2].mean(1))
    assert again["seen"].all()
    assert torch.equal(learn.centre(keys[:, :, :0], None, got)["centre"], got["centre"])


@pytest.mark.parametrize("norm", [1e-20, 0.99, 1.0, 3.0, 1e15])
def test_reference_is_16_to_32_times_the_largest_norm_and_a_power_of_2(norm):
    norms = torch.tensor([[[norm / 3, norm, 0.0]]])
    got = float(learn.reference(norms, None, {})["reference"])
    assert 16 * norm * (1 - 1e-6) < got <= 32 * norm * (1 + 1e-6)
    assert torch.frexp(torch.tensor(got)).mantissa == 0.5


def test_reference_is_learnt_where_it_is_not_and_not_of_padding():
    norms = torch.tensor([[[9.0, 1.0]], [[9.0, 0.0]], [[9.0, 2.0]]])
    valid = torch.tensor([[False, True], [False, True], [True, True]])
    got = learn.reference(norms, valid, {})
    assert got["reference"].tolist() == [[32.0], [0.0], [256.0]]
    assert learn.reference(100 * norms, None, got)["reference"].tolist() == [
        [32.0],
        [16384.0],
        [256.0],
    ]
    empty = learn.reference(norms[:, :, :0], None, got)
    assert torch.equal(empty["reference"], got["reference"])
