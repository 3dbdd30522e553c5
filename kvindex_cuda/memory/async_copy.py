"""Pinned host memory, and copies from a GPU into it that run concurrently with computation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.core.streams import new_stream, raw_stream
from kvindex_cuda.memory.host_memory import HostMemory, map_memory
from kvindex_cuda.memory.slab_pool import host_view
from kvindex_cuda.runtime.launch import checked

PORTABLE, MAPPED = 1, 2
"""Flags of `cudaHostAlloc` and `cudaHostRegister`: the memory is pinned for all devices, and their
kernels can access it."""

REGISTERED_BYTES = 4 * 2**20
"""Minimum size of slabs that are mapped and registered. Below it, there are few pages to clear."""

UNSUPPORTED = 1, 801
"""`cudaErrorInvalidValue` and `cudaErrorNotSupported`: the system cannot register mapped memory.
After other errors, such as a lack of memory, the next slab may be registered."""

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3
"""`cudaMemcpyDeviceToHost`, `cudaMemcpyDeviceToDevice`."""

MAX_PITCH_BYTES = 2**31 - 1
"""Value of `cudaDevAttrMaxPitch` on every GPU so far."""


@dataclass(frozen=True)
class PinnedSlab:
    """A slab (range of memory) of pinned host memory that GPUs can access.

    Attributes:
        host_address: Address of the first byte for the host.
        device_address: Address of the first byte for kernels.
        device: Number of the device whose driver pinned the memory.
        mapped: The memory that was registered with the driver. None if the driver allocated it.
    """

    host_address: int
    device_address: int
    device: int
    mapped: HostMemory | None = None

    def view(self, nbytes: int) -> Tensor:
        """Return the slab's bytes, uint8 `[nbytes]`."""
        return host_view(self.host_address, nbytes)

    def settle(self) -> None:
        """Wait until all kernels and copies that may use this pinned memory have finished."""
        cupy = checked(self.device)
        with cupy.cuda.Device(self.device):
            cupy.cuda.runtime.deviceSynchronize()

    def free(self) -> None:
        """Unpin the memory, after kernels and copies that may use it have finished, and return it
        to the operating system."""
        self.settle()
        cupy = checked(self.device)
        with cupy.cuda.Device(self.device):
            if self.mapped is None:
                cupy.cuda.runtime.freeHost(self.host_address)
            else:
                try:
                    cupy.cuda.runtime.hostUnregister(self.host_address)
                finally:
                    self.mapped.free()


class PinnedAllocator:
    """Allocates slabs (ranges of pinned host memory).

    Slabs of at least `REGISTERED_BYTES` are mapped in huge pages (`host_memory`), and then
    registered with CUDA (`cudaHostRegister`). `cudaHostAlloc` takes longer, and kernel launches of
    other threads wait for it. It
    allocates small slabs, and all slabs of a system where memory cannot be mapped or registered.

    The constructor raises ValueError unless the device is a CUDA device. It also raises the errors
    of `launch.checked`.
    """

    on_host = True

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(
                f"device: got {device}, allowed is a CUDA device, whose driver pins host memory"
            )
        self._device = device.index
        self._registers = True  # False once CUDA has refused to register mapped memory
        checked(self._device)

    def allocate(self, nbytes: int) -> PinnedSlab:
        """Return `nbytes` bytes of pinned host memory. Raises MemoryError if this fails."""
        cupy = checked(self._device)
        runtime, before, refused = cupy.cuda.runtime, "", False
        with cupy.cuda.Device(self._device):
            if self._registers and nbytes >= REGISTERED_BYTES:
                try:
                    return self._registered(runtime, nbytes)
                except MemoryError as error:
                    before = f"; before that: {error}"
                except runtime.CUDARuntimeError as error:
                    before = f"; before that, to register memory failed: {error}"
                    refused = error.status in UNSUPPORTED
            try:
                slab = self._allocated(runtime, nbytes)
            except runtime.CUDARuntimeError as error:
                raise MemoryError(f"{error}{before}") from error
        if refused:
            self._registers = False
        return slab

    def _registered(self, runtime: Any, nbytes: int) -> PinnedSlab:
        """Map memory and register it. Raises MemoryError or CuPy's error, and then keeps none."""
        with ExitStack() as undo:
            mapped = map_memory(nbytes)
            undo.callback(mapped.free)
            runtime.hostRegister(mapped.address, mapped.nbytes, PORTABLE | MAPPED)
            undo.callback(runtime.hostUnregister, mapped.address)
            device_address = runtime.pointerGetAttributes(mapped.address).devicePointer
            undo.pop_all()
        return PinnedSlab(mapped.address, device_address, self._device, mapped)

    def _allocated(self, runtime: Any, nbytes: int) -> PinnedSlab:
        """Let the driver allocate memory. Raises CuPy's error, and then keeps none."""
        with ExitStack() as undo:
            address = runtime.hostAlloc(nbytes, PORTABLE | MAPPED)
            undo.callback(runtime.freeHost, address)
            device_address = runtime.pointerGetAttributes(address).devicePointer
            undo.pop_all()
        return PinnedSlab(address, device_address, self._device)


