"""A step's time in several source trees on one GPU, in turns: what a change gains or costs.

    PYTHONPATH=.:adapters python benchmarks/side_by_side.py NAME=FOLDER NAME=FOLDER …
        [--tokens N …] [--batch B] [--rounds R] [--rows device cached host] [--hit-rate H]
        [--index SPEC] [--replays R] [--dense] [--seconds S] --json OUT

The step is that of `decode_step.py`, and so is the way it is timed. Differences of a percent are
smaller than those between two machines, or two runs on one. So every tree has a process that stays
alive, builds a length once, and then each round times one tree after the other: A B A B. The table
has the median of the rounds with the least and the most, and the median of the ratios to the first
tree in the same round. The same folder under two names says how far to trust it.

A folder is a whole checkout (`git worktree add FOLDER COMMIT`); a process times it with the
`benchmarks/decode` of that tree. Trees are checked first; one that is wrong, dies, or takes longer
than --seconds for one part is ended and named, and the others go on. What is known is written after
each round; what a tree prints lies beside it as OUT's name and the tree's, `.log`. The exit status
is 1 where a tree failed.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.beside.show import show
from benchmarks.beside.trees import Answers, Tree, at_once, in_turn
from benchmarks.decode import options
from kvindex_adapters.files import output, write_json

PLACES = ("device", "cached", "host")
"""Of rows; `cached`: on the host, with a cache on the device."""

NEEDED = ("kvindex", "kvindex_cuda", "adapters", "benchmarks/decode")
"""Folders of a tree."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told, `trees` a folder by name; exits with words where it cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="the first: compared with")
    parser.add_argument("--tokens", nargs="+", type=int, default=[131_072])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=PLACES, default=[*PLACES])
    options.add(parser)
    parser.add_argument("--dense", action="store_true", help="dense attention, too, once a length")
    parser.add_argument(
        "--seconds", type=float, default=120, help="for one part of a tree, which is ended then"
    )
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
    options.check(parser, found, tokens=4096, batch=1, rounds=1, replays=10)
    if not found.seconds > 0:
        parser.error(f"seconds: got {found.seconds}, allowed is above 0")
    if not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and torch sees none")
    return found


def compare(trees: list[Tree], given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check all trees at once, then time them in turns, length by length."""
    begun, seconds = time.monotonic(), given.seconds
    step = dict(index=given.index, hit_rate=given.hit_rate, batch=given.batch)
    step["replays"] = given.replays
    result: dict[str, Any] = {
        "trees": {tree.name: str(tree.folder) for tree in trees},
        **step,
        "rows": given.rows,
        "points": [],
    }

    def say(text: str) -> None:
        words = f"{time.monotonic() - begun:5.0f} s  {text}"
        console.print(words, highlight=False, markup=False, soft_wrap=True)

    def keep() -> None:
        result["failed"] = {tree.name: tree.failed for tree in trees if tree.failed}
        result["seconds"] = time.monotonic() - begun
        write_json(given.json, result)

    started = at_once(trees, seconds, "start", step | {"trees": len(trees)})
    for tree in trees:
        for path in started.get(tree.name, {}).get("modules", ()):
            if not tree.failed and not Path(path).is_relative_to(tree.folder):
                tree.fail(f"got {path}, allowed is a module in {tree.folder}")
    result["machine"] = next((found["machine"] for found in started.values()), None)
    result["check"] = at_once(trees, seconds, "check")
    for name, found in result["check"].items():
        say(f"{name}: {found['check']}")
    at_once(trees, seconds, "pin", max(given.tokens))
    for tokens in given.tokens:
        keep()
        there = [tree for tree in trees if not tree.failed]
        if not there:
            break
        point: dict[str, Any] = {"tokens": tokens, "rounds": []}
        result["points"].append(point)
        if given.dense:
            point["dense"] = in_turn(there[:1], seconds, "dense", tokens).get(there[0].name, {})
        point["build"] = at_once(trees, seconds, "build", tokens)
        say(f"{tokens:,} tokens: {', '.join(point['build'])}")
        for number in range(given.rounds):
            found = in_turn(trees, seconds, "round", given.rows)
            point["rounds"].append(found)
            say(f"round {number + 1}: {_told(found, given.rows)}")
            keep()
        at_once(trees, seconds, "free")
    keep()
    return result


def _told(found: Answers, places: list[str]) -> str:
    return "; ".join(
        " ".join([name, *(f"{place} {times[place]['median_us']:.2f}" for place in places)])
        for name, times in found.items()
    )


def main(given: list[str] | None = None) -> None:
    """Compare, print, write; exits with 1 where a tree failed."""
    told, console, trees = arguments(given), Console(width=160), []

    def tell(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    try:
        for name, folder in told.trees.items():
            log = told.json.with_name(f"{told.json.stem}.{name}.log")
            trees.append(Tree(name, folder, log, tell))
        result = compare(trees, told, console)
    finally:
        for tree in trees:
            tree.end()
    show(result, console)
    if result["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
