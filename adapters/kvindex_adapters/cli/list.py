"""`kvindex indexes`: list the indexes and wrappers with their meanings, or with their options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.options import check_stdout

if TYPE_CHECKING:
    from rich.console import Console

HINT = "kvindex indexes NAME prints options and presets; --options prints those of all indexes"


def indexes(
    name: Annotated[
        str | None, typer.Argument(help="Print the options and presets of this index or wrapper.")
    ] = None,
    options: Annotated[
        bool,
        typer.Option(
            "--options", help="Print the options and presets of all indexes and wrappers."
        ),
    ] = False,
) -> None:
    """List all indexes, and the wrappers around indexes, with their meanings."""
    check_stdout()
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvindex.registry import refused, usable, wrapper_classes

    console = Console()
    if name is not None:
        _describe(console, name.removeprefix("+"))
        _describe_shared(console)
        return
    names = [*usable(), *wrapper_classes()]
    if options:
        for each in names:
            _describe(console, each)
        _describe_shared(console)
    else:
        table = Table("index", "meaning")
        for each in names:
            table.add_row(_called(each), Text(_meaning(each)))
        console.print(table)
        console.print(HINT, markup=False)
    for reason in refused().values():
        console.print(reason, markup=False)


def defaults(name: str) -> dict[str, Any]:
    """Return a dict from the names of an index's options to their defaults in `kvindex.create`."""
    return _options(name, None)


def presets(name: str) -> dict[str, dict[str, Any]]:
    """Return a dict from each preset of an index to the options that the preset changes.

    These options are a dict from names to values.
    """
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


def _called(name: str) -> str:
    """Return the name of an index or wrapper as `kvindex indexes` prints it.

    A wrapper gets "…+" before its name. If another package than kvindex provides the index, the
    name and version of this package follow.
    """
    from kvindex.registry import installed, wrapper_classes

    if name in wrapper_classes():
        return f"…+{name}"
    brought = installed()
    owner = brought[name].dist if name in brought else None
    return name if owner is None else f"{name}\nof {owner.name} {owner.version}"


def _class_of(name: str) -> type:
    import kvindex
    from kvindex.registry import wrapper_classes

    return wrapper_classes().get(name) or kvindex.get(name)


def _meaning(name: str) -> str:
    """Return the first sentence of the docstring of an index or a wrapper."""
    try:
        paragraph = inspect.cleandoc(_class_of(name).__doc__ or "-").partition("\n\n")[0]
    except ImportError as error:
        return str(error)
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def _describe(console: Console, name: str) -> None:
    """Print the meaning, the options and the presets of an index or a wrapper."""
    from kvindex.registry import wrapper_options

    meaning, wrapper = _meaning(name), wrapper_options().get(name)
    title = _called(name).replace("\n", " ")
    console.print(f"{title}: {meaning}", markup=False, highlight=False)
    try:
        given = defaults(name) if wrapper is None else wrapper
        others = presets(name) if wrapper is None else {}
    except ImportError:
        return  # the line above already shows the error message
    _print_line(console, f"options: {_written(given)}")
    for preset, changed in others.items():
        _print_line(console, f"preset={preset}: {_written(changed, 'the defaults')}")


def _describe_shared(console: Console) -> None:
    """Print the options that every index has."""
    from kvindex.core.backend import BACKENDS
    from kvindex.storage.codecs import NAMES
    from kvindex.storage.store import PLACES

    shared = {"backend": BACKENDS, "store": PLACES, "row_codec": NAMES}
    console.print("Every index has these options:", highlight=False)
    for option, allowed in shared.items():
        _print_line(console, f"{option}: {' or '.join(allowed)}")
    _print_line(
        console, "device_fraction: fraction of the device's memory for rows, with store=auto"
    )


def _print_line(console: Console, text: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(text), (0, 0, 0, 2)))


def _written(options: dict[str, Any], none: str = "-") -> str:
    return ", ".join(f"{option} ({value!r})" for option, value in options.items()) or none
