"""Capabilities: methods that an index may offer in addition to `KVIndex`.

Callers ask for them with `kvindex.core.capability`. Capabilities that compute attention, or a whole
step, are in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.index import KVIndex
from kvindex.core.protocol.results import Hits, Placement


@runtime_checkable
class ObservesQueries(Protocol):
    """An index that uses the queries of `observe_queries`.

    Callers need not pass queries to an index without this capability.
    """

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries (see `KVIndex.observe_queries`)."""
        ...


@runtime_checkable
class ReportsCoverage(Protocol):
    """An index that may estimate which fraction of the attention weight the found rows have."""

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError if a search does not support this `coverage`."""
        ...


@runtime_checkable
class ReportsRowBytes(Protocol):
    """An index that reports the size of a row.

    For an index without this capability, callers assume the size of an unencoded key and value.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row: a token's key and value for one head."""
        ...


@runtime_checkable
class PlacesRows(Protocol):
    """An index that reports where its rows are."""

    def placement(self) -> Placement:
        """Return how many rows are in each place, and the use of a cache. Waits for the device."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """An index that reports which tokens of each sequence are real, and how many are real."""

    @property
    def counts(self) -> Tensor:
        """Number of valid tokens of each sequence, int64 `[B]`, on the CPU."""
        ...

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None if all tokens are real."""
        ...


@runtime_checkable
class Explains(Protocol):
    """An index that explains how it runs."""

    def explain(self) -> str:
        """Return the backend, the store and the path of execution, with reasons, one per line."""
        ...


@runtime_checkable
class WeighsRows(Protocol):
    """An index whose searches return a weight for each row (`Hits.log_weight`)."""

    @property
    def weighted(self) -> bool:
        """Whether searches return weights: always True."""
        ...


@runtime_checkable
class RunsOps(Protocol):
    """An index that computes with the ops of a backend."""

    @property
    def backend(self) -> str:
        """The backend's name (`kvindex.core.backend`)."""
        ...

    @property
    def ops(self) -> Any:
        """The backend's module, with the same functions as `kvindex.ops`."""
        ...


@runtime_checkable
class ExpandsBatch(Protocol):
    """An index whose searches do not depend on earlier queries.

    A caller can therefore run the queries of many steps as one batch.
    """

    def expand_batch(self, count: int) -> KVIndex:
        """Return a read-only view of one sequence as a batch of `count` sequences."""
        ...


@runtime_checkable
class SearchesShard(Protocol):
    """An index that can be one shard of a larger one, because scores are comparable between shards.

    The best rows of all shards are then the same rows that a search of all tokens would find.
    """

    def search_shard(self, queries: Tensor, *, k: int, total: Callable[[Tensor], Tensor]) -> Hits:
        """Like `search`, with scores that are comparable between shards.

        Args:
            queries: `[B, H, D]`.
            k: Rows to select per KV head.
            total: A function from the log-sum-exp of all logits in this shard, float32 `[B, G, g]`,
                to the log-sum-exp over all shards. All shards must call it equally often.

        Returns:
            Hits among the tokens of this shard; no hits if the shard is empty.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """An index whose whole state can be exported as named tensors."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as named tensors (`kvindex.bases.state`)."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of another index with the same geometry and configuration.

        Raises TypeError or ValueError for any other state. The index is then unchanged.
        """
        ...


@runtime_checkable
class ChecksState(Protocol):
    """An index, wrapper or layer that can check a state before loading it."""

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise TypeError or ValueError, which names the tensor, for a state that does not fit.

        Of a tensor on the meta device only shape and dtype are checked, without reading data. The
        index is not changed.
        """
        ...


@runtime_checkable
class ReportsRecipe(Protocol):
    """An index that can describe how to make an equal, empty one, for loading saved folders."""

    def recipe(self) -> dict[str, Any]:
        """Return the description as JSON (`kvindex.storage.recipe`)."""
        ...


@runtime_checkable
class ReportsMemory(Protocol):
    """An index that reports its blocks of memory, so that shared ones are counted once."""

    def memory(self) -> dict[int, int]:
        """Return address -> bytes of each block, or column, of codes and rows."""
        ...


@runtime_checkable
class EncodesBlocks(Protocol):
    """An index that encodes tokens in blocks, so that appending whole blocks is cheapest.

    Tokens of an incomplete block are encoded immediately, and are encoded again when the next
    tokens are appended to the block.
    """

    @property
    def block_tokens(self) -> int:
        """Number of tokens in a block."""
        ...


@runtime_checkable
class AppendsAsync(Protocol):
    """An index whose appends can run concurrently with a layer's steps, on another stream."""

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Start an append, and return a function that completes it.

        `start_append` itself takes most of the time of an append. The arguments are those of
        `KVIndex.append`.
        """
        ...


@runtime_checkable
class Reserves(Protocol):
    """An index that can allocate memory in advance."""

    def reserve(self, tokens: int) -> None:
        """Allocate the memory for codes and rows of `tokens` tokens in total.

        Raises MemoryError. The contents of the index do not change.
        """
        ...


@runtime_checkable
class ReservesAhead(Protocol):
    """An index that can allocate memory in the background, before the first token."""

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start to allocate memory for rows of `tokens` tokens of `batch` sequences.

        The call returns before the allocation is complete.
        """
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """An index whose first search would allocate buffers and compile kernels."""

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Allocate and compile now what searches of `k` rows in up to `tokens` tokens need."""
        ...
