"""`SlidingLayer`: a sliding window of transformers' cache that a captured token can append to.

Transformers makes new tensors of a window with each token, which no graph can repeat. While tokens
may be a graph, the rows lie in a ring at fixed addresses instead, in an order that attention does
not care about, and the place of the next one is counted on the device. Whatever else is asked of
the layer finds the window as transformers keeps it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.layer import IndexedLayer

NEVER = float("-inf")

LARGEST = 8192
"""Slots of a ring at most, which are there and read even where a sequence has fewer tokens: twice
the widest window that is usual beside full attention (4,096: gemma2, cohere2, olmo3)."""


class Ring:
    """The newest tokens of a window, token `n` in slot `n mod W`.

    keys `[B, G, W, D]`, values `[B, G, W, Dv]`; bias `[B, 1, 1, W]` of their dtype: 0 where a slot
    has a real token, else -inf; slot int64 `[1]`: of the next token. All stay where they are, on
    the device. length: tokens of the sequence; a graph's are counted when it was replayed.

    A window is the `W - 1` tokens before a token, and itself. So the slot of the next token holds
    one that nobody sees any more, and one token can be taken back.
    """

    def __init__(self, keys: Tensor, values: Tensor, window: int) -> None:
        (batch, heads, _, width), wide = keys.shape, values.shape[3]
        self.kind = keys.dtype, keys.device, (batch, heads, width, wide)
        with torch.inference_mode(False):
            self.keys = keys.new_zeros((batch, heads, window, width))
            self.values = values.new_zeros((batch, heads, window, wide))
            self.bias = keys.new_full((batch, 1, 1, window), NEVER)
            self.slot = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self.length = 0

    def fill(self, keys: Tensor, values: Tensor, length: int, real: Tensor | None) -> None:
        """Hold the newest tokens of `length`, in order; real: as of `SlidingLayer.roll`."""
        count = min(keys.shape[2], self.keys.shape[2] - 1)
        slots = self.slots(count, length)
        self.keys.index_copy_(2, slots, keys[:, :, keys.shape[2] - count :])
        self.values.index_copy_(2, slots, values[:, :, values.shape[2] - count :])
        self.bias.fill_(NEVER)
        seen = self.bias.new_zeros((len(keys), 1, 1, count))
        if real is not None:
            padded = ~functional.pad(real, (0, length - real.shape[1]), value=True)
            seen.masked_fill_(padded[:, None, None, length - count :].to(keys.device), NEVER)
        self.bias.index_copy_(3, slots, seen)
        self.go_back(length)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put in a real token, `[B, G, 1, D]` and `[B, G, 1, Dv]`; the device counts it."""
        self.keys.index_copy_(2, self.slot, keys)
        self.values.index_copy_(2, self.slot, values)
        self.bias.index_fill_(3, self.slot, 0.0)
        self.slot.add_(1).remainder_(self.keys.shape[2])

    def go_back(self, length: int) -> None:
        """Hold so many tokens of the sequence, whatever the device has counted."""
        self.length = length
        self.slot.fill_(length % self.keys.shape[2])

    def slots(self, count: int, end: int) -> Tensor:
        """Where the `count` tokens before token `end` are, int64 `[count]`."""
        device, window = self.keys.device, self.keys.shape[2]
        return torch.arange(end - count, end, device=device) % window

    def newest(self) -> tuple[Tensor, Tensor]:
        """Copies of keys and values that the next token may see, in order."""
        slots = self.slots(min(self.length, self.keys.shape[2] - 1), self.length)
        return self.keys.index_select(2, slots), self.values.index_select(2, slots)


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' own layer, whose rows may for a time lie in a ring.

    Who reads or sets `keys`, `values` or the count of tokens ends that time: the window is copied
    out of the ring, which stays where it is for the next time.
    """

    saved_as: ClassVar[str] = DynamicSlidingWindowLayer.__name__
    """Name of the class that a saved layer is of."""

    def __init__(self, sliding_window: int) -> None:
        self._ring: Ring | None = None
        self._rolls = False
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0
        super().__init__(sliding_window)

    @property
    def keys(self) -> Any:
        """Keys `[B, G, n, D]` of the window in order; None before the first token."""
        self.settle()
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.settle()
        self._keys = keys

    @property
    def values(self) -> Any:
        """Values `[B, G, n, Dv]` of the window in order; None before the first token."""
        self.settle()
        return self._values

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.settle()
        self._values = values

    @property
    def cumulative_length(self) -> int:
        """Tokens of the sequence."""
        ring = self.ring
        return self._length if ring is None else ring.length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.settle()
        self._length = length

    @property
    def ring(self) -> Ring | None:
        """Where the rows lie, while they do."""
        return self._ring if self._rolls else None

    def ring_refusal(self) -> str:
        """Why the rows cannot lie in a ring; "" where they can."""
        if self.sliding_window > LARGEST:
            return f"sliding_window: got {self.sliding_window}, allowed is at most {LARGEST}"
        if vars(self).get("record_past"):  # which transformers 5.17 has not
            return "its window keeps what assisted decoding may go back to"
        return "" if self.is_initialized else "tokens: got none before it"

    def roll(self, real: Tensor | None) -> None:
        """Keep the rows in the ring. real: which of the first tokens are real, bool `[B, n]`."""
        if self._rolls:
            return
        keys, values, length = self._keys, self._values, self._length
        assert keys is not None
        assert values is not None
        kind = keys.dtype, keys.device, (*keys.shape[:2], keys.shape[3], values.shape[3])
        if self._ring is None or self._ring.kind != kind:
            self._ring = Ring(keys, values, self.sliding_window)
        self._ring.fill(keys, values, length, real)
        self._keys = self._values = None
        self._length = 0  # the ring's
        self._rolls = True

    def settle(self) -> None:
        """Keep the rows as transformers does."""
        if (ring := self.ring) is not None:
            self._rolls, self._length = False, ring.length
            self._keys, self._values = ring.newest()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens: all rows that the newest may see, or the whole ring."""
        ring = self.ring
        if ring is None or key_states.shape[2] != 1:
            rows: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return rows
        ring.append(key_states, value_states)
        return ring.keys, ring.values

    def seen(
        self, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows that attention reads, and its mask, by those that it was called with.

        In a ring the mask is the bias of its slots. Raises UnsupportedError for a mask of the
        model's own there, and for other rows than `update` gave.
        """
        if (ring := self.ring) is None:
            return keys, values, mask
        if keys.shape[2] != (window := ring.keys.shape[2]):
            raise UnsupportedError(
                f"keys: got {keys.shape[2]} rows of a window of {window}, allowed are those that "
                "the cache gave"
            )
        if mask is not None:
            raise UnsupportedError("attention_mask: got one that the model makes for each token")
        return keys, values, ring.bias

    def nbytes(self) -> int:
        """Bytes of the window's rows, in a ring or not. Any thread may call this at any time."""
        ring = self.ring
        if ring is None:
            rows = self._keys, self._values
            return sum(tensor.nbytes for tensor in rows if tensor is not None)
        slots = ring.keys.shape[2]
        rows_in_use = min(ring.length, slots - 1)
        return (ring.keys.nbytes + ring.values.nbytes) // slots * rows_in_use

    def attributes(self) -> dict[str, Any]:
        """What a layer of transformers has as attributes."""
        self.settle()
        named = {"keys": self._keys, "values": self._values, "cumulative_length": self._length}
        return named | {name: one for name, one in vars(self).items() if name not in OWN}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**vars(self), "_ring": None}


OWN = {"_keys", "_values", "_length", "_ring", "_rolls"}
"""Attributes that are not of transformers."""


def grows(layer: Any) -> str:
    """Why tokens cannot be a graph beside a layer of a cache: it makes new tensors; else ""."""
    if isinstance(layer, IndexedLayer):
        return ""
    if isinstance(layer, SlidingLayer):
        return layer.ring_refusal()
    if isinstance(layer, DynamicLayer):
        return "its cache has another keys after each token"
    return ""
