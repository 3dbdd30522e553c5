"""The stages of a step after its scan, of one group after the other."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.attend import attend, put_resident
from kvindex.cpu.kernels.compile import kernel
from kvindex.cpu.kernels.rerank import agree, estimate
from kvindex.cpu.kernels.select import candidates, position_of, score_of, top_k


@kernel
def find_rows(
    part: int,
    parts: int,
    votes: np.ndarray,
    limits: np.ndarray,
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
    by_largest: bool,
    chosen: np.ndarray,
    estimates: np.ndarray,
    sums: np.ndarray,
    agreed: np.ndarray,
    listed: np.ndarray,
    room: np.ndarray,
    places: np.ndarray,
    entries: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    found: np.ndarray,
) -> None:
    """The best `k` rows of a part of the groups: `select`, `rerank`, `group`, `select`.

    limits: candidates `C`, int64 `[B·G]`. Room: chosen int32 `[parts, most + 1]`, estimates float32
    `[parts, g, most]`, shares and agreed float32 `[parts, most]`, listed and room int32
    `[parts, N + 2 · SAMPLED]`, places int32 `[parts, k + 1]`, entries int64 `[parts, 2, k]`.
    Writes ids int64 `[B·G, k]`, best first, then -1, scores float32 `[B·G, k]` and how many there
    are, found int32 `[B·G]`.
    """
    groups, k = ids.shape
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        C = limits[group]
        candidates(votes[group, :length], C, listed[part], room[part], chosen[part])
        own, some = chosen[part, :C], agreed[part, :C]
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
            estimates[part, :, :C],
        )
        agree(estimates[part, :, :C], scale, softcap, by_largest, sums[part, :C], some)
        count = min(k, C)
        at = entries[part, 1]
        top_k(some, own, count, room[part], places[part], entries[part, 0], at)
        found[group] = count
        for i in range(k):
            ids[group, i] = position_of(at[i]) if i < count else -1
            scores[group, i] = score_of(at[i]) if i < count else np.float32(-np.inf)


@kernel
def attend_groups(
    part: int,
    parts: int,
    queries: np.ndarray,
    ids: np.ndarray,
    bases: np.ndarray,
    row_bytes: int,
    weights: np.ndarray,
    resident: np.ndarray,
    resident_bytes: int,
    mask: np.ndarray,
    count: int,
    kind: int,
    value_bytes: int,
    scale: float,
    softcap: float,
    addresses: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    logits: np.ndarray,
    output: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Attention of a part of the groups over rows of ids int64 `[B·G, K]` and the resident ones.

    queries: float32 `[B·G, g, D]`; bases, resident, mask: addresses int64 `[B·G]` of the store's
    rows, the resident ones and their mask; weights: float32 `[B·G, g, K]` or of no rows;
    value_bytes: as of `attend`. addresses
    int64 `[parts, K + W]`, places, keys, values and logits as for `attend`, of each part: room.
    Writes output float32 `[B·G, g, Dv]` and lse float32 `[B·G, g]`.
    """
    groups, K = ids.shape
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        rows = addresses[part, : K + count]
        for i in range(K):
            rows[i] = bases[group] + ids[group, i] * row_bytes if ids[group, i] >= 0 else 0
        put_resident(resident[group], resident_bytes, mask[group], count, rows[K:])
        attend(
            queries[group],
            rows,
            row_bytes,
            weights[group],
            kind,
            value_bytes,
            scale,
            softcap,
            places[part],
            keys[part],
            values[part],
            logits[part],
            output[group],
            lse[group],
        )
