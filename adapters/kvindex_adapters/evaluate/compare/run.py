"""Run the measurements of a comparison in this process, one after another."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass

from kvindex_adapters.evaluate.compare.measuring import Measuring
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.schedule import Progress, Schedule


@dataclass(eq=False, repr=False)
class Comparison(Measuring):
    """A comparison of indexes whose measurements run in this process.

    Args:
        model: The transformers model.
        tokenizer: The tokenizer of the model.
        text: Token ids int64 `[N]` of the text on which next-token predictions are compared. With a
            suite: the texts by their names.
        settings: Settings that all results of the comparison share.
        plan: The indexes, tasks and prompt lengths to measure.
        records: The file of results. New results are appended.

    Raises:
        ValueError: The model or a prompt length is not supported, or the text is too short.
    """

    _: KW_ONLY
    records: Records

    def run(
        self,
        on_progress: Progress = lambda done, total, what: None,
        minutes: float | None = None,
    ) -> int:
        """Run the measurements of the plan that have no result yet, and store the results.

        If an index fails, the error message is stored as a result of kind "failure". The next run
        repeats that measurement.

        Args:
            on_progress: Function that is called with the work done, the total work, and the name of
                the current measurement.
            minutes: Stop after the first result that is known this many minutes after the start.
                None for no limit.

        Returns:
            Number of results that are still missing. 0 unless the time was over.
        """
        start, schedule = (
            time.monotonic(),
            Schedule(self.settings, self.plan, self.records, on_progress),
        )
        for work in schedule.begin([*schedule.texts, *schedule.instances]):
            for key, record in self.measure(work):
                schedule.take(key, record)
                if minutes is not None and time.monotonic() - start >= 60 * minutes:
                    return schedule.left
            schedule.end(work)
        return 0
