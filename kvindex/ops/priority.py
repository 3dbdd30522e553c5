"""Priority sampling: take the `k` rows with the largest `size / u`, each with a known probability.

Every key has a random number `u` in (0, 1) and a size, its estimated attention weight. A row is
sampled if its priority `size / u` is above the threshold `τ`, the (k+1)-th largest priority. Given
the other keys' numbers, the probability of this is `π = min(1, size / τ)`. Sums weighted with `1 /
π` are unbiased; sums weighted with a lower power of it (`temper`) are not.

ParisKV samples candidates first, then rows from these candidates. Both steps use the same `u`, so a
row is sampled if `u` is below `size / τ` in both steps, and `π` is the smaller of the two values.

The code works with logarithms: a priority is the logarithm of the size plus noise, `-log u`.
Candidates are sampled with integers that count units of `2^-16` octaves (powers of two), so that
all backends sample the same candidates. Rows are sampled with float32 and natural logarithms.

Source: Duffield, Lund and Thorup, Priority Sampling for Estimation of Arbitrary Subset Sums (2007).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.ops.select import top_k
from kvindex.ops.transform import LONGEST

UNIT = 2**16
"""Units per octave (a factor of 2)."""

NATS = math.log(2) / UNIT
"""One unit as a natural logarithm."""

SPREAD, FACTORS, ADDED = 0x9E3779B1, (0x2C1B3C6D, 0x297A2D39), 0x2545F4914F6CDD1D
"""Constants of a 32-bit hash, which multiplies, adds and folds 64 bits to 32, twice.

Folding is the XOR of the upper and the lower half. Factors below 2^30 and a sum below 2^62 avoid
overflow of int64. Source: Makarov, MUM hash (2016).
"""

BITS = 2**32 - 1

CURVE = (28961, -17510, 9727, -2959)
"""Coefficients, in units, of a polynomial that approximates `(log2(1 + t) - t) / (t (1 - t))`.

`t` is in [0, 1). The noise is exact up to four units.
"""

STEP = 2**11
"""Thresholds of candidates are multiples of this: 1/32 of an octave, a histogram bin."""

CENTERS = 128
"""Number of blocks whose centers are used to compute `totals`."""

LARGEST = 2.0**29
"""Bound of a candidate's size, in units."""

LEAST = -(2**31)
"""Priority of padding, and threshold if all keys are candidates."""


def hashed(numbers: Tensor) -> Tensor:
    """Hash the lower 32 bits of numbers.

    Args:
        numbers: Int64, any shape.

    Returns:
        32 pseudorandom bits, int64 of the same shape.
    """
    found = numbers & BITS
    for factor in FACTORS:
        found = found * factor + ADDED
        found = found >> 32 ^ found & BITS
    return found


def noise(ids: Tensor, seeds: Tensor) -> Tensor:
    """Return the noise of keys, `-log2 u` in units of `2^-16`.

    Args:
        ids: Token ids, int64.
        seeds: Int64, broadcast with the ids.

    Returns:
        Int64.
    """
    return noise_of(ids * SPREAD + hashed(seeds))


def noise_of(numbers: Tensor) -> Tensor:
    """Hash numbers, and return their noise, `-log2 u` in units of `2^-16`.

    `u` is an odd multiple of `2^-32`. All arithmetic is in integers, so the result is the same on
    every device.

    Args:
        numbers: Int64, any shape.

    Returns:
        Int64, of the same shape.
    """
    bits = hashed(numbers) | 1
    octave = torch.frexp(bits.double()).exponent.long() - 1  # exact: below 2^53
    t = (bits << 31 - octave) - 2**31 >> 15
    curve = torch.zeros_like(t)
    for coefficient in reversed(CURVE):
        curve = coefficient + (curve * t >> 16)
    return (32 - octave) * UNIT - t - ((t * (UNIT - t) >> 16) * curve >> 16)


