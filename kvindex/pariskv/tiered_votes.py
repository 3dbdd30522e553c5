"""Specification of the first stages of a fused step with tiered votes (preset `paper`).

After these stages, `decode_step` continues with `select_rows` and `attend`. A key has one centroid
in each subspace, and its vote is the sum of the points that a table, made for the query, gives to
its centroids. The votes of all keys are stored. Each query head's candidates are found exactly from
histograms of votes, without a sample. Appends update the number of keys per centroid.

1. `query_table`: rotate the query, and give points to each centroid (paper, A.1 and B.2.1).
2. `vote`: add up each key's points for each head, and count the keys with each number of points
   (B.2.1).
3. `candidates`: take the best `C` keys of each head; the union over heads are the candidates.
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
"""Keys in a chunk, and the largest number of runs of chunks in which votes are counted."""

POINTS = 256
"""Upper bound of a key's points: 6 in each subspace."""


def find_candidates(queries: Tensor, state: State, config: StepConfig) -> Reranked:
    """Run the four stages for queries `[B, H, D]`, and return candidates with their estimates."""
    query = query_table(queries, state, config)
    chosen = candidates(state, vote(state, query, config))
    return rerank_blocks(state, query, chosen, config)


@dataclass(frozen=True)
class QueryTable:
    """Results of `query_table`.

    Attributes:
        operands: The rotated query times `ups` as two float16 numbers, `[B, G, g, D, 2]`.
        ups: Powers of two, float32 `[B, G, g]`.
        table: Points of centroids, uint8 `[B, G, g, M, 256]`.
        wrong: Int32 `[]`, 1 if a query is out of range.
    """

    operands: Tensor
    ups: Tensor
    table: Tensor
    wrong: Tensor


def query_table(queries: Tensor, state: State, config: StepConfig) -> QueryTable:
    """Rotate the query, and rank the centroids of each subspace by it.

    Raises:
        ValueError: The state has no histogram or no tiers.
    """
    if state.histogram is None or state.tiers is None:
        raise ValueError("histogram, tiers: got None, allowed are tensors")
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
    """Results of `vote`.

    Attributes:
        votes: Points of keys, int32 `[B, G, g, N]`.
        totals: Number of valid keys with each number of points, int32 `[B, G, g, POINTS]`.
        pieces: The same numbers for each of `PIECES` runs of chunks, int32 `[B, G, g, PIECES,
            POINTS]`.
    """

    votes: Tensor
    totals: Tensor
    pieces: Tensor


def vote(state: State, query: QueryTable, config: StepConfig) -> Voted:
    """Look up the points of all keys, and count the keys with each number of points."""
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
    """Results of `candidates`.

    Attributes:
        candidates: Entries of the candidates, all with a vote of 0, int64 `[B, G, K]`.
        candidate_counts: Number of candidates, int32 `[B, G]`.
    """

    candidates: Tensor
    candidate_counts: Tensor


def candidates(state: State, voted: Voted) -> Candidates:
    """Take each head's `C` best keys: those with votes above its cut, then the first at the cut."""
    ids = select.candidates(voted.votes, state.target[:, 0], state.flags)
    entries = entry_of(torch.zeros_like(ids, dtype=torch.int32), ids.clamp_min(0))
    return Candidates(entries.masked_fill(ids < 0, EMPTY), (ids >= 0).sum(-1, dtype=torch.int32))


def rerank_blocks(
    state: State, query: QueryTable, chosen: Candidates, config: StepConfig
) -> Reranked:
    """Estimate the candidates' inner products with the query."""
    codes = config.layout.unpack(state.codes, state.tokens)
    ids = id_of(chosen.candidates)
    own = {name: fetch.gather_rows(part, ids) for name, part in codes.items()}
    queries = queries_of(query.operands, query.ups)
    estimates = rerank.estimate(queries, **own, levels=config.levels).mT
    cuts = torch.tensor([-1, 0], dtype=torch.int32, device=ids.device)
    cuts = cuts.expand(*ids.shape[:2], 2)
    return Reranked.of(chosen.candidates, estimates, torch.zeros_like(ids), cuts, config)
