"""A fused decoding step in plain torch: from a query to attention over the best `k` rows.

Five stages, one launch each in `kvindex_cuda/kernels/step/`, of which these functions are the
specification: what a stage reads (`step_state.State` and what the stages before give) and what it
writes, by the kernels' names, in the same order. A kernel's lists come in any order, here they are
sorted; its buffers go on to a capacity, here they end where the longest does, with `EMPTY`.

1. prepare_query: the query is rotated and rounded to integers of a few bits (paper, A.1); votes of
   4,096 sampled keys tell a vote that some more than `C` of all keys reach.
2. scan: every key's vote, from its signs, the upper byte of its weight and its block's center
   (B.2.1); those from that vote on are listed.
3. rerank: of the list's best `C`, inner products are estimated from all code bits (B.2.2).
4. select_rows: the group's heads agree on a score of each candidate; the best `k` rows by it.
   Or candidates and rows are drawn, both by the same noise (`priority`): votes become sizes.
5. attend: softmax over those rows and the resident ones, sink and window (B.3).

All presets but `paper` run these stages: `sampled` (the default), `fast` and `precise`. `paper` has
other stages 1 to 3 (`table_step.py`).
Integers are equal to kernels' to the bit, given the same inputs; floats up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core.protocol import UNUSED, Attended
from kvindex.ops import attention, coarse, codes, fetch, group, priority, select
from kvindex.ops import rerank as reranking
from kvindex.ops.codes import FACTOR
from kvindex.pariskv import sign_regression, tiered_votes
from kvindex.pariskv.block_layout import BLOCK, SubspaceLayout
from kvindex.pariskv.sign_votes import (
    center_products,
    head_votes,
    planes_of,
    sample_of,
    thresholds_of,
    votes_of,
)
from kvindex.pariskv.step_state import (
    BINS,
    EMPTY,
    Reranked,
    State,
    StepConfig,
    bin_of,
    buckets_of,
    cut_of,
    descending,
    entry_of,
    id_of,
    operands_of,
    queries_of,
    rotated,
    up_of,
    vote_of,
)

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Rows as codes (`storage/codecs.py`): a byte a number, then a scale of key and of value."""


def decode_step(queries: Tensor, state: State, k: int, config: StepConfig) -> Attended:
    """Attention of queries `[B, H, D]` over the best `k` rows and the resident ones.

    Where rows of the batch have lengths of their own, each is a batch of 1.
    """
    if len(state.length) > 1:
        rows = enumerate(queries[:, None])
        each = [decode_step(query, state.row(b), k, config) for b, query in rows]
        return Attended(
            torch.cat([attended.output for attended in each]),
            torch.cat([attended.lse for attended in each]),
            torch.cat([attended.found for attended in each]),
        )
    return attend(queries, state, find_rows(queries, state, k, config), config)


def find_rows(queries: Tensor, state: State, k: int, config: StepConfig) -> Selected:
    """The stages before attention."""
    if isinstance(config.layout, SubspaceLayout):
        return select_rows(state, tiered_votes.find_candidates(queries, state, config), k, config)
    prepared = prepare_query(queries, state, config)
    reranked = rerank(state, prepared, scan(queries, state, prepared, config), config)
    return select_rows(state, reranked, k, config, prepared.draw)


# 1. prepare_query


@dataclass(frozen=True)
class Draw:
    """What brings votes to priorities, and the noise of keys.

    gains, totals: of `priority`, float32 `[B, G, g]`; seeds: what is added to `SPREAD` times a
    key's id for its noise, int64 `[B, G]`, 32 bits.
    """

    gains: Tensor
    totals: Tensor
    seeds: Tensor

    def noises(self, ids: Tensor) -> Tensor:
        """Noise of ids int64 `[B, G, K]`, int64."""
        return priority.noise_of(ids * priority.SPREAD + self.seeds[..., None])


