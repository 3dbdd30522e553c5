"""Stores of rows: the protocols that an index requires, and a store in plain torch.

A row is one token's key and value for one head, encoded as contiguous bytes by a row codec. An
index can use any `RowStore`. CUDA kernels need one that offers `AddressedRows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from kvindex.core import backend as backends
from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable
from kvindex.ops.fetch import gather_rows
from kvindex.storage.centers import JoinedRows, center_of, check_center, is_centered, of_rows
from kvindex.storage.codecs import WORD, Plain, codec
from kvindex.storage.columns import Columns

PLACES = ("device", "host", "auto")


@runtime_checkable
class RowStore(Protocol):
    """The rows of an index, in the order of appends. The option `store=` takes an empty one.

    A store must also be a `kvindex.core.restore.Restorable`, because a call that fails is undone:
    either it never overwrites existing rows, or its `checkpoint` and `rollback` restore them. An
    append has two steps: `join` encodes keys and values, and `reserve`, `write` and `append` take
    the result.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row: a token's key and value for one head."""
        ...

    @property
    def row_codec(self) -> str:
        """Name of the row codec (`kvindex.storage.codecs.NAMES`)."""
        ...

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def join(self, keys: Tensor, values: Tensor) -> Any:
        """Encode rows for an append at the present length.

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.

        Returns:
            An object that `reserve`, `write` and `append` take.
        """
        ...

    def reserve(self, rows: Any) -> None:
        """Make room for `rows`, without a change to existing rows. This may run out of memory."""
        ...

    def reserve_tokens(self, tokens: int) -> None:
        """Make room for `tokens` tokens in total, if making room takes long in this store."""
        ...

    def write(self, rows: Any) -> None:
        """Write `rows` behind the last token, where nobody reads them yet.

        A store that gains nothing from writing early does nothing here.
        """
        ...

    def append(self, rows: Any) -> None:
        """Append `rows`, for which `reserve` has made room."""
        ...

    def gather(self, ids: Tensor) -> Rows:
        """Return rows by their ids.

        Args:
            ids: Int64 `[B, G, K]`, from -1 to `N - 1`.

        Returns:
            Keys `[B, G, K, D]` and values `[B, G, K, Dv]` on the compute device, zeros for -1.
        """
        ...

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """Yield all rows in order, at most `size` tokens at a time: (first id, rows)."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        ...

    def reordered(self, batch_indices: Tensor) -> Self:
        """Return a copy in which sequence `b` is sequence `batch_indices[b]` of this store."""
        ...

    def expand_batch(self, count: int) -> Self:
        """Return a read-only view of one sequence as a batch of `count` sequences."""
        ...

    def emptied(self) -> Self:
        """Return an empty store with the same options."""
        ...

    def nbytes(self) -> int:
        """Bytes in use."""
        ...


METHODS = frozenset(name for name in vars(RowStore) if name == "__len__" or name[0] != "_")
"""Names of the methods and properties of a `RowStore`."""


@runtime_checkable
class EncodedRows(Protocol):
    """A store that returns and takes rows as the bytes that its row codec made.

    The rows of a store with a center (`CenteredRows`) can only be decoded together with it.
    """

    def encoded(self) -> Tensor:
        """Return all rows, uint8 `[B, G, N, row_bytes]`."""
        ...

    def append_encoded(self, rows: Tensor) -> None:
        """Append rows that `encoded` returned."""
        ...


@runtime_checkable
class CenteredRows(EncodedRows, Protocol):
    """A store that may encode keys as their difference from a center (`storage/centers.py`).

    The first append to an empty store determines the center, which stays until the store is empty
    again.
    """

    def join(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> Any:
        """Like `RowStore.join`; valid: bool `[B, N]`, the keys for the center; None for all."""
        ...

    @property
    def center(self) -> Tensor | None:
        """The center of the stored keys, float32 `[B, G, D]` on the compute device; None for zeros.

        In a store with `AddressedRows` it is the same tensor for as long as `B` does not change.
        """
        ...

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append rows that `encoded` returned, relative to `center`; None for zeros.

        Raises ValueError for a center if the store is not empty, or its codec uses no center.
        """
        ...


