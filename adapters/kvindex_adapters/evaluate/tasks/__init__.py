"""Tasks: long texts with questions whose answers are known. A task's name, a length and a seed
determine an instance."""

from kvindex_adapters.evaluate.tasks.hidden import Needle, hide
from kvindex_adapters.evaluate.tasks.instance import Instance, Question
from kvindex_adapters.evaluate.tasks.registry import available, describe, make, names

__all__ = ["Instance", "Needle", "Question", "available", "describe", "hide", "make", "names"]
