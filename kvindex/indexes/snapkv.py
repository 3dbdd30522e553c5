"""SnapKV: retains the rows of the prompt that the last queries of the prompt attend to most.

Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (NeurIPS 2024), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvindex.bases.eviction import (
    NEVER,
    ObservingEvictionIndex,
    are_valid,
    attention_received,
    joined_flags,
)
from kvindex.bases.prompt_queries import PromptQueries
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, below, distinct

POOLS: dict[str, Any] = {"mean": avg_pool1d, "max": max_pool1d}


@dataclass(frozen=True)
class SnapKVConfig:
    """Options of SnapKV.

    Args:
        budget: Number of rows of the prompt to retain, including the window (published: 2048).
        window: Number of last tokens of the prompt. Their queries select which rows before them are
            retained, and their own rows are always retained (published: 32).
        kernel: Number of adjacent rows over which the attention weights of these queries are
            pooled, an odd number (published: 5).
        pool: How attention weights are pooled, "mean" (published) or "max".
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
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
    """Retains the rows of the prompt to which its last queries attend most, and all later rows.

    The last rows of the prompt are also retained. Until `end_prompt`, or if no query was observed,
    all rows are retained. The learned tensor `voted`, int64 `[B, G, budget - window]`, contains the
    ids of the rows with the largest attention weights, in ascending order. If there are fewer such
    rows, the tensor begins with entries of -1.

    Source: Li et al., SnapKV (NeurIPS 2024), section 4.
    """

    Config = SnapKVConfig

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store the newest queries `[B, H, T, D]` of the prompt.

        The attention weights of the last `window` queries decide which rows are retained. Queries
        after `end_prompt` are ignored. NaN and infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if not self._prompt_ended:
            self._sample_queries(queries, positions, self.config.window)

    def end_prompt(self) -> None:
        """End the prompt, and evict the rows to which its last queries attend least.

        If keys of the prompt are appended after this call, the rows to evict are chosen again.
        """
        if len(self) and self._observed and not self._prompt_ended:
            self._learned = self._vote(self._observed, len(self))
        self._prompt_ended = True

    # Voting

    def _vote(
        self,
        observed: PromptQueries,
        past: int,
        keys: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Codes:
        """Choose the rows to which the observed queries attend most.

        Return the learned tensors with the ids of these rows.

        Args:
            observed: Last queries of the prompt.
            past: Number of stored rows from which to choose.
            keys: Keys of an append, `[B, G, T, D]`, from which to choose as well; or None.
            valid: Mask of valid keys of the append, bool `[B, T]`, or None if all are valid.
        """
        g, config, B = self.geometry, self.config, len(observed.queries)
        flags = None if self.valid is None else self.valid[:, :past]
        if keys is not None:
            flags = joined_flags(flags, past, keys, valid)
        ids = torch.arange(min(past, observed.end), device=g.device)
        rows = self._store.gather(ids.expand(B, g.kv_heads, -1)).keys
        if keys is not None:
            rows = torch.cat([rows, keys[:, :, : max(observed.end - past, 0)]], dim=2)
        n = rows.shape[2]
        ids = torch.arange(n, device=g.device).expand(B, g.kv_heads, -1)
        if flags is not None:
            ids = ids.masked_fill(~flags[:, None, :n], UNUSED)
        counted = are_valid(observed.queries, observed.positions, flags)
        votes = attention_received(g, observed.queries, observed.positions, counted, rows, ids)
        votes = votes[:, :, : _first(observed)]  # rows of the window need no votes
        if votes.numel():
            votes = POOLS[config.pool](votes, config.kernel, 1, config.kernel // 2)
        votes = votes.masked_fill(ids[:, :, : _first(observed)] < 0, NEVER)
        voted = self.ops.select.top_k(votes, config.budget - config.window)[1]
        return {**self._learned, "voted": voted.sort(-1).values}

    def _retained(self) -> Tensor:
        if "voted" not in self._learned or self._observed is None:
            return self._ids_from(0)
        return torch.cat([self._learned["voted"], self._ids_from(_first(self._observed))], dim=-1)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout, voted = super()._layout(sizes), sizes.has("learned")
        layout["statistics.prompt_ended"] = TensorSpec(
            "",
            torch.bool,
            allowed="with learned.voted once the prompt has ended",
            rule=lambda state: bool(
                voted
                or not sizes.length
                or "statistics.observed.end" not in state
                or not state["statistics.prompt_ended"]
            ),
        )
        if voted:
            layout["learned.voted"] = TensorSpec(
                f"B G {self.config.budget - self.config.window}",
                torch.int64,
                least=UNUSED,
                most=sizes.length - 1,
                allowed="distinct, and before the queries in statistics.observed",
                rule=_before_window,
            )
        return layout

    # Methods that the base class calls

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned, observed = super()._learn(keys, valid), self._observed
        if (
            not self._prompt_ended
            or observed is None
            or ("voted" in learned and len(self) >= observed.end)
        ):
            return learned
        return self._vote(observed, len(self), keys, valid)

    def _learned_before(self, length: int) -> Codes:
        observed = self._observed
        if "voted" not in self._learned or observed is None or length >= observed.end:
            return self._learned
        return self._vote(observed, length)


def _before_window(state: Mapping[str, Tensor]) -> bool:
    voted, end = state["learned.voted"], state.get("statistics.observed.end")
    if end is None:
        return bool(distinct(voted))
    first = end - len(state["statistics.observed.positions"])
    return bool(first >= 0) and bool(distinct(voted)) and below(voted, first)


def _first(observed: PromptQueries) -> int:
    """Return the id of the first token whose query is used to choose rows."""
    return observed.end - len(observed.positions)
