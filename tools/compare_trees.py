"""Compare the speed or the results of several checkouts of this repository on one machine.

The code of each checkout runs in a process of its own. The command times decode steps of all
checkouts in alternation. With `--equal`, it compares results instead of times: they must be equal
bit by bit.

    PYTHONPATH=.:adapters python tools/compare_trees.py NAME=FOLDER NAME=FOLDER …
        [--tokens N …] [--batch B] [--rounds R] [--times device cached host append update token]
        [--q-heads H] [--kv-heads G] [--hit-rate H] [--index SPEC] [--replays R] --json OUT
    PYTHONPATH=.:adapters python tools/compare_trees.py NAME=FOLDER NAME=FOLDER … --equal
        [--match REGEX] --json OUT

Each FOLDER is a whole checkout, for example from `git worktree add FOLDER COMMIT`. (The code calls
a checkout a tree.) For each checkout, the command starts a process that runs the `benchmarks` of
this checkout. First the results of every checkout are checked. If a checkout fails, its error is
printed, and the other checkouts continue. The output of its process is written next to OUT, to a
file that ends in `NAME.log`. The exit status is 1 if a checkout failed.

Without `--equal`, the command times the checkouts on a GPU in alternation (A B A B), because two
runs of the same code on one machine can differ by more than a percent. `--times` selects what is
timed:

- `host`, `device`, `cached`: the decode step of `benchmarks/latency.py`, with rows (keys and
  values) in host memory, in device memory, or in host memory with a cache on the device;
- `append`: an append of a prompt, as in `benchmarks/append.py`;
- `update`: decode steps in which a layer moves tokens from its window into its index, as in
  `benchmarks/append.py`;
- `token`: a decode step of a model of Qwen3-8B's size, as in `benchmarks/generation.py`.

The printed table has the median, minimum and maximum time over the rounds, and the median ratio to
the time of the first checkout in the same round. To see how much the ratios vary by chance, pass
the same folder under two names.

With `--equal`, results are compared instead of times. Each checkout computes codes, search results,
keys and values, and attention of every index, preset and wrapper from the same random data, on the
backends `torch` and `cpu`, and on a GPU also `cuda` (`tree_worker.py` has the details). The exit
status is 1 if any result is not equal bit by bit.

Options of indexes have their current names in the command line. The process of an older checkout
translates them to the names that this checkout uses.
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

TIMES = ("device", "cached", "host", "append", "update", "token")
"""Values of the option `--times`: what to time in each checkout (see the module's docstring)."""

NEEDED = ("kvindex", "kvindex_cuda", "adapters", "benchmarks/common")
"""Folders that a checkout must contain."""

WORKER = Path(__file__).with_name("tree_worker.py")

Answers = dict[str, Any]
"""Name of a checkout -> its answer to a command. Checkouts that failed have no answer."""


class Tree:
    """A process that runs the code of one checkout, and answers commands.

    Args:
        name: Name of the checkout.
        folder: Folder of the checkout, from which the process imports all modules.
        log: File for the output of the process.
        worker: Script that the process runs.

    Attributes:
        failed: Why the process gets no more commands, or "" if it has not failed.
    """

    def __init__(self, name: str, folder: Path, log: Path, worker: Path = WORKER) -> None:
        # make the path comparable to the paths of imported modules: absolute, without "..", but
        # without resolving symbolic links
        self.name, self.folder, self.failed = name, Path(os.path.abspath(folder)), ""
        self._log, self._asked = log, ""
        paths = f"{self.folder}{os.pathsep}{self.folder / 'adapters'}"
        flags = "-P", "-u", "-X", "faulthandler"  # -P: do not import from the worker's folder
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
        """Send a command, which is a name and arguments, without waiting for the answer."""
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
        """Wait for the answer to the last command. Return None if the checkout has failed.

        It has failed if its process ended, or if the answer is an error.
        """
        if self.failed:
            return None
        assert self.process.stdout is not None
        # skip lines that were printed while modules were imported
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            self.fail(found["error"])
            return None
        return found

    def fail(self, why: str) -> None:
        """End the process, and print the reason and the last lines of its log."""
        self.process.kill()
        self.failed = f"{self._asked}: {why}"
        last = self._log.read_text("utf-8", "replace").splitlines()[-12:]
        print("\n    ".join([f"{self.name} failed: {self.failed}", *last]), flush=True)

    def end(self) -> None:
        """Kill the process. It has no state that must be saved."""
        self.process.kill()


def at_once(trees: Iterable[Tree], *command: Any) -> Answers:
    """Send the same command to the processes of all checkouts, which run it at the same time."""
    trees = [*trees]
    for tree in trees:
        tree.ask(*command)
    found = {tree.name: tree.answer() for tree in trees}
    return {name: answer for name, answer in found.items() if answer is not None}


def in_turn(trees: Iterable[Tree], *command: Any) -> Answers:
    """Send a command to the process of each checkout. Each process runs it after the previous one
    has answered.
    """
    found: Answers = {}
    for tree in trees:
        found |= at_once([tree], *command)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with a message if it is wrong.

    In the result, `trees` maps the name of each checkout to its folder.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "trees",
        nargs="+",
        metavar="NAME=FOLDER",
        help="name and folder of each checkout; the first one is the baseline of the comparison",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[131_072], help="context lengths to time"
    )
    parser.add_argument("--batch", type=int, default=1, help="number of sequences in the batch")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of times that each checkout is timed"
    )
    parser.add_argument(
        "--times",
        nargs="+",
        choices=TIMES,
        default=list(TIMES[:3]),
        help="kinds of decode steps and appends to time",
    )
    parser.add_argument(
        "--equal", action="store_true", help="compare results instead of timing the checkouts"
    )
    parser.add_argument(
        "--match",
        metavar="REGEX",
        default="",
        help="with --equal, compare only indexes whose name and options match this expression",
    )
    add_heads(parser)
    add_index(parser)
    parser.add_argument(
        "--json", type=output(), required=True, help="JSON file to which the result is written"
    )
    found = parser.parse_args(given)
    trees: dict[str, Path] = {}
    for pair in found.trees:
        name, _, folder = pair.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not folder or name in trees:
            allowed = "NAME=FOLDER with a different NAME for each folder, of letters, digits, _ . -"
            parser.error(f"trees: got {pair!r}, allowed is {allowed}")
        if missing := [part for part in NEEDED if not (Path(folder) / part).is_dir()]:
            parser.error(f"trees: got {pair!r}, a folder without {missing}; pass a whole checkout")
        trees[name] = Path(folder)
    found.trees = trees
    if not found.equal:  # needs no GPU
        refuse_heads(parser, found)
        refuse(parser, found, tokens=4096, batch=1, rounds=1, replays=10)
    return found


