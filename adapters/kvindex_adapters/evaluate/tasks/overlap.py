"""Metrics that measure the overlap of two texts: F1 of words, ROUGE-L and edit similarity.

Each function compares a model's answer with one or more right answers (references), and returns the
best score.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvindex_adapters.evaluate.tasks.scoring import common_length

Words = Callable[[str], list[str]]


def plain_words(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation and articles, as SQuAD does."""
    text_only = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return [word for word in text_only.split() if word not in ("a", "an", "the")]


def characters(text: str) -> list[str]:
    """Split a text into lower-case letters and digits, for languages without spaces."""
    return re.findall(r"[^\W_]", text.lower())


def f1(answer: str, answers: tuple[str, ...], words: Words = plain_words) -> float:
    """Return the F1 score of the words that an answer has in common with a reference."""

    def one(reference: str) -> float:
        given, wanted = words(answer), words(reference)
        return _f(sum((Counter(given) & Counter(wanted)).values()), given, wanted)

    return max(map(one, answers))


def rouge_l(answer: str, answers: tuple[str, ...], words: Words = str.split) -> float:
    """Return the F1 score of the longest common subsequence of words (ROUGE-L, Lin 2004).

    Upper and lower case count as equal.
    """

    def one(reference: str) -> float:
        given, wanted = words(answer.lower()), words(reference.lower())
        return _f(common_length(given, wanted), given, wanted)

    return max(map(one, answers))


def edit_similarity(answer: str, answers: tuple[str, ...]) -> float:
    """Return the similarity of the first line of code in an answer to a reference, in [0, 1].

    The similarity is `2 * c / (a + b)`, where `a` and `b` are the lengths of the two lines, and `c`
    is the length of their longest common subsequence of characters.
    """
    lines = [line for line in answer.lstrip("\n").split("\n") if not re.search("`|#|//", line)]
    line = lines[0] if lines else ""
    return max(_f(common_length(line, text), line, text) for text in answers)


def _f(shared: int, given: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the harmonic mean (F1) of `shared / len(given)` and `shared / len(wanted)`.

    Return 1 if both sequences are empty.
    """
    return 2 * shared / (len(given) + len(wanted)) if given or wanted else 1.0
