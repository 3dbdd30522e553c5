"""Rows drawn in proportion to their shares, among candidates that are drawn by votes.

Both by the same noise, so that what is left out twice counts once (docs/decisions/0025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops import priority
from kvindex.ops.attention import cap
from kvindex.ops.codes import FACTOR
from kvindex.pariskv import candidates
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex.pariskv.rerank import estimates


def search(tokens: Tokens, queries: Queries, k: int) -> Hits:
    """`k` rows, each with the logarithm of how many like it it stands for."""
    noises = _noises(tokens)
    ids, chances = _find(tokens, queries, noises, k)
    logits, weighted = _logits(tokens, queries, ids, chances)
    sizes = priority.root_mean_square(logits - weighted.logsumexp(-1, keepdim=True))
    sizes = sizes.masked_fill(ids < 0, -math.inf)  # a row of the batch may have no candidate
    noises = noises.expand(*ids.shape[:2], -1).gather(-1, ids.clamp_min(0)) * priority.NATS
    scores, at, last = priority.sample(sizes, noises, k)
    unused, at = at < 0, at.clamp_min(0)
    log_weight = _log_weight(tokens, torch.minimum(last, chances.gather(-1, at)), k)
    log_weight = log_weight.masked_fill(unused, -math.inf)
    found = ids.gather(-1, at).masked_fill(unused, UNUSED)
    return Hits(found, scores, log_weight.repeat_interleave(tokens.geometry.group_size, dim=1))


def candidate_coverage(tokens: Tokens, queries: Queries, k: int) -> Tensor:
    """Estimate the fraction of the attention that candidates for `k` rows hold, float32 `[B, H]`.

    1 in a sequence without a valid token, where nothing is left out.
    """
    every = _logits(tokens, queries, *find(tokens, queries, k))
    held, whole = (logits.logsumexp(-1) for logits in every)
    return (held - whole).exp().masked_fill(whole == -math.inf, 1.0).flatten(1)


def find(tokens: Tokens, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
    """Candidates for `k` rows: ids `[B, G, C]`, ascending, then -1, and `log π`, float32."""
    return _find(tokens, queries, _noises(tokens), k)


def seeds(tokens: Tokens) -> Tensor:
    """Seeds of `priority.noise`, int64 `[B, G, 1]`: of the first valid key's signs."""
    first = (_places(tokens) == 0).int().argmax(-1)[..., None]
    first = first.expand(len(tokens.counts), tokens.geometry.kv_heads, 1)
    own = tokens.column("signs", first)[:, :, 0]
    return priority.seeds(own, tokens.counts.to(own.device), tokens.config.seed)


def _noises(tokens: Tokens) -> Tensor:
    """What a token's size is drawn with, `[B, G, N]`."""
    return priority.noise(_places(tokens), seeds(tokens))


def _places(tokens: Tokens) -> Tensor:
    """Positions counted from the first valid token, int64 `[B or 1, 1, N]`."""
    places = torch.arange(tokens.length, device=tokens.geometry.device)[None, None]
    if tokens.valid is None:
        return places
    return places - tokens.valid.int().argmax(-1)[:, None, None]


def _find(tokens: Tokens, queries: Queries, noises: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `find`, with such noises."""
    votes = _valid_votes(tokens, queries)
    sizes = priority.sizes(votes, *_scales(tokens, queries))
    priorities = (sizes + noises).masked_fill(votes[:, :, 0] == priority.LEAST, priority.LEAST)
    thresholds = priority.thresholds(priorities, tokens.config.limits(tokens.counts, k)[1])
    ids: Tensor = tokens.ops.select.compact(priorities >= thresholds[..., 1:])
    own = sizes.gather(-1, ids.clamp_min(0))
    return ids, priority.log_chances(own, thresholds[..., :1])


def _valid_votes(tokens: Tokens, queries: Queries) -> Tensor:
    """Votes of all keys int32 `[B, G, g, N]`, the least that there is of those not valid."""
    votes = candidates.votes(tokens, queries)
    if tokens.valid is None:
        return votes
    return votes.masked_fill(~tokens.valid[:, None, None], priority.LEAST)


def _scales(tokens: Tokens, queries: Queries) -> tuple[Tensor, Tensor]:
    """What `priority.sizes` makes shares of votes with: gains and totals, `[B, G, g]`."""
    scale, offsets = tokens.geometry.scale, queries.offsets
    gains = priority.gains(_vote_units(tokens, queries), scale)
    if offsets is None:
        return gains, torch.zeros_like(gains)
    some = priority.sampled_blocks(offsets.shape[-1]).to(offsets.device)
    return gains, priority.totals(offsets[..., some], scale)


def _vote_units(tokens: Tokens, queries: Queries) -> Tensor:
    """`q·k` that a vote stands for, float64 `[B, G, g]`."""
    assert tokens.weight_scale is not None
    peak = queries.voting.abs().amax(-1).double()
    scale = tokens.weight_scale[..., None].double()
    return peak * scale * (tokens.encoding.level / (tokens.query_max * FACTOR))


def _logits(
    tokens: Tokens, queries: Queries, ids: Tensor, chances: Tensor
) -> tuple[Tensor, Tensor]:
    """Of candidates, float32 `[B, G, g, C]`: as they are estimated, and each for those like it."""
    g = tokens.geometry
    logits = cap(estimates(tokens, queries, ids), g.scale, g.softcap)
    logits = logits.masked_fill((ids < 0)[:, :, None], -math.inf)
    return logits, logits - chances.masked_fill(ids < 0, 0)[:, :, None]


def _log_weight(tokens: Tokens, log_chances: Tensor, k: int) -> Tensor:
    """The logarithm of what a row counts for, of that of its chance."""
    tempered = tokens.config.sampling == "tempered"
    return -log_chances * priority.temper(k) if tempered else -log_chances
