"""The protocol every index speaks (encode, append, search, fetch), and its capabilities.

Letters used in every signature, docstring and page:
`B` batch, `H` query heads, `G` KV heads (`H % G == 0`), `N` tokens in the index, `D` head
dimension, `M` subspaces of `m = D / M` dimensions, `C` candidates after the coarse stage,
`K` rows selected per KV head. `Dv` is the value dimension, `T` a number of new tokens.

Invariants (`kvindex.testing.check_index` holds an index to them):
  - ids are dense and in append order, the first token is 0; an invalid token keeps its id;
  - `search` returns exactly `k` slots: ids distinct within a row, scores descending, equal
    scores by the lower id, unused slots `-1` with score `-inf`;
  - an id below -1 names a row that is not a token; `fetch` resolves it;
  - a call that raises leaves the index as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.nn.functional import pad

from kvindex.core.geometry import Geometry
from kvindex.core.resident import ResidentRows

Codes: TypeAlias = Mapping[str, Tensor]
"""What an index keeps per token on the compute device: named tensors `[B, G, N, ...]`."""

UNUSED = -1
"""The id of a slot that holds no row."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The rows a search selected, best first.

    ids: int64 `[B, G, K]`; `-1` marks an unused slot, lower ids name rows that are not tokens.
    scores: float32 `[B, G, K]`, descending; what the group of query heads agreed on.
    log_weight: float32 `[B, H, K]` added to the attention logit before softmax, or None (zeros).
    coverage: float32 `[B, H]`, the share of the index's attention that each query head is believed
      to find in these rows, where the search was asked for one; else None.
    """

    ids: Tensor
    scores: Tensor
    log_weight: Tensor | None = None
    coverage: Tensor | None = None

    def widened(self, k: int) -> Hits:
        """The same hits with unused slots after them, `K = k`."""
        more = (0, k - self.ids.shape[-1])
        weight = self.log_weight
        return Hits(
            pad(self.ids, more, value=UNUSED),
            pad(self.scores, more, value=float("-inf")),
            None if weight is None else pad(weight, more, value=float("-inf")),
            self.coverage,
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Full-precision rows: keys `[B, G, K, D]`, values `[B, G, K, Dv]`; unused slots are zero."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Attended:
    """What attention over some rows gives, and what it takes to merge it with that over others.

    output: `[B, H, Dv]`, of the geometry's dtype.
    lse: float32 `[B, H]`, the natural logarithm of the sum of the exponentials of the logits, after
      scale, softcap and weights; `-inf` where no row is visible.
    found: int32 `[B, G]`, rows that a search found among those attended to.
    """

    output: Tensor
    lse: Tensor
    found: Tensor


@dataclass(frozen=True)
class Placement:
    """Where an index's rows are, and what a cache of them on the device has spared.

    device, host: rows there, of all KV heads and rows of the batch; row_codec: how they are kept,
    in so many row_bytes each. cache_rows: of the host's, what the cache has room for, per KV head;
    0 for none. looked_up: rows of the host that steps have wanted so far; found: those it had.
    """

    row_codec: str
    row_bytes: int
    device: int
    host: int
    cache_rows: int = 0
    looked_up: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the host's rows that were found in the cache; 0 before any was wanted."""
        return self.found / self.looked_up if self.looked_up else 0.0

    def __add__(self, other: Placement) -> Placement:
        """Of two indexes together, which keep rows alike."""
        return replace(
            self,
            device=self.device + other.device,
            host=self.host + other.host,
            cache_rows=max(self.cache_rows, other.cache_rows),
            looked_up=self.looked_up + other.looked_up,
            found=self.found + other.found,
        )

    def __str__(self) -> str:
        size = f"{self.row_bytes} bytes each, row_codec {self.row_codec!r}"
        told = f"{self.device:,} on the device, {self.host:,} on the host ({size})"
        if not self.cache_rows:
            return told
        had = f"had {self.hit_rate:.1%} of {self.looked_up:,} rows of the host"
        return f"{told}; a cache of {self.cache_rows:,} per KV head {had}"


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

        coverage: fewer, where fewer hold this share of the attention (some indexes only).
        """
        ...

    def fetch(self, hits: Hits) -> Rows:
        """Full-precision rows of `hits`, on the compute device."""
        ...

    def end_prompt(self) -> None:
        """The prompt is complete."""
        ...

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]` and the ids of their tokens, int64 `[T]`."""
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


