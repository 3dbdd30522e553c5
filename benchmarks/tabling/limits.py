"""What limits each kernel on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.tabling.parts import machine, table


def limits(result: dict[str, Any]) -> str:
    """A row for each launch, by the work that it is of."""
    rows = []
    for work, launches in result["works"].items():
        for one in launches:
            moved = f"{(one['read_bytes'] + one['written_bytes']) / 1e6:,.1f}"
            shares = (f"{one[name]:.0f}%" for name in ("memory", "issue", "shared"))
            line = f"`{work}`", f"`{one['kernel']}`", f"{one['us']:,.1f}", moved
            rows.append((*line, *shares, f"{one['warps']:.1f}", one["limit"]))
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
        "multiprocessor while it has any. Below 60% of all three what its warps wait for most."
    )
    return f"{about}\n\n{table((*head, 'limited by'), rows)}\n\n{machine(result)}"
