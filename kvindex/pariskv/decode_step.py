"""Reference implementation of the fused decode step; tests compare the CUDA kernels with it.

The functions here run one decode step in plain torch, from a query to attention over the best `k`
rows. They have the names and the order of the kernels in `kvindex_cuda/kernels/step/`, read the
same inputs (`step_state.State` and the results of earlier stages) and return what a kernel writes.
Two things differ from the kernels. Lists that a kernel writes in any order are sorted here, and a
tensor of lists is only as long as its longest list. Shorter lists are padded with `EMPTY`.

1. `prepare_query`: rotate the query and round it to integers of a few bits (paper, A.1). Compute
   the coarse scores (votes) of 4,096 sampled keys, and choose a threshold. Somewhat more than `C`
   keys of the index are expected to reach it, where `C` is the number of candidates.
2. `scan`: compute every key's vote from its signs, the upper byte of its weight and its block's
   center (B.2.1). Write the keys whose votes reach the threshold to a candidate list.
3. `rerank`: estimate the inner products of the best `C` keys of the candidate list from all bits of
   their codes (B.2.2).
4. `select_rows`: combine the estimates of the query heads of a KV head into one score per
   candidate, and select the `k` rows with the best scores. With sampling, stages 3 and 4 choose
   candidates and rows by random priorities instead (`kvindex.ops.priority`).
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
    """Find the best `k` rows and attend to them and to the resident rows (sink and local window).

    Sequences of different lengths are computed one after another.

    Args:
        queries: Floating point, `[B, H, D]`.
        state: Codes, rows and other tensors that the kernels read.
        k: Rows to select per KV head.
        config: Constants that the kernels are compiled for.
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
    """Select the rows for attention: run all stages of a decode step except the last, `attend`."""
    if isinstance(config.layout, SubspaceLayout):
        return select_rows(state, tiered_votes.find_candidates(queries, state, config), k, config)
    prepared = prepare_query(queries, state, config)
    reranked = rerank(state, prepared, scan(queries, state, prepared, config), config)
    return select_rows(state, reranked, k, config, prepared.sampling)


# 1. prepare_query


@dataclass(frozen=True)
class SamplingTerms:
    """Terms that convert coarse scores (votes) to priorities, and the seeds of random numbers.

    The priority of a key is an estimate of the logarithm of its attention weight, plus random
    noise. The keys with the largest priorities are sampled.

    Attributes:
        gains: Numbers by which votes are multiplied, float32 `[B, G, g]` (`priority.gains`).
        totals: Numbers that are added to the products, float32 `[B, G, g]` (`priority.totals`).
        seeds: Seeds of KV heads, 32-bit numbers as int64 `[B, G]`. The random number of a key is
            the hash of `seed + SPREAD * id`.
    """

    gains: Tensor
    totals: Tensor
    seeds: Tensor

    def noises(self, ids: Tensor) -> Tensor:
        """Return random noise for each key.

        To sample keys, a search adds this noise to their scores, and takes the best sums.

        Args:
            ids: Token ids of the keys, int64 `[B, G, K]`.

        Returns:
            Int64 `[B, G, K]`: `−log₂ u` for a random number `u` in (0, 1), as a multiple of
            `1 / ops.priority.UNIT`.
        """
        return priority.noise_of(ids * priority.SPREAD + self.seeds[..., None])


