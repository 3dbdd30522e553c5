"""`PagedRows`: read and write keys and values in the paged cache of transformers.

A row is one token's key and value. A slot is the position of a row in the pages of a layer (int64).
Rows can only be accessed through `PagedAttentionCache.update`, whose signature depends on the
version of transformers.
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
"""True if `update` takes slots as keyword arguments and returns rows with the head dimension first
(transformers after 5.17)."""


@dataclass(frozen=True)
class PagedRows:
    """Access to one layer's rows (keys and values) in a paged cache, during one forward pass.

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
        """Slots (positions in the pages) of all tokens of the sequences in this forward pass.

        The slots of earlier tokens and of new tokens are included. The tensor is empty if no
        sequence has earlier tokens.
        """
        slots: Tensor = self.call["read_index"][self._group]
        return slots

    @property
    def written(self) -> Tensor:
        """Slots to which this forward pass writes its new tokens."""
        slots: Tensor = self.call["write_index"][self._group]
        return slots

    def write(self, new: Rows) -> None:
        """Write the keys and values `[1, G, T, D]` of all new tokens to their slots."""
        self._update(new, self.slots[:0], self.written)

    def read(self, slots: Tensor) -> Rows:
        """Read the rows (keys and values) at the positions `slots`, int64 `[n]`.

        Returns keys and values `[1, G, n, D]`.
        """
        none = Rows(self.like.keys[:, :, :0], self.like.values[:, :, :0])
        return self._update(none, slots, slots[:0])

    def call_with(self, slots: Tensor, written: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of the attention call, with two of them replaced.

        The call then reads rows from `slots` and writes new rows to the slots `written`.
        """
        index = dict(read_index=slots, write_index=written)
        groups = range(len(self.call["read_index"]))
        return {**self.call, **{name: [part for _ in groups] for name, part in index.items()}}

    def _update(self, new: Rows, read: Tensor, write: Tensor) -> Rows:
        """Write new keys and values to the slots `write`, and return those at the slots `read`.

        If `read` is empty, return the new keys and values.
        """
        call, given = self.call_with(read, write), (new.keys, new.values, self.layer)
        if IN_KEYWORDS:
            return Rows(*self.cache.update(*given, call))
        rows = self.cache.update(*given, call["read_index"], call["write_index"])
        return Rows(*(part.transpose(0, 1)[None] for part in rows))

    @property
    def _group(self) -> int:
        """Number of the group of layers that contains this layer.

        transformers divides the layers of a model into groups. For each group, it has a separate
        table of the cache slots in which tokens are stored.
        """
        cache: Any = self.cache
        if IN_KEYWORDS:
            return int(cache.layer_to_allocator[self.layer].index)
        return int(cache.layer_index_to_group_indices[self.layer][0])
