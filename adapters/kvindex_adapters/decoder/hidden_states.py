"""Hidden states of a prompt that is read layer by layer, in device memory or in host memory.

A layer computes one chunk of the prompt at a time. On a GPU, the hidden states of a long prompt can
be in pinned host memory, with only two chunks of them on the device. While a layer computes a
chunk, the chunk before it is copied to the host, and then the chunk after it to the device. By
calculation, such a copy takes less than a tenth of the time in which a layer computes a chunk: 0.7
ms for 34 MB, a chunk of Qwen3-8B, at 50 GB per second.
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
        """Return the hidden states of a chunk, `[B, T, hidden]`, contiguous, to be changed in
        place. Chunks are taken in order, all of them for each layer."""
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
        parts = (ids[:, start:end] for start, end in chunks)
        self._chunks = [functional.embedding(part, weights.embedding) for part in parts]

    def take(self, chunk: int) -> Tensor:
        """Return a chunk."""
        return self._chunks[chunk]

    def put(self, chunk: int) -> None:
        """Do nothing: the chunk was changed in place."""

    def last(self) -> Tensor:
        """Return the hidden state of the last token."""
        return self._chunks[-1][:, -1]


class HostStates:
    """Hidden states in host memory, with two chunks on the device.

    Args:
        weights: The model's weights.
        ids: Int64 `[B, N]`.
        chunks: First and end position of each chunk, in order; two or more.
        new_slab: Returns memory, in the dtype of the hidden states, always of the same size. It is
            called while the first layer computes, when memory for the next chunk is needed.
    """

    def __init__(
        self,
        weights: Weights,
        ids: Tensor,
        chunks: Sequence[tuple[int, int]],
        new_slab: Callable[[], Tensor],
    ) -> None:
        self._embedding, self._ids, self._chunks = weights.embedding, ids, chunks
        self._new_slab, self._slabs = new_slab, list[Tensor]()
        self._step, self._steps = -1, len(weights.layers) * len(chunks)
        self._numbers = len(ids) * self._embedding.shape[1]  # of one position of all sequences
        longest = max(end - start for start, end in chunks)
        self._buffers = [self._embedding.new_empty(longest * self._numbers) for _ in range(2)]
        self._copies = _Copies(self._buffers)

    def take(self, chunk: int) -> Tensor:
        """Return a chunk in one of the two buffers."""
        self._step += 1
        self._copies.wait_for(self._step % 2)
        start, end = self._chunks[chunk]
        shape = len(self._ids), end - start, self._embedding.shape[1]
        states = self._buffers[self._step % 2][: prod(shape)].view(shape)
        if self._step < len(self._chunks):  # the first layer
            states.copy_(functional.embedding(self._ids[:, start:end], self._embedding))
        return states

    def put(self, chunk: int) -> None:
        """Start to copy the chunk to the host, and then the chunk after the next one into the same
        buffer."""
        later, buffer = self._step + 2, self._buffers[self._step % 2]
        with self._copies.after_computation(self._step % 2):
            if self._step < self._steps - len(self._chunks):  # not the last layer
                for stored, part in self._pieces(chunk, buffer):
                    stored.copy_(part, non_blocking=True)
            if len(self._chunks) <= later < self._steps:
                for stored, part in self._pieces(later % len(self._chunks), buffer):
                    part.copy_(stored, non_blocking=True)

    def last(self) -> Tensor:
        """Return the hidden state of the last token."""
        start, end = self._chunks[-1]
        states = self._buffers[self._step % 2][: (end - start) * self._numbers]
        return states.view(len(self._ids), end - start, -1)[:, -1]

    def _pieces(self, chunk: int, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of slabs in which a chunk is stored, each with its part of a buffer.

        The chunks are stored one after the other in the slabs.
        """
        begin, end = (place * self._numbers for place in self._chunks[chunk])
        done = begin
        while done < end:
            if not self._slabs or done >= len(self._slabs) * len(self._slabs[0]):
                self._slabs.append(self._new_slab())
            number, first = divmod(done, len(self._slabs[0]))
            stored = self._slabs[number][first : first + end - done]
            yield stored, buffer[done - begin : done - begin + len(stored)]
            done += len(stored)


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


@contextmanager
def states_of(weights: Weights, ids: Tensor, chunks: Sequence[tuple[int, int]]) -> Iterator[States]:
    """Context manager that returns the hidden states of a prompt: the embeddings of `ids`.

    On a GPU, those of a long prompt are in host memory, if `kvindex_cuda` can pin it, and if enough
    host memory is left for an index.
    """
    blocks, size = None, weights.embedding.element_size()
    nbytes = ids.numel() * weights.embedding.shape[1] * size
    if ids.is_cuda and len(chunks) >= CHUNKS and nbytes >= HOST_BYTES:
        blocks = _host_blocks(weights, ids, nbytes)
    if blocks is None:
        yield DeviceStates(weights, ids, chunks)
        return

    def new_slab() -> Tensor:
        try:
            slab, _ = blocks.add()
        except (MemoryError, RuntimeError):  # no more host memory can be pinned
            slab = torch.empty(blocks.block_bytes, dtype=torch.uint8, device=ids.device)
        return slab.view(weights.embedding.dtype)

    try:
        yield HostStates(weights, ids, chunks, new_slab)
    finally:
        blocks.close()


def _host_blocks(weights: Weights, ids: Tensor, nbytes: int) -> HostBlocks | None:
    """Return slabs of pinned host memory for `nbytes` bytes, of the size that indexes use, too.

    Return None if no memory can be pinned, or if too little of it would be left for the keys and
    values of all layers.
    """
    if find_spec("cupy") is None or find_spec("kvindex_cuda") is None:
        return None
    import kvindex_cuda  # imported here, because it is optional
    from kvindex_cuda.memory.block_store import SLAB_BYTES
    from kvindex_cuda.memory.budget import OverBudgetError, shared_budget
    from kvindex_cuda.memory.host_blocks import HostBlocks
    from kvindex_cuda.memory.host_memory import usable_bytes
    from kvindex_cuda.memory.slab_cache import shared_cache

    try:
        kvindex_cuda.ready(ids.device)
    except (ImportError, RuntimeError):
        return None
    layer, count = weights.layers[0], -(-nbytes // SLAB_BYTES)
    row = (len(layer.key.weight) + len(layer.value.weight)) * weights.embedding.element_size()
    # each layer stores its rows in slabs of its own, and one more is pinned ahead
    slabs = (ids.numel() * row // SLAB_BYTES + 2) * len(weights.layers) + count
    room, usable = shared_budget().room_bytes, usable_bytes()
    if usable is not None:
        usable += shared_cache().kept_bytes  # pinned, and used by no index
    if any(left is not None and left < slabs * SLAB_BYTES for left in (room, usable)):
        return None
    try:
        return HostBlocks(ids.device, count=count, block_bytes=SLAB_BYTES)
    except OverBudgetError:  # because of another thread
        return None
