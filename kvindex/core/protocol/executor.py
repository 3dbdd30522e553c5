"""`Executor`: runs a whole index by kernels of a device, in place of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvindex.core.protocol.results import Attended, Codes, Hits, Rows
from kvindex.core.resident import ResidentRows


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of an index, which it passes to its executor after every change.

    Args:
        codes: The executor's codes, or a copy or view of them.
        rows: The index's store.
        length: Number of tokens.
        counts: Number of valid tokens of each sequence, int64 `[B]` on the CPU.
        valid: Which tokens are valid, bool `[B, N]`, or None if all are.
        real_from: All tokens from this position on are valid.
        opened: The last tokens, which do not fill a block: `open_keys` `[B, G, n, D]`, or their
            codes if the executor does not encode.
        statistics: Learned tensors by name.
        regression: A function that returns the matrix of the sign regression, float16
            `[B, G, D, D]`, which it computes at the first call. The function is the same object as
            long as the matrix is the same. None if the index uses no sign regression.
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
    """Runs an index by kernels, in place of its ops. A backend's `accelerate` makes it.

    The executor owns the codes, and all other data of kernels except the rows. The index checks
    arguments, and calls `update` after every change.
    """

    @property
    def codes(self) -> Any:
        """The codes, with the interface of `kvindex.storage.columns.Columns`."""
        ...

    @property
    def encodes(self) -> bool:
        """Whether kernels encode keys (`prepare`)."""
        ...

    @property
    def appends_async(self) -> bool:
        """Whether searches may run concurrently with `prepare` (`AppendsAsync`)."""
        ...

    @property
    def searches_at_once(self) -> bool:
        """Whether several threads may search at the same time, without common buffers."""
        ...

    @property
    def attends(self) -> bool:
        """Whether kernels attend to rows where they are stored."""
        ...

    @property
    def length(self) -> Tensor | None:
        """The number of tokens as a device tensor, int64 `[1]`, at a fixed address.

        None before the first search.
        """
        ...

    def explain(self) -> str:
        """Return which kernels a step uses, and why."""
        ...

    def cache_use(self) -> tuple[int, int, int]:
        """Return the use of the device cache for rows of the host. Waits for the device.

        Returns:
            The number of rows per KV head that it has room for (0 without a cache), and the numbers
            of rows that were looked up and found so far.
        """
        ...

    def update(self, contents: Contents) -> Executor:
        """Return the executor for the index after a change of its tokens or its batch."""
        ...

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Any:
        """Encode whole blocks, and return the codes for `codes.append`.

        Call this only if `encodes` is True. Codes are written immediately, behind the last token,
        unless there is an incomplete block.

        Args:
            keys: `[B, G, N, D]`, the keys that follow the complete blocks of the index.
            valid: Bool `[B, N]`, or None if all are valid.
            beyond: Number of tokens after `keys`, which belong to the next, incomplete block.
            wrong: Int32 `[]`, set to 1 if a valid key is not finite.
        """
        ...

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """Encode keys. The first key is the first one of a block.

        Args:
            keys: `[B, G, N, D]`, with zeros for invalid keys.
            valid: Bool `[B, N]`, or None if all are valid.

        Returns:
            Codes for the columns, or None if ops must encode.
        """
        ...

    def discard(self) -> None:
        """Discard the codes that `prepare` has written, because they will not be appended."""
        ...

    def search(self, queries: Tensor, k: int) -> Hits:
        """Return the `k` best rows for queries `[B, H, D]`."""
        ...

    def attend(
        self, queries: Tensor, resident: ResidentRows, k: int, wrong: Tensor | None = None
    ) -> Attended:
        """Run `Attends.attend`; wrong: int32 `[]`, set to 1 if a query is not finite."""
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Run `Attends.attend_hits`."""
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
        """Run `DecodesStep.decode_step`; wrong: as in `attend`."""
        ...

    def warm_up(self, k: int, tokens: int) -> None:
        """Allocate and compile everything for searches of `k` rows in up to `tokens` tokens."""
        ...

    def reserve(self, tokens: int) -> None:
        """Allocate memory for codes of `tokens` tokens."""
        ...
