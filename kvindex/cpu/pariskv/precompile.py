"""Compile the kernels ahead of the first search, beside whatever the process does first.

A thread takes a small index of the same configuration through a step; who searches earlier waits
for the compiler. The process does not end before the thread. A fork waits for it, and for any
other thread that compiles, because the child would inherit the compiler's lock.
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
    """Have the kernels of a configuration compiled, if nobody has begun it."""
    kernels = config.coarse, config.sampling  # which decide what kernels there are
    with _lock:
        if kernels not in _threads:
            work = _quietly(lambda: take_step(config))
            thread = Thread(target=work, name="kvindex-compiler")
            with suppress(RuntimeError):  # a process that is ending begins none: a search compiles
                thread.start()
                _threads[kernels] = thread


def wait() -> None:
    """Return once all kernels that were begun are compiled."""
    for thread in list(_threads.values()):
        thread.join()


def take_step(config: ParisKVConfig) -> None:
    """Append, search and attend with a small index: kernels are compiled when they run first."""
    index = ParisKV(q_heads=1, kv_heads=1, head_dim=8, backend="cpu", **vars(config))
    rows = torch.ones(1, 1, 300, 8, dtype=torch.float32, device="cpu")
    index.append(rows, rows)
    index.search(rows[:, :, 0], k=1)
    if index.attends:
        index.attend(rows[:, :, 0], ResidentRows(index.geometry, 1, 1), k=1)


def _quietly(work: Callable[[], None]) -> Callable[[], None]:
    """The work without its errors: a search meets them again."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    return attempt


def _hold() -> None:
    """Before a fork: wait until no thread compiles, and let none begin."""
    while True:
        wait()
        _lock.acquire()
        if not any(thread.is_alive() for thread in _threads.values()):
            break
        _lock.release()  # a thread that began meanwhile needs it to end
    global_compiler_lock.acquire()


def _release() -> None:
    """After a fork, in both processes, each of which has its own copy of the locks."""
    global_compiler_lock.release()
    _lock.release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
