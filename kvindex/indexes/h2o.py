"""H2O: the rows that queries have attended to most so far, and the latest ones.

Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
(NeurIPS 2023), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import NEVER, ObservingEvictionIndex, attended, real
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.ops.coarse import ceil_share


@dataclass(frozen=True)
class H2OConfig:
    """What H2O can be told.

    budget: rows kept (published: 1024 and 1024); recent: the share of them that are the latest
    (published: half), the others are heavy hitters; most: queries of the prompt that count, its
    last ones, or None for all (published); group: how query heads agree on the order of kept rows.
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
    """Drops, for good, the row that was attended to least among all but the latest.

    Every row is kept until the first queries after an append that has something to drop: those of
    the prompt at `end_prompt`, then each that is observed. What is learned: `ids` int64 `[B, G,
    C]`, kept after the last of them, ascending, -1 (first) for none; `scores` float32 `[B, G, C]`,
    the attention that each has got. Rows from `_upto` on have got none yet.
    """

    Config = H2OConfig

    statistics = ("_upto",)

    _upto: int

    @property
    def depends_on_queries(self) -> bool:
        """Always: what each step attends to counts for the next."""
        return True

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`: what they attend to counts.

        Until `end_prompt` they wait for it. What is not finite in a query counts as 0. Raises
        ValueError or TypeError for a wrong tensor.
        """
        queries = self._signal(queries, positions)
        if not self._sealed:
            self._watch(queries, positions, self.config.most or 2**62)
        elif len(self) and len(positions):
            self._count(queries, positions)

    def end_prompt(self) -> None:
        """The prompt is complete: what its queries attend to counts, and rows are dropped."""
        if len(self) and self._seen:
            self._count(self._seen.queries, self._seen.positions)
        self._seen, self._sealed = None, True

    def truncate(self, length: int) -> None:
        """As `BaseIndex.truncate`; what was dropped stays so, and attention that counted, too."""
        super().truncate(length)
        self._upto = min(self._upto, len(self))

    # Heavy hitters

    def _count(self, queries: Tensor, positions: Tensor) -> None:
        """Add the attention of queries `[B, H, T, D]` to that of the kept rows, and drop."""
        ids, scores = self._rows()
        keys, counted = self._store.gather(ids).keys, real(positions, self.valid, len(queries))
        scores = scores + attended(self.geometry, queries, positions, counted, keys, ids)
        ids, scores = self._dropped(ids, scores)
        self._learned, self._upto = {"ids": ids, "scores": scores}, len(self)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Ids `[B, G, C]` of what is kept and of what came since, and their scores."""
        new = self._from(self._upto)
        scores = torch.zeros(new.shape, device=new.device)
        if "ids" not in self._learned:
            return new, scores
        parts = (self._learned["ids"], new), (self._learned["scores"], scores)
        return torch.cat(parts[0], dim=-1), torch.cat(parts[1], dim=-1)

    def _dropped(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The `budget` rows that stay, of ascending ids `[B, G, C]` and -1."""
        budget = self.config.budget
        if ids.shape[-1] <= budget:
            return ids, scores
        there = ids >= 0
        rank = there.cumsum(-1)
        recent = rank > rank[..., -1:] - ceil_share(budget, self.config.recent)
        order = scores.masked_fill(recent, float("inf")).masked_fill(~there, NEVER)
        slots = self.ops.select.top_k(order, budget)[1].sort(-1).values
        kept, got = (t.gather(-1, slots.clamp_min(0)) for t in (ids, scores))
        return kept.masked_fill(slots < 0, UNUSED), got.masked_fill(slots < 0, 0)

    def _kept(self) -> Tensor:
        ids, scores = self._rows()
        return self._dropped(ids, scores)[0] if "ids" in self._learned else ids

    # What the base asks for

    def _scanned(self) -> list[Tensor]:
        return [*super()._scanned(), *self._learned.values()]

    def _learned_before(self, length: int) -> Codes:
        if "ids" not in self._learned:
            return self._learned
        gone = self._learned["ids"] >= length
        ids, scores = self._learned["ids"], self._learned["scores"]
        return {"ids": ids.masked_fill(gone, UNUSED), "scores": scores.masked_fill(gone, 0)}

    def _cleared(self) -> None:
        super()._cleared()
        self._upto = 0
