r"""AIME and MATH (Hendrycks et al., 2021) from files: problems whose answers are in \boxed{}."""

from __future__ import annotations

import re
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft

FIELDS = frozenset(("problem",))

TOKENS = 4096
"""Longest answer in tokens. MATH's solutions are shorter, and so are most of AIME's."""


def draft(record: dict[str, Any], stem: str) -> Draft:
    """Make the draft for a line of a file. Raise ValueError for a line without an answer."""
    answer = record.get("answer", boxed_text(record.get("solution", "")))
    if answer is None:
        raise ValueError(r"solution: got one without \boxed{}, allowed is one with it, or answer")
    text = "\n\nSolve the problem step by step, and write the result as \\boxed{result}."
    return Draft(record["problem"], (Asked(text, (str(answer),), TOKENS, boxed),))


def boxed(answer: str, answers: tuple[str, ...]) -> float:
    r"""Return 1 if the answer's last \boxed{} contains a reference, compared as numbers or as
    TeX."""
    given = boxed_text(answer)
    return float(given is not None and any(_plain(given) == _plain(text) for text in answers))


def boxed_text(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, including inner braces, or None."""
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place] if found else None
    return None


def _plain(text: str) -> str:
    """Remove TeX commands that do not change a value, and convert numbers to Python's syntax."""
    text = re.sub(r"\\text\{ [^}]*\}|\^\{?\\circ\}?", "", text)  # units
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|[,!;%$ ])|[\s$%]", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^\w=|\.$|(?<=\d),(?=\d{3}\b)", "", text)
    try:
        return str(float(text))
    except ValueError:
        return text
