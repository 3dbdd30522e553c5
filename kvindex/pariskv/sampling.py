"""Sample candidates by their votes, then rows by their estimates, each with a known probability.

Both samples use the same random number per key. A key is left out once, not twice, so the
probability of a row is the smaller of its two probabilities (docs/decisions/0025).
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
    """Return `k` sampled rows with log weights, which correct for the rows that were left out."""
    noises = _noises(tokens)
    ids, chances = _find(tokens, queries, noises, k)
    logits, weighted = _logits(tokens, queries, ids, chances)
    sizes = priority.root_mean_square(logits - weighted.logsumexp(-1, keepdim=True))
    sizes = sizes.masked_fill(ids < 0, -math.inf)  # a sequence may have no candidate
    noises = noises.expand(*ids.shape[:2], -1).gather(-1, ids.clamp_min(0)) * priority.NATS
    scores, at, last = priority.sample(sizes, noises, k)
    unused, at = at < 0, at.clamp_min(0)
    log_weight = _log_weight(tokens, torch.minimum(last, chances.gather(-1, at)), k)
    log_weight = log_weight.masked_fill(unused, -math.inf)
    found = ids.gather(-1, at).masked_fill(unused, UNUSED)
    return Hits(found, scores, log_weight.repeat_interleave(tokens.geometry.group_size, dim=1))


def candidate_coverage(tokens: Tokens, queries: Queries, k: int) -> Tensor:
    """Estimate the fraction of attention weight that candidates for `k` rows hold, `[B, H]`.

    The fraction is 1 in a sequence without valid tokens.
    """
    every = _logits(tokens, queries, *find(tokens, queries, k))
    found, whole = (logits.logsumexp(-1) for logits in every)
    return (found - whole).exp().masked_fill(whole == -math.inf, 1.0).flatten(1)


def find(tokens: Tokens, queries: Queries, k: int) -> tuple[Tensor, Tensor]:
    """Sample candidates for `k` rows: ids `[B, G, C]` and their `log π`, float32.

    The ids ascend and are padded with -1.
    """
    return _find(tokens, queries, _noises(tokens), k)


def seeds(tokens: Tokens) -> Tensor:
    """Return the seed of each head's noise, int64 `[B, G, 1]`, from the first valid key's signs."""
    first = (_places(tokens) == 0).int().argmax(-1)[..., None]
    first = first.expand(len(tokens.counts), tokens.geometry.kv_heads, 1)
    own = tokens.column("signs", first)[:, :, 0]
    return priority.seeds(own, tokens.counts.to(own.device), tokens.config.seed)


def _noises(tokens: Tokens) -> Tensor:
    """Return `-log2 u` of each token's random number `u`, `[B, G, N]`, in integer units."""
    return priority.noise(_places(tokens), seeds(tokens))


def _places(tokens: Tokens) -> Tensor:
    """Return positions counted from the first valid token, int64 `[B or 1, 1, N]`."""
    places = torch.arange(tokens.length, device=tokens.geometry.device)[None, None]
    if tokens.valid is None:
        return places
    return places - tokens.valid.int().argmax(-1)[:, None, None]


def _find(tokens: Tokens, queries: Queries, noises: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the result of `find` for given random numbers."""
    votes = _valid_votes(tokens, queries)
    sizes = priority.sizes(votes, *_scales(tokens, queries))
    priorities = (sizes + noises).masked_fill(votes[:, :, 0] == priority.LEAST, priority.LEAST)
    thresholds = priority.thresholds(priorities, tokens.config.limits(tokens.counts, k)[1])
    ids: Tensor = tokens.ops.select.compact(priorities >= thresholds[..., 1:])
    own = sizes.gather(-1, ids.clamp_min(0))
    return ids, priority.log_chances(own, thresholds[..., :1])


def _valid_votes(tokens: Tokens, queries: Queries) -> Tensor:
    """Return the votes of all keys, int32 `[B, G, g, N]`, with the lowest value for padding."""
    votes = candidates.votes(tokens, queries)
    if tokens.valid is None:
        return votes
    return votes.masked_fill(~tokens.valid[:, None, None], priority.LEAST)


def _scales(tokens: Tokens, queries: Queries) -> tuple[Tensor, Tensor]:
    """Return gains and totals `[B, G, g]`, with which `priority.sizes` converts votes to sizes."""
    scale, offsets = tokens.geometry.scale, queries.offsets
    gains = priority.gains(_vote_units(tokens, queries), scale)
    if offsets is None:
        return gains, torch.zeros_like(gains)
    some = priority.sampled_blocks(offsets.shape[-1]).to(offsets.device)
    return gains, priority.totals(offsets[..., some], scale)


def _vote_units(tokens: Tokens, queries: Queries) -> Tensor:
    """Return the inner product `q·k` that one unit of a vote represents, float64 `[B, G, g]`."""
    assert tokens.weight_scale is not None
    peak = queries.voting.abs().amax(-1).double()
    scale = tokens.weight_scale[..., None].double()
    return peak * scale * (tokens.encoding.level / (tokens.query_max * FACTOR))


def _logits(
    tokens: Tokens, queries: Queries, ids: Tensor, chances: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of candidates, and the logits minus `log π`, both `[B, G, g, C]`.

    Subtracting `log π` divides the exponential by the candidate's probability, so that each
    candidate also stands for keys that were not sampled.
    """
    g = tokens.geometry
    logits = cap(estimates(tokens, queries, ids), g.scale, g.softcap)
    logits = logits.masked_fill((ids < 0)[:, :, None], -math.inf)
    return logits, logits - chances.masked_fill(ids < 0, 0)[:, :, None]


def _log_weight(tokens: Tokens, log_chances: Tensor, k: int) -> Tensor:
    """Return the log weight of rows from the logarithms of their probabilities."""
    tempered = tokens.config.sampling == "tempered"
    return -log_chances * priority.temper(k) if tempered else -log_chances
