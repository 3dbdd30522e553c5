"""Sample candidates with integer arithmetic, as `ops.priority` does.

The kernels compute the gains and totals that convert votes to sizes, thresholds, and candidates.
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
"""Units by which the upper bound of noise may exceed it, except for large noise."""


@kernel
def total_of(logits: np.ndarray) -> Number:
    """Compiled version of `priority.totals` for a head's logits float32 `[n]`."""
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
    """Compute the gains and totals of `ops.priority`, float32 `[B·G, g, 2]`.

    Args:
        queries: Float32 `[B·G, g, D]`.
        units: As for `scan.scan`.
        centers: As for `scan.scan`.
        length: As for `scan.scan`.
        full: As for `scan.scan`.
        block: As for `scan.scan`.
        scale: Factor of the logits.
        products: Result: inner products with the centers of the blocks that totals use
            (`scan.is_sampled`).
        out: Result.
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
    """List the positions (ascending) and the priorities of keys whose priority is at least `least`.

    Args:
        bounds: Upper bounds of priorities, int32 `[N]`.
        seed: Seed of the noise.
        least: Lowest priority.
        listed: Result, positions, int32, as long as for `list_from`.
        out: Result, priorities, int32, as long as `listed`.

    Returns:
        Number of keys.
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
    """Compiled version of `priority.thresholds` for int32 priorities of more keys than `limit`."""
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
    """Sample about `limit` candidates by priority.

    Args:
        bounds: Upper bounds of priorities, int32 `[N]`, `INVALID` for padding.
        limit: Number of candidates.
        seed: Seed of the noise, uint32.
        listed: Buffer, int32 `[N + 2 · SAMPLED]`.
        room: Buffer, int32 `[N + 2 · SAMPLED]`.

    Returns:
        Ids int32 `[C]`, ascending, their noise and `log π`, float32 `[C]`.
    """
    more, count = 0, 0
    while True:
        sampled = np.int64(sampled_threshold(bounds, limit + 1, more, room))
        whole = (sampled - (SLACK << more)) // STEP * STEP  # a threshold is not below it
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