def started(trees: list[Tree], options: dict[str, Any]) -> Answers:
    """Start the worker process of each checkout. A worker fails if it imports a module from another
    checkout."""
    found = at_once(trees, "start", options)
    for tree in trees:
        for path in found.get(tree.name, {}).get("modules", ()):
            if not tree.failed and not Path(path).is_relative_to(tree.folder):
                tree.fail(f"imported {path}, allowed is a module in {tree.folder}")
    return found


def compare(trees: list[Tree], given: argparse.Namespace) -> dict[str, Any]:
    """For each sequence length of the option `--tokens`, check the results of all checkouts, and
    then time the checkouts in alternation.

    Args:
        trees: Process of each checkout.
        given: The parsed command line.

    Returns:
        The times of each checkout, and the error messages of checkouts that failed.
    """
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

    begun = started(trees, step | {"trees": len(trees)})
    result["machine"] = next((found["machine"] for found in begun.values()), None)
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


def compare_results(trees: list[Tree], given: argparse.Namespace) -> dict[str, Any]:
    """Compare the results that all checkouts compute, for one index after another.

    The outcome for each index is printed, and written to the JSON file.
    """
    begun = started(trees, {"equal": True})
    specs = {name: found["specs"] for name, found in begun.items()}
    every = dict.fromkeys(spec for some in specs.values() for spec in some)
    result: dict[str, Any] = {
        "trees": {tree.name: str(tree.folder) for tree in trees},
        "machine": next((found["machine"] for found in begun.values()), None),
        "only": {spec: [n for n in specs if spec in specs[n]] for spec in every},
        **{"compared": {}, "different": {}, "errors": {}, "failed": {}},
    }
    result["only"] = {spec: of for spec, of in result["only"].items() if len(of) < len(specs)}
    lists = [found["backends"] for found in begun.values()]
    for spec in [s for s in every if s not in result["only"] and re.search(given.match, s)]:
        for backend in (name for name in lists[0] if all(name in some for some in lists)):
            found = at_once(trees, "digests", spec, backend)
            one = f"{spec} {backend}"
            wrong = differing(found)
            errors = next(iter(found.values()))["errors"] if found else {}
            result["compared"][one] = {n: answer["digests"] for n, answer in found.items()}
            result["different"] |= {one: wrong} if wrong else {}
            result["errors"] |= {one: errors} if errors else {}
            count = len(next(iter(result["compared"][one].values()), {}))
            raised = f", {len(errors)} runs raise the same error" if errors else ""
            print(f"{one}: {count} results, {len(wrong)} differ{raised}", *wrong, flush=True)
        result["failed"] = {tree.name: tree.failed for tree in trees if tree.failed}
        write_json(given.json, result)
    return result


