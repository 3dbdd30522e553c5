"""`load`: creates an index or a layer from the folder that its `save` wrote."""

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
    """Load a saved index or layer, with its tokens and its learned parameters.

    Args:
        folder: The folder that `save` wrote.
        device: Device of the tensors. It may differ from the device of the saved index.
        store: Where rows are stored: "device", "host", "auto", or an empty `RowStore`. It may
            differ from the store of the saved index.
        backend: Implementation of the operations: "torch", "cuda" or "cpu"; None for the default of
            the device. It may differ from the backend of the saved index.
        into: An empty index or layer into which to load, of the same class, geometry and
            configuration. Needed if the class of the saved index is not registered under a name.

    Returns:
        The index or layer; `into` if it is given.

    Raises:
        FileNotFoundError: The folder does not exist or is not a saved folder.
        ValueError: The folder was changed after it was saved, or does not fit `into`, which is then
            unchanged.
    """
    saved = SavedFolder.open(folder, KINDS)
    outline = saved.outline("state")
    if into is None:
        place = dict(device=device, store=store, backend=backend)
        try:
            made: object = _made(saved.about, place, outline, name=str(folder))
        except RecursionError as error:
            raise ValueError(
                f"folder: got {str(folder)!r}, whose wrappers are nested too deeply; only folders "
                "that save() wrote can be loaded"
            ) from error
    elif (device, store, backend) != ("cpu", "device", None):
        raise ValueError(
            "into: got an object together with device, store or backend; the object already has a "
            "device, a store and a backend, so leave these arguments out"
        )
    else:
        made = into
    taking = required(made, KeepsState, name="into")
    checking = capability(made, ChecksState)
    if checking is not None:  # before a large file is read
        checking.check_state(outline)
    taking.load_state_dict(saved.part("state"))
    return made


def _made(recipe: Mapping[str, Any], place: Mapping[str, Any], state: State, name: str) -> object:
    """Create an empty index or layer from a recipe, the class and options in a saved folder.

    Args:
        recipe: The recipe.
        place: Device, store and backend of the index.
        state: Shapes and dtypes of the saved tensors, which must fit the sizes in the recipe.
        name: Name of the folder, for error messages.

    Raises:
        ValueError: The recipe is not valid.
    """
    if "layer" not in recipe:
        return _index(recipe, place, state)
    known, index = class_name(AttentionLayer), recipe.get("index")
    if recipe["layer"] != known or index is None:
        raise ValueError(
            f"folder: got {name!r}, which contains a layer of class {recipe['layer']!r}"
            f"{' with an index that has no method recipe' if index is None else ''}, allowed is "
            f"a layer of class {known!r} whose index has the method recipe; create an empty layer "
            "like the saved one and call kvindex.load(folder, into=layer)"
        )
    return _around(AttentionLayer, _index(index, place, below("index", state)), recipe)


def _index(recipe: Any, place: Mapping[str, Any], state: State) -> KVIndex:
    role = "wrapper" if isinstance(recipe, Mapping) and "wrapper" in recipe else "index"
    kind = class_of(field(recipe, role, str, where="about"))
    if issubclass(kind, BaseIndex) != (role == "index"):
        raise ValueError(
            f"about.{role}: got {recipe[role]!r}, allowed is a registered {role} class"
        )
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
    """Create a wrapper or a layer around `index`, with the options in a recipe.

    Raise ValueError for unknown options.
    """
    options = field(recipe, "options", dict, where="about")
    try:
        return kind(index, **options)
    except TypeError as error:
        raise ValueError(
            f"about.options: got {options}, which the saved class does not accept ({error})"
        ) from error
