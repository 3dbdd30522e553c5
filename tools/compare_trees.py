"""Time a decode step of several checkouts on one GPU, in turns.

```
PYTHONPATH=.:adapters python tools/compare_trees.py NAME=FOLDER NAME=FOLDER …
    [--tokens N …] [--batch B] [--rounds R] [--times device cached host append update]
    [--q-heads H] [--kv-heads G] [--hit-rate H] [--index SPEC] [--replays R] --json OUT
```

The step and the way it is timed are those of `benchmarks/latency.py`. `append` and `update` are a
prompt and steps with updates, as in `benchmarks/append.py`.

Differences of one percent are smaller than those between two machines, or between two runs on one
machine. Therefore each checkout has a process that stays alive and builds each length once. Each
round then times one checkout after the other: A B A B. The table shows the median, minimum and
maximum over rounds, and the median of the ratios to the first checkout in the same round. To see
how precise the ratios are, pass the same folder under two names.

A folder is a whole checkout (`git worktree add FOLDER COMMIT`), and is timed with its own
`benchmarks`. Each checkout is checked first. If one gives wrong results or its process ends, the
command prints its name and continues with the others, and the exit status is 1. The output of a
checkout's process goes to a file next to OUT, with the checkout's name and `.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from heads import add_heads, refuse_heads

from benchmarks.latency import add_index, refuse
from benchmarks.reporting.parts import table
from kvindex_adapters.evaluate.output_files import output, write_json

TIMES = ("device", "cached", "host", "append", "update")
"""What to time: a step by where rows are stored, an append, and steps with updates.

