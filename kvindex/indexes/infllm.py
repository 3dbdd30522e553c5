"""InfLLM: selects blocks of tokens by a few representative keys of each block.

Each key has a representative score, which is its mean inner product with the queries of the tokens
that follow it. The keys with the largest scores represent their block.

Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
Memory (NeurIPS 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.bases.pages import PagedIndex
from kvindex.bases.prompt_queries import are_real
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.ops import group
from kvindex.storage.columns import Columns
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, ascending
from kvindex.storage.state import OnHost

CHUNK = 4096
"""Keys scored at a time; bounds what is copied, not the result."""

NONE = float("-inf")
"""Representative score of a key that no observed query follows."""


@dataclass(frozen=True)
class InfLLMConfig:
    """Options of InfLLM.

    Args:
        page: Tokens per block (published: 128).
        representatives: Number of keys that represent a block for each query head (published: 4).
        span: Number of queries after a key over which its representative score is averaged
            (published: 4096, the size of the local window).
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 128
    representatives: int = 4
    span: int = 4096
    group: str = "mean_share"

    def __post_init__(self) -> None:
        for name in ("page", "representatives", "span"):
            check.at_least(name, getattr(self, name), 1)
        check.one_of("group", self.group, group.POLICIES)


class InfLLM(PagedIndex):
    """Selects whole blocks by the query's mean inner product with their representative keys.

    The keys with the largest representative scores represent their block. The representative score
    of a key is computed from the queries of later tokens that the caller passes to
    `observe_queries`; without such a query, the key has no score. A key without a score represents
    its block only if fewer than `representatives` keys of the block have a score. If no key of a
    block has a score, the keys with the largest norms represent the block. In `Hits.scores`, each
    row has the score of its block.

    Source: Xiao et al., InfLLM (NeurIPS 2024).
    """

    Config = InfLLMConfig
    statistics = ("_queries", "_positions")

    _queries: Columns  # queries that later keys may need, `[B, H, R, D]`
    _positions: OnHost  # their positions, int64 `[R]`

    def _cleared(self) -> None:
        self._queries, self._positions = Columns(), torch.zeros(0, dtype=torch.int64)

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store queries `[B, H, T, D]` of the tokens `positions`, to score the keys before them.

        If earlier calls stored queries at the first of these positions or later, these old queries
        are dropped, because their tokens have been replaced.
        """
        g = self.geometry
        shape = {"B": self._batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        check.tensor("positions", positions, {"T": queries.shape[2]}, torch.int64)
        if not queries.numel():
            return
        new = positions.cpu()
        past = int((self._positions < len(self)).sum())
        kept = max(int((self._positions < new[0]).sum()), past)
        if len(self._queries) and self._queries["queries"].shape[0] != queries.shape[0]:
            past = kept = len(self._positions)  # stored for another batch
        columns = self._queries
        if past or kept < len(columns):  # columns that may be in use are never overwritten
            columns = columns.after(past)
            columns.truncate(kept - past)
        columns.append({"queries": queries.detach()})
        self._queries = columns
        self._positions = torch.cat([self._positions[past:kept], new])

    def truncate(self, length: int) -> None:
        """Remove all tokens from position `length` on, and the queries of these tokens."""
        super().truncate(length)
        self._positions = self._positions[self._positions < length]
        self._queries.truncate(len(self._positions))

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the sequences of the batch, and their observed queries."""
        observed = self._batch is None and len(self._queries) > 0
        if observed:
            check.rows("batch_indices", batch_indices, self._queries["queries"].shape[0])
        super().reorder(batch_indices)
        if observed:
            self._queries = self._queries.reordered(batch_indices)

    def _with_reordered(self, batch_indices: Tensor) -> Columns:
        return self._queries.reordered(batch_indices)

    def _commit(self, statistics: Any) -> None:
        if isinstance(statistics, Columns):
            self._queries = statistics
        super()._commit(statistics)

    def _other_tensors(self) -> list[Tensor]:
        queries = self._queries
        return [queries["queries"]] if len(queries) else []

    # Blocks

    def _marks(self, keys: Tensor) -> Tensor:
        """Return the representative score of each key for each query head, float32 `[B, G, T, g]`.

        The score is `NONE` for a key if no query of a later token was observed.
        """
        g, (B, G, T, D) = self.geometry, keys.shape
        marks = torch.full((B, G, T, g.group_size), NONE, device=g.device)
        if not len(self._positions):
            return marks
        observed = self._queries["queries"]
        if observed.shape[0] != B:
            raise ValueError(
                f"keys: got a batch of {B}, but queries of {observed.shape[0]} sequences "
                "were observed"
            )
        if int(self._positions[-1]) <= len(self):
            return marks
        ids = torch.arange(len(self), len(self) + T)
        first = torch.searchsorted(self._positions, ids, right=True).to(g.device)
        after = torch.searchsorted(self._positions, ids + self.config.span, right=True).to(g.device)
        real = pad(are_real(observed).cumsum(1), (1, 0))
        sums = pad(
            observed.double().cumsum(2), (0, 0, 1, 0)
        )  # in double, so that differences of sums are accurate
        sums = sums.reshape(B, G, g.group_size, -1, D)
        for start in range(0, T, CHUNK):
            part = slice(start, start + CHUNK)
            count = real[:, after[part]] - real[:, first[part]]
            count = count[:, None, None, :, None]
            mean = sums[:, :, :, after[part]] - sums[:, :, :, first[part]]
            mean = (mean / count.clamp_min(1)).float()
            products = (mean * keys[:, :, None, part].float()).sum(-1)  # [B, G, g, T]
            marks[:, :, part] = products.masked_fill(count[..., 0] == 0, NONE).mT
        return marks

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        scores = keys.float().norm(dim=-1, keepdim=True)
        if marks is not None:
            known = ((marks > NONE) & present).any(3, keepdim=True)
            lowest = torch.finfo(torch.float32).min
            scores = torch.where(known, marks.clamp_min(lowest), scores)
        scores = scores.masked_fill(~present, NONE)  # [B, G, pages, P, g]
        best = scores.argsort(dim=3, descending=True, stable=True)
        best = best[:, :, :, : self.config.representatives]
        chosen = torch.zeros_like(scores).scatter_(3, best, 1.0) * present
        means = chosen.mT @ keys.float() / chosen.sum(3).clamp_min(1)[..., None]
        return {"representatives": means.to(keys.dtype)}  # [B, G, pages, g, D]

    def _page_layout(self, pages: str) -> Layout:
        g, P = self.geometry, int(self.config.page)
        return {
            "codes.representatives": TensorSpec(f"B G {pages} g D", g.dtype),
            "codes.marks": TensorSpec(f"B G {pages} {P} g", torch.float32, infinite=True),
        }

    def _layout(self, sizes: StateSizes) -> Layout:
        layout = super()._layout(sizes)
        layout["statistics.positions"] = TensorSpec(
            "R",
            torch.int64,
            least=0,
            allowed="ascending",
            rule=lambda state: ascending(state["statistics.positions"]),
        )
        if sizes.has("statistics.queries"):
            layout["statistics.queries.queries"] = TensorSpec("B H R D", self.geometry.dtype)
        else:
            layout["statistics.positions"] = TensorSpec("0", torch.int64)
        return layout

    def _page_scores(self, queries: Tensor) -> Tensor:
        means = self._codes["representatives"].float().transpose(2, 3)  # [B, G, g, pages, D]
        if self.config.group == "mean_query":
            means = means.mean(2, keepdim=True)
        return (means @ queries[..., None])[..., 0]

    def _scanned(self) -> list[Tensor]:
        return [self._codes["representatives"]]
