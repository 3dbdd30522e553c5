"""Sample candidates at random: the keys with the largest priorities (`ops.priority`).

The priority of a key is the sum of two terms: the estimated logarithm of its attention weight,
called size in code, and random noise. The kernels here compute the numbers that convert coarse
scores of keys (votes) to sizes, find the threshold that priorities must reach, and list the
candidates. They use the same integer arithmetic as `ops.priority`.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.groups import log_sum
from kvindex.cpu.kernels.noise import NATS, bound_of, noise_of, number_of
from kvindex.cpu.kernels.scan import CENTERS, multiply_center
from kvindex.cpu.kernels.select import count_from, list_from, sampled_threshold
from kvindex.cpu.kernels.sign_votes import INVALID
from kvindex.cpu.kernels.vectors import FOUR
from kvindex.ops import priority
from kvindex.ops.transform import LONGEST

STEP = priority.STEP
LEAST = np.int64(priority.LEAST)
OF_NATS = priority.UNIT / math.log(2)

SLACK = 5700
"""Largest difference between the upper bound of a key's noise and the noise, except for large
noise."""


@kernel
def total_of(logits: np.ndarray) -> Number:
    """Return the number that converts logits of a query head to logarithms of attention weights.

    A search adds this number to the head's estimated logits, to make the estimates of different
    query heads comparable. `logits`, float32 `[n]`, are the head's logits for centers of blocks
    (mean keys). The number is minus their log-sum-exp. This is the compiled version of
    `ops.priority.totals`.
    """
    found = np.float32(log_sum(logits, np.empty(0, np.int64)) * np.float32(-OF_NATS))
    return found if abs(found) < LONGEST else np.float32(0)


@kernel
def put_scales(
    queries: np.ndarray,
    units: np.ndarray,
    centers: np.ndarray,
    length: int,
    full: int,
    block: int,
    scale: float,
    products: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute two numbers for each query head, called gain and total.

    They convert the vote (coarse score) of a key to an estimate of the logarithm of its attention
    weight: `vote * gain + total` (`ops.priority`).

    Args:
        queries: Float32 `[B·G, g, D]`.
        units: Inner product that corresponds to a vote of 1, float64 `[B·G, g]`.
        centers: Addresses of centers, int64 `[2, B·G]`: `[0]` for the full blocks, and `[1]` for
            the last, partly filled block.
        length: Number of keys.
        full: Number of keys in full blocks; later keys are in the last, partly filled block.
        block: Number of tokens in a block.
        scale: Factor of the logits.
        products: Result, inner products with block centers, float32 `[B·G, S, g]`. Only those of
            the blocks that `scan.is_sampled` selects are computed. They determine the totals.
        out: Result, gains and totals, float32 `[B·G, g, 2]`.
    """
    (groups, g, D), blocks = queries.shape, -(-length // block)
    count = min(blocks, CENTERS)
    center, places = np.empty(D + FOUR, np.float32), np.empty(FOUR, np.int64)
    logits = np.empty((g, count), np.float32)
    for group in range(groups):
        full_ones, opened = centers[0, group], centers[1, group]
        for h in range(g):
            out[group, h, 0] = np.float32(units[group, h] * (scale * OF_NATS))
            out[group, h, 1] = 0
        if not full_ones and not opened:
            continue
        for j in range(count):
            s = blocks * j // count
            at = opened if s * block >= full else full_ones + s * D * 2
            asked = queries.ctypes.data + group * g * D * 4
            multiply_center(at, asked, g, D, center, places, products[group, s])
            for h in range(g):
                logits[h, j] = products[group, s, h] * np.float32(scale)
        for h in range(g):
            out[group, h, 1] = total_of(logits[h])


@kernel
def list_priorities(
    bounds: np.ndarray, seed: Number, least: int, listed: np.ndarray, out: np.ndarray
) -> int:
    """List the keys whose priority (estimated log weight plus noise) is at least `least`.

    Args:
        bounds: Upper bounds of the keys' priorities, int32 `[N]`.
        seed: Seed of the noise.
        least: Lowest priority of a listed key.
        listed: Result, positions of the keys, ascending, int32, as long as `list_from` requires.
        out: Result, priorities of the keys, int32, as long as `listed`.

    Returns:
        Number of listed keys.
    """
    count, found = list_from(bounds, least, listed), 0
    for i in range(count):
        out[i] = bounds[listed[i]]
    for i in range(count):  # a loop of its own, so that LLVM vectorizes it
        number = number_of(listed[i], seed)
        out[i] += np.int32(noise_of(number) - bound_of(number))
    for i in range(count):
        own = out[i]
        listed[found], out[found] = listed[i], own
        found += int(own >= least)
    return found


@kernel
def cut_for(priorities: np.ndarray, limit: int) -> tuple[Number, Number]:
    """Choose the lowest priority of a candidate, so that about `limit` keys become candidates.

    `priorities` contains the priority of each key, and must have more than `limit` entries. This
    is the compiled version of `ops.priority.thresholds`.

    Returns:
        The threshold `τ`, and the lowest priority of a candidate. If exactly `limit` priorities
        reach `τ + STEP`, the lowest priority is `τ + STEP`. Otherwise, it is `τ`.
    """
    low = high = np.int64(priorities[0])
    for i in range(len(priorities)):
        low, high = min(low, np.int64(priorities[i])), max(high, np.int64(priorities[i]))
    low, high = low // STEP, high // STEP
    while low < high:
        middle = low + (high - low + 1) // 2
        if count_from(priorities, middle * STEP) > limit:
            low = middle
        else:
            high = middle - 1
    least = low * STEP
    if count_from(priorities, least + STEP) == limit:
        return least, least + STEP
    return least, least


@kernel
def candidates(
    bounds: np.ndarray, limit: int, seed: Number, listed: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample about `limit` candidates for one KV head of one sequence, by their priorities.

    Args:
        bounds: Upper bounds of the keys' priorities, int32 `[N]`, `INVALID` for padding.
        limit: Number of candidates.
        seed: Seed of the noise, uint32.
        listed: Buffer, int32 `[N + 2 · SAMPLED]`.
        room: Buffer, int32 `[N + 2 · SAMPLED]`.

    Returns:
        Token ids of the candidates, ascending, int32 `[C]`; their noise, float32 `[C]`; and the
        logarithms of the probabilities with which they were sampled, float32 `[C]`.
    """
    more, count = 0, 0
    while True:
        sampled = np.int64(sampled_threshold(bounds, limit + 1, more, room))
        whole = (sampled - (SLACK << more)) // STEP * STEP  # lower bound of the exact threshold
        lowest = max(whole, np.int64(INVALID) + 1)
        count = list_priorities(bounds, seed, lowest, listed, room)
        if count > limit or lowest == INVALID + 1:
            break
        more += 1
    threshold, least = LEAST, LEAST + 1
    if count > limit:
        threshold, least = cut_for(room[:count], limit)
    C = 0
    for i in range(count):
        own = room[i]
        listed[C], room[C] = listed[i], own
        C += int(own >= least)
    noises, chances = np.empty(C, np.float32), np.empty(C, np.float32)
    for c in range(C):
        noise = noise_of(number_of(listed[c], seed))
        below = np.int64(room[c]) - np.int64(noise) - threshold
        noises[c] = np.float32(noise) * NATS
        chances[c] = np.float32(min(below, np.int64(0))) * NATS
    return listed[:C], noises, chances
