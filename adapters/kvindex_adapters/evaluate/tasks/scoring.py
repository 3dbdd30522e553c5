"""Metrics: functions that return which fraction of an answer is right, in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile


def contains(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of `answers` that occur in the answer, ignoring case (as RULER
    scores)."""
    return sum(text.lower() in answer.lower() for text in answers) / len(answers)


def contains_any(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the answer contains one of `answers`, ignoring case, otherwise 0."""
    return float(any(text.lower() in answer.lower() for text in answers))


def begins_with(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of the reference's words that the answer has before its first wrong
    word."""
    wanted = answers[0].split()
    pairs = zip(answer.split(), wanted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(wanted)


def is_settled(
    metric: Callable[[str, tuple[str, ...]], float], answer: str, answers: tuple[str, ...]
) -> bool:
    """Return True if no further token can change an answer's score, False if this is not known.

    Further tokens cannot remove a text that the answer already contains, and cannot correct an
    error in a completed word.
    """
    if metric in (contains, contains_any):
        return metric(answer, answers) == 1
    if metric is not begins_with or not answer:
        return False
    ended = answer.split() if answer[-1].isspace() else answer.split()[:-1]
    wanted = answers[0].split()
    return len(ended) >= len(wanted) or ended != wanted[: len(ended)]


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (one bit per position, Hyyrö 2004)."""
    places: dict[str, int] = {}
    for place, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << place
    whole = (1 << len(first)) - 1
    unmatched = whole
    for item in second:
        matched = unmatched & places.get(item, 0)
        unmatched = (unmatched + matched | unmatched - matched) & whole
    return len(first) - unmatched.bit_count()
