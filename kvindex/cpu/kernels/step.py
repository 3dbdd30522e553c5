"""Select rows after the votes (coarse scores) of all keys have been computed, and attend to them.

These are the later stages of a decode step. They select candidates by their votes, rerank them,
combine the estimates of the query heads that share a KV head, select rows, and compute attention.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.attend import attend, put_resident
from kvindex.cpu.kernels.compile import kernel
from kvindex.cpu.kernels.rerank import agree, estimate
from kvindex.cpu.kernels.select import candidates, position_of, score_of, top_k
from kvindex.cpu.kernels.vectors import FOUR


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
    """Select the best `k` rows of each group, given the coarse scores (votes) of all keys.

    A group is one KV head of one sequence. Each thread processes some of the groups. `most` is the
    largest number of candidates of a group.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        votes: Votes of all keys, int32 `[B·G, N]`.
        limits: Number of candidates of each group, int64 `[B·G]`.
        length: Number of keys.
        full: Number of keys in full blocks; later keys are in the last, partly filled block.
        block: Number of tokens in a block.
        signs: Addresses of signs, int64 `[2, B·G]`: `[0]` for the full blocks, and `[1]` for the
            last, partly filled block.
        magnitudes: Addresses of magnitudes, int64 `[2, B·G]`.
        weights: Addresses of the weights' upper bytes, int64 `[2, B·G]`.
        fractions: Addresses of the weights' lower bytes, int64 `[2, B·G]`.
        bits: Number of bits of a magnitude.
        queries: Rotated queries, float32 `[B·G, g, D]`.
        products: Inner products with block centers, float32 `[B·G, S, g]`.
        levels: Quantized absolute values of a coordinate, float32 `[2^bits]`, padded to 16 or more.
        fine: Table of weights from 1 to 2, float32 `[2^11]` (`rerank.weight_of`).
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
        ids: Result, token ids of the rows, best first, padded with -1, int64 `[B·G, k]`.
        scores: Result, scores of the rows, float32 `[B·G, k]`.
        found: Result, number of selected rows, int32 `[B·G]`.
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
    """Compute attention over selected rows, and over resident rows (those of sink and window).

    A group is one KV head of one sequence. Each thread processes some of the groups.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        queries: Float32 `[B·G, g, D]`.
        ids: Token ids of the selected rows, int64 `[B·G, K]`; negative ids are unused.
        bases: Addresses of each group's rows in the store, int64 `[B·G]`.
        row_bytes: Bytes of a row in the store.
        weights: Log weights of the selected rows, float32 `[B·G, g, K]`; `[B·G, g, 0]` if all are
            zero.
        resident: Addresses of each group's resident rows, int64 `[B·G]`.
        resident_bytes: Bytes of a resident row.
        mask: Addresses of the masks of resident rows, int64 `[B·G]`.
        count: Number of resident rows.
        kind: Dtype of the rows (`numbers.KINDS`).
        value_bytes: Distance in bytes from a key's address to its value.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        addresses: Buffer, int64 `[parts, R]`, `R` at least `K + W`.
        places: Buffer, int64 `[parts, R]`, where `R` is rounded up to a multiple of 4.
        keys: For each thread the buffer `keys` of `attend`. Its last row may contain anything.
        values: For each thread the buffer `values` of `attend`. Its last row may contain anything.
        logits: Buffer, float32 `[parts, g · R]`, with the `R` of `places`.
        output: Result, float32 `[B·G, g, Dv]`.
        lse: Result, log-sum-exp of the logits, float32 `[B·G, g]`.
    """
    (groups, K), g = ids.shape, queries.shape[1]
    fours = -(-(K + count) // FOUR) * FOUR
    keys[part, -1], values[part, -1] = 0, 0
    own_logits = logits[part, : g * fours].reshape((g, fours))
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
            places[part, :fours],
            keys[part],
            values[part],
            own_logits,
            output[group],
            lse[group],
        )
