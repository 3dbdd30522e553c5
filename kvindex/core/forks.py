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
    """Return a `threading.RLock`, which the caller stores in the attribute `name` of `owner`.

    In the child process after `os.fork`, this attribute is set to a new lock. A thread of the
    parent may have been changing the data that the lock protects, so the change can be incomplete
    in the child. Use this function only if incomplete data does no harm, or if the child rebuilds
    the data.

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