@dataclass(frozen=True)
class Prepared:
    """Results of `prepare_query`: the query in the forms that later stages read, and a threshold.

    `scan` lists the keys whose coarse scores (votes) reach the threshold. With sampling, `sample`
    and `thresholds` contain priorities instead of votes.

    Attributes:
        planes: Digits of the rounded query in base -2, uint8 `[B, G, g, PLANES, D]`.
        sums: Sums of the rounded query's coordinates, int32 `[B, G, g]`.
        units: Factors that convert an inner product `q·k` to votes, float32 `[B, G, g]`.
        operands: The rotated query times `ups` as two float16 numbers, `[B, G, g, D, 2]`.
        ups: Powers of two that scale the query to the range of float16, float32 `[B, G, g]`.
        sample: Votes of sampled keys, int32 `[B, G, SAMPLED]`.
        thresholds: Lowest vote of a key that `scan` lists, int32 `[B, G]`.
        bases: Lowest vote in the first bin of the histogram, int32 `[B, G]`.
        shifts: Base-2 logarithms of the width of a histogram bin in votes, int32 `[B, G]`.
        wrong: Int32 `[]`: 1 if a query is not finite or too large (`QUERY_LIMIT`), else 0.
        sampling: Terms for sampling, or None if the search does not sample.
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
    """Rotate and round the query, and choose a threshold for votes (coarse scores of keys).

    The threshold is chosen so that somewhat more than `C` keys reach it, where `C` is the number of
    candidates. If the index has a regression of keys on their sign bits, votes are computed from
    the query that `sign_regression.voting` returns. The rerank always uses the rotated query.
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
    """Compute the terms that convert coarse scores (votes) to priorities (`SamplingTerms`).

    Args:
        state: Codes and other tensors that the decode step reads.
        products: Inner products of queries and block centers, float32 `[B, G, S, g]`.
        unit: Inner product `q·k` that corresponds to a vote of 1, float64 `[B, G, g]`.
        config: Constants of the decode step.
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
    """Convert coarse scores (votes) `[B, G, g, N]` to priorities, int32 `[B, G, N]`.

    The keys with the largest priorities are sampled. The priority of a padded token is `LEAST`.
    """
    noises = sampling.noises(torch.arange(votes.shape[-1], device=votes.device)[None, None])
    found = priority.priorities(votes, sampling.gains, sampling.totals, noises)
    return found.masked_fill(~state.flags[:, None], priority.LEAST)


# 2. scan


@dataclass(frozen=True)
class Scanned:
    """Results of `scan`: the keys whose votes (coarse scores) reach the threshold.

    Attributes:
        counts: Number of these keys, int32 `[B, G]`.
        list: Entries (vote and token id) of these keys, int64 `[B, G, L]`.
        histogram: Histogram of the votes of these keys, int32 `[B, G, BINS]`.
        products: Inner products `⟨q, μ⟩` with each block's center `μ`, float32 `[B, G, S, g]`.
    """

    counts: Tensor
    list: Tensor
    histogram: Tensor
    products: Tensor


def scan(queries: Tensor, state: State, prepared: Prepared, config: StepConfig) -> Scanned:
    """Compute the votes (coarse scores) of all keys, and list the keys whose votes reach the
    threshold.
    """
    return list_keys(state, prepared, center_products(queries, state, config), config)


def list_keys(state: State, prepared: Prepared, products: Tensor, config: StepConfig) -> Scanned:
    """List the keys whose votes (coarse scores) reach the threshold, as the kernel `scan` does.

    Args:
        state: Codes and other tensors that the decode step reads.
        prepared: Results of `prepare_query`.
        products: Inner products of queries and block centers, float32 `[B, G, S, g]`.
        config: Constants of the decode step.
    """
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
    """Return the coarse score by which keys are ranked: the vote or, with sampling, the priority.

    Returns:
        Int32 `[B, G, N]`, one number for each key and KV head.
    """
    given = state, prepared.planes, prepared.units, products, config
    if prepared.sampling is None:
        return votes_of(*given)
    return _priorities(head_votes(*given), prepared.sampling, state)


# 3. rerank


def rerank(state: State, prepared: Prepared, scanned: Scanned, config: StepConfig) -> Reranked:
    """Estimate the query's inner products with the candidates, from all bits of their codes.

    `scan` has written the keys with the best coarse scores (votes) to a list. The candidates are
    the best `C` keys of this list. All other keys in the histogram bin of the `C`-th best vote are
    also candidates here, and `select_rows` drops those beyond `C`.
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
    """Return an entry (coarse score and token id) for each key, the best scores first."""
    votes = ranked(state, prepared, products, config)
    entries = entry_of(votes, torch.arange(state.tokens, device=votes.device))
    return entries.sort(dim=-1, descending=True).values


