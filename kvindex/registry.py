"""Registry: creates indexes by name, from `kvindex/indexes/` and from installed packages.

There is no list of names. A package adds an index with an entry point in the group
`kvindex.indexes`. The entry point has the index's name and refers to a class derived from
`BaseIndex` (docs/adding-an-index.md).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from kvindex import indexes, wrappers
from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.config import read_options, split_spec, unknown
from kvindex.core.protocol import KVIndex
from kvindex.storage.recipe import class_name
from kvindex.wrappers.base import Wrapper

GROUP = "kvindex.indexes"
"""Group of the entry points with which packages add indexes."""


def names() -> list[str]:
    """Return the names of all indexes, including installed ones, without importing them.

    A hyphen in a name becomes an underscore in the file name. Warns of names in installed packages
    that are left out.
    """
    for reason in refused().values():
        warnings.warn(reason, stacklevel=2)
    return sorted([*_in_folder(), *installed()])


def installed() -> dict[str, EntryPoint]:
    """Return the indexes of installed packages: name -> entry point, not imported yet."""
    left_out = refused()
    return {name: points[0] for name, points in _brought().items() if name not in left_out}


def refused() -> dict[str, str]:
    """Return the names in installed packages that are left out: name -> reason."""
    reasons, folder = {}, _in_folder()
    for name, points in _brought().items():
        given = f"{GROUP}: got the name {name!r} from {' and '.join(map(_described, points))}"
        if name in folder:
            reasons[name] = f"{given}, allowed is a name that kvindex has not: its own is used"
        elif len(points) > 1:
            reasons[name] = f"{given}, allowed is one package for a name: uninstall the others"
        elif set(name) & set(":+="):
            reasons[name] = f"{given}, allowed is a name without ':', '+' and '='"
    return reasons


def get(name: str) -> type[BaseIndex]:
    """Return the class of an index.

    Args:
        name: Name of the index, such as "pariskv".

    Raises:
        ValueError: The name is unknown (the message lists similar names), or several packages
            define it.
        ImportError: The package cannot be imported or does not have such a class.
    """
    if check.text("index", name) in _in_folder():
        found: type[BaseIndex] = _only(_module_of(indexes, name), BaseIndex)
        return found
    known, left_out = installed(), refused()
    if name in left_out:
        raise ValueError(left_out[name])
    if name not in known:
        raise ValueError(unknown("index", name, [*_in_folder(), *known]))
    return _loaded(known[name])


def create(index: str, **options: Any) -> KVIndex:
    """Create an index from its name, with options.

    Args:
        index: A name, or a line with options such as `"pariskv:preset=paper:beta=0.05"`. Wrappers
            (`kvindex/wrappers/`) follow after a plus sign: `"exact+sample:share=0.5"`.
        **options: The geometry (`q_heads`, `kv_heads`, `head_dim`, …), `preset`, and fields of the
            index's configuration. These options override those in `index`.

    Returns:
        An empty index.

    Raises:
        ValueError: A name or an option is unknown or out of range.
    """
    first, *around = check.text("index", index).split("+")
    name, written = split_spec(first)
    kind = get(name)
    given = read_options(written, BaseIndex.__init__, kind.Config)
    made: KVIndex = kind(**{**given, **options})
    for part in around:
        made = _wrapped(made, *split_spec(part))
    return made


def class_of(source: str) -> type[BaseIndex] | type[Wrapper]:
    """Return the index or wrapper class with the source `module:Class`.

    The source is the result of `storage.recipe.class_name`. Only classes that are registered by
    name are imported, so that a saved file cannot cause the import of any other module.

    Raises:
        ValueError: No index or wrapper has this class.
    """
    module = source.partition(":")[0]
    folder = [
        name
        for name in _in_folder()
        # an index is in `kvindex/indexes/`, or in a package of its own
        if module in (_module_of(indexes, name), f"kvindex.{name}.index")
    ]
    for name in folder or installed():
        if class_name(get(name)) == source:
            return get(name)
    for name in wrapper_options():
        if class_name(wrapper := _only(_module_of(wrappers, name), Wrapper)) == source:
            found: type[Wrapper] = wrapper
            return found
    raise ValueError(
        f"index: got the class {source!r}, allowed is one that has a name (kvindex.names()); for "
        "another class, load into an empty index: kvindex.load(folder, into=…)"
    )


def wrapper_options() -> dict[str, dict[str, Any]]:
    """Return the wrappers that may follow an index after a plus: name -> option -> default."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(wrappers.__path__)):
        if not name.endswith("base"):
            options = inspect.signature(_only(_module_of(wrappers, name), Wrapper)).parameters
            found[name] = {o: p.default for o, p in options.items() if o != "inner"}
    return found


def _wrapped(inner: KVIndex, name: str, written: dict[str, str]) -> KVIndex:
    known = wrapper_options()
    if name not in known:
        raise ValueError(unknown("wrapper", name, known))
    wrapper, allowed = _only(_module_of(wrappers, name), Wrapper), known[name]
    for option in written:
        if option not in allowed:
            raise ValueError(unknown("option", option, allowed))
    made: KVIndex = wrapper(inner, **read_options(written, wrapper))
    return made


def _module_of(folder: ModuleType, name: str) -> str:
    return f"{folder.__name__}.{name.replace('-', '_')}"


def _in_folder() -> list[str]:
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(indexes.__path__)]


def _brought() -> dict[str, list[EntryPoint]]:
    """Return all entry points of installed packages, by name."""
    brought: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        brought.setdefault(point.name, []).append(point)
    return brought


def _described(point: EntryPoint) -> str:
    owner = "an unknown package" if point.dist is None else point.dist.name
    return f"{owner} ({point.value})"


def _loaded(point: EntryPoint) -> type[BaseIndex]:
    given = f"index: got {point.name!r} from {_described(point)}"
    try:
        found = point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(f"{given}, which cannot be imported ({reason})") from error
    if not (isinstance(found, type) and issubclass(found, BaseIndex)):
        raise ImportError(f"{given}, which is {found!r}; allowed is a class on BaseIndex")
    return found


def _only(name: str, base: type) -> Any:
    """Return the one class derived from `base` that a module defines, or lists in `__all__`."""
    module = vars(importlib.import_module(name))
    exported = module.get("__all__", ())
    found = [
        value
        for key, value in module.items()
        if isinstance(value, type)
        and issubclass(value, base)
        and (value.__module__ == name or key in exported)
    ]
    if len(found) != 1:
        raise TypeError(f"{name}: got {len(found)} classes on {base.__name__}, allowed is one")
    return found[0]
