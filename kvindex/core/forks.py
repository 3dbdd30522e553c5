"""Locks that are free in the child of a fork.

Only the thread that called `os.fork` exists in the child. A lock that another thread held at that
moment would never be released there.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

_owners: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # owner -> name of its lock attribute


def lock(owner: object, name: str) -> Any:
    """Return a `threading.RLock` for the attribute `name` of an object or a module.

    In the child of a fork the attribute becomes a new lock. The protected state may be half changed
    there, so use this only if every step leaves a usable state, or if the child rebuilds it.
    """
    _owners[owner] = name
    return threading.RLock()


def _renew_locks() -> None:
    for owner, name in list(_owners.items()):
        setattr(owner, name, threading.RLock())


os.register_at_fork(after_in_child=_renew_locks)
