"""Make long texts (haystacks): paragraphs in random order, with facts hidden between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from kvindex_adapters.evaluate import texts


@cache
def paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of the Python language reference."""
    return tuple(texts.python_reference())


def prose(rng: random.Random, count: int) -> list[str]:
    """Return `count` paragraphs of the Python language reference in random order.

    Paragraphs are repeated if `count` is larger than the number of paragraphs.
    """
    found: list[str] = []
    while len(found) < count:
        found += rng.sample(paragraphs(), len(paragraphs()))
    return found[:count]


def hidden(rng: random.Random, parts: Sequence[str], facts: Sequence[str]) -> list[str]:
    """Insert facts at random positions between the parts of a text. The facts keep their order."""
    places = sorted(round(rng.random() * len(parts)) for _ in facts)
    found: list[str] = []
    for start, end, fact in zip([0, *places], places, facts, strict=False):
        found += [*parts[start:end], fact]
    return found + list(parts[places[-1] :])
