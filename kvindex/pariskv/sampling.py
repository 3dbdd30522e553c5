"""Search by sampling: sample candidates by their coarse scores (votes), then sample rows from the
candidates by the estimates of the rerank.

Each key has one random number. Each of the two steps selects a key if this number is below the
step's probability of the key. So if the step with the smaller probability selects a key, the other
step selects it, too. Therefore the total probability `π` of a row is the smaller of the two
probabilities, not their product (docs/decisions/0025).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, ErrorLimit, Hits
from kvindex.ops import priority
from kvindex.ops.attention import cap
from kvindex.ops.codes import FACTOR
from kvindex.ops.select import top_k
from kvindex.pariskv import candidates, row_budget
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex.pariskv.rerank import estimates


def search(tokens: Tokens, queries: Queries, k: int) -> Hits:
    """Sample up to `k` rows per KV head, in proportion to their estimated attention weights.

    The log weights of the result correct the softmax for the rows that were not sampled.
    """
    noises = key_noises(tokens)
    ids, chances = _find(tokens, queries, noises, tokens.config.limits(tokens.counts, k)[1])
    logits, weighted = candidate_logits(tokens, queries, ids, chances)
    sizes = sampling_weights(logits, weighted.logsumexp(-1, keepdim=True), ids)
    scores, at, last = priority.sample(sizes, candidate_noises(noises, ids), k)
    return _hits(tokens, ids, scores, at, torch.minimum(last, chances.gather(-1, at.clamp_min(0))))


def search_within(tokens: Tokens, queries: Queries, k: int, limit: ErrorLimit) -> Hits:
    """Sample as many rows per KV head as the limit of the error asks for, at most `k`.

    The number of rows depends on the estimates of the candidates alone, and is chosen before any
    row is read (`row_budget`).
    """
    noises = key_noises(tokens)
    most = row_budget.candidates(tokens.config, tokens.counts, k)
    ids, chances = _find(tokens, queries, noises, most)
    logits, weighted = candidate_logits(tokens, queries, ids, chances)
    total = weighted.logsumexp(-1)
    if limit.resident_lse is not None:
        total = torch.logaddexp(total, limit.resident_lse.view_as(total))
    sizes = sampling_weights(logits, total[..., None], ids)
    counts = row_budget.counts_of(k)
    scores, at = top_k(sizes + candidate_noises(noises, ids), k + 1)
    thresholds = scores[..., counts]
    variances = row_budget.variances(logits - total[..., None], sizes, chances, thresholds)
    chosen = row_budget.choose(variances, limit.variance)[..., None]
    rows = torch.tensor(counts, device=chosen.device)[chosen]
    scores, at = scores[..., :k], at[..., :k]
    at = at.masked_fill(torch.arange(k, device=at.device) >= rows, UNUSED)
    own = sizes.gather(-1, at.clamp_min(0)) - thresholds.gather(-1, chosen)
    own = torch.minimum(own.clamp_max(0), chances.gather(-1, at.clamp_min(0)))
    return _hits(tokens, ids, scores.masked_fill(at < 0, -math.inf), at, own, rows)


def sampling_weights(logits: Tensor, totals: Tensor, ids: Tensor) -> Tensor:
    """Return the logarithms of the candidates' sampling weights, `[B, G, C]`.

    totals: log-sum-exp of the logits of all rows for each query head, `[B, G, g, 1]`.
    """
    sizes = priority.root_mean_square(logits - totals)
    return sizes.masked_fill(ids < 0, -math.inf)  # a sequence may have no candidate


def candidate_noises(noises: Tensor, ids: Tensor) -> Tensor:
    """Return the random noise of the candidates `ids`, `-log u`, float32 `[B, G, C]`."""
    return noises.expand(*ids.shape[:2], -1).gather(-1, ids.clamp_min(0)) * priority.NATS


def _hits(
    tokens: Tokens, ids: Tensor, scores: Tensor, at: Tensor, log_chances: Tensor, rows: Any = None
) -> Hits:
    """Return the hits of sampled rows.

    Args:
        tokens: Codes of all tokens.
        ids: Token ids of the candidates, int64 `[B, G, C]`.
        scores: Priorities of the rows, float32 `[B, G, k]`.
        at: Positions of the rows among the candidates, int64 `[B, G, k]`, -1 in unused slots.
        log_chances: Logarithms of the probabilities with which the rows were sampled, `[B, G, k]`.
        rows: Number of rows of each KV head, `[B, G, 1]`, or None for `k`.
    """
    unused = at < 0
    log_weight = _log_weight(tokens, log_chances, scores.shape[-1] if rows is None else rows)
    log_weight = log_weight.masked_fill(unused, -math.inf)
    found = ids.gather(-1, at.clamp_min(0)).masked_fill(unused, UNUSED)
    return Hits(found, scores, log_weight.repeat_interleave(tokens.geometry.group_size, dim=1))


def candidate_coverage(tokens: Tokens, queries: Queries, k: int) -> Tensor:
    """Estimate what fraction of the attention weight of all tokens the candidates have, `[B, H]`.

    The candidates are chosen as in a search for `k` rows. In a sequence without valid tokens the
    fraction is 1.
    """
    every = candidate_logits(tokens, queries, *find(tokens, queries, k))
    found, whole = (logits.logsumexp(-1) for logits in every)
    return (found - whole).exp().masked_fill(whole == -math.inf, 1.0).flatten(1)


def find(tokens: Tokens, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
    """Sample the candidates of a search for `k` rows.

    Returns:
        Token ids, int64 `[B, G, C]`, ascending and padded with -1, and the logarithms of the
        probabilities with which they were sampled, float32 `[B, G, C]`.
    """
    return _find(tokens, queries, key_noises(tokens), tokens.config.limits(tokens.counts, k)[1])


def seeds(tokens: Tokens) -> Tensor:
    """Compute the seed of each KV head's random numbers from the signs of the first valid key.

    Returns:
        Int64 `[B, G, 1]`.
    """
    first = (_places(tokens) == 0).int().argmax(-1)[..., None]
    first = first.expand(len(tokens.counts), tokens.geometry.kv_heads, 1)
    own = tokens.column("signs", first)[:, :, 0]
    return priority.seeds(own, tokens.counts.to(own.device), tokens.config.seed)


def key_noises(tokens: Tokens) -> Tensor:
    """Return `-log2 u` for the random number `u` of each token, `[B, G, N]`.

    The values are integers in units of `1 / priority.UNIT`.
    """
    return priority.noise(_places(tokens), seeds(tokens))


def _places(tokens: Tokens) -> Tensor:
    """Return each token's position, counted from the first valid token, int64 `[B or 1, 1, N]`."""
    places = torch.arange(tokens.length, device=tokens.geometry.device)[None, None]
    if tokens.valid is None:
        return places
    return places - tokens.valid.int().argmax(-1)[:, None, None]


