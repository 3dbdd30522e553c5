"""Sample the rows to attend to from the candidates, at random and with float32 arithmetic.

The method is priority sampling, as in `ops.priority`.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.groups import log_sum
from kvindex.cpu.kernels.numbers import exp, log
from kvindex.cpu.kernels.priority import candidates
from kvindex.cpu.kernels.rerank import NEVER, cap, estimate
from kvindex.cpu.kernels.select import (
    entry_of,
    order_of,
    position_of,
    put_chosen,
    put_in_order,
    score_of,
    threshold_for,
)

HALF, TWO, ONE = np.float32(0.5), np.float32(2), np.float32(1)
MOST = np.float32(80)  # no term of a sum becomes infinite; equals -pariskv.row_budget.FAINT
LAST_ORDER = np.iinfo(np.int32).max


@kernel
def put_sizes(
    estimates: np.ndarray,
    chances: np.ndarray,
    resident: np.ndarray,
    scale: float,
    softcap: float,
    out: np.ndarray,
) -> None:
    """Compute a sampling weight for each candidate, called its size in code.

    Rows are sampled with probabilities that are proportional to this weight. It is the root mean
    square of the attention weights that are estimated for the query heads of the group
    (`ops.priority.root_mean_square`).

    Args:
        estimates: Estimates of inner products, float32 `[g, C]`. Overwritten by the logarithms of
            the attention weights.
        chances: Logarithms of the probabilities with which the candidates were sampled, float32
            `[C]`.
        resident: Log-sum-exp of the logits of tokens outside the index, float32 `[g]`; `-inf` if
            there are none.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        out: Result, logarithms of the sampling weights, float32 `[C]`.
    """
    (g, C), once = estimates.shape, np.empty(0, np.int64)
    room = np.empty(C, np.float32)
    out[:] = NEVER
    for h in range(g):
        one = estimates[h]
        cap(one, scale, softcap)
        for c in range(C):
            room[c] = one[c] - chances[c]
        total = added(log_sum(room, once), resident[h])
        for c in range(C):
            one[c] -= total
            out[c] = max(out[c], one[c])
    if g == 1:
        return
    room[:] = 0
    for h in range(g):
        one = estimates[h]
        for c in range(C):
            room[c] += exp(TWO * (one[c] - out[c]))
    inverse = np.float32(1 / g)
    for c in range(C):
        out[c] += log(room[c] * inverse) * HALF


@kernel
def added(one: Number, other: Number) -> Number:
    """Return the logarithm of the sum of two numbers whose logarithms are given, float32."""
    if other == NEVER:
        return one
    high, low = max(one, other), min(one, other)
    return np.float32(high + math.log1p(math.exp(low - high)))


@kernel
def rows_within(
    weights: np.ndarray,
    sizes: np.ndarray,
    noises: np.ndarray,
    chances: np.ndarray,
    counts: np.ndarray,
    limit: Number,
) -> Number:
    """Return the smallest number of rows whose attention weights have a variance within a limit.

    This is the compiled version of `row_budget.variances` and `row_budget.choose`.

    Args:
        weights: Logarithms of the candidates' attention weights, float32 `[g, C]`.
        sizes: Logarithms of the candidates' sampling weights, float32 `[C]`.
        noises: Random noise of the candidates, float32 `[C]`.
        chances: Logarithms of the probabilities with which the candidates were sampled, float32
            `[C]`.
        counts: Numbers of rows to choose from, ascending, int64 `[n]`.
        limit: Largest allowed variance.
    """
    g, C = weights.shape
    if len(counts) == 1:
        return counts[0]
    orders, terms, least = np.empty(C, np.int32), np.zeros(C, np.float32), np.empty(C, np.float32)
    for c in range(C):
        orders[c] = order_of(sizes[c] + noises[c])
    for h in range(g):
        for c in range(C):
            terms[c] += exp(TWO * weights[h, c])
    for c in range(C):
        least[c] = exp(min(-chances[c], MOST))
        terms[c] *= least[c]
    for i in range(len(counts) - 1):
        last = NEVER
        if counts[i] < C:
            threshold, lowest = threshold_for(orders, counts[i] + 1), LAST_ORDER
            for c in range(C):
                lowest = min(lowest, orders[c] if orders[c] >= threshold else LAST_ORDER)
            last = score_of(np.int64(lowest) << np.int64(32))
        total = np.float32(0)
        for c in range(C):
            inverse = max(exp(min(last - sizes[c], MOST)), least[c])
            total += terms[c] * (inverse - ONE)
        if total <= limit:
            return counts[i]
    return counts[-1]


@kernel
def sample(
    sizes: np.ndarray,
    noises: np.ndarray,
    chances: np.ndarray,
    ids: np.ndarray,
    k: int,
    power: float,
    to: np.ndarray,
    scores: np.ndarray,
    log_weight: np.ndarray,
) -> int:
    """Sample up to `k` of `C` candidates: those with the largest priorities.

    The priority of a candidate is the logarithm of its sampling weight plus random noise. This is
    the compiled version of `ops.priority.sample`.

    Args:
        sizes: Logarithms of the candidates' sampling weights (`put_sizes`), float32 `[C]`.
        noises: Random noise of the candidates, float32 `[C]`.
        chances: Logarithms of the probabilities with which the candidates were sampled, float32
            `[C]`.
        ids: Token ids of the candidates, ascending, int32 `[C]`.
        k: Number of rows to sample, at most the length of `to`.
        power: Exponent for log weights: a row sampled with probability `π` has the weight
            `(1 / π)^power`.
        to: Result, token ids of the rows, best first, padded with -1, int64 `[K]`.
        scores: Result, priorities of the rows, float32 `[K]`.
        log_weight: Result, log weights of the rows for each query head, float32 `[g, K]`.

    Returns:
        Number of sampled rows.
    """
    C = len(sizes)
    count, sampled = min(k + 1, C), min(k, C)
    orders, places = np.empty(C, np.int32), np.empty(count + 1, np.int32)
    entries = np.empty((2, count), np.int64)
    for c in range(C):
        orders[c] = order_of(sizes[c] + noises[c])
    if count:
        put_chosen(orders, count, places)
    for i in range(count):
        entries[0, i] = entry_of(orders[places[i]], places[i])
    put_in_order(entries[0], entries[1])
    last = score_of(entries[1, k]) if k < C else NEVER
    to[sampled:], scores[sampled:] = -1, NEVER
    for i in range(sampled):
        c = position_of(entries[1, i])
        to[i], scores[i] = ids[c], score_of(entries[1, i])
        above = min(sizes[c] - last, chances[c])
        log_weight[0, i] = max(-above, np.float32(0)) * np.float32(power)
    for h in range(len(log_weight)):
        for i in range(len(to)):
            log_weight[h, i] = log_weight[0, i] if i < sampled else NEVER
    return sampled


@kernel
def sample_rows(
    part: int,
    parts: int,
    bounds: np.ndarray,
    limits: np.ndarray,
    seeds: np.ndarray,
    length: int,
    full: int,
    block: int,
    signs: np.ndarray,
    magnitudes: np.ndarray,
    weights: np.ndarray,
    fractions: np.ndarray,
    bits: int,
    queries: np.ndarray,
    products: np.ndarray,
    levels: np.ndarray,
    fine: np.ndarray,
    scale: float,
    softcap: float,
    tempered: bool,
    counts: np.ndarray,
    resident: np.ndarray,
    variances: np.ndarray,
    listed: np.ndarray,
    room: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    found: np.ndarray,
    log_weight: np.ndarray,
) -> None:
    """Sample candidates from all keys, and then rows from the candidates.

    A group is one KV head of one sequence. Each thread processes some of the groups. The function
    `step.find_rows` documents the arguments that are not listed here. The number of candidates is
    known only after sampling, so this function allocates the arrays with one entry per candidate.

    Args:
        bounds: Upper bounds of the keys' priorities (estimated log weights plus noise), int32
            `[B·G, N]`.
        seeds: Seeds of the noise, uint32 `[B·G]`.
        tempered: True if a row that was sampled with probability `π` gets the weight
            `(1 / π)^(1 - 1 / sqrt(k))`, and False for `1 / π`.
        counts: Numbers of rows to choose from, ascending, int64 `[n]`. The last one is `k`.
        resident: Log-sum-exp of the logits of tokens outside the index, float32 `[B·G, g]`; `-inf`
            if there are none.
        variances: Largest allowed variance of the attention weights, float32 `[B·G]`. Ignored if
            there is only one number of rows.
        listed: Buffer, int32 `[parts, N + 2 · SAMPLED]`.
        room: Buffer, int32 `[parts, N + 2 · SAMPLED]`.
        log_weight: Result, log weights of the rows, float32 `[B·G, g, k]`.
    """
    groups, heads = len(ids), queries.shape[1]
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        some, seed = bounds[group, :length], seeds[group]
        own, noises, chances = candidates(some, limits[group], seed, listed[part], room[part])
        estimates, sizes = np.empty((heads, len(own)), np.float32), np.empty(len(own), np.float32)
        estimate(
            own,
            signs[:, group],
            magnitudes[:, group],
            weights[:, group],
            fractions[:, group],
            bits,
            full,
            block,
            queries[group],
            products[group],
            levels,
            fine,
            estimates,
        )
        put_sizes(estimates, chances, resident[group], scale, softcap, sizes)
        k = rows_within(estimates, sizes, noises, chances, counts, variances[group])
        power = 1 - 1 / math.sqrt(k) if tempered else 1.0
        to, priorities, out = ids[group], scores[group], log_weight[group]
        found[group] = sample(sizes, noises, chances, own, k, power, to, priorities, out)
