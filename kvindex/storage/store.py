"""Row stores: protocols for the storage of keys and values, and an implementation in plain torch.

A row is the key and the value of one token for one KV head, encoded by a row codec as contiguous
bytes. An index can use any `RowStore`. CUDA kernels need a store that implements `AddressedRows`.
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
    """Stores the keys and values of an index, in the order of appends.

    An index accepts an empty store as its option `store=`. The store must also derive from
    `kvindex.core.restore.Restorable`, because failed calls are undone: either it never overwrites
    existing rows, or its `checkpoint` and `rollback` restore them.

    To append, an index calls `join`, which encodes keys and values, and passes the result to
    `reserve`, `write` and `append`, in this order.
    """

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row: key and value of one token for one KV head."""
        ...

    @property
    def row_codec(self) -> str:
        """Name of the row codec (`kvindex.storage.codecs.NAMES`)."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def join(self, keys: Tensor, values: Tensor) -> Any:
        """Encode keys and values that will be appended after the current last token.

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.

        Returns:
            An object to pass to `reserve`, `write` and `append`.
        """
        ...

    def reserve(self, rows: Any) -> None:
        """Allocate memory for `rows` without changing existing rows. May run out of memory."""
        ...

    def reserve_tokens(self, tokens: int) -> None:
        """Allocate memory for `tokens` tokens in total.

        A store whose allocation is fast may do nothing.
        """
        ...

    def write(self, rows: Any) -> None:
        """Write the rows (keys and values) of new tokens after the last stored token.

        No search reads these rows before `append` is called. A store may also do nothing here, and
        write the rows in `append`.
        """
        ...

    def append(self, rows: Any) -> None:
        """Append `rows`, after `reserve` has allocated memory for them."""
        ...

    def gather(self, ids: Tensor) -> Rows:
        """Return the rows with the given ids.

        Args:
            ids: Int64 `[B, G, K]`, from -1 to `N - 1`.

        Returns:
            Keys `[B, G, K, D]` and values `[B, G, K, Dv]` on the compute device; zero where the id
            is -1.
        """
        ...

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """Yield `(first id, rows)` for all rows in order, in blocks of at most `size` tokens."""
        ...

    def truncate(self, length: int) -> None:
        """Remove the rows of all tokens after the first `length`."""
        ...

    def reordered(self, batch_indices: Tensor) -> Self:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this store."""
        ...

    def expand_batch(self, count: int) -> Self:
        """Return a read-only view in which this store's only sequence appears `count` times."""
        ...

    def emptied(self) -> Self:
        """Return an empty store with the same options."""
        ...

    def nbytes(self) -> int:
        """Return the number of bytes that the stored rows take."""
        ...


METHODS = frozenset(name for name in vars(RowStore) if name == "__len__" or name[0] != "_")
"""Names of the methods and properties of a `RowStore`."""


@runtime_checkable
class EncodedRows(Protocol):
    """A store that can export and import its rows as encoded bytes.

    If the store subtracts a center from keys (`CenteredRows`), the bytes can be decoded only with
    this center.
    """

    def encoded(self) -> Tensor:
        """Return all rows as bytes, uint8 `[B, G, N, row_bytes]`."""
        ...

    def append_encoded(self, rows: Tensor) -> None:
        """Append rows that `encoded` returned as bytes."""
        ...


