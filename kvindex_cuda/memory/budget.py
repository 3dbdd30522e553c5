"""Limits on the memory that all stores of a process may allocate together, mainly for pinned
memory."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from kvindex.core import check, forks

FRACTION = 0.9
"""Fraction of the memory that all stores together may pin. The memory is what the machine has
available when the first store is made."""


class OverBudgetError(MemoryError):
    """A budget has too few bytes left."""


class Budget:
    """Limits the bytes that several pools of memory take together. A limit of None means no limit.
    Thread-safe."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = None if limit_bytes is None else check.at_least("limit", limit_bytes, 0)
        self._used = 0
        self._lock = forks.lock(self, "_lock")  # reentrant: a garbage-collected pool calls `give`

    @property
    def used_bytes(self) -> int:
        """Number of bytes that are currently taken from the budget."""
        return self._used

    @property
    def room_bytes(self) -> int | None:
        """Number of bytes that are left, or None without a limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self._used)

    def try_take(self, nbytes: int) -> bool:
        """Take `nbytes` bytes from the budget and return True, or return False if fewer bytes are
        left."""
        with self._lock:
            fits = self.limit_bytes is None or self._used + nbytes <= self.limit_bytes
            self._used += nbytes if fits else 0
            return fits

    def take(self, nbytes: int) -> None:
        """Take `nbytes` bytes from the budget. If fewer are left, raises OverBudgetError and
        takes nothing."""
        if not self.try_take(nbytes):
            raise OverBudgetError(
                f"host store: needs {nbytes} more bytes, but {self._used} are in use, and the "
                f"limit is {self.limit_bytes}"
            )

    def give(self, nbytes: int) -> None:
        """Give `nbytes` bytes back to the budget."""
        with self._lock:
            self._used -= nbytes


@lru_cache(maxsize=1)
def shared_budget() -> Budget:
    """Return the budget that all stores of the process share.

    Its limit is 90% of the host memory that was available at the first call of this function. There
    is no limit if the available memory is unknown.
    """
    available = available_bytes()
    return Budget(None if available is None else int(FRACTION * available))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the available bytes of host memory, or None if unknown."""
    try:
        lines = dict(
            line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def bytes_left_in_groups(
    group: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Return how many bytes each control group (cgroup) of this process may still allocate, for
    groups with a limit. A container is such a group.

    File pages that were not used recently count as free, because Linux reclaims them.

    Args:
        group: File with the control groups of this process.
        groups: Folder where the control groups are mounted.
    """
    try:
        lines = group.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, inside = line.split(":", 2)
        if kinds == "":
            root, limit, used = groups, "memory.max", "memory.current"
            unused = "inactive_file"
        elif kinds == "memory":  # version 1 of control groups
            root, limit, used = groups / kinds, "memory.limit_in_bytes", "memory.usage_in_bytes"
            unused = "total_inactive_file"
        else:
            continue
        own = root / inside.strip("/")
        for place in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):  # no such group, or no limit
                most, taken = (int((place / name).read_text("utf-8")) for name in (limit, used))
                stat = (place / "memory.stat").read_text("utf-8").splitlines()
                counts = dict(entry.split(" ", 1) for entry in stat)
                found.append(max(0, most - taken + int(counts[unused])))
            if place == root:
                break
    return found
