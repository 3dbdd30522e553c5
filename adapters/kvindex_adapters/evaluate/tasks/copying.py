"""Copying: the model must continue a quotation from a long text, word for word."""

from __future__ import annotations

import random
from collections import Counter

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, paragraphs, prose
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.scoring import begins_with

OPENING, COPIED = 8, 24
"""`OPENING`: number of words of the passage that the question quotes.

`COPIED`: number of words after these that the answer must contain.
"""


@task("copy", "the next 24 words of a passage whose first 8 are given")
def copy(rng: random.Random, parts: int) -> Draft:
    """Hide a passage in a text, quote its first words, and ask for the words that follow them."""
    passage = rng.choice(_passages())
    words = passage.split()
    opening, answer = " ".join(words[:OPENING]), " ".join(words[OPENING : OPENING + COPIED])
    text = "\n\nQuote the passage of the text that begins with the following words."
    asked = Asked(text, (answer,), 96, begins_with, begin=opening)
    return Draft("\n\n".join(hidden(rng, prose(rng, parts), [passage])), (asked,))


def _passages() -> list[str]:
    """Return paragraphs that a question can ask for: they are long enough, and no other paragraph
    begins with the same words."""
    openings = Counter(" ".join(text.split()[:OPENING]) for text in paragraphs())
    return [
        text
        for text in paragraphs()
        if len(words := text.split()) >= OPENING + COPIED
        and openings[" ".join(words[:OPENING])] == 1
    ]
