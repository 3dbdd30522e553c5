"""Select rows by their estimated inner products: the best `k` rows, or as many as are needed to
reach a given fraction of the attention weight (coverage).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops.coverage import SAMPLE, log_total, log_weights, sample, within
from kvindex.pariskv import candidates
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex.pariskv.rerank import errors, estimates


def search(tokens: Tokens, queries: Queries, k: int) -> Hits:
    """Select the `k` rows with the largest estimated inner products."""
    return _ranked(tokens, queries, k)[0]


def search_coverage(tokens: Tokens, queries: Queries, k: int, coverage: float) -> Hits:
    """Select the best rows until their estimated attention weight reaches `coverage`, at most `k`.

    `coverage` is a fraction of the attention weight of all tokens. The attention weight of tokens
    that are not candidates is estimated from a sample of these tokens.
    """
    hits, ids, slots = _ranked(tokens, queries, k)
    left = _left(tokens, ids)
    rest = tokens.ops.select.compact(sample(left, SAMPLE))
    known, others = (_log_weights(tokens, queries, some) for some in (ids, rest))
    total = log_total(known, others, left.sum(-1))
    return within(hits, slots, known, total, coverage)


def _ranked(tokens: Tokens, queries: Queries, k: int) -> tuple[Hits, Tensor, Tensor]:
    """Return the best `k` rows, and the candidates from which they were selected.

    Returns:
        The rows; the token ids of all candidates `[B, G, C]`; and the position of each row among
        the candidates `[B, G, k]`.
    """
    g, ops, policy = tokens.geometry, tokens.ops, tokens.config.group
    ids = candidates.find(tokens, queries, k)
    estimated = estimates(tokens, queries, ids)
    agreed = ops.group.agree(estimated, policy, scale=g.scale, softcap=g.softcap)
    scores, slots = ops.select.top_k(agreed, k)  # ids ascend: equal scores stay in order
    found = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED)
    return Hits(found, scores), ids, slots


def _left(tokens: Tokens, ids: Tensor) -> Tensor:
    """Return a mask of the valid tokens that are not candidates, bool `[B, G, N]`."""
    N, shape = tokens.length, (*ids.shape[:2], tokens.length + 1)
    left = torch.ones(shape, dtype=torch.bool, device=tokens.geometry.device)
    left = left.scatter_(-1, torch.where(ids < 0, N, ids), False)[..., :-1]
    return left if tokens.valid is None else left & tokens.valid[:, None]


def _log_weights(tokens: Tokens, queries: Queries, ids: Tensor) -> Tensor:
    """Estimate the logarithm of each row's unnormalized attention weight, float32 `[B, G, g, C]`.

    An unnormalized attention weight is a row's term `exp(logit)` of the sum in the softmax.
    """
    g, of = tokens.geometry, (tokens, queries, ids)
    return log_weights(estimates(*of), errors(*of), scale=g.scale, softcap=g.softcap)
