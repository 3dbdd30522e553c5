"""Capabilities of an index that computes attention itself.

Such an index may attend to rows, run a whole decode step, run it in a CUDA graph, or run it
together with other indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.results import Attended, Hits, Rows
from kvindex.core.resident import ResidentRows


@runtime_checkable
class Attends(Protocol):
    """An index that attends to rows where they are stored.

    With other indexes, the caller searches, fetches and attends.
    """

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search, fetch and attend in one call.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            resident: Further rows to attend to. In total, each head must attend to at least one
                row.
            k: Rows to select per KV head.

        Returns:
            Attention over the `k` best rows and the rows of `resident`.

        Raises:
            ValueError: As in `KVIndex.search`.
        """
        ...

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend from queries `[B, H, D]` to the rows of `hits`, with their weights.

        Also attend to the rows of `resident`. Raises the errors of `KVIndex.fetch`.
        """
        ...


@runtime_checkable
class DecodesStep(Attends, Protocol):
    """An index that computes the whole decode step of a layer.

    With other indexes, the caller copies the token's rows and calls `attend`.
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
        """Write a token's rows to `resident` and `window`, and then attend as `attend` does.

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`.
            resident: Rows to attend to, with room for one more.
            window: Memory for the token, with the same shapes as `token`.
            k: Rows to select per KV head.
            graphs: Whether the index may capture a step in a CUDA graph, and replay the graph for
                later steps that launch the same kernels.

        Raises:
            ValueError: As in `attend`, or the shapes of `token`, `resident` and `window` do not
                fit. The token's rows in `resident` and `window` are then undefined.
        """
        ...


@runtime_checkable
class CapturesStep(Protocol):
    """An index whose step a caller can capture in a CUDA graph, and replay for each token.

    Between decode steps, only updates of the window change such an index. The caller does not call
    `observe_tokens`.
    """

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """Prepare a capture or a replay on the current stream.

        Returns:
            An object that represents the addresses that the step reads. A graph may be replayed for
            as long as this is the same object.

        Raises:
            ValueError: As in `Attends.attend`.
        """
        ...

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """Like `DecodesStep.decode_step` without a window, with all counts read on the device.

        The token is written at the position `resident.count` on the device, which is then
        increased. The caller makes room before each replay, and calls `resident.claim(1)` for it.
        The same step must have run once before, outside of a capture.

        Returns:
            Attention in tensors that the next replay overwrites. `found` is int64, and adds up over
            all replays until the caller sets it to 0.
        """
        ...


class IndexBatch(Protocol):
    """Runs one step for several indexes of batch size 1, which may have different lengths.

    In all methods, `rows` are the results of `JoinsBatch.batch_row` of each index, made for this
    call.
    """

    def search(self, rows: Sequence[object], queries: Tensor, *, k: int) -> Hits:
        """Run `KVIndex.search` of each index, for queries `[B, H, D]`."""
        ...

    def attend(
        self, rows: Sequence[object], queries: Tensor, resident: ResidentRows, *, k: int
    ) -> Attended:
        """Run `Attends.attend` of each index; resident: ragged, with an entry for each index."""
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
        """Write a token of each sequence to `resident`, and then attend as `attend` does.

        The token comes behind the rows of its sequence. The caller makes room for it in `resident`,
        and counts the tokens on the host.

        Args:
            rows: None for an empty index. At least one index must not be empty.
            queries: `[B, H, D]`, after the rotary embedding.
            token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`.
            resident: Ragged rows of sink and window, with an entry for each index.
            k: Rows to select per KV head.
            graphs: As in `DecodesStep.decode_step`.
        """
        ...


@runtime_checkable
class JoinsBatch(Protocol):
    """An index that can run a step together with other indexes of the same class.

    The indexes may have different lengths.
    """

    def new_batch(self) -> IndexBatch:
        """Return an object that runs steps of lists of such indexes."""
        ...

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """Return the data of this index that a joint step reads. Valid until the index changes.

        The index must have batch size 1 and at least one token.

        Args:
            queries: The queries of this sequence, `[1, H, D]`.
            k: Rows to select per KV head.

        Raises:
            ValueError: As in `Attends.attend`.
        """
        ...
