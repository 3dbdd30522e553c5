"""Draw rows among drawn candidates, of one group after the other: `ops.priority`, by floats."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel
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
)

HALF, TWO = np.float32(0.5), np.float32(2)


@kernel
def put_sizes(
    estimates: np.ndarray,
    chances: np.ndarray,
    scale: float,
    softcap: float,
    room: np.ndarray,
    out: np.ndarray,
) -> None:
    """Sizes of rows, float32 `[C]`: `priority.root_mean_square` of the shares of heads.

    estimates: float32 `[g, C]`, which it overwrites; chances: `log π` of candidates, float32
    `[C]`; room: float32 `[C]`.
    """
    (g, C), once = estimates.shape, np.empty(0, np.int64)
    out[:] = NEVER
    for h in range(g):
        one = estimates[h]
        cap(one, scale, softcap)
        for c in range(C):
            room[c] = one[c] - chances[c]
        total = log_sum(room, once)
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
def draw(
    sizes: np.ndarray,
    noises: np.ndarray,
    chances: np.ndarray,
    ids: np.ndarray,
    power: float,
    orders: np.ndarray,
    places: np.ndarray,
    entries: np.ndarray,
    to: np.ndarray,
    scores: np.ndarray,
    log_weight: np.ndarray,
) -> int:
    """As `priority.draw` among rows of ids int32 `[C]`, ascending; gives how many of `k` there are.

    sizes, noises: float32 `[C]`; chances: that rows are candidates, `log π` float32 `[C]`; power:
    of `1 / π`, a row's weight. Room: orders int32 `[C]`, places int32 `[k + 2]`, entries int64
    `[2, k + 1]`. Writes ids int64 `to[k]`, best first, then -1, scores float32 `[k]`, and
    log_weight float32 `[g, k]`.
    """
    C, k = len(sizes), len(to)
    count, drawn = min(k + 1, C), min(k, C)
    for c in range(C):
        orders[c] = order_of(sizes[c] + noises[c])
    if count:
        put_chosen(orders[:C], count, places)
    for i in range(count):
        entries[0, i] = entry_of(orders[places[i]], places[i])
    put_in_order(entries[0, :count], entries[1])
    last = score_of(entries[1, k]) if k < C else NEVER
    to[drawn:], scores[drawn:] = -1, NEVER
    for i in range(drawn):
        c = position_of(entries[1, i])
        to[i], scores[i] = ids[c], score_of(entries[1, i])
        above = min(sizes[c] - last, chances[c])
        log_weight[0, i] = max(-above, np.float32(0)) * np.float32(power)
    for h in range(len(log_weight)):
        for i in range(k):
            log_weight[h, i] = log_weight[0, i] if i < drawn else NEVER
    return drawn


@kernel
def draw_rows(
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
    power: float,
    chosen: np.ndarray,
    estimates: np.ndarray,
    shares: np.ndarray,
    sizes: np.ndarray,
    noises: np.ndarray,
    chances: np.ndarray,
    listed: np.ndarray,
    room: np.ndarray,
    places: np.ndarray,
    entries: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    found: np.ndarray,
    log_weight: np.ndarray,
) -> None:
    """Up to `k` rows of a part of the groups, drawn: as `step.find_rows`, but for what follows.

    bounds: of priorities, int32 `[B·G, N]`; seeds: of noise, uint32 `[B·G]`; power: of weights.
    Room: chosen int32
    `[parts, N]`, estimates float32 `[parts, g, N]`, shares, sizes, noises and chances float32
    `[parts, N]`, places int32 `[parts, k + 2]`, entries int64 `[parts, 2, k + 1]`. Writes
    log_weight float32 `[B·G, g, k]`, too.
    """
    groups = len(ids)
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        C = candidates(
            bounds[group, :length],
            limits[group],
            seeds[group],
            listed[part],
            room[part],
            chosen[part],
            noises[part],
            chances[part],
        )
        own, some = chosen[part, :C], estimates[part, :, :C]
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
            some,
        )
        by, one = chances[part, :C], sizes[part, :C]
        put_sizes(some, by, scale, softcap, shares[part, :C], one)
        found[group] = draw(
            one,
            noises[part, :C],
            by,
            own,
            power,
            room[part],
            places[part],
            entries[part],
            ids[group],
            scores[group],
            log_weight[group],
        )
