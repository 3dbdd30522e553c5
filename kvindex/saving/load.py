"""Load an index or a layer from the folder that its `save` wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core.capability import required
from kvindex.core.protocol import KeepsState, KVIndex
from kvindex.layer import AttentionLayer
from kvindex.registry import class_of
from kvindex.storage.recipe import class_name, dataclass_from, from_json
from kvindex.storage.saved import SavedFolder
from kvindex.storage.store import RowStore

KINDS = ("index", "layer")
"""What may have been saved; a cache is loaded by the adapter that it is of."""

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
    """The index or the layer that was saved in a folder, which goes on as the one that was.

    device, store, backend: as `kvindex.create` takes them; they may be others than those of the
    index that was saved. into: an empty index or layer of the same class, geometry and
    configuration, to load into; for an index that has no name here.

    Raises FileNotFoundError or ValueError, in words, for a folder that is not as it was saved, or
    of another index than `into`; `into` stays as it was.
    """
    saved = SavedFolder.open(folder, KINDS)
    if into is None:
        place = dict(device=device, store=store, backend=backend)
        made: object = _made(saved.about, place, name=str(folder))
    elif (device, store, backend) != ("cpu", "device", None):
        raise ValueError("into: got one with device, store or backend, allowed is one or the other")
    else:
        made = into
    required(made, KeepsState, name="into").load_state_dict(saved.part("state"))
    return made


def _made(recipe: Mapping[str, Any], place: Mapping[str, Any], name: str) -> object:
    """An empty index or layer. Raises ValueError for a recipe that makes none."""
    if "layer" not in recipe:
        return _index(recipe, place)
    known = class_name(AttentionLayer)
    if recipe["layer"] != known or recipe["index"] is None:
        raise ValueError(
            f"folder: got {name!r}, a layer {recipe['layer']!r} around "
            f"{'an index that tells no recipe' if recipe['index'] is None else 'an index'}, "
            f"allowed is {known!r} around one that has a name; of another, load into an empty "
            "one: kvindex.load(folder, into=…)"
        )
    return AttentionLayer(_index(recipe["index"], place), **recipe["options"])


def _index(recipe: Mapping[str, Any], place: Mapping[str, Any]) -> KVIndex:
    kind = class_of(recipe["wrapper"] if "wrapper" in recipe else recipe["index"])
    if not issubclass(kind, BaseIndex):
        around: KVIndex = kind(_index(recipe["inner"], place), **recipe["options"])
        return around
    geometry = {name: from_json(_HINTS.get(name, Any), v) for name, v in recipe["geometry"].items()}
    if geometry["rope"] is not None:
        geometry["rope"] = geometry["rope"].to(place["device"])
    config = dataclass_from(kind.Config, recipe["config"])
    return kind(**geometry, **place, row_codec=recipe["row_codec"], **vars(config))


_HINTS: dict[str, Any] = {"rope": Tensor | None, "dtype": torch.dtype}
