"""`KVIndex`: the protocol with the methods of every index."""

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
        """Number of heads, dimensions, scale, dtype and device of the layer."""
        ...

    @property
    def config(self) -> Any:
        """The options of this index, a frozen dataclass."""
        ...

    def encode(self, keys: Tensor) -> Codes:
        """Encode keys without changing the index. The result is deterministic.

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
            valid: Bool `[B, N]`, False for padded tokens, which a search never returns; None if no
                token is padded.

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
            coverage: Fraction of attention weight to reach, in (0, 1], or None. The search selects
                fewer than `k` rows if these are estimated to reach it. Only some indexes support it
                (`ReportsCoverage`).

        Returns:
            Token ids, scores and weights, best rows first. An index without tokens finds nothing:
            all ids are -1. This is no error, because an index may be one of several in a pool, or
            one shard of a sequence.

        Raises:
            ValueError: A shape, dtype or device does not fit, a query is not finite, or `k` or
                `coverage` is not allowed.
            TypeError: `queries` is not a tensor.
        """
        ...

    def fetch(self, hits: Hits) -> Rows:
        """Return the keys and values of hits.

        Args:
            hits: Result of a search, with ids `[B, G, K]`.

        Returns:
            Keys `[B, G, K, D]` and values `[B, G, K, Dv]` on the compute device; zero for unused
            slots.
        """
        ...

    def end_prompt(self) -> None:
        """Receive the signal that the prompt is complete."""
        ...

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries.

        Args:
            queries: `[B, H, T, D]`. The query of a padded token is a zero vector. An index must not
                count it in its statistics.
            positions: Ids of the tokens to which the queries belong, int64 `[T]`.
        """
        ...

    def mark_boundary(self) -> None:
        """Receive the signal that a sentence or segment of the text ends with the newest token."""
        ...

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Receive the vocabulary ids of tokens in the text.

        Args:
            tokens: Vocabulary ids, int64 `[B, T]`, or `[T]` if all sequences have the same text.
            first: Position in the sequence of the first of these tokens.
        """
        ...

    def __len__(self) -> int:
        """Return the number of tokens `N`, including padded tokens."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and remove the tokens after them.

        Args:
            length: Number of tokens to keep.
        """
        ...

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch: sequence `b` becomes a copy of the former sequence `batch_indices[b]`.

        Args:
            batch_indices: Int64 `[B']`; the new batch size `B'` may differ from `B`.
        """
        ...

    def reset(self) -> None:
        """Remove all tokens, learned parameters, and the batch size."""
        ...

    def nbytes(self) -> dict[str, int]:
        """Return how many bytes the codes and the rows of the index take.

        Returns:
            Bytes by name: `codes` on the compute device, and `rows` in the store. If a store has
            rows on device and host, there are `rows_device` and `rows_host` instead of `rows`.
        """
        ...