def _find(
    tokens: Tokens, queries: Queries, noises: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample candidates, as `find` does, with given random numbers.

    Args:
        tokens: Codes of all tokens.
        queries: Rotated queries.
        noises: Result of `key_noises`.
        limits: Number of candidates of each sequence, int64 `[B]`.
    """
    votes = valid_votes(tokens, queries)
    sizes = priority.sizes(votes, *vote_scales(tokens, queries))
    priorities = (sizes + noises).masked_fill(votes[:, :, 0] == priority.LEAST, priority.LEAST)
    thresholds = priority.thresholds(priorities, limits)
    ids: Tensor = tokens.ops.select.compact(priorities >= thresholds[..., 1:])
    own = sizes.gather(-1, ids.clamp_min(0))
    return ids, priority.log_chances(own, thresholds[..., :1])


def valid_votes(tokens: Tokens, queries: Queries) -> Tensor:
    """Return the coarse scores (votes) of all keys, int32 `[B, G, g, N]`.

    The score of a padded token is `priority.LEAST`.
    """
    votes = candidates.votes(tokens, queries)
    if tokens.valid is None:
        return votes
    return votes.masked_fill(~tokens.valid[:, None, None], priority.LEAST)


def vote_scales(tokens: Tokens, queries: Queries) -> tuple[Tensor, Tensor]:
    """Return the numbers that convert coarse scores (votes) to logarithms of attention weights.

    The estimated logarithm of a key's attention weight is `vote · gains + totals`. This function
    returns `gains` and `totals`, float32 `[B, G, g]` each. `priority.sizes` applies them.
    """
    scale, offsets = tokens.geometry.scale, queries.offsets
    gains = priority.gains(_vote_units(tokens, queries), scale)
    if offsets is None:
        return gains, torch.zeros_like(gains)
    some = priority.sampled_blocks(offsets.shape[-1]).to(offsets.device)
    return gains, priority.totals(offsets[..., some], scale)


def _vote_units(tokens: Tokens, queries: Queries) -> Tensor:
    """Return the inner product `q·k` that a coarse score (vote) of 1 represents.

    The result is float64 `[B, G, g]`.
    """
    assert tokens.weight_scale is not None
    peak = queries.voting.abs().amax(-1).double()
    scale = tokens.weight_scale[..., None].double()
    return peak * scale * (tokens.encoding.level / (tokens.query_max * FACTOR))


def candidate_logits(
    tokens: Tokens, queries: Queries, ids: Tensor, chances: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of the candidates, and the logits minus `log π`, both `[B, G, g, C]`.

    `π` is the probability with which a candidate was sampled. A sum of `exp(logit - log π)` over
    the candidates estimates the softmax sum over all keys, including those not sampled.
    """
    g = tokens.geometry
    logits = cap(estimates(tokens, queries, ids), g.scale, g.softcap)
    logits = logits.masked_fill((ids < 0)[:, :, None], -math.inf)
    return logits, logits - chances.masked_fill(ids < 0, 0)[:, :, None]


def _log_weight(tokens: Tokens, log_chances: Tensor, k: int | Tensor) -> Tensor:
    """Return the log weights of sampled rows.

    Args:
        tokens: For the option `sampling`.
        log_chances: Logarithms of the probabilities with which the rows were sampled, `[B, G, K]`.
        k: Number of sampled rows, or the number of each KV head, int64 `[B, G, 1]`.
    """
    tempered = tokens.config.sampling == "tempered"
    return -log_chances * priority.temper(k) if tempered else -log_chances
