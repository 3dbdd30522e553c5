"""Optional protocols (capabilities) that an index may support in addition to `KVIndex`.

Callers ask for them with `kvindex.core.capability`. Protocols for attention and for whole decode
steps are in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.index import KVIndex
from kvindex.core.protocol.results import ErrorLimit, Hits, Placement


@runtime_checkable
class ObservesQueries(Protocol):
    """An index that uses the queries that callers pass to its method `observe_queries`.

    Callers need not pass queries to an index without this capability.
    """

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries (see `KVIndex.observe_queries`)."""
        ...


@runtime_checkable
class ReportsCoverage(Protocol):
    """An index that can estimate what fraction of the attention weight the selected rows have."""

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError if a search of this index does not support this value of `coverage`."""
        ...


@runtime_checkable
class LimitsError(Protocol):
    """An index that can choose the number of rows of a search by their expected error."""

    def search_within(self, queries: Tensor, *, k: int, limit: ErrorLimit) -> Hits:
        """Select as many rows per KV head as a limit of the error asks for, at most `k`.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            k: Largest number of rows per KV head, at least 1.
            limit: The limit, for each KV head.

        Returns:
            Hits with `k` slots per KV head, best rows first. Unused slots have the id -1.

        Raises:
            ValueError: A shape, dtype or device does not fit, a query is not finite, or `k` is out
                of range.
            TypeError: `queries` is not a tensor.
        """
        ...


@runtime_checkable
class ReportsRowBytes(Protocol):
    """An index that reports how many bytes a stored row takes.

    For an index without this capability, callers assume the size of an unencoded key and value.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, which is the key and the value of one token for one KV head."""
        ...


@runtime_checkable
class PlacesRows(Protocol):
    """An index that reports how many of its rows (keys and values) are on the device and on the
    host.
    """

    def placement(self) -> Placement:
        """Return how many rows are on the device and on the host.

        The result also says how often rows of the host were found in their cache on the device.
        This call waits for the device.
        """
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """An index that reports which tokens are padding."""

    @property
    def counts(self) -> Tensor:
        """Number of tokens of each sequence without padding, int64 `[B]`, on the CPU."""
        ...

    @property
    def valid(self) -> Tensor | None:
        """True for tokens that are not padding, bool `[B, N]`; None if no token is padded."""
        ...


@runtime_checkable
class Explains(Protocol):
    """An index that reports which backend, store and kernels it uses."""

    def explain(self) -> str:
        """Return backend, store and execution path with reasons, one per line."""
        ...


@runtime_checkable
class WeighsRows(Protocol):
    """An index whose searches return a log weight for each row (`Hits.log_weight`)."""

    @property
    def weighted(self) -> bool:
        """Always True: an index has this protocol only if its searches return log weights."""
        ...


@runtime_checkable
class RunsOps(Protocol):
    """An index that computes with the operations of a backend."""

    @property
    def backend(self) -> str:
        """Name of the backend: "torch", "cuda" or "cpu" (`kvindex.core.backend`)."""
        ...

    @property
    def ops(self) -> Any:
        """Module of the backend, which has the same functions as `kvindex.ops`."""
        ...


@runtime_checkable
class ExpandsBatch(Protocol):
    """An index whose search results do not depend on earlier queries.

    A caller can therefore search for the queries of many decode steps in one call.
    """

    def expand_batch(self, count: int) -> KVIndex:
        """Return a read-only view in which the index's only sequence appears `count` times."""
        ...


@runtime_checkable
class SearchesShard(Protocol):
    """An index that can store one shard of a long sequence, while other ranks store the others.

    Scores are comparable between shards. A caller that merges the hits of all shards by score
    therefore gets the same rows as from a search of the whole sequence.
    """

    def search_shard(self, queries: Tensor, *, k: int, total: Callable[[Tensor], Tensor]) -> Hits:
        """Search this shard, and return scores that are comparable between shards.

        Args:
            queries: `[B, H, D]`.
            k: Rows to select per KV head.
            total: A function that all shards must call equally often. Its argument is the
                log-sum-exp of all logits in this shard, float32 `[B, G, H / G]`. It returns the
                log-sum-exp over all shards.

        Returns:
            Hits among the tokens of this shard; only unused slots if the shard is empty.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """An index whose contents can be saved as named tensors and loaded again."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the contents of the index as named tensors (see `kvindex.bases.state`)."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of another index with the same geometry and configuration.

        Raises TypeError or ValueError for any other state, and then leaves the index unchanged.
        """
        ...


@runtime_checkable
class ChecksState(Protocol):
    """An index, wrapper or layer that can check a saved state before it loads it."""

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise TypeError or ValueError if this object cannot load the saved state `state`.

        The error names the tensor that does not fit. For a tensor on the meta device, only shape
        and dtype are checked. The object is not changed.
        """
        ...


@runtime_checkable
class ReportsRecipe(Protocol):
    """An index that can describe how to create an empty index of the same class and options.

    The description is stored in the folder of a saved index.
    """

    def recipe(self) -> dict[str, Any]:
        """Return class, geometry and options of the index as JSON (`kvindex.storage.recipe`)."""
        ...


@runtime_checkable
class ReportsMemory(Protocol):
    """An index that reports the addresses of its memory blocks.

    If several indexes share a block, a caller that adds up their memory recognizes the address, and
    counts the block once.
    """

    def memory(self) -> dict[int, int]:
        """Return all memory blocks that contain codes or rows: address -> size in bytes."""
        ...


@runtime_checkable
class EncodesBlocks(Protocol):
    """An index that encodes tokens in blocks of fixed size. Appends of whole blocks are fastest.

    An incomplete block at the end is encoded immediately, and is encoded again when more tokens are
    appended to it.
    """

    @property
    def block_tokens(self) -> int:
        """Number of tokens that are encoded together as a block."""
        ...


@runtime_checkable
class LearnsOnce(Protocol):
    """An index that learns parameters, such as codebooks, from its first append, and keeps them.

    They should be learned from the whole prompt. If a prompt arrives in chunks, an attention layer
    therefore waits with the first append, until the prompt ends or there are `learns_from` tokens.
    """

    @property
    def learns_from(self) -> int:
        """Number of tokens that are enough for the first append."""
        ...


@runtime_checkable
class AppendsAsync(Protocol):
    """An index whose append can run on another CUDA stream, concurrently with decode steps."""

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Do the first, long part of an append, and return a function that completes the append.

        The arguments are those of `KVIndex.append`.
        """
        ...


@runtime_checkable
class Reserves(Protocol):
    """An index that can allocate memory for tokens before they are appended."""

    def reserve(self, tokens: int) -> None:
        """Allocate the memory for codes and rows of `tokens` tokens in total.

        The contents of the index do not change. Raises MemoryError if the memory is not available.
        """
        ...


@runtime_checkable
class ReservesAhead(Protocol):
    """An index that can allocate memory in the background before the first append."""

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start to allocate memory for rows of `tokens` tokens in each of `batch` sequences.

        The call returns before the allocation is complete. It replaces an earlier call; 0 tokens
        end the allocation, for example because the prompt was cancelled.
        """
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """An index that can compile kernels and allocate buffers before the first search."""

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Compile kernels and allocate buffers for searches of `k` rows among up to `tokens`
        tokens.
        """
        ...
