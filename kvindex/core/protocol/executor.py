"""`Executor`: runs search, attention and appends of an index as compiled kernels of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvindex.core.protocol.results import Attended, Codes, Hits, Rows
from kvindex.core.resident import ResidentRows


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of an index, which the index passes to its executor after every change.

    Args:
        codes: The codes of the executor, or a copy or view of them.
        rows: The row store of the index.
        length: Number of tokens.
        counts: Number of valid tokens of each sequence, int64 `[B]` on the CPU.
        valid: True for tokens that are not padding, bool `[B, N]`, or None if no token is padded.
        real_from: Position from which on no token is padded.
        opened: Data of the newest tokens, which do not fill a block yet. If the executor encodes
            keys, these are the keys of the tokens, `[B, G, n, D]`, under the name `open_keys`.
            Otherwise, they are the codes of the tokens.
        statistics: Learned tensors by name.
        regression: A function that returns the regression matrix `[B, G, D, D]`, float16, which
            predicts keys from their sign bits. The first call computes the matrix. While the
            matrix does not change, this is the same function object. None if the index does not
            use such a matrix.
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
    """Runs an index with compiled kernels. The function `accelerate` of a backend creates it.

    The executor owns the codes and all other data that the kernels read, except the rows. The index
    checks arguments, and calls `update` after every change.
    """

    @property
    def codes(self) -> Any:
        """The codes of all tokens, such as quantized keys, with the interface of
        `storage.columns.Columns`.
        """
        ...

    @property
    def encodes(self) -> bool:
        """True if the method `prepare` encodes keys with compiled kernels."""
        ...

    @property
    def appends_async(self) -> bool:
        """True if searches may run concurrently with `prepare` (`AppendsAsync`)."""
        ...

    @property
    def searches_at_once(self) -> bool:
        """True if searches share no buffers, so several threads may search concurrently."""
        ...

    @property
    def checks_tokens(self) -> bool:
        """True if `decode_step` raises ValueError for a query or key that is out of range.

        `decode_step` makes this check only if its argument `wrong` is not None.
        """
        ...

    @property
    def attends(self) -> bool:
        """True if kernels can compute attention directly on the stored rows."""
        ...

    @property
    def length(self) -> Tensor | None:
        """Number of tokens as a device tensor, int64 `[1]`, at a fixed address.

        It is None before the first search.
        """
        ...

    def explain(self) -> str:
        """Return which kernels a decode step uses, and why."""
        ...

    def cache_use(self) -> tuple[int, int, int]:
        """Return capacity and hits of the device cache for rows that are stored on the host.

        This waits for the device.

        Returns:
            The capacity in rows per KV head (0 without a cache), the number of rows looked up so
            far, and the number of these that were in the cache.
        """
        ...

    def update(self, contents: Contents) -> Executor:
        """Return an executor for the index as it is after a change, such as an append.

        The index calls this method after every change, and then uses the returned executor.
        """
        ...

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Any:
        """Encode the complete blocks of an append. Return codes, to be passed to `codes.append`.

        Call this only if `encodes` is True. If the last stored block is complete, the codes are
        written directly after the existing codes.

        Args:
            keys: `[B, G, N, D]`, the keys after the complete blocks of the index.
            valid: True for tokens that are not padding, bool `[B, N]`, or None if no token is
                padded.
            beyond: Number of further tokens after `keys`, which do not fill a block.
            wrong: An int32 tensor `[]` that is set to 1 if a valid key is not finite.
        """
        ...

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """Encode keys. The first of them must be the first key of a block.

        Args:
            keys: `[B, G, N, D]`; keys of padded tokens are zero.
            valid: True for tokens that are not padding, bool `[B, N]`, or None if no token is
                padded.

        Returns:
            Codes by name, or None if the executor has no kernel that encodes keys.
        """
        ...

    def discard(self) -> None:
        """Discard the codes that `prepare` has written, because the append was canceled."""
        ...

    def search(self, queries: Tensor, k: int) -> Hits:
        """Return the `k` best rows of each KV head for queries `[B, H, D]`."""
        ...

    def attend(
        self, queries: Tensor, resident: ResidentRows, k: int, wrong: Tensor | None = None
    ) -> Attended:
        """Search and attend (see `Attends.attend`).

        wrong: an int32 tensor `[]` that kernels set to 1 if a query is not finite, or None if
        queries are not checked.
        """
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of given hits (see `Attends.attend_hits`)."""
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
        """Run the decode step of a layer (see `DecodesStep.decode_step`).

        wrong: an int32 tensor `[]` that kernels set to 1 if a query is not finite, or None if
        queries are not checked.
        """
        ...

    def warm_up(self, k: int, tokens: int) -> None:
        """Compile kernels and allocate buffers for searches of `k` rows among up to `tokens`
        tokens.
        """
        ...

    def reserve(self, tokens: int) -> None:
        """Allocate the memory for codes of `tokens` tokens in total."""
        ...
