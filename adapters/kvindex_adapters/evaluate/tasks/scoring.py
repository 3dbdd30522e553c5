"""Metrics: the share of an answer that is right, in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile


def contains(answer: str, answers: tuple[str, ...]) -> float:
    """The share of `answers` that the answer contains, whatever their case (as RULER scores)."""
    return sum(text.lower() in answer.lower() for text in answers) / len(answers)


def contains_any(answer: str, answers: tuple[str, ...]) -> float:
    """Whether the answer contains one of `answers`, whatever its case."""
    return float(any(text.lower() in answer.lower() for text in answers))


def begins_with(answer: str, answers: tuple[str, ...]) -> float:
    """The share of the first reference's words that the answer gives before its first error."""
    wanted = answers[0].split()
    pairs = zip(answer.split(), wanted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(wanted)


def is_settled(
    metric: Callable[[str, tuple[str, ...]], float], answer: str, answers: tuple[str, ...]
) -> bool:
    """Whether no token that follows makes an answer better or worse; False where that is not known.

    What an answer contains no token takes away; an error in a word that has ended none mends.
    """
    if metric in (contains, contains_any):
        return metric(answer, answers) == 1
    if metric is not begins_with or not answer:
        return False
    ended = answer.split() if answer[-1].isspace() else answer.split()[:-1]
    wanted = answers[0].split()
    return len(ended) >= len(wanted) or ended != wanted[: len(ended)]


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence (a bit for each place, Hyyrö 2004)."""
    places: dict[str, int] = {}
    for place, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << place
    whole = (1 << len(first)) - 1
    unmatched = whole
    for item in second:
        matched = unmatched & places.get(item, 0)
        unmatched = (unmatched + matched | unmatched - matched) & whole
    return len(first) - unmatched.bit_count()
