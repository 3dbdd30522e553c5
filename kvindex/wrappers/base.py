"""A wrapper passes every call to the index inside it; subclasses change some of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.guard import Guarded
from kvindex.core.protocol import UNUSED, Codes, Hits, KVIndex, Rows
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable, cut_back


class Wrapper(Guarded):
    """Behaves as the index `inner`."""

    def __init__(self, inner: KVIndex) -> None:
        self.inner = inner

    def checkpoint(self) -> Any:
        """What the wrapper and the inner index are now, for `rollback`."""
        foreign = not isinstance(self.inner, Restorable)
        return super().checkpoint(), len(self.inner) if foreign else None

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says; an inner index that cannot go back is truncated."""
        before, held = checkpoint
        super().rollback(before)
        if held is not None:
            cut_back(self.inner, held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A wrapper around a copy of the inner index."""
        twin = super().__deepcopy__(memo)
        twin.inner = deepcopy(self.inner, memo)
        return twin

    @property
    def geometry(self) -> Geometry:
        """The inner index's geometry."""
        return self.inner.geometry

    @property
    def config(self) -> Any:
        """The inner index's configuration."""
        return self.inner.config

    @property
    def backend(self) -> str:
        """The inner index's backend."""
        return getattr(self.inner, "backend", "torch")

    @property
    def row_bytes(self) -> int:
        """The inner index's, if it has one: it is not of the protocol."""
        inner: Any = self.inner
        found: int = inner.row_bytes
        return found

    @property
    def depends_on_queries(self) -> bool:
        """As the inner index does."""
        return getattr(self.inner, "depends_on_queries", False)

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

    # What `BaseIndex` has beyond the protocol

    @property
    def supports_async_append(self) -> bool:
        """Whether the inner index says so."""
        return bool(getattr(self.inner, "supports_async_append", False))

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """As the inner index does, where it has it; a wrapper that appends more has both."""
        inner: Any = self.inner
        end: Callable[[], None] = inner.start_append(keys, values, valid=valid)
        return end

    @property
    def attends(self) -> bool:
        """Whether the inner index attends to rows that it is given."""
        return bool(getattr(self.inner, "attends", False))

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> tuple[Tensor, Tensor]:
        """As `protocol.Attends.attend`, over what this index's own search finds."""
        hits = self.search(queries, k=k)
        found = (hits.ids != UNUSED).sum(-1, dtype=torch.int32)
        return self.attend_hits(queries, hits, resident), found

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Tensor:
        """As the inner index does."""
        inner: Any = self.inner
        output: Tensor = inner.attend_hits(queries, hits, resident)
        return output

    def check_coverage(self, coverage: float) -> None:
        """As the inner index does, where it has it."""
        checked = getattr(self.inner, "check_coverage", None)
        if checked is not None:
            checked(coverage)

    @property
    def weighted(self) -> bool:
        """Whether the inner index says so."""
        return bool(getattr(self.inner, "weighted", False))

    def end_prompt(self) -> None:
        """As the inner index does."""
        self.inner.end_prompt()

    @property
    def observes_queries(self) -> bool:
        """Whether anyone does anything with `observe_queries`."""
        mine = getattr(self.observe_queries, "__func__", None) is not Wrapper.observe_queries
        return mine or bool(getattr(self.inner, "observes_queries", True))

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
