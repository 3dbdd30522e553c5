"""Indexes by name. They are found by scanning `kvindex/indexes/`: no list names them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from kvindex import indexes, wrappers
from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.config import parse_spec, unknown
from kvindex.core.protocol import KVIndex
from kvindex.wrappers.base import Wrapper


def names() -> list[str]:
    """The names of all indexes; a hyphen in a name is an underscore in its file."""
    files = (module.name for module in pkgutil.iter_modules(indexes.__path__))
    return sorted(name.replace("_", "-") for name in files)


def get(name: str) -> type[BaseIndex]:
    """The class of an index. Raises ValueError for an unknown name, with near matches."""
    if check.text("index", name) not in names():
        raise ValueError(unknown("index", name, names()))
    found: type[BaseIndex] = _only(f"{indexes.__name__}.{name.replace('-', '_')}", BaseIndex)
    return found


def create(index: str, **options: Any) -> KVIndex:
    """A new index from its name, or from a line such as `"pariskv:preset=paper:beta=.05"`.

    Wrappers (`kvindex/wrappers/`) follow after a plus: `"pariskv+sample:share=.5"`.

    options: the geometry (`q_heads`, `kv_heads`, `head_dim`, …), `preset` and single fields of
    the index's configuration; they override what the line says. Raises ValueError.
    """
    first, *around = check.text("index", index).split("+")
    name, given = parse_spec(first)
    made: KVIndex = get(name)(**{**given, **options})
    for part in around:
        name, given = parse_spec(part)
        made = _wrapped(made, name, given)
    return made


def wrapper_options() -> dict[str, dict[str, Any]]:
    """The wrappers that may follow an index after a plus: name -> option -> default."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(wrappers.__path__)):
        if name != "base":
            options = inspect.signature(_only(f"{wrappers.__name__}.{name}", Wrapper)).parameters
            found[name] = {o: p.default for o, p in options.items() if o != "inner"}
    return found


def _wrapped(inner: KVIndex, name: str, given: dict[str, Any]) -> KVIndex:
    known = wrapper_options()
    if name not in known:
        raise ValueError(unknown("wrapper", name, known))
    wrapper, allowed = _only(f"{wrappers.__name__}.{name}", Wrapper), known[name]
    for option in given:
        if option not in allowed:
            raise ValueError(unknown("option", option, allowed))
    made: KVIndex = wrapper(inner, **given)
    return made


def _only(name: str, base: type) -> Any:
    """The one class on `base` that a module defines."""
    module = importlib.import_module(name)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == name
    ]
    if len(found) != 1:
        raise TypeError(f"{name}: got {len(found)} classes on {base.__name__}, allowed is one")
    return found[0]
