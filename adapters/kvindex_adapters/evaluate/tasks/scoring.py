"""Metrics that compare a model's answer with right answers, and return a score in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile


def contains(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of the right answers that the model's answer contains, as RULER does.

    Upper and lower case count as equal.
    """
    return sum(text.lower() in answer.lower() for text in answers) / len(answers)


def contains_any(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the model's answer contains one of the right answers, otherwise 0.

    Upper and lower case count as equal.
    """
    return float(any(text.lower() in answer.lower() for text in answers))


def begins_with(answer: str, answers: tuple[str, ...]) -> float:
    """Return how many of the first words are correct, as a fraction of the expected words.

    The words of `answer` are compared with the expected words one by one, up to the first
    difference.
    """
    wanted = answers[0].split()
    pairs = zip(answer.split(), wanted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(wanted)


def is_settled(
    metric: Callable[[str, tuple[str, ...]], float], answer: str, answers: tuple[str, ...]
) -> bool:
    """Return True if no further token can change the score of an unfinished answer.

    For example, further tokens cannot remove a right text that the answer already contains, and
    cannot correct a wrong word. Return False if the score may change or the metric is not known.
    """
    if metric in (contains, contains_any):
        return metric(answer, answers) == 1
    if metric is not begins_with or not answer:
        return False
    ended = answer.split() if answer[-1].isspace() else answer.split()[:-1]
    wanted = answers[0].split()
    return len(ended) >= len(wanted) or ended != wanted[: len(ended)]


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (bit-parallel method of Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << place
    whole = (1 << len(first)) - 1
    unmatched = whole
    for item in second:
        matched = unmatched & places.get(item, 0)
        unmatched = (unmatched + matched | unmatched - matched) & whole
    return len(first) - unmatched.bit_count()
