"""H2O: keeps the rows that have received the most attention so far, and the latest rows.

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
from kvindex.storage.layout import Held, Layout, TensorSpec, below, distinct


@dataclass(frozen=True)
class H2OConfig:
    """Options of H2O.

    Args:
        budget: Rows to retain per KV head (published: 1024 heavy hitters and 1024 recent rows).
        recent: Fraction of the budget for the latest rows (published: half).
        most: Number of the prompt's last queries whose attention counts; None for all (published).
        group: How the query heads of a group rank the retained rows (`kvindex.ops.group`).
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
    """Evicts, for good, the row with the least accumulated attention among all but the latest.

    The attention of queries is counted at `end_prompt` for the prompt's queries, and then whenever
    a query is observed. If there are more than `budget` rows at that time, rows are evicted.

    The learned tensors are `ids` and `scores`. `ids`, int64 `[B, G, C]`, are the rows retained
    after the last count, ascending; unused places come first and are -1. `scores`, float32 `[B, G,
    C]`, are the sums of the attention weights that each row has received. Rows from `_scored` on
    have received none yet.

    Source: Zhang et al., H2O (NeurIPS 2023), Algorithm 1.
    """

    Config = H2OConfig

    statistics = ("_scored",)

    _scored: int

    @property
    def depends_on_queries(self) -> bool:
        """Always True, because the attention of each step changes the scores for the next step."""
        return True

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Count the attention weights of queries `[B, H, T, D]` of the newest tokens.

        Queries of the prompt are stored and counted at `end_prompt`. Numbers that are not finite
        count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if not self._prompt_ended:
            self._sample_queries(queries, positions, self.config.most or 2**62)
        elif len(self) and len(positions):
            self._accumulate(queries, positions)

    def end_prompt(self) -> None:
        """End the prompt: count the attention weights of its queries, and evict rows."""
        if len(self) and self._observed:
            self._accumulate(self._observed.queries, self._observed.positions)
        self._observed, self._prompt_ended = None, True

    def truncate(self, length: int) -> None:
        """Truncate the index. Evicted rows stay evicted, and counted attention stays counted."""
        super().truncate(length)
        self._scored = min(self._scored, len(self))

    # Heavy hitters

    def _accumulate(self, queries: Tensor, positions: Tensor) -> None:
        """Add the attention weights of queries `[B, H, T, D]` to the retained rows, and evict."""
        ids, scores = self._rows()
        keys, counted = self._store.gather(ids).keys, are_valid(queries, positions, self.valid)
        scores = scores + attention_received(self.geometry, queries, positions, counted, keys, ids)
        ids, scores = self._evict(ids, scores)
        self._learned, self._scored = {"ids": ids, "scores": scores}, len(self)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the ids `[B, G, C]` of the retained and the newer rows, and their scores."""
        new = self._ids_from(self._scored)
        scores = torch.zeros(new.shape, device=new.device)
        if "ids" not in self._learned:
            return new, scores
        parts = (self._learned["ids"], new), (self._learned["scores"], scores)
        return torch.cat(parts[0], dim=-1), torch.cat(parts[1], dim=-1)

    def _evict(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `budget` rows of ids `[B, G, C]` that remain, and their scores."""
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

    def _layout(self, held: Held) -> Layout:
        layout, last = super()._layout(held), held.length - 1
        layout["statistics.scored"] = TensorSpec("", torch.int64, least=0, most=held.length)
        if held.has("learned"):
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
