"""Run a plan in this process, one unit of work after another."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvindex_adapters.evaluate.compare.measuring import Measuring
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.schedule import Progress, Schedule


@dataclass(eq=False, repr=False)
class Comparison(Measuring):
    """A plan for one model, and the records that it fills.

    Args:
        model: The transformers model.
        tokenizer: Its tokenizer.
        text: Ids int64 `[N]` of the text for comparing predictions.
        settings: Settings of the comparison.
        plan: Plan of the comparison.
        records: Records of the comparison.

    Raises:
        ValueError: The model or a length is not supported, or the text is too short.
    """

    _: KW_ONLY
    records: Records

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Run the measurements that the records lack.

        If an index fails, its message becomes a record of kind "failure". The next run repeats the
        measurement.
        """
        schedule = Schedule(self.settings, self.plan, self.records, on_progress)
        for work in schedule.begin([*schedule.texts, *schedule.instances]):
            for key, record in self.measure(work):
                schedule.take(key, record)
            schedule.end(work)
