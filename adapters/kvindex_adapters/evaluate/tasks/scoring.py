"""Metrics: the share of an answer that is right, in [0, 1]."""

from __future__ import annotations


def contains(answer: str, answers: tuple[str, ...]) -> float:
    """The share of `answers` that the answer contains, whatever their case (as RULER scores)."""
    return sum(text.lower() in answer.lower() for text in answers) / len(answers)


def contains_any(answer: str, answers: tuple[str, ...]) -> float:
    """Whether the answer contains one of `answers`, whatever its case."""
    return float(any(text.lower() in answer.lower() for text in answers))
