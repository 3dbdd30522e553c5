"""Pass errors and counts from vLLM's worker processes to the process that started the engine.

vLLM starts an engine core and workers as processes of their own. If one of them fails, the first
process only learns that it ended. So workers write to a folder that the first process creates, and
whose path they inherit in an environment variable. Workers on other hosts cannot write to it. Their
errors are in their logs alone.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = "KVINDEX_VLLM_FOLDER"
"""Environment variable with the path of the folder."""

PREFIX = "kvindex: "

_owner: int | None = None
"""Number of the process that created the folder, in that process."""


def joined(reasons: Iterable[str]) -> str:
    """Return the message of an error with one reason or several."""
    lines = list(dict.fromkeys(reasons))
    if len(lines) == 1:
        return PREFIX + lines[0]
    return "\n- ".join([f"{PREFIX}{len(lines)} settings are not supported:", *lines])


def split(message: str) -> list[str]:
    """Return the reasons in a message that `joined` made."""
    first, *others = message.split("\n- ")
    return others or [first.removeprefix(PREFIX)]


def folder() -> Path | None:
    """Return the folder for reports, or None if no process has created it."""
    path = os.environ.get(FOLDER)
    return Path(path) if path and os.path.isdir(path) else None


def open_folder() -> Path:
    """Create the folder for reports of this program's processes, if it is missing.

    It is removed when this process ends. Processes that vLLM starts inherit the folder. A program
    that is started by another program with an engine creates a folder of its own.
    """
    global _owner
    found = folder()
    first = multiprocessing.parent_process() is None  # vLLM starts others with multiprocessing
    if found is None or (first and _owner != os.getpid()):
        found = Path(tempfile.mkdtemp(prefix="kvindex-vllm-"))
        os.environ[FOLDER] = str(found)
        _owner = os.getpid()
        atexit.register(_close_folder, found, _owner)
    return found


def _close_folder(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # forked processes inherit this call
        shutil.rmtree(path, ignore_errors=True)


def add(reasons: Iterable[str]) -> None:
    """Write reasons for an error to the folder, unless this is the process that created it."""
    found, reasons = folder(), list(reasons)
    if found is not None and reasons and _owner != os.getpid():
        path = found / f"reasons-{os.getpid()}.json"
        path.write_text(json.dumps(reasons), encoding="utf-8")


def take() -> list[str]:
    """Return the reasons that processes have written, each once, and remove them."""
    found, reasons = folder(), []
    for path in sorted(found.glob("reasons-*.json")) if found else []:
        reasons += json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    return list(dict.fromkeys(reasons))


def restating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of vLLM that waits for other processes, unless it is wrapped already.

    If it raises an error after one of these processes has reported reasons, the wrapper raises
    ValueError with these reasons. So they are the last line that the user sees.
    """
    if function.__module__ == __name__:
        return function

    @wraps(function)
    def restated(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            reasons = take()
            add(reasons)  # for the process that started this one
            if not reasons or str(error) == joined(reasons):
                raise
            raise ValueError(joined(reasons)) from error

    restated.__module__ = __name__
    return restated
