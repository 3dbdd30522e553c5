"""Where full-precision rows live: what an index asks of a store, and the store of plain torch.

A row is the key and the value of a token for one head, side by side, as a codec makes them. An
index takes its rows from any `RowStore`; kernels read those of one that has `AddressedRows`.
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
    """The rows of an index, in append order; `store=` takes an empty one.

    It is a `kvindex.core.restore.Restorable`, too: a call that fails is undone, so that what is
    there is not written to, or `checkpoint` and `rollback` say more. Rows come in two steps: `join`
    makes of keys and values what `reserve`, `write` and `append` of the same tokens take.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's key and value for one head, as they are kept."""
        ...

    @property
    def row_codec(self) -> str:
        """How rows are kept: a name of `kvindex.storage.codecs`."""
        ...

    def __len__(self) -> int:
        """Tokens held."""
        ...

    def join(self, keys: Tensor, values: Tensor) -> Any:
        """Rows of keys `[B, G, N, D]` and values `[B, G, N, Dv]` for an append at this length."""
        ...

    def reserve(self, rows: Any) -> None:
        """Make room for `rows`; what is held stays as it was. May run out of memory."""
        ...

    def reserve_tokens(self, tokens: int) -> None:
        """Make room for so many tokens in all, as far as that takes long."""
        ...

    def write(self, rows: Any) -> None:
        """Put `rows` beyond the last token, where nobody reads, if that is better done early."""
        ...

    def append(self, rows: Any) -> None:
        """Hold `rows`, for which `reserve` has made room."""
        ...

    def gather(self, ids: Tensor) -> Rows:
        """Rows of ids int64 `[B, G, K]` in `[-1, N)`, on the compute device; `-1` gives zeros."""
        ...

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """All rows in order, at most `size` tokens at a time: (first id, rows)."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        ...

    def reordered(self, batch_indices: Tensor) -> Self:
        """A copy in which row `b` of the batch is row `batch_indices[b]` of this."""
        ...

    def expand_batch(self, count: int) -> Self:
        """A view of a batch of 1 as one of `count`, to read."""
        ...

    def emptied(self) -> Self:
        """The same before its first append."""
        ...

    def nbytes(self) -> int:
        """Bytes in use."""
        ...


METHODS = frozenset(name for name in vars(RowStore) if name == "__len__" or name[0] != "_")
"""Of a `RowStore`."""


@runtime_checkable
class EncodedRows(Protocol):
    """A store whose rows can be had, and given back, as the row codec made them.

    Of a store with a center (`CenteredRows`) its rows are nothing without that.
    """

    def encoded(self) -> Tensor:
        """All rows, uint8 `[B, G, N, row_bytes]`."""
        ...

    def append_encoded(self, rows: Tensor) -> None:
        """Append rows that `encoded` gave."""
        ...


@runtime_checkable
class CenteredRows(EncodedRows, Protocol):
    """A store whose rows may be codes of what keys differ from a center by (`storage/centers.py`).

    The first append to an empty store decides it; it stays until the store is empty again.
    """

    def join(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> Any:
        """As `RowStore.join`; valid: bool `[B, N]`, what no center is made of, None for all."""
        ...

    @property
    def center(self) -> Tensor | None:
        """Of the rows held, float32 `[B, G, D]` on the compute device; None for zeros.

        Of a store with `AddressedRows` the same tensor for as long as `B` stays, as its table.
        """
        ...

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append rows that `encoded` gave, and the center they are codes from; None for zeros.

        Raises ValueError for a center to a store that holds rows, or whose codec has none.
        """
        ...


