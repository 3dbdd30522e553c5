"""`BaseIndex`: the base class of all indexes, with the public methods (append, search, truncate,
…).

A new index derives from this class and overrides `_encode`, `_search` and, as needed, other methods
of `kvindex.bases.hooks`. Public methods check their arguments first (`bases/deferred.py`). If a
call fails after these checks, its changes are undone (`core/transaction.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.bases.reading import ReadingIndex
from kvindex.core import backend as backends
from kvindex.core import check as checks
from kvindex.core.config import make_config
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Attends, Codes, Hits, PlacesRows, ReportsMemory
from kvindex.core.streams import to_host
from kvindex.storage.columns import Columns, Valid
from kvindex.storage.store import CenteredRows, RowStore, row_store

FIRST_APPEND = 2**15
"""Number of tokens for which an attention layer waits before the first append to an index that
learns from it (`protocol.LearnsOnce`). Until then, their keys and values are on the compute device.
In a layer with 8 KV heads of 128 coordinates and 16 bits per number, they take 128 MiB."""


class BaseIndex(ReadingIndex):
    """Base class of the indexes in `kvindex/indexes/`.

    Args:
        q_heads: Number of query heads `H`.
        kv_heads: Number of KV heads `G`; `H` is a multiple of it.
        head_dim: Dimension `D` of keys and queries, a multiple of 8.
        value_dim: Dimension `Dv` of values; None for `head_dim`.
        scale: Factor of the logits; None for `1 / sqrt(head_dim)`.
        softcap: If given, logits become `softcap · tanh(logit / softcap)`.
        rope: Inverse frequencies of the keys' rotary embedding, float `[F]`, or None. Only some
            indexes need it.
        dtype: Dtype of keys, values and queries.
        device: Device of the tensors.
        value_in_key: True if the values are the first `value_dim` coordinates of the keys, as in
            multi-head latent attention. The values are then not stored separately.
        backend: Implementation of the operations: "torch", "cuda" or "cpu". None for the compiled
            kernels of the device ("cuda" or "cpu") if this machine can run them, else "torch".
        store: Where rows are stored: "device", "host", or "auto" for the device until
            `device_fraction` of its memory is used, then the host. An empty
            `kvindex.storage.store.RowStore` is also allowed.
        row_codec: How rows are stored. "plain" stores them unchanged. "int8" and "fp8" store one
            byte per number, and one scale for each key and each value. "int4" and "int2" store 4
            or 2 bits per number, and a minimum and a step size for each 32 numbers. Everything
            that reads rows, such as `fetch`, gets the decoded numbers.
        device_fraction: For `store="auto"`, the fraction of device memory, in (0, 1], that rows may
            take. It is relative to the free memory plus the memory that the rows already take.
            None for 0.6.
        check: True to check keys and queries for NaN and infinity immediately, False to never check
            them. None checks immediately on a CPU. On a CUDA device, None raises the error at the
            next call that synchronizes anyway, because reading the result of a check would
            synchronize.
        preset: Name of a preset of the index.
        **options: Fields of the index's `Config`; they override the preset.

    Attributes:
        row_bytes: Bytes of one token's key and value for one head, as stored and fetched.

    Examples:
        ```python
        index = kvindex.create("exact", q_heads=32, kv_heads=8, head_dim=128)
        index.append(keys, values)  # [B, G, N, D] and [B, G, N, Dv]
        rows = index.fetch(index.search(queries, k=100))  # queries [B, H, D]
        index.truncate(len(index) - 1)
        index.save("folder")  # kvindex.load("folder") loads it
        ```
    """

    parts_are_its_own = True

    def __init__(
        self,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rope: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        value_in_key: bool = False,
        backend: str | None = None,
        store: str | RowStore = "device",
        row_codec: str = "plain",
        device_fraction: float | None = None,
        check: bool | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> None:
        geometry = Geometry.of(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=scale,
            softcap=softcap,
            rope=rope,
            dtype=dtype,
            device=device,
            value_in_key=value_in_key,
        )
        super().__init__(geometry, check)
        self.config: Any = make_config(type(self), preset, options, others=shared_options())
        chosen = backends.choose(geometry.device) if backend is None else (backend, "as requested")
        self.backend, self._why = chosen
        self.ops: Any = backends.resolve(self.backend)
        if self.backend != "torch":
            self.ops.ready(self.geometry.device)
        row_options = dict[str, Any](row_codec=row_codec, device_fraction=device_fraction)
        self._store = row_store(store, self.geometry, backend=self.backend, **row_options)
        self.row_codec, self.row_bytes = self._store.row_codec, self._store.row_bytes
        if self.needs_rope and self.geometry.rope is None:
            raise ValueError(
                f"rope: got None, but {type(self).__name__} needs the inverse frequencies of the "
                "keys' rotary embedding; pass them as floats of shape [F]"
            )
        self._codes, self._valid = Columns(), Valid()
        self._learned: Codes = {}
        self._batch: int | None = None  # unknown until the first append
        self._length = 0
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._cleared()

    def __repr__(self) -> str:
        g, batch = self.geometry, self._batch or 0
        shape = f"q_heads={g.q_heads}, kv_heads={g.kv_heads}, head_dim={g.head_dim}"
        place = f"dtype={g.dtype}, device={str(g.device)!r}, backend={self.backend!r}"
        return (
            f"<{type(self).__name__} {shape}, {place}: {batch} sequences of {self._length} tokens>"
        )

    def _offers(self, wanted: type) -> bool:
        if wanted is Attends and type(self).attend is ReadingIndex.attend:
            return self._attending_store() is not None
        if wanted is PlacesRows:
            return self._places_rows
        return super()._offers(wanted)

    # The protocol

    def encode(self, keys: Tensor) -> Codes:
        """Return the codes that `append` would store for these keys, without appending the keys.

        Args:
            keys: `[B, G, N, D]`.

        Returns:
            Named tensors `[B, G, N, ...]`.

        Raises:
            ValueError: A shape, dtype, device or batch size does not fit, or a key is not finite.
            TypeError: The argument is not a tensor.
        """
        self._check_tensor("keys", keys, self._per_token(self._batch, None, self.geometry.head_dim))
        self._check_finite("keys", keys)
        keys = keys.detach()
        return self._encode(keys, self._learn(keys, None))

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens. If the call fails, the index is unchanged.

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.
            valid: Bool `[B, N]`, False for padding at any position; None where no token is padded.
                A padded token has an id and a row, but `search` never returns it, and statistics
                leave it out.

        Raises:
            ValueError: A shape, dtype, device or batch size does not fit, or a valid key is NaN or
                infinite. With `value_in_key`, also if a value differs from the first coordinates of
                its key.
            TypeError: An argument is not a tensor.
        """
        self.start_append(keys, values, valid=valid)()

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Do the first, long part of an append, and return a function that completes the append.

        Until the function is called, the index can be searched and read as before, and `keys` and
        `values` must not be modified. If the index supports `protocol.AppendsAsync`, its existing
        data does not move when the index grows. Then `start_append` may run on one CUDA stream
        while another stream searches (docs/cuda.md).

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            A function without arguments. It raises ValueError if the index was changed after
            `start_append`.

        Raises:
            ValueError: An argument does not fit (see `append`).
            TypeError: An argument is not a tensor.
        """
        g = self.geometry
        self._check_tensor("keys", keys, self._per_token(self._batch, None, g.head_dim))
        batch, count = keys.shape[0], keys.shape[2]
        self._check_tensor("values", values, self._per_token(batch, count, g.value_dim))
        if valid is not None:
            checks.tensor("valid", valid, {"B": batch, "N": count}, torch.bool, g.device)
        if keys.numel() == 0:
            return lambda: None
        length, stored, known = self._length, self._codes, self._learned
        learned, codes = self._prepared(keys.detach(), valid)
        if g.value_in_key:
            self._check_in_keys(keys, values)
        rows = self._joined(keys, values, valid)
        counted = partial(torch.tensor, count) if valid is None else to_host(valid.sum(1))
        self._codes.reserve(codes)
        self._store.reserve(rows)
        statistics = self._with_appended(codes, valid)
        for part, new in ((self._codes, codes), (self._store, rows)):
            part.write(new)
        statistics = self._with_written(statistics)

        def end() -> None:
            if length != self._length or stored is not self._codes or known is not self._learned:
                raise ValueError(
                    "append: the index was changed after start_append and before the append was "
                    "completed; call start_append again"
                )
            counts, flags = counted(), self._valid.reserve(self._length, keys, valid)
            self._codes.append(codes)
            self._store.append(rows)
            self._valid.append(flags, all_real=valid is None)
            self._learned = learned
            self._batch = batch
            self._counts = self._counts + counts if self._length else counts.expand(batch)
            self._length += count
            self._commit(statistics)

        return partial(self._finish_append, end)

    def _joined(self, keys: Tensor, values: Tensor, valid: Tensor | None) -> Any:
        store = self._store
        if valid is not None and isinstance(store, CenteredRows):
            return store.join(keys, values, valid=valid)
        return store.join(keys, values)

    def _finish_append(self, end: Callable[[], None]) -> None:
        """Call `end`, which completes an append, and undo its changes if it fails."""
        end()

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Select the rows that each KV head should attend to.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.
            coverage: Fraction of the attention weight of all tokens in the index, in (0, 1], or
                None. The search stops at fewer than `k` rows when it estimates that the selected
                rows have this fraction for every query head of the KV head. The estimate is in
                `Hits.coverage`. The true fraction may be lower, except for the index `exact`. Only
                some indexes support this argument.

        Returns:
            Token ids int64 `[B, G, k]` (-1 for an unused slot), scores float32 `[B, G, k]`, and for
            some indexes log weights and coverage. An index without tokens finds nothing: all ids
            are -1, for which `fetch` returns zeros.

        Raises:
            ValueError: A shape, dtype or device does not fit, a query is not finite, `k` or
                `coverage` is out of range, or the index does not support coverage.
            TypeError: An argument is not a tensor.
        """
        checks.wanted_rows(k)
        if coverage is None:
            return self._searched(queries, k, self._search)
        checks.within("coverage", coverage, 0, 1)
        self.check_coverage(coverage)
        target = float(coverage)
        hits = self._searched(
            queries, k, lambda found, most: self._search_coverage(found, most, target)
        )
        if hits.coverage is None:  # no token is in the index
            covered = torch.ones(queries.shape[:2], device=self.geometry.device)
            return replace(hits, coverage=covered)
        return hits

    def _searched(self, queries: Tensor, k: int, find: Callable[[Tensor, int], Hits]) -> Hits:
        """Check the queries, and search with `find`.

        Args:
            queries: `[B, H, D]`.
            k: Number of slots of the result.
            find: Function of the queries and of the largest number of rows that can be found. It is
                not called if no valid token is in the index.
        """
        g = self.geometry
        self._check_tensor("queries", queries, {"B": self._batch, "H": g.q_heads, "D": g.head_dim})
        self._check_finite("queries", queries)
        if self._length == 0 or int(self._counts.max()) == 0:
            ids = torch.full((len(queries), g.kv_heads, k), UNUSED, device=g.device)
            return Hits(ids, torch.full_like(ids, float("-inf"), dtype=torch.float32))
        most = min(k, self._rows_at_most())
        hits = find(queries.detach(), most)
        return hits if most == k else hits.widened(k)

    def _rows_at_most(self) -> int:
        """Return the largest number of rows that a search can find, including summary rows."""
        summaries = self._summaries()
        return int(self._counts.max()) + (0 if summaries is None else summaries.keys.shape[2])

    def __len__(self) -> int:
        """Return the number of tokens `N`, including padded tokens."""
        return self._length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and remove the tokens after them.

        Args:
            length: Number of tokens to keep, at least 0.

        Raises:
            ValueError: `length` is negative.
        """
        checks.at_least("length", length, 0)
        self.raise_pending()
        if length >= self._length:
            return
        gone = torch.tensor(self._length - length)
        if self.valid is not None:
            gone = self.valid[:, length:].sum(1).cpu()
        statistics, learned = self._with_truncated(length), self._learned_before(length)
        for part in (self._codes, self._store, self._valid):
            part.truncate(length)
        self._learned = {**learned}  # a new object, so that a started append raises an error
        self._counts = self._counts - gone
        self._length = length
        self._commit(statistics)

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch: sequence `b` becomes a copy of the former sequence `batch_indices[b]`.

        Args:
            batch_indices: Int64 `[B']`; the new batch size `B'` may differ from `B`.

        Raises:
            ValueError: Shape, dtype or device do not fit, or an entry is outside the batch.
            TypeError: The argument is not a tensor.
        """
        checks.rows("batch_indices", batch_indices, self._batch)
        if self._batch is None:
            return
        self.raise_pending()
        order = batch_indices.to(self.geometry.device)
        statistics = self._with_reordered(order)
        codes, valid = self._codes.reordered(batch_indices), self._valid.reordered(batch_indices)
        learned = {name: tensor[order] for name, tensor in self._learned.items()}
        self._store = self._store.reordered(batch_indices)
        self._codes, self._valid, self._learned = codes, valid, learned
        self._batch = len(batch_indices)
        self._counts = self._counts[batch_indices.cpu()]
        self._commit(statistics)

    def reset(self) -> None:
        """Remove all tokens, the learned parameters and the batch size."""
        self._codes, self._store = self._codes.emptied(), self._store.emptied()
        self._valid, self._learned = self._valid.emptied(), {}
        self._batch, self._length = None, 0
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._deferred, self._broken = {}, None
        self._cleared()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use per memory tier.

        Any thread may call this at any time. A concurrent append may be counted only partly.

        Returns:
            `codes` on the compute device, including statistics and constants, and `rows` in the
            store. A store with rows on both device and host has `rows_device` and `rows_host`
            instead of `rows`.
        """
        codes = self._codes.nbytes() + self._valid.nbytes()
        codes += sum(tensor.nbytes for tensor in [*self._learned.values(), *self._other_tensors()])
        return {"codes": codes, **self._rows_nbytes()}

    def memory(self) -> dict[int, int]:
        """Return a dict from addresses to sizes of the memory blocks that contain codes and rows.

        See `protocol.ReportsMemory.memory`. The memory of a custom store without `ReportsMemory` is
        not included, and neither is the memory of a library such as FAISS.
        """
        sizes: dict[int, int] = {}
        for part in (self._codes, self._store):
            sizes |= part.memory() if isinstance(part, ReportsMemory) else {}
        return sizes

    def bytes_per_key(self) -> dict[str, float]:
        """Return the number of bytes per token and KV head, without the row store.

        Returns:
            `stored`: bytes of codes and learned parameters. `scanned`: bytes that a search reads.

        Raises:
            ValueError: The index is empty, so the shape of its codes is unknown.
        """
        checks.at_least("len(index)", self._length, 1)
        tokens = self._length * self.geometry.kv_heads * int(self._batch or 1)
        scanned = sum(tensor.nbytes for tensor in self._scanned())
        stored = self._codes.nbytes() + sum(tensor.nbytes for tensor in self._learned.values())
        return {"stored": stored / tokens, "scanned": scanned / tokens}

    def expand_batch(self, count: int) -> Self:
        """Return a read-only view in which the single sequence of this index appears `count` times.

        With the view, one call of `search` serves `count` queries. The view supports only `search`
        and `fetch`, and is valid until this index changes.

        Args:
            count: Number of sequences of the view.

        Raises:
            ValueError: The batch size of this index is not 1.
        """
        checks.at_least("count", count, 1)
        if self._batch != 1:
            raise ValueError(
                f"expand_batch: got an index with {self._batch} sequences, allowed is 1"
            )
        rows = torch.zeros(count, dtype=torch.int64)
        view = self._shallow()
        view._codes, view._store = self._codes.expand_batch(count), self._store.expand_batch(count)
        view._valid = self._valid.reordered(rows)
        view._learned = {name: t.expand(count, *t.shape[1:]) for name, t in self._learned.items()}
        view._counts, view._batch = self._counts.expand(count), count
        view._commit(self._with_reordered(rows.to(self.geometry.device)))
        return view

    def explain(self) -> str:
        """Return the chosen backend, store and execution path with reasons, one per line."""
        return "\n".join(self._paths())

    def _paths(self) -> list[str]:
        store = f"store: {type(self._store).__name__}, row_codec {self._store.row_codec!r}"
        paths = [f"backend: {self.backend} ({self._why})", store]
        placed = self.capability(PlacesRows)
        return paths if placed is None else [*paths, f"rows: {placed.placement()}"]

    # Which tokens are valid
    @property
    def valid(self) -> Tensor | None:
        """True for tokens that are not padding, bool `[B, N]`; None if no token is padded."""
        return self._valid.flags

    @property
    def counts(self) -> Tensor:
        """Number of valid tokens of each sequence, int64 `[B]`, on the CPU."""
        return self._counts


def shared_options() -> list[str]:
    """Return the constructor options of every index, without the fields of its `Config`."""
    given = inspect.signature(BaseIndex.__init__).parameters.values()
    return [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