@dataclass(frozen=True)
class Prepared:
    """What `prepare_query` writes.

    planes: digits of the rounded query to the base -2, uint8 `[B, G, g, PLANES, D]`; sums: of its
    coordinates, int32 `[B, G, g]`; units: votes per unit of `q·k`, float32 `[B, G, g]`; operands:
    the rotated query as float16, `[B, G, g, D, 2]`, times ups, float32 `[B, G, g]`; sample: votes
    int32 `[B, G, SAMPLED]`; thresholds: int32 `[B, G]`; bases, shifts: of the histogram of votes
    from there on, int32 `[B, G]`; wrong: int32 `[]`; draw: where candidates are drawn. There
    priorities take the place of votes.
    """

    planes: Tensor
    sums: Tensor
    units: Tensor
    operands: Tensor
    ups: Tensor
    sample: Tensor
    thresholds: Tensor
    bases: Tensor
    shifts: Tensor
    wrong: Tensor
    draw: Draw | None = None


def prepare_query(queries: Tensor, state: State, config: StepConfig) -> Prepared:
    """Rotate and round, then find a vote that a sample says is reached by more than `C` keys.

    Where signs vote together it is another query whose integers they are (`regression.voting`).
    """
    directions, norms, wrong = rotated(queries, config)
    matrix = state.regression
    voting = directions if matrix is None else sign_regression.voting(directions, matrix)
    integers = coarse.rounded(voting, config.largest).int()
    planes, peaks = planes_of(integers, config.largest), voting.abs().amax(-1)
    scale = config.level.double() * state.weight_scale[..., None].double()
    unit = peaks.double() * norms.double() * scale / (config.largest * FACTOR)
    units = torch.where(unit > 0, 1 / unit, 0.0).float()
    ups = up_of(directions.abs().amax(-1) * norms)
    products = center_products(queries, state, config)
    votes = head_votes(state, planes, units, products, config)
    draw = _sampling_terms(state, products, unit, config) if config.drawn else None
    sample = sample_of(votes.amax(2) if draw is None else _priorities(votes, draw, state))
    return Prepared(
        planes=planes,
        sums=integers.sum(-1, dtype=torch.int32),
        units=units,
        operands=operands_of(directions * norms[..., None], ups),
        ups=ups,
        sample=sample,
        **thresholds_of(sample, state, config),
        wrong=wrong,
        draw=draw,
    )


def _sampling_terms(state: State, products: Tensor, unit: Tensor, config: StepConfig) -> Draw:
    """Of products with centers `[B, G, S, g]`, and `q·k` of a vote, float64 `[B, G, g]`."""
    scale = config.geometry.scale
    some = priority.sampled_blocks(products.shape[2] if config.centered else 0).to(products.device)
    first = state.flags.int().argmax(-1)
    signs = config.layout.fields(state.codes, state.tokens)["signs"]
    own = signs[torch.arange(len(first)), :, first]
    seeds = priority.hashed(priority.seeds(own, state.counted, config.seed))[..., 0]
    seeds = (seeds - first[:, None] * priority.SPREAD) & priority.BITS
    totals = priority.totals(products[:, :, some].mT, scale)
    return Draw(priority.gains(unit, scale), totals, seeds)


def _priorities(votes: Tensor, draw: Draw, state: State) -> Tensor:
    """Of all keys, int32 `[B, G, N]`, by their votes `[B, G, g, N]`; `LEAST` of padding."""
    noises = draw.noises(torch.arange(votes.shape[-1], device=votes.device)[None, None])
    found = priority.priorities(votes, draw.gains, draw.totals, noises)
    return found.masked_fill(~state.flags[:, None], priority.LEAST)


# 2. scan


@dataclass(frozen=True)
class Scanned:
    """What `scan` writes.

    counts: how many keys are listed, int32 `[B, G]`; list: their entries, int64 `[B, G, L]`;
    histogram: of their votes, int32 `[B, G, BINS]`; products: `⟨q, μ⟩` of each block's center,
    float32 `[B, G, S, g]`.
    """

    counts: Tensor
    list: Tensor
    histogram: Tensor
    products: Tensor


def scan(queries: Tensor, state: State, prepared: Prepared, config: StepConfig) -> Scanned:
    """List the keys whose votes reach the threshold."""
    return list_keys(state, prepared, center_products(queries, state, config), config)


