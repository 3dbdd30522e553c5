"""Priority sampling: sample `k` rows, each with a known probability.

Each key has an estimated attention weight `w` (called its size in the code) and a random number `u`
in (0, 1). The priority of the key is `w / u`. The `k` keys with the largest priorities are sampled.
If `τ` is the (k+1)-th largest priority, a key is sampled with the probability `π = min(1, w / τ)`,
given the random numbers of the other keys. Sums in which sampled rows have the weight `1 / π` are
unbiased. Sums with a lower power of `1 / π` (`temper`) have a bias and a smaller error.

ParisKV first samples candidates, and then samples rows from the candidates. Both times it uses the
same `u` of a key. A row is sampled if `u` is below `w / τ` both times, so its `π` is the smaller of
the two values.

The code uses logarithms: the logarithm of a priority is the log weight plus random noise, `-log u`.
To sample candidates, it uses integers in units of `2^-16` to base 2, so that all backends sample
the same candidates. To sample rows, it uses float32 and natural logarithms.

Source: Duffield, Lund and Thorup, Priority Sampling for Estimation of Arbitrary Subset Sums (2007).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.ops.select import top_k
from kvindex.ops.transform import LONGEST

UNIT = 2**16
"""Integer logarithms are `UNIT` times the logarithm to base 2, so a factor of 2 adds `UNIT` to
them.
"""

NATS = math.log(2) / UNIT
"""Factor that converts integer logarithms, in units, to natural logarithms."""

SPREAD, FACTORS, ADDED = 0x9E3779B1, (0x2C1B3C6D, 0x297A2D39), 0x2545F4914F6CDD1D
"""Constants of a 32-bit hash function.

Twice, it multiplies a number by a factor, adds a constant, and combines the upper and the lower 32
bits by XOR. The factors are below 2^30 and the constant is below 2^62, so int64 does not overflow.
Source: Makarov, MUM hash (2016).
"""

BITS = 2**32 - 1

CURVE = (28961, -17510, 9727, -2959)
"""Coefficients of a polynomial that approximates `(log2(1 + t) - t) / (t (1 - t))` on [0, 1).

They are integers in units of `2^-16`. The error of the noise is at most four units.
"""

STEP = 2**11
"""Width of a histogram bin of priorities, in units of `1 / UNIT`: `log2` of a priority grows by
1/32. Thresholds are multiples of it.
"""

CENTERS = 128
"""Largest number of block centers from which `totals` are computed."""

LARGEST = 2.0**29
"""Bound of the logarithm of a key's estimated attention weight, in units of `1 / UNIT`."""

LEAST = -(2**31)
"""Priority of padding. It is also the threshold if all keys are candidates."""


def hashed(numbers: Tensor) -> Tensor:
    """Hash the lower 32 bits of integers.

    Args:
        numbers: Int64, any shape.

    Returns:
        Pseudorandom numbers of 32 bits, int64 of the same shape.
    """
    found = numbers & BITS
    for factor in FACTORS:
        found = found * factor + ADDED
        found = found >> 32 ^ found & BITS
    return found


def noise(ids: Tensor, seeds: Tensor) -> Tensor:
    """Return the random noise of each key, `-log2 u` in units of `2^-16`.

    `u` is a pseudorandom number in (0, 1), which depends on the id and the seed. The priority of a
    key is the logarithm of its estimated attention weight plus this noise.

    Args:
        ids: Token ids, int64.
        seeds: Result of `seeds`, int64, broadcast with the ids.

    Returns:
        Int64, of the broadcast shape.
    """
    return noise_of(ids * SPREAD + hashed(seeds))


