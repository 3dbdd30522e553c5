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
    ErrorLimit,
    ExpandsBatch,
    Explains,
    Hits,
    KeepsState,
    KVIndex,
    LearnsOnce,
    LimitsError,
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
from kvindex.core.transaction import Transactional
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


class Wrapper(Capable, NamedState, Transactional):
    """An index that wraps the index `inner` and passes every call to it.

    A wrapper offers a capability if both its own class and the wrapped index have it. No wrapper
    offers `DecodesStep`, because the wrapped index would run its own search in the decode step,
    and not the search of the wrapper.

    Args:
        inner: The index to wrap.
    """

    holds: ClassVar[frozenset[str]] = frozenset({"inner"})
    """Prefixes of those names of a `state_dict` that belong to wrapped indexes."""
    own: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that the wrapper offers even if the wrapped index does not have them."""
    lacks: ClassVar[frozenset[type]] = frozenset()
    """Capabilities that the wrapper does not offer even if the wrapped index has them."""

    def __init__(self, inner: KVIndex) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    def checkpoint(self) -> Any:
        """Return the current state of the wrapper and the wrapped index for `rollback`."""
        foreign = not isinstance(self.inner, Restorable)
        return super().checkpoint(), len(self.inner) if foreign else None

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned.

        A wrapped index that has no checkpoints (is not `Restorable`) is only truncated to its
        former length.
        """
        before, length = checkpoint
        super().rollback(before)
        if length is not None:
            cut_back(self.inner, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a wrapper around a copy of the wrapped index."""
        copied = super().__deepcopy__(memo)
        copied.inner = deepcopy(self.inner, memo)
        return copied

    @property
    def geometry(self) -> Geometry:
        """Geometry of the wrapped index."""
        return self.inner.geometry

    @property
    def config(self) -> Any:
        """Configuration of the wrapped index."""
        return self.inner.config

    def encode(self, keys: Tensor) -> Codes:
        """Encode keys `[B, G, N, D]` with the wrapped index."""
        return self.inner.encode(keys)

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens to the wrapped index (see `BaseIndex.append`)."""
        self.inner.append(keys, values, valid=valid)

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Search the wrapped index (see `BaseIndex.search`)."""
        return self.inner.search(queries, k=k, coverage=coverage)

    def fetch(self, hits: Hits) -> Rows:
        """Fetch keys and values from the wrapped index (see `BaseIndex.fetch`)."""
        return self.inner.fetch(hits)

    def end_prompt(self) -> None:
        """Report to the wrapped index that the prompt has ended."""
        self.inner.end_prompt()

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Pass the queries of the newest tokens to the wrapped index."""
        self.inner.observe_queries(queries, positions)

    def mark_boundary(self) -> None:
        """Report to the wrapped index that a segment of the text ends with the newest token."""
        self.inner.mark_boundary()

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Pass the text, as vocabulary ids, to the wrapped index."""
        self.inner.observe_tokens(tokens, first=first)

    def __len__(self) -> int:
        return len(self.inner)

    def truncate(self, length: int) -> None:
        """Truncate the wrapped index (see `BaseIndex.truncate`)."""
        self.inner.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch of the wrapped index (see `BaseIndex.reorder`)."""
        self.inner.reorder(batch_indices)

    def reset(self) -> None:
        """Reset the wrapped index (see `BaseIndex.reset`)."""
        self.inner.reset()
        self._broken = None

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that the wrapped index uses (see `BaseIndex.nbytes`)."""
        return self.inner.nbytes()

    # Capabilities

    def _offers(self, wanted: type) -> bool:
        kind, own = type(self), wanted in self.own or capability(self.inner, wanted) is not None
        if wanted is LimitsError and kind.search_within is Wrapper.search_within:
            own = own and kind.search is Wrapper.search
        return own and wanted not in self.lacks

    def _inner(self, wanted: type[P]) -> P:
        """Return the wrapped index. Raise TypeError if it does not have the capability `wanted`."""
        return required(self.inner, wanted, name="inner")

    @property
    def backend(self) -> str:
        """Name of the wrapped index's backend: `torch`, `cpu` or `cuda`."""
        return self._inner(RunsOps).backend

    @property
    def block_tokens(self) -> int:
        """Number of tokens that the wrapped index encodes together."""
        return self._inner(EncodesBlocks).block_tokens

    @property
    def learns_from(self) -> int:
        """Number of tokens from which the wrapped index should learn."""
        return self._inner(LearnsOnce).learns_from

    @property
    def ops(self) -> Any:
        """The package of operations (like `kvindex.ops`) of the wrapped index's backend."""
        return self._inner(RunsOps).ops

    def explain(self) -> str:
        """Return a line with the wrapper's options, followed by the wrapped index's explanation."""
        return f"wrapper: {self._described()}\n{self._inner(Explains).explain()}"

    def _described(self) -> str:
        options = [f"{name}={value!r}" for name, value in self._options().items()]
        return f"{type(self).__name__}({', '.join(options)})"

    def _options(self) -> dict[str, Any]:
        """Return the constructor's arguments, read from the attributes with the same names."""
        given = [name for name in inspect.signature(type(self)).parameters if name != "inner"]
        return {name: vars(self)[name] for name in given if name in vars(self)}

    @property
    def counts(self) -> Tensor:
        """Number of valid tokens of each sequence, int64 `[B]`, on the CPU."""
        return self._inner(CountsTokens).counts

    @property
    def valid(self) -> Tensor | None:
        """Mask bool `[B, N]`: False for padding tokens. None if no token is padding."""
        return self._inner(CountsTokens).valid

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value for one KV head."""
        return self._inner(ReportsRowBytes).row_bytes

    def memory(self) -> dict[int, int]:
        """Return the memory blocks of the wrapped index (see `protocol.ReportsMemory.memory`)."""
        return self._inner(ReportsMemory).memory()

    def placement(self) -> Placement:
        """Return where the wrapped index stores rows (see `protocol.PlacesRows.placement`)."""
        return self._inner(PlacesRows).placement()

    @property
    def weighted(self) -> bool:
        """True if the hits of a search have log weights."""
        return self._inner(WeighsRows).weighted

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError if the wrapped index cannot search with this coverage."""
        self._inner(ReportsCoverage).check_coverage(coverage)

    def search_within(self, queries: Tensor, *, k: int, limit: ErrorLimit) -> Hits:
        """Search the wrapped index with a limit of the error (see `ParisKV.search_within`).

        A wrapper that overrides `search` offers this capability only if it overrides this method,
        too.
        """
        return self._inner(LimitsError).search_within(queries, k=k, limit=limit)

    def expand_batch(self, count: int) -> Self:
        """Return a copy of this wrapper around a view of the wrapped index for `count` sequences.

        See `BaseIndex.expand_batch`.
        """
        view = self._shallow()
        view.inner = self._inner(ExpandsBatch).expand_batch(count)
        return view

    def state_dict(self) -> State:
        """Return the state as named tensors; names of the wrapped index begin with `inner.`."""
        inner = above("inner", self._inner(KeepsState).state_dict())
        return signed(self._whose(), {**inner, **self._own_state()})

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if `load_state_dict` would not load this state."""
        check_signed(self._whose(), state)
        inner = capability(self.inner, ChecksState)
        if inner is not None:
            inner.check_state(below("inner", state))
        self._check_own(state)

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the wrapper's own tensors in a state are invalid."""
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
        """Declare shapes and dtypes of the wrapper's own tensors, to check a saved state.

        If the type annotation of an attribute already determines shape and dtype, no declaration is
        needed.

        Args:
            state: The wrapper's own tensors.
            length: Number of tokens in the wrapped index.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state into the wrapper and the wrapped index, without changing any options."""
        check_signed(self._whose(), state)
        self._check_own(state)
        self._inner(KeepsState).load_state_dict(below("inner", state))
        self._unpack(state, self.geometry.device)

    def recipe(self) -> Recipe:
        """Return the names and options with which `kvindex.load` makes this wrapper again."""
        inner = self._inner(ReportsRecipe).recipe()
        options = {name: as_json(value) for name, value in self._options().items()}
        return {"wrapper": class_name(type(self)), "options": options, "inner": inner}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the wrapper and its wrapped index to a new folder, for `kvindex.load`."""
        save_folder(folder, "index", self.recipe(), {"state": self.state_dict})

    def _whose(self) -> dict[str, Any]:
        """Return the class and options that a wrapper must have to load a state of this wrapper."""
        return {"wrapper": type(self).__name__}

    def _own_state(self) -> State:
        """Return the wrapper's own tensors, without those of the wrapped index."""
        return self._packed()

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Begin to append tokens to the wrapped index (see `BaseIndex.start_append`)."""
        return self._inner(AppendsAsync).start_append(keys, values, valid=valid)

    def reserve(self, tokens: int) -> None:
        """Reserve memory in the wrapped index for `tokens` tokens."""
        self._inner(Reserves).reserve(tokens)

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start to pin host memory for the wrapped index in the background."""
        self._inner(ReservesAhead).reserve_ahead(tokens, batch=batch)

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare the wrapped index for searches, so that the first one is fast."""
        self._inner(WarmsUp).warm_up(k=k, tokens=tokens)

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search with this wrapper, and attend to the selected rows and to `resident`.

        `resident` has the rows of the sink and the window.
        """
        return self.attend_hits(queries, self.search(queries, k=k), resident)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of the wrapped index that `hits` contains, and to those in `resident`.

        `hits` is the result of a search. `resident` has the rows of the sink and the window.
        """
        return self._inner(Attends).attend_hits(queries, hits, resident)
