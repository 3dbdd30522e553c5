"""Specification of a fused decode step, which tests compare kernels with.

The functions here run one decode step in plain torch, from a query to attention over the best `k`
rows. They have the names and the order of the kernels in `kvindex_cuda/kernels/step/`, read the
same inputs (`step_state.State` and the results of earlier stages) and return what a kernel writes.
Two things differ from the kernels: lists that a kernel writes in any order are sorted here, and
tensors of lists are only as long as the longest list. Unused places have the value `EMPTY`.

1. `prepare_query`: rotate the query and round it to integers of a few bits (paper, A.1). Compute
   the votes of 4,096 sampled keys, and from these a threshold that somewhat more than `C` keys
   reach.
2. `scan`: compute every key's vote from its signs, the upper byte of its weight and its block's
   center (B.2.1). List the keys whose votes reach the threshold.
3. `rerank`: estimate the inner products of the best `C` listed keys from all bits of their codes
   (B.2.2).
4. `select_rows`: combine the estimates of a group's heads into one score per candidate, and select
   the best `k` rows. With sampling, candidates and rows are chosen by random priorities instead
   (`kvindex.ops.priority`).
5. `attend`: softmax attention over those rows and the rows in the sink and the window, which are
   called resident rows (B.3).

The preset `paper` replaces stages 1 to 3 by those in `tiered_votes`. For equal inputs, integer
results are equal to the kernels' bit by bit, and floats are equal up to rounding.
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
"""Names of row codecs with one byte per number -> their dtype.

A row consists of its numbers, then a scale for the key and one for the value (`storage/codecs.py`).
"""


def decode_step(queries: Tensor, state: State, k: int, config: StepConfig) -> Attended:
    """Attend to the best `k` rows and to the resident rows, for queries `[B, H, D]`.

    If the sequences of the batch have different lengths, they are computed one by one.
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
    """Run the stages before attention."""
    if isinstance(config.layout, SubspaceLayout):
        return select_rows(state, tiered_votes.find_candidates(queries, state, config), k, config)
    prepared = prepare_query(queries, state, config)
    reranked = rerank(state, prepared, scan(queries, state, prepared, config), config)
    return select_rows(state, reranked, k, config, prepared.sampling)


# 1. prepare_query


@dataclass(frozen=True)
class SamplingTerms:
    """Numbers that convert votes to priorities, and the seeds of the keys' random numbers.

    Attributes:
        gains: Float32 `[B, G, g]`, from `priority.gains`.
        totals: Float32 `[B, G, g]`, from `priority.totals`.
        seeds: Int64 `[B, G]` of 32 bits. A key's noise is the hash of its seed plus `SPREAD` times
            its id.
    """

    gains: Tensor
    totals: Tensor
    seeds: Tensor

    def noises(self, ids: Tensor) -> Tensor:
        """Return the noise of ids int64 `[B, G, K]`, int64."""
        return priority.noise_of(ids * priority.SPREAD + self.seeds[..., None])


@dataclass(frozen=True)
class Prepared:
    """Results of `prepare_query`.

    With sampling, `sample` and `thresholds` contain priorities instead of votes.

    Attributes:
        planes: Digits of the rounded query to the base -2, uint8 `[B, G, g, PLANES, D]`.
        sums: Sums of the rounded query's coordinates, int32 `[B, G, g]`.
        units: Votes per unit of `q·k`, float32 `[B, G, g]`.
        operands: The rotated query times `ups` as two float16 numbers, `[B, G, g, D, 2]`.
        ups: Powers of two that scale the query to the range of float16, float32 `[B, G, g]`.
        sample: Votes of sampled keys, int32 `[B, G, SAMPLED]`.
        thresholds: Lowest vote of a key that the scan lists, int32 `[B, G]`.
        bases: Lowest vote in the first bin of the histogram, int32 `[B, G]`.
        shifts: Each bin of the histogram is `2^shift` votes wide, int32 `[B, G]`.
        wrong: Int32 `[]`, 1 if a query is out of range.
        sampling: Numbers for sampling, or None where the best candidates are taken.
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
    sampling: SamplingTerms | None = None


def prepare_query(queries: Tensor, state: State, config: StepConfig) -> Prepared:
    """Rotate and round the query, and find a vote that a little more than `C` keys reach.

    With a sign regression, votes use the query that `sign_regression.voting` returns, and the
    rerank uses the rotated query.
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
    sampling = _sampling_terms(state, products, unit, config) if config.sampled else None
    sample = sample_of(votes.amax(2) if sampling is None else _priorities(votes, sampling, state))
    return Prepared(
        planes=planes,
        sums=integers.sum(-1, dtype=torch.int32),
        units=units,
        operands=operands_of(directions * norms[..., None], ups),
        ups=ups,
        sample=sample,
        **thresholds_of(sample, state, config),
        wrong=wrong,
        sampling=sampling,
    )


