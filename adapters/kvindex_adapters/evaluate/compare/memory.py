"""Measure the peak memory of this process, in host memory and on the GPU."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch


def forget_peak() -> None:
    """Reset the peak memory of this process, so that `peak` measures from now on.

    If the operating system does not support this, `peak` returns the peak of host memory since the
    start of the process.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> dict[str, int]:
    """Return the peak memory in bytes since the call of `forget_peak`.

    The result has the key "host" and, if there is a GPU, the key "device".
    """
    found = {"host": _host()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.max_memory_allocated()
    return found


def _host() -> int:
    status = Path("/proc/self/status")
    known = (
        re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        if status.exists()
        else None
    )
    if known:
        return 1024 * int(known[1])
    import resource  # does not exist on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
