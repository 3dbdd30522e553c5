"""`PagedIndex`: base of indexes that divide the tokens into pages and summarize the keys of each
page.

A page contains `P` consecutive tokens of a sequence. Padding is not counted, and only the last page
of a sequence may be incomplete. An append or a truncation reads the keys of the changed pages from
the store and computes their summaries again.
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
from kvindex.storage.layout import Layout, StateSizes, TensorSpec
from kvindex.storage.sharing import Sharing


class Tail(dict[str, Tensor]):
    """Summaries `[B, G, pages, …]` of the last pages, from page `start` on."""

    def __init__(self, start: int, summaries: Mapping[str, Tensor]) -> None:
        super().__init__(summaries)
        self.start = start


class PageColumns(Columns):
    """Stores a summary of each page. An append replaces the summaries of the changed pages."""

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Append the summaries of new pages. If `new` is a `Tail`, its summaries replace all stored
        ones from page number `new.start` on.

        Stored tensors are copied before anything in them is replaced, so that a rollback can
        restore the old summaries.
        """
        if isinstance(new, Tail) and new.start < len(self):
            self._data = {name: tensor.clone() for name, tensor in self._data.items()}
            self._sharing = Sharing()
            super().truncate(new.start)
        super().append(new)

    def truncate(self, length: int) -> None:
        """Do nothing, because the index calls `append` after a truncation.

        `append` then replaces the pages that have changed.
        """


