"""Locks that are free in the child process after `os.fork`.

Only the thread that called `os.fork` exists in the child. A normal lock that another thread held at
the fork would never be released in the child.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

_owners: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # owner -> name of its lock attribute


def lock(owner: object, name: str) -> Any:
    """Return a `threading.RLock`, to be stored in the attribute `name` of `owner`.

    In the child of a fork, this attribute is set to a new lock. The data that the lock protects may
    be half changed there, so use this only if the data is usable after each step of a change, or if
    the child rebuilds the data.

    Args:
        owner: An object or a module.
        name: Name of the attribute.
    """
    _owners[owner] = name
    return threading.RLock()


def _renew_locks() -> None:
    for owner, name in list(_owners.items()):
        setattr(owner, name, threading.RLock())


os.register_at_fork(after_in_child=_renew_locks)