@runtime_checkable
class AttendsToRows(Protocol):
    """A store that can attend to its rows where they lie."""

    @property
    def attends(self) -> bool:
        """Whether it does: to rows as `row_codec` makes them."""
        ...

    def attend(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As `kvindex.core.protocol.Attends.attend_hits`, of ids that are there."""
        ...


@runtime_checkable
class AddressedRows(Protocol):
    """What kernels read of a store: pages that never move, found by a table of their addresses.

    The row of token `n`, head `g` and row `b` of the batch begins at `table[b, n // page_tokens] +
    g · head_bytes + n % page_tokens · row_bytes`, a multiple of 16: the key, then the value, as
    `row_codec` makes them. Kernels read pages of 256 tokens with `head_bytes = 256 · row_bytes`;
    of a store with others an index searches with kernels, and fetches by `gather`.
    """

    @property
    def table(self) -> Tensor:
        """Addresses of pages, int64 `[B, S]` on the compute device; 0 where there is none.

        The same tensor for as long as `B` stays, with room for the longest sequence.
        """
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def head_bytes(self) -> int:
        """Bytes from one head's rows in a page to the next one's."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes from one token's row to the next one's, a multiple of 16."""
        ...

    @property
    def row_codec(self) -> str:
        """A name of `kvindex.storage.codecs`."""
        ...

    @property
    def far(self) -> bool:
        """Whether rows are worth keeping on the device once read: those of the host are."""
        ...

    def wait(self) -> None:
        """What the current stream runs from here on sees all rows that are held."""
        ...


@runtime_checkable
class PlacedRows(AddressedRows, Protocol):
    """It knows which of its rows are where; `far` may become true as it grows."""

    @property
    def near(self) -> Tensor | None:
        """Which pages are in the device's memory, uint8 `[B, S]` there; None where all are alike.

        The same tensor for as long as `table` is. Kernels keep no row of such a page.
        """
        ...

    def rows_by_place(self) -> dict[str, int]:
        """Rows held of all heads and rows of the batch: how many are on the `device` and `host`."""
        ...


@runtime_checkable
class PinsAhead(Protocol):
    """Memory for its rows takes long to get, and can be got beside other work."""

    def pin_ahead(self, tokens: int, batch: int) -> None:
        """Begin to get it, for so many tokens of so many sequences; neither waits nor fails."""
        ...


def row_store(
    store: object,
    geometry: Geometry,
    *,
    backend: str = "torch",
    row_codec: str = "plain",
    device_share: float | None = None,
) -> RowStore:
    """The store of an index: the backend's for one of `PLACES`, or the caller's own.

    Raises ValueError or TypeError for a store that is none, holds tokens, or has another codec, and
    for a share of another one than "auto".
    """
    if device_share is not None:
        check.within("device_share", device_share, 0, 1)
        if store != "auto":
            raise ValueError(
                f"device_share: got {device_share} with store={store!r}, allowed with store='auto'"
            )
    if isinstance(store, str) and store in PLACES:
        if backend == "torch":
            return TensorStore(geometry, store, row_codec)
        made: RowStore = backends.resolve(backend).store(geometry, store, row_codec, device_share)
        return made
    if not isinstance(store, RowStore) or not isinstance(store, Restorable):
        lacks = "" if isinstance(store, str) else ", ".join(sorted(METHODS - {*dir(store)}))
        got = f"{store!r}, which lacks {lacks}" if lacks else repr(store)
        raise ValueError(
            f"store: got {got}, allowed is 'device', 'host', 'auto' or a store of one's own: a "
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
    """Rows as the bytes that a codec makes of them, on the compute device or in host memory.

    One row is one contiguous read. `place="device"` keeps rows beside the codes; `"host"` keeps
    them in CPU memory and copies what is fetched (pinned, mapped memory comes with the GPU path);
    `"auto"` is for a CPU, where both are the same. row_codec: one of
    `kvindex.storage.codecs.NAMES`. Raises ValueError for "auto" elsewhere.
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
        self._center: Tensor | None = None  # of the rows held

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's key and value for one head, a multiple of 16."""
        return self._codec.row_bytes

    def join(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Rows of keys `[B, G, N, D]` and values `[B, G, N, Dv]`, where the store keeps them.

        valid: as of `CenteredRows.join`. Plain ones that are there already are left as they are:
        `append` puts them side by side.
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
        """Make room for `rows`, as `join` makes them."""
        self._columns.reserve(self._as_joined(rows))

    def reserve_tokens(self, tokens: int) -> None:
        """Nothing: a tensor grows as tokens come."""

    def write(self, rows: dict[str, Tensor]) -> None:
        """Nothing: `append` copies."""

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append `rows`, as `join` makes them."""
        if "rows" in rows:
            center = rows.center if isinstance(rows, JoinedRows) else None
            center = self._center if len(self) else center
            self._columns.append(rows)
            self._center = center
        elif isinstance(self._codec, Plain):
            place = self._columns.claim(self._as_joined(rows))["rows"]
            self._codec.put(rows["keys"], rows["values"], place.view(torch.uint8))

    def gather(self, ids: Tensor) -> Rows:
        """Rows of ids int64 `[B, G, K]` in `[-1, N)`, on the compute device; `-1` gives zeros."""
        if len(self) == 0:
            none = torch.zeros((*ids.shape, self.row_bytes // WORD.itemsize), dtype=WORD)
            return self._decoded(none)
        return self._decoded(gather_rows(self._columns["rows"], ids.to(self._device)), ids)

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """All rows in order, at most `size` tokens at a time: (first id, rows)."""
        for start in range(0, len(self), size):
            rows = self._columns["rows"][:, :, start : start + size]
            batch, same = len(rows), rows.stride(0) == 0  # those of one sequence, decoded once
            found = self._decoded(rows[:1] if same else rows)
            parts = (found.keys, found.values)
            yield start, Rows(*(part.expand(batch, -1, -1, -1) for part in parts))

    def encoded(self) -> Tensor:
        """All rows as the codec made them, uint8 `[B, G, N, row_bytes]`; a copy."""
        return self._columns["rows"].view(torch.uint8).clone()

    @property
    def center(self) -> Tensor | None:
        """As `CenteredRows.center`."""
        return self._center if len(self) else None

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """As `CenteredRows.append_encoded`."""
        check_center(center, centered=self._centered, held=len(self))
        joined = JoinedRows(rows=rows.contiguous().view(WORD).to(self._device))
        joined.center = center if center is None else center.to(self._geometry.device)
        self.append(joined)

    def contiguous_rows(self) -> Tensor:
        """All rows as they lie, int64 `[B, G, N, row_bytes / 8]`: a view, until the next change."""
        return self._columns["rows"]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        self._columns.truncate(length)

    def reordered(self, batch_indices: Tensor) -> Self:
        """A copy in which row `b` of the batch is row `batch_indices[b]` of this."""
        copied = self._shallow()
        copied._columns = self._columns.reordered(batch_indices)
        if (center := self.center) is not None:
            copied._center = center[batch_indices.to(center.device)]
        return copied

    def expand_batch(self, count: int) -> Self:
        """A view of a batch of 1 as one of `count`; it cannot be appended to."""
        view = self._shallow()
        view._columns = self._columns.expand_batch(count)
        if (center := self.center) is not None:
            view._center = center.expand(count, -1, -1)
        return view

    def emptied(self) -> Self:
        """The same before its first append."""
        empty = self._shallow()
        empty._columns, empty._center = self._columns.emptied(), None
        return empty

    def nbytes(self) -> int:
        """Bytes in use."""
        return self._columns.nbytes()

    def memory(self) -> dict[int, int]:
        """As `kvindex.core.protocol.ReportsMemory.memory`."""
        return self._columns.memory()

    def _as_joined(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """A tensor of the shape of `rows` side by side, which nobody reads."""
        if "rows" in rows:
            return rows
        one = torch.empty((), dtype=WORD, device=self._device)
        return {"rows": one.expand(*rows["keys"].shape[:3], self.row_bytes // WORD.itemsize)}

    def _decoded(self, words: Tensor, ids: Tensor | None = None) -> Rows:
        """What words stand for, of the first rows of the batch; ids: theirs, -1 for zeros."""
        raw, center = words.to(self._geometry.device).view(torch.uint8), self.center
        if center is None:
            return self._codec.decode(raw)
        rows = self._codec.decode(raw, of_rows(center[: len(raw)]))
        if ids is None:
            return rows
        return Rows(rows.keys.masked_fill((ids < 0).to(raw.device)[..., None], 0), rows.values)
