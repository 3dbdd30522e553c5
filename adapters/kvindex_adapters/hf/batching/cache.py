"""The paged cache of transformers' continuous batching: rows by their slots, whatever the version.

Slots are places in a layer's pages, int64. The only door is `PagedAttentionCache.update`, which
writes and reads; what differs between versions of transformers is here.
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
"""Whether `update` takes slots in a mapping and gives rows by head; it did not in 5.17."""


@dataclass(frozen=True)
class PagedRows:
    """One layer's part of a paged cache, in one step of the model.

    call: keywords of the layer's attention; like: a key and a value `[1, G, …, D]` of it.
    """

    cache: PagedAttentionCache
    layer: int
    call: Mapping[str, Any]
    like: Rows

    @property
    def slots(self) -> Tensor:
        """Of all tokens of all sequences of the step, new ones included; none where all are new."""
        slots: Tensor = self.call["read_index"][self._group]
        return slots

    @property
    def written(self) -> Tensor:
        """Of the new tokens alone."""
        slots: Tensor = self.call["write_index"][self._group]
        return slots

    def write(self, new: Rows) -> None:
        """Put keys and values `[1, G, T, D]` of all new tokens of the step into their slots."""
        self._update(new, self.slots[:0], self.written)

    def read(self, slots: Tensor) -> Rows:
        """The rows at slots `[n]`, `[1, G, n, D]`."""
        none = Rows(self.like.keys[:, :, :0], self.like.values[:, :, :0])
        return self._update(none, slots, slots[:0])

    def call_with(self, slots: Tensor, written: Tensor) -> dict[str, Any]:
        """The call's keywords for some of its sequences: their slots, and those of new tokens."""
        index = dict(read_index=slots, write_index=written)
        groups = range(len(self.call["read_index"]))
        return {**self.call, **{name: [part for _ in groups] for name, part in index.items()}}

    def _update(self, new: Rows, read: Tensor, write: Tensor) -> Rows:
        """Write rows, then read; of no slots to read, the rows that were given."""
        call, given = self.call_with(read, write), (new.keys, new.values, self.layer)
        if IN_KEYWORDS:
            return Rows(*self.cache.update(*given, call))
        rows = self.cache.update(*given, call["read_index"], call["write_index"])
        return Rows(*(part.transpose(0, 1)[None] for part in rows))

    @property
    def _group(self) -> int:
        """Which of the lists of slots is of this layer."""
        cache: Any = self.cache
        if IN_KEYWORDS:
            return int(cache.layer_to_allocator[self.layer].index)
        return int(cache.layer_index_to_group_indices[self.layer][0])
