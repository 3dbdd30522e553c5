r"""Tasks from files of AIME and MATH (Hendrycks et al., 2021), with answers in \boxed{}."""

from __future__ import annotations

import re
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft

FIELDS = frozenset(("problem",))

TOKENS = 4096
"""Maximum length of an answer in tokens. All solutions of MATH and most of AIME are shorter."""


def draft(record: dict[str, Any], stem: str) -> Draft:
    """Make a prompt from one problem, that is, from one line of a data file, parsed as JSON.

    Raise ValueError if the line contains no right answer.
    """
    answer = record.get("answer", boxed_text(record.get("solution", "")))
    if answer is None:
        raise ValueError(
            r"solution: got a text without \boxed{}; pass a solution with \boxed{}, or an answer"
        )
    text = "\n\nSolve the problem step by step, and write the result as \\boxed{result}."
    return Draft(record["problem"], (Asked(text, (str(answer),), TOKENS, boxed),))


def boxed(answer: str, answers: tuple[str, ...]) -> float:
    r"""Return 1 if the last \boxed{} of the model's answer contains a right answer, otherwise 0.

    Answers are compared as numbers, or as TeX without commands that do not change the value.
    """
    given = boxed_text(answer)
    return float(given is not None and any(_plain(given) == _plain(text) for text in answers))


def boxed_text(text: str) -> str | None:
    r"""Return the content of the last \boxed{} in a text, or None if there is no \boxed{}."""
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place] if found else None
    return None


def _plain(text: str) -> str:
    """Remove TeX commands that do not change a value, and convert numbers to Python's syntax."""
    text = re.sub(r"\\text\{ [^}]*\}|\^\{?\\circ\}?", "", text)  # remove units
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|[,!;%$ ])|[\s$%]", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^\w=|\.$|(?<=\d),(?=\d{3}\b)", "", text)
    try:
        return str(float(text))
    except ValueError:
        return text
