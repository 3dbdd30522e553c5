"""Reference implementation of the first stages of a fused decode step with tiered votes.

Tiered votes are the coarse scores of the ParisKV paper. The preset `paper` uses them. After the
four stages below, `decode_step` continues with `select_rows` and `attend`.

In each subspace of 8 coordinates, a key belongs to one of 256 centroids. The centroids closest to
the query have a positive score. The vote of a key is the sum of the scores of its centroids over
all subspaces. The votes of all keys are stored in memory. Histograms of these votes give each query
head's best `C` keys exactly, without sampling.

1. `query_table`: rotate the query, and compute the score of each centroid (paper, A.1 and B.2.1).
2. `vote`: add up the scores of each key's centroids for each query head, and count how many keys
   have each vote (B.2.1).
3. `candidates`: take the `C` best keys of each query head. The candidates of a KV head are the
   union over its query heads.
4. `rerank_blocks`: estimate inner products from all bits of the codes, with a weight for each
   subspace (B.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.ops import coarse, fetch, rerank, select
from kvindex.pariskv.step_state import (
    EMPTY,
    Reranked,
    State,
    StepConfig,
    entry_of,
    id_of,
    operands_of,
    queries_of,
    rotated,
    up_of,
)

CHUNK, PIECES = 1024, 256
"""Votes are counted separately for `PIECES` ranges of tokens, which consist of whole chunks.

A chunk is `CHUNK` tokens.
"""

POINTS = 256
"""Upper bound of a key's vote, to which each subspace adds at most 6."""


def find_candidates(queries: Tensor, state: State, config: StepConfig) -> Reranked:
    """Find and rerank the candidates of queries `[B, H, D]`: run the four stages of this module."""
    query = query_table(queries, state, config)
    chosen = candidates(state, vote(state, query, config))
    return rerank_blocks(state, query, chosen, config)


@dataclass(frozen=True)
class QueryTable:
    """Results of `query_table`: the score of each centroid, and the query for the rerank.

    Attributes:
        operands: The rotated query, multiplied by `ups`. Each coordinate is stored as the sum of
            two float16 numbers, `[B, G, g, D, 2]`.
        ups: Powers of two that scale the query to the range of float16, float32 `[B, G, g]`.
        table: Score of each centroid in each subspace, uint8 `[B, G, g, M, 256]`. The coarse score
            (vote) of a key is the sum of the scores of its centroids.
        wrong: Int32 `[]`: 1 if a query is not finite or too large (`QUERY_LIMIT`), else 0.
    """

    operands: Tensor
    ups: Tensor
    table: Tensor
    wrong: Tensor


def query_table(queries: Tensor, state: State, config: StepConfig) -> QueryTable:
    """Rotate the query, and compute the scores of the centroids in each subspace.

    The centroids closest to the query get the highest scores.

    Raises:
        ValueError: `state.histogram` or `state.tiers` is None.
    """
    if state.histogram is None or state.tiers is None:
        raise ValueError("histogram, tiers: got None, but tiered votes need both tensors")
    directions, norms, wrong = rotated(queries, config)
    ups = up_of(norms)
    return QueryTable(
        operands=operands_of(directions * norms[..., None], ups),
        ups=ups,
        table=coarse.tier_table(directions, state.histogram, state.tiers),
        wrong=wrong,
    )


@dataclass(frozen=True)
class Voted:
    """Results of `vote`: the coarse scores (votes) of all keys, and histograms of the votes.

    Attributes:
        votes: Vote of each key, int32 `[B, G, g, N]`: the sum of the scores of its centroids.
        totals: Number of valid keys with each vote, int32 `[B, G, g, POINTS]`.
        pieces: The histogram `totals`, split by position: the tokens are divided into `PIECES`
            contiguous ranges, int32 `[B, G, g, PIECES, POINTS]`.
    """

    votes: Tensor
    totals: Tensor
    pieces: Tensor


def vote(state: State, query: QueryTable, config: StepConfig) -> Voted:
    """Compute the coarse scores (votes) of all keys, and count how many keys have each vote."""
    tokens = state.tokens
    votes = coarse.votes(config.layout.fields(state.codes, tokens)["signs"], query.table)
    chunks = -(-tokens // CHUNK)
    piece = torch.arange(tokens, device=votes.device) // (-(-chunks // PIECES) * CHUNK)
    bins = torch.zeros((*votes.shape[:3], PIECES * POINTS), dtype=torch.int32, device=votes.device)
    real = state.flags[:, None, None].expand_as(votes).int()
    bins.scatter_add_(-1, piece * POINTS + votes.long(), real)
    pieces = bins.view(*votes.shape[:3], PIECES, POINTS)
    return Voted(votes, pieces.sum(-2, dtype=torch.int32), pieces)


@dataclass(frozen=True)
class Candidates:
    """Results of `candidates`: the keys for which the rerank estimates inner products.

    Attributes:
        candidates: Token ids of these keys, int64 `[B, G, K]`. In other lists, such an int64
            packs a token id and a coarse score. Here the score is 0, because the rerank does not
            need it.
        candidate_counts: Number of these keys, int32 `[B, G]`.
    """

    candidates: Tensor
    candidate_counts: Tensor


def candidates(state: State, voted: Voted) -> Candidates:
    """Take the `C` keys with the best coarse scores (votes) for each query head, and form the union
    of these keys for each KV head.

    Of keys with equal votes, the keys with lower token ids are taken first.
    """
    ids = select.candidates(voted.votes, state.target[:, 0], state.flags)
    entries = entry_of(torch.zeros_like(ids, dtype=torch.int32), ids.clamp_min(0))
    return Candidates(entries.masked_fill(ids < 0, EMPTY), (ids >= 0).sum(-1, dtype=torch.int32))


def rerank_blocks(
    state: State, query: QueryTable, chosen: Candidates, config: StepConfig
) -> Reranked:
    """Estimate the candidates' inner products with the query from all bits of their codes."""
    codes = config.layout.unpack(state.codes, state.tokens)
    ids = id_of(chosen.candidates)
    own = {name: fetch.gather_rows(part, ids) for name, part in codes.items()}
    queries = queries_of(query.operands, query.ups)
    estimates = rerank.estimate(queries, **own, levels=config.levels).mT
    cuts = torch.tensor([-1, 0], dtype=torch.int32, device=ids.device)
    cuts = cuts.expand(*ids.shape[:2], 2)
    return Reranked.of(chosen.candidates, estimates, torch.zeros_like(ids), cuts, config)
