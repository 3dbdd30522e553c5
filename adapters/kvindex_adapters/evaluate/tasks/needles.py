"""Needles: facts hidden in a long text, and questions about them, after RULER (Hsieh et al., 2024).

In words that SmolLM2-135M answers with full attention.
"""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")


@task("needle", "the number that one sentence gives for a word")
def needle(draw: random.Random, pieces: int) -> Draft:
    """One needle."""
    key, value = draw.choice(KEYS), number(draw)
    body = hidden(draw, prose(draw, pieces), [fact(key, value)])
    return Draft("\n\n".join(body), (ask(key, value),))


def number(draw: random.Random) -> str:
    """A number of seven digits."""
    return str(draw.randint(10**6, 10**7 - 1))


def fact(key: str, value: str) -> str:
    """The sentence of a needle."""
    return f"The special magic number for {key} is {value}."


def ask(key: str, value: str) -> Asked:
    """The question about one needle."""
    text = f"\n\nWhat is the special magic number for {key} that the text mentions?"
    return Asked(text, (value,))
