"""Table of an index's recall and error while the model generates a long answer."""

from __future__ import annotations

from benchmarks.reporting.field import PIECES
from benchmarks.reporting.parts import Result, machine, named, stored, table


def along(result: Result) -> str:
    """Make tables of recall and error of each index after several numbers of generated tokens.

    Recall is the fraction of the tokens that an exact search retrieves which the index finds. The
    error of the attention output is divided by the error of the exact search.
    """
    return "\n\n".join(map(_along, sampled(result)))


def sampled(result: Result) -> list[Result]:
    """Return the runs of `result` and of the file field.json in which the model generates text."""
    runs = [*result["runs"], *(stored("field") or {"runs": []})["runs"]]
    return [run for run in runs if run["sampled"]]


def _along(run: Result) -> str:
    lines = along_lines(run)
    points = list(next(iter(lines.values())))
    rows = [
        (f"`{index}`", *(f"{at['recall']:.3f} ({at['of_exact']:.2f})" for at in line.values()))
        for index, line in lines.items()
    ]
    setting = run["setting"]
    about = (
        f"The model ({named(run['model'], run['lora'])}) reads {setting['tokens'] - points[-1]:,} "
        f"tokens of {', '.join(run['texts'])} and samples {points[-1]:,} more; {run['measured']} "
        "layers are measured. An entry of the table is the fraction of exact search's rows that "
        "the index finds and, in parentheses, the error of its attention output divided by that of "
        "exact search."
    )
    return "\n\n".join(
        [about, table(("index", *(f"after {n:,}" for n in points)), rows), machine(run)]
    )


def along_lines(run: Result) -> dict[str, dict[int, Result]]:
    """Return recall and error by index, and then by number of generated tokens."""
    return {
        line["index"]: {int(at): worth for at, worth in line["along"].items()}
        for line in run["indexes"]
        if line["arrival"] == PIECES
    }
