"""Compare kernels that sample candidates and rows with `kvindex.ops.priority`, integers exactly."""

import math

import numpy as np
import pytest
import torch

from kvindex.cpu.kernels import lookup, noise, query, sampled_rows, scan, select, sign_votes
from kvindex.cpu.kernels import priority as kernels
from kvindex.cpu.kernels.compile import kernel
from kvindex.ops import priority
from kvindex.ops.attention import cap

SEED = 2**32 - 12345


@kernel
def put_noise(seed, first, exact, bounds):
    for i in range(len(exact)):
        number = noise.number_of(first + i, seed)
        exact[i], bounds[i] = noise.noise_of(number), noise.bound_of(number)


@kernel
def add_bounds(sizes, number, out):
    noise.add_bounds(sizes, number, out)


def noises(n, first=0):
    """Return the kernels' noise of consecutive ids, and its bounds, int32 `[2, n]`."""
    found = np.empty((2, n), np.int32)
    put_noise(np.uint32(SEED), first, *found)
    return torch.from_numpy(found)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("first", [0, 2**31 - 2**18])
def test_noise_is_the_reference_one_and_bounds_are_never_below(first):
    exact, bounds = noises(2**18, first)
    ids = torch.arange(first, first + 2**18)
    assert torch.equal(exact.long(), priority.noise_of(ids * priority.SPREAD + SEED))
    above = bounds - exact
    assert above.min() >= 0
    assert (above > kernels.SLACK).double().mean() < 1e-4


@pytest.mark.parametrize("spread", [0.0, 1e5, 1e12])
def test_a_bound_is_a_rounded_size_and_the_bound_of_its_noise(spread):
    sizes, out = (normal(256) * spread).clamp_min(-priority.LARGEST), np.empty(256, np.int32)
    sizes[3:5] = torch.tensor([2.5, 3.5])  # halves are rounded to even numbers
    add_bounds(sizes.numpy(), np.uint32(SEED), out)
    rounded = sizes.clamp_max(priority.LARGEST).round().int()
    assert torch.equal(torch.from_numpy(out), rounded + noises(256)[1])


