"""Needles: facts hidden in a long text, and questions about them, after RULER (Hsieh et al., 2024).

In words that SmolLM2-135M answers with full attention.
"""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks import vocabulary
from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")

SEVERAL = 4
"""Values of a key, or keys of a question (as in RULER)."""


@task("needle", "the number that one sentence gives for a word")
def needle(draw: random.Random, pieces: int) -> Draft:
    """One needle."""
    (key, value), *_ = _pairs(draw)
    return _draft(draw, pieces, [fact(key, value)], [ask(key, value)])


@task("needle-multikey", "the number of one word, where eight words have one")
def multikey(draw: random.Random, pieces: int) -> Draft:
    """Eight needles with a key each, one of them asked for."""
    pairs = _pairs(draw)
    return _draft(draw, pieces, [fact(*pair) for pair in pairs], [ask(*draw.choice(pairs))])


@task("needle-multivalue", "all four numbers of a word")
def multivalue(draw: random.Random, pieces: int) -> Draft:
    """Four needles with one key, all of them asked for."""
    key, values = draw.choice(KEYS), tuple(number(draw) for _ in range(SEVERAL))
    text = f"\n\nWhat are all the special magic numbers for {key} that the text mentions?"
    asked = Asked(text, values, max_new_tokens=96)
    return _draft(draw, pieces, [fact(key, value) for value in values], [asked])


@task("needle-multiquery", "the numbers of four words, in one question")
def multiquery(draw: random.Random, pieces: int) -> Draft:
    """Four needles with a key each, all of them asked for."""
    pairs = _pairs(draw)[:SEVERAL]
    *keys, last = (key for key, _ in pairs)
    listed = f"{', '.join(keys)} and {last}"
    text = f"\n\nWhat are the special magic numbers for {listed} that the text mentions?"
    asked = Asked(text, tuple(value for _, value in pairs), max_new_tokens=96)
    return _draft(draw, pieces, [fact(*pair) for pair in pairs], [asked])


@task("needle-haystack", "the number of one name, where every sentence gives a name's number")
def haystack(draw: random.Random, pieces: int) -> Draft:
    """A haystack of needles, one of them asked for."""
    depth = draw.random()
    pairs = [(key, number(draw)) for key in vocabulary.names(draw, pieces)]
    body = "\n".join(fact(*pair) for pair in pairs)
    return Draft(body, (ask(*pairs[int(depth * pieces)]),))


@task("questions", "the numbers of eight words, a question for each, about a context read once")
def questions(draw: random.Random, pieces: int) -> Draft:
    """Eight needles with a key each, and eight questions."""
    pairs = _pairs(draw)
    asked = [ask(*pair) for pair in draw.sample(pairs, len(pairs))]
    return _draft(draw, pieces, [fact(*pair) for pair in pairs], asked)


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


def _pairs(draw: random.Random) -> list[tuple[str, str]]:
    return [(key, number(draw)) for key in draw.sample(KEYS, len(KEYS))]


def _draft(draw: random.Random, pieces: int, facts: list[str], asked: list[Asked]) -> Draft:
    return Draft("\n\n".join(hidden(draw, prose(draw, pieces), facts)), tuple(asked))
