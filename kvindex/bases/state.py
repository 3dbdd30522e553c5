"""`StatefulIndex`: saving an index as named tensors (`state_dict`), and loading them.

The state of an index has these entries:
| name | contents |
|---|---|
| `length`, `batch` | number of tokens, number of sequences |
| `rows` | keys and values, encoded by the row codec: uint8 `[B, G, N, row_bytes]` |
| `row_center` | center of the keys, float32 `[B, G, D]`, if keys are stored relative to it |
| `valid` | False for padded tokens, bool `[B, N]`; missing if no token is padded |
| `codes.…` | codes, such as quantized keys |
| `learned.…` | learned parameters, such as a codebook |
| `statistics.…` | attributes that the class lists in `statistics` |
| `about` | class, row codec, geometry and configuration of the index |

Objects of a library such as FAISS are not part of the state. They are rebuilt from the rows
(`_after_rollback`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.hooks import Hooks
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.storage.centers import is_centered
from kvindex.storage.codecs import check_rows
from kvindex.storage.columns import Columns, Valid
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, check_layout, scalar
from kvindex.storage.recipe import Recipe, as_json, class_name
from kvindex.storage.saved import save_folder
from kvindex.storage.state import ABOUT, NamedState, State, above, below, check_signed, signed
from kvindex.storage.store import CenteredRows, EncodedRows, RowStore

MOST_SEQUENCES = 2**20
"""Largest batch size in a state. In a state without tokens, nothing else limits the batch size."""


class StatefulIndex(NamedState, Hooks):
    """Base class of `BaseIndex` with the methods that save and load an index."""

    statistics: ClassVar[tuple[str, ...]] = ()

    row_codec: str
    row_bytes: int
    _codes: Columns
    _store: RowStore
    _valid: Valid
    _learned: Codes
    _counts: Tensor

    def state_dict(self) -> State:
        """Return the contents of this index as named tensors.

        Later calls do not change these tensors.

        Raises:
            ValueError: An argument of an earlier call on a CUDA device was wrong.
        """
        self.raise_pending()
        state: State = {"length": torch.tensor(self._length)}
        if self._batch is not None:
            state["batch"] = torch.tensor(self._batch)
        if self._length:
            state["rows"] = self._encoded_rows().encoded()
            if isinstance(self._store, CenteredRows) and self._store.center is not None:
                center = self._store.center
                state["row_center"] = center.clone(memory_format=torch.contiguous_format)
            state |= {f"codes.{name}": self._codes[name].clone() for name in self._codes}
            if self._valid.flags is not None:
                state["valid"] = self._valid.flags.clone()
        state |= {f"learned.{name}": part.contiguous() for name, part in self._learned.items()}
        return signed(self._whose(), {**state, **above("statistics", self._packed())})

    def _encoded_rows(self) -> EncodedRows:
        """Return the row store. Raise TypeError if it cannot export its rows as bytes."""
        if not isinstance(self._store, EncodedRows):
            raise TypeError(
                f"store: got a {type(self._store).__name__}, which cannot save or load encoded "
                "rows; use a store that implements kvindex.storage.store.EncodedRows"
            )
        return self._store

    def _append_rows(self, rows: Tensor, center: Tensor | None) -> None:
        """Append the rows of a saved state.

        Raise TypeError if the store cannot append encoded rows.
        """
        store = self._encoded_rows()
        if center is None:  # plain rows, or coded rows without a center
            store.append_encoded(rows)
        elif isinstance(store, CenteredRows):
            store.append_encoded(rows, center)
        else:
            raise TypeError(
                f"store: got a {type(store).__name__}, which cannot load a state with row_center; "
                "use a store that implements kvindex.storage.store.CenteredRows"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of an index with the same geometry and configuration into this empty
        index.

        Device and backend may differ. If the call fails, the index is unchanged.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: The state does not fit, or this index is not empty.
            TypeError: An entry of the state is not a tensor, or the store cannot append encoded
                rows.
        """
        self.check_state(state)
        if self._batch is not None:
            raise ValueError(
                f"state: got an index with {self._length} tokens and batch size {self._batch}, but "
                "only an empty index can load a state; call reset() first"
            )
        device, length = self.geometry.device, int(state["length"])
        if length:
            rows = state["rows"]
            self._append_rows(rows, state.get("row_center"))
            codes = {name: part.to(device) for name, part in below("codes", state).items()}
            self._codes.append(codes)
            self._counts = torch.full((len(rows),), length)
            if "valid" in state:
                self._valid = Valid.of(state["valid"].to(device))
                self._counts = state["valid"].sum(1).cpu()
        self._learned = {name: part.to(device) for name, part in below("learned", state).items()}
        self._length, self._batch = length, int(state["batch"]) if "batch" in state else None
        if self._batch is not None and not length:
            self._counts = torch.zeros(self._batch, dtype=torch.int64)
        self._unpack(below("statistics", state), device)
        self._after_rollback()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise TypeError or ValueError if this index cannot load the saved state `state`.

        See `protocol.ChecksState.check_state`.
        """
        check_signed(self._whose(), state)
        own = {name: tensor for name, tensor in state.items() if name != ABOUT}
        g, length = self.geometry, scalar("length", own)
        sizes = {"N": length, "G": g.kv_heads, "H": g.q_heads, "D": g.head_dim}
        sizes |= {"Dv": g.value_dim, "g": g.group_size}
        batch = None
        if length or "batch" in own:
            sizes["B"] = batch = scalar("batch", own, least=1, most=MOST_SEQUENCES)
        layout = self._layout_of_base(length)
        check_layout(layout, {name: own[name] for name in own if name in layout}, sizes)
        counts = None if batch is None else torch.full((batch,), length)
        if counts is not None and "valid" in own:
            counts = None if own["valid"].is_meta else own["valid"].sum(1).cpu()
        stored = StateSizes(batch, length, counts, own)
        check_layout(layout | self._layout_of_rest(own) | self._layout(stored), own, sizes)
        if length and self._check is not False and not own["rows"].is_meta:
            check_rows(self.row_codec, g, own["rows"], own.get("valid"))

    def _layout_of_base(self, length: int) -> Layout:
        """Return the required shape and dtype of the tensors that the state of every index has."""
        layout = {
            "length": TensorSpec("", torch.int64),
            "batch": TensorSpec("", torch.int64, optional=not length),
        }
        if not length:
            return layout
        layout["rows"] = TensorSpec(f"B G N {self.row_bytes}", torch.uint8)
        layout["valid"] = TensorSpec("B N", torch.bool, optional=True)
        if is_centered(self.row_codec, self.geometry):
            bounds = dict[str, Any](least=-check.LARGEST, most=check.LARGEST)
            layout["row_center"] = TensorSpec("B G D", torch.float32, optional=True, **bounds)
        return layout

    def _layout_of_rest(self, state: Mapping[str, Tensor]) -> Layout:
        """Return default specs for the codes, learned tensors and statistics in `state`.

        A spec is a required shape and dtype. The method `_layout` of a subclass may declare
        other specs, which take precedence.
        """
        codes = {name: TensorSpec("B G N ...") for name in below("codes", state)}
        learned = {name: TensorSpec("B ...") for name in below("learned", state)}
        statistics = self._layout_of_attributes(below("statistics", state))
        parts = {"codes": codes, "learned": learned, "statistics": statistics}
        return {f"{part}.{name}": spec for part in parts for name, spec in parts[part].items()}

    def recipe(self) -> Recipe:
        """Return the class, geometry and configuration of this index, as JSON.

        `kvindex.load` creates an equal, empty index from this recipe. Device, store and backend are
        not included.
        """
        geometry = self.geometry.options()
        geometry.pop("device")
        return {
            "index": class_name(type(self)),
            "geometry": {name: as_json(value) for name, value in geometry.items()},
            "config": as_json(self.config),
            "row_codec": self.row_codec,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index to a new folder, from which `kvindex.load` reads it.

        If the call fails, no incomplete folder is left.

        Args:
            folder: Path of the new folder.

        Raises:
            OSError: The folder exists or cannot be written.
            ValueError: An argument of an earlier call on a CUDA device was wrong.
        """
        save_folder(folder, "index", self.recipe(), {"state": self.state_dict})

    def _whose(self) -> dict[str, Any]:
        """Return the properties that an index must have to load a saved state of this index."""
        geometry = self.geometry.options()
        geometry.pop("device")
        return {
            "index": type(self).__name__,
            "row_codec": self.row_codec,
            "geometry": geometry,
            "config": self.config,
        }
