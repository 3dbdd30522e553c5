"""Convert the table of `kvindex compare --suite field` to a file for `benchmarks/report.py`.

    python -m benchmarks.field_suite FOLDER --json benchmarks/results/field_suite.json

FOLDER is the folder that `kvindex compare` has written. Numbers are rounded, `machine` is the last
machine of the run, and cells of an index that were not measured, for example because the run was
stopped, are added without figures. Otherwise the file has the format of field.json
(docs/results/field-suite.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.answers import rounded
from kvindex_adapters.evaluate.compare.report import FIELD_SCHEMA
from kvindex_adapters.evaluate.compare.suite import settings_of
from kvindex_adapters.evaluate.output_files import output, write_json


def reduced(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with rounded numbers, and with the cells that were not measured.

    Raises:
        ValueError: The table has another format.
    """
    if table.get("schema") != FIELD_SCHEMA:
        raise ValueError(f"schema: got {table.get('schema')!r}, allowed is {FIELD_SCHEMA!r}")
    cells = table["cells"] + list(_missing(table["cells"]))
    found: dict[str, Any] = rounded({**table, "cells": cells, "machine": table["machines"][-1]})
    return found


def _missing(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the cells of the suite that are not in `cells`, for each index and length in it."""
    known = {(cell["method"], cell["budget"], cell["tokens"]) for cell in cells}
    for method, tokens in sorted({(cell["method"], cell["tokens"]) for cell in cells}):
        for index, k, budget in settings_of(method, tokens):
            if (method, budget, tokens) not in known:
                about = dict(method=method, budget=budget, index=index, k=k, tokens=tokens)
                yield {**about, "texts": [], "reason": "not measured yet"}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: write the file, and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder that `kvindex compare` has written")
    parser.add_argument(
        "--json",
        type=output(".json"),
        required=True,
        help="JSON file to which the table is written",
    )
    given = parser.parse_args(arguments)
    result = reduced(json.loads((given.folder / "field.json").read_text(encoding="utf-8")))
    write_json(given.json, result)
    print(report.TABLES["field_suite"](result))


if __name__ == "__main__":
    main()
