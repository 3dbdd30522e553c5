"""Anonymous host memory in huge pages (Linux only).

Linux clears each page of new memory when it is first written, on the thread that writes.
`async_copy.PinnedAllocator` registers this memory with CUDA, so that the driver need not allocate
and clear memory itself. Memory is populated by one thread at a time: several threads are faster,
but slow down the thread that launches kernels meanwhile (docs/lab/prompts.md, "Pinning"). This
module does not use CUDA.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

from kvindex_cuda.memory.budget import available_bytes, bytes_left_in_groups

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page of x86-64, and of ARM with pages of 4 KiB."""

STEP = 2 * HUGE_PAGE
"""Bytes that are populated in one system call. During this call, other threads cannot map or unmap
memory, so it should be short: about 1 ms."""

SPARE_FRACTION = 0.1
"""Fraction of the host memory, available at the first call of `map_memory`, that must stay
available. If Linux runs out of memory while a process writes to new pages, it kills a process
instead of returning an error."""

MADV_POPULATE_WRITE = 23
"""Advice that allocates all pages of a range (Linux 5.14). Python 3.11 has no name for it."""

_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class HostMemory:
    """Anonymous private memory of this process, all of it allocated.

    A child process after `os.fork` does not have this memory. Otherwise Linux would copy all pages
    that a device uses, or the device would no longer see what the parent writes.

    Attributes:
        address: Address of the first byte. A multiple of `HUGE_PAGE`.
        nbytes: Bytes, a multiple of the page size.
        process: Id of the process that mapped the memory.
    """

    address: int
    nbytes: int
    process: int

    def free(self) -> None:
        """Return the memory to the operating system. It must not be used afterwards.

        In a child process this does nothing.
        """
        if self.process == os.getpid():
            _unmap(self.address, self.nbytes)


def map_memory(nbytes: int) -> HostMemory:
    """Map memory, in huge pages where the system offers them, and allocate all of its pages.

    Args:
        nbytes: Bytes, rounded up to whole pages.

    Returns:
        The memory, filled with zeros.

    Raises:
        MemoryError: The system is not Linux, or too little memory would stay available
            (`SPARE_FRACTION`), or the system returned an error. All that was taken is given back.
    """
    if sys.platform != "linux":
        raise MemoryError(f"platform: got {sys.platform}, allowed is linux")
    available, spare = usable_bytes(), _spare_bytes()
    if available is not None and available < nbytes + spare:
        raise MemoryError(
            f"needs {nbytes} bytes of host memory and {spare} bytes to spare, but {available} "
            "bytes are available"
        )
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        return _Call(nbytes).run()
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread could start
        raise MemoryError(f"cannot map {nbytes} bytes of host memory: {error}") from error


def usable_bytes() -> int | None:
    """Return the bytes of host memory that this process can still allocate, or None if unknown.

    This is the machine's available memory, or less in a container with a memory limit.
    """
    available = available_bytes()
    return None if available is None else min([available, *bytes_left_in_groups()])


@lru_cache(maxsize=1)
def _spare_bytes() -> int:
    return int(SPARE_FRACTION * (usable_bytes() or 0))


class Latch:
    """Lets threads wait until another thread calls `open`.

    Unlike `threading.Event`, a `KeyboardInterrupt` in a waiting thread can never block `open`.
    """

    def __init__(self) -> None:
        self._closed = Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Let all threads that wait continue. May be called once."""
        self._closed.release()

    def wait(self) -> None:
        """Wait until `open` has been called."""
        with self._closed:
            pass


def start(work: Callable[[], None]) -> Latch:
    """Run `work` on a new thread. Return a latch that opens when `work` has ended.

    Raises RuntimeError if no thread could start. `threading.Thread.start` waits for the new thread,
    and a KeyboardInterrupt meanwhile may block that thread forever.
    """
    done = Latch()

    def run() -> None:
        try:
            work()
        finally:
            done.open()

    start_new_thread(run, ())
    return done


class _Call:
    """One call of `map_memory`, whose work is done by a new thread.

    Python raises KeyboardInterrupt in the main thread alone, and possibly between any two
    instructions. So no thread that can be interrupted maps, populates or unmaps memory that another
    thread still uses. If the caller is interrupted, the working thread frees the memory when it is
    done.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._result: HostMemory | Exception | None = None
        self._first = Lock()  # acquired by the thread when it is done, or by a caller that leaves

    def run(self) -> HostMemory:
        """Return the memory. Raises OSError, and RuntimeError if no thread could start."""
        try:
            start(self._work).wait()
            if isinstance(self._result, HostMemory):
                return self._result
        except BaseException:
            if not self._first.acquire(blocking=False):  # too late for the thread to free it
                self._free()
            raise
        assert self._result is not None
        raise self._result

    def _work(self) -> None:
        try:
            self._result = _mapped(self._nbytes)
        except Exception as error:
            self._result = error
        if not self._first.acquire(blocking=False):
            self._free()

    def _free(self) -> None:
        if isinstance(self._result, HostMemory):
            self._result.free()


def _mapped(nbytes: int) -> HostMemory:
    """Map memory and populate it. Raises OSError, and then keeps none."""
    memory = HostMemory(_map_aligned(nbytes), nbytes, os.getpid())
    try:
        _advise(memory.address, nbytes, mmap.MADV_DONTFORK)
        with suppress(OSError):  # core dumps are larger
            _advise(memory.address, nbytes, mmap.MADV_DONTDUMP)
        with suppress(OSError):  # pages are small
            _advise(memory.address, nbytes, mmap.MADV_HUGEPAGE)
        end = memory.address + nbytes
        for first in range(memory.address, end, STEP):
            _populate(first, min(STEP, end - first))
    except BaseException:
        memory.free()
        raise
    return memory


def _populate(address: int, nbytes: int) -> None:
    """Allocate the pages of a range. Raises OSError. Other Python threads run meanwhile."""
    try:
        _advise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        ctypes.memset(address, 0, nbytes)  # a kernel before 5.14


def _map_aligned(nbytes: int) -> int:
    """Map memory at a multiple of `HUGE_PAGE`, and return its address. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    total = nbytes + HUGE_PAGE
    first: int = _libc().mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if first == _MAP_FAILED:
        raise _last_error()
    start = -(-first // HUGE_PAGE) * HUGE_PAGE
    end = start + nbytes
    for unused, size in ((first, start - first), (end, first + total - end)):
        if size:
            _unmap(unused, size)
    return start


def _unmap(address: int, nbytes: int) -> None:
    if _libc().munmap(address, nbytes):
        raise _last_error()


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Call `madvise`. Raises OSError."""
    if _libc().madvise(address, nbytes, advice):
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library. Its functions release Python's global lock while they run."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
