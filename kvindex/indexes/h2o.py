"""H2O: retains the rows that have received the most attention so far, and the latest rows.

Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
(NeurIPS 2023), Algorithm 1. The paper calls the most attended rows heavy hitters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import NEVER, ObservingEvictionIndex, are_valid, attention_received
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.ops.coarse import ceil_fraction
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, below, distinct


@dataclass(frozen=True)
class H2OConfig:
    """Options of H2O.

    Args:
        budget: Rows to retain per KV head (published: 1024 heavy hitters and 1024 recent rows).
        recent: Fraction of the budget that is reserved for the latest rows (published: half).
        most: Number of the prompt's last queries whose attention weights are added up. None: all
            queries of the prompt (published).
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    budget: int = 2048
    recent: float = 0.5
    most: int | None = None
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("budget", self.budget, 1)
        check.within("recent", self.recent, 0, 1)
        if self.most is not None:
            check.at_least("most", self.most, 1)
        check.one_of("group", self.group, group.POLICIES)


class H2O(ObservingEvictionIndex):
    """Permanently evicts the rows that have received the least attention, except the latest rows.

    The score of a row is the sum of the attention weights that it has received from the queries of
    the prompt and from each query that is observed later. The weights from the prompt are added at
    `end_prompt`. Rows are evicted whenever scores have been updated and there are more than
    `budget` rows.

    The learned tensors are:

    - `ids` int64 `[B, G, C]`: token ids of the rows that were retained after the last update,
      ascending, with -1 in unused places, which come first.
    - `scores` float32 `[B, G, C]`: scores of these rows.

    Rows from the token `_scored` on were appended after the last update.

    Source: Zhang et al., H2O (NeurIPS 2023), Algorithm 1.
    """

    Config = H2OConfig

    statistics = ("_scored",)

    _scored: int

    @property
    def depends_on_queries(self) -> bool:
        """True, because the queries of each decode step change which rows later steps can find."""
        return True

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Add the attention weights of queries `[B, H, T, D]` to the scores of the rows.

        Queries of the prompt are stored first, and their weights are added at `end_prompt`. NaN and
        infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if not self._prompt_ended:
            self._sample_queries(queries, positions, self.config.most or 2**62)
        elif len(self) and len(positions):
            self._accumulate(queries, positions)

    def end_prompt(self) -> None:
        """End the prompt: add the attention weights of its queries to the scores, then evict rows.

        If no query was observed, no row is evicted.
        """
        if len(self) and self._observed:
            self._accumulate(self._observed.queries, self._observed.positions)
        self._observed, self._prompt_ended = None, True

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on.

        Rows stay evicted, and scores keep the attention weights of removed queries.
        """
        super().truncate(length)
        self._scored = min(self._scored, len(self))

    # Heavy hitters

    def _accumulate(self, queries: Tensor, positions: Tensor) -> None:
        """Add the attention weights of queries `[B, H, T, D]` to the scores, and evict rows."""
        ids, scores = self._rows()
        keys, counted = self._store.gather(ids).keys, are_valid(queries, positions, self.valid)
        scores = scores + attention_received(self.geometry, queries, positions, counted, keys, ids)
        ids, scores = self._evict(ids, scores)
        self._learned, self._scored = {"ids": ids, "scores": scores}, len(self)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the ids `[B, G, C]` and the scores of the retained rows and of all newer rows."""
        new = self._ids_from(self._scored)
        scores = torch.zeros(new.shape, device=new.device)
        if "ids" not in self._learned:
            return new, scores
        parts = (self._learned["ids"], new), (self._learned["scores"], scores)
        return torch.cat(parts[0], dim=-1), torch.cat(parts[1], dim=-1)

    def _evict(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose which `budget` rows to retain, and return their ids and scores.

        `ids` and `scores`, `[B, G, C]`, are those of all rows that could be retained.
        """
        budget = self.config.budget
        if ids.shape[-1] <= budget:
            return ids, scores
        present = ids >= 0
        rank = present.cumsum(-1)
        recent = rank > rank[..., -1:] - ceil_fraction(budget, self.config.recent)
        order = scores.masked_fill(recent, float("inf")).masked_fill(~present, NEVER)
        slots = self.ops.select.top_k(order, budget)[1].sort(-1).values
        kept, got = (t.gather(-1, slots.clamp_min(0)) for t in (ids, scores))
        return kept.masked_fill(slots < 0, UNUSED), got.masked_fill(slots < 0, 0)

    def _retained(self) -> Tensor:
        ids, scores = self._rows()
        return self._evict(ids, scores)[0] if "ids" in self._learned else ids

    def _layout(self, sizes: StateSizes) -> Layout:
        layout, last = super()._layout(sizes), sizes.length - 1
        layout["statistics.scored"] = TensorSpec("", torch.int64, least=0, most=sizes.length)
        if sizes.has("learned"):
            layout["learned.ids"] = TensorSpec(
                f"B G C<={self.config.budget}",
                torch.int64,
                least=UNUSED,
                most=last,
                allowed="distinct, and below statistics.scored",
                rule=lambda state: (
                    distinct(state["learned.ids"])
                    & below(state["learned.ids"], state["statistics.scored"])
                ),
            )
            layout["learned.scores"] = TensorSpec("B G C", torch.float32, least=0)
        return layout

    # Methods that the base class calls

    def _scanned(self) -> list[Tensor]:
        return [*super()._scanned(), *self._learned.values()]

    def _learned_before(self, length: int) -> Codes:
        if "ids" not in self._learned:
            return self._learned
        removed = self._learned["ids"] >= length
        ids, scores = self._learned["ids"], self._learned["scores"]
        return {"ids": ids.masked_fill(removed, UNUSED), "scores": scores.masked_fill(removed, 0)}

    def _cleared(self) -> None:
        super()._cleared()
        self._scored = 0
