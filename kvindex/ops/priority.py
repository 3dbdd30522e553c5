"""Priority sampling: the rows of the `k` largest `size / u`, each with a known chance.

Duffield, Lund and Thorup, Priority Sampling for Estimation of Arbitrary Subset Sums (2007). Every
key has a number `u` in (0, 1) of its own. A row is drawn if its priority `size / u` is above the
threshold `τ`, which is the (k+1)-th largest: given the other keys' numbers that has the chance
`π = min(1, size / τ)`, and sums weighted with `1 / π` are right on average. A draw among drawn
candidates by the same `u` is one draw: `u` is below both `size / τ`, so `π` is the smaller one.
Here are logarithms throughout: a priority is the size's logarithm and noise, `-log u`.
"""

from __future__ import annotations

import math

from torch import Tensor

from kvindex.ops.select import top_k

SPREAD = 0x9E3779B1
ROUNDS = ((16, 0x21F0AAAD), (15, 0xD35A2D97))
"""Shifts and factors of a hash of 32 bits (the prospector's best of two rounds, Wellons 2018)."""

BITS = 2**32 - 1


def hashed(numbers: Tensor) -> Tensor:
    """32 bits that look random, of the lower 32 bits of int64 numbers; int64 of the same shape."""
    found = numbers & BITS
    for shift, factor in ROUNDS:
        found = ((found ^ found >> shift) * factor) & BITS
    return found ^ found >> 15


def noise(ids: Tensor, seeds: Tensor) -> Tensor:
    """`-log u` of int64 ids, float32, by int64 seeds that broadcast with them."""
    bits = hashed(ids * SPREAD + hashed(seeds)).double()  # all 32 of them
    return -((bits + 0.5) / 2.0**32).log().float()


def draw(sizes: Tensor, noises: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Up to `k` rows: priorities float32 `[..., k]`, falling, positions int64, and `log π` float32.

    sizes: logarithms, float32 `[..., N]`, `-inf` for no row; noises: of `noise`, of that shape.
    Where fewer rows are left, slots hold `-inf`, -1, `-inf`; where no more than `k`, all are sure.
    """
    priorities, positions = top_k(sizes + noises, k + 1)
    threshold, positions = priorities[..., k:], positions[..., :k]
    log_chances = (sizes.gather(-1, positions.clamp_min(0)) - threshold).clamp_max(0)
    return priorities[..., :k], positions, log_chances.masked_fill(positions < 0, -math.inf)


def root_mean_square(log_shares: Tensor) -> Tensor:
    """The size of rows that a group's heads share, `[B, G, C]`, of shares `[B, G, g, C]`.

    Both are logarithms. In proportion to it the heads' summed variance is least: that of a head is
    the sum of `p² / π` over rows (Horvitz and Thompson, 1952).
    """
    heads = log_shares.shape[2]
    return ((2 * log_shares).logsumexp(2) - math.log(heads)) / 2
