"""Wrapper: passes every call to the index inside it; subclasses change some of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar, Self

from torch import Tensor

from kvindex.core.capability import Capable, P, capability, required
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import (
    AppendsAsync,
    Attended,
    Attends,
    ChecksState,
    Codes,
    CountsTokens,
    EncodesBlocks,
    ExpandsBatch,
    Explains,
    Hits,
    KeepsState,
    KVIndex,
    Placement,
    PlacesRows,
    ReportsCoverage,
    ReportsMemory,
    ReportsRecipe,
    ReportsRowBytes,
    Reserves,
    ReservesAhead,
    Rows,
    RunsOps,
    WarmsUp,
    WeighsRows,
)
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable, cut_back
from kvindex.core.transaction import Guarded
from kvindex.storage.layout import Layout, check_layout
from kvindex.storage.recipe import Recipe, as_json, class_name
from kvindex.storage.saved import save_folder
from kvindex.storage.state import (
    ABOUT,
    NamedState,
    State,
    above,
    below,
    check_signed,
    length_and_batch,
    signed,
)


class Wrapper(Capable, NamedState, Guarded):
    """Behaves as the index `inner`, and offers what both it and that index are able to.

    A search of its own is no step of the inner index: no wrapper offers `DecodesStep`.
    """

    holds: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Names in a state below which another index's is."""
    own: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that a subclass has whatever the inner index offers."""
    lacks: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that a subclass has not, whatever the inner index offers."""

    def __init__(self, inner: KVIndex) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    def checkpoint(self) -> Any:
        """What the wrapper and the inner index are now, for `rollback`."""
        foreign = not isinstance(self.inner, Restorable)
        return super().checkpoint(), len(self.inner) if foreign else None

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says; an inner index that cannot go back is truncated."""
        before, length = checkpoint
        super().rollback(before)
        if length is not None:
            cut_back(self.inner, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A wrapper around a copy of the inner index."""
        copied = super().__deepcopy__(memo)
        copied.inner = deepcopy(self.inner, memo)
        return copied

    @property
    def geometry(self) -> Geometry:
        """The inner index's geometry."""
        return self.inner.geometry

    @property
    def config(self) -> Any:
        """The inner index's configuration."""
        return self.inner.config

    def encode(self, keys: Tensor) -> Codes:
        """As the inner index does."""
        return self.inner.encode(keys)

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """As the inner index does."""
        self.inner.append(keys, values, valid=valid)

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """As the inner index does."""
        return self.inner.search(queries, k=k, coverage=coverage)

    def fetch(self, hits: Hits) -> Rows:
        """As the inner index does."""
        return self.inner.fetch(hits)

    def end_prompt(self) -> None:
        """As the inner index does."""
        self.inner.end_prompt()

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """As the inner index does."""
        self.inner.observe_queries(queries, positions)

    def mark_boundary(self) -> None:
        """As the inner index does."""
        self.inner.mark_boundary()

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """As the inner index does."""
        self.inner.observe_tokens(tokens, first=first)

    def __len__(self) -> int:
        return len(self.inner)

    def truncate(self, length: int) -> None:
        """As the inner index does."""
        self.inner.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """As the inner index does."""
        self.inner.reorder(batch_indices)

    def reset(self) -> None:
        """As the inner index does."""
        self.inner.reset()
        self._broken = None

    def nbytes(self) -> dict[str, int]:
        """As the inner index does."""
        return self.inner.nbytes()

    # Capabilities

    def _offers(self, wanted: type) -> bool:
        own = wanted in self.own or capability(self.inner, wanted) is not None
        return own and wanted not in self.lacks

    def _inner(self, wanted: type[P]) -> P:
        """The inner index as one with this capability. Raises TypeError where it has it not."""
        return required(self.inner, wanted, name="inner")

    @property
    def backend(self) -> str:
        """The inner index's backend."""
        return self._inner(RunsOps).backend

    @property
    def block_tokens(self) -> int:
        """The inner index's."""
        return self._inner(EncodesBlocks).block_tokens

    @property
    def ops(self) -> Any:
        """The inner index's ops."""
        return self._inner(RunsOps).ops

    def explain(self) -> str:
        """The wrapper and its options, then what the inner index says."""
        return f"wrapper: {self._described()}\n{self._inner(Explains).explain()}"

    def _described(self) -> str:
        """The wrapper's name, and those of its options that are attributes of the same names."""
        options = [f"{name}={value!r}" for name, value in self._options().items()]
        return f"{type(self).__name__}({', '.join(options)})"

    def _options(self) -> dict[str, Any]:
        """Those of its options that are attributes of the same names."""
        given = [name for name in inspect.signature(type(self)).parameters if name != "inner"]
        return {name: vars(self)[name] for name in given if name in vars(self)}

    @property
    def counts(self) -> Tensor:
        """The inner index's."""
        return self._inner(CountsTokens).counts

    @property
    def valid(self) -> Tensor | None:
        """The inner index's."""
        return self._inner(CountsTokens).valid

    @property
    def row_bytes(self) -> int:
        """The inner index's."""
        return self._inner(ReportsRowBytes).row_bytes

    def memory(self) -> dict[int, int]:
        """As the inner index says."""
        return self._inner(ReportsMemory).memory()

    def placement(self) -> Placement:
        """As the inner index says."""
        return self._inner(PlacesRows).placement()

    @property
    def weighted(self) -> bool:
        """As the inner index says."""
        return self._inner(WeighsRows).weighted

    def check_coverage(self, coverage: float) -> None:
        """As the inner index does."""
        self._inner(ReportsCoverage).check_coverage(coverage)

    def expand_batch(self, count: int) -> Self:
        """This wrapper around a view of the inner index, as `BaseIndex.expand_batch`."""
        view = self._shallow()
        view.inner = self._inner(ExpandsBatch).expand_batch(count)
        return view

    def state_dict(self) -> State:
        """The inner index's state, with names below `inner`, and the wrapper's own."""
        inner = above("inner", self._inner(KeepsState).state_dict())
        return signed(self._whose(), {**inner, **self._own_state()})

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Check the inner index's part of a state, then the wrapper's own tensors."""
        check_signed(self._whose(), state)
        inner = capability(self.inner, ChecksState)
        if inner is not None:
            inner.check_state(below("inner", state))
        self._check_own(state)

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError for tensors of the wrapper that it cannot have saved."""
        own = {
            name: tensor
            for name, tensor in state.items()
            if name != ABOUT and name.partition(".")[0] not in self.holds
        }
        g = self.geometry
        sizes = {"G": g.kv_heads, "H": g.q_heads, "D": g.head_dim, "g": g.group_size}
        sizes |= length_and_batch(state)
        layout = self._layout_of_attributes(own) | self._layout(own, sizes.get("N", 2**62))
        check_layout(layout, own, sizes)

    def _layout(self, state: Mapping[str, Tensor], length: int) -> Layout:
        """Declare the wrapper's own tensors, beyond what their annotations say (`Hooks._layout`).

        state: those tensors; length: tokens of the inner index.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As the inner index does; options of the wrapper stay its own."""
        check_signed(self._whose(), state)
        self._check_own(state)
        self._inner(KeepsState).load_state_dict(below("inner", state))
        self._unpack(state, self.geometry.device)

    def recipe(self) -> Recipe:
        """The wrapper and its options, and how the inner index is made."""
        inner = self._inner(ReportsRecipe).recipe()
        options = {name: as_json(value) for name, value in self._options().items()}
        return {"wrapper": class_name(type(self)), "options": options, "inner": inner}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the wrapper and its inner index to a new folder, as `BaseIndex.save` does."""
        save_folder(folder, "index", self.recipe(), {"state": self.state_dict})

    def _whose(self) -> dict[str, Any]:
        """What a wrapper must agree in to take the state of this one."""
        return {"wrapper": type(self).__name__}

    def _own_state(self) -> State:
        """What the wrapper keeps beside the inner index."""
        return self._packed()

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """As the inner index does; a wrapper that appends more has both."""
        return self._inner(AppendsAsync).start_append(keys, values, valid=valid)

    def reserve(self, tokens: int) -> None:
        """As the inner index does."""
        self._inner(Reserves).reserve(tokens)

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """As the inner index does."""
        self._inner(ReservesAhead).reserve_ahead(tokens, batch=batch)

    def warm_up(self, *, k: int, tokens: int) -> None:
        """As the inner index does."""
        self._inner(WarmsUp).warm_up(k=k, tokens=tokens)

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """As `protocol.Attends.attend`, over what this index's own search finds."""
        return self.attend_hits(queries, self.search(queries, k=k), resident)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As the inner index does."""
        return self._inner(Attends).attend_hits(queries, hits, resident)
