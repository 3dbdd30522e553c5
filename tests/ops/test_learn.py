import pytest
import torch

from kvindex.ops import learn


def keys_of(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def means(keys, valid, every):
    """Of each segment's valid keys, `[B, G, S, D]`; and how many they are, `[B, S]`."""
    parts = zip(keys.split(every, 2), valid.split(every, 1), strict=True)
    sums = [((k * v[:, None, :, None]).sum(2), v.sum(1)) for k, v in parts]
    total, counts = (
        torch.stack(part, dim) for part, dim in zip(zip(*sums, strict=True), (2, 1), strict=True)
    )
    return total / counts.clamp_min(1)[:, None, :, None], counts


def test_a_center_is_the_mean_of_its_segment_and_leans_on_the_one_before_while_begun():
    keys = keys_of(0, 3, 2, 50, 8).double()
    valid = torch.arange(50) >= torch.tensor([0, 25, 50])[:, None]
    got = learn.centers(keys, valid, {}, start=0, every=20)
    mean, counts = means(keys, valid, 20)
    want = mean.clone()
    share = learn.LEAN * (counts[:, 1] > 0) / (counts[:, 2] + learn.LEAN)  # ten of twenty tokens
    want[:, :, 2] += share[:, None, None] * (mean[:, :, 1] - mean[:, :, 2])
    want *= (counts > 0)[:, None, :, None]
    assert got["centers"].dtype == torch.bfloat16
    assert got["centers"].shape == (3, 2, 3, 8)
    torch.testing.assert_close(got["centers"].double(), want, rtol=5e-3, atol=5e-3)
    assert torch.equal(got["known"], counts > 0)


@pytest.mark.parametrize("every", [1, 7, 20, 64, 1000])
@pytest.mark.parametrize("pieces", [[50], [20, 30], [1] * 50, [0, 7, 0, 43], [19, 2, 29]], ids=str)
def test_a_segment_learns_from_the_first_append_that_holds_a_token_of_it(every, pieces):
    keys = keys_of(1, 2, 1, 50, 8)
    valid = torch.arange(50) >= torch.tensor([0, 11])[:, None]
    learned, start = {}, 0
    for count in pieces:
        before, some = learned, slice(start, start + count)
        learned = learn.centers(keys[:, :, some], valid[:, some], learned, start=start, every=every)
        if "known" in before:
            old = before["known"]
            assert learned["known"][:, : old.shape[1]][old].all()
            kept = old[:, None, :, None] & torch.ones_like(before["centers"], dtype=torch.bool)
            now = learned["centers"][:, :, : old.shape[1]]
            assert torch.equal(now[kept], before["centers"][kept])
        start += count
    segments = -(-50 // every)
    assert learned["centers"].shape == (2, 1, segments, 8)
    ends = (torch.arange(segments) + 1) * every
    assert torch.equal(learned["known"], ends > torch.tensor([0, 11])[:, None])
    if every == 1000:  # the mean of the first tokens, nothing to lean on
        first = next(count for count in pieces if count)
        mean = keys[0, :, :first].mean(1).bfloat16()
        torch.testing.assert_close(learned["centers"][0, :, 0], mean)


def test_learned_segments_stay_when_their_tokens_come_again():
    keys = keys_of(2, 1, 1, 40, 8)
    learned = learn.centers(keys, None, {}, start=0, every=16)
    again = learn.centers(9 + keys[:, :, :10], None, learned, start=20, every=16)
    assert torch.equal(again["centers"], learned["centers"])
    assert torch.equal(again["known"], learned["known"])


def test_centers_of_huge_keys_are_finite():
    keys = torch.full((1, 1, 20, 8), torch.finfo(torch.float32).max)
    assert learn.centers(keys, None, {}, start=0, every=8)["centers"].isfinite().all()


@pytest.mark.parametrize("norm", [1e-20, 0.99, 1.0, 3.0, 1e15])
def test_reference_is_16_to_32_times_the_largest_norm_and_a_power_of_2(norm):
    norms = torch.tensor([[[norm / 3, norm, 0.0]]])
    got = float(learn.weight_scale(norms, None, {})["weight_scale"])
    assert 16 * norm * (1 - 1e-6) < got <= 32 * norm * (1 + 1e-6)
    assert torch.frexp(torch.tensor(got)).mantissa == 0.5


def test_reference_is_learned_where_it_is_not_and_not_of_padding():
    norms = torch.tensor([[[9.0, 1.0]], [[9.0, 0.0]], [[9.0, 2.0]]])
    valid = torch.tensor([[False, True], [False, True], [True, True]])
    got = learn.weight_scale(norms, valid, {})
    assert got["weight_scale"].tolist() == [[32.0], [0.0], [256.0]]
    assert learn.weight_scale(100 * norms, None, got)["weight_scale"].tolist() == [
        [32.0],
        [16384.0],
        [256.0],
    ]
    empty = learn.weight_scale(norms[:, :, :0], None, got)
    assert torch.equal(empty["weight_scale"], got["weight_scale"])


def test_reference_is_of_the_first_tokens_that_have_a_norm():
    norms = torch.zeros(3, 2, 3 * learn.SEEN)
    norms[0, 0, 0], norms[0, 0, learn.SEEN - 1], norms[0, 0, learn.SEEN] = 1, 2, 4
    norms[0, 1, -1] = 1  # nothing before
    norms[1] = 8
    norms[1, :, 100 + learn.SEEN :] = 16
    norms[2] = 8
    valid = torch.ones(3, 3 * learn.SEEN, dtype=torch.bool)
    valid[1, :100] = False
    valid[2] = False
    got = learn.weight_scale(norms, valid, {})["weight_scale"]
    assert got.tolist() == [[64.0, 32.0], [256.0, 256.0], [0.0, 0.0]]
    for b in range(3):
        row = slice(b, b + 1)
        assert torch.equal(learn.weight_scale(norms[row], valid[row], {})["weight_scale"], got[row])
    later = learn.weight_scale(norms, None, {"weight_scale": got})["weight_scale"]
    assert later.tolist() == [[64.0, 32.0], [256.0, 256.0], [256.0, 256.0]]
