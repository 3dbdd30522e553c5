"""Profile kernels with Nsight Compute: measure hardware counters of each kernel launch.

```
PYTHONPATH=.:adapters python tools/profile_kernels.py [--tokens N] [--keys N]
    [--works NAME …] --json OUT
```

The layer has batch size 1, 32 query heads, 8 KV heads, D = 128, bfloat16 and k = 100. `--works`
selects what to profile:

- a name of an index: a decode step that searches `--tokens` tokens, with rows in host memory;
- `append`: an append of `--keys` keys, with rows in device memory;
- `update`: an append of 256 keys, with rows in host memory.

The profiler `ncu` runs each kernel launch separately and with cold caches, and repeats it until all
counters are read. So the times of the kernels are longer than in a decode step, where launches
overlap. The results of decode steps are checked first. The command needs `ncu`, and a machine on
which `ncu` has permission to read counters.
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
"""Name in the result -> name of the counter in `ncu`.

`memory`, `issue` and `shared` are percentages of the peak rate."""

PIPES = {
    "memory": "memory",
    "issue": "issue slots",
    "shared": "the pipe of shared memory and shuffles",
}

MOST = 60
"""Percentage of the peak from which a pipe limits a kernel. Pipes are the keys of `PIPES`."""


def limit(found: dict[str, Any]) -> str:
    """Return what limits a kernel: the busiest pipe, or latency.

    For latency, the most frequent reason why warps wait is added.

    `found` has the counters of a launch, by the names of `COUNTERS`.
    """
    pipe = max(PIPES, key=lambda name: float(found[name]))
    if found[pipe] >= MOST:
        return f"{PIPES[pipe]}, {found[pipe]:.0f}%"
    stall = max(STALLS, key=lambda name: float(found[name]))
    return f"latency: {stall.replace('_', ' ')}"


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse the CSV output of `ncu`, and return the counters of each launch of kvindex's kernels.

    Args:
        text: The output of `ncu --csv --page raw --print-units base`.

    Raises:
        ValueError: The output has no launch, or a counter of a launch is missing. (If only a
            counter of warp stalls is missing, it is set to 0 instead.)
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        last_lines = " ".join(lines[-3:])[:300]
        raise ValueError(f"ncu: got no table of launches; its output ends with: {last_lines}")
    table = csv.DictReader(lines[starts[0] :])
    next(table)  # skip the line with the units
    found = []
    for row in table:
        if not re.fullmatch(r"\w+", row["Kernel Name"]):
            continue  # a kernel of torch, whose name contains types in brackets
        one: dict[str, Any] = {"kernel": row["Kernel Name"], "grid": row["Grid Size"]}
        for name, counter in COUNTERS.items():
            try:
                one[name] = float(row[counter].replace(",", ""))
            except (KeyError, ValueError) as error:
                if name in STALLS:
                    one[name] = 0.0  # some GPUs do not have all counters of stalls
                    continue
                kernel = one["kernel"]
                raise ValueError(f"ncu: got no counter {counter} for kernel {kernel}") from error
        one["us"] /= 1e3
        found.append(one | {"limit": limit(one)})
    return found


def work_of(name: str, tokens: int, keys: int) -> Callable[[], Any]:
    """Return a function that runs a decode step or an append, as `name` says.

    Args:
        name: One of `WORKS`.
        tokens: Context length, the number of tokens in the index.
        keys: Number of keys that "append" appends.
    """
    g = workload.geometry("cuda")
    if name in STEPS:
        check(g, name)
        work, numbers = workload.Layers(g, name, "host", tokens=tokens), count()
        # use new queries in each run, so that no row is in the cache
        return lambda: (work.ask(next(numbers)), work.run())
    some = keys if name == "append" else 256
    rows = next(workload.tokens_of(g, 0, 1, some, some))
    index = workload.created(g, "pariskv", store="device" if name == "append" else "host")

    def append() -> None:
        if name == "append":
            index.reset()
        index.append(*rows)

    return append


def run(name: str, tokens: int, keys: int) -> None:
    """Run a decode step or an append twice: once to compile kernels, and once for the profiler."""
    once = work_of(name, tokens, keys)
    once()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    once()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profiled(name: str, given: argparse.Namespace, ncu: str) -> list[dict[str, Any]]:
    """Run `ncu` on one of `WORKS`, and return the counters of each launch.

    Raises ValueError if `ncu` fails or reports no launch.
    """
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
        status, message = done.returncode, (done.stderr or said)[-300:]
        raise ValueError(f"ncu: got exit status {status} with the message: {message}")
    return parsed(said)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with a message if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=2**17, help="context length: number of tokens in the index"
    )
    parser.add_argument(
        "--keys", type=int, default=2**20, help="number of keys that `append` appends"
    )
    parser.add_argument(
        "--works",
        nargs="+",
        choices=WORKS,
        default=list(WORKS),
        help="what to profile: decode steps of these indexes, `append` or `update`",
    )
    parser.add_argument(
        "--run",
        choices=WORKS,
        help="run only this decode step or append, without ncu. Do not pass this option yourself: "
        "ncu uses it to run what it profiles.",
    )
    parser.add_argument("--json", type=output(), help="JSON file to which the result is written")
    found = parser.parse_args(given)
    if not found.run and found.json is None:
        parser.error("json: got None, allowed is a file in a folder that exists")
    if not torch.cuda.is_available():
        parser.error("device: got a machine on which torch finds no CUDA device; run on a GPU")
    return found


def main() -> None:
    """Profile decode steps and appends with the profiler ncu, and write the result.

    With `--run`, only run a single decode step or append. ncu starts the command in this way.
    """
    given = arguments()
    if given.run:
        with torch.no_grad():
            run(given.run, given.tokens, given.keys)
        return
    if (ncu := shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")) is None:
        sys.exit("ncu: not found in PATH; install NVIDIA Nsight Compute, which contains it")
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
