"""Faults, one at a time: memory that runs out at any operation, an interrupt at any line.

A call that raises must leave things as they were. To hold a call to that, count its operations
(`operations_of`) or lines (`lines_of`), let each of them fail in turn on a fresh object, and
compare what is left with an object that never saw the call.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = Path(__file__).parents[1]
"""Whose lines are interrupted unless others are named."""

Call = Callable[[], object]


def operations_of(call: Call) -> int:
    """Operations of torch in a call that may take memory: all but views."""
    memory = _Memory(None)
    with memory:
        call()
    return memory.count


def fail_at(call: Call, operation: int) -> bool:
    """Run a call in which operation number `operation`, from 0 on, runs out of memory.

    Returns whether it came that far and raised `torch.OutOfMemoryError`, or what was made of it.
    """
    memory = _Memory(operation)
    try:
        with memory:
            call()
    except Exception:
        if memory.count <= operation:
            raise
        return True
    return False


def lines_of(call: Call, package: Path = PACKAGE) -> int:
    """Lines of a package that a call runs, each as often as it does."""
    return _traced(call, None, package)


def interrupt_at(call: Call, line: int, package: Path = PACKAGE) -> bool:
    """Run a call with a KeyboardInterrupt before line number `line`, from 0 on, of a package.

    Returns whether it came that far and raised it.
    """
    try:
        _traced(call, line, package)
    except KeyboardInterrupt:
        return True
    return False


Mode: Any = TorchDispatchMode  # torch leaves it untyped


class _Memory(Mode):  # type: ignore[misc]  # for that reason
    """Counts operations, and lets one of them run out of memory."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:
            self.count += 1
            if self.at == self.count - 1:
                raise torch.OutOfMemoryError(f"no memory left for {function}")
        return function(*args, **(kwargs or {}))


def _finalizes(frame: FrameType | None) -> bool:
    """Whether a frame is of a `__del__`, or called by one: what it raises Python ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _releases(frame: FrameType) -> bool:
    """Whether what comes next leaves a `with` block: Python lets no signal in before `__exit__`."""
    code, at = frame.f_code, frame.f_lasti
    if dis.opname[code.co_code[at]] not in ("LOAD_CONST", "SWAP"):  # entering begins with a name
        return False
    return linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def _traced(call: Call, at: int | None, package: Path) -> int:
    """Lines that a call ran; interrupted before line number `at`."""
    inside, count, before = f"{package}/", 0, sys.gettrace()

    def follow(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        mine = frame.f_code.co_filename.startswith(inside)
        if event == "call" and (not mine or _finalizes(frame)):
            return None
        if event == "line" and not _releases(frame):
            count += 1
            if at == count - 1:
                sys.settrace(before)
                raise KeyboardInterrupt
        return follow

    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
