"""Tasks from the published files of LongBench (Bai et al., 2024).

Metrics and maximum answer lengths are those of LongBench. Four things differ: the wording of the
questions, the chat template for every question, ROUGE-L over the whole answer as one sequence of
words, and the comparison of Chinese texts by character.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.instance import Metric
from kvindex_adapters.evaluate.tasks.overlap import characters, edit_similarity, f1, rouge_l

FIELDS = frozenset(("input", "context", "answers", "dataset"))

QUESTION = "\n\nAnswer the question about the text above in a few words.\n\nQuestion: {input}"
SUMMARY = "\n\nSummarize the text above in a few paragraphs. {input}"
EXAMPLE = "\n\nGo on as the examples above do, with one more answer.\n\n{input}"
COUNT = "\n\nHow many different paragraphs are above, each counted once? Answer with the number."
RETRIEVE = (
    "\n\nWhich of the paragraphs above does this summary describe? Name its number.\n\n{input}"
)
CODE = "\n{input}\n\nWrite the next line of this code, and nothing else."


def first_line(answer: str, answers: tuple[str, ...], metric: Metric) -> float:
    """Score only the first line of the answer, and ignore the rest.

    After its answer, a model may invent more examples of the task.
    """
    return metric(answer.lstrip("\n").split("\n")[0], answers)


def classified(answer: str, answers: tuple[str, ...], classes: tuple[str, ...]) -> float:
    """Score an answer that should name one of several classes.

    The score is 1 divided by the number of classes that the answer names, or 0 if it does not name
    the right class. A class whose name is a part of the right class's name does not count.
    """

    def one(right: str) -> float:
        named = [name for name in classes if name in answer]
        named = [name for name in named if name == right or name not in right]
        return 1 / len(named) if right in named else 0.0

    return max(map(one, answers))


def numbers(answer: str, answers: tuple[str, ...]) -> float:
    """Return the fraction of the numbers in the model's answer that are right."""
    wanted = {number for text in answers for number in re.findall(r"\d+", text)}
    given = re.findall(r"\d+", answer)
    return sum(number in wanted for number in given) / len(given) if given else 0.0


Form = tuple[str, Metric, int]
"""Template of a question, its metric, and the maximum length of the answer in tokens."""

IN_CHINESE: Metric = partial(f1, words=characters)
SUMMARY_IN_CHINESE: Metric = partial(rouge_l, words=characters)

FORMS: dict[str, Form] = {
    **dict.fromkeys(("narrativeqa", "qasper"), (QUESTION, f1, 128)),
    **dict.fromkeys(("multifieldqa_en",), (QUESTION, f1, 64)),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), (QUESTION, f1, 32)),
    "multifieldqa_zh": (QUESTION, IN_CHINESE, 64),
    "dureader": (QUESTION, SUMMARY_IN_CHINESE, 128),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), (SUMMARY, rouge_l, 512)),
    "vcsum": (SUMMARY, SUMMARY_IN_CHINESE, 512),
    "triviaqa": (EXAMPLE, partial(first_line, metric=f1), 32),
    "samsum": (EXAMPLE, partial(first_line, metric=rouge_l), 128),
    "passage_count": (COUNT, numbers, 32),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), (RETRIEVE, numbers, 32)),
    **dict.fromkeys(("lcc", "repobench-p"), (CODE, edit_similarity, 64)),
}
"""Maps the name of a data set to the template of its question, its metric, and the maximum length
of an answer.

The data sets `trec` and `lsht` are not included, because each of their lines has its own classes.
"""


def draft(record: dict[str, Any], stem: str) -> Draft:
    """Make a prompt from one line of a LongBench file, parsed as JSON.

    Raise ValueError if the line names an unknown data set.
    """
    name = str(record["dataset"]).removesuffix("_e")
    if name in ("trec", "lsht"):
        classes = partial(classified, classes=tuple(record["all_classes"]))
        form: Form = (EXAMPLE, partial(first_line, metric=classes), 64)
    elif name in FORMS:
        form = FORMS[name]
    else:
        raise ValueError(f"dataset: got {name!r}, allowed is one of {sorted(FORMS)}, trec, lsht")
    text, metric, most = form
    asked = Asked(text.replace("{input}", record["input"]), tuple(record["answers"]), most, metric)
    return Draft(record["context"], (asked,))
