"""H2O: eviction that retains heavy hitters (most attended rows so far) and the latest rows.

Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
(NeurIPS 2023), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import NEVER, ObservingEvictionIndex, are_valid, attention_received
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.ops.coarse import ceil_share
from kvindex.storage.layout import Held, Layout, TensorSpec, below, distinct


@dataclass(frozen=True)
class H2OConfig:
    """Configuration of H2O.

    budget: retained rows (published: 1024 and 1024); recent: the share of them that are the latest
    (published: half), the others are heavy hitters; most: queries of the prompt that count, its
    last ones, or None for all (published); group: how query heads agree on the order of retained
    rows.
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
    """Evicts, for good, the row that was attended to least among all but the latest.

    Every row is retained until the first queries after an append beyond the budget: those of the
    prompt at `end_prompt`, then each that is observed. Learned: `ids` int64 `[B, G, C]`, retained
    after the last of them, ascending, -1 (first) for none; `scores` float32 `[B, G, C]`, the
    attention that each has received. Rows from `_scored` on have received none yet.
    """

    Config = H2OConfig

    statistics = ("_scored",)

    _scored: int

    @property
    def depends_on_queries(self) -> bool:
        """Always True: each step's attention counts for the next."""
        return True

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Count the attention of the newest queries `[B, H, T, D]`, ids int64 `[T]`.

        Until `end_prompt` they wait for it. What is not finite in a query counts as 0. Raises
        ValueError or TypeError for a wrong tensor.
        """
        queries = self._checked_queries(queries, positions)
        if not self._sealed:
            self._sample_queries(queries, positions, self.config.most or 2**62)
        elif len(self) and len(positions):
            self._accumulate(queries, positions)

    def end_prompt(self) -> None:
        """End the prompt: count the attention of its queries, and evict rows."""
        if len(self) and self._observed:
            self._accumulate(self._observed.queries, self._observed.positions)
        self._observed, self._sealed = None, True

    def truncate(self, length: int) -> None:
        """As `BaseIndex.truncate`; evicted rows stay evicted, and attention stays counted."""
        super().truncate(length)
        self._scored = min(self._scored, len(self))

    # Heavy hitters

    def _accumulate(self, queries: Tensor, positions: Tensor) -> None:
        """Add the attention of queries `[B, H, T, D]` to that of the retained rows, and evict."""
        ids, scores = self._rows()
        keys, counted = self._store.gather(ids).keys, are_valid(queries, positions, self.valid)
        scores = scores + attention_received(self.geometry, queries, positions, counted, keys, ids)
        ids, scores = self._evict(ids, scores)
        self._learned, self._scored = {"ids": ids, "scores": scores}, len(self)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Ids `[B, G, C]` of retained and of newer rows, and their scores."""
        new = self._ids_from(self._scored)
        scores = torch.zeros(new.shape, device=new.device)
        if "ids" not in self._learned:
            return new, scores
        parts = (self._learned["ids"], new), (self._learned["scores"], scores)
        return torch.cat(parts[0], dim=-1), torch.cat(parts[1], dim=-1)

    def _evict(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The `budget` rows that remain, of ascending ids `[B, G, C]` and -1, and their scores."""
        budget = self.config.budget
        if ids.shape[-1] <= budget:
            return ids, scores
        present = ids >= 0
        rank = present.cumsum(-1)
        recent = rank > rank[..., -1:] - ceil_share(budget, self.config.recent)
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

    # Hooks of the base

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
