"""Quest: selects pages of tokens by an upper bound of the inner products with their keys.

The bound is computed from the minimum and maximum of each coordinate of a page's keys.

Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (ICML 2024,
section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvindex.bases.pages import PagedIndex, box_scores, extremes, layout_of_boxes
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.ops import group
from kvindex.storage.layout import Layout


@dataclass(frozen=True)
class QuestConfig:
    """Options of Quest.

    Args:
        page: Tokens per page (published: 16).
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 16
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.one_of("group", self.group, group.POLICIES)


class Quest(PagedIndex):
    """Selects whole pages by `Σ_i max(q_i low_i, q_i high_i)`, an upper bound of `q·k`.

    `low_i` and `high_i` are minimum and maximum of coordinate `i` of a page's keys. In
    `Hits.scores`, each row has the score of its page.

    Source: Tang et al., Quest (ICML 2024), section 3.
    """

    Config = QuestConfig

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        low, high = extremes(keys, present)
        return {"low": low, "high": high}

    def _page_layout(self, pages: str) -> Layout:
        return layout_of_boxes(f"B G {pages} D", self.geometry)

    def _page_scores(self, queries: Tensor) -> Tensor:
        return box_scores(queries, self._codes["low"], self._codes["high"])
