"""The stages of a decode step after the scan.

They select candidates, rerank them, combine the scores of a group's heads, select rows, and attend.
"""

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
    """Find the best `k` rows of a part of the groups, from the votes of all keys.

    Args:
        part: Index of the part that this call processes, below `parts`.
        parts: Number of parts into which the work is divided, one per thread.
        votes: Int32 `[B·G, N]`.
        limits: Number of candidates `C`, int64 `[B·G]`.
        length: Number of keys.
        full: As for `rerank.estimate`.
        block: As for `rerank.estimate`.
        signs: Addresses int64 `[2, B·G]`.
        magnitudes: Addresses int64 `[2, B·G]`.
        weights: Addresses int64 `[2, B·G]`.
        fractions: Addresses int64 `[2, B·G]`.
        bits: Bits of a magnitude.
        queries: Rotated queries, float32 `[B·G, g, D]`.
        products: Inner products with centers, float32 `[B·G, S, g]`.
        levels: As for `rerank.estimate`.
        fine: As for `rerank.estimate`.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        by_largest: True for "max_share", False for "mean_share".
        chosen: Buffer, int32 `[parts, most + 1]`.
        estimates: Buffer, float32 `[parts, g, most]`.
        sums: Buffer, float32 `[parts, most]`.
        agreed: Buffer, float32 `[parts, most]`.
        listed: Buffer, int32 `[parts, N + 2 · SAMPLED]`.
        room: Buffer, int32 `[parts, N + 2 · SAMPLED]`.
        places: Buffer, int32 `[parts, k + 1]`.
        entries: Buffer, int64 `[parts, 2, k]`.
        ids: Result, int64 `[B·G, k]`, best first, padded with -1.
        scores: Result, float32 `[B·G, k]`.
        found: Result, number of rows, int32 `[B·G]`.
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
    """Attend to rows with ids int64 `[B·G, K]` and to resident rows, for a part of the groups.

    Args:
        part: Index of the part that this call processes, below `parts`.
        parts: Number of parts into which the work is divided, one per thread.
        queries: Float32 `[B·G, g, D]`.
        ids: Int64 `[B·G, K]`.
        bases: Addresses of the store's rows, int64 `[B·G]`.
        row_bytes: Bytes of a row.
        weights: Log weights, float32 `[B·G, g, K]`; `[B·G, g, 0]` if all are zero.
        resident: Addresses of resident rows, int64 `[B·G]`.
        resident_bytes: Bytes of a resident row.
        mask: Addresses of the mask of resident rows, int64 `[B·G]`.
        count: Number of resident rows.
        kind: Dtype of the rows (`numbers.KINDS`).
        value_bytes: As for `attend`.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        addresses: Buffer, int64 `[parts, K + W]`.
        places: Buffer for each part, as for `attend`.
        keys: Buffer for each part, as for `attend`.
        values: Buffer for each part, as for `attend`.
        logits: Buffer for each part, as for `attend`.
        output: Result, float32 `[B·G, g, Dv]`.
        lse: Result, float32 `[B·G, g]`.
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
