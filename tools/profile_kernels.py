"""Profile kernels with Nsight Compute: counters of each launch, run alone with cold caches.

```
PYTHONPATH=.:adapters python tools/profile_kernels.py [--tokens N] [--keys N]
    [--works NAME …] --json OUT
```

The layer has batch size 1, 32 query heads, 8 KV heads, D = 128, bfloat16, k = 100, and rows on the
host. `--works` selects what is profiled:

- the name of an index: a decode step over `--tokens` tokens;
- `append`: an append of `--keys` keys;
- `update`: an append of 256 keys to an index with rows on the host.

`ncu` repeats each launch until all counters are read, one launch at a time. Times are therefore
longer than in a step, where launches overlap. The results of steps are checked first. The command
needs `ncu`, and a machine that lets it read counters.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.common import workload
from benchmarks.common.correctness import check
from benchmarks.reporting.gpu import STALLS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json

ROOT = Path(__file__).parents[1]

STEPS = ("pariskv", "pariskv:preset=precise", "pariskv:preset=paper")
WORKS = (*STEPS, "append", "update")

_PER_ISSUE = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

COUNTERS = {
    "us": "gpu__time_duration.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    **{stall: _PER_ISSUE.format(stall) for stall in STALLS},
}
"""Name in the result -> counter. `memory`, `issue` and `shared` are percent of the peak."""

PIPES = {
    "memory": "memory",
    "issue": "issue slots",
    "shared": "the pipe of shared memory and shuffles",
}

MOST = 60
"""Percentage of its peak above which a pipe counts as the limit of a kernel."""


def limit(found: dict[str, Any]) -> str:
    """Describe what limits a kernel: the busiest pipe, or the most frequent stall of its warps."""
    pipe = max(PIPES, key=lambda name: float(found[name]))
    if found[pipe] >= MOST:
        return f"{PIPES[pipe]}, {found[pipe]:.0f}%"
    stall = max(STALLS, key=lambda name: float(found[name]))
    return f"latency: {stall.replace('_', ' ')}"


def parsed(text: str) -> list[dict[str, Any]]:
    """Read the launches of our kernels and their counters from a CSV file of `ncu`.

    text: the output of `ncu --page raw --print-units base`.

    Raises:
        ValueError: There is no launch, or a launch lacks a counter that is not one of stalls.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise ValueError(f"ncu: got no table: {' '.join(lines[-3:])[:300]}")
    table = csv.DictReader(lines[starts[0] :])
    next(table)  # units
    found = []
    for row in table:
        if not re.fullmatch(r"\w+", row["Kernel Name"]):
            continue  # a kernel of torch: only these have types in their names
        one: dict[str, Any] = {"kernel": row["Kernel Name"], "grid": row["Grid Size"]}
        for name, counter in COUNTERS.items():
            try:
                one[name] = float(row[counter].replace(",", ""))
            except (KeyError, ValueError) as error:
                if name in STALLS:
                    one[name] = 0.0  # a GPU may lack some counters of stalls
                    continue
                raise ValueError(f"ncu: got no {counter} of {one['kernel']}") from error
        one["us"] /= 1e3
        found.append(one | {"limit": limit(one)})
    return found


def work_of(name: str, tokens: int, keys: int) -> Callable[[], Any]:
    """Return a function that runs a work."""
    g = workload.geometry("cuda")
    if name in STEPS:
        check(g, name)
        work, numbers = workload.Layers(g, name, "host", tokens=tokens), count()
        return lambda: (work.ask(next(numbers)), work.run())  # new queries: no row is cached
    some = keys if name == "append" else 256
    rows = next(workload.tokens_of(g, 0, 1, some, some))
    index = workload.created(g, "pariskv", store="device" if name == "append" else "host")

    def append() -> None:
        if name == "append":
            index.reset()
        index.append(*rows)

    return append


def run(name: str, tokens: int, keys: int) -> None:
    """Run a work once to compile its kernels, and once between the profiler's start and stop."""
    once = work_of(name, tokens, keys)
    once()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    once()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profiled(name: str, given: argparse.Namespace, ncu: str) -> list[dict[str, Any]]:
    """Return the launches of a work. Raise ValueError if `ncu` reports none."""
    inner = [sys.executable, __file__, "--run", name, "--tokens", str(given.tokens)]
    paths = [str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv"]
        command += ["--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--metrics", ",".join(COUNTERS.values()), *inner, "--keys", str(given.keys)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        said = log.read_text(encoding="utf-8") if log.exists() else ""
    if done.returncode:
        raise ValueError(f"ncu: got status {done.returncode}: {(done.stderr or said)[-300:]}")
    return parsed(said)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with a message if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**17, help="tokens that a step searches")
    parser.add_argument("--keys", type=int, default=2**20, help="keys that `append` appends")
    parser.add_argument(
        "--works", nargs="+", choices=WORKS, default=list(WORKS), help="works to profile"
    )
    parser.add_argument("--run", choices=WORKS, help="run one work without ncu, which calls this")
    parser.add_argument("--json", type=output(), help="file for the result")
    found = parser.parse_args(given)
    if not found.run and found.json is None:
        parser.error("json: got None, allowed is a file in a folder that exists")
    if not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and torch sees none")
    return found


def main() -> None:
    """Run one work, or let ncu run each of them, and write the result."""
    given = arguments()
    if given.run:
        with torch.no_grad():
            run(given.run, given.tokens, given.keys)
        return
    if (ncu := shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")) is None:
        sys.exit("ncu: not found in the path; it is part of NVIDIA Nsight Compute")
    result: dict[str, Any] = {name: getattr(given, name) for name in ("tokens", "keys")}
    result |= {"machine": describe("cuda"), "works": {}, "notes": []}
    for name in given.works:
        try:
            result["works"][name] = profiled(name, given, ncu)
        except ValueError as error:
            result["notes"].append(f"{name}: {error}")
        write_json(given.json, result)
    print(report.TABLES["limits"](result), *result["notes"], sep="\n")


if __name__ == "__main__":
    main()
