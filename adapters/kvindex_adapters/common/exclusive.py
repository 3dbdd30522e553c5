"""`Exclusive`: admits one thread at a time; the call of a second thread raises an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident


class Exclusive:
    """Admits one thread at a time, which may enter again while it is inside.

    Args:
        name: The argument or object that the error message names first.
        target: Phrase for the error message that names the object the other thread uses.
    """

    def __init__(self, name: str, target: str) -> None:
        self._name, self._target = name, target
        self._lock = threading.RLock()
        self._inside: int | None = None  # identifier of the thread that is inside

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the current thread in while the context is open.

        Raises:
            RuntimeError: Another thread is inside. It is raised immediately, without waiting.
        """
        if not self._lock.acquire(blocking=False):
            raise self._error()
        before, self._inside = self._inside, get_ident()
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()

    @property
    def used_by_other_thread(self) -> bool:
        """True if a thread other than the caller's is inside."""
        inside = self._inside
        return inside is not None and inside != get_ident()

    def check(self) -> None:
        """Check that no other thread is inside.

        Raises:
            RuntimeError: Another thread is inside.
        """
        if self.used_by_other_thread:
            raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: got a call while another thread is in a call of {self._target}; "
            "allowed is one thread at a time"
        )
