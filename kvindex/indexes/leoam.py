"""LeoAM: selects chunks of tokens by a search from large chunks to small ones.

A search splits the large chunks that may receive much attention into halves, and scores the halves.
It repeats this until the chunks have the smallest size.

Sun et al., Breaking the Boundaries of Long-Context LLM Inference: Adaptive KV Management on a
Single Commodity GPU (arXiv 2506.20187). docs/indexes/leoam.md lists the simplifications.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.pages import PagedIndex, box_scores, extremes, layout_of_boxes
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.ops.units import at
from kvindex.storage.layout import Layout


@dataclass(frozen=True)
class LeoAMConfig:
    """Options of LeoAM.

    Args:
        page: Number of tokens in a chunk of the largest size.
        leaf: Number of tokens in a chunk of the smallest size, `page` divided by a power of two.
        spread: How many chunks a search splits at each chunk size. These chunks contain about
            `spread · k` tokens in total, for `k` requested rows. At least 1.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 128
    leaf: int = 16
    spread: float = 2.0
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        halves, rest = divmod(self.page, check.at_least("leaf", self.leaf, 1))
        if rest or halves & (halves - 1):
            raise ValueError(
                f"leaf: got {self.leaf}, allowed is the page of {self.page} tokens divided by a "
                "power of two"
            )
        if check.positive("spread", self.spread) < 1:
            raise ValueError(f"spread: got {self.spread}, allowed is at least 1")
        check.one_of("group", self.group, group.POLICIES)

    @property
    def sizes(self) -> list[int]:
        """The sizes of chunks in tokens, from the largest to the smallest."""
        levels = (self.page // self.leaf).bit_length()
        return [self.page >> level for level in range(levels)]


class LeoAM(PagedIndex):
    """Selects the best small chunks of consecutive tokens.

    A search first scores large chunks (pages). It then divides the best of them into smaller
    chunks, until the chunks have the smallest size.

    The score of a chunk is an upper bound of the query's inner products with the chunk's keys. It
    is computed from the minimum and maximum of each coordinate of the keys, as in `Quest`. In
    `Hits.scores`, each row has the score of its chunk of the smallest size.

    Source: Sun et al., Adaptive KV Management on a Single Commodity GPU (arXiv 2506.20187).
    """

    Config = LeoAMConfig

    @property
    def unit(self) -> int:
        """Number of tokens in a chunk of the smallest size."""
        return int(self.config.leaf)

    # Chunks of a page are stored as a binary tree: chunk `c` at level `l` is node `2^l - 1 + c`

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        """Return the minimum and the maximum of each key coordinate, for the chunks of all sizes.

        The results `low` and `high` are `[B, G, pages, nodes, D]`. A node is one chunk of a page.
        """
        (B, G, pages, P, D), nodes = keys.shape, []
        for size in self.config.sizes:
            chunks = pages * P // size
            tokens = keys.reshape(B, G, chunks, size, D), present.reshape(B, 1, chunks, size, 1)
            nodes.append([box.reshape(B, G, pages, P // size, D) for box in extremes(*tokens)])
        low, high = (torch.cat(boxes, dim=3) for boxes in zip(*nodes, strict=True))
        return {"low": low, "high": high}

    def _page_layout(self, pages: str) -> Layout:
        nodes = 2 * self.config.page // self.config.leaf - 1
        return layout_of_boxes(f"B G {pages} {nodes} D", self.geometry)

    def _page_scores(self, queries: Tensor) -> Tensor:
        return box_scores(queries, *(self._codes[name][:, :, :, 0] for name in ("low", "high")))

    def _scanned(self) -> list[Tensor]:
        return [self._codes[name][:, :, :, 0] for name in ("low", "high")]

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, config = self.geometry, self.config
        folded = group.fold(queries, g.kv_heads, config.group)
        pages = self._codes["low"].shape[2]
        chunks = torch.arange(pages, device=g.device).expand(len(queries), g.kv_heads, -1)
        scores = self._agreed(self._page_scores(folded), chunks, config.page)
        for level, size in enumerate(config.sizes[1:], start=1):
            split = min(math.ceil(config.spread * k / (2 * size)) + 1, chunks.shape[-1])
            best = at(chunks, self.ops.select.top_k(scores, split)[1], UNUSED)
            halves = torch.stack([2 * best, 2 * best + 1], dim=-1).flatten(-2)
            halves = halves.masked_fill(halves < 0, pages << level).sort(-1).values  # unused last
            chunks = halves.masked_fill(halves == pages << level, UNUSED)
            scores = self._agreed(self._bounds(folded, chunks, level), chunks, size)
        starts, members = chunks.clamp_min(0) * config.leaf, self._members()[:, None]
        sizes, members = self._sizes(chunks, config.leaf), members.expand(-1, g.kv_heads, -1)
        hits: Hits = self.ops.units.best_rows(scores, starts, sizes, members, k)
        return hits

    def _sizes(self, chunks: Tensor, size: int) -> Tensor:
        """Return the number of tokens in each of `chunks`, int64 `[B, G, M]`; 0 for chunk -1.

        A full chunk has `size` tokens.
        """
        tokens = (self.counts.to(chunks.device)[:, None, None] - chunks * size).clamp(0, size)
        return tokens.masked_fill(chunks < 0, 0)

    def _bounds(self, queries: Tensor, chunks: Tensor, level: int) -> Tensor:
        """Return upper bounds of the queries' inner products with the keys of `chunks`.

        Args:
            queries: Float32 `[B, G, g, D]`.
            chunks: Numbers of the chunks, int64 `[B, G, M]`.
            level: Level of the chunks. A chunk of level 0 is a page. Each higher level halves the
                chunks of the level before.

        Returns:
            Float32 `[B, G, g, M]`.
        """
        per, known, held = 1 << level, chunks.clamp_min(0), self._codes["low"].shape[3]
        nodes = known // per * held + per - 1 + known % per
        boxes = (
            self.ops.fetch.gather_rows(self._codes[name].flatten(2, 3), nodes)
            for name in ("low", "high")
        )
        return box_scores(queries, *boxes)

    def _agreed(self, bounds: Tensor, chunks: Tensor, size: int) -> Tensor:
        """Combine the scores of the query heads for each chunk of `size` tokens.

        The result is float32 `[B, G, M]`.
        """
        g, sizes = self.geometry, self._sizes(chunks, size)
        bounds = bounds.masked_fill((sizes == 0)[:, :, None], float("-inf"))
        agreed: Tensor = self.ops.group.agree(
            bounds, self.config.group, scale=g.scale, softcap=g.softcap, sizes=sizes
        )
        return agreed
