"""Guarded calls: all or nothing, the same arithmetic for every caller, threads told apart.

All or nothing: a call that raises, wherever it does, leaves the object as it was, or says of every
later call that `reset` must come first. Same arithmetic: autocast, the default dtype and the
default device of the caller change nothing, nor does inference mode, so that what was begun in it
goes on outside. Threads: several may read at the same time, and nothing else may run at the same
time as a change. Of two calls that conflict the first goes on, and the second raises RuntimeError.
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
        *("encode", "search", "search_share", "fetch", "bytes_per_key", "expand_batch"),
        *("state_dict", "__deepcopy__", "candidate_share"),
    }
)
"""Calls that may run concurrently with each other.

Counters (`nbytes`, `memory`, `placement`, `len`, and a layer's `tokens` and `traffic`) are not in
this set. Any thread may read them at any time, so they must not fail during a change.
"""

ALONE = frozenset(
    {
        *("attend", "decode_step", "attend_hits", "warm_up", "reserve"),
        *("prepare_replay", "captured_step", "batch_row", "begin_decoding"),
    }
)
"""Calls that use buffers, but change nothing that can be seen."""

CHANGES = frozenset(
    {
        *("append", "start_append", "_finish_append", "truncate", "reorder", "reset"),
        "load_state_dict",
        *("end_prompt", "observe_queries", "mark_boundary", "observe_tokens", "step", "settle"),
        *("read_piece", "_update_replayed"),
    }
)
"""Calls that are undone where they fail."""

DEVICE_TYPES = ("cpu", "cuda")
"""Whose autocast is looked for."""

_FLOAT32, _default_dtype = torch.float32, torch.get_default_dtype
_autocast, _modes = torch.is_autocast_enabled, torch._C._len_torch_function_stack
_inference = torch.is_inference_mode_enabled


Change: TypeAlias = tuple[int, str, Any]
"""A change that is under way: its number, the call's name, the checkpoint before it."""

_begun = count()
"""Numbers of changes: of two, the one that contains the other began first."""


_HOLDER = 0
"""The one key of a dictionary of holders."""

_SHARED = -1
"""The holder while threads read, and after it; no thread has this number."""


class Access:
    """Which threads are inside: any number that read, or one that is alone.

    Of two calls that conflict the one that came first goes on, and the other raises. Looking and
    entering are one step: `dict.setdefault`, or a lock among threads that read. So a call that is
    refused was never inside and disturbs nobody, and what a thread calls inside its own call is
    never refused, because nobody else can have come in.
    """

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}  # _HOLDER -> the thread that is alone, or _SHARED
        self._depth = 0  # calls of the thread that is alone
        self._readers: dict[int, int] = {}  # thread -> calls
        self._lock = RLock()  # a finalizer or a signal's handler may come again in its thread
        self.begun = 0
        """Calls that have begun, but for reads inside reads."""
        self.change: Change | None = None
        """The outermost change that is under way."""

    def enter(self, name: str, *, alone: bool) -> None:
        """Begin a call, which `leave` ends.

        Raises RuntimeError, and begins nothing, while another thread's call is under way, unless
        both only read.
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
        """Begin a thread's first read, or a call that is alone after reads."""
        readers = self._readers
        with self._lock:  # without which threads may leave meanwhile
            holder = self._holder.setdefault(_HOLDER, _SHARED)
            if holder != _SHARED or (alone and len(readers) > (me in readers)):
                raise RuntimeError(_refusal(name, alone))
            if alone:
                self._holder[_HOLDER], self._depth = me, 1
            else:
                readers[me] = 1
            self.begun += 1

    def leave(self, *, alone: bool) -> None:
        """End a call. For one that was refused it does nothing."""
        me = get_ident()
        if self._holder.get(_HOLDER) == me:
            self._depth -= 1
            if self._depth <= 0:  # below 0 where `enter` was interrupted
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
        """In the child of a fork: only calls of this thread are under way.

        Returns the change that another thread of the parent was in, which is to be undone.
        """
        me, holder, change = get_ident(), self._holder.get(_HOLDER), None
        self._lock = RLock()  # another thread may have held it
        self._readers = {me: self._readers[me]} if me in self._readers else {}
        if holder != me:
            self._holder = {_HOLDER: _SHARED} if self._readers else {}
            self._depth, change, self.change = 0, self.change, None
        return change


def _refusal(name: str, alone: bool) -> str:
    """Return the error for a call during another thread's call."""
    said = f"{name}: got a call while another thread's is under way, allowed are reads beside reads"
    if alone and name in READS:
        return (
            f"{said}, but {name} of this object is none (it shares buffers or keeps what it "
            "found): use a lock"
        )
    return f"{said} (search, fetch, encode) and nothing beside a change: use a lock"


_objects: WeakSet[Guarded] = WeakSet()
"""All that there are, for the child of a fork."""


