"""Tasks by name, found by scanning this folder: a file beside this one registers its own."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvindex.core import check
from kvindex.core.config import unknown
from kvindex_adapters.evaluate.tasks.draft import Draft, encode, longest, most_pieces
from kvindex_adapters.evaluate.tasks.instance import Instance

Write = Callable[[random.Random, int], Draft]
"""Called with a generator and a number of pieces of haystack. With one seed a larger number gives
a longer text; questions and answers may change with it."""

Missing = Callable[[], str | None]
"""What keeps a task from being made (a package that is not installed), or None."""


@dataclass(frozen=True)
class Task:
    """A task: what it asks, in a line; how it is made; what it lacks here.

    make: called with a tokenizer, the number of tokens and the seed.
    """

    name: str
    asks: str
    make: Callable[[Any, int, int], Instance]
    missing: Missing = lambda: None


_TASKS: dict[str, Task] = {}
_FAMILIES: dict[str, Callable[[str], Task]] = {}


def register(task: Task) -> None:
    """Make a task known by its name. Raises ValueError for a name that another has."""
    if task.name in _TASKS:
        raise ValueError(f"task: got {task.name!r} twice, allowed is a name of its own")
    _TASKS[task.name] = task


def task(name: str, asks: str, *, least: int = 1) -> Callable[[Write], Write]:
    """Register a function that writes drafts; the text is as long as the tokens allow.

    asks: what the task asks, in a line; least: pieces of the shortest text.
    """

    def decorate(write: Write) -> Write:
        def make(tokenizer: Any, tokens: int, seed: int) -> Instance:
            def draft(pieces: int) -> Draft:
                return write(random.Random(seed), pieces)

            def length(pieces: int) -> int:
                return longest(tokenizer, draft(pieces))

            pieces = most_pieces(length, tokens, least=least)
            return encode(tokenizer, draft(pieces), task=name, seed=seed)

        register(Task(name, asks, make))
        return write

    return decorate


def family(prefix: str) -> Callable[[Callable[[str], Task]], Callable[[str], Task]]:
    """Register a function that gives the task of a name `prefix:rest` from the rest."""

    def decorate(find: Callable[[str], Task]) -> Callable[[str], Task]:
        _FAMILIES[prefix] = find
        return find

    return decorate


def names() -> list[str]:
    """The names of all tasks, sorted; those whose package is missing included.

    There are also `file:PATH`, the tasks of local files.
    """
    return sorted(_known())


def available(name: str) -> str | None:
    """None, or what keeps the task from being made here. Raises ValueError for an unknown name."""
    return _get(name).missing()


def describe(name: str) -> str:
    """What the task asks, in a line. Raises ValueError for an unknown name."""
    return _get(name).asks


def make(name: str, tokenizer: Any, *, tokens: int, seed: int) -> Instance:
    """An instance of at most `tokens` tokens, answers not counted: the same for the same arguments.

    Raises ValueError for an unknown name or too few tokens, ModuleNotFoundError for a task whose
    package is missing.
    """
    found = _get(name)
    check.at_least("tokens", tokens, 1)
    if (reason := found.missing()) is not None:
        raise ModuleNotFoundError(f"task: got {name!r}, {reason}")
    return found.make(tokenizer, tokens, check.seed(seed))


def _get(name: str) -> Task:
    known = _known()
    prefix, colon, rest = check.text("task", name).partition(":")
    if colon and prefix in _FAMILIES:
        return _FAMILIES[prefix](rest)
    if name not in known:
        raise ValueError(unknown("task", name, known))
    return known[name]


def _known() -> dict[str, Task]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return _TASKS
