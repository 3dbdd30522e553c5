"""`ReadingIndex`: the methods of an index that read its rows (keys and values of tokens).

`fetch` returns rows. `attend` computes attention to rows, if the row store supports this.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.state import StatefulIndex
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Attended, AttendsToAll, Hits, Placement, Rows
from kvindex.core.resident import ResidentRows
from kvindex.storage.store import AttendsToAllRows, AttendsToRows, PinsAhead, PlacedRows

# (index class, store class, protocol of stores) -> does the store have the methods?
_able: dict[tuple[type, type, type], bool] = {}


class ReadingIndex(StatefulIndex):
    """Base class of `BaseIndex` with the methods that read rows (keys and values of tokens)."""

    ops: Any
    row_bytes: int

    @abstractmethod
    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Select the rows that each KV head should attend to (see `KVIndex.search`)."""

    def fetch(self, hits: Hits) -> Rows:
        """Read the keys and values of hits in the layer's dtype.

        Args:
            hits: Result of a search, with ids int64 `[B, G, K]`.

        Returns:
            Keys `[B, G, K, D]` and values `[B, G, K, Dv]`; zero for unused slots.

        Raises:
            ValueError: The ids have a wrong shape, or an id belongs to no row.
            TypeError: `hits` is not a `Hits`.
        """
        summaries = self._summaries()
        ids = self._checked_ids(hits, 0 if summaries is None else summaries.keys.shape[2])
        rows = self._store.gather(ids)
        if summaries is None:
            return rows
        named = ids < UNUSED  # id -2 is row 0 of the summaries, -3 row 1, …
        row = torch.where(named, UNUSED - 1 - ids, UNUSED)
        gather = self.ops.fetch.gather_rows
        return Rows(
            torch.where(named[..., None], gather(summaries.keys, row), rows.keys),
            torch.where(named[..., None], gather(summaries.values, row), rows.values),
        )

    @property
    def _places_rows(self) -> bool:
        """True if the store can report how many rows are on the device and on the host."""
        return isinstance(self._store, PlacedRows)

    def placement(self) -> Placement:
        """Return how many rows (keys and values of tokens) are on the device and how many on the
        host.

        Raises:
            TypeError: The store cannot report where its rows are.
        """
        if not isinstance(self._store, PlacedRows):
            raise TypeError(
                f"store: got a {type(self._store).__name__}, which cannot report where its rows "
                "are; use a store that implements kvindex.storage.store.PlacedRows"
            )
        where, cache = self._store.rows_by_place(), self._cache_use()
        return Placement(self.row_codec, self.row_bytes, where["device"], where["host"], *cache)

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start to allocate pinned host memory for rows on a background thread.

        If the length of a prompt and its answer is known, call this before the first token. Memory
        that this index does not use is kept for the next index. The call has an effect only if
        kernels store the rows on the host. It replaces an earlier call.

        Args:
            tokens: Number of tokens, including those that the index contains. 0 ends the
                allocation, for example because the prompt was cancelled.
            batch: Number of sequences.

        Raises:
            ValueError: A number is out of range.
        """
        check.at_least("tokens", tokens, 0)
        check.at_least("batch", batch, 1)
        if isinstance(self._store, PinsAhead):
            self._store.pin_ahead(tokens, batch)

    def _cache_use(self) -> tuple[int, int, int]:
        """Return how much the row cache is used: the cache in device memory for rows that are
        stored in host memory.

        The result is the capacity, the number of look-ups and the number of hits; zeros if there is
        no cache. See `protocol.Executor.cache_use`.
        """
        return 0, 0, 0

    def _rows_nbytes(self) -> dict[str, int]:
        """Return how many bytes the stored rows take.

        If the store uses both device and host memory, the result has one number for each.
        """
        store = self._store
        if not isinstance(store, PlacedRows) or store.on_device is None:
            return {"rows": store.nbytes()}
        rows = store.rows_by_place()
        return {f"rows_{place}": count * self.row_bytes for place, count in rows.items()}

    def _attending_store(self) -> AttendsToRows | None:
        """Return the store if it can compute attention for the rows that `fetch` returns, else
        None.
        """
        store: Any = self._store
        return store if self._store_has(AttendsToRows) and store.attends else None

    def _store_has(self, wanted: type) -> bool:
        """Return True if `fetch` returns the rows of the store, and the store has all methods of
        the protocol `wanted`.
        """
        own = type(self)
        known = own, type(self._store), wanted
        if known not in _able:  # isinstance() with a protocol takes longer than a kernel
            plain = own.fetch is ReadingIndex.fetch and own._summaries is StatefulIndex._summaries
            _able[known] = plain and isinstance(self._store, wanted)
        return _able[known]

    def _offers(self, wanted: type) -> bool:
        if wanted is AttendsToAll:
            return self.most_tokens > 0
        return super()._offers(wanted)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens per sequence that `attend_all` supports (see
        `protocol.AttendsToAll`).
        """
        store: Any = self._store
        return store.most_tokens if self._store_has(AttendsToAllRows) else 0

    def attend_all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to all rows of the index (see `protocol.AttendsToAll.attend_all`).

        queries: `[B, H, T, D]`.
        """
        check.at_least("len(index)", self._length, 1)
        g, most, store = self.geometry, self.most_tokens, self._store
        shape = {"B": self._batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        if queries.shape[2] > most or not isinstance(store, AttendsToAllRows):
            raise ValueError(
                f"queries: got {queries.shape[2]} tokens, allowed are up to {most}; an "
                "AttentionLayer attends with any number"
            )
        return store.attend_all(queries.detach())

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search, and attend to the selected rows and to the rows of `resident`.

        The index must have at least one token. See `protocol.Attends.attend`.

        Args:
            queries: `[B, H, D]`.
            resident: Rows of the attention sink and the local window.
            k: Rows to select per KV head.
        """
        return self._attended(queries, self.search(queries, k=k), resident)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of `hits` and of `resident`. The index must have at least one token.

        See `protocol.Attends.attend_hits`.

        Args:
            queries: `[B, H, D]`.
            hits: Result of a search.
            resident: Rows of the attention sink and the local window.
        """
        check.at_least("len(index)", self._length, 1)
        g = self.geometry
        self._check_tensor("queries", queries, {"B": self._batch, "H": g.q_heads, "D": g.head_dim})
        ids = self._checked_ids(hits, 0)
        if hits.log_weight is not None:
            shape = {"B": self._batch, "H": g.q_heads, "K": ids.shape[-1]}
            check.tensor("hits.log_weight", hits.log_weight, shape, torch.float32, g.device)
        return self._attended(queries, Hits(ids, hits.scores, hits.log_weight), resident)

    def _attended(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        store = self._attending_store()
        if store is None:
            raise ValueError(
                f"attend: got {type(self).__name__} with a {type(self._store).__name__}, which "
                "cannot compute attention; call search and fetch instead"
            )
        return store.attend(queries.detach(), hits, resident)
