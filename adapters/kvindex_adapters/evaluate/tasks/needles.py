"""Needles: facts hidden in a long text, and questions about them, after RULER (Hsieh et al., 2024).

With this wording, SmolLM2-135M finds the answers with full attention.
"""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks import vocabulary
from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")

SEVERAL = 4
"""Number of values per key, or of keys per question, as in RULER."""


@task("needle", "the number that one sentence gives for a word")
def needle(rng: random.Random, parts: int) -> Draft:
    """Hide one needle, and ask for it."""
    (key, value), *_ = _pairs(rng)
    return _draft(rng, parts, [fact(key, value)], [ask(key, value)])


@task("needle-multikey", "the number of one word among eight words with numbers")
def multikey(rng: random.Random, parts: int) -> Draft:
    """Hide eight needles with different keys, and ask for one."""
    pairs = _pairs(rng)
    return _draft(rng, parts, [fact(*pair) for pair in pairs], [ask(*rng.choice(pairs))])


@task("needle-multivalue", "all four numbers of a word")
def multivalue(rng: random.Random, parts: int) -> Draft:
    """Hide four needles with the same key, and ask for all."""
    key, values = rng.choice(KEYS), tuple(number(rng) for _ in range(SEVERAL))
    begin = f"The {SEVERAL} special magic numbers for {key} that the text mentions are:"
    asked = _ask_all(key, values, begin)
    return _draft(rng, parts, [fact(key, value) for value in values], [asked])


@task("needle-multiquery", "the numbers of four words, in one question")
def multiquery(rng: random.Random, parts: int) -> Draft:
    """Hide four needles with different keys, and ask for all."""
    pairs = _pairs(rng)[:SEVERAL]
    keys, values = zip(*pairs, strict=True)
    begin = f"The {SEVERAL} special magic numbers are:\n\n{keys[0]}:"
    asked = _ask_all(f"{', '.join(keys[:-1])} and {keys[-1]}", values, begin)
    return _draft(rng, parts, [fact(*pair) for pair in pairs], [asked])


@task("needle-haystack", "the number of one name in a text of such sentences only")
def haystack(rng: random.Random, parts: int) -> Draft:
    """Make a text that consists of needles only, and ask for one."""
    depth = rng.random()
    pairs = [(key, number(rng)) for key in vocabulary.names(rng, parts)]
    body = "\n".join(fact(*pair) for pair in pairs)
    return Draft(body, (ask(*pairs[int(depth * parts)]),))


@task("questions", "the numbers of eight words, a question for each, about a context read once")
def questions(rng: random.Random, parts: int) -> Draft:
    """Hide eight needles with different keys, and ask a question for each."""
    pairs = _pairs(rng)
    asked = [ask(*pair) for pair in rng.sample(pairs, len(pairs))]
    return _draft(rng, parts, [fact(*pair) for pair in pairs], asked)


def number(rng: random.Random) -> str:
    """Return a random number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def fact(key: str, value: str) -> str:
    """Return the sentence of a needle."""
    return f"The special magic number for {key} is {value}."


def ask(key: str, value: str) -> Asked:
    """Return the question about one needle, and the beginning of the answer."""
    about = f"special magic number for {key} that the text mentions"
    return Asked(f"\n\nWhat is the {about}?", (value,), 16, begin=f"The {about} is")


def _ask_all(keys: str, values: tuple[str, ...], begin: str) -> Asked:
    text = f"\n\nWhat are the {SEVERAL} special magic numbers for {keys} that the text mentions?"
    return Asked(text, values, max_new_tokens=64, begin=begin)


def _pairs(rng: random.Random) -> list[tuple[str, str]]:
    return [(key, number(rng)) for key in rng.sample(KEYS, len(KEYS))]


def _draft(rng: random.Random, parts: int, facts: list[str], asked: list[Asked]) -> Draft:
    return Draft("\n\n".join(hidden(rng, prose(rng, parts), facts)), tuple(asked))
