"""CTkvr: uses queries of the prompt as centroids. Each centroid has a list of the keys to which it
attends most.

A search finds the centroids that are most similar to its query, and ranks the keys in their lists.

Lu et al., CTkvr: Efficient KV Cache Retrieval for Long-Context LLMs via Centroid-then-Token
Indexing (2025), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.bases.prompt_queries import CHOICES, PromptQueries, are_real, layout_of_queries
from kvindex.bases.query_lists import Blocks, QueryLists, recall, replace_oldest
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, below

BLOCK = 16_384
"""Tokens inserted into the lists at a time; bounds what is copied at once from the host."""

NEVER = float("-inf")


@dataclass(frozen=True)
class CTkvrConfig:
    """Options of CTkvr.

    Args:
        most: Maximum number of centroids. A prompt of `n` queries gives `min(most, n / every)`
            centroids, at least one (paper: 2048).
        every: Number of queries of the prompt per centroid (paper: 16).
        choice: Which queries of the prompt become centroids: the "last" ones (paper), the "first"
            ones, "random" ones, or ones that are spread "evenly" (paper, Table 4).
        probes: Number of centroids whose keys a search ranks (paper: C' = 4).
        rho: Number of keys in the list of a centroid (paper: 2.5 times the number of rows to
            retrieve, which is 512 or 1024).
        update: True if the query of each search becomes a centroid and replaces the oldest one
            (paper, section 3.1.3).
        stale: True if keys that are appended after the centroids were built are not added to their
            lists.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`; paper: "max_share").
        seed: Seed for `choice="random"`.
    """

    most: int = 2048
    every: int = 16
    choice: str = "last"
    probes: int = 4
    rho: int = 1280
    update: bool = True
    stale: bool = False
    group: str = "max_share"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("most", "every", "probes", "rho"):
            check.at_least(name, getattr(self, name), 1)
        check.one_of("choice", self.choice, CHOICES)
        check.one_of("group", self.group, group.POLICIES)
        for name in ("update", "stale"):
            check.flag(name, getattr(self, name))
        check.seed(self.seed, bits=31)


@dataclass(frozen=True)
class _State:
    """Queries that are not yet centroids, and the order in which centroids are replaced.

    Args:
        observed: Queries of the prompt, until centroids are built from them.
        pending: Arguments of `QueryLists.from_search` for the query of the last search, until this
            query becomes a centroid.
        oldest: Number of the centroid to replace next.
    """

    observed: PromptQueries | None = None
    pending: tuple[Tensor, Tensor, Tensor] | None = None
    oldest: int = 0


class CTkvr(BaseIndex):
    """Computes exact scores for the keys that similar queries of the prompt attend to most.

    Before `end_prompt`, or if no query was observed, a search computes exact scores for all keys.
    `Hits.scores` contains the exact `q·k`, combined over the query heads that share a KV head
    (option `group`).

    Source: Lu et al., CTkvr (2025), Algorithms 1 and 2.
    """

    Config = CTkvrConfig
    presets: ClassVar = {"paper512": {"rho": 1280}, "paper1024": {"rho": 2560}}

    statistics = ("_state", "_prompt_ended")

    _state: _State
    _prompt_ended: bool

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._query_lists = QueryLists(self.geometry, self.ops, self.config.rho)

    @property
    def depends_on_queries(self) -> bool:
        """True if the query of a search becomes a centroid, and so affects later searches."""
        return bool(self.config.update)

    def _undone(self, name: str) -> bool:
        return name == "search" or super()._undone(name)  # a search changes the state

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries `[B, H, T, D]` of the tokens `positions`.

        Until `end_prompt`, queries are stored, and some of them become centroids. After
        `end_prompt`, each call makes the query of the last search a centroid. A call with several
        queries, for example those of another prompt, also makes these queries centroids, and
        chooses their lists from all keys. NaN and infinite coordinates count as 0.
        """
        g, observed = self.geometry, self._state.observed
        batch = observed.queries.shape[0] if self._batch is None and observed else self._batch
        shape = {"B": batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        T = queries.shape[2]
        check.tensor("positions", positions, {"T": T}, torch.int64, g.device)
        queries, config = queries.detach().nan_to_num(0, 0, 0), self.config
        if "lists" in self._learned:
            if self._state.pending is not None:
                self._enqueue(self._query_lists.from_search(*self._state.pending))
            if T > 1:
                newest = queries[:, :, -self._learned["lists"].shape[2] :]
                self._enqueue(self._query_lists.build(newest, self._blocks))
        elif T > 1 or (T and not self._prompt_ended):
            options = dict(most=config.most, choice=config.choice, seed=config.seed)
            updated = PromptQueries.of(observed, queries, positions, **options)
            self._state = replace(self._state, observed=updated)

    def end_prompt(self) -> None:
        """End the prompt: build the centroids.

        If the index is empty, the next append builds them.
        """
        if len(self) and self._state.observed:
            self._learned = self._build(self._state.observed, self.valid, self._blocks)
            self._state = replace(self._state, observed=None)
        self._prompt_ended = True

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the sequences of the batch, and the queries observed before the first append."""
        observed = self._state.observed
        if self._batch is None and observed:
            rows = check.rows("batch_indices", batch_indices, observed.queries.shape[0])
            observed = observed.reordered(rows.to(self.geometry.device))
            self._state = replace(self._state, observed=observed)
        super().reorder(batch_indices)

    # Centroids and their lists

    def _build(self, observed: PromptQueries, valid: Tensor | None, blocks: Blocks) -> Codes:
        """Choose centroids from the observed queries, and build their lists (Algorithm 1).

        Args:
            observed: Queries of the prompt.
            valid: Mask of valid tokens, bool `[B, N]`, or None if all are valid.
            blocks: Function that yields the keys of all tokens in blocks.
        """
        queries, positions, config = observed.queries, observed.positions, self.config
        usable = are_real(queries)
        padded = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
        if valid is not None:
            inside = positions < valid.shape[1]
            usable &= valid[:, positions.clamp_max(valid.shape[1] - 1)] | ~inside
            padded = (~valid).sum(1)
        usable |= ~usable.any(1, keepdim=True)
        counts = ((observed.end - padded) // config.every).clamp(1, config.most)
        known = observed.chosen(counts, usable, choice=config.choice, seed=config.seed)
        columns = known.any(0)  # queries that were chosen for any sequence, the oldest first
        return {
            **self._query_lists.build(queries[:, :, columns], blocks),
            "known": known[:, columns],
        }

    def _blocks(self, length: int | None = None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield the stored keys of the first `length` tokens, in blocks of up to `BLOCK` tokens."""
        length = len(self) if length is None else length
        for start, rows in self._store.blocks(BLOCK):
            keys = rows.keys[:, :, : max(length - start, 0)]
            block = slice(start, start + keys.shape[2])
            yield start, keys, None if self.valid is None else self.valid[:, block]

    # First in, first out

    def _enqueue(self, new: Codes) -> None:
        """Replace the oldest centroids and their lists with new ones."""
        self._learned = replace_oldest(self._learned, new, self._state.oldest)
        oldest = self._oldest_after(new["known"].shape[1])
        self._state = replace(self._state, pending=None, oldest=oldest)

    def _oldest_after(self, count: int) -> int:
        return (self._state.oldest + count) % self._learned["known"].shape[1]

    def _layout(self, sizes: StateSizes) -> Layout:
        g, layout, state = self.geometry, super()._layout(sizes), "statistics.state"
        ids = dict[str, Any](least=UNUSED, most=sizes.length - 1)
        layout |= layout_of_queries(f"{state}.observed", sizes, g)
        layout[f"{state}.oldest"] = TensorSpec("", torch.int64, least=0)
        if sizes.has(f"{state}.pending"):
            layout[f"{state}.pending.0"] = TensorSpec("B H D", g.dtype)
            layout[f"{state}.pending.1"] = TensorSpec("B G n", torch.int64, **ids)
            layout[f"{state}.pending.2"] = TensorSpec("B G g n", torch.float32, infinite=True)
        if sizes.has("learned"):
            rows = self.config.rho
            learned = {
                "centroids": TensorSpec("B G g C D", g.dtype),
                "normalisers": TensorSpec("B G g C", torch.float32),
                "lists": TensorSpec(f"B G C {rows}", torch.int32, **ids),
                "list_scores": TensorSpec(f"B G C {rows}", torch.float32, infinite=True),
                "known": TensorSpec("B C", torch.bool),
            }
            layout |= {f"learned.{name}": spec for name, spec in learned.items()}
            layout[f"{state}.oldest"] = TensorSpec(
                "",
                torch.int64,
                least=0,
                allowed="below the number of learned.centroids",
                rule=lambda found: below(found[f"{state}.oldest"], found["learned.known"].shape[1]),
            )
        return layout

    # Methods that the base class calls

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        start, state = len(self), self._state
        if state.observed is not None:
            observed = {"B": state.observed.queries.shape[0], "G": None, "N": None, "D": None}
            check.tensor("keys", keys, observed)
        if "lists" in self._learned:
            learned, pending = self._learned, state.pending
            if pending is not None:  # build its list before these keys are added
                late = self._query_lists.from_search(*pending)
                learned = replace_oldest(learned, late, state.oldest)
            new = [(start, keys, valid)]
            return learned if self.config.stale else self._query_lists.insert(learned, lambda: new)
        if not self._prompt_ended or state.observed is None:
            return self._learned
        flags = self.valid
        if flags is not None or valid is not None:
            before = keys.new_ones((len(keys), start), dtype=torch.bool) if flags is None else flags
            after = keys.new_ones((len(keys), keys.shape[2]), dtype=torch.bool)
            flags = torch.cat([before, after if valid is None else valid], dim=1)
        return self._build(state.observed, flags, lambda: [*self._blocks(), (start, keys, valid)])

    def _learned_before(self, length: int) -> Codes:
        learned = self._learned
        if "lists" not in learned or not bool((learned["lists"] >= length).any()):
            return learned
        removed = learned["lists"] >= length
        if not self.config.stale:  # rebuild the lists, so that displaced keys return
            removed = torch.ones_like(removed)
        lists = learned["lists"].masked_fill(removed, UNUSED)
        remaining = {**learned, "lists": lists}
        remaining["list_scores"] = learned["list_scores"].masked_fill(removed, NEVER)
        if self.config.stale:
            return remaining
        return self._query_lists.insert(remaining, lambda: self._blocks(length))

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> _State:
        state = self._state
        if "lists" not in self._learned:
            return replace(state, observed=None) if self._prompt_ended else state
        if state.pending is None:
            return state
        return replace(state, pending=None, oldest=self._oldest_after(1))

    def _with_truncated(self, length: int) -> _State:
        return replace(self._state, pending=None)

    def _with_reordered(self, batch_indices: Tensor) -> _State:
        observed, pending = self._state.observed, self._state.pending
        if pending is not None:
            queries, ids, products = pending
            pending = queries[batch_indices], ids[batch_indices], products[batch_indices]
        observed = observed and observed.reordered(batch_indices)
        return replace(self._state, observed=observed, pending=pending)

    def _commit(self, statistics: _State) -> None:
        self._state = statistics

    def _cleared(self) -> None:
        self._state, self._prompt_ended = _State(), False

    def _other_tensors(self) -> list[Tensor]:
        observed, pending = self._state.observed, self._state.pending
        return [*(observed.tensors() if observed else []), *(pending or ())]

    def _scanned(self) -> list[Tensor]:
        keys = [rows.keys for _, rows in self._store.blocks(BLOCK)]
        if "lists" not in self._learned:
            return keys
        probed = self._learned["lists"][:, :, : self.config.probes]  # as if no key is in two lists
        keys = [torch.cat(keys, dim=2)[:, :, : probed.shape[2] * probed.shape[3]]]
        return [self._learned["centroids"], probed, *keys]

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, config = self.geometry, self.config
        heads = group.fold(queries, g.kv_heads, "max_share")  # [B, G, g, D]
        ids = self._all_ids(len(queries))
        if "lists" in self._learned:
            ids = recall(self._learned, heads, len(self), config.probes, self.ops)
        products = heads @ self._store.gather(ids).keys.float().mT
        if "lists" in self._learned and config.update:
            self._state = replace(self._state, pending=(queries, ids, products))
        if config.group == "mean_query":
            products = products.mean(2, keepdim=True)
        products = products.masked_fill((ids < 0)[:, :, None], NEVER)
        agreed = self.ops.group.agree(products, config.group, scale=g.scale, softcap=g.softcap)
        best, slots = self.ops.select.top_k(agreed, k)  # ids ascend, so ties go to the lower id
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), best)

    def _all_ids(self, batch: int) -> Tensor:
        """Return the ids of all tokens, int64 `[B, G, N]`, with -1 in place of padded tokens."""
        ids = torch.arange(len(self), device=self.geometry.device)
        ids = ids.expand(batch, self.geometry.kv_heads, -1)
        return ids if self.valid is None else ids.masked_fill(~self.valid[:, None], UNUSED)
