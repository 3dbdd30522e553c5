"""`PagedIndex`: base of indexes whose unit is a page of consecutive tokens, with a summary each.

A row's pages are cut over its valid tokens, in their order: page `p` has those of rank `pP` to
`pP + P - 1`, so padding moves no page and only a row's last page may be partial. Each page has a
summary of its keys; an append, or a truncation, recomputes those of the pages that it changes, the
old keys of which come from the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.storage.columns import Columns
from kvindex.storage.layout import Held, Layout, TensorSpec
from kvindex.storage.sharing import Sharing


class Tail(dict[str, Tensor]):
    """The summaries `[B, G, pages, …]` of all pages from `start` on."""

    def __init__(self, start: int, summaries: Mapping[str, Tensor]) -> None:
        super().__init__(summaries)
        self.start = start


class PageColumns(Columns):
    """Columns of summaries: their token axis counts pages, and an append replaces a tail."""

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Replace the pages from `new.start` on by those of the `Tail` `new`.

        Earlier views of the pages stay as they are, for a rollback: a copy changes.
        """
        if isinstance(new, Tail) and new.start < len(self):
            self._data = {name: tensor.clone() for name, tensor in self._data.items()}
            self._sharing = Sharing()
            super().truncate(new.start)
        super().append(new)

    def truncate(self, length: int) -> None:
        """Do nothing: the pages that remain after a truncation come as a `Tail`."""


