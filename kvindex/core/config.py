"""Options of indexes: `Config` dataclasses, presets, and specs such as `"pariskv:preset=paper"`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvindex.core import check


@dataclass(frozen=True)
class NoConfig:
    """The configuration of an index that has no options."""


def make_config(
    owner: Any, preset: str | None, options: Mapping[str, Any], *, others: Iterable[str] = ()
) -> Any:
    """Create the `Config` of an index class from its defaults, a preset and options.

    Options override the preset, and the preset overrides the defaults.

    Args:
        owner: An index class with `Config` and `presets`.
        preset: Name of a preset, or None.
        options: Fields of the configuration.
        others: Names of constructor arguments that are not fields of `Config`. Error messages list
            them as known names.

    Raises:
        ValueError: The preset or an option is unknown (the message lists similar names), or a value
            is not allowed.
    """
    fields = {}
    if preset is not None:
        check.text("preset", preset)
        if not owner.presets:
            raise ValueError(
                f"preset: got {preset!r}, allowed is None: {owner.__name__} has no presets, only "
                "options"
            )
        if preset not in owner.presets:
            raise ValueError(unknown("preset", preset, owner.presets))
        fields = dict(owner.presets[preset])
    known = [field.name for field in dataclasses.fields(owner.Config)]
    for name in options:
        if name not in known:
            raise ValueError(unknown("option", name, [*known, *others]))
    return owner.Config(**{**fields, **options})


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse `"pariskv:preset=paper:beta=.05"` to `("pariskv", {"preset": "paper", "beta": 0.05})`.

    A value that looks like an integer, float, boolean or None is converted, even if the option
    expects a string. To keep such a value as a string, call `split_spec` and then `read_options`
    with the index class. Raises ValueError if an option is not written as `option=value`.
    """
    name, written = split_spec(spec)
    return name, read_options(written)


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split an index spec such as `"pariskv:preset=paper:beta=.05"` into the name and the options.

    The values of the options stay strings. The name may also have the form `module:Class`, as in
    `"planes:Planes:bits=4"`. Raises ValueError if an option is not written as `option=value`, or is
    given twice.
    """
    name, *parts = check.text("index", spec).split(":")
    if parts and _dotted(name) and _dotted(parts[0]):
        name = f"{name}:{parts.pop(0)}"
    options: dict[str, str] = {}
    with_colons = re.sub(r",\s*(?=\w+=)", ":", spec)
    if with_colons != spec:
        raise ValueError(
            f"index: got {spec!r}, allowed is {with_colons!r}, with ':' between options"
        )
    for part in parts:
        option, equals, value = part.partition("=")
        if not (option and equals and value):
            raise ValueError(
                f"index: got {spec!r}, allowed is the form name:option=value:… or "
                "module:Class:option=value:…"
            )
        if option in options:
            raise ValueError(
                f"index: got {spec!r}, which gives {option!r} twice; allowed is one value for each "
                "option"
            )
        options[option] = value
    return name, options


def read_options(written: Mapping[str, str], *takers: Callable[..., Any]) -> dict[str, Any]:
    """Convert the values of options from strings to the types that they look like.

    A string that looks like an integer, float, boolean or None is converted, unless the option
    itself is a string.

    Args:
        written: Name of an option -> its value as a string, from `split_spec`.
        *takers: Classes or functions that accept the options as arguments. If an argument is
            annotated as `str`, its value stays a string, so that "none" is a possible value.

    Returns:
        Option -> value.
    """
    if not written:  # without reading signatures, since an index is created for each layer
        return {}
    parameters = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    strings = {p.name for p in parameters if p.annotation in (str, "str")}
    return {name: text if name in strings else _literal(text) for name, text in written.items()}


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name.

    It lists the known names and suggests similar ones.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3)
    near = near or difflib.get_close_matches(name.lower(), known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{kind}: got {name!r}, allowed is one of {known}{hint}"


def _dotted(text: str) -> bool:
    """Return True if `text` is a Python identifier, or several identifiers joined by dots."""
    return all(part.isidentifier() for part in text.split("."))


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
