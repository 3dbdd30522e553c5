"""`SlidingLayer`: a sliding-window cache layer to which a CUDA graph can append tokens.

transformers allocates new tensors for a sliding window at each token, but a CUDA graph needs fixed
addresses. So while decode steps are replays of a graph, keys and values are in a ring buffer at
fixed addresses, and the number of the next slot is stored on the device. The order of tokens in the
ring does not affect attention. Any other access to the layer copies the window back into tensors of
the kind that transformers uses.
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
"""Attention bias of a slot that contains no visible token."""

LARGEST = 8192
"""Maximum window size for a ring buffer. All slots are allocated and read, even for a shorter
sequence. The limit is twice the widest common window of models that also have full-attention layers
(4,096 in gemma2, cohere2 and olmo3)."""


class Ring:
    """A ring buffer of the newest tokens of a sliding window. Token `n` is in slot `n mod W`.

    These tensors are on the device at fixed addresses:

    - `keys` `[B, G, W, D]` and `values` `[B, G, W, Dv]`;
    - `bias` `[B, 1, 1, W]` of the same dtype: 0 for slots with a real token, otherwise -inf;
    - `slot` int64 `[1]`: the slot of the next token.

    The attribute `length` is the number of tokens of the sequence. The host updates it after each
    replay of a CUDA graph.

    A token attends to itself and the `W - 1` tokens before it. The next token therefore overwrites
    a token that is no longer visible, and the newest token can be removed again.

    Args:
        keys: `[B, G, N, D]`. Only shape, dtype and device are used.
        values: `[B, G, N, Dv]`. Only the shape is used.
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
            keys: `[B, G, n, D]`, the keys of the newest `n` tokens in order.
            values: `[B, G, n, Dv]`, the values of the same tokens.
            length: Number of tokens in the sequence.
            real: Bool `[B, m]` for the first `m` tokens of the sequence, False for padding. Later
                tokens are real. None means no padding.
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
        """Store one token that is not padding, and move the write position `slot` to the next slot.

        Args:
            keys: `[B, G, 1, D]`.
            values: `[B, G, 1, Dv]`.
        """
        self.keys.index_copy_(2, self.slot, keys)
        self.values.index_copy_(2, self.slot, values)
        self.bias.index_fill_(3, self.slot, 0.0)
        self.slot.add_(1).remainder_(self.keys.shape[2])

    def go_back(self, length: int) -> None:
        """Return to a sequence length of `length` tokens, and set the write position `slot` on the
        device accordingly."""
        self.length = length
        self.slot.fill_(length % self.keys.shape[2])

    def slots(self, count: int, end: int) -> Tensor:
        """Return the places in the ring buffer of the `count` tokens before position `end`.

        The result is int64 `[count]`.
        """
        device, window = self.keys.device, self.keys.shape[2]
        return torch.arange(end - count, end, device=device) % window

    def newest(self) -> tuple[Tensor, Tensor]:
        """Copy the keys and values that the next token will see, in the order of the sequence."""
        slots = self.slots(min(self.length, self.keys.shape[2] - 1), self.length)
        return self.keys.index_select(2, slots), self.values.index_select(2, slots)


