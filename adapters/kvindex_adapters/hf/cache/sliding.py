"""`SlidingLayer`: a sliding-window layer of the cache to which a CUDA graph can append tokens.

With each token, transformers makes new tensors for a sliding window, which a graph cannot repeat.
While decode steps may be replays of a graph, the rows (one token's key and value each) are stored
in a ring buffer at fixed addresses instead, and the device counts the slot of the next row. The
order of rows in the ring does not affect attention. Any other access to the layer converts the ring
back to transformers' own tensors.
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
"""Bias of a slot without a visible token."""

LARGEST = 8192
"""Maximum number of slots of a ring. All slots are allocated and read even if a sequence has fewer
tokens. This is twice the widest window that is common in models that also have full attention
(4,096 in gemma2, cohere2 and olmo3)."""


class Ring:
    """A ring buffer of the newest tokens of a sliding window. Token `n` is in slot `n mod W`.

    These tensors are on the device and never move: `keys` `[B, G, W, D]`; `values` `[B, G, W, Dv]`;
    `bias` `[B, 1, 1, W]` of the same dtype, 0 for slots with a real token and -inf for others; and
    `slot` int64 `[1]`, the slot of the next token. `length` is the number of tokens of the
    sequence. The host counts it, after each replay of a graph.

    A token attends to the `W - 1` tokens before it and to itself. So the slot of the next token
    contains a token that is not visible any more, and the newest token can be removed again.

    Args:
        keys: `[B, G, N, D]`, with the shape, dtype and device of the keys.
        values: `[B, G, N, Dv]`, in the same way.
        window: Number of slots, `W`.
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
        """Store the newest tokens of a sequence.

        Args:
            keys: `[B, G, n, D]`, the newest ones in order.
            values: `[B, G, n, Dv]`, in the same way.
            length: Number of tokens of the sequence.
            real: As in `SlidingLayer.roll`.
        """
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
        """Store a real token, `[B, G, 1, D]` and `[B, G, 1, Dv]`, and advance the slot."""
        self.keys.index_copy_(2, self.slot, keys)
        self.values.index_copy_(2, self.slot, values)
        self.bias.index_fill_(3, self.slot, 0.0)
        self.slot.add_(1).remainder_(self.keys.shape[2])

    def go_back(self, length: int) -> None:
        """Set the number of tokens of the sequence, on the host and on the device."""
        self.length = length
        self.slot.fill_(length % self.keys.shape[2])

    def slots(self, count: int, end: int) -> Tensor:
        """Return the slots int64 `[count]` of the `count` tokens before token `end`."""
        device, window = self.keys.device, self.keys.shape[2]
        return torch.arange(end - count, end, device=device) % window

    def newest(self) -> tuple[Tensor, Tensor]:
        """Copy the keys and values that are visible to the next token, in order."""
        slots = self.slots(min(self.length, self.keys.shape[2] - 1), self.length)
        return self.keys.index_select(2, slots), self.values.index_select(2, slots)


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' own layer, whose rows can temporarily be stored in a ring.

    Reading or setting `keys` or `values`, or setting the number of tokens, copies the window out of
    the ring. The ring stays allocated for the next time.
    """

    saved_as: ClassVar[str] = DynamicSlidingWindowLayer.__name__
    """Class name under which the layer is saved."""

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
        """Number of tokens of the sequence."""
        ring = self.ring
        return self._length if ring is None else ring.length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.settle()
        self._length = length

    @property
    def ring(self) -> Ring | None:
        """The ring that stores the rows now, or None."""
        return self._ring if self._rolls else None

    def ring_refusal(self) -> str:
        """Return why the rows cannot be stored in a ring, or "" if they can."""
        if self.sliding_window > LARGEST:
            return f"sliding_window: got {self.sliding_window}, allowed is at most {LARGEST}"
        if vars(self).get("record_past"):  # transformers 5.17 lacks this attribute
            return "its window keeps what assisted decoding may go back to"
        return "" if self.is_initialized else "tokens: got none before it"

    def roll(self, real: Tensor | None) -> None:
        """Move the rows into the ring.

        Args:
            real: Bool `[B, n]`, True for those of the sequence's first `n` tokens that are real.
                Later tokens are real. None if there is no padding.
        """
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
        self._length = 0  # the ring counts tokens now
        self._rolls = True

    def settle(self) -> None:
        """Move the rows out of the ring, into tensors as in transformers' own layer."""
        if (ring := self.ring) is not None:
            self._rolls, self._length = False, ring.length
            self._keys, self._values = ring.newest()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens, and return all rows that are visible to the newest, or the whole ring."""
        ring = self.ring
        if ring is None or key_states.shape[2] != 1:
            rows: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return rows
        ring.append(key_states, value_states)
        return ring.keys, ring.values

    def seen(
        self, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Find the rows and the mask with which attention is computed.

        Args:
            keys: The keys with which the attention function was called.
            values: Its values.
            mask: Its mask.

        Returns:
            Keys, values and mask. They are unchanged, except that the mask is the bias of the slots
            if rows are in a ring.

        Raises:
            UnsupportedError: Rows are in a ring, and the model passes its own mask, or other rows
                than `update` returned.
        """
        if (ring := self.ring) is None:
            return keys, values, mask
        if keys.shape[2] != (window := ring.keys.shape[2]):
            raise UnsupportedError(
                f"keys: got {keys.shape[2]} rows of a window of {window}, allowed are those that "
                "the cache returned"
            )
        if mask is not None:
            raise UnsupportedError("attention_mask: got one that the model computes for each token")
        return keys, values, ring.bias

    def nbytes(self) -> int:
        """Count the bytes of the window's rows. Any thread may call this at any time."""
        ring = self.ring
        if ring is None:
            rows = self._keys, self._values
            return sum(tensor.nbytes for tensor in rows if tensor is not None)
        slots = ring.keys.shape[2]
        rows_in_use = min(ring.length, slots - 1)
        return (ring.keys.nbytes + ring.values.nbytes) // slots * rows_in_use

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that transformers' own layer would have."""
        self.settle()
        named = {"keys": self._keys, "values": self._values, "cumulative_length": self._length}
        return named | {name: one for name, one in vars(self).items() if name not in OWN}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**vars(self), "_ring": None}


OWN = {"_keys", "_values", "_length", "_ring", "_rolls"}
"""Attributes that transformers' own layer does not have."""


def grows(layer: Any) -> str:
    """Return why a cache layer prevents a graph (because it makes new tensors), or ""."""
    if isinstance(layer, IndexedLayer):
        return ""
    if isinstance(layer, SlidingLayer):
        return layer.ring_refusal()
    if isinstance(layer, DynamicLayer):
        return "its cache replaces keys after each token"
    return ""
