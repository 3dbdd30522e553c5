"""Tasks for language models: questions about long texts, with known answers.

The name of a task, a length in tokens and a seed determine a prompt.
"""

from kvindex_adapters.evaluate.tasks.hidden import Hidden, Needle, hide
from kvindex_adapters.evaluate.tasks.instance import Instance, Question
from kvindex_adapters.evaluate.tasks.registry import available, describe, make, names

__all__ = [
    "Hidden",
    "Instance",
    "Needle",
    "Question",
    "available",
    "describe",
    "hide",
    "make",
    "names",
]


def __dir__() -> list[str]:
    return __all__
