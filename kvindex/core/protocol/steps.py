"""Capabilities of an index that attends by itself: to rows, in a step, in a graph, in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvindex.core.protocol.results import Attended, Hits, Rows
from kvindex.core.resident import ResidentRows


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
