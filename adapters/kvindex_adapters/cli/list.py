"""`kvindex indexes`: what there is to choose from."""

from __future__ import annotations

import dataclasses
from typing import Any


def indexes() -> None:
    """List the indexes, their options, their presets, and the wrappers around them."""
    from rich.console import Console
    from rich.table import Table

    import kvindex
    from kvindex.core.backend import BACKENDS
    from kvindex.registry import wrapper_options
    from kvindex.storage.codecs import NAMES
    from kvindex.storage.store import PLACES

    table = Table("index", "options (what one gets)", "presets, and what they change")
    for name in kvindex.names():
        options = [f"{option} ({value!r})" for option, value in defaults(name).items()]
        others = [
            f"{preset}: {', '.join(f'{o} ({v!r})' for o, v in changed.items()) or 'nothing'}"
            for preset, changed in presets(name).items()
        ]
        table.add_row(name, ", ".join(options) or "-", "\n".join(others) or "-")
    shared = {"backend": BACKENDS, "store": PLACES, "rows": NAMES}
    told = [f"{option}: {' or '.join(allowed)}" for option, allowed in shared.items()]
    table.add_row("every index", "; ".join(told), "-")
    for name, given in wrapper_options().items():
        options = [f"{option} ({default!r})" for option, default in given.items()]
        table.add_row(f"…+{name}", ", ".join(options) or "-", "-")
    Console().print(table)


def defaults(name: str) -> dict[str, Any]:
    """The options of an index as `kvindex.create` fills them in."""
    return _options(name, None)


def presets(name: str) -> dict[str, dict[str, Any]]:
    """What each preset changes of `defaults`: option -> value."""
    import kvindex

    index, usual = kvindex.get(name), defaults(name)
    return {
        preset: {o: v for o, v in _options(name, preset).items() if v != usual[o]}
        for preset in index.presets
    }


def _options(name: str, preset: str | None) -> dict[str, Any]:
    import kvindex
    from kvindex.core.config import make_config

    config = make_config(kvindex.get(name), preset, {})
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
