"""Write the report of a comparison as an HTML page, a picture, a CSV file and a JSON file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from kvindex_adapters.evaluate.compare.lines import panels
from kvindex_adapters.evaluate.compare.pictures import (
    DARK,
    LIGHT,
    Theme,
    as_address,
    narrow_pictures,
    picture,
)
from kvindex_adapters.evaluate.compare.records import FULL, Records
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.suite import BUDGETS, described
from kvindex_adapters.evaluate.compare.summary import COSTS, FOUND, Row, summarize
from kvindex_adapters.evaluate.compare.tables import tables
from kvindex_adapters.evaluate.output_files import save_figure, write_json, write_text

PAGE = Path(__file__).with_name("page")

FIELD_SCHEMA = "kvindex.field/1"

ABOUT = (
    "Every index reads the same prompts. Attention is exact while a prompt is read. Each decode "
    "step of an answer attends to the first tokens, to the newest tokens, and to k tokens per KV "
    "head that the index retrieves. Answers are greedy. Full attention is the reference."
)
ALT = (
    "Accuracy over all tasks, and divergence from full attention on a text, as far as measured, "
    "with 95% intervals. Of many lines, those of full attention, exact search, the first index and "
    "the best other indexes have a name, and the others are gray. All figures are in the tables."
)

COLUMNS = (
    *("table", "index", "k", "base", "task", "tokens", "measure"),
    *("value", "low", "high", "count", "not_inferior", "p", "p_corrected"),
)
"""Columns of the file `results.csv`, in which each measured value has a row of its own."""


def write_report(folder: Path, settings: Settings, records: Records) -> Row:
    """Write the files report.html, answers.png, results.csv and results.json to a folder.

    The results of a suite have one more file, for example field.json.

    Returns:
        The content of results.json.

    Raises:
        OSError: A file cannot be written.
    """
    summary = summarize(settings, records)
    write_json(folder / "results.json", summary)
    if settings.suite is not None:
        write_json(folder / f"{settings.suite}.json", field_table(summary))
    write_text(folder / "results.csv", _csv(summary), "csv")
    if panels(summary):  # otherwise only full attention was measured
        save_figure(picture(summary), folder / "answers.png", dpi=160)
    write_text(folder / "report.html", _page(summary), "html")
    return summary


def field_table(summary: Row) -> Row:
    """Return the content of the file field.json, which docs/results/field-suite.md describes."""
    methods = dict.fromkeys(row["method"] for row in summary["field"])
    return {
        "schema": FIELD_SCHEMA,
        **{name: summary[name] for name in ("settings", "machines")},
        "budgets": list(BUDGETS),
        "methods": [described(method) for method in methods],
        "raw": "results.jsonl",
        "full_attention": [row for row in summary["text"] if row["index"] == FULL],
        "cells": summary["field"],
    }


def _page(summary: Row) -> str:
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True)
    environment.filters["breakable"] = _breakable
    return environment.get_template("report.html").render(
        title=f"Indexes compared: {Path(summary['settings']['model']).name}",
        about=ABOUT,
        alt=ALT,
        charts=list(zip(_addresses(summary, LIGHT), _addresses(summary, DARK), strict=True)),
        tables=tables(summary),
        facts=list(_facts(summary)),
    )


def _addresses(summary: Row, theme: Theme) -> list[str]:
    return [as_address(figure) for figure in narrow_pictures(summary, theme)]


def _breakable(name: str) -> Markup:
    """Return a name as HTML in which a line may be broken after each colon and plus sign."""
    return Markup("<wbr>").join(re.split("(?<=[:+])", name))


def _facts(summary: Row) -> Iterator[tuple[str, str]]:
    """Yield the settings, tasks and machines of the comparison as pairs of a name and a text."""
    for name, value in summary["settings"].items():
        if value is not None:
            parts = value.items() if isinstance(value, dict) else ()
            yield name, ", ".join(f"{part} {size}" for part, size in parts) or str(value)
    yield from summary["tasks"].items()
    for machine in summary["machines"]:
        yield "machine", ", ".join(f"{name} {value}" for name, value in machine.items())


def _csv(summary: Row) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: _plain(cell) for name, cell in row.items()} for row in _figures(summary)
    )
    return file.getvalue()


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters at the beginning of a cell by which spreadsheets recognize a formula."""


def _plain(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would evaluate as a formula.

    Numbers are not changed, not even negative numbers.
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def _figures(summary: Row) -> Iterator[Row]:
    for table, measure in (("accuracy", "accuracy"), ("differences", "difference")):
        for row in summary[table]:
            about = {name: row[name] for name in COLUMNS if name in row}
            yield {**about, "table": table, "measure": measure, "value": row[measure]}
    for row in summary["rows_needed"]:
        about = {
            "table": "rows_needed",
            **{name: row[name] for name in ("index", "task", "tokens")},
        }
        for measure in ("rows", "over_exact"):
            yield {**about, "measure": measure, "value": row[measure]}
    for row in summary["text"]:
        about = {"table": "text", **{name: row[name] for name in ("index", "k", "tokens")}}
        for measure in ("kl", "over_exact", "agreement"):
            if measure in row:
                ends = {end: row[f"{measure}_{end}"] for end in ("low", "high")}
                figure = {"measure": measure, "value": row[measure], **ends}
                yield {**about, **figure, "count": row["steps"]}
        for measure in (*FOUND, *COSTS, "key_bytes"):
            value = row[measure]
            value = sum(value.values()) if isinstance(value, dict) else value
            yield {**about, "measure": measure, "value": value}
    for row in summary.get("field", []):
        about = {"table": f"field, {row['budget']}"}
        about |= {name: row[name] for name in ("index", "k", "tokens")}
        for measure in ("error", "error_worst", "read_bytes", "read_fraction"):
            if measure in row:
                ends = {end: row.get(f"{measure}_{end}") for end in ("low", "high")}
                yield {**about, "measure": measure, "value": row[measure], **ends}
