"""Keep the keys and values of a prompt in GPU memory while a model reads it, if there is room.

Each chunk of a prompt attends to all tokens before it. An index that stores rows (keys and values)
in host memory would copy them to the GPU again for each chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.core.transaction import in_plain_torch

ROOM = 0.5
"""Fraction of the free GPU memory that the rows of a prompt may take, over all layers."""


class ExpectedPrompt:
    """The prompt that all layers of a cache are about to read.

    Args:
        length: Number of tokens of the sequence at the end of the prompt.
        layers: Number of layers that have an index.
    """

    def __init__(self, length: int, layers: int) -> None:
        self.length, self._layers = length, layers
        self._fits: dict[torch.device, bool] = {}

    def fits(self, keys: Tensor, values: Tensor) -> bool:
        """Return True if the rows of all layers fit into the memory of the keys' GPU.

        The first layer on a device decides for all layers on this device, as if all layers of the
        model were there. The result is False on devices other than GPUs.

        Args:
            keys: The first keys of the layer, `[B, G, T, D]`.
            values: Their values, `[B, G, T, Dv]`.
        """
        device = keys.device
        if device not in self._fits:
            need = self._layers * (keys.nbytes + values.nbytes) * self.length / keys.shape[2]
            self._fits[device] = keys.is_cuda and need <= ROOM * free_bytes(device)
        return self._fits[device]


class PromptRows:
    """The rows of a prompt in one layer, from its first token on.

    Args:
        length: Number of tokens for which there is room.
        keys: The first keys, `[B, G, T, D]`. They are not stored yet.
        values: Their values, `[B, G, T, Dv]`.
    """

    @in_plain_torch  # the next chunk may be read outside of the caller's inference mode
    def __init__(self, length: int, keys: Tensor, values: Tensor) -> None:
        self.room, self.length = length, 0
        self._rows = Rows(*(self._empty(part) for part in (keys, values)))

    def _empty(self, part: Tensor) -> Tensor:
        """Make an empty tensor for keys or values like `part`.

        The heads of a token are stored one after the other, as cuDNN's attention needs them.
        """
        B, heads, _, width = part.shape
        return part.new_empty(B, self.room, heads, width).transpose(1, 2)

    @in_plain_torch
    def extended(self, keys: Tensor, values: Tensor) -> Rows:
        """Append rows, and return views of all rows, `[B, G, N, D]` and `[B, G, N, Dv]`."""
        start, end = self.length, self.length + keys.shape[2]
        self._rows.keys[:, :, start:end] = keys
        self._rows.values[:, :, start:end] = values
        self.length = end
        return Rows(self._rows.keys[:, :, :end], self._rows.values[:, :, :end])


def free_bytes(device: torch.device) -> int:
    """Return the bytes of GPU memory that are free, or that torch has reserved but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
