"""Register tasks by name, and make their prompts. The modules of this folder register tasks."""

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
"""Function that writes a prompt from a random generator and a number of parts of filler text.

A part is, for example, a paragraph. With the same seed, more parts give a longer text. The question
and its answer may depend on the number of parts.
"""

Missing = Callable[[], str | None]
"""Function that returns the reason why a task is not available, or None if it is available.

A reason is, for example, a package that is not installed.
"""


@dataclass(frozen=True)
class Task:
    """A task for a language model, from which prompts of any length can be made.

    Args:
        name: Name of the task.
        asks: Description of what the task asks for, in one line.
        make: Function that makes a prompt from a tokenizer, a number of tokens and a seed.
        missing: Function that returns the reason why the task is not available, or None.
    """

    name: str
    asks: str
    make: Callable[[Any, int, int], Instance]
    missing: Missing = lambda: None


_TASKS: dict[str, Task] = {}
_FAMILIES: dict[str, Callable[[str], Task]] = {}


def register(task: Task) -> None:
    """Register a task by its name. Raise ValueError if another task has the same name."""
    if task.name in _TASKS:
        raise ValueError(f"task: got the name {task.name!r} twice, allowed are different names")
    _TASKS[task.name] = task


def task(name: str, asks: str, *, least: int = 1) -> Callable[[Write], Write]:
    """Return a decorator that registers a function as a task.

    The function gets a random generator and a number of parts of filler text (such as paragraphs),
    and writes a prompt with this number of parts. The task calls the function with the largest
    number of parts for which the prompt is not too long.

    Args:
        name: Name of the task.
        asks: Description of what the task asks for, in one line.
        least: Smallest allowed number of parts.
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
    """Return a decorator that registers a function for all task names `prefix:rest`.

    The function takes `rest`, and returns the task.
    """

    def decorate(find: Callable[[str], Task]) -> Callable[[str], Task]:
        _FAMILIES[prefix] = find
        return find

    return decorate


def names() -> list[str]:
    """Return the names of all tasks, sorted. Tasks whose package is not installed are included.

    In addition, `file:PATH` is the name of a task whose prompts are in a local file.
    """
    return sorted(_known())


def available(name: str) -> str | None:
    """Return the reason why a task is not available, or None if it is available.

    Args:
        name: Name of the task.

    Raises:
        ValueError: The name is unknown.
    """
    return _get(name).missing()


def describe(name: str) -> str:
    """Return a description of what a task asks for, in one line.

    Args:
        name: Name of the task.

    Raises:
        ValueError: The name is unknown.
    """
    return _get(name).asks


def make(name: str, tokenizer: Any, *, tokens: int, seed: int) -> Instance:
    """Make a prompt of a task. The same arguments give the same prompt.

    Args:
        name: Name of the task.
        tokenizer: A tokenizer of transformers.
        tokens: Maximum length of the prompt in tokens, without the answer.
        seed: Seed of the random numbers.

    Returns:
        The prompt as token ids, with its questions and right answers.

    Raises:
        ValueError: There is no such task, or `tokens` is too small for its shortest prompt.
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