def _rerank_sampled(
    state: State, prepared: Prepared, scanned: Scanned, sampling: SamplingTerms, config: StepConfig
) -> Reranked:
    """Estimate the query's inner products with all keys whose priorities reach the threshold.

    The priority of a key is the logarithm of its estimated attention weight plus random noise. The
    threshold is chosen so that about `C` keys reach it, where `C` is the number of candidates.
    """
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
    """Return the logarithm of the probability with which each candidate was sampled.

    Each element of `candidates`, int64 `[B, G, K]`, combines the priority and the token id of a
    candidate, or is `EMPTY`. Returns float32 `[B, G, K]`, 0 for `EMPTY`.
    """
    sizes = vote_of(candidates) - sampling.noises(id_of(candidates))
    chances = priority.log_chances(sizes, thresholds[..., :1].long())
    return chances.masked_fill(candidates == EMPTY, 0)


def _estimates(
    candidates: Tensor, state: State, prepared: Prepared, products: Tensor, config: StepConfig
) -> Tensor:
    """Estimate `q·k` from the codes of the candidates (paper, equation 10), `[B, G, K, g]`."""
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
    """Results of `select_rows`.

    Where fewer than `k` rows are selected, `ids` is padded with -1, and `scores` and `weights` are
    padded with `-inf`.

    Attributes:
        ids: Token ids of the selected rows, ascending, int64 `[B, G, k]`.
        scores: Scores of the rows, combined over the query heads of a KV head (`group.agree`). With
            sampling: priorities. Float32 `[B, G, k]`.
        found: Number of selected rows, int32 `[B, G]`.
        weights: Log weights of sampled rows, which correct for rows that were not sampled, float32
            `[B, G, k]`. None without sampling.
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
    """Select the `k` candidates with the best scores for each KV head.

    A score combines the estimates of all query heads of a KV head (`group.agree`). Of rows with
    equal scores, the row with the lower token id is preferred.

    Args:
        state: Codes, rows and other tensors that the decode step reads.
        reranked: Candidates with their estimates.
        k: Rows to select per KV head.
        config: Constants of the decode step.
        sampling: `Prepared.sampling`: terms for sampling, or None if the search does not sample.
    """
    if sampling is not None:
        return _select_sampled(reranked, k, config, sampling)
    g, tokens = config.geometry, state.tokens
    # Keep the `C` keys with the best votes (coarse scores). The rerank may have got more than `C`
    # keys: it got every key whose vote is in the histogram bin of the `C`-th best vote, or in a
    # better bin.
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
    """Select the `k` candidates with the largest priorities: log weight plus random noise.

    The attention weights are computed from the estimates of the rerank. The random number of a key
    is the same as in the sampling of candidates.
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
"""An id larger than all token ids; it sorts unused slots to the end."""


# 5. attend


def attend(
    queries: Tensor,
    state: State,
    selected: Selected,
    config: StepConfig,
    *,
    weights: Tensor | None = None,
) -> Attended:
    """Compute exact attention to the selected rows and to the resident rows (sink and window).

    Args:
        queries: Floating point, `[B, H, D]`.
        state: Rows and other tensors that the decode step reads.
        selected: Selected rows; slots with negative ids are unused.
        config: Constants of the decode step.
        weights: Log weights to add to the logits of the selected rows, float32 `[B, H, k]`; `-inf`
            hides a row from a head. None: `selected.weights` are added.
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
    """Return the terms to add to the logits of the selected rows, then of the resident rows.

    The term is `-inf` for an unused slot or a masked row, else the row's log weight or 0. The
    result is float32 `[B, H, k + count]`, where `count` is the number of resident rows.
    """
    g, ids, count = config.geometry, selected.ids, int(state.resident_count)
    unused = torch.arange(ids.shape[-1], device=ids.device) >= selected.found[..., None]
    hidden = (unused | (ids < 0)).repeat_interleave(g.group_size, dim=1)
    masked = (state.resident_mask[:, None, :count] == 0).expand(-1, g.q_heads, -1)
    bias = torch.zeros(hidden.shape, device=ids.device) if weights is None else weights
    both = torch.cat([bias, bias.new_zeros(masked.shape)], dim=-1)
    return both.masked_fill(torch.cat([hidden, masked], dim=-1), attention.NEVER)


def _rows(state: State, ids: Tensor, config: StepConfig) -> tuple[Tensor, Tensor]:
    """Decode the keys and values of the tokens `ids` to float32. A negative id gives zeros."""
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
