"""SnapKV: the prompt's rows that its last queries attend to, and those beside them.

Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (NeurIPS 2024), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvindex import check, group
from kvindex.kept import NEVER, KeptIndex, attended, joined, real
from kvindex.observed import Observed
from kvindex.protocol import UNUSED, Codes

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


class SnapKV(KeptIndex):
    """Keeps the prompt's most voted rows, its window, and what comes after it.

    Until `seal`, or where no query was observed, it keeps every row. What is learnt: `voted`
    int64 `[B, G, budget - window]`, ids ascending, -1 (first) for none.
    """

    Config = SnapKVConfig

    _seen: Observed | None
    _sealed: bool

    # Signals

    def observe(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`: the prompt's last ones will vote.

        After `seal` they are not looked at. What is not finite in a query counts as 0. Raises
        ValueError or TypeError for a wrong tensor.
        """
        g, seen = self.geometry, self._seen
        batch = seen.queries.shape[0] if self._batch is None and seen else self._batch
        shape = {"B": batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        T = queries.shape[2]
        check.tensor("positions", positions, {"T": T}, torch.int64, g.device)
        if not self._sealed and T:
            kept = dict[str, Any](most=self.config.window, choice="last")
            self._seen = Observed.of(seen, queries.detach().nan_to_num(0, 0, 0), positions, **kept)

    def seal(self) -> None:
        """The prompt is complete: its queries vote (on what of it comes later, when it comes)."""
        if len(self) and self._seen and not self._sealed:
            self._learnt = self._elected(self._seen, len(self))
        self._sealed = True

    def reorder(self, batch_indices: Tensor) -> None:
        """As `BaseIndex.reorder`; queries may have been observed before the first append."""
        if self._batch is None and self._seen:
            check.rows("batch_indices", batch_indices, self._seen.queries.shape[0])
            self._seen = self._seen.reordered(batch_indices.to(self.geometry.device))
        super().reorder(batch_indices)

    # The election

    def _elected(
        self, seen: Observed, held: int, keys: Tensor | None = None, valid: Tensor | None = None
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
        return {**self._learnt, "voted": voted.sort(-1).values}

    def _kept(self) -> Tensor:
        if "voted" not in self._learnt or self._seen is None:
            return self._from(0)
        return torch.cat([self._learnt["voted"], self._from(_first(self._seen))], dim=-1)

    # What the base asks for

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        seen = self._seen
        if seen is None:
            return self._learnt
        batch = {"B": seen.queries.shape[0], "G": None, "N": None, "D": None}
        check.tensor("keys", keys, batch)
        grows = len(self) < seen.end or "voted" not in self._learnt
        if not self._sealed or not grows:
            return self._learnt
        return self._elected(seen, len(self), keys, valid)

    def _learnt_before(self, length: int) -> Codes:
        seen = self._seen
        if "voted" not in self._learnt or seen is None or length >= seen.end:
            return self._learnt
        return self._elected(seen, length)

    def _with_reordered(self, batch_indices: Tensor) -> Observed | None:
        return self._seen and self._seen.reordered(batch_indices)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Observed | None:
        return self._seen

    def _with_truncated(self, length: int) -> Observed | None:
        return self._seen

    def _keep(self, statistics: Observed | None) -> None:
        self._seen = statistics

    def _cleared(self) -> None:
        self._seen, self._sealed = None, False

    def _held(self) -> list[Tensor]:
        return self._seen.held() if self._seen else []


def _first(seen: Observed) -> int:
    """The id of the window's first row."""
    return int(seen.positions[0])
