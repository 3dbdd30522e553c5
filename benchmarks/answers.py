"""A comparison's folder as a result: what the report shows of answers, without single ones.

    python -m benchmarks.answers FOLDER --json benchmarks/results/answers_field.json

FOLDER: of `kvindex compare`, or what `evaluate.compare` wrote. Names that the report knows:
answers_field (every index, one length, one k), answers_lengths, answers_rows (several k),
answers_depth; of more models answers_field_MODEL and so on, which are shown beside.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report
from kvindex_adapters.evaluate.compare.records import FULL
from kvindex_adapters.evaluate.compare.summary import SCHEMA
from kvindex_adapters.evaluate.output_files import output, write_json

DIGITS = 4
"""Of a figure, significant ones."""

Row = dict[str, Any]


def reduced(summary: Row) -> Row:
    """What a result keeps of `results.json`: of several lengths no means by task, of differences
    those of all tasks from full attention and `exact`.

    Raises ValueError for another form of it.
    """
    if summary.get("schema") != SCHEMA:
        raise ValueError(f"schema: got {summary.get('schema')!r}, allowed is {SCHEMA!r}")
    same = ("schema", "settings", "tasks", "tokens", "depths", "text", "failures")
    kept = {name: summary[name] for name in same}
    kept["machine"] = summary["machines"][-1]
    kept["rows_needed"] = [row for row in summary["rows_needed"] if _of_all(row) or row["tokens"]]
    kept["accuracy"] = [row for row in summary["accuracy"] if _of_all(row) or row["tokens"]]
    kept["differences"] = [
        row for row in summary["differences"] if row["base"] in (FULL, "exact") and _of_all(row)
    ]
    found: Row = _rounded(kept)
    return found


def _of_all(row: Row) -> bool:
    return row["task"] is None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def main(told: list[str] | None = None) -> None:
    """Reduce a folder, write, and print what the report says of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=output(".json"), required=True)
    given = parser.parse_args(told)
    result = reduced(json.loads((given.folder / "results.json").read_text()))
    write_json(given.json, result)
    print(report.TABLES["answers_field"](result))


if __name__ == "__main__":
    main()