def _sampling_terms(
    state: State, products: Tensor, unit: Tensor, config: StepConfig
) -> SamplingTerms:
    """Compute `SamplingTerms` from inner products with centers `[B, G, S, g]` and a vote's unit.

    The unit is the inner product `q·k` that a vote of 1 represents, float64 `[B, G, g]`.
    """
    scale = config.geometry.scale
    some = priority.sampled_blocks(products.shape[2] if config.centered else 0).to(products.device)
    first = state.flags.int().argmax(-1)
    signs = config.layout.fields(state.codes, state.tokens)["signs"]
    own = signs[torch.arange(len(first)), :, first]
    seeds = priority.hashed(priority.seeds(own, state.counted, config.seed))[..., 0]
    seeds = (seeds - first[:, None] * priority.SPREAD) & priority.BITS
    totals = priority.totals(products[:, :, some].mT, scale)
    return SamplingTerms(priority.gains(unit, scale), totals, seeds)


def _priorities(votes: Tensor, sampling: SamplingTerms, state: State) -> Tensor:
    """Return priorities int32 `[B, G, N]` for votes `[B, G, g, N]`; `LEAST` for padding."""
    noises = sampling.noises(torch.arange(votes.shape[-1], device=votes.device)[None, None])
    found = priority.priorities(votes, sampling.gains, sampling.totals, noises)
    return found.masked_fill(~state.flags[:, None], priority.LEAST)


# 2. scan


@dataclass(frozen=True)
class Scanned:
    """Results of `scan`.

    Attributes:
        counts: Number of listed keys, int32 `[B, G]`.
        list: Entries of the listed keys, int64 `[B, G, L]`.
        histogram: Histogram of their votes, int32 `[B, G, BINS]`.
        products: `⟨q, μ⟩` for each block's center `μ`, float32 `[B, G, S, g]`.
    """

    counts: Tensor
    list: Tensor
    histogram: Tensor
    products: Tensor


def scan(queries: Tensor, state: State, prepared: Prepared, config: StepConfig) -> Scanned:
    """List the keys whose votes reach the threshold."""
    return list_keys(state, prepared, center_products(queries, state, config), config)


def list_keys(state: State, prepared: Prepared, products: Tensor, config: StepConfig) -> Scanned:
    """List the keys whose votes reach the threshold; `⟨q, μ⟩` of the centers is an argument."""
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
    """Return the votes of all keys, or their priorities with sampling: int32 `[B, G, N]`."""
    given = state, prepared.planes, prepared.units, products, config
    if prepared.sampling is None:
        return votes_of(*given)
    return _priorities(head_votes(*given), prepared.sampling, state)


# 3. rerank


def rerank(state: State, prepared: Prepared, scanned: Scanned, config: StepConfig) -> Reranked:
    """Estimate inner products of the best `C` listed keys.

    Inner products of all other keys in the histogram bin of the `C`-th best key are estimated,
    too.
    """
    if prepared.sampling is not None:
        return _rerank_sampled(state, prepared, scanned, prepared.sampling, config)
    entries, target = scanned.list, state.target.expand_as(scanned.counts)
    cut = torch.stack(cut_of(scanned.histogram, target), dim=-1)
    whole = torch.tensor([-1, 0], device=cut.device)
    cuts = torch.where(scanned.counts[..., None] > target[..., None], cut, whole).int()
    if (short := scanned.counts < target).any():  # too few are listed: rank all keys instead
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
    """Return the entries (vote and id) of all keys, the best first."""
    votes = ranked(state, prepared, products, config)
    entries = entry_of(votes, torch.arange(state.tokens, device=votes.device))
    return entries.sort(dim=-1, descending=True).values


