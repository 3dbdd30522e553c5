"""`KVIndex`: the methods of every index."""

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
        """Shapes, scale, dtype and device."""
        ...

    @property
    def config(self) -> Any:
        """The index's own configuration, a frozen dataclass."""
        ...

    def encode(self, keys: Tensor) -> Codes:
        """Encode keys, without a change to the index. The result is deterministic.

        Args:
            keys: `[B, G, N, D]`, after the rotary embedding.

        Returns:
            Codes by name, `[B, G, N, ...]`.
        """
        ...

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens.

        Args:
            keys: `[B, G, N, D]`, after the rotary embedding.
            values: `[B, G, N, Dv]`.
            valid: Bool `[B, N]`; a search never returns a token with False. None: all are valid.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a valid key is not finite.
            TypeError: An argument is not a tensor.
        """
        ...

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Select the rows that each KV head should attend to.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.
            coverage: Select fewer than `k` rows where fewer are estimated to have this fraction of
                the attention weight, in (0, 1]. Only some indexes support it (`ReportsCoverage`).

        Returns:
            Token ids, scores and weights, best rows first.

        Raises:
            ValueError: A shape, dtype or device does not fit, a query is not finite, or `k` or
                `coverage` is not allowed.
            TypeError: `queries` is not a tensor.
        """
        ...

    def fetch(self, hits: Hits) -> Rows:
        """Return keys and values of hits.

        Args:
            hits: Hits with ids `[B, G, K]`.

        Returns:
            Keys `[B, G, K, D]` and values `[B, G, K, Dv]` on the compute device; zeros for unused
            slots.
        """
        ...

    def end_prompt(self) -> None:
        """Receive the signal that the prompt is complete."""
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
        """Receive the signal that a sentence or segment of the text ends with the newest token."""
        ...

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Receive the text as token ids of the vocabulary.

        Args:
            tokens: Vocabulary ids, int64 `[B, T]`, or `[T]` for all sequences.
            first: Position of the first of these tokens.
        """
        ...

    def __len__(self) -> int:
        """Number of tokens, `N`, invalid ones included."""
        ...

    def truncate(self, length: int) -> None:
        """Remove the tokens with ids from `length` on.

        Args:
            length: Number of tokens to keep.
        """
        ...

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` of the batch by sequence `batch_indices[b]`.

        Args:
            batch_indices: Int64 `[B']`, where `B'` may differ from `B`.
        """
        ...

    def reset(self) -> None:
        """Remove all tokens, learned parameters, and the batch size."""
        ...

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per memory tier.

        Returns:
            `codes` on the compute device, and `rows` in the store. A store with rows in both places
            has `rows_device` and `rows_host` instead.
        """
        ...