def differing(found: Answers) -> dict[str, dict[str, str]]:
    """Find the results that are not the same in all checkouts.

    Two runs that raise an error have the same result if the errors have the same type, because
    messages may have been reworded.

    Args:
        found: Name of a checkout -> its answer, which contains digests (hashes) of its results.

    Returns:
        Name of a result that differs -> name of a checkout -> digest, or "" if the checkout does
        not have this result.
    """
    kinds = {}
    for tree, answer in found.items():
        raised = {run: error.partition(":")[0] for run, error in answer["errors"].items()}
        kinds[tree] = answer["digests"] | raised
    wrong = {}
    for name in dict.fromkeys(name for some in kinds.values() for name in some):
        values = {tree: some.get(name, "") for tree, some in kinds.items()}
        if len({*values.values()}) > 1:
            wrong[name] = values
    return wrong


def summary(result: dict[str, Any]) -> str:
    """Return the lines to print: how many results were compared, and which of them differ."""
    counts = [len(next(iter(some.values()), {})) for some in result["compared"].values()]
    lines = [f"{sum(counts):,} results of {len(counts)} specs and backends compared"]
    if raised := sum(map(len, result["errors"].values())):
        lines.append(
            f"{raised} runs raise the same error in every checkout (errors in the JSON file)"
        )
    lines += [
        f"differs: {one}: {name}" for one, some in result["different"].items() for name in some
    ]
    lines += [f"only in {', '.join(of)}: {spec}" for spec, of in result["only"].items()]
    return "\n".join(lines)


def medians(point: dict[str, Any], tree: str, what: str) -> list[float | None]:
    """Return how long an operation takes in a checkout: the median time of each round, in µs.

    The time is None for a round in which the operation was not measured.

    Args:
        point: Measured times for one number of tokens.
        tree: Name of the checkout.
        what: Name of the operation.
    """
    rounds = [one.get(tree, {}).get(what) for one in point["rounds"]]
    return [times["median_us"] if times else None for times in rounds]


def compared(result: dict[str, Any]) -> str:
    """Make a table that compares the times of several checkouts of the repository.

    The table has the time of each checkout in µs, and this time divided by the time of the first
    checkout. `–` stands for a time that was not measured.
    """
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
    """Compare the checkouts, and print the result.

    The exit status is 1 if a checkout failed, or if results differ with `--equal`.
    """
    options, trees = arguments(given), []
    try:
        for name, folder in options.trees.items():
            log = options.json.with_name(f"{options.json.stem}.{name}.log")
            trees.append(Tree(name, folder, log))
        result = (compare_results if options.equal else compare)(trees, options)
    finally:
        for tree in trees:
            tree.end()
    shown = summary(result) if options.equal else compared(result)
    print(shown, *(f"{name}: {why}" for name, why in result["failed"].items()), sep="\n")
    if result["failed"] or result.get("different"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
