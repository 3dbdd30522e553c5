"""Optional protocols of an index that computes attention itself.

Such an index may attend to rows, run the whole decode step of a layer, let the caller capture the
decode step in a CUDA graph, or run the decode step together with other indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.results import Attended, ErrorLimit, Hits, Rows
from kvindex.core.resident import ResidentRows


@runtime_checkable
class Attends(Protocol):
    """An index that computes attention directly on the stored rows, without copying them first.

    For other indexes, the caller searches, fetches the rows and computes attention.
    """

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search, fetch and attend in one call.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            resident: Additional rows to attend to. Each head must attend to at least one row in
                total.
            k: Rows to select per KV head.

        Returns:
            Attention over the `k` best rows and the rows of `resident`.

        Raises:
            ValueError: An argument is not allowed (see `KVIndex.search`).
        """
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Compute attention for queries `[B, H, D]` over the rows that a search has selected.

        `hits` contains the ids of these rows, and log weights that are added to their logits. The
        queries also attend to the rows of `resident`, such as the sink and the window. Raises
        ValueError or TypeError if the hits are not valid (see `KVIndex.fetch`).
        """
        ...


@runtime_checkable
class AttendsToAll(Protocol):
    """An index that can attend to all of its rows without copying them first.

    Full attention verifies drafted tokens in this way.
    """

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens per sequence for which `attend_all` may be called.

        With more tokens, it is faster to copy the rows first. 0 if no kernel can read the rows.
        """
        ...

    def attend_all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with each query to all rows of the index, which must not be empty.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.

        Returns:
            Outputs `[B, H, T, Dv]`, and the log-sum-exp of the logits, float32 `[B, H, T]`.

        Raises:
            ValueError: A shape, dtype or device does not fit, or `T` is above `most_tokens`.
            TypeError: `queries` is not a tensor.
        """
        ...


@runtime_checkable
class DecodesStep(Attends, Protocol):
    """An index that runs the whole decode step of a layer.

    For other indexes, the caller copies the key and value of the new token and calls `attend`.
    """

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
        """Run a decode step: write the new token to `resident` and `window`, search, and attend.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]` of the new token.
            resident: Rows to attend to in addition to the selected rows, with room for the new
                token.
            window: Memory to which the key and value are also copied, with the same shapes as
                `token`.
            k: Rows to select per KV head.
            graphs: True if the index may capture the decode step in a CUDA graph, and replay the
                graph in later decode steps that launch the same kernels.

        Raises:
            ValueError: An argument is not allowed (see `attend`), or the shapes of `token`,
                `resident` and `window` do not fit. What `resident` and `window` contain for the new
                token is then undefined.
        """
        ...


@runtime_checkable
class ChecksTokens(Protocol):
    """An index whose `decode_step` checks the new key, so that callers need not check it."""

    @property
    def checks_tokens(self) -> bool:
        """True if `decode_step` raises ValueError for a key with NaN, infinite or huge numbers."""
        ...


@runtime_checkable
class CapturesStep(Protocol):
    """An index whose decode step can be captured in a CUDA graph, which is replayed for each token.

    The caller captures the graph. Such an index does not change during these decode steps, except
    when tokens that leave the window are appended to it. The caller does not call `observe_tokens`.
    """

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """Prepare a capture or a replay on the current stream.

        Returns:
            An object that stands for the memory addresses that the decode step reads. As long as
            this method returns the same object, a graph that was captured earlier may be replayed.

        Raises:
            ValueError: An argument is not allowed (see `Attends.attend`).
        """
        ...

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """Run a decode step that the caller can capture in a CUDA graph.

        It is like `DecodesStep.decode_step` without a window, but kernels read the numbers of rows
        from device memory, because a replay cannot pass new arguments. The new token is written at
        the position `resident.count`, which is then increased on the device. Before each replay,
        the caller makes room for the token and calls `resident.claim(1)`. The same decode step must
        have run once before the capture.

        Returns:
            Attention in tensors that the next replay overwrites. `found` is int64, and is added up
            over all replays until the caller sets it to 0.
        """
        ...


@runtime_checkable
class CapturesTokens(Protocol):
    """An index for which a CUDA graph can capture decode steps of several tokens of each sequence,
    such as drafted tokens. See `CapturesStep` for what the caller must do.
    """

    def prepare_tokens(self, resident: ResidentRows, *, k: int, tokens: int) -> object:
        """Prepare a capture or a replay of a decode step on the current stream.

        Args:
            resident: The rows of sink and window.
            k: Rows to select per KV head and token, at least 1.
            tokens: Number of tokens of each sequence in the step, at least 1.

        Returns:
            An object that stands for the memory addresses that the decode step reads. As long as
            this method returns the same object, a graph that was captured earlier may be replayed.

        Raises:
            ValueError: An argument is not allowed (see `Attends.attend`).
        """
        ...

    def captured_tokens(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Append `T` tokens of each sequence to `resident`, search for each token, and attend
        causally.

        The tokens are written from position `resident.count` on, which is then increased by `T` on
        the device. Each token attends to the selected rows, to the rows of `resident` before the
        call, and to the new tokens up to its own. The caller may set `resident.count` back
        afterwards, to remove the last tokens.

        Args:
            queries: `[B·T, H, D]`, after the rotary embedding: all tokens of the first sequence,
                then those of the second, and so on.
            tokens: Keys `[B·T, G, 1, D]` and values `[B·T, G, 1, Dv]`, in the same order.
            resident: The rows that were passed to `prepare_tokens`, with room for `T` more.

        Returns:
            Attention `[B·T, H, Dv]` in tensors that the next replay overwrites. `found` is int64
            `[B·T, G]`, and is added up over all replays.
        """
        ...


@runtime_checkable
class CapturesAll(Protocol):
    """An index for which a CUDA graph can capture decode steps of several tokens of each sequence
    that attend to all tokens, to verify drafted tokens. See `CapturesTokens`.
    """

    def prepare_all(
        self, resident: ResidentRows, *, tokens: int, skip: int, masked: bool = False
    ) -> object:
        """Prepare a capture or a replay of a decode step on the current stream.

        Args:
            resident: The rows of sink and window.
            tokens: Number of tokens of each sequence in the step, at least 1.
            skip: Number of rows at the beginning of `resident` to leave out, because they are also
                in the index.
            masked: Whether to attend only to the valid tokens of the index, and to the rows that
                the mask of `resident` does not hide. Sink tokens are not valid in the index, so
                `skip` must be 0. If False, all rows are read, whatever the masks contain.

        Returns:
            An object that stands for the memory addresses that the decode step reads. As long as
            this method returns the same object, a graph that was captured earlier may be replayed.

        Raises:
            ValueError: A number is out of range.
        """
        ...

    def captured_all(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Run a decode step that the caller can capture in a CUDA graph.

        The arguments and the result are those of `CapturesTokens.captured_tokens`. Each token
        attends to all rows of the index, to those of `resident` after the first `skip`, and to the
        new tokens up to its own. `found` is 0, because no search was run.
        """
        ...


@runtime_checkable
class LimitsSteps(Protocol):
    """An index whose decode steps can choose the number of rows by their expected error.

    Such an index has the capabilities `LimitsError`, `DecodesStep` and `CapturesStep`. The methods
    of the latter two have a further argument, `limit`, and so have those of `CapturesTokens` if the
    index has it. With a limit, a step selects as many rows
    per KV head as the limit asks for, at most `k`, as `LimitsError.search_within` does. The index
    itself takes the rows of `resident` into account, and adds them to `limit.resident_lse`, which
    contains only other tokens or learned sinks.
    """

    def attend(
        self, queries: Tensor, resident: ResidentRows, *, k: int, limit: ErrorLimit | None = None
    ) -> Attended:
        """See `Attends.attend`."""
        ...

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        *,
        k: int,
        graphs: bool = True,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """See `DecodesStep.decode_step`."""
        ...

    def prepare_replay(
        self, resident: ResidentRows, *, k: int, limit: ErrorLimit | None = None
    ) -> object:
        """See `CapturesStep.prepare_replay`.

        Kernels read `limit.variance` at a fixed address. This method copies it there if the tensor
        is not that of the last call. `limit.resident_lse` is not used.
        """
        ...

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        *,
        k: int,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """See `CapturesStep.captured_step`.

        `limit.variance` is the tensor that was passed to `prepare_replay`. With a limit, the result
        has a `histogram`, which is added up over all replays like `found`.
        """
        ...


class IndexBatch(Protocol):
    """Runs the decode steps of several indexes in one batch.

    Each index has batch size 1, and the indexes may have different lengths. Before each call of a
    method of this class, the caller calls `JoinsBatch.batch_row` of each index. It passes the list
    of the returned objects as the argument `rows`, one object for each index.
    """

    def search(self, rows: Sequence[object], queries: Tensor, *, k: int) -> Hits:
        """Search each index for its query. The queries are `[B, H, D]` for `B` indexes."""
        ...

    def attend(
        self,
        rows: Sequence[object],
        queries: Tensor,
        resident: ResidentRows,
        *,
        k: int,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Search each index, and attend to its selected rows and to its rows in `resident`.

        resident: rows of the attention sink and the local window, with one sequence for each index.
        The sequences may have different numbers of rows (`ragged`).
        limit: see `decode_step`.
        """
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
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Add the new token of each sequence to `resident`, then do what `attend` does.

        The token is written after the existing rows of its sequence. The caller makes room for it
        in `resident`, and updates the number of rows on the host.

        Args:
            rows: One entry for each index, None for an empty index. At least one index must not be
                empty.
            queries: `[B, H, D]`, after the rotary embedding.
            token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]` of the new tokens.
            resident: Rows of the attention sink and the local window, with one sequence for each
                index. The sequences may have different numbers of rows (`ragged`).
            k: Rows to select per KV head.
            graphs: True if the decode step may be captured in a CUDA graph, to replay it later.
            limit: Limit of the error, for indexes with `LimitsSteps`. Each index then selects as
                many rows per KV head as its entry of `limit.variance` `[B, G]` asks for, at most
                `k`. `limit.resident_lse` must be None.
        """
        ...


@runtime_checkable
class JoinsBatch(Protocol):
    """An index that can run its decode step in one batch with other indexes of the same class.

    The indexes may have different lengths.
    """

    def new_batch(self) -> IndexBatch:
        """Return an object that runs the decode steps of several indexes of this class together."""
        ...

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """Return what the methods of `IndexBatch` need to know about this index.

        The result is one element of their argument `rows`, and it is valid until the index changes.
        The index must have batch size 1 and at least one token.

        Args:
            queries: The queries of this sequence, `[1, H, D]`.
            k: Rows to select per KV head.

        Raises:
            ValueError: An argument is not allowed (see `Attends.attend`).
        """
        ...
