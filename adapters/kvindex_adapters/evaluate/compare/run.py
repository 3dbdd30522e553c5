"""The run of a plan in this process, work after work."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate.compare.measuring import Measuring
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.schedule import Progress, Schedule
from kvindex_adapters.evaluate.compare.settings import Plan, Settings


class Comparison:
    """A plan for one model, and the records that it fills.

    text: ids int64 `[N]` of the text on which distributions are compared. Raises ValueError for a
    model or a length that cannot be served, or a text that is too short.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        text: Tensor,
        *,
        settings: Settings,
        plan: Plan,
        records: Records,
    ) -> None:
        self._measuring = Measuring(model, tokenizer, text, settings=settings, plan=plan)
        self._settings, self._plan, self._records = settings, plan, records

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Measure what the records lack.

        What an index cannot do becomes a record of kind "failure", in words; the next run tries
        again.
        """
        schedule = Schedule(self._settings, self._plan, self._records, on_progress)
        for work in schedule.begin([*schedule.texts, *schedule.instances]):
            for key, record in self._measuring.measure(work):
                schedule.take(key, record)
            schedule.end(work)