class SlidingLayer(DynamicSlidingWindowLayer):
    """The sliding-window layer of transformers, with a ring buffer for CUDA graphs.

    Reading or setting `keys` or `values`, or setting `cumulative_length`, copies the window out of
    the ring buffer. The ring buffer stays allocated for later use.
    """

    saved_as: ClassVar[str] = DynamicSlidingWindowLayer.__name__
    """Class name in saved folders. It is transformers' own, so that folders do not depend on
    graphs."""

    def __init__(self, sliding_window: int) -> None:
        self._ring: Ring | None = None
        self._rolls = False
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0
        super().__init__(sliding_window)

    @property
    def keys(self) -> Any:
        """Keys `[B, G, n, D]` of the window, in the order of the sequence. None before the first
        token."""
        self.settle()
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.settle()
        self._keys = keys

    @property
    def values(self) -> Any:
        """Values `[B, G, n, Dv]` of the window, in the order of the sequence. None before the first
        token."""
        self.settle()
        return self._values

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.settle()
        self._values = values

    @property
    def cumulative_length(self) -> int:
        """Number of tokens in the sequence, including those that have left the window."""
        ring = self.ring
        return self._length if ring is None else ring.length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.settle()
        self._length = length

    @property
    def ring(self) -> Ring | None:
        """The ring buffer if the layer's keys and values are in it, else None."""
        return self._ring if self._rolls else None

    def ring_refusal(self) -> str:
        """Return the reason why keys and values cannot be in a ring buffer, or "" if they can."""
        if self.sliding_window > LARGEST:
            return f"sliding_window: got {self.sliding_window}, allowed is at most {LARGEST}"
        if vars(self).get("record_past"):  # transformers 5.17 lacks this attribute
            return "its window keeps older tokens for assisted decoding"
        return "" if self.is_initialized else "tokens: got 0, allowed is at least 1"

    def roll(self, real: Tensor | None) -> None:
        """Move keys and values into the ring buffer.

        Args:
            real: Bool `[B, n]`, False where one of the first `n` tokens is padding. All later
                tokens are not padding. None if no token is padding.
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
        self._length = 0  # the ring buffer counts tokens now
        self._rolls = True

    def settle(self) -> None:
        """Move keys and values out of the ring buffer, into tensors as in transformers' own
        layer."""
        if (ring := self.ring) is not None:
            self._rolls, self._length = False, ring.length
            self._keys, self._values = ring.newest()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens, and return the keys and values that the new tokens attend to.

        If the layer uses a ring buffer, these are all slots of the buffer.
        """
        ring = self.ring
        if ring is None or key_states.shape[2] != 1:
            rows: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return rows
        ring.append(key_states, value_states)
        return ring.keys, ring.values

    def seen(
        self, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the keys, values and mask with which to compute attention.

        If the layer uses a ring buffer, the returned mask is the bias that masks its unused
        entries. Otherwise the arguments are returned unchanged.

        Args:
            keys: The keys that the attention function received.
            values: The values that it received.
            mask: The mask that it received.

        Raises:
            UnsupportedError: There is a ring buffer, and the model passed a mask, or other keys
                than `update` returned.
        """
        if (ring := self.ring) is None:
            return keys, values, mask
        if keys.shape[2] != (window := ring.keys.shape[2]):
            raise UnsupportedError(
                f"keys: got {keys.shape[2]} keys for a window of {window}; pass the keys that the "
                "cache returned"
            )
        if mask is not None:
            raise UnsupportedError(
                "attention_mask: got a mask that the model computes for each token; allowed is None"
            )
        return keys, values, ring.bias

    def nbytes(self) -> int:
        """Return the bytes of the window's keys and values. Any thread may call this at any
        time."""
        ring = self.ring
        if ring is None:
            rows = self._keys, self._values
            return sum(tensor.nbytes for tensor in rows if tensor is not None)
        slots = ring.keys.shape[2]
        rows_in_use = min(ring.length, slots - 1)
        return (ring.keys.nbytes + ring.values.nbytes) // slots * rows_in_use

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that the same layer would have in transformers' own class."""
        self.settle()
        named = {"keys": self._keys, "values": self._values, "cumulative_length": self._length}
        return named | {name: one for name, one in vars(self).items() if name not in OWN}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**vars(self), "_ring": None}


OWN = {"_keys", "_values", "_length", "_ring", "_rolls"}
"""Attributes that transformers' class of this layer does not have."""


def grows(layer: Any) -> str:
    """Return the reason why this cache layer prevents a CUDA graph of decode steps.

    Return "" if it does not. A layer prevents it if it makes new tensors for each token.
    """
    if isinstance(layer, IndexedLayer):
        return ""
    if isinstance(layer, SlidingLayer):
        return layer.ring_refusal()
    if isinstance(layer, DynamicLayer):
        return "its cache layer makes new tensors for each token"
    return ""
