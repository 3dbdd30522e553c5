"""`PagedRows`: read and write keys and values in the paged cache of transformers.

A row is one token's key and value. A slot is the position of a row in the pages of a layer (int64).
Rows can only be accessed through `PagedAttentionCache.update`, whose signature depends on the
version of transformers. Up to transformers 5.23, attention functions call `update`. From 5.24 on,
the layer calls it before the attention function, and so reads the rows of all tokens. `held_back`
prevents this for layers with an index.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache

from kvindex.core.protocol import Rows
from kvindex_adapters.hf.model.cache_argument import CACHE, NEW

IN_KEYWORDS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
"""True if `update` takes slots as keyword arguments and returns rows with the head dimension first
(transformers after 5.17)."""

LAYER_UPDATES = CACHE == NEW
"""True if layers call `update`, and False if attention functions do."""


@contextmanager
def held_back(cache: Any, layers: Collection[int]) -> Iterator[None]:
    """Context manager in which these layers do not access the paged cache before their attention.

    Their attention function then gets the keys and values of the new tokens only, and calls
    `PagedRows` to access the cache.

    Args:
        cache: The paged cache.
        layers: Numbers of the layers.
    """

    def update(keys: Tensor, values: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        if layer_idx in layers:
            return keys, values
        return type(cache).update(cache, keys, values, layer_idx, kwargs)

    if not LAYER_UPDATES:
        yield
        return
    vars(cache)["update"] = update
    try:
        yield
    finally:
        del vars(cache)["update"]


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

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        new: Rows,
        mask: Tensor | None,
        call: Mapping[str, Any],
    ) -> Tensor:
        """Write new rows to the cache, and call an attention function of transformers.

        Args:
            function: The attention function.
            module: The attention module.
            query: `[1, H, T, D]`.
            new: Keys and values of the new tokens, `[1, G, T, D]`.
            mask: The mask, or None.
            call: Keyword arguments, which contain the slots to read and to write (`call_with`).

        Returns:
            Output `[1, T, H, Dv]`.
        """
        given = dict(call)
        if LAYER_UPDATES:
            kind: Any = type(self.cache)  # the method of the object may be held back
            new = Rows(*kind.update(self.cache, new.keys, new.values, self.layer, given))
        output: Tensor = function(module, query, new.keys, new.values, mask, **given)[0]
        return output

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
        update: Any = type(self.cache).update  # the method of the object may be held back
        if IN_KEYWORDS:
            return Rows(*update(self.cache, *given, call))
        rows = update(self.cache, *given, call["read_index"], call["write_index"])
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
