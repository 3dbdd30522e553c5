"""ShadowKV: selects chunks of tokens by their mean key, and returns low-rank approximations of the
keys.

Sun et al., ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference (ICML
2025). docs/indexes/shadowkv.md lists the differences from the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.pages import PagedIndex, Tail
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits, Rows
from kvindex.core.rope import rotate
from kvindex.ops import group
from kvindex.ops.units import at
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

BLOCK = 16_384
"""Tokens factorized at a time; bounds memory, not the result."""


@dataclass(frozen=True)
class ShadowKVConfig:
    """Options of ShadowKV.

    Args:
        page: Number of tokens in a chunk.
        outliers: Number of outlier chunks per KV head, whose rows every search returns. They take
            at most half of the `k` returned rows. Outliers are the chunks whose keys differ most
            from their mean.
        rank: Rank of the approximation of the prompt's keys, which `fetch` returns after
            `end_prompt`. The keys of all KV heads are approximated together. `fetch` returns exact
            keys if `rank` is None, or if the prompt has at most `rank` tokens.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        stale: If True, tokens after the last chunk that was complete at `end_prompt` are never
            returned.
    """

    page: int = 8
    outliers: int = 48
    rank: int | None = 160
    group: str = "max_share"
    stale: bool = False

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.at_least("outliers", self.outliers, 0)
        if self.rank is not None:
            check.at_least("rank", self.rank, 1)
        check.one_of("group", self.group, group.POLICIES)
        check.flag("stale", self.stale)


@dataclass(frozen=True, eq=False)
class _Prompt:
    """Low-rank approximation of the keys of a prompt that has ended.

    Args:
        pages: Number of complete chunks of the prompt, int64 `[B]`.
        tokens: Left factor of the prompt's keys, `[B, n, r]`; `r` is 0 if the keys stay exact.
        basis: Right factor of the prompt's keys, `[B, G, D, r]`.
        exact: True for tokens whose exact keys are used (outliers), bool `[B, G, n]`.
    """

    pages: Tensor
    tokens: Tensor
    basis: Tensor
    exact: Tensor

    def cut(self, length: int, pages: Tensor) -> _Prompt:
        """Return the approximation of the keys of the first `length` tokens only.

        pages: number of complete chunks among these tokens, int64 `[B]`.
        """
        least = torch.minimum(self.pages, pages)
        return _Prompt(least, self.tokens[:, :length], self.basis, self.exact[:, :, :length])

    def reordered(self, rows: Tensor) -> _Prompt:
        """Return the approximation for a reordered batch, whose sequence `b` was sequence
        `rows[b]`."""
        parts = (self.pages, self.tokens, self.basis, self.exact)
        return _Prompt(*(part.index_select(0, rows) for part in parts))


class ShadowKV(PagedIndex):
    """Selects all outlier chunks, and other chunks by the inner product of query and mean key.

    Outliers are the chunks whose keys differ most from their mean. After `end_prompt`, `fetch`
    computes keys of the prompt from two low-rank factors. Before the factorization, the rotary
    embedding is undone if the index knows it (`rope`). In `Hits.scores`, each row has the score of
    its chunk.

    Source: Sun et al., ShadowKV (ICML 2025).
    """

    Config = ShadowKVConfig
    statistics = ("_prompt",)

    _prompt: _Prompt | None = None

    # Chunks

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None = None) -> Codes:
        """Compute the mean key of each chunk, and the lowest cosine similarity of a key to this
        mean.
        """
        mean = keys.float().masked_fill(~present, 0).sum(3) / present.sum(3).clamp_min(1)
        normalize = self.ops.transform.normalize
        cosines = (normalize(keys)[0] * normalize(mean)[0][:, :, :, None]).sum(-1)
        likeness = cosines.masked_fill(~present[..., 0], 1).amin(-1)
        return {"landmarks": mean.to(keys.dtype), "likeness": likeness}

    def _page_layout(self, pages: str) -> Layout:
        landmarks = TensorSpec(f"B G {pages} D", self.geometry.dtype)
        return {
            "codes.landmarks": landmarks,
            "codes.likeness": TensorSpec(f"B G {pages}", torch.float32),
        }

    def _layout(self, sizes: StateSizes) -> Layout:
        layout = super()._layout(sizes)
        if not sizes.has("statistics.prompt"):
            return layout
        g, most = self.geometry, sizes.length // self.config.page
        rank = min(self.config.rank or 0, g.kv_heads * g.head_dim)
        parts = {
            "pages": TensorSpec("B", torch.int64, least=0, most=most),
            "tokens": TensorSpec(
                f"B T<={sizes.length} R<={rank}",
                g.dtype,
                allowed="without tokens where the rank is 0",
                rule=lambda state: bool(
                    state["statistics.prompt.basis"].shape[3]
                    or not state["statistics.prompt.exact"].shape[2]
                ),
            ),
            "basis": TensorSpec("B G D R", g.dtype),
            "exact": TensorSpec("B G T", torch.bool),
        }
        return layout | {f"statistics.prompt.{name}": spec for name, spec in parts.items()}

    def _page_scores(self, queries: Tensor) -> Tensor:
        return queries @ self._codes["landmarks"].float().mT

    def _sizes(self) -> Tensor:
        """Return how many tokens a search may return from each chunk, `[B, G, chunks]`."""
        g, P = self.geometry, int(self.config.page)
        pages = torch.arange(self._codes["likeness"].shape[2], device=g.device)
        sizes = (self.counts.to(g.device)[:, None] - pages * P).clamp(0, P)
        if self.config.stale and self._prompt is not None:
            sizes = sizes.masked_fill(pages >= self._prompt.pages[:, None], 0)
        return sizes[:, None].expand(-1, g.kv_heads, -1)

    def _outliers(self, sizes: Tensor, count: int) -> Tensor:
        """Return a mask of the outliers, bool `[B, G, pages]`.

        The likeness of a page is the lowest cosine similarity of a key of the page to the mean key
        of the page. The `count` pages with the lowest likeness are the outliers.
        """
        unlike = (-self._codes["likeness"]).masked_fill(sizes == 0, float("-inf"))
        slots = self.ops.select.top_k(unlike, count)[1]
        last = sizes.shape[-1]
        flags = torch.zeros((*sizes.shape[:2], last + 1), dtype=torch.bool, device=sizes.device)
        return flags.scatter_(-1, torch.where(slots < 0, last, slots), True)[..., :last]

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, config, sizes = self.geometry, self.config, self._sizes()
        scores = self._page_scores(group.fold(queries, g.kv_heads, config.group))
        scores = scores.masked_fill((sizes == 0)[:, :, None], float("-inf"))
        always = self._outliers(sizes, min(config.outliers, k // 2 // config.page)) & (sizes > 0)
        others = scores.masked_fill(always[:, :, None], float("-inf"))
        agreed, first = (
            self.ops.group.agree(part, config.group, scale=g.scale, softcap=g.softcap, sizes=sizes)
            for part in (scores, others)  # outliers take no part in the ranking of other chunks
        )
        first = first.masked_fill(always, float("inf"))
        starts = torch.arange(sizes.shape[-1], device=g.device) * config.page
        members = self._members()[:, None].expand(-1, g.kv_heads, -1)
        ids = self.ops.units.best_rows(first, starts.expand_as(sizes), sizes, members, k).ids
        hits: Hits = self.ops.units.ranked(ids, at(agreed, self._pages_of(ids), float("-inf")))
        return hits

    def _pages_of(self, ids: Tensor) -> Tensor:
        """Return the number of the chunk that contains each token of `ids`, -1 for an id of -1."""
        rank = ids
        if self.valid is not None:
            ranks = (self.valid.cumsum(-1) - 1)[:, None].expand(-1, ids.shape[1], -1)
            rank = at(ranks, ids, -1)
        return rank.div(self.config.page, rounding_mode="floor")

    # Keys of low rank

    def end_prompt(self) -> None:
        """End the prompt and factorize its keys. Further calls have no effect until `reset`."""
        if self._prompt is not None or not len(self):
            return
        g, n, rank = self.geometry, len(self), self.config.rank
        whole = self.counts.to(g.device) // self.config.page
        if rank is None or n <= rank:
            batch = len(self.counts)
            tokens = torch.zeros((batch, 0, 0), dtype=g.dtype, device=g.device)
            basis = tokens.new_zeros((batch, g.kv_heads, g.head_dim, 0))
            exact = torch.zeros((batch, g.kv_heads, 0), dtype=torch.bool, device=g.device)
        else:
            tokens, basis = self._factors(rank)
            outliers = self._outliers(self._sizes(), self.config.outliers)
            ids = torch.arange(n, device=g.device).expand(*outliers.shape[:2], -1)
            exact = at(outliers, self._pages_of(ids), 0)
        self._prompt = _Prompt(whole, tokens, basis, exact)

    def _factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Approximate the keys of the prompt by a product of two factors of the given rank.

        The keys of all KV heads are concatenated. The basis consists of the first right singular
        vectors of the concatenated keys. This choice minimizes the squared error (Eckart and
        Young).

        Returns:
            Left factor `[B, N, r]` and basis `[B, G, D, r]`.
        """
        g = self.geometry
        width = g.kv_heads * g.head_dim
        gram = torch.zeros((len(self.counts), width, width), dtype=torch.float64, device=g.device)
        for block in self._unrotated():
            gram += block.double().mT @ block.double()
        vectors = torch.linalg.eigh(gram).eigenvectors[..., -min(rank, width) :].float()
        tokens = torch.cat([block @ vectors for block in self._unrotated()], dim=1)
        basis = vectors.reshape(-1, g.kv_heads, g.head_dim, vectors.shape[-1])
        return tokens.to(g.dtype), basis.to(g.dtype)

    def _unrotated(self) -> Iterator[Tensor]:
        """Yield blocks of keys without the rotary embedding, heads concatenated, `[B, n, G D]`."""
        for start, rows in self._store.blocks(BLOCK):
            keys, stop = rows.keys.float(), start + rows.keys.shape[2]
            if self.valid is not None:
                keys = keys.masked_fill(~self.valid[:, None, start:stop, None], 0)
            positions = torch.arange(start, stop, device=keys.device)
            yield rotate(keys, -positions, self.geometry.rope).transpose(1, 2).flatten(2)

    def fetch(self, hits: Hits) -> Rows:
        """Return the selected rows.

        The keys of the prompt are low-rank approximations, except for those of outlier chunks.
        """
        rows, prompt = super().fetch(hits), self._prompt
        if prompt is None or not prompt.tokens.numel():
            return rows
        n = prompt.tokens.shape[1]
        ids = hits.ids.masked_fill(hits.ids >= n, -1)
        batch = torch.arange(len(ids), device=ids.device)[:, None, None]
        tokens = prompt.tokens[batch, ids.clamp_min(0)].float()  # [B, G, K, r]
        keys = rotate(tokens @ prompt.basis.float().mT, ids, self.geometry.rope)
        kept = (ids < 0) | at(prompt.exact, ids, 1)
        keys = torch.where(kept[..., None], rows.keys, keys.to(rows.keys.dtype))
        return Rows(keys, rows.values)

    # Housekeeping

    def _cleared(self) -> None:
        self._prompt = None

    def _with_truncated(self, length: int) -> Any:
        tail, prompt = super()._with_truncated(length), self._prompt
        if prompt is None:
            return tail, None
        remaining = self.counts if self.valid is None else self.valid[:, :length].sum(1)
        remaining = remaining.to(self.geometry.device).clamp_max(length)
        return tail, prompt.cut(length, remaining // self.config.page)

    def _with_reordered(self, batch_indices: Tensor) -> Any:
        return None, None if self._prompt is None else self._prompt.reordered(batch_indices)

    def _commit(self, statistics: Any) -> None:
        if isinstance(statistics, tuple):
            statistics, self._prompt = statistics
        if isinstance(statistics, Tail):
            super()._commit(statistics)

    def _other_tensors(self) -> list[Tensor]:
        prompt = self._prompt
        return [] if prompt is None else [prompt.tokens, prompt.basis, prompt.exact]

    def bytes_per_key(self) -> dict[str, float]:
        """Return the bytes per token and KV head (see `BaseIndex.bytes_per_key`).

        The entry `stored` includes the low-rank factors of the keys.
        """
        sizes = super().bytes_per_key()
        rows = len(self) * self.geometry.kv_heads * len(self.counts)
        return {
            **sizes,
            "stored": sizes["stored"] + sum(t.nbytes for t in self._other_tensors()) / rows,
        }
