"""A long answer that must come back to its early state: a list written out, and its start again."""

from __future__ import annotations

import random
import re

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import prose
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.scoring import common_length
from kvindex_adapters.evaluate.tasks.vocabulary import NOUNS

ITEMS, AGAIN = 24, 8
"""Items of the list, and those that are written once more at the end."""

TITLE = "The list of words:"


@task("return", "a list of 24 words that begins the text, and then its first 8 words again")
def returning(draw: random.Random, pieces: int) -> Draft:
    """A numbered list, then prose; the list is asked for."""
    items = draw.sample(NOUNS.split(), ITEMS)
    listed = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    body = "\n\n".join([f"{TITLE}\n{listed}", *prose(draw, pieces)])
    text = (
        f"\n\nWrite the list of {ITEMS} words with which the text begins, and after its last word "
        f"write the first {AGAIN} words once more."
    )
    answers = (*items, *items[:AGAIN])
    return Draft(body, (Asked(text, answers, 256, in_order, begin=f"{TITLE}\n1."),))


def in_order(answer: str, answers: tuple[str, ...]) -> float:
    """The share of the words asked for that the answer gives in their order.

    Words of the list alone count, as many as are asked for; what is left out or added shifts none.
    """
    given = [word for word in re.findall(r"\w+", answer.lower()) if word in set(answers)]
    return common_length(given[: len(answers)], answers) / len(answers)