def _rerank_sampled(
    state: State, prepared: Prepared, scanned: Scanned, sampling: SamplingTerms, config: StepConfig
) -> Reranked:
    """Estimate inner products of all keys whose priorities reach the threshold, about `C` keys."""
    every = ranked(state, prepared, scanned.products, config)
    thresholds = priority.thresholds(every, state.wanted)
    entries = entry_of(every, torch.arange(state.tokens, device=every.device))
    candidates = descending(entries, every >= thresholds[..., 1:])
    real, ids = candidates != EMPTY, id_of(candidates)
    estimates = _estimates(candidates, state, prepared, scanned.products, config)
    estimates = estimates.masked_fill(~real[..., None], attention.NEVER)
    g, chances = config.geometry, _log_chances(candidates, thresholds, sampling)
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


def _log_chances(candidates: Tensor, thresholds: Tensor, sampling: SamplingTerms) -> Tensor:
    """Return `log π` of entries int64 `[B, G, K]`, float32; 0 for `EMPTY`."""
    sizes = vote_of(candidates) - sampling.noises(id_of(candidates))
    chances = priority.log_chances(sizes, thresholds[..., :1].long())
    return chances.masked_fill(candidates == EMPTY, 0)


def _estimates(
    candidates: Tensor, state: State, prepared: Prepared, products: Tensor, config: StepConfig
) -> Tensor:
    """Return estimates of `q·k` (paper, equation 10), float32 `[B, G, K, g]`."""
    ids, queries = id_of(candidates), queries_of(prepared.operands, prepared.ups)
    fields = config.layout.fields(state.codes, state.tokens)
    own = {name: fetch.gather_rows(part, ids) for name, part in fields.items()}
    logs = own["logs"][..., :1].int() | own["logs"][..., 1:].int() << 8  # lower byte first
    weights = codes.log_weights(logs, 16)
    parts = own["signs"], own["magnitudes"], weights, config.levels
    return reranking.estimate(queries, *parts).mT + fetch.gather_rows(products, ids // BLOCK)


# 4. select_rows


@dataclass(frozen=True)
class Selected:
    """Results of `select_rows`. Unused places have an id of -1 and `-inf` elsewhere.

    Attributes:
        ids: Selected rows, ascending, int64 `[B, G, k]`.
        scores: Agreed scores (`group.agree`), or priorities with sampling, float32 `[B, G, k]`.
        found: Number of selected rows, int32 `[B, G]`.
        weights: Log weights `-log π` of sampled rows, float32 `[B, G, k]`, or None without
            sampling.
    """

    ids: Tensor
    scores: Tensor
    found: Tensor
    weights: Tensor | None = None


def select_rows(
    state: State,
    reranked: Reranked,
    k: int,
    config: StepConfig,
    sampling: SamplingTerms | None = None,
) -> Selected:
    """Select the best `k` rows by the score that a group's heads agree on.

    Equal scores go to the lower id.

    Args:
        state: What the step reads.
        reranked: Candidates with their estimates.
        k: Rows per KV head.
        config: Constants of the step.
        sampling: From `Prepared`, where rows are sampled.
    """
    if sampling is not None:
        return _select_sampled(reranked, k, config, sampling)
    g, tokens = config.geometry, state.tokens
    # take the best entries of the cut's bin until there are `C`; without a cut, take all entries
    whole = reranked.cuts[..., 0] < 0
    counts = torch.where(whole, reranked.candidate_counts.long(), state.target)
    ids = id_of(reranked.candidates)
    chosen = torch.arange(ids.shape[-1], device=ids.device) < counts[..., None]
    ids, order = torch.where(chosen, ids, tokens).sort(dim=-1)  # equal scores stay in this order
    estimates = reranked.estimates.gather(2, order[..., None].expand_as(reranked.estimates))
    estimates = estimates.masked_fill((ids == tokens)[..., None], attention.NEVER)
    agreed = group.agree(estimates.mT, config.policy, scale=g.scale, softcap=g.softcap)
    agreed = agreed.masked_fill(agreed.isnan(), torch.nan)  # a negative NaN would sort below -inf
    scores, slots = select.top_k(agreed, k)
    best = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, tokens)
    best, order = best.sort(dim=-1)
    found = (slots >= 0).sum(-1, dtype=torch.int32)
    return Selected(best.masked_fill(best == tokens, UNUSED), scores.gather(-1, order), found)


