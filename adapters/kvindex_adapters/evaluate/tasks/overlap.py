"""Metrics of published benchmarks that measure overlap: F1 of words, ROUGE-L, edit similarity.

If there are several references, the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvindex_adapters.evaluate.tasks.scoring import common_length

Words = Callable[[str], list[str]]


def plain_words(text: str) -> list[str]:
    """Return words in lower case, without punctuation and articles (as SQuAD compares them)."""
    text_only = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return [word for word in text_only.split() if word not in ("a", "an", "the")]


def characters(text: str) -> list[str]:
    """Return letters and digits in lower case, for languages without spaces."""
    return re.findall(r"[^\W_]", text.lower())


def f1(answer: str, answers: tuple[str, ...], words: Words = plain_words) -> float:
    """Return the F1 score of the words that an answer shares with a reference."""

    def one(reference: str) -> float:
        given, wanted = words(answer), words(reference)
        return _f(sum((Counter(given) & Counter(wanted)).values()), given, wanted)

    return max(map(one, answers))


def rouge_l(answer: str, answers: tuple[str, ...], words: Words = str.split) -> float:
    """Return F1 of the longest common subsequence of words, ignoring case (ROUGE-L, Lin 2004)."""

    def one(reference: str) -> float:
        given, wanted = words(answer.lower()), words(reference.lower())
        return _f(common_length(given, wanted), given, wanted)

    return max(map(one, answers))


def edit_similarity(answer: str, answers: tuple[str, ...]) -> float:
    """Return how similar the first line of code in the answer is to a reference.

    The similarity is twice the length of the longest common subsequence of characters, divided by
    the total length of both lines.
    """
    lines = [line for line in answer.lstrip("\n").split("\n") if not re.search("`|#|//", line)]
    line = lines[0] if lines else ""
    return max(_f(common_length(line, text), line, text) for text in answers)


def _f(shared: int, given: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the harmonic mean of `shared / len(given)` and `shared / len(wanted)`; 1 if both are
    empty."""
    return 2 * shared / (len(given) + len(wanted)) if given or wanted else 1.0