class PagedIndex(BaseIndex):
    """Base of the indexes that select pages. Their `Config` has the fields `page` and `group`.

    A subclass overrides `_summaries_of` and `_page_scores`. `_codes` contains the summaries of the
    pages, `[B, G, pages, …]`. The size of this axis is the largest number of pages of a sequence.
    For sequences with fewer pages, the entries at the end are undefined.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._codes = PageColumns()

    @abstractmethod
    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        """Compute a summary of the keys of each page.

        The summary of a page without tokens must be finite, like all other summaries.

        Args:
            keys: `[B, G, pages, P, D]` for pages of `P` tokens, zero where a page has no token.
            present: Bool `[B, 1, pages, P, 1]`, True where a page has a token.
            marks: Results of `_marks` for these tokens, `[B, G, pages, P, W]`, or None.

        Returns:
            Named tensors `[B, G, pages, …]`.
        """

    def _marks(self, keys: Tensor) -> Tensor | None:
        """Compute `W` numbers per token that `_summaries_of` needs in addition to the keys.

        Return None if `_summaries_of` needs only the keys. The numbers are stored with the pages
        under the name `marks`. They are 0 for padded tokens.

        Args:
            keys: Keys of new tokens, `[B, G, T, D]`.

        Returns:
            `[B, G, T, W]`.
        """
        return None

    @abstractmethod
    def _page_scores(self, queries: Tensor) -> Tensor:
        """Return the score of each page for each query, float32 `[B, G, g, pages]`.

        queries: float32 `[B, G, g, D]`, for `g` query heads per KV head.
        """

    @property
    def unit(self) -> int:
        """Number of tokens in a page."""
        return int(self.config.page)

    def _page_layout(self, pages: str) -> Layout:
        """Return the required shape and dtype of each tensor of page summaries in a saved state.

        Args:
            pages: Size of the page axis, as an expression for `TensorSpec`.
        """
        return {}

    def _layout(self, sizes: StateSizes) -> Layout:
        pages = self._page_layout(sizes.units(int(self.config.page))) if sizes.length else {}
        return super()._layout(sizes) | pages

    # Encoding

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Divide the keys into pages, and return the summaries of these pages.

        The first key begins a new page, unlike in `append`, where the first keys may belong to the
        last, incomplete page of the index.
        """
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
        """Compute the summaries of the first incomplete page and of all pages after it.

        Earlier pages do not change.

        Args:
            past: Number of valid tokens of each sequence that are already stored, int64 `[B]`.
            keys: Keys to append, `[B, G, T, D]`, zero for padding; None for no keys.
            valid: Bool `[B, T]`, False for padding; None where no token is padded.
        """
        device, P = self.geometry.device, int(self.config.page)
        total = past + (0 if keys is None else keys.shape[2])
        if valid is not None:
            total = past + valid.sum(1).cpu()
        start = int(past.min()) // P
        pages = -(-int(total.max()) // P) - start
        slots = torch.arange(pages * P, device=device)  # slot s: the token of rank start · P + s
        offset = (past - start * P).to(device)[:, None]  # slots of a sequence with earlier tokens
        parts = []  # keys, marks, slots [B, n]; tokens after the last slot are dropped
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
        """Read the keys of `n` stored tokens of each sequence, and the marks that `_marks` computed
        from them.

        Args:
            first: How many valid tokens of the sequence come before these tokens.
            present: Bool `[B, n]`, False where the sequence has no such token. The results are
                undefined there.

        Returns:
            Keys `[B, G, n, D]`, and marks `[B, G, n, W]` or None.
        """
        ids = self._members()[:, first:][:, : present.shape[1]].masked_fill(~present, UNUSED)
        keys = self._store.gather(ids[:, None].expand(-1, self.geometry.kv_heads, -1)).keys
        if "marks" not in self._codes:
            return keys, None
        marks = self._codes["marks"].flatten(2, 3)[:, :, first:]
        return keys, marks[:, :, : present.shape[1]]

    def _members(self) -> Tensor:
        """Return the ids of the valid tokens in order, int64 `[B, n]`, with -1 at the end as
        padding.
        """
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
    """Copy the vectors of tokens, `[B, G, n, W]`, to given places in pages of `P` tokens.

    Args:
        tokens: A vector of `W` numbers per token, `[B, G, n, W]`.
        slots: The place of each token, int64 `[B, n]`. Page `p` has the places `p · P` to
            `p · P + P - 1`. A token with the place `pages · P` is dropped.
        pages: Number of pages.
        page: Number of tokens in a page, `P`.

    Returns:
        Pages `[B, G, pages, P, W]`, 0 in places without a token.
    """
    B, G, _, W = tokens.shape
    shape = (B, G, pages * page + 1, W)
    rows = torch.zeros(shape, dtype=tokens.dtype, device=tokens.device)
    rows.scatter_(2, slots[:, None, :, None].expand(tokens.shape), tokens)
    return rows[:, :, :-1].reshape(B, G, pages, page, W)


def extremes(keys: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each coordinate over the keys of each page.

    Both results have the shape `[B, G, pages, D]`, and are 0 for a page without tokens.

    Args:
        keys: `[B, G, pages, P, D]` for pages of `P` tokens.
        present: Bool `[B, 1, pages, P, 1]`, True where a page has a token.
    """
    low = keys.masked_fill(~present, float("inf")).amin(3)
    high = keys.masked_fill(~present, float("-inf")).amax(3)
    none = ~present.any(3)  # [B, 1, pages, 1]
    return low.masked_fill(none, 0), high.masked_fill(none, 0)


def layout_of_boxes(axes: str, geometry: Geometry) -> Layout:
    """Return the required shape and dtype of `low` and `high` in a saved state.

    They are the smallest and the largest coordinates of the keys in each page.
    """
    low = TensorSpec(
        axes,
        geometry.dtype,
        allowed="at most codes.high",
        rule=lambda state: (state["codes.low"] <= state["codes.high"]).all(),
    )
    return {"codes.low": low, "codes.high": TensorSpec(axes, geometry.dtype)}


def box_scores(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return an upper bound of each query's `q·k` for the keys of each page.

    All keys of a page are in the box from `low` to `high`. The bound is the largest inner product
    with a point of the box, `Σ_i max(q_i low_i, q_i high_i)`.

    Args:
        queries: Float32 `[B, G, g, D]`, for `g` query heads per KV head.
        low: Minimum of each coordinate, `[B, G, pages, D]`.
        high: Maximum of each coordinate, `[B, G, pages, D]`.

    Returns:
        Float32 `[B, G, g, pages]`.
    """
    return queries.clamp_min(0) @ high.float().mT + queries.clamp_max(0) @ low.float().mT