def _select_sampled(
    reranked: Reranked, k: int, config: StepConfig, sampling: SamplingTerms
) -> Selected:
    """Select the rows with the `k` largest priorities by their estimates.

    A row's priority uses the same random number as when its candidate was sampled.
    """
    g, (ids, order) = config.geometry, id_of(reranked.candidates).sort(dim=-1)
    candidates = reranked.candidates.gather(-1, order)
    estimates = reranked.estimates.gather(2, order[..., None].expand_as(reranked.estimates))
    logits = attention.cap(estimates.mT, g.scale, g.softcap)
    logits = logits.masked_fill((ids < 0)[:, :, None], attention.NEVER)
    chances = _log_chances(candidates, reranked.cuts, sampling)
    totals = (logits - chances[:, :, None]).logsumexp(-1, keepdim=True)
    sizes, noises = priority.root_mean_square(logits - totals), sampling.noises(ids) * priority.NATS
    sizes = sizes.masked_fill(ids < 0, attention.NEVER)  # a sequence may have no candidate
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
"""Larger than all ids."""


# 5. attend


def attend(
    queries: Tensor,
    state: State,
    selected: Selected,
    config: StepConfig,
    *,
    weights: Tensor | None = None,
) -> Attended:
    """Compute exact attention over the selected rows and the resident rows.

    Args:
        queries: `[B, H, D]`.
        state: What the step reads.
        selected: Selected rows; ids below 0 are unused.
        config: Constants of the step.
        weights: Log weights that are added to the logits, float32 `[B, H, k]`; `-inf` hides a row
            from a head. None for the weights of `selected`.
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
    """Return what is added to logits, float32 `[B, H, k + count]`: a log weight, 0, or `-inf`."""
    g, ids, count = config.geometry, selected.ids, int(state.resident_count)
    unused = torch.arange(ids.shape[-1], device=ids.device) >= selected.found[..., None]
    hidden = (unused | (ids < 0)).repeat_interleave(g.group_size, dim=1)
    masked = (state.resident_mask[:, None, :count] == 0).expand(-1, g.q_heads, -1)
    bias = torch.zeros(hidden.shape, device=ids.device) if weights is None else weights
    both = torch.cat([bias, bias.new_zeros(masked.shape)], dim=-1)
    return both.masked_fill(torch.cat([hidden, masked], dim=-1), attention.NEVER)


def _rows(state: State, ids: Tensor, config: StepConfig) -> tuple[Tensor, Tensor]:
    """Return keys and values of the rows `ids`, float32; zeros for a negative id."""
    g = config.geometry
    raw = fetch.gather_rows(state.rows.transpose(1, 2).flatten(2, 3), ids)
    first, end = g.head_dim, g.head_dim + g.value_dim  # keys and values have a scale each
    if g.value_in_key:
        first, end = g.value_dim, g.head_dim
    if state.codec == "plain":
        both = raw[..., : end * g.dtype.itemsize].view(g.dtype).float()
    else:
        scales = raw[..., (start := -(-end // 4) * 4) : start + 8].view(torch.float32)
        both = raw[..., :end].view(CODES[state.codec]).float()  # not rounded to the rows' dtype
        both = torch.cat(
            [both[..., :first] * scales[..., :1], both[..., first:] * scales[..., 1:]], -1
        )
    keys, values = both[..., : g.head_dim], both[..., g.value_start :][..., : g.value_dim]
    if state.row_center is not None:
        keys = (state.row_center[:, :, None] + keys).masked_fill((ids < 0)[..., None], 0)
    return keys, values