@runtime_checkable
class AttendsToRows(Protocol):
    """A store that can attend to its rows where they are stored."""

    @property
    def attends(self) -> bool:
        """Whether the store can attend to rows of its `row_codec`."""
        ...

    def attend(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of hits (see `kvindex.core.protocol.Attends.attend_hits`)."""
        ...


@runtime_checkable
class AddressedRows(Protocol):
    """A store whose rows kernels can read: in pages that never move, found by a table of addresses.

    The row of token `n`, head `g` and sequence `b` begins at `table[b, n // page_tokens] +
    g · head_bytes + n % page_tokens · row_bytes`, a multiple of 16: the key, then the value, as
    encoded by `row_codec`. Kernels read pages of 256 tokens with `head_bytes = 256 · row_bytes`. If
    a store has pages of another size, an index searches with kernels, but fetches with `gather`.
    """

    @property
    def table(self) -> Tensor:
        """Addresses of pages, int64 `[B, S]` on the compute device; 0 for a missing page.

        It has room for the longest sequence, and is the same tensor as long as `B` is the same.
        """
        ...

    @property
    def page_tokens(self) -> int:
        """Number of tokens in a page."""
        ...

    @property
    def head_bytes(self) -> int:
        """Bytes from the rows of one head in a page to the rows of the next head."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes from one token's row to the next token's row, a multiple of 16."""
        ...

    @property
    def row_codec(self) -> str:
        """Name of the row codec (`kvindex.storage.codecs.NAMES`)."""
        ...

    @property
    def far(self) -> bool:
        """Whether the rows are in host memory, so that a device cache of rows is useful."""
        ...

    def wait(self) -> None:
        """Let later work of the current stream wait until all appended rows are written."""
        ...


@runtime_checkable
class PlacedRows(AddressedRows, Protocol):
    """A store with rows on both device and host. `far` may become True when it grows."""

    @property
    def near(self) -> Tensor | None:
        """Which pages are in device memory; None if all pages are in the same kind of memory.

        A uint8 tensor `[B, S]` on the device, which stays the same object as long as `table` does.
        Kernels do not put rows of these pages into the device cache.
        """
        ...

    def rows_by_place(self) -> dict[str, int]:
        """Return the number of rows on the `device` and the `host`, of all heads and sequences."""
        ...


@runtime_checkable
class PinsAhead(Protocol):
    """A store that can allocate memory in the background, because that takes long."""

    def pin_ahead(self, tokens: int, batch: int) -> None:
        """Start to allocate memory for `tokens` tokens of `batch` sequences, and return.

        The call does not wait for the allocation, and never fails.
        """
        ...


def row_store(
    store: object,
    geometry: Geometry,
    *,
    backend: str = "torch",
    row_codec: str = "plain",
    device_fraction: float | None = None,
) -> RowStore:
    """Return the store of an index: a new one of the backend, or the caller's own.

    Args:
        store: One of `PLACES`, or an empty store.
        geometry: The index's geometry.
        backend: Name of the backend, whose store is used for a place.
        row_codec: Name of the row codec.
        device_fraction: Fraction of the rows to place on the device, only with "auto".

    Raises:
        ValueError: The store is not a `RowStore`, has tokens or another codec, or
            `device_fraction` is given with another store.
        TypeError: An option has the wrong type.
    """
    if device_fraction is not None:
        check.within("device_fraction", device_fraction, 0, 1)
        if store != "auto":
            raise ValueError(
                f"device_fraction: got {device_fraction} with store={store!r}, allowed with "
                "store='auto'"
            )
    if isinstance(store, str) and store in PLACES:
        if backend == "torch":
            return TensorStore(geometry, store, row_codec)
        made: RowStore = backends.resolve(backend).store(
            geometry, store, row_codec, device_fraction
        )
        return made
    if not isinstance(store, RowStore) or not isinstance(store, Restorable):
        lacks = "" if isinstance(store, str) else ", ".join(sorted(METHODS - {*dir(store)}))
        got = f"{store!r}, which lacks {lacks}" if lacks else repr(store)
        raise ValueError(
            f"store: got {got}, allowed is 'device', 'host', 'auto' or your own store: a "
            "kvindex.storage.store.RowStore and kvindex.core.restore.Restorable"
        )
    if len(store):
        raise ValueError(f"store: got one that holds {len(store)} tokens, allowed is an empty one")
    if row_codec not in ("plain", store.row_codec):
        raise ValueError(
            f"row_codec: got {row_codec!r} with a store of its own, allowed is its codec, "
            f"{store.row_codec!r}"
        )
    return store


class TensorStore(Restorable):
    """A store of encoded rows in one tensor, on the compute device or in host memory.

    Each row is contiguous, so that it is read in one piece.

    Args:
        geometry: The index's geometry.
        place: "device" to store rows on the compute device; "host" to store them in CPU memory and
            copy fetched rows (not pinned: the CUDA backend has stores of its own); "auto" only for
            a CPU, where both are the same.
        row_codec: One of `kvindex.storage.codecs.NAMES`.

    Raises:
        ValueError: The place is "auto" and the device is not a CPU, or a name is unknown.
    """

    def __init__(self, geometry: Geometry, place: str = "device", row_codec: str = "plain") -> None:
        if check.one_of("store", place, PLACES) == "auto" and geometry.device.type != "cpu":
            raise ValueError(
                f"store: got 'auto' for one tensor on {geometry.device}, allowed is 'device' or "
                "'host', or backend='cuda', which has rows in blocks"
            )
        self._geometry, self.row_codec = geometry, row_codec
        self._codec, self._centered = codec(row_codec, geometry), is_centered(row_codec, geometry)
        self._device = torch.device("cpu") if place == "host" else geometry.device
        self._columns = Columns()
        self._center: Tensor | None = None  # the center of the stored keys

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a multiple of 16."""
        return self._codec.row_bytes

    def join(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Encode keys `[B, G, N, D]` and values `[B, G, N, Dv]`, and copy them to the store.

        Plain rows that are already in the store's kind of memory are returned unchanged, and
        `append` copies them once.
        valid: as in `CenteredRows.join`.
        """
        if isinstance(self._codec, Plain) and keys.device == values.device == self._device:
            return {"keys": keys.detach(), "values": values.detach()}
        center = self.center
        if self._centered and not len(self) and keys.shape[2]:
            center = center_of(keys, valid)
        encoded = self._codec.encode(keys, values, of_rows(center))
        rows = JoinedRows(rows=encoded.view(WORD).to(self._device))
        rows.center = center
        return rows

    def reserve(self, rows: dict[str, Tensor]) -> None:
        """Make room for `rows` from `join`."""
        self._columns.reserve(self._as_joined(rows))

    def reserve_tokens(self, tokens: int) -> None:
        """Do nothing: the tensor grows with its tokens."""

    def write(self, rows: dict[str, Tensor]) -> None:
        """Do nothing: `append` copies."""

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append `rows` from `join`."""
        if "rows" in rows:
            center = rows.center if isinstance(rows, JoinedRows) else None
            center = self._center if len(self) else center
            self._columns.append(rows)
            self._center = center
        elif isinstance(self._codec, Plain):
            place = self._columns.claim(self._as_joined(rows))["rows"]
            self._codec.put(rows["keys"], rows["values"], place.view(torch.uint8))

    def gather(self, ids: Tensor) -> Rows:
        """Return rows of ids int64 `[B, G, K]` on the compute device, zeros for -1."""
        if len(self) == 0:
            none = torch.zeros((*ids.shape, self.row_bytes // WORD.itemsize), dtype=WORD)
            return self._decoded(none)
        return self._decoded(gather_rows(self._columns["rows"], ids.to(self._device)), ids)

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """Yield all rows in order, at most `size` tokens at a time: (first id, rows)."""
        for start in range(0, len(self), size):
            rows = self._columns["rows"][:, :, start : start + size]
            batch, same = len(rows), rows.stride(0) == 0  # a view of one sequence is decoded once
            found = self._decoded(rows[:1] if same else rows)
            parts = (found.keys, found.values)
            yield start, Rows(*(part.expand(batch, -1, -1, -1) for part in parts))

    def encoded(self) -> Tensor:
        """Return a copy of all encoded rows, uint8 `[B, G, N, row_bytes]`."""
        return self._columns["rows"].view(torch.uint8).clone()

    @property
    def center(self) -> Tensor | None:
        """The center of the stored keys, float32 `[B, G, D]`; None for zeros."""
        return self._center if len(self) else None

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append rows that `encoded` returned, relative to `center`; None for zeros."""
        check_center(center, centered=self._centered, held=len(self))
        joined = JoinedRows(rows=rows.contiguous().view(WORD).to(self._device))
        joined.center = center if center is None else center.to(self._geometry.device)
        self.append(joined)

    def contiguous_rows(self) -> Tensor:
        """Return a view of all encoded rows, int64 `[B, G, N, row_bytes / 8]`.

        It is valid until the next change.
        """
        return self._columns["rows"]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        self._columns.truncate(length)

    def reordered(self, batch_indices: Tensor) -> Self:
        """Return a copy in which sequence `b` is sequence `batch_indices[b]` of this store."""
        copied = self._shallow()
        copied._columns = self._columns.reordered(batch_indices)
        if (center := self.center) is not None:
            copied._center = center[batch_indices.to(center.device)]
        return copied

    def expand_batch(self, count: int) -> Self:
        """Return a read-only view of one sequence as a batch of `count` sequences."""
        view = self._shallow()
        view._columns = self._columns.expand_batch(count)
        if (center := self.center) is not None:
            view._center = center.expand(count, -1, -1)
        return view

    def emptied(self) -> Self:
        """Return an empty store with the same options."""
        empty = self._shallow()
        empty._columns, empty._center = self._columns.emptied(), None
        return empty

    def nbytes(self) -> int:
        """Bytes in use."""
        return self._columns.nbytes()

    def memory(self) -> dict[int, int]:
        """Return address -> bytes of each column in use."""
        return self._columns.memory()

    def _as_joined(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a tensor with the shape of the encoded rows. Its values are not used."""
        if "rows" in rows:
            return rows
        one = torch.empty((), dtype=WORD, device=self._device)
        return {"rows": one.expand(*rows["keys"].shape[:3], self.row_bytes // WORD.itemsize)}

    def _decoded(self, words: Tensor, ids: Tensor | None = None) -> Rows:
        """Decode rows of the first sequences; ids: the rows' ids, where -1 stands for zeros."""
        raw, center = words.to(self._geometry.device).view(torch.uint8), self.center
        if center is None:
            return self._codec.decode(raw)
        rows = self._codec.decode(raw, of_rows(center[: len(raw)]))
        if ids is None:
            return rows
        return Rows(rows.keys.masked_fill((ids < 0).to(raw.device)[..., None], 0), rows.values)
