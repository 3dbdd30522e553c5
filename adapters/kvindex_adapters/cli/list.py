"""`kvindex indexes`: list the indexes with their options, presets and wrappers."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvindex_adapters.cli.options import check_stdout


def indexes() -> None:
    """List all indexes with their options and presets, and the wrappers that extend any index."""
    check_stdout()
    import warnings

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    import kvindex
    from kvindex.core.backend import BACKENDS
    from kvindex.registry import installed, refused, wrapper_options
    from kvindex.storage.codecs import NAMES
    from kvindex.storage.store import PLACES

    table = Table("index", "options (defaults)", "presets, and the options that they change")
    brought, left_out = installed(), refused()
    with warnings.catch_warnings(action="ignore"):  # `left_out` is printed below
        names = kvindex.names()
    for name in names:
        owner = brought[name].dist if name in brought else None
        called = name if owner is None else f"{name}\nof {owner.name} {owner.version}"
        try:
            given, others = _written(defaults(name)), presets(name)
        except ImportError as error:
            table.add_row(called, Text(str(error)), "-")
            continue
        lines = [f"{preset}: {_written(changed, 'nothing')}" for preset, changed in others.items()]
        table.add_row(called, given, "\n".join(lines) or "-")
    shared = {"backend": BACKENDS, "store": PLACES, "row_codec": NAMES}
    common = [f"{option}: {' or '.join(allowed)}" for option, allowed in shared.items()]
    common.append("device_fraction: fraction of the device's memory for rows, with store=auto")
    table.add_row("every index", "; ".join(common), "-")
    for name, options in wrapper_options().items():
        table.add_row(f"…+{name}", _written(options), "-")
    console = Console()
    console.print(table)
    for reason in left_out.values():
        console.print(reason, markup=False)


def defaults(name: str) -> dict[str, Any]:
    """Return the options of an index as name -> default value in `kvindex.create`."""
    return _options(name, None)


def presets(name: str) -> dict[str, dict[str, Any]]:
    """Return the options that each preset of an index changes, as preset -> option -> value."""
    import kvindex

    usual = defaults(name)
    return {
        preset: {o: v for o, v in _options(name, preset).items() if v != usual[o]}
        for preset in kvindex.get(name).presets
    }


def _options(name: str, preset: str | None) -> dict[str, Any]:
    import kvindex
    from kvindex.core.config import make_config

    config = make_config(kvindex.get(name), preset, {})
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _written(options: dict[str, Any], none: str = "-") -> str:
    return ", ".join(f"{option} ({value!r})" for option, value in options.items()) or none