def asked(D, heads, looked_up):
    """Return rounded queries in the forms that kernels take: planes, tables, totals."""
    integers, W = np.random.default_rng(D).integers(-21, 22, (heads, D)), -(-D // 64)
    planes = np.empty((heads, query.GROUP, 0 if looked_up else W), np.uint64)
    tables = np.empty((heads, W if looked_up else 0, lookup.NIBBLES, 16), np.uint8)
    totals = integers.sum(1).astype(np.int32)
    for h in range(heads):
        if looked_up:
            totals[h] = lookup.put_tables(integers[h], tables[h])
        else:
            query.put_planes(integers[h], planes[h])
    return planes, tables, totals


@pytest.mark.parametrize("n", [1, 200, 256])
@pytest.mark.parametrize("D", [8, 64, 80])
@pytest.mark.parametrize("looked_up", [False, True])
def test_sizes_are_the_reference_ones_of_the_same_votes(D, n, looked_up):
    if looked_up and not lookup.SERVED:
        pytest.skip("needs AVX2")
    rng, heads, W = np.random.default_rng(n), 3, -(-D // 64)
    planes, tables, totals = asked(D, heads, looked_up)
    words = rng.integers(0, 2**63, (W, sign_votes.CHUNK), np.uint64)
    factors = rng.integers(0, 2**15, sign_votes.CHUNK, np.int32)
    offsets = rng.integers(-(2**20), 2**20, heads, np.int32)
    gains, shifts = normal(heads).abs() / 5, normal(heads) * 1e5
    scales, room = (
        torch.stack([gains, shifts], 1).numpy(),
        np.zeros((2, sign_votes.CHUNK), np.int32),
    )
    nibbles, sizes = (
        np.empty((W, 16, lookup.KEYS), np.uint8),
        np.empty(sign_votes.CHUNK, np.float32),
    )
    every, out = np.empty((heads, n), np.int32), np.empty(n, np.int32)
    for h in range(heads):
        one = slice(h, h + 1)
        of = planes[one], tables[one], totals[one], factors, offsets[one]
        put_votes(words, *of, nibbles, *room, every[h])
    of = planes, tables, totals, factors, offsets, scales
    put_bounds(words, *of, np.uint32(SEED), nibbles, *room, sizes, out)
    want = priority.sizes(
        torch.from_numpy(every)[None, None], gains[None, None], shifts[None, None]
    )
    assert torch.equal(torch.from_numpy(out) - noises(n)[1], want[0, 0].int())


@kernel
def put_votes(words, planes, tables, totals, factors, offsets, nibbles, dots, some, out):
    sign_votes.put_votes(words, planes, tables, totals, factors, offsets, nibbles, dots, some, out)


@kernel
def put_bounds(
    words, planes, tables, totals, own, offsets, scales, number, nibbles, dots, some, sizes, out
):
    sign_votes.put_bounds(
        words, planes, tables, totals, own, offsets, scales, number, nibbles, dots, some, sizes, out
    )


@pytest.mark.parametrize("blocks", [1, 7, 128, 129, 300, 1000])
def test_blocks_of_a_sample_are_the_reference_ones(blocks):
    found = [s for s in range(blocks) if scan.is_sampled(s, blocks)]
    assert found == priority.sampled_blocks(blocks).tolist()


def chosen(sizes, valid, limit):
    """Sample candidates from sizes int32 `[n]` with the kernel: ids, noises and `log π`."""
    n, bounds = len(sizes), sizes + noises(len(sizes))[1]
    held = bounds.masked_fill(~valid, int(sign_votes.INVALID)).numpy()
    listed, room = (np.full(n + 2 * select.SAMPLED, -7, np.int32) for _ in range(2))
    found = kernels.candidates(held, limit, np.uint32(SEED), listed, room)
    return (torch.from_numpy(part) for part in found)


def assert_reference_candidates(sizes, valid, limit):
    exact = noises(len(sizes))[0]
    priorities = (sizes + exact).masked_fill(~valid, priority.LEAST)
    found = priority.thresholds(priorities[None, None], torch.tensor([limit]))
    threshold, least = found.flatten().tolist()
    want = (priorities >= least).nonzero()[:, 0]
    ids, own, chances = chosen(sizes, valid, limit)
    assert torch.equal(ids.long(), want)
    assert torch.equal(own, exact[want] * priority.NATS)
    assert torch.equal(chances, priority.log_chances(sizes[want].long(), torch.tensor(threshold)))


@pytest.mark.parametrize("n", [1, 255, 9000])
@pytest.mark.parametrize("spread", [0.0, 1e5, 1e8])
def test_candidates_are_the_reference_ones(n, spread):
    valid = normal(n, seed=1) > -0.5
    valid[0] = True
    sizes, count = (normal(n) * spread).round().int(), int(valid.sum())
    for limit in {1, count // 2 or 1, count - 1 or 1, count}:
        assert_reference_candidates(sizes, valid, limit)


@pytest.mark.parametrize("n", [300, 3000])
def test_candidates_of_any_number_are_the_reference_ones(n):
    sizes, valid = (normal(n) * 1e5).round().int(), normal(n, seed=1) > -1
    for limit in range(1, int(valid.sum()), n // 100):
        assert_reference_candidates(sizes, valid, limit)


def test_without_a_valid_key_there_is_no_candidate():
    ids, _, _ = chosen(torch.zeros(300, dtype=torch.int32), torch.zeros(300) > 0, 0)
    assert not len(ids)


@pytest.mark.parametrize("seen", [10**8, -(10**8)])
def test_a_sample_that_misleads_costs_nothing_but_time(seen):
    sizes = torch.zeros(4 * select.SAMPLED, dtype=torch.int32)
    sizes[::4] = seen  # the threshold is estimated from these
    for limit in (100, select.SAMPLED, 2 * select.SAMPLED):
        assert_reference_candidates(sizes, torch.ones(len(sizes)) > 0, limit)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("outside", [-math.inf, 1.5, 60.0])
def test_sizes_of_rows_are_the_reference_ones(heads, softcap, outside):
    estimates, chances, out = normal(heads, 500) * 40, -normal(500).abs(), np.empty(500, np.float32)
    logits = cap(estimates, 0.125, softcap)
    resident = torch.full((heads,), outside)
    totals = torch.logaddexp((logits - chances).logsumexp(-1), resident)[:, None]
    want = priority.root_mean_square((logits - totals)[None, None])[0, 0]
    given = estimates.numpy(), chances.numpy(), resident.numpy()
    sampled_rows.put_sizes(*given, 0.125, softcap or 0.0, out)
    torch.testing.assert_close(estimates, logits - totals, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(out), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 299, 300, 500])
@pytest.mark.parametrize("C", [1, 300])
def test_rows_are_sampled_as_the_reference_samples(C, k):
    sizes, own, chances = normal(C), normal(C, seed=1).abs(), -normal(C, seed=2).abs()
    own[C // 2 :] -= sizes[C // 2 :]  # of keys with equal priorities, the lower ids are taken
    ids, to = 3 * np.arange(C, dtype=np.int32), np.empty(k, np.int64)
    scores, weights = np.empty(k, np.float32), np.empty((2, k), np.float32)
    given = sizes.numpy(), own.numpy(), chances.numpy(), ids
    count = sampled_rows.sample(*given, k, 0.5, to, scores, weights)
    want, positions, last = priority.sample(sizes, own, k)
    assert count == min(k, C) == (positions >= 0).sum()
    assert to.tolist() == [3 * at if at >= 0 else -1 for at in positions.tolist()]
    torch.testing.assert_close(torch.from_numpy(scores), want)
    log_weight = torch.full((k,), -math.inf)
    log_weight[:count] = -torch.minimum(last[:count], chances[positions[:count]]) * 0.5
    torch.testing.assert_close(torch.from_numpy(weights), log_weight.expand(2, -1))