@runtime_checkable
class CenteredRows(EncodedRows, Protocol):
    """A store that may encode keys relative to a center, a vector that it subtracts from all keys.

    The first append to an empty store determines the center (`storage/centers.py`). It stays the
    same until the store is empty again.
    """

    def join(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> Any:
        """Encode keys and values (see `RowStore.join`).

        valid: which keys may determine the center, bool `[B, N]`; None for all.
        """
        ...

    @property
    def center(self) -> Tensor | None:
        """The vector that is subtracted from the keys before encoding, float32 `[B, G, D]`; None
        for zeros.

        The tensor is on the compute device. In a store with `AddressedRows`, it is the same tensor
        until the batch size changes.
        """
        ...

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append rows that `encoded` returned as bytes.

        Args:
            rows: Uint8 `[B, G, N, row_bytes]`.
            center: The vector that was subtracted from their keys before encoding; None for zeros.

        Raises:
            ValueError: `center` is given, but the store already contains rows, or its codec does
                not subtract a center.
        """
        ...


@runtime_checkable
class AttendsToRows(Protocol):
    """A store that can compute attention for its rows without copying them first."""

    @property
    def attends(self) -> bool:
        """True if the store can compute attention directly for rows encoded with its codec."""
        ...

    def attend(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of hits and of `resident` (see
        `kvindex.core.protocol.Attends.attend_hits`).
        """
        ...


@runtime_checkable
class AttendsToAllRows(Protocol):
    """A store that can compute attention to all of its rows without copying them first."""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens per sequence that `attend_all` supports; 0 if no kernel can read
        the rows.
        """
        ...

    def attend_all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to all rows (see `kvindex.core.protocol.AttendsToAll.attend_all`)."""
        ...


@runtime_checkable
class AddressedRows(Protocol):
    """A store whose rows kernels can read by address.

    Rows are stored in pages that never move, and `table` contains the addresses of the pages. A row
    contains the key and then the value of a token, encoded by `row_codec`. For sequence `b`, KV
    head `g` and token `n`, the row begins at the address
    `table[b, n // page_tokens] + g · head_bytes + n % page_tokens · row_bytes`, a multiple of 16.

    Attention kernels require pages of 256 tokens and `head_bytes = 256 · row_bytes`. With other
    pages, an index uses kernels only for the search, and fetches rows with `gather`.
    """

    @property
    def table(self) -> Tensor:
        """Addresses of the pages, int64 `[B, S]` on the compute device; 0 for a missing page.

        The table has room for the longest sequence, and is the same tensor until the batch size
        changes.
        """
        ...

    @property
    def page_tokens(self) -> int:
        """Number of tokens in a page."""
        ...

    @property
    def head_bytes(self) -> int:
        """Stride of the KV heads in a page: number of bytes between the first rows of adjacent KV
        heads.
        """
        ...

    @property
    def row_bytes(self) -> int:
        """Stride of the rows in a page: number of bytes between the rows of adjacent tokens, a
        multiple of 16.
        """
        ...

    @property
    def row_codec(self) -> str:
        """Name of the row codec (`kvindex.storage.codecs.NAMES`)."""
        ...

    @property
    def on_host(self) -> bool:
        """True if rows are in host memory, so that a cache in device memory is useful."""
        ...

    def wait(self) -> None:
        """Make the current CUDA stream wait until all appended rows are written."""
        ...


@runtime_checkable
class PlacedRows(AddressedRows, Protocol):
    """A store that can have some rows in device memory and the others in host memory.

    `on_host` can change from False to True when the store grows and its new rows no longer fit into
    device memory.
    """

    @property
    def on_device(self) -> Tensor | None:
        """Flags of pages, uint8 `[B, S]` on the device: nonzero for a page in device memory.

        None if all pages are in the same kind of memory. Kernels use the flags to copy only rows of
        host pages into the cache on the device. The tensor is replaced only together with `table`.
        """
        ...

    def rows_by_place(self) -> dict[str, int]:
        """Return the number of rows in "device" and in "host" memory, of all sequences and KV
        heads.
        """
        ...


@runtime_checkable
class PinsAhead(Protocol):
    """A store that can allocate pinned host memory in the background, because pinning is slow."""

    def pin_ahead(self, tokens: int, batch: int) -> None:
        """Start to allocate memory for `tokens` tokens of `batch` sequences.

        The call returns before the allocation is complete, and never raises an error. It replaces
        an earlier call; 0 tokens end the allocation.
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
    """Return the store for an index: a new store of the backend, or the caller's own store.

    Args:
        store: One of `PLACES`, or an empty store.
        geometry: Geometry of the index.
        backend: Name of the backend that creates the store if `store` is one of `PLACES`.
        row_codec: Name of the row codec.
        device_fraction: Fraction of device memory that rows may take, only with "auto".

    Raises:
        ValueError: The store is not a `RowStore`, has tokens or another codec, or `device_fraction`
            is given with another `store` than "auto".
        TypeError: An option has the wrong type.
    """
    if device_fraction is not None:
        check.within("device_fraction", device_fraction, 0, 1)
        if store != "auto":
            raise ValueError(
                f"device_fraction: got {device_fraction} with store={store!r}, allowed only with "
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
            f"store: got {got}, allowed is 'device', 'host', 'auto', or an object that implements "
            "kvindex.storage.store.RowStore and derives from kvindex.core.restore.Restorable"
        )
    if len(store):
        raise ValueError(
            f"store: got a store that has {len(store)} tokens, allowed is an empty store"
        )
    if row_codec not in ("plain", store.row_codec):
        raise ValueError(
            f"row_codec: got {row_codec!r}, allowed is the row codec of the given store, "
            f"{store.row_codec!r}"
        )
    return store


class TensorStore(Restorable):
    """A row store that consists of one tensor, on the compute device or in host memory.

    The bytes of a row are contiguous in memory.

    Args:
        geometry: Geometry of the index.
        place: "device" to store rows on the compute device. "host" to store rows in CPU memory and
            copy fetched rows to the device; the memory is not pinned (stores of the CUDA backend
            have pinned memory). "auto" is allowed only on a CPU, where both are the same.
        row_codec: One of `kvindex.storage.codecs.NAMES`.

    Raises:
        ValueError: The place is "auto" and the device is not a CPU, or a name is unknown.
    """

    def __init__(self, geometry: Geometry, place: str = "device", row_codec: str = "plain") -> None:
        if check.one_of("store", place, PLACES) == "auto" and geometry.device.type != "cpu":
            raise ValueError(
                f"store: got 'auto' for a TensorStore on {geometry.device}, allowed is 'device' or "
                "'host'; 'auto' needs backend='cuda'"
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
        """Number of bytes of a stored row (key and value of one token for one KV head), a multiple
        of 16.
        """
        return self._codec.row_bytes

    def join(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Encode keys `[B, G, N, D]` and values `[B, G, N, Dv]`, and copy them to the store's
        device.

        With the codec "plain", keys and values that are already on this device are returned
        without a copy. `append` later copies them into the store.

        valid: which keys may determine the center, bool `[B, N]`; None for all.
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
        """Allocate memory for `rows`, the result of `join`."""
        self._columns.reserve(self._as_joined(rows))

    def reserve_tokens(self, tokens: int) -> None:
        """Do nothing, because this store allocates memory when tokens are appended."""

    def write(self, rows: dict[str, Tensor]) -> None:
        """Do nothing, because `append` copies the rows."""

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append `rows`, the result of `join`."""
        if "rows" in rows:
            center = rows.center if isinstance(rows, JoinedRows) else None
            center = self._center if len(self) else center
            self._columns.append(rows)
            self._center = center
        elif isinstance(self._codec, Plain):
            place = self._columns.claim(self._as_joined(rows))["rows"]
            self._codec.put(rows["keys"], rows["values"], place.view(torch.uint8))

    def gather(self, ids: Tensor) -> Rows:
        """Return the rows (keys and values) of the tokens with the given ids, int64 `[B, G, K]`.

        The rows are returned on the compute device. A row is zero if its id is -1.
        """
        if len(self) == 0:
            none = torch.zeros((*ids.shape, self.row_bytes // WORD.itemsize), dtype=WORD)
            return self._decoded(none)
        return self._decoded(gather_rows(self._columns["rows"], ids.to(self._device)), ids)

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """Yield `(first id, rows)` for all rows in order, in blocks of at most `size` tokens."""
        for start in range(0, len(self), size):
            rows = self._columns["rows"][:, :, start : start + size]
            # After `expand_batch`, all sequences of the batch are views of one sequence, whose rows
            # are then decoded only once.
            batch, same = len(rows), rows.stride(0) == 0
            found = self._decoded(rows[:1] if same else rows)
            parts = (found.keys, found.values)
            yield start, Rows(*(part.expand(batch, -1, -1, -1) for part in parts))

    def encoded(self) -> Tensor:
        """Return a copy of all rows as bytes, uint8 `[B, G, N, row_bytes]`."""
        return self._columns["rows"].view(torch.uint8).clone()

    @property
    def center(self) -> Tensor | None:
        """The vector that is subtracted from the keys before encoding, float32 `[B, G, D]`; None
        for zeros.
        """
        return self._center if len(self) else None

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append rows that `encoded` returned as bytes.

        center: the vector that was subtracted from the keys of these rows before they were encoded;
            None for zeros.
        """
        check_center(center, centered=self._centered, held=len(self))
        joined = JoinedRows(rows=rows.contiguous().view(WORD).to(self._device))
        joined.center = center if center is None else center.to(self._geometry.device)
        self.append(joined)

    def contiguous_rows(self) -> Tensor:
        """Return a view of all encoded rows, int64 `[B, G, N, row_bytes / 8]`.

        The view is valid until the store changes.
        """
        return self._columns["rows"]

    def truncate(self, length: int) -> None:
        """Remove the rows of all tokens after the first `length`."""
        self._columns.truncate(length)

    def reordered(self, batch_indices: Tensor) -> Self:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this store."""
        copied = self._shallow()
        copied._columns = self._columns.reordered(batch_indices)
        if (center := self.center) is not None:
            copied._center = center[batch_indices.to(center.device)]
        return copied

    def expand_batch(self, count: int) -> Self:
        """Return a read-only view in which this store's only sequence appears `count` times."""
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
        """Return the number of bytes that the stored rows take."""
        return self._columns.nbytes()

    def memory(self) -> dict[int, int]:
        """Return the bytes in use of each tensor, by the address of the tensor."""
        return self._columns.memory()

    def _as_joined(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a tensor that has the shape of the encoded rows, but not their contents.

        If `rows` already contains the encoded rows, return these.
        """
        if "rows" in rows:
            return rows
        one = torch.empty((), dtype=WORD, device=self._device)
        return {"rows": one.expand(*rows["keys"].shape[:3], self.row_bytes // WORD.itemsize)}

    def _decoded(self, words: Tensor, ids: Tensor | None = None) -> Rows:
        """Decode rows on the compute device.

        Where an entry of `ids` is -1, the key and value are zeros.
        """
        raw, center = words.to(self._geometry.device).view(torch.uint8), self.center
        if center is None:
            return self._codec.decode(raw)
        rows = self._codec.decode(raw, of_rows(center[: len(raw)]))
        if ids is None:
            return rows
        return Rows(rows.keys.masked_fill((ids < 0).to(raw.device)[..., None], 0), rows.values)
