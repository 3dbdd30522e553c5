"""An index as named tensors: `state_dict` and `load_state_dict` of every index.

| name | contents |
|---|---|
| `length`, `batch` | numbers |
| `rows` | uint8 `[B, G, N, row_bytes]`, encoded by the row codec |
| `row_center` | float32 `[B, G, D]`, if rows are relative to a center (`storage/centers.py`) |
| `valid` | bool `[B, N]`, if some token is padded |
| `codes.…` | codes |
| `learned.…` | learned parameters (`_learn`) |
| `statistics.…` | attributes that the class lists in `statistics` |
| `about` | the kind of index to which the state belongs |

Objects of a library such as FAISS are not part of the state; they are rebuilt from the rows
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
from kvindex.storage.layout import Held, Layout, TensorSpec, check_layout, scalar
from kvindex.storage.recipe import Recipe, as_json, class_name
from kvindex.storage.saved import save_folder
from kvindex.storage.state import ABOUT, NamedState, State, above, below, check_signed, signed
from kvindex.storage.store import CenteredRows, EncodedRows, RowStore

MOST_SEQUENCES = 2**20
"""Largest batch size in a state. In a state without tokens, nothing else limits the batch size."""


class StatefulIndex(NamedState, Hooks):
    """Base of `BaseIndex` that converts an index to named tensors and back."""

    statistics: ClassVar[tuple[str, ...]] = ()

    row_codec: str
    row_bytes: int
    _codes: Columns
    _store: RowStore
    _valid: Valid
    _learned: Codes
    _counts: Tensor

    def state_dict(self) -> State:
        """Return the contents of this index as named tensors, which later calls do not change.

        Raises:
            ValueError: A check on a CUDA device has found an error since the last call.
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
        """Return the store, or raise TypeError if it cannot return its rows as bytes."""
        if not isinstance(self._store, EncodedRows):
            raise TypeError(
                f"store: got a {type(self._store).__name__}, allowed for a state is one with "
                "encoded() and append_encoded() (kvindex.storage.store.EncodedRows)"
            )
        return self._store

    def _append_rows(self, rows: Tensor, center: Tensor | None) -> None:
        """Append the rows of a state, or raise TypeError if the store does not support it."""
        store = self._encoded_rows()
        if center is None:  # plain rows, or coded rows without a center
            store.append_encoded(rows)
        elif isinstance(store, CenteredRows):
            store.append_encoded(rows, center)
        else:
            raise TypeError(
                f"store: got a {type(store).__name__}, allowed for a state with row_center is one "
                "with center and append_encoded(rows, center) (kvindex.storage.store.CenteredRows)"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of an index with the same geometry and configuration.

        Device and backend may differ. If the call fails, the index is unchanged.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: The state does not fit, or this index is not empty.
            TypeError: A part of the state is not a tensor, or the store cannot load rows.
        """
        self.check_state(state)
        if self._batch is not None:
            raise ValueError(
                f"state: got an index that holds {self._length} tokens of a batch of "
                f"{self._batch}, allowed is a new one, or reset() before"
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
        """Check a state as `protocol.ChecksState.check_state` does."""
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
        held = Held(batch, length, counts, own)
        check_layout(layout | self._layout_of_rest(own) | self._layout(held), own, sizes)
        if length and self._check is not False and not own["rows"].is_meta:
            check_rows(self.row_codec, g, own["rows"], own.get("valid"))

    def _layout_of_base(self, length: int) -> Layout:
        """Return the tensors that every index with `length` tokens has in its state."""
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
        """Return the requirements for tensors that the index does not declare."""
        codes = {name: TensorSpec("B G N ...") for name in below("codes", state)}
        learned = {name: TensorSpec("B ...") for name in below("learned", state)}
        statistics = self._layout_of_attributes(below("statistics", state))
        parts = {"codes": codes, "learned": learned, "statistics": statistics}
        return {f"{part}.{name}": spec for part in parts for name, spec in parts[part].items()}

    def recipe(self) -> Recipe:
        """Return how to create such an index, as JSON, without device, store and backend."""
        geometry = self.geometry.options()
        geometry.pop("device")
        return {
            "index": class_name(type(self)),
            "geometry": {name: as_json(value) for name, value in geometry.items()},
            "config": as_json(self.config),
            "row_codec": self.row_codec,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index to a new folder, for `kvindex.load`.

        The folder is complete or does not exist.

        Args:
            folder: Path of the new folder.

        Raises:
            OSError: The folder exists or cannot be written.
            ValueError: As for `state_dict`.
        """
        save_folder(folder, "index", self.recipe(), {"state": self.state_dict})

    def _whose(self) -> dict[str, Any]:
        """Return the properties that another index must share to load the state of this index."""
        geometry = self.geometry.options()
        geometry.pop("device")
        return {
            "index": type(self).__name__,
            "row_codec": self.row_codec,
            "geometry": geometry,
            "config": self.config,
        }
