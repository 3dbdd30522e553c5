"""Priority sampling: the rows of the `k` largest `size / u`, each with a known chance.

Duffield, Lund and Thorup, Priority Sampling for Estimation of Arbitrary Subset Sums (2007). Every
key has a number `u` in (0, 1) of its own. A row is drawn if its priority `size / u` is above the
threshold `τ`, which is the (k+1)-th largest: given the other keys' numbers that has the chance
`π = min(1, size / τ)`, and sums weighted with `1 / π` are right on average; those with a lower
power of it (`temper`) are not. A draw among drawn candidates by the same `u` is one draw: `u` is
below both `size / τ`, so `π` is the smaller one.
Here are logarithms throughout: a priority is the size's logarithm and noise, `-log u`.

Candidates are drawn by integers, whose unit is `2^-16` of an octave, so that all backends draw the
same; the rows among them by float32, in natural logarithms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.ops.select import top_k
from kvindex.ops.transform import LONGEST

UNIT = 2**16
"""Units of an octave."""

NATS = math.log(2) / UNIT
"""Natural logarithm of a unit."""

SPREAD, FACTORS, ADDED = 0x9E3779B1, (0x2C1B3C6D, 0x297A2D39), 0x2545F4914F6CDD1D
"""Of a hash of 32 bits: multiply, add, and fold the upper half of 64 bits onto the lower, twice
(Makarov's MUM, 2016). Factors below 2^30 and a sum below 2^62 keep within int64."""

BITS = 2**32 - 1

CURVE = (28961, -17510, 9727, -2959)
"""`(log2(1 + t) - t) / (t (1 - t))` as a polynomial of `t` in [0, 1), in units: noise is four
units off at most."""

STEP = 2**11
"""Thresholds of candidates are multiples of it (1/32 of an octave), a bin of their histogram."""

CENTERS = 128
"""Blocks whose centers tell `totals`."""

LARGEST = 2.0**29
"""Size of a candidate, of either sign, in units."""

LEAST = -(2**31)
"""Priority of no key, and the threshold of all keys."""


def hashed(numbers: Tensor) -> Tensor:
    """32 bits that look random, of the lower 32 bits of int64 numbers; int64 of the same shape."""
    found = numbers & BITS
    for factor in FACTORS:
        found = found * factor + ADDED
        found = found >> 32 ^ found & BITS
    return found


def noise(ids: Tensor, seeds: Tensor) -> Tensor:
    """`-log2 u` of int64 ids in units, int64, by int64 seeds that broadcast with them."""
    return noise_of(ids * SPREAD + hashed(seeds))


def noise_of(numbers: Tensor) -> Tensor:
    """`-log2 u` in units, int64, of what is hashed.

    `u` is an odd multiple of `2^-32`. All in integers: it is the same wherever it is computed.
    """
    bits = hashed(numbers) | 1
    octave = torch.frexp(bits.double()).exponent.long() - 1  # exact: below 2^53
    t = (bits << 31 - octave) - 2**31 >> 15
    curve = torch.zeros_like(t)
    for coefficient in reversed(CURVE):
        curve = coefficient + (curve * t >> 16)
    return (32 - octave) * UNIT - t - ((t * (UNIT - t) >> 16) * curve >> 16)


def seeds(signs: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Seeds int64 `[B, G, 1]` of noise: of a row's first key, its length, and a number.

    So heads and layers draw different rows, and a step draws again what the one before did until
    tokens come. signs: of the first valid key, uint8 `[B, G, M]`; counts: valid keys, int `[B]`.
    """
    places = 256 * torch.arange(signs.shape[-1], device=signs.device)
    key = hashed(signs.long() + places).sum(-1, keepdim=True)
    return (key + hashed(counts.long())[:, None, None] + seed * SPREAD) & BITS


# Candidates: by integers


def gains(units: Tensor, scale: float) -> Tensor:
    """Units of a vote, float32 `[B, G, g]`; units: `q·k` of a vote, float64, of the same shape.

    What a softcap would make of a vote is left out: a size need not be right.
    """
    return (units * (scale * UNIT / math.log(2))).float()


def sampled_blocks(blocks: int) -> Tensor:
    """Up to `CENTERS` of so many blocks, evenly spread, int64."""
    count = min(blocks, CENTERS)
    return blocks * torch.arange(count) // max(count, 1)


def totals(products: Tensor, scale: float) -> Tensor:
    """What brings heads of a group to one scale, the shares of their keys: float32 `[B, G, g]`.

    In units, minus the logarithm of a head's sum of exponentials over centers of blocks, which
    stands for that over all keys but for what is nearly the same for all heads. products: `⟨q, μ⟩`
    of `sampled_blocks`, float32 `[B, G, g, n]`; where there is none, 0.
    """
    if not products.shape[-1]:
        return products.new_zeros(products.shape[:-1])
    found = -torch.logsumexp(products * scale, dim=-1) * (UNIT / math.log(2))
    return torch.where(found.abs() < LONGEST, found, 0.0)


def priorities(votes: Tensor, gains: Tensor, totals: Tensor, noises: Tensor) -> Tensor:
    """Of keys, int32 `[B, G, N]`: the largest size that a head's vote stands for, and noise.

    votes: int32 `[B, G, g, N]`; noises: `noise` of the keys, broadcast with the result.
    """
    return (sizes(votes, gains, totals) + noises).int()


def sizes(votes: Tensor, gains: Tensor, totals: Tensor) -> Tensor:
    """Sizes of candidates, int64 `[B, G, N]`: the logarithm of the largest share of a head.

    A product and a sum are rounded to float32 once, as a fused instruction does.
    """
    each = votes.float().double() * gains[..., None].double() + totals[..., None].double()
    return each.float().amax(2).clamp(-LARGEST, LARGEST).round().long()


def thresholds(priorities: Tensor, limits: Tensor) -> Tensor:
    """Some `limit` keys are candidates, or all if there are no more: those from a priority on.

    Gives the threshold `τ`, the (limit+1)-th priority rounded down to a multiple of `STEP`, and
    the priority from which on keys are candidates: `τ`, or one `STEP` above where as many reach
    that; int64 `[B, G, 2]`. Whatever its own number, a key is one if it reaches what the others'
    say, which is `τ` if it does. priorities: integers `[B, G, N]`; limits: int64 `[B]`.
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
    """`log π` of candidates, float32: sizes int64, thresholds int64 that broadcast with them."""
    return (sizes - thresholds).clamp_max(0).float() * NATS


# Rows: by floats


def sample(sizes: Tensor, noises: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Up to `k` rows: priorities float32 `[..., k]`, falling, positions int64, and `log π` float32.

    sizes: logarithms, float32 `[..., N]`, `-inf` for no row; noises: float32, of that shape.
    Where fewer rows are left, slots hold `-inf`, -1, `-inf`; where no more than `k`, all are sure.
    """
    priorities, positions = top_k(sizes + noises, k + 1)
    last, positions = priorities[..., k:], positions[..., :k]
    chances = (sizes.gather(-1, positions.clamp_min(0)) - last).clamp_max(0)
    return priorities[..., :k], positions, chances.masked_fill(positions < 0, -math.inf)


def temper(k: int) -> float:
    """The power of `1 / π` that weighs `k` rows where a lower error is worth a bias.

    A sum of `n` rows then lacks up to `1 - ((k - 1/2) / n)^(1 / √k)` of itself on average, most of
    it where all are alike (docs/pipeline/rerank.md#bias-of-tempered-weights).
    A row that stands for many makes a softmax of few rows err more than leaving out a part of what
    it stands for does. Chosen on keys of a model (docs/decisions/0026).
    """
    return 1 - 1 / math.sqrt(k)


def root_mean_square(log_weights: Tensor) -> Tensor:
    """The size of rows that a group's heads share, `[B, G, C]`, of shares `[B, G, g, C]`.

    Both are logarithms. In proportion to it the heads' summed variance is least: that of a head is
    the sum of `p² / π` over rows (Horvitz and Thompson, 1952).
    """
    heads = log_weights.shape[2]
    return ((2 * log_weights).logsumexp(2) - math.log(heads)) / 2
