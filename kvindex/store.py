"""Full-precision rows: the key and the value of a token, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor

from kvindex import check
from kvindex.columns import Columns
from kvindex.geometry import Geometry
from kvindex.ops.fetch import gather_rows
from kvindex.protocol import Rows

PLACES = ("device", "host")


class Store:
    """Rows `[B, G, N, D + Dv]`, on the compute device or in host memory.

    One row is one contiguous read. `place="device"` keeps rows beside the codes; `"host"` keeps
    them in CPU memory and copies what is fetched (pinned, mapped memory comes with the GPU path).
    """

    def __init__(self, geometry: Geometry, place: str = "device") -> None:
        check.one_of("store", place, PLACES)
        self._geometry = geometry
        self._device = geometry.device if place == "device" else torch.device("cpu")
        self._columns = Columns()

    def __len__(self) -> int:
        return len(self._columns)

    def join(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Rows of keys `[B, G, N, D]` and values `[B, G, N, Dv]`, where the store keeps them."""
        return {"rows": torch.cat([keys.detach(), values.detach()], dim=-1).to(self._device)}

    def reserve(self, rows: dict[str, Tensor]) -> None:
        """Make room for `rows`, as `join` makes them."""
        self._columns.reserve(rows)

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append `rows`, as `join` makes them."""
        self._columns.append(rows)

    def gather(self, ids: Tensor) -> Rows:
        """Rows of ids int64 `[B, G, K]` in `[-1, N)`, on the compute device; `-1` gives zeros."""
        if len(self) == 0:
            shape = (*ids.shape, self._geometry.head_dim + self._geometry.value_dim)
            return self._split(torch.zeros(shape, dtype=self._geometry.dtype))
        return self._split(gather_rows(self._columns["rows"], ids.to(self._device)))

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """All rows in order, at most `size` tokens at a time: (first id, rows)."""
        for start in range(0, len(self), size):
            yield start, self._split(self._columns["rows"][:, :, start : start + size])

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        self._columns.truncate(length)

    def reordered(self, batch_indices: Tensor) -> Store:
        """A copy in which row `b` of the batch is row `batch_indices[b]` of this."""
        copied = copy(self)
        copied._columns = self._columns.reordered(batch_indices)
        return copied

    def repeated(self, count: int) -> Store:
        """A view of a batch of 1 as one of `count`; it cannot be appended to."""
        view = copy(self)
        view._columns = self._columns.repeated(count)
        return view

    def reset(self) -> None:
        """Forget everything."""
        self._columns.reset()

    def nbytes(self) -> int:
        """Bytes in use."""
        return self._columns.nbytes()

    def _split(self, rows: Tensor) -> Rows:
        rows = rows.to(self._geometry.device)
        D = self._geometry.head_dim
        return Rows(rows[..., :D], rows[..., D:])
