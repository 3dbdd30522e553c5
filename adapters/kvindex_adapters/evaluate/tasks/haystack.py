"""Haystacks: paragraphs of prose in random order, and facts hidden between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from kvindex_adapters.evaluate import texts


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of Python's reference."""
    return tuple(texts.python_reference())


def prose(draw: random.Random, count: int) -> list[str]:
    """Paragraphs of Python's reference in random order, again and again where `count` is larger."""
    found: list[str] = []
    while len(found) < count:
        found += draw.sample(paragraphs(), len(paragraphs()))
    return found[:count]


def hidden(draw: random.Random, pieces: Sequence[str], facts: Sequence[str]) -> list[str]:
    """The pieces with the facts between them, in order, each at a random depth."""
    places = sorted(round(draw.random() * len(pieces)) for _ in facts)
    found: list[str] = []
    for start, end, fact in zip([0, *places], places, facts, strict=False):
        found += [*pieces[start:end], fact]
    return found + list(pieces[places[-1] :])
