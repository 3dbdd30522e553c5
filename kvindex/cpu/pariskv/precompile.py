"""Compile the kernels before the first search, on another thread.

A thread runs one step of a small index with the same configuration. A search that starts before the
thread has finished waits for the compiler, and the process does not end before the thread. A fork
waits for this thread and for every other thread that compiles, because the child process would
otherwise inherit the compiler's lock in its locked state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

import torch

from kvindex.core.resident import ResidentRows
from kvindex.cpu.kernels.compile import global_compiler_lock
from kvindex.pariskv.config import ParisKVConfig
from kvindex.pariskv.index import ParisKV

_threads: dict[tuple[str, str], Thread] = {}
_lock = Lock()


def begin(config: ParisKVConfig) -> None:
    """Start compiling the kernels of a configuration, unless this was started before."""
    kernels = config.coarse, config.sampling  # these options determine the kernels
    with _lock:
        if kernels not in _threads:
            work = _quietly(lambda: take_step(config))
            thread = Thread(target=work, name="kvindex-compiler")
            with suppress(RuntimeError):  # a process that is ending cannot start a thread
                thread.start()
                _threads[kernels] = thread


def wait() -> None:
    """Wait until all compilations that were started have ended."""
    for thread in list(_threads.values()):
        thread.join()


def take_step(config: ParisKVConfig) -> None:
    """Append to a small index, search and attend, so that all kernels are compiled."""
    index = ParisKV(q_heads=1, kv_heads=1, head_dim=8, backend="cpu", **vars(config))
    rows = torch.ones(1, 1, 300, 8, dtype=torch.float32, device="cpu")
    index.append(rows, rows)
    index.search(rows[:, :, 0], k=1)
    if index.attends:
        index.attend(rows[:, :, 0], ResidentRows(index.geometry, 1, 1), k=1)


def _quietly(work: Callable[[], None]) -> Callable[[], None]:
    """Return the work with its errors suppressed; a search will raise them again."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    return attempt


def _hold() -> None:
    """Run before a fork: wait until no thread compiles, and prevent new ones from starting."""
    while True:
        wait()
        _lock.acquire()
        if not any(thread.is_alive() for thread in _threads.values()):
            break
        _lock.release()  # a thread that has just started needs the lock to finish
    global_compiler_lock.acquire()


def _release() -> None:
    """Run after a fork, in both processes: release the locks, of which each process has a copy."""
    global_compiler_lock.release()
    _lock.release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
