"""Transactions around public calls.

`Transactional` wraps public methods, which gives every call three properties:

- Undo: if a call raises, its changes are undone. If undoing fails, every later call raises
  RuntimeError until `reset`.
- Settings: autocast, default dtype, default device and inference mode of the caller have no effect.
  So a caller may start a sequence in inference mode and continue outside of it.
- Threads: several threads may read at the same time, but no call may run concurrently with a
  change. If two calls conflict, the first one continues, and the second one raises RuntimeError.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from threading import RLock, get_ident
from typing import Any, ClassVar, Self, TypeAlias
from weakref import WeakSet

import torch

from kvindex.core import forks
from kvindex.core.restore import Restorable

READS = frozenset(
    {
        *(
            "encode",
            "search",
            "search_within",
            "search_shard",
            "fetch",
            "attend_all",
            "bytes_per_key",
            "expand_batch",
        ),
        *("state_dict", "__deepcopy__", "candidate_coverage"),
    }
)
"""Calls that may run concurrently with each other.

Counters (`nbytes`, `memory`, `placement`, `len`, and a layer's `tokens` and `traffic`) are not in
this set. Any thread may read them at any time, so they must not fail during a change.
"""

ALONE = frozenset(
    {
        *("attend", "decode_step", "attend_hits", "warm_up", "reserve"),
        *("prepare_replay", "captured_step", "prepare_tokens", "captured_tokens"),
        *("prepare_all", "captured_all"),
        *("batch_row", "begin_decoding", "_hold_updates", "_drop_update"),
    }
)
"""Calls that change nothing visible, but use shared buffers. No other call may run concurrently."""

CHANGES = frozenset(
    {
        *("append", "start_append", "_finish_append", "truncate", "reorder", "reset"),
        "load_state_dict",
        *("end_prompt", "observe_queries", "mark_boundary", "observe_tokens", "step", "settle"),
        *("read_chunk", "expect_prompt", "set_rows", "_update_replayed", "_catch_up"),
    }
)
"""Calls that are undone if they fail."""

DEVICE_TYPES = ("cpu", "cuda")
"""Device types whose autocast is checked."""

_FLOAT32, _default_dtype = torch.float32, torch.get_default_dtype
_autocast, _modes = torch.is_autocast_enabled, torch._C._len_torch_function_stack
_inference = torch.is_inference_mode_enabled


Change: TypeAlias = tuple[int, str, Any]
"""A running change: its number, the name of the method, and the checkpoint before the change."""

_begun = count()
"""Source of numbers for changes. A change has a lower number than the changes nested in it."""


_HOLDER = 0
"""The only key of the dictionary `Access._holder`."""

_SHARED = -1
"""Value of `Access._holder` during reads and after the last read. It is no thread's number."""


class Access:
    """A reader-writer lock of one object that raises an error instead of waiting.

    Several threads may read the object at the same time, or one thread has exclusive access. If two
    calls conflict, the first one continues and the second one raises RuntimeError. `enter` checks
    for conflicts and grants access in one atomic step, by `dict.setdefault` or under a lock. A call
    inside an exclusive call of the same thread never raises, because no other thread can have got
    access since the outer call began.
    """

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}  # _HOLDER -> thread with exclusive access, or _SHARED
        self._depth = 0  # number of nested calls of the thread with exclusive access
        self._readers: dict[int, int] = {}  # reading thread -> number of its nested calls
        self._lock = RLock()  # reentrant, because finalizers and signal handlers may make calls
        self.begun = 0
        """Number of calls so far. Reads nested in other reads do not count."""
        self.change: Change | None = None
        """The outermost running change."""

    def enter(self, name: str, *, alone: bool) -> None:
        """Begin a call, which `leave` ends.

        Args:
            name: Name of the called method, for the error message.
            alone: True if the call needs exclusive access, False if it only reads.

        Raises:
            RuntimeError: A conflicting call of another thread is running. Two reads do not
                conflict.
        """
        me = get_ident()
        holder = self._holder.setdefault(_HOLDER, me) if alone else self._holder.get(_HOLDER)
        if holder == me:
            self._depth += 1
            self.begun += 1
        elif alone or me not in self._readers:
            self._enter_first(me, name, alone)
        else:
            self._readers[me] += 1

    def _enter_first(self, me: int, name: str, alone: bool) -> None:
        """Begin a call, after checking under the lock that it does not conflict with other threads.

        `enter` calls this method in two cases. First, a read begins, and the same thread is not
        inside another call. Second, an exclusive call begins while another thread has exclusive
        access, or after any thread has read the object. Raises RuntimeError if a call of another
        thread conflicts.
        """
        readers = self._readers
        with self._lock:  # no other thread may enter or leave between the check and the change
            holder = self._holder.setdefault(_HOLDER, _SHARED)
            if holder != _SHARED or (alone and len(readers) > (me in readers)):
                raise RuntimeError(_refusal(name, alone))
            if alone:
                self._holder[_HOLDER], self._depth = me, 1
            else:
                readers[me] = 1
            self.begun += 1

    def leave(self, *, alone: bool) -> None:
        """End a call. Do nothing if `enter` raised."""
        me = get_ident()
        if self._holder.get(_HOLDER) == me:
            self._depth -= 1
            if self._depth <= 0:  # below 0 if `enter` was interrupted
                self._depth = 0
                if me in self._readers:
                    self._holder[_HOLDER] = _SHARED
                else:
                    del self._holder[_HOLDER]
        elif not alone:
            left = self._readers.get(me, 0) - 1
            if left > 0:
                self._readers[me] = left
            else:
                self._readers.pop(me, None)

    def forget_threads(self) -> Change | None:
        """In the child process after `os.fork`, end the calls of the parent's other threads.

        Only the thread that called `os.fork` exists in the child, so calls of other threads would
        never end there.

        Returns:
            If such a thread had begun to change the object: the number of the change, the name of
            the method, and the checkpoint with which the caller must undo the change. Otherwise
            None.
        """
        me, holder, change = get_ident(), self._holder.get(_HOLDER), None
        self._lock = RLock()  # another thread may have had it locked
        self._readers = {me: self._readers[me]} if me in self._readers else {}
        if holder != me:
            self._holder = {_HOLDER: _SHARED} if self._readers else {}
            self._depth, change, self.change = 0, self.change, None
        return change


