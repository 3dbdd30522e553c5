"""`Wrapper`: passes every call to the index that it wraps. Subclasses change some calls."""

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
    """An index that wraps the index `inner` and behaves like it.

    It offers the capabilities that both the wrapper's class and the inner index have. No wrapper
    offers `DecodesStep`, because a decode step of the inner index would not call the wrapper's
    search.

    Args:
        inner: The index to wrap.
    """

    holds: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Prefixes of the tensor names in a state under which the states of inner indexes are stored.
    """
    own: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that a subclass has even if the inner index does not have them."""
    lacks: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that a subclass does not have even if the inner index has them."""

    def __init__(self, inner: KVIndex) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    def checkpoint(self) -> Any:
        """Return the current state of the wrapper and the inner index, for `rollback`."""
        foreign = not isinstance(self.inner, Restorable)
        return super().checkpoint(), len(self.inner) if foreign else None

    def rollback(self, checkpoint: Any) -> None:
        """Restore a checkpoint; an inner index without rollback is truncated."""
        before, length = checkpoint
        super().rollback(before)
        if length is not None:
            cut_back(self.inner, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a wrapper around a copy of the inner index."""
        copied = super().__deepcopy__(memo)
        copied.inner = deepcopy(self.inner, memo)
        return copied

    @property
    def geometry(self) -> Geometry:
        """Geometry of the inner index."""
        return self.inner.geometry

    @property
    def config(self) -> Any:
        """Configuration of the inner index."""
        return self.inner.config

    def encode(self, keys: Tensor) -> Codes:
        """Encode keys `[B, G, N, D]` with the inner index."""
        return self.inner.encode(keys)

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens to the inner index, as `BaseIndex.append`."""
        self.inner.append(keys, values, valid=valid)

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Search the inner index, as `BaseIndex.search`."""
        return self.inner.search(queries, k=k, coverage=coverage)

    def fetch(self, hits: Hits) -> Rows:
        """Read rows of the inner index, as `BaseIndex.fetch`."""
        return self.inner.fetch(hits)

    def end_prompt(self) -> None:
        """Signal the end of the prompt to the inner index."""
        self.inner.end_prompt()

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Pass the newest queries to the inner index."""
        self.inner.observe_queries(queries, positions)

    def mark_boundary(self) -> None:
        """Signal the end of a segment to the inner index."""
        self.inner.mark_boundary()

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Pass the text to the inner index."""
        self.inner.observe_tokens(tokens, first=first)

    def __len__(self) -> int:
        return len(self.inner)

    def truncate(self, length: int) -> None:
        """Truncate the inner index, as `BaseIndex.truncate`."""
        self.inner.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch of the inner index, as `BaseIndex.reorder`."""
        self.inner.reorder(batch_indices)

    def reset(self) -> None:
        """Reset the inner index, as `BaseIndex.reset`."""
        self.inner.reset()
        self._broken = None

    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use of the inner index, as `BaseIndex.nbytes`."""
        return self.inner.nbytes()

    # Capabilities

    def _offers(self, wanted: type) -> bool:
        own = wanted in self.own or capability(self.inner, wanted) is not None
        return own and wanted not in self.lacks

    def _inner(self, wanted: type[P]) -> P:
        """Return the inner index, or raise TypeError if it does not have this capability."""
        return required(self.inner, wanted, name="inner")

    @property
    def backend(self) -> str:
        """Backend of the inner index."""
        return self._inner(RunsOps).backend

    @property
    def block_tokens(self) -> int:
        """Number of tokens that the inner index encodes together."""
        return self._inner(EncodesBlocks).block_tokens

    @property
    def ops(self) -> Any:
        """Operations of the inner index's backend."""
        return self._inner(RunsOps).ops

    def explain(self) -> str:
        """Return the wrapper with its options, then the explanation of the inner index."""
        return f"wrapper: {self._described()}\n{self._inner(Explains).explain()}"

    def _described(self) -> str:
        """Return the wrapper's name with its options."""
        options = [f"{name}={value!r}" for name, value in self._options().items()]
        return f"{type(self).__name__}({', '.join(options)})"

    def _options(self) -> dict[str, Any]:
        """Return the options that are stored as attributes with the same names."""
        given = [name for name in inspect.signature(type(self)).parameters if name != "inner"]
        return {name: vars(self)[name] for name in given if name in vars(self)}

    @property
    def counts(self) -> Tensor:
        """Number of valid tokens of each sequence, int64 `[B]`, on the CPU."""
        return self._inner(CountsTokens).counts

    @property
    def valid(self) -> Tensor | None:
        """True for tokens that are not padding, bool `[B, N]`, or None where no token is padded."""
        return self._inner(CountsTokens).valid

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value for one head."""
        return self._inner(ReportsRowBytes).row_bytes

    def memory(self) -> dict[int, int]:
        """Return the memory of the inner index, as `protocol.ReportsMemory.memory`."""
        return self._inner(ReportsMemory).memory()

    def placement(self) -> Placement:
        """Return where the rows of the inner index are, as `protocol.PlacesRows.placement`."""
        return self._inner(PlacesRows).placement()

    @property
    def weighted(self) -> bool:
        """True if hits have log weights."""
        return self._inner(WeighsRows).weighted

    def check_coverage(self, coverage: float) -> None:
        """Check that the inner index can estimate coverage, as `protocol.ReportsCoverage`."""
        self._inner(ReportsCoverage).check_coverage(coverage)

    def expand_batch(self, count: int) -> Self:
        """Return this wrapper around a view of the inner index, as `BaseIndex.expand_batch`."""
        view = self._shallow()
        view.inner = self._inner(ExpandsBatch).expand_batch(count)
        return view

    def state_dict(self) -> State:
        """Return the wrapper's own state, and the inner index's state under the name `inner`."""
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
        """Check the wrapper's own tensors in a state; raise ValueError for invalid ones."""
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
        """Declare the wrapper's own tensors as `Hooks._layout` does.

        These declarations are in addition to the annotations of the attributes.

        Args:
            state: The wrapper's own tensors.
            length: Number of tokens in the inner index.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state into inner index and wrapper. The wrapper's options do not change."""
        check_signed(self._whose(), state)
        self._check_own(state)
        self._inner(KeepsState).load_state_dict(below("inner", state))
        self._unpack(state, self.geometry.device)

    def recipe(self) -> Recipe:
        """Return how to create the wrapper with its options, and the inner index."""
        inner = self._inner(ReportsRecipe).recipe()
        options = {name: as_json(value) for name, value in self._options().items()}
        return {"wrapper": class_name(type(self)), "options": options, "inner": inner}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the wrapper and its inner index to a new folder, as `BaseIndex.save` does."""
        save_folder(folder, "index", self.recipe(), {"state": self.state_dict})

    def _whose(self) -> dict[str, Any]:
        """Return the properties that another wrapper must share to load the state of this one."""
        return {"wrapper": type(self).__name__}

    def _own_state(self) -> State:
        """Return the wrapper's own state, without the inner index."""
        return self._packed()

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Start an append to the inner index, as `BaseIndex.start_append`."""
        return self._inner(AppendsAsync).start_append(keys, values, valid=valid)

    def reserve(self, tokens: int) -> None:
        """Reserve memory in the inner index, as `ExecutedIndex.reserve`."""
        self._inner(Reserves).reserve(tokens)

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start pinning memory for the inner index, as `BaseIndex.reserve_ahead`."""
        self._inner(ReservesAhead).reserve_ahead(tokens, batch=batch)

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare searches of the inner index, as `ExecutedIndex.warm_up`."""
        self._inner(WarmsUp).warm_up(k=k, tokens=tokens)

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search with this wrapper and attend, as `protocol.Attends.attend`."""
        return self.attend_hits(queries, self.search(queries, k=k), resident)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to given rows of the inner index, as `protocol.Attends.attend_hits`."""
        return self._inner(Attends).attend_hits(queries, hits, resident)
