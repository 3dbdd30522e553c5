"""Full attention over keys and values in buffers that grow, without an index."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core.protocol import Rows
from kvindex.ops.attention import attend_causal

STEP = 256
"""Minimum number of tokens by which buffers grow."""


class DenseAttention:
    """Attention of one layer to all tokens.

    Args:
        scale: Factor of the logits.
        capacity: Number of tokens for which the first buffers have room.
    """

    def __init__(self, scale: float, capacity: int = STEP) -> None:
        self._scale, self._capacity = scale, max(capacity, 1)
        self._length = 0
        self._keys = self._values = torch.empty(0)
        self._valid: Tensor | None = None
        # the following attributes are the state of captured steps
        self._kernels = False  # whether Triton kernels run the steps
        self._count = self._starts = torch.empty(0, dtype=torch.int64)  # [1], [B] on the device
        self._device_count = -1  # the value of the device's count that the host expects
        self._read = 0
        self._reads: object = None  # a new object when captured addresses become invalid

    def __len__(self) -> int:
        """Number of tokens, `N`."""
        return self._length

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`; 0 before the first token."""
        return len(self._keys) if self._length else 0

    @property
    def rows(self) -> Rows:
        """Views of the keys and values of all tokens, `[B, G, N, D]` each. There must be tokens."""
        return Rows(self._keys[:, :, : self._length], self._values[:, :, : self._length])

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all tokens."""
        if not self._length:
            return 0
        return 2 * self._keys[:, :, : self._length].numel() * self._keys.element_size()

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens, and compute causal attention from them.

        Args:
            queries: `[B, H, T, D]`.
            keys: `[B, G, T, D]`.
            values: `[B, G, T, D]`.
            valid: Bool `[B, T]`, False for padding on the left; None if there is none.

        Returns:
            Output `[B, H, T, D]`. The output of padded queries is undefined.
        """
        if self._kernels and keys.shape[2] == 1 and valid is None:
            self.prepare_replay()
            output = self.captured_step(queries, keys, values)
            self.count_replay()
            return output
        self.append(keys, values, valid)
        end = self._length
        some = None if self._valid is None else self._valid[:, :end]
        keys, values = self._keys[:, :, :end], self._values[:, :, :end]
        return attend_causal(queries, keys, values, scale=self._scale, valid=some)

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> None:
        """Append tokens as `step` does, without computing attention."""
        start, end = self._length, self._length + keys.shape[2]
        self._reserve(end, keys)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self._mark(start, end, valid)
        self._length = end

    def reserve(self, tokens: int) -> None:
        """Set the size of the first buffers, in tokens. Existing buffers are not changed."""
        if not self._length:
            self._capacity = max(self._capacity, tokens)

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        self._length = min(self._length, length)
        if self._valid is not None:
            self._valid[:, self._length :] = True

    def checkpoint(self) -> int:
        """Return the present state for `rollback`: the length, because tokens are only appended."""
        return self._length

    def rollback(self, checkpoint: int) -> None:
        """Restore the state that `checkpoint` returned."""
        self.truncate(checkpoint)

    # Steps in a CUDA graph: kernels read the number of tokens from device memory

    def capture_refusal(self) -> str | None:
        """Return None if the layer stores tokens (see `AttentionLayer.capture_refusal`)."""
        return None if self._length else "tokens: got 0, too few for a step that attends"

    def prepare_replay(self) -> object | None:
        """See `AttentionLayer.prepare_replay`."""
        if not self._length:
            return None
        self._reserve(self._length + 1, self._keys)
        if self._length != self._device_count:
            self._count.fill_(self._length)
            self._device_count = self._length
        # number of positions that a step reads and masks (Triton kernels stop at the last token)
        read = self._capacity if self._kernels else -(-(self._length + 1) // STEP) * STEP
        if self._reads is None or read != self._read:
            self._reads, self._read = object(), read
            if self._valid is not None:
                self._starts.copy_((~self._valid).sum(1))
        return self._reads

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `AttentionLayer.captured_step`."""
        self._keys.index_copy_(2, self._count, keys)
        self._values.index_copy_(2, self._count, values)
        self._count += 1
        places = self._starts, self._count.expand(len(self._starts))
        if self._kernels:
            from kvindex_cuda.triton import attend_token  # imported here, because it is optional

            one, rows = queries.flatten(1, 2), (self._keys, self._values)
            return attend_token(one, *rows, *places, scale=self._scale)[:, :, None]
        rows = self._keys[:, :, : self._read], self._values[:, :, : self._read]
        at = torch.arange(rows[0].shape[2], device=keys.device)
        mask = (at >= places[0][:, None]) & (at < places[1][:, None])
        return functional.scaled_dot_product_attention(
            queries, *rows, attn_mask=mask[:, None, None], scale=self._scale, enable_gqa=True
        )

    def count_replay(self) -> None:
        """See `AttentionLayer.count_replay`."""
        self._length += 1
        self._device_count += 1

    def _reserve(self, tokens: int, like: Tensor) -> None:
        """Make room for `tokens` tokens. Buffers that must grow become twice as large."""
        if self._length and tokens <= self._capacity:
            return
        if tokens > self._capacity:
            self._capacity = max(tokens + STEP, 2 * self._capacity)
        self._keys, self._values = self._grown(self._keys, like), self._grown(self._values, like)
        self._count = like.new_empty(1, dtype=torch.int64)
        self._starts = like.new_zeros(len(like), dtype=torch.int64)
        self._device_count, self._reads = -1, None
        self._kernels = like.is_cuda and find_spec("triton") is not None
        if self._valid is not None:
            self._valid = self._all_valid(self._valid)

    def _grown(self, buffer: Tensor, like: Tensor) -> Tensor:
        """Return a buffer `[B, G, capacity, D]` with the tokens of `buffer`."""
        batch, heads, _, width = like.shape
        grown = like.new_zeros(batch, heads, self._capacity, width)
        if self._length:
            grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def _mark(self, start: int, end: int, valid: Tensor | None) -> None:
        """Record which new tokens are padding: none of them if `valid` is None."""
        if valid is None:
            return
        if self._valid is None:
            self._valid = self._all_valid(valid[:, :0])
        self._valid[:, start:end] = valid

    def _all_valid(self, known: Tensor) -> Tensor:
        """Extend `known` to bool `[B, capacity]`, with True for all later tokens."""
        return functional.pad(known, (0, self._capacity - known.shape[1]), value=True)
