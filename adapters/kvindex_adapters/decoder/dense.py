"""`DenseAttention`: full attention over keys and values in buffers that grow, without an index."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.attention import attend_causal

STEP = 256
"""Buffers grow by at least so many tokens."""


class DenseAttention:
    """Attention of one layer to all tokens.

    scale: of the logits; capacity: tokens that fit before the buffers move.
    """

    def __init__(self, scale: float, capacity: int = STEP) -> None:
        self._scale, self._capacity = scale, max(capacity, 1)
        self._length = 0
        self._keys = self._values = torch.empty(0)
        self._valid: Tensor | None = None

    def __len__(self) -> int:
        """Tokens seen, `N`."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all tokens."""
        if not self._length:
            return 0
        return 2 * self._keys[:, :, : self._length].numel() * self._keys.element_size()

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens and attend from them, causally: `[B, H, T, D]`.

        queries `[B, H, T, D]`, keys and values `[B, G, T, D]`; valid bool `[B, T]` marks left
        padding. What a padded query gets means nothing.
        """
        start, end = self._length, self._length + keys.shape[2]
        self._reserve(end, keys)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self._mark(start, end, valid)
        self._length = end
        some = None if self._valid is None else self._valid[:, :end]
        keys, values = self._keys[:, :, :end], self._values[:, :, :end]
        return attend_causal(queries, keys, values, scale=self._scale, valid=some)

    def _reserve(self, tokens: int, like: Tensor) -> None:
        """Make buffers for so many tokens; those that must grow become twice as large."""
        if self._length and tokens <= self._capacity:
            return
        if tokens > self._capacity:
            self._capacity = max(tokens + STEP, 2 * self._capacity)
        self._keys, self._values = self._grown(self._keys, like), self._grown(self._values, like)
        if self._valid is not None:
            self._valid = self._all_valid(self._valid)

    def _grown(self, buffer: Tensor, like: Tensor) -> Tensor:
        """A buffer of the capacity `[B, G, capacity, D]` with the tokens of another."""
        batch, heads, _, width = like.shape
        grown = like.new_zeros(batch, heads, self._capacity, width)
        if self._length:
            grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def _mark(self, start: int, end: int, valid: Tensor | None) -> None:
        """Remember which tokens are padding; without a word of it they are none."""
        if valid is None:
            return
        if self._valid is None:
            self._valid = self._all_valid(valid[:, :0])
        self._valid[:, start:end] = valid

    def _all_valid(self, known: Tensor) -> Tensor:
        """Which tokens are real, bool `[B, capacity]`: those known, and all after them."""
        return torch.nn.functional.pad(known, (0, self._capacity - known.shape[1]), value=True)
