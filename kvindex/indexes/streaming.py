"""StreamingLLM: retains the first rows (the attention sink) and the latest rows.

Xiao et al., Efficient Streaming Language Models with Attention Sinks (ICLR 2024), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import EvictionIndex
from kvindex.core import check
from kvindex.ops import group


@dataclass(frozen=True)
class StreamingConfig:
    """Options of StreamingLLM.

    Args:
        budget: Number of rows to retain (published: 4 first and 2000 latest rows).
        sink: How many of these rows are the first ones (published: 4). The others are the latest.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    budget: int = 2004
    sink: int = 4
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("sink", self.sink, 0)
        check.at_least("budget", self.budget, self.sink + 1)
        check.one_of("group", self.group, group.POLICIES)


class Streaming(EvictionIndex):
    """Retains the rows of the first `sink` and of the latest `budget - sink` valid tokens.

    Source: Xiao et al., StreamingLLM (ICLR 2024), section 3.2.
    """

    Config = StreamingConfig

    def _retained(self) -> Tensor:
        g, n = self.geometry, len(self)
        sink, latest = self.config.sink, self.config.budget - self.config.sink
        if self.valid is None:
            first = torch.arange(min(sink, n), device=g.device)
            last = torch.arange(max(n - latest, len(first)), n, device=g.device)
            return torch.cat([first, last]).expand(self._batch or 1, g.kv_heads, -1)
        rank = self.valid.cumsum(1)  # 1, 2, … at the valid tokens
        kept = self.valid & ((rank <= sink) | (rank > rank[:, -1:] - latest))
        ids: Tensor = self.ops.select.compact(kept)[:, None].expand(-1, g.kv_heads, -1)
        return ids
