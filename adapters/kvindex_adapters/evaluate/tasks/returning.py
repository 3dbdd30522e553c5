"""A task with a long answer: repeat a list of words, and then repeat its first words again."""

from __future__ import annotations

import random
import re

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import prose
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.scoring import common_length
from kvindex_adapters.evaluate.tasks.vocabulary import NOUNS

ITEMS, AGAIN = 24, 8
"""`ITEMS`: number of words in the list. `AGAIN`: number of words that the answer repeats."""

TITLE = "The list of words:"


@task("return", "a list of 24 words that begins the text, and then its first 8 words again")
def returning(rng: random.Random, parts: int) -> Draft:
    """Make a text that begins with a numbered list of words, and ask for the list."""
    items = rng.sample(NOUNS.split(), ITEMS)
    listed = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    body = "\n\n".join([f"{TITLE}\n{listed}", *prose(rng, parts)])
    text = (
        f"\n\nWrite the list of {ITEMS} words with which the text begins, and after its last word "
        f"write the first {AGAIN} words once more."
    )
    answers = (*items, *items[:AGAIN])
    return Draft(body, (Asked(text, answers, 256, in_order, begin=f"{TITLE}\n1."),))


def in_order(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of the right words that the answer gives in the right order.

    Words of the answer that are not among the right words are ignored. If the answer has more right
    words than `answers`, the words at its end are ignored. An omitted or additional word does not
    make the words after it wrong.
    """
    given = [word for word in re.findall(r"\w+", answer.lower()) if word in set(answers)]
    return common_length(given[: len(answers)], answers) / len(answers)
