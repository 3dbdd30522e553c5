"""Hidden states of a prompt that is read layer by layer, in device memory or in host memory.

A layer computes one chunk of the prompt at a time. On a GPU, a long prompt's hidden states are in
pinned host memory, and only two chunks of them are on the device. While a layer computes a chunk,
the chunk before it is copied to the host, and then the chunk after it to the device. Such a copy
takes less than a tenth of the time in which a layer computes a chunk (33 MB of Qwen3-8B: 0.7 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core.streams import new_stream
from kvindex_adapters.llama.weights import Weights

if TYPE_CHECKING:
    from kvindex_cuda.memory.host_blocks import HostBlocks

HOST_BYTES = 2**29
"""Bytes of hidden states from which on they are in host memory. Fewer take a small part of the
device memory, and pinning host memory takes time in the first prompt of a process."""

CHUNKS = 4
"""Minimum number of chunks for host memory. Two chunks are on the device."""


class States(Protocol):
    """The hidden states of a prompt `[B, N, hidden]`, which each layer changes chunk by chunk."""

    def take(self, chunk: int) -> Tensor:
        """Return the hidden states of a chunk, `[B, T, hidden]`, to be changed in place. Chunks are
        taken in order, all of them for each layer."""
        ...

    def put(self, chunk: int) -> None:
        """Say that the layer has changed the chunk, which was taken last."""
        ...

    def last(self) -> Tensor:
        """Return the hidden state of the last token after the last layer, `[B, hidden]`."""
        ...


class DeviceStates:
    """Hidden states in device memory."""

    def __init__(self, weights: Weights, ids: Tensor, chunks: Sequence[tuple[int, int]]) -> None:
        self._all = functional.embedding(ids, weights.embedding)
        self._chunks = chunks

    def take(self, chunk: int) -> Tensor:
        """Return a chunk, a view."""
        return self._all[:, slice(*self._chunks[chunk])]

    def put(self, chunk: int) -> None:
        """Do nothing: the chunk is a view."""

    def last(self) -> Tensor:
        """Return the hidden state of the last token."""
        return self._all[:, -1]


class HostStates:
    """Hidden states in host memory, with two chunks on the device.

    Args:
        weights: The model's weights.
        ids: Int64 `[B, N]`.
        chunks: First and end position of each chunk, in order; two or more.
        new_block: Returns memory on the host for one chunk, uint8, at least as large as the longest
            chunk. Called for each chunk when the first layer has computed it, so that allocating
            memory runs concurrently with the computation.
    """

    def __init__(
        self,
        weights: Weights,
        ids: Tensor,
        chunks: Sequence[tuple[int, int]],
        new_block: Callable[[], Tensor],
    ) -> None:
        self._embedding, self._ids, self._chunks = weights.embedding, ids, chunks
        self._new_block, self._blocks = new_block, list[Tensor]()
        self._step, self._steps = -1, len(weights.layers) * len(chunks)
        numbers = len(ids) * longest(chunks) * self._embedding.shape[1]
        self._buffers = [self._embedding.new_empty(numbers) for _ in range(2)]
        self._copies = _Copies(self._buffers)

    def take(self, chunk: int) -> Tensor:
        """Return a chunk in one of the two buffers."""
        self._step += 1
        states = self._in_buffer(self._step)
        self._copies.wait_for(self._step % 2)
        if self._step < len(self._chunks):  # the first layer
            ids = self._ids[:, slice(*self._chunks[chunk])]
            states.copy_(functional.embedding(ids, self._embedding))
        return states

    def put(self, chunk: int) -> None:
        """Start to copy the chunk to the host, and then the chunk after the next one into the same
        buffer."""
        if self._step < len(self._chunks):
            self._blocks.append(self._new_block().view(self._embedding.dtype))
        later = self._step + 2
        with self._copies.after_computation(self._step % 2):
            if self._step < self._steps - len(self._chunks):  # not the last layer
                self._on_host(chunk).copy_(self._in_buffer(self._step), non_blocking=True)
            if len(self._chunks) <= later < self._steps:
                stored = self._on_host(later % len(self._chunks))
                self._in_buffer(later).copy_(stored, non_blocking=True)

    def last(self) -> Tensor:
        """Return the hidden state of the last token."""
        return self._in_buffer(self._step)[:, -1]

    def _in_buffer(self, step: int) -> Tensor:
        return self._shaped(self._buffers[step % 2], step % len(self._chunks))

    def _on_host(self, chunk: int) -> Tensor:
        return self._shaped(self._blocks[chunk], chunk)

    def _shaped(self, memory: Tensor, chunk: int) -> Tensor:
        start, end = self._chunks[chunk]
        shape = len(self._ids), end - start, self._embedding.shape[1]
        return memory[: prod(shape)].view(shape)


class _Copies:
    """Orders copies, which on a GPU run on a stream of their own, and the computation of the
    current stream. `buffers` are the tensors on the device."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        device = buffers[0].device
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._done: dict[int, torch.cuda.Event] = {}
        for buffer in buffers:
            if self._stream is not None:  # if reading fails, copies may outlive the buffer
                buffer.record_stream(self._stream)

    def wait_for(self, buffer: int) -> None:
        """Let the computation wait until the copies from and into a buffer have finished."""
        if self._stream is not None and buffer in self._done:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done[buffer])

    @contextmanager
    def after_computation(self, buffer: int) -> Iterator[None]:
        """Context in which copies from and into a buffer are made, after the computation so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._done[buffer] = self._stream.record_event()


def longest(chunks: Sequence[tuple[int, int]]) -> int:
    """Return the number of tokens of the longest chunk."""
    return max(end - start for start, end in chunks)


@contextmanager
def states_of(weights: Weights, ids: Tensor, chunks: Sequence[tuple[int, int]]) -> Iterator[States]:
    """Context manager that returns the hidden states of a prompt: the embeddings of `ids`.

    On a GPU, those of a long prompt are in host memory, if `kvindex_cuda` can pin it and the limit
    of pinned memory leaves room for the index.
    """
    blocks = None
    if ids.is_cuda and len(chunks) >= CHUNKS and ids.numel() * _width(weights) >= HOST_BYTES:
        blocks = _host_blocks(weights, ids, chunks)
    if blocks is None:
        yield DeviceStates(weights, ids, chunks)
        return
    try:
        yield HostStates(weights, ids, chunks, lambda: blocks.add()[0])
    finally:
        blocks.close()


def _host_blocks(
    weights: Weights, ids: Tensor, chunks: Sequence[tuple[int, int]]
) -> HostBlocks | None:
    """Return pinned host memory for the chunks, or None if it cannot be pinned, or if too little
    pinned memory would be left for the keys and values of all layers."""
    if find_spec("cupy") is None or find_spec("kvindex_cuda") is None:
        return None
    import kvindex_cuda  # imported here, because it is optional
    from kvindex_cuda.memory.budget import shared_budget
    from kvindex_cuda.memory.host_blocks import HostBlocks

    try:
        kvindex_cuda.ready(ids.device)
    except RuntimeError:
        return None
    block_bytes = len(ids) * longest(chunks) * _width(weights)
    layer, size = weights.layers[0], weights.embedding.element_size()
    rows = (len(layer.key.weight) + len(layer.value.weight)) * size * len(weights.layers)
    room = shared_budget().room_bytes
    if room is not None and room < len(chunks) * block_bytes + ids.numel() * rows:
        return None
    return HostBlocks(ids.device, count=len(chunks), block_bytes=block_bytes)


def _width(weights: Weights) -> int:
    """Return the bytes of a token's hidden state."""
    return weights.embedding.shape[1] * weights.embedding.element_size()
