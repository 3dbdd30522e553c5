"""Registry of indexes: creates an index from its name.

The name of an index is the name of a module in `kvindex/indexes/`, or of an entry point of an
installed package. The entry point must be in the group `kvindex.indexes`, and refer to a class
derived from `BaseIndex` (docs/adding-an-index.md). Any other index class that Python can import is
written as `module:Class`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import warnings
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from kvindex import indexes, wrappers
from kvindex.bases.index import BaseIndex, shared_options
from kvindex.core import check
from kvindex.core.config import read_options, split_spec, unknown
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import KVIndex
from kvindex.storage.recipe import class_name
from kvindex.wrappers.base import Wrapper

GROUP = "kvindex.indexes"
"""Group of the entry points with which packages add indexes."""


def names() -> list[str]:
    """Return the names of all available indexes, without importing them.

    Indexes of installed packages are included. If the name of such an index cannot be used, it is
    left out with a warning. The file of an index has the index's name, with underscores in place
    of hyphens.
    """
    for reason in refused().values():
        warnings.warn(reason, stacklevel=2)
    return usable()


def usable() -> list[str]:
    """Return the names of all available indexes, as `names` does, but give no warnings."""
    return sorted([*_in_folder(), *installed()])


def installed() -> dict[str, EntryPoint]:
    """Return the entry points of the indexes of installed packages, by the name of the index.

    This does not import the packages.
    """
    left_out = refused()
    return {name: points[0] for name, points in _brought().items() if name not in left_out}


def refused() -> dict[str, str]:
    """Return the names of installed packages' indexes that cannot be used, each with the reason."""
    reasons, folder = {}, _in_folder()
    for name, points in _brought().items():
        given = f"{GROUP}: got the name {name!r} from {' and '.join(map(_described, points))}"
        if name in folder:
            reasons[name] = f"{given}, but kvindex itself has an index of this name, which is used"
        elif len(points) > 1:
            reasons[name] = f"{given}; only one package may define a name: uninstall the others"
        elif set(name) & set(":+="):
            reasons[name] = f"{given}, allowed is a name without ':', '+' and '='"
    return reasons


def get(name: str) -> type[BaseIndex]:
    """Return the class of an index.

    Args:
        name: Name of the index, such as "pariskv", or `module:Class`, such as "planes:Planes". The
            module is then imported, which runs its code.

    Raises:
        ValueError: The name is unknown (the message lists similar names, and how to write the name
            of a class in a file), or several packages define an index with this name.
        ImportError: The package or module cannot be imported, or does not contain the class, or the
            class is not derived from `BaseIndex`.
    """
    if ":" in check.text("index", name):
        return _imported(name)
    module = _module_of(indexes, name)
    # an index is created for each layer of a model, and reading the folder takes half a millisecond
    if ("_" not in name and module in sys.modules) or name in _in_folder():
        found: type[BaseIndex] = _only(module, BaseIndex)
        return found
    known, left_out = installed(), refused()
    if name in left_out:
        raise ValueError(left_out[name])
    if name not in known:
        raise ValueError(_unknown_index(name, [*_in_folder(), *known]))
    return _loaded(known[name], f"index: got {name!r} from {_described(known[name])}")


REQUIRED = ("q_heads", "kv_heads", "head_dim")
"""Sizes that every index needs."""


def create(index: str, **options: Any) -> KVIndex:
    """Create an index from its name and options.

    Args:
        index: A name, or a name with options such as `"pariskv:preset=paper:beta=0.05"`. Wrappers
            (`kvindex/wrappers/`) follow after a plus sign, as in `"exact+sample:share=0.5"`. A
            class without a name is written `module:Class`, as in `"planes:Planes:bits=4"`.
        **options: Arguments of the index class: the geometry (`q_heads`, `kv_heads`, `head_dim`,
            …), `preset`, and fields of its configuration. They override the options in `index`.

    Returns:
        An empty index.

    Raises:
        ValueError: A name or an option is unknown, or a value is not allowed.
        ImportError: See `get`.

    Examples:
        ```python
        index = kvindex.create("pariskv:preset=fast", q_heads=32, kv_heads=8, head_dim=128)
        index.append(keys, values)  # [B, G, N, D] and [B, G, N, Dv]
        hits = index.search(queries, k=100)  # [B, H, D]
        rows = index.fetch(hits)  # keys [B, G, K, D], values [B, G, K, Dv]
        ```
    """
    first, *around = check.text("index", index).split("+")
    name, written = split_spec(first)
    kind = get(name)
    given = read_options(written, BaseIndex.__init__, kind.Config) | options
    _check_sizes(kind, given)
    made: KVIndex = kind(**given)
    for part in around:
        made = _wrapped(made, *split_spec(part))
    return made