def noise_of(numbers: Tensor) -> Tensor:
    """Hash integers to random numbers `u`, and return `-log2 u` in units of `2^-16`.

    `u` is an odd multiple of `2^-32`, in (0, 1). All arithmetic uses integers, so the result is the
    same on every device.

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
    """Compute seeds for `noise` from the first key and the length of each sequence.

    KV heads and layers have different first keys, and so they sample different rows. The seed of a
    sequence does not change until tokens are appended.

    Args:
        signs: Sign bits of the first valid key, uint8 `[B, G, M]`.
        counts: Number of valid keys, integers `[B]`.
        seed: Seed in the configuration of the index.

    Returns:
        Seeds, int64 `[B, G, 1]`.
    """
    places = 256 * torch.arange(signs.shape[-1], device=signs.device)
    key = hashed(signs.long() + places).sum(-1, keepdim=True)
    return (key + hashed(counts.long())[:, None, None] + seed * SPREAD) & BITS


# Sampling candidates, with integers


def gains(units: Tensor, scale: float) -> Tensor:
    """Return the factors that convert coarse scores (votes) to logarithms of attention weights.

    The logarithms are integers in units of `2^-16` to base 2. A softcap is ignored, because the
    attention weights that are used for sampling need not be accurate.

    Args:
        units: Increase of the inner product `q·k` if the coarse score increases by 1, float64
            `[B, G, g]`.
        scale: Factor of the logits.

    Returns:
        Increase of the logarithm if the coarse score increases by 1, float32 `[B, G, g]`.
    """
    return (units * (scale * UNIT / math.log(2))).float()


def sampled_blocks(blocks: int) -> Tensor:
    """Return at most `CENTERS` block numbers, evenly spaced.

    Args:
        blocks: Number of blocks in the index.

    Returns:
        Block numbers, int64, on the CPU.
    """
    count = min(blocks, CENTERS)
    return blocks * torch.arange(count) // max(count, 1)


def totals(products: Tensor, scale: float) -> Tensor:
    """For each query head, compute a number to add to logits, so that they become approximate
    logarithms of attention weights.

    The exact number would be minus the log-sum-exp of the logits of all keys. This function uses
    the log-sum-exp of the logits of the block centers instead. The error of this approximation is
    nearly the same for all query heads of a KV head, so the results for different heads can be
    compared.

    Args:
        products: Inner products of the queries with the centers of `sampled_blocks`, float32 `[B,
            G, g, n]`.
        scale: Factor of the logits.

    Returns:
        Minus the log-sum-exp, in units of `1 / UNIT` to base 2, float32 `[B, G, g]`; 0 without
        centers.
    """
    if not products.shape[-1]:
        return products.new_zeros(products.shape[:-1])
    found = -torch.logsumexp(products * scale, dim=-1) * (UNIT / math.log(2))
    return torch.where(found.abs() < LONGEST, found, 0.0)


def priorities(votes: Tensor, gains: Tensor, totals: Tensor, noises: Tensor) -> Tensor:
    """Compute the priority of each key: its log weight plus random noise.

    The log weight is the logarithm of the attention weight that `sizes` estimates.

    Args:
        votes: Scores from the coarse stage (votes), int32 `[B, G, g, N]`.
        gains: Factors that convert votes to logarithms of attention weights (`gains`).
        totals: Terms to add to these logarithms (`totals`).
        noises: Noise of each key (`noise`), broadcast to `[B, G, N]`.

    Returns:
        Priorities, `UNIT` times a base-2 logarithm, int32 `[B, G, N]`.
    """
    return (sizes(votes, gains, totals) + noises).int()


def sizes(votes: Tensor, gains: Tensor, totals: Tensor) -> Tensor:
    """Estimate the logarithm of each key's attention weight from its votes.

    The result for a key is its largest value over the query heads that share a KV head. For one
    query head, the value is `votes * gains + totals`. It is rounded to float32 only once, like the
    result of a fused multiply-add on a GPU.

    Args:
        votes: Scores from the coarse stage (votes), int32 `[B, G, g, N]`.
        gains: Factors that convert votes to logarithms of attention weights (`gains`).
        totals: Terms to add to these logarithms (`totals`).

    Returns:
        `UNIT` times the base-2 logarithms of the attention weights, int64 `[B, G, N]`.
    """
    each = votes.float().double() * gains[..., None].double() + totals[..., None].double()
    return each.float().amax(2).clamp(-LARGEST, LARGEST).round().long()


def thresholds(priorities: Tensor, limits: Tensor) -> Tensor:
    """Compute the lowest priority that a key needs to become a candidate.

    Each KV head of a sequence gets about `n` candidates, where `n` is the sequence's number in
    `limits`. If the sequence has at most `n` keys, all keys become candidates. Otherwise the
    threshold `τ` is the priority at rank `n + 1`, rounded down to a multiple of `STEP`. All keys
    with a priority of at least `τ` become candidates. There is one exception: if exactly `n` keys
    have a priority of at least `τ + STEP`, only these keys become candidates.

    The threshold for one candidate depends only on the other keys. So `τ` determines the
    probability with which the candidate is sampled (`log_chances`).

    Args:
        priorities: Result of `priorities`, `[B, G, N]`.
        limits: Number of candidates to sample, int64 `[B]`.

    Returns:
        `τ`, and the lowest priority of a candidate, int64 `[B, G, 2]`.
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
    """Compute the logarithm of the probability `π` with which each candidate is sampled.

    Args:
        sizes: Logarithms of the candidates' estimated attention weights, int64, from the function
            `sizes`.
        thresholds: Sampling thresholds `τ`, int64, from the function `thresholds`. Broadcast with
            `sizes`.

    Returns:
        `log π`, float32.
    """
    return (sizes - thresholds).clamp_max(0).float() * NATS


