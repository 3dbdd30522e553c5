"""Random words for tasks: names of an adjective and a noun, invented words, variables, UUIDs."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from itertools import islice

ADJECTIVES = """
amber ancient bitter bold brave bright broken calm careful clever cold crimson curious damp
distant dusty eager early faint fancy fierce gentle giant golden grand green hidden hollow honest
humble hungry icy idle jolly keen kind late lazy little lonely loud lucky mellow mild modest
narrow noble odd pale patient plain polite proud quick quiet rapid rare rough rusty secret sharp
shy silent small
"""
"""The 64 adjectives of names. With the 64 nouns they give 4,096 names."""

NOUNS = """
anchor apple arrow badge barn basket beacon bell bottle branch bridge bucket button cabin candle
canyon carpet castle cherry circle cloud cottage desert drum engine falcon feather fence ferry
flute forest fountain garden hammer island jacket kettle ladder lake lemon market mirror mountain
needle ocean oven paper pencil pepper planet pocket river rocket saddle school shadow spoon stable
statue temple tunnel valley wagon window
"""
"""The 64 nouns of names."""


def names(rng: random.Random, count: int) -> list[str]:
    """Return `count` different names of an adjective and a noun, such as "brave lemon".

    All names after the first 4,096 have two adjectives.
    """
    adjectives = ADJECTIVES.split()
    pairs = [f"{adjective} {noun}" for adjective in adjectives for noun in NOUNS.split()]
    rng.shuffle(pairs)
    more = (f"{first} {pair}" for first in adjectives for pair in pairs)
    return [*pairs[:count], *islice(more, max(count - len(pairs), 0))]


def coined(rng: random.Random, count: int) -> list[str]:
    """Return `count` different invented words of three syllables. At most 421,875 exist."""
    return _different(_coined(rng), count)


def variables(rng: random.Random, count: int) -> list[str]:
    """Return `count` different variable names of five capital letters."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return _different(("".join(rng.choices(letters, k=5)) for _ in iter(int, 1)), count)


def uuids(rng: random.Random, count: int) -> list[str]:
    """Return `count` random UUIDs (version 4)."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _coined(rng: random.Random) -> Iterator[str]:
    syllables = [first + second for first in "bdfgklmnprstvwz" for second in "aeiou"]
    while True:
        yield "".join(rng.choices(syllables, k=3))


def _different(found: Iterator[str], count: int) -> list[str]:
    different: dict[str, None] = {}
    while len(different) < count:
        different[next(found)] = None
    return list(different)