class Guarded(Restorable):
    """Base of what has public calls: methods of the names above are guarded in every subclass."""

    parts_are_its_own: ClassVar[bool] = False
    """Whether only its own calls change its parts: a checkpoint then holds until one does."""

    _access: Access
    _broken: str | None
    _last_checkpoint: Any  # the checkpoint since the last change

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """An object that nobody has called yet."""
        made = super().__new__(cls)
        made._access, made._broken, made._last_checkpoint = Access(), None, None
        _objects.add(made)
        return made

    def __init_subclass__(cls, *, guarded: bool = True, **options: Any) -> None:
        """guarded: False for a class whose public methods do nothing."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = in_plain_torch(cls.__init__)  # type: ignore[method-assign]
        for name in READS | ALONE | CHANGES if guarded else ():
            owner = next((base for base in cls.__mro__ if name in vars(base)), Guarded)
            if owner is cls or not issubclass(owner, Restorable):  # its own, or of a mixin
                setattr(cls, name, _guarded(vars(owner)[name]))

    @property
    def calls_begun(self) -> int:
        """Guarded calls so far: while it stays the same, none has changed anything."""
        return self._access.begun

    def _shallow(self) -> Self:
        twin = super()._shallow()
        twin._access, twin._last_checkpoint = Access(), None
        return twin

    def checkpoint(self) -> Any:
        """What this object is now, for `rollback`."""
        if not self.parts_are_its_own:
            return super().checkpoint()
        if self._last_checkpoint is None:
            self._last_checkpoint = super().checkpoint()
        return self._last_checkpoint

    def _after_fork(self) -> None:
        """In the child of a fork: forget what a read of another thread may have left half done."""

    def _undone(self, name: str) -> bool:
        """Whether a call is undone where it fails."""
        return name in CHANGES

    def _alone(self, name: str) -> bool:
        """Whether no other call may be under way beside one of this name."""
        return name not in READS or self._undone(name)

    def _check_usable(self, name: str) -> None:
        if name != "reset":
            raise RuntimeError(
                f"{name}: got a {type(self).__name__} of which {self._broken} failed and could not "
                "be undone, allowed is reset()"
            )

    def _undo(self, name: str, checkpoint: Any) -> None:
        try:
            self.rollback(checkpoint)
        except BaseException:
            self._broken = name
            raise


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    name, reads = method.__name__, method.__name__ in READS

    @functools.wraps(method)
    def call(self: Guarded, *args: Any, **options: Any) -> Any:
        access, before, change = self._access, None, None
        alone = not reads or self._alone(name)
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
            except BaseException:  # an interrupt, too
                if before is not None:  # before another thread may look
                    self._undo(name, before)
                    before = None
                raise
            finally:
                if change is not None:
                    access.change = None
                access.leave(alone=alone)
            return result
        except BaseException:  # an interrupt that comes after all is done
            if before is not None:
                self._undo(name, before)
            raise

    return call


def in_plain_torch(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, computed as by default whatever the caller has set (`plain_torch`)."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if _inference() or _unusual():
            return _plainly(method, *args, **options)
        return method(*args, **options)

    return call


def _plainly(method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """What the method returns in plain torch."""
    if _inference():  # nobody could write outside of it to tensors that were made in it
        with torch.inference_mode(False), torch.no_grad():
            return _plainly(method, *args, **options)
    if not _unusual():
        return method(*args, **options)
    with plain_torch():
        return method(*args, **options)


def _unusual() -> bool:
    """Whether torch computes or allocates other than by default."""
    # torch's own functions by their names here: this runs around every call
    if _default_dtype() is not _FLOAT32 or _autocast("cpu") or _autocast("cuda"):
        return True
    # a default device is a function mode; asking for it takes longer than all of this
    return _modes() > 0 and torch.get_default_device().type != "cpu"


class _Float32:
    """float32 as the default dtype while a thread is inside: it is the whole process's."""

    def __init__(self) -> None:
        self._lock, self._before = forks.lock(self, "_lock"), torch.float32
        self._inside: Counter[int] = Counter()  # thread -> how often

    def __enter__(self) -> None:
        with self._lock:
            first = not self._inside
            if first:
                self._before = torch.get_default_dtype()
            self._inside[get_ident()] += 1  # before the change, which a forked child undoes
            if first:
                torch.set_default_dtype(torch.float32)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._left(get_ident(), 1)

    def forget_threads(self) -> None:
        """In the child of a fork: other threads of the parent are not inside."""
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
    """torch as it is by default: no autocast, float32, the CPU where no device is named."""
    with ExitStack() as stack:
        stack.enter_context(_float32)
        stack.enter_context(torch.device("cpu"))
        for kind in DEVICE_TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# a copy is a read
Guarded.__deepcopy__ = _guarded(Restorable.__deepcopy__)  # type: ignore[method-assign]


def _forget_threads() -> None:
    """In the child of a fork: end the calls of threads that only the parent has.

    Their changes are undone, the last one first, because one may be a part of another.
    """
    _float32.forget_threads()
    lost = [(each._access.forget_threads(), each) for each in list(_objects)]
    changes = [(change, each) for change, each in lost if change is not None]
    for _, each in lost:
        with suppress(Exception):  # one that another thread was making is nobody's
            each._after_fork()
    for (_, name, before), each in sorted(changes, key=lambda one: one[0][0], reverse=True):
        with suppress(Exception):  # then every call but `reset` says so
            each._undo(name, before)


os.register_at_fork(after_in_child=_forget_threads)
