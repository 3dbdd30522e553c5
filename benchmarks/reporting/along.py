"""Table of each index's recall and error while a model generates a long answer."""

from __future__ import annotations

from benchmarks.reporting.field import PIECES
from benchmarks.reporting.parts import Result, machine, named, stored, table


def along(result: Result) -> str:
    """Make tables of each index's recall and error while the model generates text.

    Each column is for a number of generated tokens. An exact search retrieves the best `k` tokens.
    Recall is the fraction of them that the index finds. The error is that of the attention output,
    divided by the error with the exact search.
    """
    return "\n\n".join(map(_along, sampled(result)))


def sampled(result: Result) -> list[Result]:
    """Return the benchmark runs whose texts end with tokens that the model generated.

    The runs are taken from `result` and from the results file field.json.
    """
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
        f"tokens of {', '.join(run['texts'])}, and then samples {points[-1]:,} tokens. The table "
        "shows how the recall of each index changes while the model samples. Recall is the "
        "fraction of the best tokens, as found by an exact search, that the index finds as well. "
        "The number in parentheses is the error of the attention output, divided by the error "
        f"with exact search. {run['measured']} layers of the model are measured."
    )
    return "\n\n".join(
        [about, table(("index", *(f"after {n:,}" for n in points)), rows), machine(run)]
    )


def along_lines(run: Result) -> dict[str, dict[int, Result]]:
    """Return the recall and error of each index, by the number of tokens generated so far."""
    return {
        line["index"]: {int(at): worth for at, worth in line["along"].items()}
        for line in run["indexes"]
        if line["arrival"] == PIECES
    }