class PagedIndex(BaseIndex):
    """Base of the indexes that select pages; `Config` has the fields `page` and `group`.

    An index writes `_summaries_of` and `_page_scores`. `_codes` holds the summaries, `[B, G,
    pages, …]`; of a row with fewer pages than another the last ones are undefined.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._codes = PageColumns()

    @abstractmethod
    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        """Summaries `[B, G, pages, …]` of pages of keys `[B, G, pages, P, D]`, zero where none is.

        present: bool `[B, 1, pages, P, 1]`, which keys exist; a page may have none, and its summary
        must be finite all the same. marks: `[B, G, pages, P, W]`, as `_marks` gave them.
        """

    def _marks(self, keys: Tensor) -> Tensor | None:
        """Further inputs of summaries, `[B, G, T, W]`, of new tokens with keys `[B, G, T, D]`.

        Stored with the pages, under the name `marks`; zero for invalid tokens. None for nothing.
        """
        return None

    @abstractmethod
    def _page_scores(self, queries: Tensor) -> Tensor:
        """Scores float32 `[B, G, g, pages]` of the pages for queries float32 `[B, G, g, D]`."""

    @property
    def unit(self) -> int:
        """Tokens of a page."""
        return int(self.config.page)

    def _page_layout(self, pages: str) -> Layout:
        """The layout of the codes. pages: the size of their axis of pages."""
        return {}

    def _layout(self, held: Held) -> Layout:
        pages = self._page_layout(held.units(int(self.config.page))) if held.length else {}
        return super()._layout(held) | pages

    # Encoding

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Summaries of pages that start with these keys (`append` fills an open page first)."""
        none = torch.zeros(len(keys), dtype=torch.int64)
        return self._tail(none, keys, None)

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        counts = self.counts if len(self) else torch.zeros(len(keys), dtype=torch.int64)
        return self._learn(known, valid), self._tail(counts, known, valid)

    def _with_truncated(self, length: int) -> Tail:
        removed = torch.tensor(len(self) - length)
        if self.valid is not None:
            removed = self.valid[:, length:].sum(1).cpu()
        return self._tail(self.counts - removed, None, None)

    def _commit(self, statistics: Any) -> None:
        if isinstance(statistics, Tail):
            self._codes.append(statistics)

    def _tail(self, past: Tensor, keys: Tensor | None, valid: Tensor | None) -> Tail:
        """The last pages, from the first on that `past` int64 `[B]` tokens of a row do not fill.

        The first `past` valid tokens of each row come from the store; keys `[B, G, T, D]` follow,
        zero where `valid` bool `[B, T]` is False.
        """
        device, P = self.geometry.device, int(self.config.page)
        total = past + (0 if keys is None else keys.shape[2])
        if valid is not None:
            total = past + valid.sum(1).cpu()
        start = int(past.min()) // P
        pages = -(-int(total.max()) // P) - start
        slots = torch.arange(pages * P, device=device)  # slot s: the token of rank start · P + s
        offset = (past - start * P).to(device)[:, None]  # slots of a row that have tokens already
        parts = []  # keys, marks, slots [B, n]; tokens of the slot past the last one are dropped
        known = int(past.max()) - start * P
        if known > 0:
            slot = torch.where(slots[:known] < offset, slots[:known], pages * P)
            parts.append((*self._stored_part(start * P, slot < pages * P), slot))
        if keys is not None:
            slot = offset + torch.arange(keys.shape[2], device=device)
            if valid is not None:
                slot = torch.where(valid, offset + valid.cumsum(1) - 1, pages * P)
            parts.append((keys, self._marks(keys), slot))
        if not parts:
            return Tail(start, {})
        all_keys, all_marks, all_slots = zip(*parts, strict=True)
        paged = partial(_paged, slots=torch.cat(all_slots, 1), pages=pages, page=P)
        known_marks = [marks for marks in all_marks if marks is not None]
        marks = paged(torch.cat(known_marks, 2)) if known_marks else None
        present = slots < (total - start * P).to(device)[:, None]
        present = present.reshape(len(past), 1, pages, P, 1)
        summaries = self._summaries_of(paged(torch.cat(all_keys, 2)), present, marks)
        return Tail(start, summaries if marks is None else {**summaries, "marks": marks})

    def _stored_part(self, first: int, present: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored keys and marks `[B, G, n, …]` of the tokens of rank `first` on that are `present`.

        present: bool `[B, n]`; entries of the others are undefined.
        """
        ids = self._members()[:, first:][:, : present.shape[1]].masked_fill(~present, UNUSED)
        keys = self._store.gather(ids[:, None].expand(-1, self.geometry.kv_heads, -1)).keys
        if "marks" not in self._codes:
            return keys, None
        marks = self._codes["marks"].flatten(2, 3)[:, :, first:]
        return keys, marks[:, :, : present.shape[1]]

    def _members(self) -> Tensor:
        """Ids of the valid tokens in order, int64 `[B, n]`; -1 where a row has fewer."""
        device = self.geometry.device
        if self.valid is not None:
            ids: Tensor = self.ops.select.compact(self.valid)
            return ids
        return torch.arange(len(self), device=device).expand(len(self.counts), -1)

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        scores = self._page_scores(group.fold(queries, g.kv_heads, policy))
        starts = torch.arange(scores.shape[-1], device=g.device) * self.config.page
        sizes = (self.counts.to(g.device)[:, None] - starts).clamp(0, self.config.page)
        sizes = sizes[:, None].expand(-1, g.kv_heads, -1)  # [B, G, pages]
        scores = scores.masked_fill((sizes == 0)[:, :, None], float("-inf"))
        agreed = self.ops.group.agree(scores, policy, scale=g.scale, softcap=g.softcap, sizes=sizes)
        members = self._members()[:, None].expand(-1, g.kv_heads, -1)
        hits: Hits = self.ops.units.best_rows(agreed, starts.expand_as(sizes), sizes, members, k)
        return hits


def _paged(tokens: Tensor, slots: Tensor, *, pages: int, page: int) -> Tensor:
    """Tokens `[B, G, n, W]` scattered to slots int64 `[B, n]`: `[B, G, pages, P, W]`, else zero.

    The slot after the last one is dropped.
    """
    B, G, _, W = tokens.shape
    shape = (B, G, pages * page + 1, W)
    rows = torch.zeros(shape, dtype=tokens.dtype, device=tokens.device)
    rows.scatter_(2, slots[:, None, :, None].expand(tokens.shape), tokens)
    return rows[:, :, :-1].reshape(B, G, pages, page, W)


def extremes(keys: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each coordinate, `[B, G, pages, D]`; 0 for an empty page.

    keys, present: as `PagedIndex._summaries_of` gets them.
    """
    low = keys.masked_fill(~present, float("inf")).amin(3)
    high = keys.masked_fill(~present, float("-inf")).amax(3)
    none = ~present.any(3)  # [B, 1, pages, 1]
    return low.masked_fill(none, 0), high.masked_fill(none, 0)


def layout_of_boxes(axes: str, geometry: Geometry) -> Layout:
    """The layout of the codes `low` and `high`, both of these axes."""
    low = TensorSpec(
        axes,
        geometry.dtype,
        allowed="at most codes.high",
        rule=lambda state: (state["codes.low"] <= state["codes.high"]).all(),
    )
    return {"codes.low": low, "codes.high": TensorSpec(axes, geometry.dtype)}


def box_scores(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The largest product with a point of each box, `Σ_i max(q_i low_i, q_i high_i)`.

    queries: float32 `[B, G, g, D]`; low, high: `[B, G, pages, D]`. Float32 `[B, G, g, pages]`.
    """
    return queries.clamp_min(0) @ high.float().mT + queries.clamp_max(0) @ low.float().mT
