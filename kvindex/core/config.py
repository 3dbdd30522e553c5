"""Configurations of indexes: dataclasses, presets, and their form as one line of text."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvindex.core import check


@dataclass(frozen=True)
class NoConfig:
    """The configuration of an index without options."""


def make_config(
    owner: Any, preset: str | None, options: Mapping[str, Any], *, others: Iterable[str] = ()
) -> Any:
    """Make an `owner.Config` from its defaults, a preset, and options, which override the preset.

    Args:
        owner: An index class with `Config` and `presets`.
        preset: Name of a preset, or None.
        options: Fields of the configuration.
        others: Names of options that are not fields of `Config`. Error messages list them, too.

    Raises:
        ValueError: The preset or an option is unknown (the message lists similar names), or a value
            is not allowed.
    """
    fields = {}
    if preset is not None:
        if check.text("preset", preset) not in owner.presets:
            raise ValueError(unknown("preset", preset, owner.presets))
        fields = dict(owner.presets[preset])
    known = [field.name for field in dataclasses.fields(owner.Config)]
    for name in options:
        if name not in known:
            raise ValueError(unknown("option", name, [*known, *others]))
    return owner.Config(**{**fields, **options})


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse `"pariskv:preset=paper:beta=.05"` to `("pariskv", {"preset": "paper", "beta": 0.05})`.

    Values become integers, floats, booleans or None if they look like one, string options included
    (`read_options` keeps these as text). Raises ValueError for a part that is not `option=value`.
    """
    name, written = split_spec(spec)
    return name, read_options(written)


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split `"pariskv:preset=paper:beta=.05"` into its name and its options as text.

    Raises ValueError for a part that is not `option=value`.
    """
    name, *parts = check.text("index", spec).split(":")
    options: dict[str, str] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not (option and equals and value):
            raise ValueError(f"index: got {spec!r}, allowed is name:option=value:…")
        options[option] = value
    return name, options


def read_options(written: Mapping[str, str], *takers: Callable[..., Any]) -> dict[str, Any]:
    """Convert options from text to values.

    Args:
        written: Option -> text, from `split_spec`.
        *takers: Classes or functions that take the options as arguments. An option that one of
            them annotates as `str` stays text, so that "none" may be one of its values.

    Returns:
        Option -> value. Text that looks like an integer, float, boolean or None becomes one.
    """
    parameters = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    strings = {p.name for p in parameters if p.annotation in (str, "str")}
    return {name: text if name in strings else _literal(text) for name, text in written.items()}


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name, with similar names."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{kind}: got {name!r}, allowed is one of {known}{hint}"


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