# Sampling rows, with floats


def sample(sizes: Tensor, noises: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample the `k` rows with the largest priorities: log weight plus random noise.

    If there are at most `k` rows, all rows are selected with probability 1.

    Args:
        sizes: Natural logarithms of the rows' sampling weights, float32 `[..., N]`, `-inf` where
            there is no row.
        noises: Random noise of each row, `-log u` for a `u` in (0, 1), float32 `[..., N]`.
        k: Number of rows.

    Returns:
        Three tensors `[..., k]`: priorities, float32, descending; positions of the rows, int64; and
        the logarithm of the probability with which each row is sampled, float32. Unused slots have
        `-inf`, -1 and `-inf`.
    """
    priorities, positions = top_k(sizes + noises, k + 1)
    last, positions = priorities[..., k:], positions[..., :k]
    chances = (sizes.gather(-1, positions.clamp_min(0)) - last).clamp_max(0)
    return priorities[..., :k], positions, chances.masked_fill(positions < 0, -math.inf)


def temper(k: int | Tensor) -> float | Tensor:
    """Return the exponent `a` that makes the weights of sampled rows smaller.

    A row that was sampled with probability `π` gets the weight `(1 / π)^a`. With `a = 1`, a sum
    over the weighted rows would be unbiased, but a single row with a large weight could cause a
    large error. The exponent is below 1. This reduces the error, but makes the sum too small on
    average. The bias is largest if all `n` rows of the index are equal: it is at most the fraction
    `1 - ((k - 1/2) / n)^(1 / √k)` of the sum (docs/pipeline/rerank.md#bias-of-tempered-weights).
    The exponent was chosen by measurements on the keys of a model (docs/decisions/0026).

    Args:
        k: Number of sampled rows, or an integer tensor with several numbers.
    """
    return 1 - k.float().rsqrt() if isinstance(k, Tensor) else 1 - 1 / math.sqrt(k)


def root_mean_square(log_weights: Tensor) -> Tensor:
    """Combine the attention weights of the query heads of a KV head into one sampling weight per
    row.

    The sampling weight is the root mean square over the query heads. Sampling with probabilities
    proportional to it minimizes the sum of the variances of the query heads. A head with attention
    weights `p` has the variance `Σ p² / π` for sampling probabilities `π` (Horvitz and Thompson,
    1952).

    Args:
        log_weights: Logarithms of the attention weights of each query head, `[B, G, g, C]`.

    Returns:
        Logarithms of the sampling weights, `[B, G, C]`.
    """
    heads = log_weights.shape[2]
    return ((2 * log_weights).logsumexp(2) - math.log(heads)) / 2
