"""Capabilities: what an index may offer beyond `KVIndex`, asked for by `kvindex.core.capability`.

Those that attend, or do a whole step, are in `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.index import KVIndex
from kvindex.core.protocol.results import Hits, Placement


@runtime_checkable
class ObservesQueries(Protocol):
    """`observe_queries` does something; else nobody need call it."""

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """As `KVIndex.observe_queries`."""
        ...


@runtime_checkable
class ReportsCoverage(Protocol):
    """It knows whether a search can tell what share of the attention its rows hold."""

    def check_coverage(self, coverage: float) -> None:
        """Raises ValueError where a search takes no such `coverage`."""
        ...


@runtime_checkable
class ReportsRowBytes(Protocol):
    """It knows what a fetched row costs; else a row is as wide as its key and value."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's key and value for one head, as they are stored and fetched."""
        ...


@runtime_checkable
class PlacesRows(Protocol):
    """It knows where its rows are."""

    def placement(self) -> Placement:
        """How many are where, and what a cache had of them; waits for the device."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """It knows how many tokens of each row of the batch are real, and which."""

    @property
    def counts(self) -> Tensor:
        """Valid tokens of each row of the batch, int64 `[B]`, on the CPU."""
        ...

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        ...


@runtime_checkable
class Explains(Protocol):
    """It says how it runs."""

    def explain(self) -> str:
        """Which backend, store and path of execution it has, and why, a line each."""
        ...


@runtime_checkable
class WeighsRows(Protocol):
    """Rows that a search finds have weights of their own (`Hits.log_weight`)."""

    @property
    def weighted(self) -> bool:
        """True."""
        ...


@runtime_checkable
class RunsOps(Protocol):
    """It computes by the ops of a backend."""

    @property
    def backend(self) -> str:
        """The backend's name (`kvindex.core.backend`)."""
        ...

    @property
    def ops(self) -> Any:
        """The module of its ops, named and signed as `kvindex.ops`."""
        ...


@runtime_checkable
class ExpandsBatch(Protocol):
    """Searches do not depend on the queries of other steps: many steps can be searched at once."""

    def expand_batch(self, count: int) -> KVIndex:
        """A view of a batch of 1 as one of `count`, to search and fetch from as it stays."""
        ...


@runtime_checkable
class SearchesShare(Protocol):
    """It finds among its tokens what a search of the tokens of several indexes would find there.

    Then the best of what each finds are those of all; else scores of two indexes do not compare.
    """

    def search_share(self, queries: Tensor, *, k: int, total: Callable[[Tensor], Tensor]) -> Hits:
        """As `search`, by scores that compare; an index without tokens finds nothing.

        total: gives, of the logarithms of the sums of the exponentials of all logits in this index,
        float32 `[B, G, g]`, those in all of them. Each calls it as often as the others.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """All that it keeps are named tensors, to be written to a file or sent to another."""

    def state_dict(self) -> dict[str, Tensor]:
        """What it keeps, by name (`kvindex.bases.state`)."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Become what another was of the same geometry and configuration.

        Raises TypeError or ValueError for anything else, and stays as it was.
        """
        ...


@runtime_checkable
class ChecksState(Protocol):
    """It can say whether it would load a state, without loading it."""

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Compare a state with what this index, wrapper or layer could have saved.

        Tensors on the meta device are checked for shape and dtype alone, which costs no reading.
        Raises TypeError or ValueError that names the tensor; changes nothing.
        """
        ...


@runtime_checkable
class ReportsRecipe(Protocol):
    """It knows how another like it is made, so that what was saved is loaded by itself."""

    def recipe(self) -> dict[str, Any]:
        """How, as JSON (`kvindex.storage.recipe`)."""
        ...


@runtime_checkable
class ReportsMemory(Protocol):
    """It knows where its codes and rows lie, so that what copies share is counted once."""

    def memory(self) -> dict[int, int]:
        """Address -> bytes of each block, or column, that codes and rows of tokens are in."""
        ...


@runtime_checkable
class EncodesBlocks(Protocol):
    """It encodes tokens a block at a time: whoever appends whole blocks appends at the least cost.

    Tokens of a block that is not full are encoded, and again as it fills.
    """

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...


@runtime_checkable
class AppendsAsync(Protocol):
    """An append leaves the host and other streams alone: a layer has it run beside its steps."""

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """The first part of an append, the long one; what is returned is the rest."""
        ...


@runtime_checkable
class Reserves(Protocol):
    """Memory can be taken before it is needed."""

    def reserve(self, tokens: int) -> None:
        """Take now what codes and rows need until the index holds `tokens` tokens.

        Raises MemoryError; what is held stays as it was.
        """
        ...


@runtime_checkable
class ReservesAhead(Protocol):
    """Memory can be got beside other work, before the first token."""

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Begin to get what rows of so many tokens of `batch` sequences need; waits for nothing."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """The first search makes buffers and compiles kernels."""

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Do so now, for searches of `k` rows until the index holds `tokens` tokens."""
        ...