def list_keys(state: State, prepared: Prepared, products: Tensor, config: StepConfig) -> Scanned:
    """As `scan`, of products that there are."""
    votes = ranked(state, prepared, products, config)
    entries = entry_of(votes, torch.arange(state.tokens, device=votes.device))
    listed = votes >= prepared.thresholds[..., None]
    bins = bin_of(votes, prepared.bases, prepared.shifts)
    histogram = torch.zeros((*votes.shape[:2], BINS), dtype=torch.int32, device=votes.device)
    return Scanned(
        counts=listed.sum(-1, dtype=torch.int32),
        list=descending(entries, listed),
        histogram=histogram.scatter_add_(-1, bins, listed.int()),
        products=products,
    )


def ranked(state: State, prepared: Prepared, products: Tensor, config: StepConfig) -> Tensor:
    """What candidates are chosen by, int32 `[B, G, N]`: votes, or priorities."""
    given = state, prepared.planes, prepared.units, products, config
    if prepared.draw is None:
        return votes_of(*given)
    return _priorities(head_votes(*given), prepared.draw, state)


# 3. rerank


def rerank(state: State, prepared: Prepared, scanned: Scanned, config: StepConfig) -> Reranked:
    """Estimate the inner products of the list's best `C`, and of all others in the cut's bin."""
    if prepared.draw is not None:
        return _rerank_sampled(state, prepared, scanned, prepared.draw, config)
    entries, target = scanned.list, state.target.expand_as(scanned.counts)
    cut = torch.stack(cut_of(scanned.histogram, target), dim=-1)
    whole = torch.tensor([-1, 0], device=cut.device)
    cuts = torch.where(scanned.counts[..., None] > target[..., None], cut, whole).int()
    if (short := scanned.counts < target).any():  # then all keys compete
        best = _best(state, prepared, scanned.products, config)
        ranks = torch.arange(best.shape[-1], device=best.device)
        best = best.masked_fill(ranks >= target[..., None], EMPTY)
        wide = max(best.shape[-1], entries.shape[-1])
        best, entries = (
            pad(part, (0, wide - part.shape[-1]), value=EMPTY) for part in (best, entries)
        )
        entries = torch.where(short[..., None], best, entries)
    bins = bin_of(vote_of(entries), prepared.bases, prepared.shifts)
    candidates = descending(entries, (bins >= cuts[..., :1]) & (entries != EMPTY))
    bins = bin_of(vote_of(candidates), prepared.bases, prepared.shifts)
    estimates = _estimates(candidates, state, prepared, scanned.products, config)
    return Reranked.of(candidates, estimates, bins, cuts, config)


def _best(state: State, prepared: Prepared, products: Tensor, config: StepConfig) -> Tensor:
    """The entries of all keys, the best first."""
    votes = ranked(state, prepared, products, config)
    entries = entry_of(votes, torch.arange(state.tokens, device=votes.device))
    return entries.sort(dim=-1, descending=True).values


def _rerank_sampled(
    state: State, prepared: Prepared, scanned: Scanned, draw: Draw, config: StepConfig
) -> Reranked:
    """Estimates of all keys from the threshold on, which some `C` reach."""
    every = ranked(state, prepared, scanned.products, config)
    thresholds = priority.thresholds(every, state.wanted)
    entries = entry_of(every, torch.arange(state.tokens, device=every.device))
    candidates = descending(entries, every >= thresholds[..., 1:])
    real, ids = candidates != EMPTY, id_of(candidates)
    estimates = _estimates(candidates, state, prepared, scanned.products, config)
    estimates = estimates.masked_fill(~real[..., None], attention.NEVER)
    g, chances = config.geometry, _log_chances(candidates, thresholds, draw)
    logits = attention.cap(estimates, g.scale, g.softcap).mT - chances[:, :, None]
    none = torch.zeros_like(candidates[..., :0])
    return Reranked(
        candidates=candidates,
        candidate_counts=real.sum(-1, dtype=torch.int32),
        estimates=estimates,
        buckets=buckets_of(logits, (ids >= 0)[:, :, None].expand_as(logits)),
        edge=none,
        edge_estimates=none.float()[..., None].expand(*none.shape, estimates.shape[-1]),
        edge_counts=torch.zeros_like(scanned.counts),
        cuts=thresholds.int(),
    )


