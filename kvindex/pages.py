"""What indexes share whose unit is a page: so many tokens in a row, selected together.

A row's pages are cut over its valid tokens, in their order: page `p` holds those of rank `pP` to
`pP + P - 1`, so padding moves no page and only a row's last page may be partial. Each page has a
summary made from its keys; an append, or a truncation, makes anew those of the pages that it
changes, the old keys of which come from the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvindex import group
from kvindex.base import BaseIndex
from kvindex.columns import Columns
from kvindex.grouped import best_rows
from kvindex.ops.select import compact
from kvindex.protocol import UNUSED, Codes, Hits


class Tail(dict[str, Tensor]):
    """The summaries `[B, G, pages, …]` of the pages from `start` on, the last there is included."""

    def __init__(self, start: int, summaries: Mapping[str, Tensor]) -> None:
        super().__init__(summaries)
        self.start = start


class PageColumns(Columns):
    """Columns of summaries: their token axis counts pages, and an append replaces a tail."""

    def append(self, new: Mapping[str, Tensor]) -> None:
        """The pages from `new.start` on become those of the `Tail` `new`."""
        super().truncate(new.start if isinstance(new, Tail) else len(self))
        super().append(new)

    def truncate(self, length: int) -> None:
        """Nothing: the pages that a length in tokens leaves come as a `Tail`."""


class PagedIndex(BaseIndex):
    """Base of the indexes that select pages; `Config` has the fields `page` and `group`.

    An index writes `_summaries_of` and `_page_scores`. `_codes` holds the summaries, `[B, G,
    pages, …]`; of a row with fewer pages than another the last ones mean nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._codes = PageColumns()

    @abstractmethod
    def _summaries_of(self, keys: Tensor, there: Tensor) -> Codes:
        """Summaries `[B, G, pages, …]` of pages of keys `[B, G, pages, P, D]`, zero where none is.

        there: bool `[B, 1, pages, P, 1]`, which keys there are; a page may have none, and its
        summary must be finite all the same.
        """

    @abstractmethod
    def _page_scores(self, queries: Tensor) -> Tensor:
        """Scores float32 `[B, G, g, pages]` of the pages for queries float32 `[B, G, g, D]`."""

    @property
    def unit(self) -> int:
        """Tokens of a page."""
        return int(self.config.page)

    # Encoding

    def _encode(self, keys: Tensor, learnt: Codes) -> Codes:
        """Summaries of pages that start with these keys (`append` fills an open page first)."""
        nobody = torch.zeros(len(keys), dtype=torch.int64)
        return self._tail(nobody, keys, None)

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        counts = self.counts if len(self) else torch.zeros(len(keys), dtype=torch.int64)
        return self._learn(known, valid), self._tail(counts, known, valid)

    def _with_truncated(self, length: int) -> Tail:
        gone = torch.tensor(len(self) - length)
        if self.valid is not None:
            gone = self.valid[:, length:].sum(1).cpu()
        return self._tail(self.counts - gone, None, None)

    def _keep(self, statistics: Any) -> None:
        if isinstance(statistics, Tail):
            self._codes.append(statistics)

    def _tail(self, held: Tensor, keys: Tensor | None, valid: Tensor | None) -> Tail:
        """The last pages, from the first on that `held` int64 `[B]` tokens of a row do not fill.

        The first `held` valid tokens of each row come from the store; keys `[B, G, T, D]` follow,
        zero where `valid` bool `[B, T]` says no.
        """
        g, P = self.geometry, int(self.config.page)
        total = held + (0 if keys is None else keys.shape[2])
        if valid is not None:
            total = held + valid.sum(1).cpu()
        start = int(held.min()) // P
        pages = -(-int(total.max()) // P) - start
        slots = pages * P
        rank = torch.arange(start * P, start * P + slots, device=g.device)  # of each slot's token
        shape = (len(held), g.kv_heads, slots + 1, g.head_dim)  # and a slot to drop
        rows = torch.zeros(shape, dtype=g.dtype, device=g.device)
        known = int(held.max()) - start * P
        if known > 0:
            ids = self._members()[:, start * P :][:, :known]
            ids = ids.masked_fill(rank[:known] >= held.to(g.device)[:, None], UNUSED)
            old = self._store.gather(ids[:, None].expand(-1, g.kv_heads, -1))
            rows[:, :, :known] = old.keys
        if keys is not None:
            slot = (held - start * P).to(g.device)[:, None]
            if valid is None:
                slot = slot + torch.arange(keys.shape[2], device=g.device)
            else:
                slot = torch.where(valid, slot + valid.cumsum(1) - 1, slots)
            rows.scatter_(2, slot[:, None, :, None].expand(keys.shape), keys)
        there = rank < total.to(g.device)[:, None]
        paged = rows[:, :, :slots].reshape(*shape[:2], pages, P, g.head_dim)
        return Tail(start, self._summaries_of(paged, there.reshape(len(held), 1, pages, P, 1)))

    def _members(self) -> Tensor:
        """Ids of the valid tokens in order, int64 `[B, n]`; -1 where a row has fewer."""
        device = self.geometry.device
        if self.valid is not None:
            return compact(self.valid)
        return torch.arange(len(self), device=device).expand(len(self.counts), -1)

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        scores = self._page_scores(group.fold(queries, g.kv_heads, policy))
        starts = torch.arange(scores.shape[-1], device=g.device) * self.config.page
        sizes = (self.counts.to(g.device)[:, None] - starts).clamp(0, self.config.page)
        sizes = sizes[:, None].expand(-1, g.kv_heads, -1)  # [B, G, pages]
        scores = scores.masked_fill((sizes == 0)[:, :, None], float("-inf"))
        agreed = group.agree(scores, policy, scale=g.scale, softcap=g.softcap, sizes=sizes)
        members = self._members()[:, None].expand(-1, g.kv_heads, -1)
        return best_rows(agreed, starts.expand_as(sizes), sizes, members, k)


def extremes(keys: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each coordinate, `[B, G, pages, D]`; 0 for an empty page.

    keys, there: as `PagedIndex._summaries_of` gets them.
    """
    low = keys.masked_fill(~there, float("inf")).amin(3)
    high = keys.masked_fill(~there, float("-inf")).amax(3)
    none = ~there.any(3)  # [B, 1, pages, 1]
    return low.masked_fill(none, 0), high.masked_fill(none, 0)


def box_scores(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The largest product with a point of each box, `Σ_i max(q_i low_i, q_i high_i)`.

    queries: float32 `[B, G, g, D]`; low, high: `[B, G, pages, D]`. Float32 `[B, G, g, pages]`.
    """
    return queries.clamp_min(0) @ high.float().mT + queries.clamp_max(0) @ low.float().mT
