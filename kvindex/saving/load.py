"""Load an index or a layer from the folder that its `save` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from kvindex.bases.index import BaseIndex
from kvindex.core.capability import capability, required
from kvindex.core.check import one_of
from kvindex.core.protocol import ChecksState, KeepsState, KVIndex
from kvindex.layer import AttentionLayer
from kvindex.registry import class_of
from kvindex.storage.codecs import NAMES
from kvindex.storage.recipe import class_name, dataclass_from, field, geometry_from
from kvindex.storage.saved import SavedFolder
from kvindex.storage.state import State, below
from kvindex.storage.store import RowStore

KINDS = ("index", "layer")
"""Kinds of saved folders that `load` can read. An adapter loads the third kind, a saved cache."""

T = TypeVar("T")


@overload
def load(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    store: str | RowStore = "device",
    backend: str | None = None,
) -> KVIndex | AttentionLayer: ...


@overload
def load(folder: str | os.PathLike[str], *, into: T) -> T: ...


def load(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    store: str | RowStore = "device",
    backend: str | None = None,
    into: object = None,
) -> object:
    """Load a saved index or layer. It continues exactly where the saved object stopped.

    Args:
        folder: The folder that `save` wrote.
        device: As in `kvindex.create`. It may differ from the device of the saved index.
        store: As in `kvindex.create`. It may differ from the store of the saved index.
        backend: As in `kvindex.create`. It may differ from the backend of the saved index.
        into: An empty index or layer to load into, of the same class, geometry and configuration.
            It is needed for an index that has no registered name.

    Returns:
        The index or layer; `into` if it is given.

    Raises:
        FileNotFoundError: There is no saved folder.
        ValueError: The folder was changed after it was saved, or belongs to another kind of index
            than `into`, which is then unchanged.
    """
    saved = SavedFolder.open(folder, KINDS)
    outline = saved.outline("state")
    if into is None:
        place = dict(device=device, store=store, backend=backend)
        try:
            made: object = _made(saved.about, place, outline, name=str(folder))
        except RecursionError as error:
            raise ValueError(
                f"folder: got {str(folder)!r}, whose wrappers are nested too deeply, allowed "
                "is what save() made"
            ) from error
    elif (device, store, backend) != ("cpu", "device", None):
        raise ValueError("into: got an object and device, store or backend, allowed is one of both")
    else:
        made = into
    taking = required(made, KeepsState, name="into")
    checking = capability(made, ChecksState)
    if checking is not None:  # before a large file is read
        checking.check_state(outline)
    taking.load_state_dict(saved.part("state"))
    return made


def _made(recipe: Mapping[str, Any], place: Mapping[str, Any], state: State, name: str) -> object:
    """Make an empty index or layer from a recipe. Raises ValueError for a wrong recipe.

    state: the outline of the saved state, with which sizes in the recipe are compared.
    """
    if "layer" not in recipe:
        return _index(recipe, place, state)
    known, index = class_name(AttentionLayer), recipe.get("index")
    if recipe["layer"] != known or index is None:
        raise ValueError(
            f"folder: got {name!r}, a layer {recipe['layer']!r} around "
            f"{'an index without a recipe' if index is None else 'an index'}, "
            f"allowed is {known!r} around one that has a name; of another, load into an empty "
            "one: kvindex.load(folder, into=…)"
        )
    return _around(AttentionLayer, _index(index, place, below("index", state)), recipe)


def _index(recipe: Any, place: Mapping[str, Any], state: State) -> KVIndex:
    role = "wrapper" if isinstance(recipe, Mapping) and "wrapper" in recipe else "index"
    kind = class_of(field(recipe, role, str, where="about"))
    if issubclass(kind, BaseIndex) != (role == "index"):
        raise ValueError(f"about.{role}: got {recipe[role]!r}, which is no {role}, allowed is one")
    if not issubclass(kind, BaseIndex):
        inner = field(recipe, "inner", dict, where="about")
        return _around(kind, _index(inner, place, below("inner", state)), recipe)
    row_codec = one_of("about.row_codec", recipe.get("row_codec"), NAMES)
    sizes = field(recipe, "geometry", dict, where="about")
    geometry = geometry_from(sizes, row_codec, state)
    if geometry["rope"] is not None:
        geometry["rope"] = geometry["rope"].to(place["device"])
    config = dataclass_from(kind.Config, field(recipe, "config", dict, where="about"))
    return kind(**geometry, **place, row_codec=row_codec, **vars(config))


def _around(kind: Callable[..., T], index: KVIndex, recipe: Mapping[str, Any]) -> T:
    """Make a wrapper or layer with a recipe's options. Raises ValueError for unknown options."""
    options = field(recipe, "options", dict, where="about")
    try:
        return kind(index, **options)
    except TypeError as error:
        raise ValueError(
            f"about.options: got {options}, allowed is what save() made ({error})"
        ) from error
