"""Tasks from the published files of InfiniteBench (Zhang et al., 2024), with its metrics.

The wording of the questions differs from InfiniteBench. The name of a file determines the task. In
some tasks, the right answer is one word. The limit on generated tokens is nevertheless high enough
for a sentence, because chat models answer in sentences. Summaries are scored with ROUGE-L.
"""

from __future__ import annotations

import re
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.instance import Metric
from kvindex_adapters.evaluate.tasks.longbench import IN_CHINESE
from kvindex_adapters.evaluate.tasks.overlap import f1, rouge_l
from kvindex_adapters.evaluate.tasks.scoring import contains_any

FIELDS = frozenset(("context", "input", "answer"))

LETTERS, NUMBER = "ABCDEFGHIJ", r"-?\d+(?:\.\d+)?"


def named(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if one of the right answers is a word of the model's answer, otherwise 0."""
    return float(bool(set(re.split(r"[\s:\"'.,?!{}]+", answer)) & set(answers)))


def first_number(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the first number in the model's answer is right, otherwise 0."""
    found = re.search(NUMBER, answer)
    return float(found is not None and found[0] in answers)


def last_number(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the last number in the model's answer is right, otherwise 0."""
    found = re.findall(NUMBER, answer)
    return float(bool(found) and found[-1] in answers)


def leading_numbers(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of the expected numbers that the answer gives before a wrong number."""
    given = re.findall(NUMBER, answer)
    right = 0
    while right < min(len(given), len(answers)) and given[right] == answers[right]:
        right += 1
    return right / len(answers)


def chosen(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the answer to a multiple-choice question names the right option, otherwise 0.

    The chosen option is the letter at the beginning of the answer, or after a word like "option".
    Without such a letter, the answer must contain the text of the right option.
    """
    text, letter = answers
    begins = re.match(rf"\W*([{LETTERS}])(?!\w| \w)", answer)
    called = re.search(rf"(?i:answer|option|choice)(?: is)?\W*([{LETTERS}])\b", answer)
    if found := begins or called:
        return float(found[1] == letter)
    return float(text.lower() in answer.lower())


FORMS: dict[str, tuple[str, Metric, int]] = {
    "passkey": ("", first_number, 32),
    "number_string": ("", first_number, 32),
    "kv_retrieval": ("", named, 64),
    "longbook_qa_eng": ("Answer in a few words.", f1, 40),
    "longbook_qa_chn": ("Answer in a few words.", IN_CHINESE, 40),
    "longbook_sum_eng": ("Summarize the book above.", rouge_l, 1200),
    "longbook_choice_eng": ("Answer with the letter of an option.", chosen, 40),
    "longdialogue_qa_eng": ("Which name stands where the text has $$MASK$$?", contains_any, 40),
    "code_debug": ("Answer with the letter of an option.", chosen, 40),
    "code_run": ("Answer with the number.", last_number, 40),
    "math_find": ("Answer with the number.", first_number, 40),
    "math_calc": ("Write the value after each step of the calculation.", leading_numbers, 4096),
}
"""Maps the name of a file to three values for its questions: the instruction that follows them, the
metric, and the maximum length of an answer in tokens."""


def draft(record: dict[str, Any], stem: str) -> Draft:
    """Make a prompt from `record`, a line of an InfiniteBench file.

    `stem` is the name of the file. Raise ValueError if there is no task with the name `stem`.
    """
    if stem not in FORMS:
        raise ValueError(f"file name: got {stem!r}, allowed is one of {sorted(FORMS)}")
    ending, metric, most = FORMS[stem]
    options = record.get("options") or []
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    asked = "\n".join(part for part in (record["input"], *lines, ending) if part)
    answers = _answers(record["answer"], options if metric is chosen else [])
    return Draft(record["context"], (Asked(f"\n\n{asked}", answers, most, metric),))


def _answers(answer: Any, options: list[str]) -> tuple[str, ...]:
    """Return the right answers as texts.

    For a multiple-choice question, these are the text and the letter of the right option.
    """
    found = tuple(map(str, answer)) if isinstance(answer, list) else (str(answer),)
    if not options or len(found) == 2:
        return found
    return (found[0], LETTERS[options.index(found[0])])
