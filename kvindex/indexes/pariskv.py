"""ParisKV: collision voting on analytic centroids, then reranking with 4-bit codes.

Qi et al., ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (ICML 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex import check, group
from kvindex.base import BaseIndex
from kvindex.ops.coarse import TIERS, ceil_share
from kvindex.ops.codes import SUBSPACE
from kvindex.protocol import UNUSED, Codes, Hits

MAGNITUDE_BITS = 3
"""Bits of magnitude per coordinate beside the sign (paper, A.3)."""

SCHEDULE = ((5_000, 0.50, 0.50), (10_000, 0.25, 0.30), (30_000, 0.20, 0.25))
"""`(below n tokens, β, ρ)`, as published; the paper says only that the schedule adapts to n."""

LONGEST = (0.10, 0.20)
"""`(β, ρ)` for all longer lengths, as published."""


@dataclass(frozen=True)
class ParisKVConfig:
    """What ParisKV can be told.

    beta: share of the keys that become candidates, in (0, 1]; None follows the schedule.
    rho: share of the keys that earn points in a subspace, in (0, 1]; None follows the schedule.
    group: how query heads agree (`kvindex.group`). Each head votes for candidates of its own;
      all heads of the group then rerank the union.
    seed: of the rotation's signs.
    """

    beta: float | None = None
    rho: float | None = None
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("beta", "rho"):
            if getattr(self, name) is not None:
                check.within(name, getattr(self, name), 0, 1)
        check.one_of("group", self.group, group.POLICIES)
        if check.at_least("seed", self.seed, 0) >= 2**63:
            raise ValueError(f"seed: got {self.seed}, allowed is an integer below 2**63")


class ParisKV(BaseIndex):
    """Codes of 4 bits per coordinate and a weight per subspace; no training, no drift.

    Hits' scores: what `group.agree` returns for the estimates of `q·k`.
    """

    Config = ParisKVConfig
    presets: ClassVar = {"paper": {}}
    default_preset = "paper"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, ops = self.geometry, self.ops
        self._rotation = ops.transform.rotation(g.head_dim, self.config.seed, g.device)
        self._levels = ops.codes.levels(SUBSPACE, MAGNITUDE_BITS, g.device)

    def _cleared(self) -> None:
        self._histogram = torch.empty(0)  # keys per centroid, int64 [B, G, M, 256], once it holds

    def _encode(self, keys: Tensor) -> Codes:
        directions, norms = self.ops.transform.normalize(keys)
        rotated = self.ops.transform.rotate(directions, self._rotation)
        codes = self.ops.codes.encode(rotated, norms, self._levels)
        return {**codes, "weights": codes["weights"].bfloat16()}

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy, ops = self.geometry, self.config.group, self.ops
        directions, norms = ops.transform.normalize(group.fold(queries, g.kv_heads, policy))
        rotated = ops.transform.rotate(directions, self._rotation)  # [B, G, g, D]

        tiers, limits = self._limits(k)
        table = ops.coarse.tier_table(rotated, self._histogram, tiers)
        votes = ops.coarse.votes(self._codes["signs"], table)
        ids = ops.select.candidates(votes, limits, self.valid)  # [B, G, C]

        codes = [
            ops.fetch.gather_rows(self._codes[name], ids)
            for name in ("signs", "magnitudes", "weights")
        ]
        estimates = ops.rerank.estimate(rotated * norms[..., None], *codes, self._levels)
        estimates = estimates.masked_fill((ids < 0)[:, :, None], float("-inf"))
        agreed = group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        scores, slots = ops.select.top_k(agreed, k)  # ids ascend, so equal scores stay in order
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), scores)

    def _limits(self, k: int) -> tuple[Tensor, Tensor]:
        """Keys that bound each tier, int64 `[B, tiers]`, and candidates `C`, int64 `[B]`."""
        tiers, candidates = [], []
        for n in self.counts.tolist():
            beta, rho = self._shares(n)
            tiers.append([ceil_share(n, rho, tier) for tier in TIERS])
            candidates.append(min(max(ceil_share(n, beta), k), n))
        device = self.geometry.device
        return torch.tensor(tiers, device=device), torch.tensor(candidates)

    def _shares(self, n: int) -> tuple[float, float]:
        """`(β, ρ)` for `n` keys."""
        scheduled = next(((b, r) for below, b, r in SCHEDULE if n < below), LONGEST)
        beta, rho = self.config.beta, self.config.rho
        return scheduled[0] if beta is None else beta, scheduled[1] if rho is None else rho

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Tensor:
        added: Tensor = self.ops.coarse.histogram(codes["signs"], valid)
        return self._histogram + added if self._histogram.numel() else added

    def _with_truncated(self, length: int) -> Tensor:
        valid = None if self.valid is None else self.valid[:, length:]
        gone: Tensor = self.ops.coarse.histogram(self._codes["signs"][:, :, length:], valid)
        return self._histogram - gone

    def _with_reordered(self, batch_indices: Tensor) -> Tensor:
        return self._histogram.index_select(0, batch_indices)

    def _keep(self, statistics: Tensor) -> None:
        self._histogram = statistics

    def _held(self) -> list[Tensor]:
        return [self._histogram, self._rotation, self._levels]