def _refusal(name: str, alone: bool) -> str:
    conflict = f"{name}: got a call while another thread's call is running"
    if alone and name in READS:
        return (
            f"{conflict}; {name} of this object uses shared buffers or stores its results, so it "
            "needs exclusive access: use a lock"
        )
    return (
        f"{conflict}; only reads (search, fetch, encode) may run concurrently, and no call may "
        "run during a change: use a lock"
    )


_objects: WeakSet[Transactional] = WeakSet()
"""All existing `Transactional` objects. After `os.fork`, the child process repairs them."""


class Transactional(Restorable):
    """Base of classes whose public methods are transactions.

    When a subclass is defined, this class replaces its methods that are named in `READS`, `ALONE`
    and `CHANGES` by wrappers. A wrapper controls concurrent calls, and undoes a failed call that
    may have changed the object.
    """

    parts_are_its_own: ClassVar[bool] = False
    """True if the attributes change only in calls of this object, so a checkpoint can be reused."""

    _access: Access
    _broken: str | None
    _last_checkpoint: Any  # the checkpoint after the last change, or None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create the object and its `Access` object, the lock that every public method uses.

        The lock exists before `__init__` runs, so that `__init__` may already call public methods.
        """
        made = super().__new__(cls)
        made._access, made._broken, made._last_checkpoint = Access(), None, None
        _objects.add(made)
        return made

    def __init_subclass__(cls, *, transactional: bool = True, **options: Any) -> None:
        """Wrap the public methods of a subclass in transactions.

        transactional: False for a class whose methods need no transaction.
        """
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = in_plain_torch(cls.__init__)  # type: ignore[method-assign]
        for name in READS | ALONE | CHANGES if transactional else ():
            owner = next((base for base in cls.__mro__ if name in vars(base)), Transactional)
            if owner is cls or not issubclass(owner, Restorable):  # defined here, or in a mixin
                setattr(cls, name, _in_transaction(vars(owner)[name]))

    @property
    def calls_begun(self) -> int:
        """Number of calls of this object's public methods that have begun so far.

        Only such calls change the object. So if the number is the same at two times, no change has
        begun between them.
        """
        return self._access.begun

    def _shallow(self) -> Self:
        twin = super()._shallow()
        twin._access, twin._last_checkpoint = Access(), None
        return twin

    def checkpoint(self) -> Any:
        """Return the current state, to be passed to `rollback`.

        If nothing has changed since the last checkpoint, that checkpoint is returned again.
        """
        if not self.parts_are_its_own:
            return super().checkpoint()
        if self._last_checkpoint is None:
            self._last_checkpoint = super().checkpoint()
        return self._last_checkpoint

    def _after_fork(self) -> None:
        """In the child process after `os.fork`, repair data that a read may have left unfinished.

        A subclass needs this if its reads write to internal data. Only the thread that called
        `os.fork` exists in the child, so a read that another thread had begun never ends there.
        """

    def _undone(self, name: str) -> bool:
        """Return True if the changes of the method `name` are undone when a call of it fails."""
        return name in CHANGES

    def _runs_alone(self, name: str) -> bool:
        """Return True if a call of the method `name` needs exclusive access to the object."""
        return name not in READS or self._undone(name)

    def _check_usable(self, name: str) -> None:
        if name != "reset":
            raise RuntimeError(
                f"{name}: got a {type(self).__name__} whose {self._broken} failed and could not "
                "be undone; call reset() first"
            )

    def _undo(self, name: str, checkpoint: Any) -> None:
        try:
            self.rollback(checkpoint)
        except BaseException:
            self._broken = name
            raise


def _in_transaction(method: Callable[..., Any]) -> Callable[..., Any]:
    name, reads = method.__name__, method.__name__ in READS

    @functools.wraps(method)
    def call(self: Transactional, *args: Any, **options: Any) -> Any:
        access, before, change = self._access, None, None
        alone = not reads or self._runs_alone(name)
        try:
            try:
                access.enter(name, alone=alone)
                if self._broken is not None:
                    self._check_usable(name)
                if self._undone(name):
                    before = self.checkpoint()
                    if access.change is None:
                        access.change = change = next(_begun), name, before
                if _inference() or _unusual():
                    result = _plainly(method, self, *args, **options)
                else:
                    result = method(self, *args, **options)
                if before is not None:
                    self._last_checkpoint = None
            except BaseException:  # also KeyboardInterrupt
                if before is not None:  # undo before `leave`, which lets other threads enter
                    self._undo(name, before)
                    before = None
                raise
            finally:
                if change is not None:
                    access.change = None
                access.leave(alone=alone)
            return result
        except BaseException:  # KeyboardInterrupt between the end of the call and the return
            if before is not None:
                self._undo(name, before)
            raise

    return call


def in_plain_torch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it runs with torch's default settings (`plain_torch`)."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if _inference() or _unusual():
            return _plainly(method, *args, **options)
        return method(*args, **options)

    return call


def _plainly(method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    if _inference():  # tensors made in inference mode cannot be modified outside of it
        with torch.inference_mode(False), torch.no_grad():
            return _plainly(method, *args, **options)
    if not _unusual():
        return method(*args, **options)
    with plain_torch():
        return method(*args, **options)


def _unusual() -> bool:
    """Return True if a setting of torch that affects computations differs from its default."""
    # The torch functions are stored in global variables of this module, because it is slow to look
    # up attributes of `torch` in every call.
    if _default_dtype() is not _FLOAT32 or _autocast("cpu") or _autocast("cuda"):
        return True
    # `torch.set_default_device` adds a torch function mode. It is faster to count the modes than to
    # read the default device, so the device is read only if there is a mode.
    return _modes() > 0 and torch.get_default_device().type != "cpu"


class _Float32:
    """Context manager that sets torch's default dtype to float32.

    The default dtype is a setting of the whole process, and several threads may be in the context
    at the same time. The former dtype is restored when the last thread leaves the context.
    """

    def __init__(self) -> None:
        self._lock, self._before = forks.lock(self, "_lock"), torch.float32
        self._inside: Counter[int] = Counter()  # thread -> number of entries

    def __enter__(self) -> None:
        with self._lock:
            first = not self._inside
            if first:
                self._before = torch.get_default_dtype()
            # Another thread may call `os.fork` right after the default dtype has changed. In the
            # child process, `forget_threads` then restores the dtype, if this thread is counted.
            # So count it before the change.
            self._inside[get_ident()] += 1
            if first:
                torch.set_default_dtype(torch.float32)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._left(get_ident(), 1)

    def forget_threads(self) -> None:
        """Forget the other threads of the parent process. Called in the child after `os.fork`.

        The object counts the threads that are inside its `with` block, because torch's default
        dtype must be float32 until the last of them leaves the block. Other threads of the parent
        do not exist in the child. Without this call, they would stay counted there, and the default
        dtype would stay float32.
        """
        for thread in [*self._inside]:
            if thread != get_ident():
                self._left(thread, self._inside[thread])

    def _left(self, thread: int, times: int) -> None:
        if self._inside.total() == times:
            torch.set_default_dtype(self._before)
        self._inside[thread] -= times
        if not self._inside[thread]:
            del self._inside[thread]


_float32 = _Float32()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Set torch's defaults inside the context: no autocast, dtype float32, device CPU."""
    with ExitStack() as stack:
        stack.enter_context(_float32)
        stack.enter_context(torch.device("cpu"))
        for kind in DEVICE_TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# The lock treats `copy.deepcopy` as a read of the copied object. So a deep copy may run while other
# threads read the object.
Transactional.__deepcopy__ = _in_transaction(Restorable.__deepcopy__)  # type: ignore[method-assign]


def _forget_threads() -> None:
    """In the child process after `os.fork`, end the calls of the parent's other threads.

    Only the thread that called `os.fork` exists in the child. If another thread was changing an
    index, wrapper or layer, this change will never be finished, so it is undone. The newest change
    is undone first, because it may be nested in an older one.
    """
    _float32.forget_threads()
    lost = [(each._access.forget_threads(), each) for each in list(_objects)]
    changes = [(change, each) for change, each in lost if change is not None]
    for _, each in lost:
        with suppress(Exception):  # another thread may not have finished its `__init__`
            each._after_fork()
    for (_, name, before), each in sorted(changes, key=lambda one: one[0][0], reverse=True):
        with suppress(Exception):  # if the undo fails, every later call but `reset` raises
            each._undo(name, before)


os.register_at_fork(after_in_child=_forget_threads)