def seeds(signs: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Compute the seeds of the noise from each sequence's first key and length.

    Heads and layers have different first keys, so they sample different rows. Searches use the same
    random numbers until tokens are appended.

    Args:
        signs: Signs of the first valid key, uint8 `[B, G, M]`.
        counts: Number of valid keys, integers `[B]`.
        seed: Seed of the configuration.

    Returns:
        Int64 `[B, G, 1]`.
    """
    places = 256 * torch.arange(signs.shape[-1], device=signs.device)
    key = hashed(signs.long() + places).sum(-1, keepdim=True)
    return (key + hashed(counts.long())[:, None, None] + seed * SPREAD) & BITS


# Sampling candidates, with integers


def gains(units: Tensor, scale: float) -> Tensor:
    """Convert the inner product that a vote represents to units of priorities.

    A softcap is ignored here, because sizes may be inaccurate.

    Args:
        units: Inner product `q·k` per vote, float64 `[B, G, g]`.
        scale: Factor of the logits.

    Returns:
        Float32 `[B, G, g]`.
    """
    return (units * (scale * UNIT / math.log(2))).float()


def sampled_blocks(blocks: int) -> Tensor:
    """Return up to `CENTERS` block numbers, evenly spread.

    Args:
        blocks: Number of blocks.

    Returns:
        Int64, on the CPU.
    """
    count = min(blocks, CENTERS)
    return blocks * torch.arange(count) // max(count, 1)


def totals(products: Tensor, scale: float) -> Tensor:
    """Compute the number to add to a head's sizes so that the heads of a group become comparable.

    Sizes are unnormalized logits, and this number normalizes them: it is minus the logarithm, in
    units of priorities, of the sum of exponentials over block centers. That sum approximates the
    softmax sum over all keys, up to a factor that is nearly the same for all heads.

    Args:
        products: `⟨q, μ⟩` for the centers of `sampled_blocks`, float32 `[B, G, g, n]`.
        scale: Factor of the logits.

    Returns:
        Float32 `[B, G, g]`; 0 where there are no centers.
    """
    if not products.shape[-1]:
        return products.new_zeros(products.shape[:-1])
    found = -torch.logsumexp(products * scale, dim=-1) * (UNIT / math.log(2))
    return torch.where(found.abs() < LONGEST, found, 0.0)


def priorities(votes: Tensor, gains: Tensor, totals: Tensor, noises: Tensor) -> Tensor:
    """Compute the priorities of keys: the largest size over the heads of a group, plus noise.

    Args:
        votes: Int32 `[B, G, g, N]`.
        gains: Result of `gains`.
        totals: Result of `totals`.
        noises: Noise of the keys, broadcast with the result.

    Returns:
        Int32 `[B, G, N]`.
    """
    return (sizes(votes, gains, totals) + noises).int()


def sizes(votes: Tensor, gains: Tensor, totals: Tensor) -> Tensor:
    """Compute the sizes of keys: the logarithm of the largest attention weight over the heads.

    A product and a sum are rounded to float32 once, as a fused multiply-add does.

    Args:
        votes: Int32 `[B, G, g, N]`.
        gains: Result of `gains`.
        totals: Result of `totals`.

    Returns:
        Int64 `[B, G, N]`.
    """
    each = votes.float().double() * gains[..., None].double() + totals[..., None].double()
    return each.float().amax(2).clamp(-LARGEST, LARGEST).round().long()


def thresholds(priorities: Tensor, limits: Tensor) -> Tensor:
    """Compute the lowest priority of a candidate, so that there are about `limits` candidates.

    If there are no more than `limits` keys, all are candidates. Otherwise the threshold `τ` is the
    (limit+1)-th largest priority, rounded down to a multiple of `STEP`. A candidate has a priority
    of at least `τ`, or at least `τ + STEP` if exactly `limit` keys reach that.

    Equivalently, a key is a candidate if it reaches a threshold that depends on the other keys
    alone. For a candidate this threshold is `τ`, so `τ` determines its probability.

    Args:
        priorities: Integers `[B, G, N]`.
        limits: Int64 `[B]`.

    Returns:
        `τ` and the lowest priority of a candidate, int64 `[B, G, 2]`.
    """
    most = min(int(limits.max()) + 1, priorities.shape[-1])
    best = priorities.long().topk(most, dim=-1).values
    at = limits.to(best.device)[:, None, None].expand(-1, best.shape[1], 1)
    last, beyond = (best.gather(-1, (at - less).clamp(0, most - 1)) for less in (1, 0))
    least = beyond // STEP * STEP
    found = torch.cat([least, torch.where(last < least + STEP, least, least + STEP)], dim=-1)
    few = (priorities != LEAST).sum(-1, keepdim=True) <= at
    every = torch.tensor([LEAST, LEAST + 1], device=found.device)
    return torch.where(few, every, found)


def log_chances(sizes: Tensor, thresholds: Tensor) -> Tensor:
    """Compute `log π` of candidates.

    Args:
        sizes: Int64.
        thresholds: `τ`, int64, broadcast with the sizes.

    Returns:
        Float32.
    """
    return (sizes - thresholds).clamp_max(0).float() * NATS


# Sampling rows, with floats


def sample(sizes: Tensor, noises: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample up to `k` rows.

    If there are no more than `k` rows, all are chosen with probability 1.

    Args:
        sizes: Logarithms of sizes, float32 `[..., N]`, `-inf` where there is no row.
        noises: Noise of the rows, float32 `[..., N]`.
        k: Number of rows.

    Returns:
        Priorities float32 `[..., k]`, descending, positions int64 `[..., k]`, and `log π` float32
        `[..., k]`. Unused places have `-inf`, -1 and `-inf`.
    """
    priorities, positions = top_k(sizes + noises, k + 1)
    last, positions = priorities[..., k:], positions[..., :k]
    chances = (sizes.gather(-1, positions.clamp_min(0)) - last).clamp_max(0)
    return priorities[..., :k], positions, chances.masked_fill(positions < 0, -math.inf)


def temper(k: int) -> float:
    """Return the power of `1 / π` with which `k` rows are weighted for a lower error and some bias.

    With few rows, one row with a large weight `1 / π` causes a larger error of the softmax than a
    smaller weight, which leaves out part of the sum. A sum over `n` rows is too small by a fraction
    of at most `1 - ((k - 1/2) / n)^(1 / √k)` on average. The bias is largest if all rows are alike
    (docs/pipeline/rerank.md#bias-of-tempered-weights). The power was chosen by measurements on a
    model's keys (docs/decisions/0026).

    Args:
        k: Number of rows.
    """
    return 1 - 1 / math.sqrt(k)


def root_mean_square(log_weights: Tensor) -> Tensor:
    """Compute the size of rows for a group of heads: the root mean square of the heads' weights.

    Sampling in proportion to it minimizes the summed variance of the heads. The variance of one
    head is the sum of `p² / π` over rows (Horvitz and Thompson, 1952).

    Args:
        log_weights: Logarithms of attention weights, `[B, G, g, C]`.

    Returns:
        Logarithms of sizes, `[B, G, C]`.
    """
    heads = log_weights.shape[2]
    return ((2 * log_weights).logsumexp(2) - math.log(heads)) / 2
