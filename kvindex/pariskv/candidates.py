"""Coarse stage of a search: choose the keys with the best coarse scores (votes) as candidates.

A vote is an integer score of a key for a query head, computed mainly from the key's sign bits.

Source: ParisKV, section B.2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.pariskv.inputs import Queries, Tokens


def find(tokens: Tokens, queries: Queries, k: int) -> Tensor:
    """Choose the candidates. Only for these keys, the rerank estimates the inner product with the
    query.

    With the option `coarse="none"`, or if the index has at most `single_stage_below` keys, all
    valid keys are candidates.

    Args:
        tokens: Codes of all tokens.
        queries: Rotated queries.
        k: Rows that the search selects per KV head.

    Returns:
        Token ids, int64 `[B, G, C]`, ascending and padded with -1.
    """
    config, select = tokens.config, tokens.ops.select
    if config.coarse == "none" or int(tokens.counts.max()) <= config.single_stage_below:
        ids: Tensor = select.compact(_all(tokens))
        return ids
    tier_bounds, limits = config.limits(tokens.counts, k)
    every = votes(tokens, queries, tier_bounds.to(tokens.geometry.device))
    if config.candidates_per == "group":
        every = every.amax(2, keepdim=True)
    ids = select.candidates(every, limits, tokens.valid)
    return ids


def _all(tokens: Tokens) -> Tensor:
    """Return the mask of all valid tokens, bool `[B, G, N]`."""
    g, flags = tokens.geometry, tokens.valid
    if flags is None:
        shape = len(tokens.counts), tokens.length
        flags = torch.ones(shape, dtype=torch.bool, device=g.device)
    return flags[:, None].expand(-1, g.kv_heads, -1)


def votes(tokens: Tokens, queries: Queries, tier_bounds: Tensor | None = None) -> Tensor:
    """Compute the coarse score (vote) of every key for each query head.

    Args:
        tokens: Codes of all tokens.
        queries: Rotated queries.
        tier_bounds: The first result of `ParisKVConfig.limits`, on the device of the index. Only
            `coarse="tiered_votes"` needs it.

    Returns:
        Votes, int32 `[B, G, g, N]`.
    """
    own = _table(tokens, queries, tier_bounds), _factors(tokens), _offsets(tokens, queries)
    table, center, vote = own[0], tokens.config.center, tokens.ops.coarse.votes
    every = zip(tokens.parts, *own[1:], strict=True)
    return torch.cat(
        [vote(part["signs"], table, factors, offsets, center) for part, factors, offsets in every],
        dim=-1,
    )


def _table(tokens: Tokens, queries: Queries, tier_bounds: Tensor | None) -> Tensor:
    """Compute the table from which coarse scores are added up.

    For each subspace and each pattern of signs, it contains the number to add to the scores of keys
    with this pattern.
    """
    coarse, directions = tokens.ops.coarse, queries.voting_directions
    if tokens.config.coarse == "tiered_votes":
        table: Tensor = coarse.tier_table(directions, tokens.histogram, tier_bounds)
    else:
        table = coarse.dot_table(directions, tokens.query_max)
    return table


def _factors(tokens: Tokens) -> list[Tensor | None]:
    """Return the integers by which coarse scores (votes) are multiplied, one for each key.

    The integers are proportional to the weights of the keys. `tokens.parts` divides the codes of
    the keys into several parts, and the result contains one tensor for each part. If votes ignore
    the weights of the keys, it contains None for each part.
    """
    if not tokens.config.weighs_votes:
        return [None] * len(tokens.parts)
    factors, known = tokens.ops.codes.factors, tokens.encoding.factors
    return [factors(part["weights"], tokens.weight_scale, known) for part in tokens.parts]


def _offsets(tokens: Tokens, queries: Queries) -> list[Tensor | None]:
    """Return one number for each block: what its center adds to the coarse score of each key.

    `tokens.parts` divides the codes of the keys into several parts, and the result contains one
    tensor for each part. If blocks have no centers, it contains None for each part.
    """
    if not tokens.config.weighs_votes or queries.offsets is None:
        return [None] * len(tokens.parts)
    rounding = tokens.query_max, tokens.weight_scale, tokens.encoding.level
    every = tokens.ops.coarse.dot_offsets(queries.offsets, queries.voting, *rounding)
    return [*every.split([part["centers"].shape[2] for part in tokens.parts], dim=-1)]