`cached` means rows on the host with a cache on the device.
"""

NEEDED = ("kvindex", "kvindex_cuda", "adapters", "benchmarks/common")
"""Folders that a checkout must have."""

WORKER = Path(__file__).with_name("tree_worker.py")

Answers = dict[str, Any]
"""Answers by name of the checkout. Those that failed have none."""


class Tree:
    """A process that imports the checkout in `folder`, and writes its output to `log`.

    `failed` is the reason why it gets no further commands, or "".
    """

    def __init__(self, name: str, folder: Path, log: Path, worker: Path = WORKER) -> None:
        # an absolute path in the form of sys.path: without "..", and with links unresolved
        self.name, self.folder, self.failed = name, Path(os.path.abspath(folder)), ""
        self._log, self._asked = log, ""
        paths = f"{self.folder}{os.pathsep}{self.folder / 'adapters'}"
        flags = "-P", "-u", "-X", "faulthandler"  # -P: not the worker's own folder
        with log.open("w", encoding="utf-8") as words:
            self.process = subprocess.Popen(
                [sys.executable, *flags, str(worker)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": paths},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
            )

    def ask(self, *command: Any) -> None:
        """Send a command: its name, then its arguments."""
        if self.failed:
            return
        self._asked = str(command[0])
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.fail("its process ended")

    def answer(self) -> dict[str, Any] | None:
        """Return the answer to the command, or None if the process has failed."""
        if self.failed:
            return None
        assert self.process.stdout is not None
        # skip lines that were printed while modules were imported: they are not JSON
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            self.fail(found["error"])
            return None
        return found

    def fail(self, why: str) -> None:
        """Stop the process, and print the reason."""
        self.process.kill()
        self.failed = f"{self._asked}: {why}"
        last = self._log.read_text("utf-8", "replace").splitlines()[-12:]
        print("\n    ".join([f"{self.name} failed: {self.failed}", *last]), flush=True)

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()


def at_once(trees: Iterable[Tree], *command: Any) -> Answers:
    """Send a command to all checkouts, which run it in parallel."""
    trees = [*trees]
    for tree in trees:
        tree.ask(*command)
    found = {tree.name: tree.answer() for tree in trees}
    return {name: answer for name, answer in found.items() if answer is not None}


def in_turn(trees: Iterable[Tree], *command: Any) -> Answers:
    """Send a command to one checkout after the other, while the others wait."""
    found: Answers = {}
    for tree in trees:
        found |= at_once([tree], *command)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with a message if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "trees",
        nargs="+",
        metavar="NAME=FOLDER",
        help="checkouts to time; the others are compared with the first",
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[131_072])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", nargs="+", choices=TIMES, default=list(TIMES[:3]))
    add_heads(parser)
    add_index(parser)
    parser.add_argument("--json", type=output(), required=True)
    found = parser.parse_args(given)
    trees: dict[str, Path] = {}
    for pair in found.trees:
        name, _, folder = pair.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not folder or name in trees:
            parser.error(f"trees: got {pair!r}, allowed is NAME=FOLDER, each NAME once, of \\w.-")
        if missing := [part for part in NEEDED if not (Path(folder) / part).is_dir()]:
            parser.error(f"trees: got {pair!r}, allowed is a checkout; it lacks {missing}")
        trees[name] = Path(folder)
    found.trees = trees
    refuse_heads(parser, found)
    refuse(parser, found, tokens=4096, batch=1, rounds=1, replays=10)
    return found


def compare(trees: list[Tree], given: argparse.Namespace) -> dict[str, Any]:
    """Check all checkouts in parallel, then time them in turns, one length after another."""
    names = "index", "hit_rate", "batch", "replays", "q_heads", "kv_heads"
    step = {name: getattr(given, name) for name in names}
    result: dict[str, Any] = {
        "trees": {tree.name: str(tree.folder) for tree in trees},
        **step,
        **{"times": given.times, "points": [], "failed": {}},
    }

    def keep() -> None:
        result["failed"] = {tree.name: tree.failed for tree in trees if tree.failed}
        write_json(given.json, result)

    started = at_once(trees, "start", step | {"trees": len(trees)})
    for tree in trees:
        for path in started.get(tree.name, {}).get("modules", ()):
            if not tree.failed and not Path(path).is_relative_to(tree.folder):
                tree.fail(f"got {path}, allowed is a module in {tree.folder}")
    result["machine"] = next((found["machine"] for found in started.values()), None)
    result["check"] = at_once(trees, "check")
    for tokens in given.tokens:
        keep()
        point: dict[str, Any] = {"tokens": tokens, "rounds": []}
        result["points"].append(point)
        point["build"] = at_once(trees, "build", tokens, given.times)
        for number in range(given.rounds):
            point["rounds"].append(in_turn(trees, "round", given.times))
            print(f"{tokens:,} tokens, round {number + 1}", flush=True)
            keep()
    keep()
    return result


def medians(point: dict[str, Any], tree: str, what: str) -> list[float | None]:
    """Return a checkout's µs in each round, or None without a time."""
    rounds = [one.get(tree, {}).get(what) for one in point["rounds"]]
    return [times["median_us"] if times else None for times in rounds]


def compared(result: dict[str, Any]) -> str:
    """Make a table of each checkout's µs and their ratio to the first one's; `–` without a time."""
    first, *others = result["trees"]
    head = ["tokens", "what", first, *(part for n in others for part in (n, f"to {first}"))]
    rows = []
    for point, what in [(point, what) for point in result["points"] for what in result["times"]]:
        base = medians(point, first, what)
        row = [f"{point['tokens']:,}", what]
        for name in result["trees"]:
            mine = medians(point, name, what)
            times = [us for us in mine if us is not None]
            spread = [f"{of(times):.2f}" for of in (statistics.median, min, max) if times]
            row.append("{} ({} … {})".format(*spread) if times else "–")
            if name != first:
                pairs = [us / to for us, to in zip(mine, base, strict=True) if us and to]
                row.append(f"{statistics.median(pairs):.3f}" if pairs else "–")
        rows.append(row)
    return table(head, rows)


def main(given: list[str] | None = None) -> None:
    """Time the checkouts, write and print the result, and exit with 1 if a checkout failed."""
    options, trees = arguments(given), []
    try:
        for name, folder in options.trees.items():
            log = options.json.with_name(f"{options.json.stem}.{name}.log")
            trees.append(Tree(name, folder, log))
        result = compare(trees, options)
    finally:
        for tree in trees:
            tree.end()
    print(compared(result), *(f"{name}: {why}" for name, why in result["failed"].items()), sep="\n")
    if result["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
