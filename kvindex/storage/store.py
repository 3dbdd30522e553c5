"""Rows of a codec: the key and the value of a token, side by side."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.restore import Restorable
from kvindex.ops.fetch import gather_rows
from kvindex.storage.codecs import WORD, codec
from kvindex.storage.columns import Columns

PLACES = ("device", "host")


class Store(Restorable):
    """Rows as the bytes that a codec makes of them, on the compute device or in host memory.

    One row is one contiguous read. `place="device"` keeps rows beside the codes; `"host"` keeps
    them in CPU memory and copies what is fetched (pinned, mapped memory comes with the GPU path).
    row_codec: "plain", "int8" or "fp8" (`kvindex.storage.codecs`).
    """

    def __init__(self, geometry: Geometry, place: str = "device", row_codec: str = "plain") -> None:
        check.one_of("store", place, PLACES)
        self._geometry, self._codec = geometry, codec(row_codec, geometry)
        self._device = geometry.device if place == "device" else torch.device("cpu")
        self._columns = Columns()

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's key and value for one head, a multiple of 16."""
        return self._codec.row_bytes

    def join(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Rows of keys `[B, G, N, D]` and values `[B, G, N, Dv]`, where the store keeps them."""
        return {"rows": self._codec.encode(keys, values).view(WORD).to(self._device)}

    def reserve(self, rows: dict[str, Tensor]) -> None:
        """Make room for `rows`, as `join` makes them."""
        self._columns.reserve(rows)

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append `rows`, as `join` makes them."""
        self._columns.append(rows)

    def gather(self, ids: Tensor) -> Rows:
        """Rows of ids int64 `[B, G, K]` in `[-1, N)`, on the compute device; `-1` gives zeros."""
        if len(self) == 0:
            none = torch.zeros((*ids.shape, self.row_bytes // WORD.itemsize), dtype=WORD)
            return self._decoded(none)
        return self._decoded(gather_rows(self._columns["rows"], ids.to(self._device)))

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """All rows in order, at most `size` tokens at a time: (first id, rows)."""
        for start in range(0, len(self), size):
            yield start, self._decoded(self._columns["rows"][:, :, start : start + size])

    def encoded(self) -> Tensor:
        """All rows as the codec made them, uint8 `[B, G, N, row_bytes]`; a copy."""
        return self._columns["rows"].view(torch.uint8).clone()

    def append_encoded(self, rows: Tensor) -> None:
        """Append rows as `encoded` gave them."""
        self.append({"rows": rows.contiguous().view(WORD).to(self._device)})

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        self._columns.truncate(length)

    def reordered(self, batch_indices: Tensor) -> Store:
        """A copy in which row `b` of the batch is row `batch_indices[b]` of this."""
        copied = self._shallow()
        copied._columns = self._columns.reordered(batch_indices)
        return copied

    def expand_batch(self, count: int) -> Store:
        """A view of a batch of 1 as one of `count`; it cannot be appended to."""
        view = self._shallow()
        view._columns = self._columns.expand_batch(count)
        return view

    def emptied(self) -> Store:
        """The same before its first append."""
        empty = self._shallow()
        empty._columns = self._columns.emptied()
        return empty

    def nbytes(self) -> int:
        """Bytes in use."""
        return self._columns.nbytes()

    def _decoded(self, words: Tensor) -> Rows:
        return self._codec.decode(words.to(self._geometry.device).view(torch.uint8))
