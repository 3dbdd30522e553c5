"""A/B timing of a decoding step in several source trees on one GPU, interleaved.

    PYTHONPATH=.:adapters python tools/compare_trees.py NAME=FOLDER NAME=FOLDER …
        [--tokens N …] [--batch B] [--rounds R] [--times device cached host append update token]
        [--q-heads H] [--kv-heads G] [--hit-rate H] [--index SPEC] [--replays R] --json OUT
    PYTHONPATH=.:adapters python tools/compare_trees.py NAME=FOLDER NAME=FOLDER … --equal
        [--match REGEX] --json OUT

The step is that of `benchmarks/latency.py`, or of other heads, and so is the way it is timed;
`append` and `update` are a prompt and steps with updates as `benchmarks/append.py` has them;
`token` is a decode step of a model of Qwen3-8B's size as `benchmarks/generation.py` has it.
Differences of a percent are smaller than those between two machines, or two runs on one. So every
tree has a process that stays alive, builds a length once, and then each round times one tree after
the other: A B A B. The table has the median of the rounds with the least and the most, and the
median of the ratios to the first tree in the same round. The same folder under two names says how
far to trust it.

A folder is a whole checkout (`git worktree add FOLDER COMMIT`); a process times it with the
`benchmarks` of that tree. Trees are checked first; one that is wrong or dies is named, and the
others go on. What a tree prints lies beside OUT as its name and the tree's, `.log`. The exit status
is 1 where a tree failed.

`--equal` times nothing. Each tree computes codes, hits, rows and attention of every index, preset
and wrapper from the same seeded data, on the backends `torch` and `cpu`, and `cuda` on a GPU
(`tree_worker.py` says what exactly), and the results are compared to the bit. The exit status is 1
if any differ. Specs are written in today's names; a tree before the renames gets its own.
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
"""Of a step by where rows lie (`cached`: on the host, with a cache on the device), and more."""

NEEDED = ("kvindex", "kvindex_cuda", "adapters", "benchmarks/common")
"""Folders of a tree."""

WORKER = Path(__file__).with_name("tree_worker.py")

Answers = dict[str, Any]
"""Answers by name of the checkout. Checkouts that failed have no answer."""


class Tree:
    """A process that imports what lies in `folder`. `failed`: why it is asked no more, or "".

    log: where goes what it prints.
    """

    def __init__(self, name: str, folder: Path, log: Path, worker: Path = WORKER) -> None:
        # as sys.path has it: without "..", links as they are
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
        """Begin a command: its name, then what it is given."""
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
        """What the command has found; None if the tree has failed, or does so now."""
        if self.failed:
            return None
        assert self.process.stdout is not None
        # else printed while modules were imported
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            self.fail(found["error"])
            return None
        return found

    def fail(self, why: str) -> None:
        """Ask no more, and say why."""
        self.process.kill()
        self.failed = f"{self._asked}: {why}"
        last = self._log.read_text("utf-8", "replace").splitlines()[-12:]
        print("\n    ".join([f"{self.name} failed: {self.failed}", *last]), flush=True)

    def end(self) -> None:
        """End the process, which has nothing to keep."""
        self.process.kill()


def at_once(trees: Iterable[Tree], *command: Any) -> Answers:
    """The same command to all trees, which work on it side by side."""
    trees = [*trees]
    for tree in trees:
        tree.ask(*command)
    found = {tree.name: tree.answer() for tree in trees}
    return {name: answer for name, answer in found.items() if answer is not None}


def in_turn(trees: Iterable[Tree], *command: Any) -> Answers:
    """The same command to one tree after the other: the others wait."""
    found: Answers = {}
    for tree in trees:
        found |= at_once([tree], *command)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told, `trees` a folder by name; exits with words where it cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="the first: compared with")
    parser.add_argument("--tokens", nargs="+", type=int, default=[131_072])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", nargs="+", choices=TIMES, default=list(TIMES[:3]))
    parser.add_argument("--equal", action="store_true", help="compare results, and time nothing")
    parser.add_argument("--match", metavar="REGEX", default="", help="specs that --equal compares")
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
    if not found.equal:  # needs no GPU
        refuse_heads(parser, found)
        refuse(parser, found, tokens=4096, batch=1, rounds=1, replays=10)
    return found


def started(trees: list[Tree], options: dict[str, Any]) -> Answers:
    """Start all trees. One that has imported modules of another folder fails."""
    found = at_once(trees, "start", options)
    for tree in trees:
        for path in found.get(tree.name, {}).get("modules", ()):
            if not tree.failed and not Path(path).is_relative_to(tree.folder):
                tree.fail(f"got {path}, allowed is a module in {tree.folder}")
    return found


def compare(trees: list[Tree], given: argparse.Namespace) -> dict[str, Any]:
    """Check all trees at once, then time them in turns, length by length."""
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
    """Compare digests of the results of all trees, spec by spec, and print each comparison."""
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
            raised = f", {len(errors)} runs raise alike" if errors else ""
            print(f"{one}: {count} results, {len(wrong)} differ{raised}", *wrong, flush=True)
        result["failed"] = {tree.name: tree.failed for tree in trees if tree.failed}
        write_json(given.json, result)
    return result


def differing(found: Answers) -> dict[str, dict[str, str]]:
    """Results that are not the same in all trees, by name: what each tree has, "" for nothing.

    Runs that raise are the same if their errors have the same type, because words were changed.
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
    """How many results are equal, and lists of the others."""
    counts = [len(next(iter(some.values()), {})) for some in result["compared"].values()]
    lines = [f"{sum(counts):,} results of {len(counts)} specs and backends compared"]
    if raised := sum(map(len, result["errors"].values())):
        lines.append(f"{raised} runs raise the same error in every tree (errors in the JSON file)")
    lines += [
        f"differs: {one}: {name}" for one, some in result["different"].items() for name in some
    ]
    lines += [f"only in {', '.join(of)}: {spec}" for spec, of in result["only"].items()]
    return "\n".join(lines)


def medians(point: dict[str, Any], tree: str, what: str) -> list[float | None]:
    """Return a checkout's time in µs for each round, or None where it was not measured."""
    rounds = [one.get(tree, {}).get(what) for one in point["rounds"]]
    return [times["median_us"] if times else None for times in rounds]


def compared(result: dict[str, Any]) -> str:
    """Make a table of each checkout's µs, and its ratio to the first one; `–`: not measured."""
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
    """Compare, print, write; exits with 1 where a tree failed or results differ."""
    told, trees = arguments(given), []
    try:
        for name, folder in told.trees.items():
            log = told.json.with_name(f"{told.json.stem}.{name}.log")
            trees.append(Tree(name, folder, log))
        result = (compare_results if told.equal else compare)(trees, told)
    finally:
        for tree in trees:
            tree.end()
    shown = summary(result) if told.equal else compared(result)
    print(shown, *(f"{name}: {why}" for name, why in result["failed"].items()), sep="\n")
    if result["failed"] or result.get("different"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