def _check_sizes(kind: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if a required size is missing, and name an option that may be meant."""
    missing = [name for name in REQUIRED if name not in options]
    if not missing:
        return
    fields = [field.name for field in dataclasses.fields(kind.Config)]
    taken = inspect.signature(kind).parameters.values()
    own = [taker.name for taker in taken if taker.kind is not taker.VAR_KEYWORD]
    known = dict.fromkeys([*REQUIRED, *fields, *shared_options(), *own])
    for name in options.keys() - known.keys():
        raise ValueError(unknown("option", name, [*known]))
    raise ValueError(f"{missing[0]}: got no value, allowed is an integer of at least 1")


def class_of(source: str) -> type[BaseIndex] | type[Wrapper]:
    """Return the index or wrapper class for a string of the form `module:Class`.

    Such strings are stored in saved folders (`storage.recipe.class_name`). Only modules of
    registered indexes and wrappers are imported, so a saved folder cannot cause the import of any
    other module.

    Raises:
        ValueError: No registered index or wrapper has this class.
    """
    module = source.partition(":")[0]
    folder = [
        name
        for name in _in_folder()
        # the class is defined in `kvindex/indexes/<name>.py` or in `kvindex/<name>/index.py`
        if module in (_module_of(indexes, name), f"kvindex.{name}.index")
    ]
    for name in folder or installed():
        if class_name(get(name)) == source:
            return get(name)
    for wrapper in wrapper_classes().values():
        if class_name(wrapper) == source:
            return wrapper
    raise ValueError(
        f"index: got the class {source!r}, which is not registered under a name (kvindex.names()); "
        "create an empty index of this class and call kvindex.load(folder, into=index)"
    )


def option_names(name: str) -> list[str]:
    """Return the names of all options of an index, without those of its geometry.

    Args:
        name: Name of the index, such as "pariskv".

    Raises:
        ValueError: The name is unknown.
    """
    own = [field.name for field in dataclasses.fields(get(name).Config)]
    sizes = {field.name for field in dataclasses.fields(Geometry)}
    return [*own, *(option for option in shared_options() if option not in sizes)]


def wrapper_options() -> dict[str, dict[str, Any]]:
    """Return the options of each available wrapper, with their defaults."""
    found = {}
    for name, wrapper in wrapper_classes().items():
        options = inspect.signature(wrapper).parameters
        found[name] = {o: p.default for o, p in options.items() if o != "inner"}
    return found


def wrapper_classes() -> dict[str, type[Wrapper]]:
    """Return the classes of the wrappers, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(wrappers.__path__))
    return {
        name: _only(_module_of(wrappers, name), Wrapper)
        for name in names
        if not name.endswith("base")
    }


def _unknown_index(name: str, known: list[str]) -> str:
    """Return the error message for an unknown index.

    It lists the known names, unless the name is that of a wrapper or means full attention. If no
    known name is similar, it says how to write the name of a class that is not registered under a
    name.
    """
    if name in ("none", "full", "dense"):
        return (
            f"index: got {name!r}, but full attention has no index; pass index=None to a function "
            "that generates text, or --index none to a command"
        )
    if name in wrapper_classes():
        return (
            f"index: got {name!r}, which is a wrapper; allowed is the name of an index, followed "
            f"by the wrapper, for example 'pariskv+{name}'"
        )
    message, module = unknown("index", name, known), name.replace("-", "_")
    if "did you mean" in message or not all(part.isidentifier() for part in module.split(".")):
        return message
    return (
        f"{message}; a class in a file {module.replace('.', '/')}.py is written '{module}:Class', "
        "with the name of the class, and Python must be able to import the file (commands also "
        "find it in the current folder)"
    )


def _wrapped(inner: KVIndex, name: str, written: dict[str, str]) -> KVIndex:
    known = wrapper_options()
    if name not in known:
        raise ValueError(unknown("wrapper", name, known))
    wrapper, allowed = wrapper_classes()[name], known[name]
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
    """Return the entry points of installed packages that add indexes, as a dict from index names.

    Several packages may use the same name.
    """
    brought: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        brought.setdefault(point.name, []).append(point)
    return brought


def _described(point: EntryPoint) -> str:
    owner = "an unknown package" if point.dist is None else point.dist.name
    return f"{owner} ({point.value})"


def _imported(name: str) -> type[BaseIndex]:
    """Import the index class with the name `name`, which has the form `module:Class`."""
    try:
        return _loaded(EntryPoint(name, name, GROUP), f"index: got {name!r}")
    except ImportError as error:
        first = name.partition(":")[0]
        if first not in [*_in_folder(), *installed()]:
            raise
        raise ValueError(
            f"index: got {name!r}, allowed is the form {first}:option=value:…"
        ) from error


def _loaded(point: EntryPoint, given: str) -> type[BaseIndex]:
    """Import the index class to which an entry point refers.

    given: text with which error messages begin: the name that the caller passed.
    """
    try:
        found = point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(f"{given}, which cannot be imported ({reason})") from error
    if not (isinstance(found, type) and issubclass(found, BaseIndex)):
        raise ImportError(f"{given}, which is {found!r}; allowed is a class based on BaseIndex")
    return found


def _only(name: str, base: type) -> Any:
    """Return the only class derived from `base` that a module defines or lists in `__all__`.

    Raise TypeError if there is no such class, or more than one.
    """
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
        raise TypeError(
            f"{name}: got {len(found)} classes derived from {base.__name__}, allowed is exactly one"
        )
    return found[0]