# Capabilities: what an index may offer beyond, asked for by `kvindex.core.capability`


@runtime_checkable
class ObservesQueries(Protocol):
    """`observe_queries` does something; else nobody need call it."""

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """As `KVIndex.observe_queries`."""
        ...


@runtime_checkable
class TellsCoverage(Protocol):
    """It knows whether a search can tell what share of the attention its rows hold."""

    def check_coverage(self, coverage: float) -> None:
        """Raises ValueError where a search takes no such `coverage`."""
        ...


@runtime_checkable
class TellsRowBytes(Protocol):
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
class TellsRecipe(Protocol):
    """It knows how another like it is made, so that what was saved is loaded by itself."""

    def recipe(self) -> dict[str, Any]:
        """How, as JSON (`kvindex.storage.recipe`)."""
        ...


@runtime_checkable
class TellsMemory(Protocol):
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


@runtime_checkable
class Attends(Protocol):
    """It attends by itself, to rows where they lie; else search, fetch and attend."""

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search, fetch and attend in one go.

        The attention of queries `[B, H, D]` over the best `k` rows and those that `resident` shows;
        each head needs one at least. Raises as `search`.
        """
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attention of queries `[B, H, D]` over the rows of `hits`, with their weights, and those
        that `resident` shows. Raises as `fetch`.
        """
        ...


@runtime_checkable
class DecodesStep(Attends, Protocol):
    """It does the whole of a decoded token's step; else copy the rows and call `attend`."""

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        *,
        k: int,
        graphs: bool = True,
    ) -> Attended:
        """As `attend`, once `resident` and a window hold the token's rows.

        token: keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`; window: places of that shape;
        graphs: whether steps that are all alike may be captured in a CUDA graph. `resident` must
        have room. Raises as `attend`, and ValueError for rows of other shapes; what `resident` and
        the window hold of the token is then undefined.
        """
        ...


@runtime_checkable
class CapturesStep(Protocol):
    """A step of it can be captured in a caller's CUDA graph, that is replayed for each token.

    What happens to such an index between tokens are updates; it hears no `observe_tokens`.
    """

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """Before a capture or a replay on the current stream: what the step reads is there.

        Gives what tells one set of addresses from another: a graph may be replayed for as long as
        this is the same object. Raises as `attend`.
        """
        ...

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """As `DecodesStep.decode_step` without a window, but for what the host knows.

        The token goes where `resident.count` says on the device, which it then counts; whoever
        replays the graph makes room before and calls `resident.claim(1)` for each time. What is
        given back is overwritten by the next replay; `found`, int64, is added up over them, until
        the caller sets it to 0. A step like it comes before, uncaptured.
        """
        ...


class IndexBatch(Protocol):
    """Indexes of a batch of 1, with lengths of their own, as the rows of one step.

    rows: what `JoinsBatch.batch_row` gave for each row of this very call.
    """

    def search(self, rows: Sequence[object], queries: Tensor, *, k: int) -> Hits:
        """As `KVIndex.search` of each, for queries `[B, H, D]`."""
        ...

    def attend(
        self, rows: Sequence[object], queries: Tensor, resident: ResidentRows, *, k: int
    ) -> Attended:
        """As `Attends.attend` of each; resident: ragged, of a batch of as many."""
        ...

    def decode_step(
        self,
        rows: Sequence[object],
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        *,
        k: int,
        graphs: bool = True,
    ) -> Attended:
        """As `attend`, once a token of each, keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`, is
        behind its resident rows, where the device counts it.

        rows: None for an index that is empty, not for all. graphs: as of `DecodesStep.decode_step`.
        Whoever filled the resident rows sees to it that there is room, and counts them, too.
        """
        ...


