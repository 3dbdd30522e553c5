"""`kvindex indexes`: what there is to choose from."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

import kvindex
from kvindex.backend import BACKENDS
from kvindex.registry import wrapper_options
from kvindex.rows import NAMES
from kvindex.store import PLACES


def indexes() -> None:
    """List the indexes, their presets and their options, and the wrappers around them."""
    table = Table("index", "presets", "options (default)")
    for name in kvindex.names():
        index = kvindex.get(name)
        options = [
            f"{field.name} ({field.default!r})" for field in dataclasses.fields(index.Config)
        ]
        table.add_row(name, ", ".join(index.presets) or "-", ", ".join(options) or "-")
    shared = {"backend": BACKENDS, "store": PLACES, "rows": NAMES}
    told = [f"{option} ({', '.join(allowed)})" for option, allowed in shared.items()]
    table.add_row("every index", "-", ", ".join(told))
    for name, given in wrapper_options().items():
        options = [f"{option} ({default!r})" for option, default in given.items()]
        table.add_row(f"…+{name}", "-", ", ".join(options) or "-")
    Console().print(table)
