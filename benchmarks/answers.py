"""Convert the results of `kvindex compare` to a small file for `benchmarks/report.py`.

    python -m benchmarks.answers FOLDER --json benchmarks/results/answers_field.json

FOLDER is the folder that `kvindex compare` has written. The small file contains accuracies and
other summaries, but not the model's answers to each prompt. If the run of `kvindex compare` ended
early, use `--index A,B`: the file then contains only the indexes A and B, and only the prompts that
both answered with every measured k (the number of tokens that a decode step retrieves).

The report shows files with these names, to which a suffix can be added (`answers_field_MODEL`):

- `answers_field`: all indexes, with one prompt length and one k
- `answers_lengths`: several prompt lengths
- `answers_rows`: several values of k
- `answers_depth`: several positions of the answer in the prompt
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from kvindex_adapters.evaluate.compare.records import ANSWERS, FULL, Records
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.summary import SCHEMA, summarize
from kvindex_adapters.evaluate.output_files import output, write_json

DIGITS = 4
"""Number of significant digits to which numbers are rounded."""

Row = dict[str, Any]


def reduced(summary: Row) -> Row:
    """Reduce the content of `results.json` to the parts that the report shows.

    - Accuracies: keep the accuracy over all tasks, and the accuracy of each task at each prompt
      length. If there are several lengths, drop the accuracy of a task over all lengths.
    - Differences in accuracy: keep the difference from full attention and the difference from the
      index `exact`, each over all tasks.

    Raises:
        ValueError: `results.json` has another format.
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
    found: Row = rounded(kept)
    return found


def answered_by_all(folder: Path, indexes: list[str]) -> Row:
    """Summarize the results of some indexes, only for the prompts that all of them answered.

    The result has the format of `results.json`, and always includes full attention. A prompt is
    used only if each of the indexes answered it with every `k` that was measured.

    Raises:
        ValueError: An index has no answers in the folder.
    """
    lines = [
        json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").split("\n")[:-1]
    ]
    answers: dict[tuple[str, int], set[Any]] = {}
    for line in lines:
        if line["kind"] == ANSWERS:
            answers.setdefault((line["index"], line["k"]), set()).add(_prompt(line))
    if missing := set(indexes) - {index for index, _ in answers}:
        raise ValueError(f"index: got {sorted(missing)}, which have no answers in {str(folder)!r}")
    by_all = set.intersection(*(some for who, some in answers.items() if who[0] in indexes))
    kept = [
        line
        for line in lines
        if line.get("index", FULL) in (FULL, *indexes)
        and (line["kind"] != ANSWERS or _prompt(line) in by_all)
    ]
    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    with TemporaryDirectory() as name:
        written = Path(name) / "results.jsonl"
        written.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
        return summarize(Settings(**settings), Records(Path(name)))


def _prompt(line: Row) -> tuple[Any, ...]:
    return line["task"], line["tokens"], line["seed"]


def _of_all(row: Row) -> bool:
    return row["task"] is None


def rounded(value: Any) -> Any:
    """Round all numbers of nested dicts and lists to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: convert the results in a folder, write them to a small file, and print
    them as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder that `kvindex compare` has written")
    parser.add_argument(
        "--index",
        type=lambda text: text.split(","),
        help="Indexes whose results are written, separated by commas (default: all)",
    )
    parser.add_argument(
        "--json",
        type=output(".json"),
        required=True,
        help="JSON file to which the results are written",
    )
    given = parser.parse_args(arguments)
    if given.index:
        result = reduced(answered_by_all(given.folder, given.index))
    else:
        result = reduced(json.loads((given.folder / "results.json").read_text(encoding="utf-8")))
    write_json(given.json, result)
    print(report.TABLES["answers_field"](result))


if __name__ == "__main__":
    main()
