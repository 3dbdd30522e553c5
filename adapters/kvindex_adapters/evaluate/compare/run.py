"""The run of a plan in this process, work after work."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvindex_adapters.evaluate.compare.measuring import Measuring
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.schedule import Progress, Schedule


@dataclass(eq=False, repr=False)
class Comparison(Measuring):
    """A plan for one model, and the records that it fills.

    text: ids int64 `[N]` of the text on which distributions are compared. Raises ValueError for a
    model or a length that cannot be served, or a text that is too short.
    """

    _: KW_ONLY
    records: Records

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Measure what the records lack.

        What an index cannot do becomes a record of kind "failure", in words; the next run tries
        again.
        """
        schedule = Schedule(self.settings, self.plan, self.records, on_progress)
        for work in schedule.begin([*schedule.texts, *schedule.instances]):
            for key, record in self.measure(work):
                schedule.take(key, record)
            schedule.end(work)
