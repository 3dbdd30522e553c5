"""`Executor`: what runs an index on a device in place of its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvindex.core.protocol.results import Attended, Codes, Hits, Rows
from kvindex.core.resident import ResidentRows


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
    def searches_at_once(self) -> bool:
        """True if several threads may search at the same time; otherwise searches share buffers."""
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
