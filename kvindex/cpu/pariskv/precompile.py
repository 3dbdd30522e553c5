"""Compile the kernels on a background thread, before the first search.

The thread appends to a small index with the same options, searches it and computes attention. A
search that starts before the thread has finished waits for the compiler, and the process does not
exit before the thread has finished. `os.fork` waits until no thread compiles, because the child
process would otherwise inherit a locked compiler lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

import torch

from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu.kernels.compile import global_compiler_lock
from kvindex.pariskv.config import ParisKVConfig
from kvindex.pariskv.index import ParisKV

_threads: dict[tuple[str, str], Thread] = {}
_lock = Lock()


def begin(config: ParisKVConfig) -> None:
    """Start to compile the kernels that an index with these options needs, in the background.

    Do nothing if an earlier call has started to compile the same kernels.
    """
    kernels = config.coarse, config.sampling  # these options determine the kernels
    with _lock:
        if kernels not in _threads:
            work = _quietly(lambda: take_step(config))
            thread = Thread(target=work, name="kvindex-compiler")
            with suppress(RuntimeError):  # a process that is ending cannot start a thread
                thread.start()
                _threads[kernels] = thread


def wait() -> None:
    """Wait until all background threads that compile kernels have finished."""
    for thread in list(_threads.values()):
        thread.join()


def take_step(config: ParisKVConfig) -> None:
    """Append to a small index, search it and attend, so that Numba compiles all kernels."""
    index = ParisKV(q_heads=1, kv_heads=1, head_dim=8, backend="cpu", **vars(config))
    rows = torch.ones(1, 1, 300, 8, dtype=torch.float32, device="cpu")
    index.append(rows, rows)
    index.search(rows[:, :, 0], k=1)
    if index.attends:
        token = Rows(rows[:, :, :1], rows[:, :, :1])
        window = Rows(*(torch.empty_like(part) for part in (token.keys, token.values)))
        resident = ResidentRows(index.geometry, 1, 1)
        index.decode_step(rows[:, :, 0], token, resident, window, k=1)


def _quietly(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap a function so that it suppresses its errors. A later search raises them again."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    return attempt


def _hold() -> None:
    """Before a fork, wait until no thread compiles, and prevent new threads from compiling."""
    while True:
        wait()
        _lock.acquire()
        if not any(thread.is_alive() for thread in _threads.values()):
            break
        _lock.release()  # a thread that has just started needs the lock to finish
    global_compiler_lock.acquire()


def _release() -> None:
    """After a fork, release the locks that `_hold` acquired. Parent and child both call this."""
    global_compiler_lock.release()
    _lock.release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
