"""`PagedRows`: reads and writes rows of transformers' paged cache, for all supported versions.

A row is one token's key and value. Its slot is its position in a layer's pages, int64. transformers
reads and writes rows only by `PagedAttentionCache.update`, which differs between its versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from kvindex.core.protocol import Rows

IN_KEYWORDS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
"""True if `update` takes slots by keyword and returns rows by head (transformers after 5.17)."""


@dataclass(frozen=True)
class PagedRows:
    """The rows of one layer in a paged cache, during one step of the model.

    Args:
        cache: The paged cache.
        layer: Number of the layer.
        call: Keyword arguments of the layer's attention call.
        like: Keys and values `[1, G, T, D]` with the shape, dtype and device of the layer's rows.
    """

    cache: PagedAttentionCache
    layer: int
    call: Mapping[str, Any]
    like: Rows

    @property
    def slots(self) -> Tensor:
        """Slots of all tokens of the step's sequences, old and new; empty if all are new."""
        slots: Tensor = self.call["read_index"][self._group]
        return slots

    @property
    def written(self) -> Tensor:
        """Slots of the new tokens."""
        slots: Tensor = self.call["write_index"][self._group]
        return slots

    def write(self, new: Rows) -> None:
        """Write keys and values `[1, G, T, D]` of all new tokens of the step to their slots."""
        self._update(new, self.slots[:0], self.written)

    def read(self, slots: Tensor) -> Rows:
        """Read the rows at slots `[n]`, as keys and values `[1, G, n, D]`."""
        none = Rows(self.like.keys[:, :, :0], self.like.values[:, :, :0])
        return self._update(none, slots, slots[:0])

    def call_with(self, slots: Tensor, written: Tensor) -> dict[str, Any]:
        """Return the call's keyword arguments, with these slots to read and to write."""
        index = dict(read_index=slots, write_index=written)
        groups = range(len(self.call["read_index"]))
        return {**self.call, **{name: [part for _ in groups] for name, part in index.items()}}

    def _update(self, new: Rows, read: Tensor, write: Tensor) -> Rows:
        """Write the given rows, and return those at the slots to read (or the given ones if
        none)."""
        call, given = self.call_with(read, write), (new.keys, new.values, self.layer)
        if IN_KEYWORDS:
            return Rows(*self.cache.update(*given, call))
        rows = self.cache.update(*given, call["read_index"], call["write_index"])
        return Rows(*(part.transpose(0, 1)[None] for part in rows))

    @property
    def _group(self) -> int:
        """Index of this layer's group in the lists of slots."""
        cache: Any = self.cache
        if IN_KEYWORDS:
            return int(cache.layer_to_allocator[self.layer].index)
        return int(cache.layer_index_to_group_indices[self.layer][0])