class Offload:
    """Copies tensors from a CUDA device to slabs of host memory, on a side stream. If the device is
    a CPU, copies are done immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = new_stream(device)
        self._done: torch.cuda.Event | None = None
        self._waited: tuple[torch.cuda.Event | None, set[int]] = (
            None,
            set(),
        )  # event, streams that waited

    def copy(
        self, pieces: Iterable[tuple[Tensor, Tensor]], sources: Iterable[Tensor]
    ) -> torch.cuda.Event | None:
        """Start copies from device tensors to slabs. Return an event for `wait`, or None on a CPU.

        The copies run after the work that is already queued on the current stream, and keep the
        source tensors alive. On a CPU, the copies are already done when this method returns.

        Args:
            pieces: Pairs (part of a slab, part of a source tensor), uint8 `[h, w]` with contiguous
                rows.
            sources: The tensors to which the parts belong.
        """
        if self._side is None:
            for target, piece in pieces:
                target.copy_(piece)
            return None
        cupy = checked(self._device.index)
        self._side.wait_stream(torch.cuda.current_stream(self._device.index))
        with cupy.cuda.Device(self._device.index):
            for target, piece in pieces:
                _copy_rows(cupy.cuda.runtime, target, piece, self._side.cuda_stream)
        for source in sources:
            source.record_stream(self._side)
        self._done = self._side.record_event()
        return self._done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Make the current stream wait for a group of copies, given by the event that `copy`
        returned, and for all earlier copies."""
        if done is None:
            return
        stream = raw_stream(self._device.index)
        if self._waited[0] is not done:
            self._waited = done, set()
        if stream in self._waited[1]:
            return  # this stream has waited for these copies
        torch.cuda.current_stream(self._device.index).wait_event(done)
        self._waited[1].add(stream)

    def synchronize(self) -> None:
        """Block the host until all copies have finished, and until the work on the current stream,
        which may read rows, has finished."""
        if self._done is not None:
            self._done.synchronize()
        if self._side is not None:
            torch.cuda.current_stream(self._device.index).synchronize()


def _copy_rows(runtime: Any, target: Tensor, piece: Tensor, stream: int) -> None:
    height, width = piece.shape
    pitches = [max(part.stride(0), width) for part in (target, piece)]
    if height > 1 and max(pitches) > MAX_PITCH_BYTES:
        for row in range(height):
            _copy_rows(runtime, target[row : row + 1], piece[row : row + 1], stream)
        return
    to, come = (part.data_ptr() for part in (target, piece))
    kind = DEVICE_TO_DEVICE if target.is_cuda else DEVICE_TO_HOST
    if height == 1:
        runtime.memcpyAsync(to, come, width, kind, stream)
        return
    runtime.memcpy2DAsync(to, pitches[0], come, pitches[1], width, height, kind, stream)
