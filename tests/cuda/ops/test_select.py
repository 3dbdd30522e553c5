"""The kernels of the selection equal the torch reference bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.ops import select as reference
from kvindex_cuda.ops import select
from tests.cuda import emulator
from tests.cuda.devices import on, on_devices, sampled_on_cpu


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(got, want):
    """Equal bit by bit, which also distinguishes -0 from 0."""
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.signbit(), theirs.signbit())


def some_scores(kind, seed, *shape):
    scores = drawn(seed, *shape)
    if kind == "few values":
        scores = (2 * scores).round()
    elif kind == "equal":
        scores = torch.full(shape, -3.5)
    elif kind == "hidden":
        scores = scores.masked_fill(drawn(seed + 1, *shape) < 1, float("-inf"))
        scores[0] = float("-inf")
    elif kind == "zeros":
        scores = scores.sign() * 0
    elif kind == "wide":
        scores = scores.sign() * torch.exp2(20 * drawn(seed + 1, *shape))
    return scores


KINDS = ["normal", "few values", "equal", "hidden", "zeros", "wide"]


TOP = [(1, 1), (255, 300), (257, 100), (3000, 100), (9000, 2048)]


@sampled_on_cpu("size, kind", TOP, KINDS, indirect=False)
def test_top_k(size, kind, device):
    N, k = size
    scores = some_scores(kind, N, 3, 2, N).to(device)
    with on(device):
        got = select.top_k(scores, k)
    same(got, reference.top_k(scores, k))


@on_devices
def test_top_k_of_more_than_a_block_sorts(device):
    scores = some_scores("few values", 5, 2, 9000).to(device)
    scores[1, 4000:] = float("-inf")
    with on(device):
        got = select.top_k(scores, 5000)
    same(got, reference.top_k(scores, 5000))


@on_devices
@pytest.mark.parametrize(("shape", "k"), [((2, 3, 0), 5), ((0, 7), 2), ((2, 9), 0), ((40,), 7)])
def test_top_k_of_nothing_and_of_one_row(shape, k, device):
    scores = drawn(0, *shape).to(device)
    with on(device):
        got = select.top_k(scores, k)
    same(got, reference.top_k(scores, k))


@on_devices
def test_top_k_of_strided_scores(device):
    scores = drawn(1, 500, 6).to(device).T
    with on(device):
        got = select.top_k(scores[::2], 9)
    same(got, reference.top_k(scores[::2], 9))


def some_votes(kind, seed, *shape):
    votes = (10 * drawn(seed, *shape) + 40).clamp(0, 96).int()
    if kind == "equal":
        votes = torch.full_like(votes, 7)
    elif kind == "wide":
        votes = (2.0**29 * drawn(seed, *shape)).clamp(-(2.0**31) + 256, 2.0**31 - 256).int()
    elif kind == "ends":
        votes = torch.where(votes > 40, 2**31 - 1, -(2**31) + 1).int()
    return votes


@sampled_on_cpu(
    "size, kind",
    [(1, 1), (3, 255), (8, 257), (4, 3000), (1, 9000)],
    ["tiers", "equal", "wide", "ends"],
    indirect=False,
)
def test_candidates(size, kind, device):
    g, N = size
    votes = some_votes(kind, g + N, 3, 2, g, N).to(device)
    # the last sequence is all padding
    valid = torch.arange(N) >= torch.tensor([0, N // 3, N])[:, None]
    limits = torch.tensor([max(1, N // 10), N // 4, 0])
    for flags in (None, valid.to(device)):
        with on(device):
            got = select.candidates(votes, limits, flags)
        same([got], [reference.candidates(votes, limits, flags)])


@on_devices
def test_candidates_of_all_and_of_more_than_are_valid(device):
    votes = some_votes("tiers", 1, 2, 1, 2, 600).to(device)
    valid = (drawn(2, 2, 600) > 1).to(device)
    for limits in ([600, 600], [0, 0], [300, 1]):
        limits = torch.tensor(limits)
        with on(device):
            got = (
                select.candidates(votes, limits, valid),
                select.candidates(votes, limits.to(device)),
            )
        same(got, [reference.candidates(votes, limits, flags) for flags in (valid, None)])
    with pytest.raises(ValueError, match="limits: got 601, allowed are up to 600"):
        select.candidates(votes, torch.tensor([601, 2]))


@sampled_on_cpu("N, share", [1, 31, 255, 2047, 2048, 2049, 9000], [0.03, 0.0, 1.0], indirect=False)
def test_compact(N, share, device):
    chosen = torch.rand(3, 2, N, generator=torch.Generator().manual_seed(N)) < share
    chosen[1, 0] = False
    chosen = chosen.to(device)
    with on(device):
        got = (
            *(select.compact(chosen), select.compact(chosen[:, :, ::2])),
            *(select.compact(chosen[:, :1].expand(-1, 4, -1)), select.compact(chosen[0, 1])),
        )
    want = chosen, chosen[:, :, ::2], chosen[:, :1].expand(-1, 4, -1), chosen[0, 1]
    same(got, [reference.compact(part) for part in want])


@on_devices
@settings(max_examples=12)
@given(data=st.data())
def test_any_scores(device, data):
    N, k = data.draw(st.integers(1, 600)), data.draw(st.integers(0, 700))
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    some = [*data.draw(st.lists(values, min_size=1, max_size=6)), float("-inf"), 0.0, -0.0]
    at = torch.randint(len(some), (2, N), generator=torch.Generator().manual_seed(k))
    scores = torch.tensor(some)[at].to(device)
    with on(device):
        got = select.top_k(scores, k)
    same(got, reference.top_k(scores, k))


@on_devices
def test_subnormal_scores_are_not_taken_for_zeros(device):
    scores = torch.tensor([[-2.1e-44, -0.0, 1e-45, 0.0, -1e-45, 3e-39]]).to(device)
    with on(device):
        got = select.top_k(scores, 6)
    same(got, reference.top_k(scores, 6))


@on_devices
def test_a_batch_equals_its_rows(device):
    scores, votes = drawn(4, 4, 3000).to(device), some_votes("tiers", 5, 4, 1, 2, 3000).to(device)
    limits = torch.tensor([100, 100, 100, 100])
    with on(device):
        whole = *select.top_k(scores, 50), select.candidates(votes, limits)
        for b in range(4):
            row = slice(b, b + 1)
            part = *select.top_k(scores[row], 50), select.candidates(votes[row], limits[row])
            width = part[2].shape[-1]
            same(part, (whole[0][row], whole[1][row], whole[2][row][..., :width]))
            assert (whole[2][row][..., width:] == -1).all()


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_whatever_the_order_of_threads_and_blocks():
    scores, votes = drawn(6, 1, 20000), some_votes("tiers", 7, 1, 1, 2, 20000)
    want = *reference.top_k(scores, 300), reference.candidates(votes, torch.tensor([900]))
    for order in emulator.ORDERS:
        with emulator.emulated(order=order, seed=1):
            got = *select.top_k(scores, 300), select.candidates(votes, torch.tensor([900]))
        same(got, want)


@on_devices
def test_the_comparison_can_fail(device):
    scores = some_scores("few values", 8, 1, 3000).to(device)
    want = reference.top_k(scores, 100)
    first, second = want[1][0, 0].item(), want[1][0, 99].item()
    other = scores.clone()
    other[0, first], other[0, second] = scores[0, second], scores[0, first]
    with on(device):
        got = select.top_k(other, 100)
    assert torch.equal(got[0], want[0])
    with pytest.raises(AssertionError):
        same(got, want)


def test_what_the_kernels_do_not_serve_is_refused():
    with pytest.raises(ValueError, match=r"scores: got torch.float64, allowed is torch.float32"):
        select.top_k(drawn(0, 2, 5).double(), 2)
    with pytest.raises(ValueError, match=r"votes: got torch.int64"):
        select.candidates(torch.zeros(1, 1, 1, 5).long(), torch.tensor([1]))
    with pytest.raises(ValueError, match="limits: got shape"):
        select.candidates(torch.zeros(1, 1, 1, 5).int(), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"chosen: got torch.uint8"):
        select.compact(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="allowed is a CUDA device"):
        select.top_k(drawn(0, 2, 5), 2)
