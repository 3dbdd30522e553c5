"""Make a call fail at a chosen point: out of memory at an operation, or interrupted at a line.

A call that raises must leave its object unchanged. A test of this has three steps:

1. Count the operations (`operations_of`) or lines (`lines_of`) of the call.
2. For each of them, make the call fail at this point (`fail_at`, `interrupt_at`) on a new object.
3. Compare the object with one that never received the call.
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
"""Folder of `kvindex`. By default only lines of Python files in this folder are interrupted."""

Call = Callable[[], object]


def operations_of(call: Call) -> int:
    """Run a call, and count its torch operations that can allocate memory.

    An operation can allocate memory if it does not return a view.

    Args:
        call: Function without arguments.
    """
    memory = _Memory(None)
    with memory:
        call()
    return memory.count


def fail_at(call: Call, operation: int) -> bool:
    """Run a call, and make one of its torch operations run out of memory.

    Args:
        call: Function without arguments.
        operation: Which of the operations counted by `operations_of` raises
            `torch.OutOfMemoryError`, from 0 on.

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
    """Count the lines of a package's Python code that a call executes.

    Args:
        call: Function without arguments.
        package: Folder of the package.
    """
    return _traced(call, None, package)


def interrupt_at(call: Call, line: int, package: Path = PACKAGE) -> bool:
    """Run a call, and raise KeyboardInterrupt before one of the lines that it executes.

    Args:
        call: Function without arguments.
        line: Which of the lines counted by `lines_of` is interrupted, from 0 on.
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
    """Counts torch operations, and makes one of them run out of memory."""

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
    """Return True if the frame or one of its callers is `__del__`, whose errors Python ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _releases(frame: FrameType) -> bool:
    """Return True if the frame's next instruction leaves a `with` block.

    A real interrupt cannot occur there, because Python handles no signals between the end of the
    block and the call of `__exit__`.
    """
    code, at = frame.f_code, frame.f_lasti
    # At the line of a `with` statement, the bytecode that leaves the block begins with one of these
    # instructions. The bytecode that enters the block begins by loading a name.
    if dis.opname[code.co_code[at]] not in ("LOAD_CONST", "SWAP"):
        return False
    return linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def _traced(call: Call, at: int | None, package: Path) -> int:
    """Count the lines of a package that a call executes, and interrupt it before line `at`."""
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
