"""Needle tasks, after RULER (Hsieh et al., 2024): facts (needles) are hidden in a long text.

Each needle says that a word, its key, has a number. The question asks for numbers. With this
wording, the small model SmolLM2-135M answers correctly with full attention.
"""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks import vocabulary
from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")

SEVERAL = 4
"""Number of values per key (`needle-multivalue`), or of keys per question (`needle-multiquery`).

Both are as in RULER.
"""


@task("needle", "the number that one sentence gives for a word")
def needle(rng: random.Random, parts: int) -> Draft:
    """Hide one needle (a sentence that gives a number for a word), and ask for the number."""
    (key, value), *_ = _pairs(rng)
    return _draft(rng, parts, [fact(key, value)], [ask(key, value)])


@task("needle-multikey", "the number of one word among eight words with numbers")
def multikey(rng: random.Random, parts: int) -> Draft:
    """Hide eight needles with different keys, and ask for the number of one key."""
    pairs = _pairs(rng)
    return _draft(rng, parts, [fact(*pair) for pair in pairs], [ask(*rng.choice(pairs))])


@task("needle-multivalue", "all four numbers of a word")
def multivalue(rng: random.Random, parts: int) -> Draft:
    """Hide four needles with the same key, and ask for all four numbers."""
    key, values = rng.choice(KEYS), tuple(number(rng) for _ in range(SEVERAL))
    begin = f"The {SEVERAL} special magic numbers for {key} that the text mentions are:"
    asked = _ask_all(key, values, begin)
    return _draft(rng, parts, [fact(key, value) for value in values], [asked])


@task("needle-multiquery", "the numbers of four words, in one question")
def multiquery(rng: random.Random, parts: int) -> Draft:
    """Hide four needles with different keys, and ask for all four numbers in one question."""
    pairs = _pairs(rng)[:SEVERAL]
    keys, values = zip(*pairs, strict=True)
    begin = f"The {SEVERAL} special magic numbers are:\n\n{keys[0]}:"
    asked = _ask_all(f"{', '.join(keys[:-1])} and {keys[-1]}", values, begin)
    return _draft(rng, parts, [fact(*pair) for pair in pairs], [asked])


@task("needle-haystack", "the number of one name in a text of many names and numbers")
def haystack(rng: random.Random, parts: int) -> Draft:
    """Make a text that consists only of needles, each with a key and a number.

    The question asks for the number of one key.
    """
    depth = rng.random()
    pairs = [(key, number(rng)) for key in vocabulary.names(rng, parts)]
    body = "\n".join(fact(*pair) for pair in pairs)
    return Draft(body, (ask(*pairs[int(depth * parts)]),))


@task("questions", "the numbers of eight words, a question for each, about a context read once")
def questions(rng: random.Random, parts: int) -> Draft:
    """Hide eight sentences, each with a different key and a number, and ask for each number."""
    pairs = _pairs(rng)
    asked = [ask(*pair) for pair in rng.sample(pairs, len(pairs))]
    return _draft(rng, parts, [fact(*pair) for pair in pairs], asked)


def number(rng: random.Random) -> str:
    """Return a random number of seven digits as text."""
    return str(rng.randint(10**6, 10**7 - 1))


def fact(key: str, value: str) -> str:
    """Return the sentence that is hidden as a needle."""
    return f"The special magic number for {key} is {value}."


def ask(key: str, value: str) -> Asked:
    """Make a question that asks for the number (`value`) of the word `key`.

    The prompt ends with the first words of the answer.
    """
    about = f"special magic number for {key} that the text mentions"
    return Asked(f"\n\nWhat is the {about}?", (value,), 16, begin=f"The {about} is")


def _ask_all(keys: str, values: tuple[str, ...], begin: str) -> Asked:
    text = f"\n\nWhat are the {SEVERAL} special magic numbers for {keys} that the text mentions?"
    return Asked(text, values, max_new_tokens=64, begin=begin)


def _pairs(rng: random.Random) -> list[tuple[str, str]]:
    return [(key, number(rng)) for key in rng.sample(KEYS, len(KEYS))]


def _draft(rng: random.Random, parts: int, facts: list[str], asked: list[Asked]) -> Draft:
    return Draft("\n\n".join(hidden(rng, prose(rng, parts), facts)), tuple(asked))
