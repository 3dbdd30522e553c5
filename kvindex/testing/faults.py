"""Make a call fail at a chosen point: out of memory at any operation, or interrupted at any line.

A call that raises must leave an object unchanged. To test this, count the operations
(`operations_of`) or lines (`lines_of`) of a call, let each of them fail in turn on a new object,
and compare the object with one on which the call was never made.
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
"""Folder of the package in whose lines an interrupt occurs by default."""

Call = Callable[[], object]


def operations_of(call: Call) -> int:
    """Count the torch operations of a call that may allocate memory: all except views.

    Args:
        call: Function without arguments.
    """
    memory = _Memory(None)
    with memory:
        call()
    return memory.count


def fail_at(call: Call, operation: int) -> bool:
    """Run a call in which one operation runs out of memory.

    Args:
        call: Function without arguments.
        operation: Number of the operation that raises `torch.OutOfMemoryError`, from 0 on.

    Returns:
        True if the call reached the operation and raised an error, False if it ended before.
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
    """Count the lines of a package that a call runs.

    Args:
        call: Function without arguments.
        package: Folder of the package.
    """
    return _traced(call, None, package)


def interrupt_at(call: Call, line: int, package: Path = PACKAGE) -> bool:
    """Run a call with a KeyboardInterrupt before one line.

    Args:
        call: Function without arguments.
        line: Number of the line that is interrupted, from 0 on.
        package: Folder of the package whose lines are counted.

    Returns:
        True if the call reached the line and raised the interrupt, False if it ended before.
    """
    try:
        _traced(call, line, package)
    except KeyboardInterrupt:
        return True
    return False


Mode: Any = TorchDispatchMode  # untyped in torch


class _Memory(Mode):  # type: ignore[misc]  # untyped
    """Counts torch operations, and lets one of them run out of memory."""

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
    """Return True if a frame runs in a `__del__`, whose errors Python ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _releases(frame: FrameType) -> bool:
    """Return True if the frame is about to leave a `with` block.

    Python handles no signal before `__exit__`, so an interrupt cannot occur there.
    """
    code, at = frame.f_code, frame.f_lasti
    if dis.opname[code.co_code[at]] not in ("LOAD_CONST", "SWAP"):  # entering loads a name first
        return False
    return linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def _traced(call: Call, at: int | None, package: Path) -> int:
    """Count the lines of a package that a call runs, and interrupt the call before line `at`."""
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
