"""Haystacks: paragraphs of prose in random order, and facts hidden between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from kvindex_adapters.evaluate import texts

_prose = cache(texts.python_reference)


def prose(draw: random.Random, count: int) -> list[str]:
    """Paragraphs of Python's reference in random order, again and again where `count` is larger."""
    found: list[str] = []
    while len(found) < count:
        found += draw.sample(_prose(), len(_prose()))
    return found[:count]


def hidden(draw: random.Random, pieces: Sequence[str], facts: Sequence[str]) -> list[str]:
    """The pieces with the facts between them, in order, each at a random depth."""
    depths = sorted(draw.random() for _ in facts)
    for fact, depth in zip(reversed(facts), reversed(depths), strict=True):
        at = round(depth * len(pieces))
        pieces = [*pieces[:at], fact, *pieces[at:]]
    return list(pieces)
