"""The first stages of a fused step by tiers, in plain torch: how `paper` finds candidates.

As `decode_step.py`, which goes on with `select_rows` and `attend`. Votes are looked up in a table
made for the query, with a list of candidates for each query head; votes of all keys are kept, and
candidates found from their histograms: exact, with no sample. An index counts the keys of each
centroid as they come.

1. query_table: the query is rotated; the points of each centroid (paper, A.1 and B.2.1).
2. vote: each key's points, for each head, and how many keys have how many (B.2.1).
3. candidates: the best `C` keys of each head; one that any head takes is a candidate.
4. rerank_blocks: estimates from all code bits, with a weight for each subspace (B.2.2).
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
"""Keys are counted by pieces too, each some chunks."""

POINTS = 256
"""More than a key can have: 6 of each subspace."""


def find_candidates(queries: Tensor, state: State, config: StepConfig) -> Reranked:
    """The four stages: candidates of queries `[B, H, D]`, with estimates."""
    query = query_table(queries, state, config)
    chosen = candidates(state, vote(state, query, config))
    return rerank_blocks(state, query, chosen, config)


@dataclass(frozen=True)
class QueryTable:
    """What `query_table` writes.

    operands: the rotated query as float16, `[B, G, g, D, 2]`, times ups, float32 `[B, G, g]`;
    table: points of centroids, uint8 `[B, G, g, M, 256]`; wrong: int32 `[]`.
    """

    operands: Tensor
    ups: Tensor
    table: Tensor
    wrong: Tensor


def query_table(queries: Tensor, state: State, config: StepConfig) -> QueryTable:
    """Rotate the query, and rank the centroids of each subspace by it.

    Raises ValueError for a state without tiers.
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
    """What `vote` writes.

    votes: points of keys, int32 `[B, G, g, N]`; totals: valid keys by points, int32 `[B, G, g,
    POINTS]`; pieces: the same of each piece of the tokens, int32 `[B, G, g, PIECES, POINTS]`.
    """

    votes: Tensor
    totals: Tensor
    pieces: Tensor


def vote(state: State, query: QueryTable, config: StepConfig) -> Voted:
    """Look up the points of all keys, and count."""
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
    """What `candidates` writes.

    candidates: entries, all of one vote, int64 `[B, G, K]`; candidate_counts: how many, int32 `[B,
    G]`.
    """

    candidates: Tensor
    candidate_counts: Tensor


def candidates(state: State, voted: Voted) -> Candidates:
    """The keys that any head takes: all above its cut, and of those at it the first."""
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
