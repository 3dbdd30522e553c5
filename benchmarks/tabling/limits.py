"""What limits each kernel on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.limits import STALLS
from benchmarks.tabling.parts import machine, table


def said(one: dict[str, Any]) -> str:
    """What limits a launch; where it waits, for what two things most."""
    if not one["limit"].startswith("latency"):
        return str(one["limit"])
    stalls = sorted(STALLS, key=lambda name: -one[name])
    whole = sum(one[name] for name in STALLS)
    parts = (f"{name.replace('_', ' ')} {one[name] / whole:.0%}" for name in stalls[:2])
    return "latency: " + ", ".join(parts)


def limits(result: dict[str, Any]) -> str:
    """A row for each launch, by the work that it is of."""
    rows = []
    for work, launches in result["works"].items():
        for one in launches:
            moved = f"{(one['read_bytes'] + one['written_bytes']) / 1e6:,.1f}"
            shares = (f"{one[name]:.0f}%" for name in ("memory", "issue", "shared"))
            line = f"`{work}`", f"`{one['kernel']}`", f"{one['us']:,.1f}", moved
            rows.append((*line, *shares, f"{one['warps']:.1f}", said(one)))
    head = (
        "of",
        "launch",
        "µs",
        "MB of memory",
        "memory",
        "issue",
        "shared memory's pipe",
        "warps",
    )
    about = (
        f"Counters of `ncu`, each launch alone, its caches cold: a step over {result['tokens']:,} "
        f"tokens, {result['keys']:,} keys appended. Percent of what there is; warps of a "
        "multiprocessor while it has any. Where none of the three is above 60%, what its warps "
        "wait for most (Nsight Compute's names; a long scoreboard is memory's), and shares of it. "
        "Of PCIe, which `attend`, `keep` and `gather_blocks` wait for, it has no counter."
    )
    return f"{about}\n\n{table((*head, 'limited by'), rows)}\n\n{machine(result)}"
