"""Run a kernel on several threads, each of which does a part of the work.

The pool has as many threads as torch uses. Numba's `parallel=True` is not used, because it
terminates the process in two cases: in a forked child, and (with the threading layer `workqueue`)
if two threads run parallel code at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias

import torch

Part: TypeAlias = Callable[[int, int], None]

_work: SimpleQueue[tuple[Part, int, int, SimpleQueue[BaseException | None]]] = SimpleQueue()
_threads: list[Thread] = []
_lock = Lock()


def parts_of(most: int) -> int:
    """Return how many threads `run` uses: as many as torch does, but at most `most`."""
    return max(1, min(torch.get_num_threads(), most))


def run(part: Part, most: int) -> None:
    """Call `part(i, parts)` in parallel for `i` from 0 to `parts - 1`, and wait for all calls.

    `parts` is the number of threads: as many as torch uses, but at most `most`. If a call raises an
    error, this function raises it again.
    """
    parts = parts_of(most)
    if parts == 1:
        part(0, 1)
        return
    with _lock:  # without it, two callers could start the same thread
        while len(_threads) < parts - 1:
            thread = Thread(target=_serve, args=(_work,), name="kvindex-cpu", daemon=True)
            thread.start()
            _threads.append(thread)
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for i in range(1, parts):
        _work.put((part, i, parts, done))
    try:
        part(0, parts)
    finally:
        errors = [done.get() for _ in range(1, parts)]
    for error in errors:
        if error is not None:
            raise error


def _serve(work: SimpleQueue[tuple[Part, int, int, SimpleQueue[BaseException | None]]]) -> None:
    while True:
        part, i, parts, done = work.get()
        failure: BaseException | None = None
        try:
            part(i, parts)
        except BaseException as error:
            failure = error
        del part  # before the caller continues, so that this thread keeps no arrays alive
        done.put(failure)
        del failure, done


def _forget() -> None:
    """Empty the pool in the child process after `os.fork`. Its threads exist only in the parent."""
    global _work, _lock
    _work, _lock = SimpleQueue(), Lock()  # another thread of the parent may hold the lock
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