@runtime_checkable
class JoinsBatch(Protocol):
    """It can be a row of a batch with others made like it, whatever their lengths."""

    def new_batch(self) -> IndexBatch:
        """What joins indexes like it, first one list of them, then another."""
        ...

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """What a batch reads of it, of a batch of 1 that holds a token, until it changes.

        queries: those of its row, `[1, H, D]`. Raises as `Attends.attend`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Contents:
    """What an index holds, as its executor is told of it after every change.

    codes: those of the executor, or a copy or a view of them; rows: the index's store; length: its
    tokens; counts: valid ones of each row of the batch, int64 `[B]` on the CPU; valid: which are,
    bool `[B, N]`, or None where all are; real_from: the token from which on all are; opened: of
    the last tokens, that fill no block, `open_keys` `[B, G, n, D]`, or, unless the executor
    encodes, codes; statistics: named tensors; regression: what signs tell together, float16
    `[B, G, D, D]`, made when it is first asked for, the same object while it stays as it is; or
    None.
    """

    codes: object
    rows: object
    length: int
    counts: Tensor
    valid: Tensor | None
    real_from: int
    opened: Codes
    statistics: Codes
    regression: Callable[[], Tensor] | None = None


class Executor(Protocol):
    """What runs an index on a device in place of its ops (`accelerate` of a backend gives it).

    It owns the codes, and all that kernels read beside the rows. The index holds it, checks
    arguments, and tells it of every change before anyone calls it again (`update`).
    """

    @property
    def codes(self) -> Any:
        """Where codes lie, with the interface of `kvindex.storage.columns.Columns`."""
        ...

    @property
    def encodes(self) -> bool:
        """Whether kernels encode keys (`prepare`)."""
        ...

    @property
    def appends_async(self) -> bool:
        """Whether nothing waits for `prepare`, and searches may run beside it (`AppendsAsync`)."""
        ...

    @property
    def attends(self) -> bool:
        """Whether kernels read the rows where they lie, to attend to them."""
        ...

    @property
    def length(self) -> Tensor | None:
        """Tokens of the index on the device, int64 `[1]` at one address; None before a search."""
        ...

    def explain(self) -> str:
        """Which path a step takes, and why."""
        ...

    def cache_use(self) -> tuple[int, int, int]:
        """Rows of the host per KV head that a cache on the device has room for, 0 without one;
        rows that were looked up there so far, and found. Waits for the device.
        """
        ...

    def update(self, contents: Contents) -> Executor:
        """Tokens came or went, or the batch did: gives what serves the index from here on."""
        ...

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Any:
        """Codes of whole blocks, of keys `[B, G, N, D]` after the full ones: for `codes.append`.

        Written at once, beyond the last token, unless a block is open. beyond: tokens that come
        after them, of the next open block. wrong: int32 `[]`, set to 1 where a valid key is not
        finite. Where `encodes` alone.
        """
        ...

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """Codes of keys `[B, G, N, D]`, the first of which begins a block, as columns take them.

        valid: bool `[B, N]`, or None: all are; an invalid key is zero. None where ops make them.
        """
        ...

    def discard(self) -> None:
        """What `prepare` has written is not appended."""
        ...

    def search(self, queries: Tensor, k: int) -> Hits:
        """The best `k` rows for queries `[B, H, D]`."""
        ...

    def attend(
        self, queries: Tensor, resident: ResidentRows, k: int, wrong: Tensor | None = None
    ) -> Attended:
        """As `Attends.attend`; wrong: int32 `[]`, set to 1 where a query is not finite."""
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As `Attends.attend_hits`."""
        ...

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        k: int,
        wrong: Tensor | None,
        graphs: bool,
    ) -> Attended:
        """As `DecodesStep.decode_step`; wrong: as in `attend`."""
        ...

    def warm_up(self, k: int, tokens: int) -> None:
        """Make what searches for `k` rows need until there are so many tokens."""
        ...

    def reserve(self, tokens: int) -> None:
        """Take the memory that codes of so many tokens need."""
        ...