def _log_chances(candidates: Tensor, thresholds: Tensor, draw: Draw) -> Tensor:
    """`log π` of entries int64 `[B, G, K]` by their votes, float32, 0 of `EMPTY`."""
    sizes = vote_of(candidates) - draw.noises(id_of(candidates))
    chances = priority.log_chances(sizes, thresholds[..., :1].long())
    return chances.masked_fill(candidates == EMPTY, 0)


def _estimates(
    candidates: Tensor, state: State, prepared: Prepared, products: Tensor, config: StepConfig
) -> Tensor:
    """Of `q·k` (paper, equation 10), float32 `[B, G, K, g]`."""
    ids, queries = id_of(candidates), queries_of(prepared.operands, prepared.ups)
    fields = config.layout.fields(state.codes, state.tokens)
    own = {name: fetch.gather_rows(part, ids) for name, part in fields.items()}
    logs = own["logs"][..., :1].int() | own["logs"][..., 1:].int() << 8  # little-endian
    weights = codes.log_weights(logs, 16)
    parts = own["signs"], own["magnitudes"], weights, config.levels
    return reranking.estimate(queries, *parts).mT + fetch.gather_rows(products, ids // BLOCK)


# 4. select_rows


@dataclass(frozen=True)
class Selected:
    """What `select_rows` writes.

    ids: rows, ascending, int64 `[B, G, k]`, then -1; scores: what `group.agree` gives, float32
    `[B, G, k]`, then `-inf`; found: how many there are, int32 `[B, G]`; weights: of rows that were
    drawn, their logarithms `-log π`, float32 `[B, G, k]`, then `-inf`. Scores of these are
    priorities.
    """

    ids: Tensor
    scores: Tensor
    found: Tensor
    weights: Tensor | None = None


def select_rows(
    state: State, reranked: Reranked, k: int, config: StepConfig, draw: Draw | None = None
) -> Selected:
    """The best `k` rows by what the group's heads agree on; equal scores by the lower id.

    draw: of `Prepared`, where rows are drawn.
    """
    if draw is not None:
        return _select_sampled(reranked, k, config, draw)
    g, tokens = config.geometry, state.tokens
    # of entries in the cut's bin the best fill up to `C`; without a cut all are candidates
    whole = reranked.cuts[..., 0] < 0
    counts = torch.where(whole, reranked.candidate_counts.long(), state.target)
    ids = id_of(reranked.candidates)
    chosen = torch.arange(ids.shape[-1], device=ids.device) < counts[..., None]
    ids, order = torch.where(chosen, ids, tokens).sort(dim=-1)  # equal scores stay in this order
    estimates = reranked.estimates.gather(2, order[..., None].expand_as(reranked.estimates))
    estimates = estimates.masked_fill((ids == tokens)[..., None], attention.NEVER)
    agreed = group.agree(estimates.mT, config.policy, scale=g.scale, softcap=g.softcap)
    agreed = agreed.masked_fill(agreed.isnan(), torch.nan)  # one with a sign would be below -inf
    scores, slots = select.top_k(agreed, k)
    best = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, tokens)
    best, order = best.sort(dim=-1)
    found = (slots >= 0).sum(-1, dtype=torch.int32)
    return Selected(best.masked_fill(best == tokens, UNUSED), scores.gather(-1, order), found)


def _select_sampled(reranked: Reranked, k: int, config: StepConfig, draw: Draw) -> Selected:
    """Rows of the `k` largest priorities by estimates, with the noise of the first draw."""
    g, (ids, order) = config.geometry, id_of(reranked.candidates).sort(dim=-1)
    candidates = reranked.candidates.gather(-1, order)
    estimates = reranked.estimates.gather(2, order[..., None].expand_as(reranked.estimates))
    logits = attention.cap(estimates.mT, g.scale, g.softcap)
    logits = logits.masked_fill((ids < 0)[:, :, None], attention.NEVER)
    chances = _log_chances(candidates, reranked.cuts, draw)
    totals = (logits - chances[:, :, None]).logsumexp(-1, keepdim=True)
    sizes, noises = priority.root_mean_square(logits - totals), draw.noises(ids) * priority.NATS
    sizes = sizes.masked_fill(ids < 0, attention.NEVER)  # a row of the batch may have no candidate
    scores, slots, last = priority.sample(sizes, noises.float(), k)
    weights = -torch.minimum(last, chances.gather(-1, slots.clamp_min(0)))
    weights = weights * (priority.temper(k) if config.tempered else 1)
    best = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, _LAST)
    best, order = best.sort(dim=-1)
    weights = weights.masked_fill(slots < 0, attention.NEVER).gather(-1, order)
    found = (slots >= 0).sum(-1, dtype=torch.int32)
    best = best.masked_fill(best == _LAST, UNUSED)
    return Selected(best, scores.gather(-1, order), found, weights)


