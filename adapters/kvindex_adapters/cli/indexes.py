"""`kvindex indexes`: what there is to choose from."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

import kvindex


def indexes() -> None:
    """List the indexes, their presets and their options."""
    table = Table("index", "presets", "options (default)")
    for name in kvindex.names():
        index = kvindex.get(name)
        options = [
            f"{field.name} ({field.default!r})" for field in dataclasses.fields(index.Config)
        ]
        table.add_row(name, ", ".join(index.presets) or "-", ", ".join(options) or "-")
    Console().print(table)
