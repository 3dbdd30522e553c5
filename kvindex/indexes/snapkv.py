"""SnapKV: the prompt's rows that its last queries attend to, and those beside them.

Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (NeurIPS 2024), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvindex.bases.eviction import NEVER, ObservingEvictionIndex, attended, joined, real
from kvindex.bases.prompt_queries import PromptQueries
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group

POOLS: dict[str, Any] = {"mean": avg_pool1d, "max": max_pool1d}


@dataclass(frozen=True)
class SnapKVConfig:
    """What SnapKV can be told.

    budget: rows of the prompt that are kept (published: 2048); window: its last queries, which
    vote, and whose rows are kept too (published: 32); kernel: rows over which votes are pooled,
    odd (published: 5); pool: "mean" (published) or "max"; group: how query heads agree on the order
    of kept rows.
    """

    budget: int = 2048
    window: int = 32
    kernel: int = 5
    pool: str = "mean"
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("window", self.window, 1)
        check.at_least("budget", self.budget, self.window + 1)
        if check.at_least("kernel", self.kernel, 1) % 2 == 0:
            raise ValueError(f"kernel: got {self.kernel}, allowed is an odd integer")
        check.one_of("pool", self.pool, POOLS)
        check.one_of("group", self.group, group.POLICIES)


class SnapKV(ObservingEvictionIndex):
    """Keeps the prompt's most voted rows, its window, and what comes after it.

    Until `end_prompt`, or where no query was observed, it keeps every row. What is learned: `voted`
    int64 `[B, G, budget - window]`, ids ascending, -1 (first) for none.
    """

    Config = SnapKVConfig

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`: the prompt's last ones will vote.

        After `end_prompt` they are not looked at. What is not finite in a query counts as 0. Raises
        ValueError or TypeError for a wrong tensor.
        """
        queries = self._signal(queries, positions)
        if not self._sealed:
            self._watch(queries, positions, self.config.window)

    def end_prompt(self) -> None:
        """The prompt is complete: its queries vote (on what of it comes later, when it comes)."""
        if len(self) and self._seen and not self._sealed:
            self._learned = self._elected(self._seen, len(self))
        self._sealed = True

    # The election

    def _elected(
        self,
        seen: PromptQueries,
        held: int,
        keys: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Codes:
        """What `seen` votes for: the first `held` rows, and keys `[B, G, T, D]` that follow."""
        g, config, B = self.geometry, self.config, len(seen.queries)
        flags = None if self.valid is None else self.valid[:, :held]
        if keys is not None:
            flags = joined(flags, held, keys, valid)
        ids = torch.arange(min(held, seen.end), device=g.device)
        rows = self._store.gather(ids.expand(B, g.kv_heads, -1)).keys
        if keys is not None:
            rows = torch.cat([rows, keys[:, :, : max(seen.end - held, 0)]], dim=2)
        n = rows.shape[2]
        ids = torch.arange(n, device=g.device).expand(B, g.kv_heads, -1)
        if flags is not None:
            ids = ids.masked_fill(~flags[:, None, :n], UNUSED)
        counted = real(seen.positions, flags, B)
        votes = attended(g, seen.queries, seen.positions, counted, rows, ids)
        votes = votes[:, :, : _first(seen)]  # the window itself is kept whatever its votes
        if votes.numel():
            votes = POOLS[config.pool](votes, config.kernel, 1, config.kernel // 2)
        votes = votes.masked_fill(ids[:, :, : _first(seen)] < 0, NEVER)
        voted = self.ops.select.top_k(votes, config.budget - config.window)[1]
        return {**self._learned, "voted": voted.sort(-1).values}

    def _kept(self) -> Tensor:
        if "voted" not in self._learned or self._seen is None:
            return self._from(0)
        return torch.cat([self._learned["voted"], self._from(_first(self._seen))], dim=-1)

    # What the base asks for

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned, seen = super()._learn(keys, valid), self._seen
        if not self._sealed or seen is None or ("voted" in learned and len(self) >= seen.end):
            return learned
        return self._elected(seen, len(self), keys, valid)

    def _learned_before(self, length: int) -> Codes:
        seen = self._seen
        if "voted" not in self._learned or seen is None or length >= seen.end:
            return self._learned
        return self._elected(seen, length)


def _first(seen: PromptQueries) -> int:
    """The id of the window's first row."""
    return seen.end - len(seen.positions)