_LAST = 2**62
"""After all ids."""


# 5. attend


def attend(
    queries: Tensor,
    state: State,
    selected: Selected,
    config: StepConfig,
    *,
    weights: Tensor | None = None,
) -> Attended:
    """Exact attention over the selected rows and the resident ones.

    selected: ids below 0 are none; weights: added to logits, float32 `[B, H, k]`, `-inf` hides a
    row from a head; None for those of `selected`.
    """
    g, count = config.geometry, int(state.resident_count)
    keys, values = _rows(state, selected.ids, config)
    resident = state.resident[:, :, :count].float().tensor_split([g.head_dim], dim=-1)
    keys, values = torch.cat([keys, resident[0]], dim=2), torch.cat([values, resident[1]], dim=2)
    folded = group.fold(queries, g.kv_heads, config.policy)
    logits = attention.cap(folded @ keys.mT, g.scale, g.softcap).flatten(1, 2)
    if weights is None and selected.weights is not None:
        weights = selected.weights.repeat_interleave(g.group_size, dim=1)
    logits = logits + _bias(state, selected, weights, config)
    lse = logits.logsumexp(-1)
    softmax = (logits - lse.masked_fill(lse == attention.NEVER, 0)[..., None]).exp()
    output = (softmax.view(*folded.shape[:3], -1) @ values).flatten(1, 2)
    return Attended(output.to(queries.dtype), lse, selected.found)


def _bias(state: State, selected: Selected, weights: Tensor | None, config: StepConfig) -> Tensor:
    """What logits gain, float32 `[B, H, k + count]`: a weight, 0, or `-inf` of a hidden row."""
    g, ids, count = config.geometry, selected.ids, int(state.resident_count)
    unused = torch.arange(ids.shape[-1], device=ids.device) >= selected.found[..., None]
    hidden = (unused | (ids < 0)).repeat_interleave(g.group_size, dim=1)
    masked = (state.resident_mask[:, None, :count] == 0).expand(-1, g.q_heads, -1)
    bias = torch.zeros(hidden.shape, device=ids.device) if weights is None else weights
    both = torch.cat([bias, bias.new_zeros(masked.shape)], dim=-1)
    return both.masked_fill(torch.cat([hidden, masked], dim=-1), attention.NEVER)


def _rows(state: State, ids: Tensor, config: StepConfig) -> tuple[Tensor, Tensor]:
    """Keys and values of rows, float32; a negative id's are zeros."""
    g = config.geometry
    raw = fetch.gather_rows(state.rows.transpose(1, 2).flatten(2, 3), ids)
    first, end = g.head_dim, g.head_dim + g.value_dim  # numbers of the first scale, and of both
    if g.value_in_key:
        first, end = g.value_dim, g.head_dim
    if state.codec == "plain":
        both = raw[..., : end * g.dtype.itemsize].view(g.dtype).float()
    else:
        scales = raw[..., (start := -(-end // 4) * 4) : start + 8].view(torch.float32)
        both = raw[..., :end].view(CODES[state.codec]).float()  # products are not rounded further
        both = torch.cat(
            [both[..., :first] * scales[..., :1], both[..., first:] * scales[..., 1:]], -1
        )
    keys, values = both[..., : g.head_dim], both[..., g.value_start :][..., : g.value_dim]
    if state.row_center is not None:
        keys = (state.row_center[:, :, None] + keys).masked_fill((ids < 0)[..., None], 0)
    return keys, values
