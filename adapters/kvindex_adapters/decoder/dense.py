"""Full attention without an index. Keys and values are in buffers that grow."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core.protocol import Rows
from kvindex.ops.attention import attend_causal

STEP = 256
"""Minimum number of tokens by which buffers grow."""


class DenseAttention:
    """The keys and values of one layer, with full attention to all of them.

    Args:
        scale: Factor by which `q·k` is multiplied before the softmax.
        capacity: Number of tokens for which the first append allocates memory.
    """

    def __init__(self, scale: float, capacity: int = STEP) -> None:
        self._scale, self._capacity = scale, max(capacity, 1)
        self._length = 0
        self._keys = self._values = torch.empty(0)
        self._valid: Tensor | None = None
        # the attributes from here on are used only by decode steps in a CUDA graph
        self._kernels = False  # whether a Triton kernel computes the attention
        self._count = self._starts = torch.empty(0, dtype=torch.int64)  # [1] and [B], on the device
        self._device_count = -1  # the value that the host expects in `_count`
        self._read = 0
        self._reads: object = (
            None  # replaced by a new object when captured addresses become invalid
        )

    def __len__(self) -> int:
        """Return the number of tokens, `N`."""
        return self._length

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`; 0 before the first token."""
        return len(self._keys) if self._length else 0

    @property
    def rows(self) -> Rows:
        """Views of the keys and values of all tokens, `[B, G, N, D]` each. Requires at least one
        token."""
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
        """Append `T` tokens, and compute the causal attention of their queries to all tokens.

        Args:
            queries: `[B, H, T, D]`.
            keys: `[B, G, T, D]`.
            values: `[B, G, T, D]`.
            valid: Bool `[B, T]`, False for padding on the left. None means no padding.

        Returns:
            Output `[B, H, T, D]`. It is undefined for padding tokens.
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
        """Append the keys and values of `T` tokens, `[B, G, T, D]` each, without computing
        attention."""
        start, end = self._length, self._length + keys.shape[2]
        self._reserve(end, keys)
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values
        self._mark(start, end, valid)
        self._length = end

    def reserve(self, tokens: int) -> None:
        """Set the number of tokens for which the first append allocates memory. After the first
        append, this call has no effect."""
        if not self._length:
            self._capacity = max(self._capacity, tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and remove the rest."""
        self._length = min(self._length, length)
        if self._valid is not None:
            self._valid[:, self._length :] = True

    def checkpoint(self) -> int:
        """Return a checkpoint for `rollback`: the number of tokens."""
        return self._length

    def rollback(self, checkpoint: int) -> None:
        """Remove the tokens that were appended after `checkpoint`."""
        self.truncate(checkpoint)

    # The methods below run decode steps in a CUDA graph. The kernels of such a step read the number
    # of tokens from device memory.

    def capture_refusal(self, tokens: int = 1, *, full: bool | None = None) -> str | None:
        """Return the reason why a CUDA graph cannot run the next step, or None if it can.

        tokens: number of tokens of each sequence in the step.
        full: not used, because attention is always full.
        """
        if tokens > 1:
            return f"layer: got full attention, which runs a step of {tokens} tokens op by op"
        return None if self._length else "tokens: got 0, allowed is at least 1"

    def prepare_replay(self, tokens: int = 1) -> object | None:
        """Prepare the buffers and the token count on the device for a captured step.

        Args:
            tokens: Number of tokens of each sequence in the step.

        Returns:
            An object that represents the present buffers. A CUDA graph that was captured earlier is
            still valid if this call returns the same object as before. None if the layer contains
            no tokens, or the step has several.
        """
        if self.capture_refusal(tokens) is not None:
            return None
        self._reserve(self._length + 1, self._keys)
        if self._length != self._device_count:
            self._count.fill_(self._length)
            self._device_count = self._length
        # Number of positions that the captured decode step may read. Positions after the last token
        # have no effect: the Triton kernel does not read them, and plain torch masks them.
        read = self._capacity if self._kernels else -(-(self._length + 1) // STEP) * STEP
        if self._reads is None or read != self._read:
            self._reads, self._read = object(), read
            if self._valid is not None:
                self._starts.copy_((~self._valid).sum(1))
        return self._reads

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append one token to each sequence, and compute its attention.

        A CUDA graph can capture this, because the device counts the tokens.
        """
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

    def prepare_next(self, tokens: int = 1, ahead: int = 0) -> object | None:
        """Return None, because `prepare_replay` takes little time."""
        return None

    def count_replay(
        self,
        kept: int | Sequence[int] = 1,
        of: int = 1,
        *,
        full: bool | None = None,
        held: bool = False,
    ) -> bool:
        """Add 1 to the number of tokens that the host knows.

        Call this after each replay of a CUDA graph that contains `captured_step`. The arguments are
        not used, because no graph contains a step of several tokens. Returns False.
        """
        self._length += 1
        self._device_count += 1
        return False

    def _reserve(self, tokens: int, like: Tensor) -> None:
        """Ensure that the buffers have room for `tokens` tokens. A full buffer at least doubles."""
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
        """Copy `buffer` to a larger buffer `[B, G, capacity, D]`."""
        batch, heads, _, width = like.shape
        grown = like.new_zeros(batch, heads, self._capacity, width)
        if self._length:
            grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def _mark(self, start: int, end: int, valid: Tensor | None) -> None:
        """Record which of the tokens from `start` to `end` are padding.

        `valid` is False for padding tokens. If it is None, no token is padding.
        """
        if valid is None:
            return
        if self._valid is None:
            self._valid = self._all_valid(valid[:, :0])
        self._valid[:, start:end] = valid

    def _all_valid(self, known: Tensor) -> Tensor:
        """Extend the mask `known` to `[B, capacity]`, with True for later tokens."""
        return functional.pad(known, (0, self._capacity - known.shape[1]), value=True)
