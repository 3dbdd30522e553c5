"""`KVIndex`: what every index does."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol.results import Codes, Hits, Rows


@runtime_checkable
class KVIndex(Protocol):
    """A searchable store of the keys and values of one attention layer."""

    @property
    def geometry(self) -> Geometry:
        """Shapes, scale and place."""
        ...

    @property
    def config(self) -> Any:
        """The index's own configuration, a frozen dataclass."""
        ...

    def encode(self, keys: Tensor) -> Codes:
        """Codes of keys `[B, G, N, D]`; deterministic, changes nothing."""
        ...

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Add tokens: keys `[B, G, N, D]`, values `[B, G, N, Dv]`, valid bool `[B, N]`."""
        ...

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """The `k` rows per KV head that queries `[B, H, D]` should attend to.

        coverage: fewer, where fewer are estimated to hold this fraction of the attention (some
        indexes only).
        """
        ...

    def fetch(self, hits: Hits) -> Rows:
        """Full-precision rows of `hits`, on the compute device."""
        ...

    def end_prompt(self) -> None:
        """The prompt is complete."""
        ...

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries.

        Args:
            queries: `[B, H, T, D]`. The query of a padded token is zero; no statistic may include
                it.
            positions: Int64 `[T]`, the ids of their tokens.
        """
        ...

    def mark_boundary(self) -> None:
        """A sentence or segment ends with the newest token."""
        ...

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """The text: ids int64 `[B, T]` (or `[T]` for all rows) of the tokens from `first` on."""
        ...

    def __len__(self) -> int:
        """Tokens held, `N`, invalid ones included."""
        ...

    def truncate(self, length: int) -> None:
        """Forget the tokens with ids from `length` on."""
        ...

    def reorder(self, batch_indices: Tensor) -> None:
        """Row `b` becomes what row `batch_indices[b]` was; int64 `[B']`, `B'` may differ."""
        ...

    def reset(self) -> None:
        """Forget everything, learned parameters and batch size included."""
        ...

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per tier: `codes` on the compute device, `rows` in the store.

        `rows_device` and `rows_host` in place of `rows`, of a store that has both.
        """
        ...
