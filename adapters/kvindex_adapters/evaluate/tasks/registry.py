"""Tasks by name. Each file of this folder registers its own tasks."""

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
from kvindex_adapters.evaluate.tasks.draft import Draft, encode, longest, most_parts
from kvindex_adapters.evaluate.tasks.instance import Instance

Write = Callable[[random.Random, int], Draft]
"""Function of a random generator and a number of parts of filler text. With the same seed, a
larger number gives a longer text. Questions and answers may change with the number."""

Missing = Callable[[], str | None]
"""Returns why a task cannot be made, for example a package that is not installed, or None."""


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        name: Name of the task.
        asks: What the task asks for, in one line.
        make: Function of a tokenizer, a number of tokens and a seed that makes an instance.
        missing: See `Missing`.
    """

    name: str
    asks: str
    make: Callable[[Any, int, int], Instance]
    missing: Missing = lambda: None


_TASKS: dict[str, Task] = {}
_FAMILIES: dict[str, Callable[[str], Task]] = {}


def register(task: Task) -> None:
    """Register a task by its name. Raise ValueError if the name is taken."""
    if task.name in _TASKS:
        raise ValueError(f"task: got {task.name!r} twice, allowed is a name of its own")
    _TASKS[task.name] = task


def task(name: str, asks: str, *, least: int = 1) -> Callable[[Write], Write]:
    """Register a function that writes drafts. Texts are made as long as the number of tokens
    allows.

    Args:
        name: Name of the task.
        asks: What the task asks for, in one line.
        least: Number of parts of the shortest text.
    """

    def decorate(write: Write) -> Write:
        def make(tokenizer: Any, tokens: int, seed: int) -> Instance:
            def draft(parts: int) -> Draft:
                return write(random.Random(seed), parts)

            def length(parts: int) -> int:
                return longest(tokenizer, draft(parts))

            parts = most_parts(length, tokens, least=least)
            return encode(tokenizer, draft(parts), task=name, seed=seed)

        register(Task(name, asks, make))
        return write

    return decorate


def family(prefix: str) -> Callable[[Callable[[str], Task]], Callable[[str], Task]]:
    """Register a function that makes the tasks named `prefix:rest` from `rest`."""

    def decorate(find: Callable[[str], Task]) -> Callable[[str], Task]:
        _FAMILIES[prefix] = find
        return find

    return decorate


def names() -> list[str]:
    """Return the names of all tasks, sorted, including those whose package is missing.

    Local files can be used as tasks, too, with the name `file:PATH`.
    """
    return sorted(_known())


def available(name: str) -> str | None:
    """Return None, or why the task cannot be made here.

    Args:
        name: Name of a task.

    Raises:
        ValueError: The name is unknown.
    """
    return _get(name).missing()


def describe(name: str) -> str:
    """Return what a task asks for, in one line.

    Args:
        name: Name of a task.

    Raises:
        ValueError: The name is unknown.
    """
    return _get(name).asks


def make(name: str, tokenizer: Any, *, tokens: int, seed: int) -> Instance:
    """Make an instance of at most `tokens` tokens, not counting answers.

    The same arguments give the same instance.

    Args:
        name: Name of the task.
        tokenizer: A tokenizer of transformers.
        tokens: Largest length of the prompt.
        seed: Seed of the random numbers.

    Returns:
        The instance.

    Raises:
        ValueError: The name is unknown, or there are too few tokens.
        ModuleNotFoundError: The task needs a package that is not installed.
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
