"""Answers to the same prompts in several ways: names of ways, results in files, and summaries.

A *way* is how a prompt is read and how its answer is generated, for example with full attention.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvindex.core.config import split_spec, unknown
from kvindex.layer.arguments import AUTO_ERROR
from kvindex.registry import usable
from kvindex_adapters.evaluate.compare.statistics import bootstrap

ROWS = 100
"""Number of rows of the way `sparse`."""

SPARSE = "sparse:"
"""Beginning of the names of ways that read the prompt with sparse attention."""

Result = dict[str, Any]

Cell = dict[str, Any]
"""The answers to one prompt: its `task`, number of `tokens` and `seed`, and the fields `BY_WAY`."""

NUMBERS = ("scores", "rows", "ceiling")
"""Fields of a cell that contain numbers by the names of ways: the score of the answer; the mean
number of rows that decode steps have retrieved per KV head, if any has searched; and for
`k="auto"`, the fraction of KV heads and steps with the largest number of rows."""

BY_WAY = (*NUMBERS, "seconds")
"""All fields of a cell that contain something by the names of ways. `seconds` contains the seconds
of the parts of a way, by the names of the parts."""

Key = tuple[str, int, int]
"""A prompt: its task, its number of tokens, and its seed."""


@dataclass(frozen=True)
class Way:
    """How a prompt is read and answered.

    Args:
        k: Number of rows per KV head that a search retrieves, or "auto"; None for full attention.
        error: Allowed error with `k="auto"`, otherwise None.
        index: Name and options of the index; `{k}` in it stands for `k`, and `{5k/2}` for 2.5 times
            as much. None for the index of the command line.
        sparse: Whether the prompt is read with sparse attention.
    """

    k: int | str | None = None
    error: float | None = None
    index: str | None = None
    sparse: bool = False

    def __str__(self) -> str:
        """Return the name, from which `way` makes an equal object."""
        if self.k is None:
            name = "full"
        elif self.error is not None:
            name = f"auto:{self.error!r}"
        else:
            name = f"k={self.k}" if self.index is None else str(self.k)
        if self.index is not None:
            name = f"{self.index}@{name}"
        return SPARSE * self.sparse + name

    @property
    def described(self) -> str:
        """Description for tables."""
        name = "full attention" if self.k is None else f"`k={self.k}`"
        if self.error is not None:
            name = f'`k="auto"`, `error={self.error:g}`'
        if self.index is not None:
            name = f"`{self.index}`, {name}"
        return name + ", after a sparse prompt" * self.sparse


def way(text: str) -> Way:
    """Parse the name of a way.

    Args:
        text: `full`, `k=N`, `auto` or `auto:ERROR`, `INDEX@N`, `INDEX@auto:ERROR`, or `sparse:` and
            one of these. `sparse` means `sparse:k=100`.

    Raises:
        ArgumentTypeError: There is no such way, or no such index.
    """
    sparse = f"{text}:".startswith(SPARSE)
    name = text.removeprefix(SPARSE) if text != SPARSE[:-1] else f"k={ROWS}"
    index, at, rows = name.rpartition("@")
    kind, _, number = name.replace("k=", "k:", 1).partition(":")
    other_index = at and index and index.split("=")[0] not in ("full", "auto", "k")
    if other_index:
        _check_index(text, index)
    try:
        if other_index:
            other = way(rows if rows.startswith("auto") else f"k={rows}")
            return replace(other, index=index, sparse=sparse)
        if kind == "full" and not number:
            return Way(sparse=sparse)
        if kind == "auto" and 0 < float(number or AUTO_ERROR) < math.inf:
            return Way("auto", float(number or AUTO_ERROR), sparse=sparse)
        if kind == "k" and int(number) > 0:
            return Way(int(number), sparse=sparse)
    except (ValueError, ArgumentTypeError):
        pass  # a number is no number
    raise ArgumentTypeError(
        f"ways: got {text!r}, allowed is full, k=N, auto, auto:ERROR, INDEX@N, "
        "INDEX@auto:ERROR, and sparse: followed by one of these"
    )


def _check_index(text: str, index: str) -> None:
    """Raise ArgumentTypeError for a way `text` whose index, with its options, does not exist."""
    try:
        name, _ = split_spec(index.partition("+")[0])
        if ":" not in name and name not in (known := usable()):
            raise ValueError(unknown("index", name, known))
    except ValueError as error:
        raise ArgumentTypeError(f"ways: got {text!r}, but {error}") from error


def part(text: str) -> tuple[int, int]:
    """Parse `I/N`: part `I` of `N` parts. Raise ArgumentTypeError if there is no such part."""
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        number, count = 0, 0
    if not 0 <= number < count:
        raise ArgumentTypeError(f"part: got {text}, allowed is 0/N to N-1/N")
    return number, count


def key(cell: Cell) -> Key:
    """Return the prompt of a cell."""
    return cell["task"], cell["tokens"], cell["seed"]


def merged(cells: Iterable[Cell]) -> dict[Key, Cell]:
    """Return one cell for each prompt.

    Several cells of a prompt become one, with the answers of all their ways. If several have an
    answer of the same way, the first is kept.
    """
    found: dict[Key, Cell] = {}
    for cell in cells:
        same = found.setdefault(key(cell), {**cell, **{name: {} for name in BY_WAY}})
        for name in BY_WAY:
            new = cell.get(name, {}).items()
            same[name] |= {way: number for way, number in new if way not in same[name]}
    return found


def measured(cells: Sequence[Cell], order: Sequence[str] = ()) -> list[str]:
    """Return the names of the ways of all cells: first those in `order`, then the others."""
    names = dict.fromkeys(name for cell in cells for name in cell["scores"])
    return [*dict.fromkeys([*(name for name in order if name in names), *names])]


def summary(cells: Sequence[Cell], ways: Sequence[str]) -> Iterator[Result]:
    """Yield a line for each length and way, then for all lengths together, and for each task.

    A line has the mean score, and the means of rows and ceiling over prompts, or None if they are
    not known. All ways but the first also have the mean difference from the first, over prompts
    with answers of both, and its 95% interval (a bootstrap over prompts). With several differences,
    `low_all` and `high_all` are the interval corrected for their number (Bonferroni): all of these
    intervals are right with a probability of at least 95%.

    Args:
        cells: Cells of different prompts.
        ways: Names of ways.
    """
    lengths, tasks = (sorted({cell[name] for cell in cells}) for name in ("tokens", "task"))
    scopes = [(tokens, None) for tokens in (*lengths, None)]
    scopes += [(None, task) for task in tasks if len(tasks) > 1]
    for tokens, task in scopes:
        some = [one for one in cells if tokens in (None, one["tokens"])]
        some = [one for one in some if task in (None, one["task"])]
        for name in ways:
            having = [cell for cell in some if name in cell["scores"]]
            if not having:
                continue
            score, rows, ceiling = (_mean(having, field, name) for field in NUMBERS)
            line: Result = dict(tokens=tokens, task=task, way=name, prompts=len(having))
            line |= dict(score=score, rows=rows, ceiling=ceiling)
            pairs = [
                one["scores"] for one in having if name != ways[0] and ways[0] in one["scores"]
            ]
            if off := [scores[name] - scores[ways[0]] for scores in pairs]:
                low, high = bootstrap(off)
                line |= dict(difference=sum(off) / len(off), low=low, high=high, pairs=len(off))
                if len(ways) > 2:
                    low, high = bootstrap(off, comparisons=len(ways) - 1)
                    line |= dict(low_all=low, high_all=high)
            yield line


def _mean(cells: Sequence[Cell], field: str, way: str) -> float | None:
    """Return the mean of a field of `NUMBERS` over the cells that have it for a way, or None."""
    known = [cell[field][way] for cell in cells if way in cell[field]]
    return sum(known) / len(known) if known else None
