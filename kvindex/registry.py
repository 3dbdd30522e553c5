"""Indexes by name. They are found by scanning `kvindex/indexes/`: no list names them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from kvindex import check, indexes
from kvindex.base import BaseIndex
from kvindex.config import parse_spec, unknown


def names() -> list[str]:
    """The names of all indexes; a hyphen in a name is an underscore in its file."""
    files = (module.name for module in pkgutil.iter_modules(indexes.__path__))
    return sorted(name.replace("_", "-") for name in files)


def get(name: str) -> type[BaseIndex]:
    """The class of an index. Raises ValueError for an unknown name, with near matches."""
    if check.text("index", name) not in names():
        raise ValueError(unknown("index", name, names()))
    module = importlib.import_module(f"{indexes.__name__}.{name.replace('-', '_')}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseIndex)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__}: got {len(found)} index classes, allowed is one")
    return found[0]


def create(index: str, **options: Any) -> BaseIndex:
    """A new index from its name, or from a line such as `"pariskv:preset=paper:beta=.05"`.

    options: the geometry (`q_heads`, `kv_heads`, `head_dim`, …), `preset` and single fields of
    the index's configuration; they override what the line says. Raises ValueError.
    """
    name, given = parse_spec(index)
    return get(name)(**{**given, **options})
