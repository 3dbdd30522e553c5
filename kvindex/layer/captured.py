"""Steps of a layer that run in a caller's CUDA graph, or together with the steps of other layers.

Such a step writes the token's key and value behind the resident rows (sink and window in one
buffer) by itself. The layer only counts the token, which is then staged: the window copies the
token's row when its rows are read. So undoing a token needs no copy, unless it causes an update.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvindex.core.capability import capability, required
from kvindex.core.protocol import Attended, CapturesStep, JoinsBatch, ObservesQueries, Rows
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable
from kvindex.layer.contents import LayerContents
from kvindex.layer.retrieval import output_of, rows_to_ask
from kvindex.layer.stats import Counts, Tally
from kvindex.layer.updates import Updates


class CapturedSteps(Restorable):
    """Steps of one token that the caller captures in a CUDA graph of its own.

    Args:
        contents: The index and the window.
        updates: The updates of the window, which must not become due inside a replay.
        tally: Counts what the steps read.
        row_bytes: Bytes of a row that the index fetches.
    """

    _prepared: tuple[object, CapturesStep, ResidentRows, int] | None = None
    _due_at = 0  # no update becomes due while the length is below this

    def __init__(
        self, contents: LayerContents, updates: Updates, tally: Tally, row_bytes: int
    ) -> None:
        self._contents, self._updates, self._tally = contents, updates, tally
        self._row_bytes = row_bytes

    def refusal(self, *, coverage: float | None, dense_below: int) -> str | None:
        """Return why a graph cannot contain the step of the next token, or None if it can."""
        index, length = self._contents.index, len(self._contents)
        name = type(index).__name__
        if coverage is not None:
            return f"coverage: got {coverage}, allowed is None"
        if capability(index, ObservesQueries) is not None:
            return f"index: got {name}, which looks at every token's queries on the host"
        if not self._updates.prompt_ended or length + 1 < dense_below or not len(index):
            return f"tokens: got {length}, too few for a step that searches"
        if capability(index, CapturesStep) is None:
            return f"index: got {name}, whose steps are no kernels that read the device's counts"
        return "an update is due before the next token" if self._updates.deferred else None

    def prepare(self, situation: object, k: int) -> object | None:
        """Write all data to the addresses that a graph reads, before a capture or a replay.

        situation: an object that stays equal as long as only `count` has changed the layer. Returns
        the same object for as long as one graph may be replayed.
        """
        index, resident = self._capturing()
        k, self._due_at = rows_to_ask(self._contents.index, k), self._updates.due_from()
        self._prepared = situation, index, resident, k
        return index.prepare_replay(resident, k=k)

    def prepare_next(self, situation: object) -> object | None:
        """Like `prepare`, but faster, because it calls only the index.

        Returns None if the situation has changed, or if the buffer of the rows in sink and window
        has no room for a token.
        """
        if (prepared := self._prepared) is None:
            return None
        before, index, resident, k = prepared
        if before != situation or len(resident) >= resident.room:
            return None
        return index.prepare_replay(resident, k=k)

    def step(self, queries: Tensor, token: Rows, sinks: Tensor | None, k: int) -> Tensor:
        """Launch the kernels of a step, for a graph to capture: `[B, H, 1, Dv]`.

        queries: `[B, H, 1, D]`; token: keys `[B, G, 1, D]`, and values; sinks: `[B, H, 1]` or None.
        """
        index, resident = self._capturing()
        k = rows_to_ask(self._contents.index, k)
        attended = index.captured_step(queries.select(2, 0), token, resident, k=k)
        self._tally.watch(attended.found)
        return output_of(attended, None if sinks is None else sinks[..., 0]).unsqueeze(2)

    def count(self) -> bool:
        """Count the token of a replay. Return whether an update is due now."""
        contents, window = self._contents, self._contents.window
        resident = window.count_staged()
        length = len(contents)
        sizes = len(resident), resident.masked, length, window.padded
        self._tally.count(Counts(None, *sizes, self._row_bytes))
        return length >= self._due_at and self._updates.is_due(1)

    def forget(self) -> None:
        """Make the last result of `prepare` invalid."""
        self._prepared = None

    def _capturing(self) -> tuple[CapturesStep, ResidentRows]:
        """Return the index, and the rows of sink and window in a buffer with room for a token."""
        index = self._contents.index
        return required(index, CapturesStep), self._contents.window.resident(len(index), more=1)

    def _after_copy(self) -> None:
        self.forget()


class JoinedSteps(Restorable):
    """Steps of one sequence that run together with the steps of other layers (`pool.LayerPool`).

    Args:
        contents: The index and the window.
        tally: Counts what the steps read.
        row_bytes: Bytes of a row that the index fetches.
    """

    def __init__(self, contents: LayerContents, tally: Tally, row_bytes: int) -> None:
        self._contents, self._tally, self._row_bytes = contents, tally, row_bytes

    def possible(self, *, searches: bool) -> bool:
        """Return whether the next tokens can run in one step with other sequences.

        They can if they attend only to the window, or if the index offers `protocol.JoinsBatch`.
        searches: whether the sequence is long enough to search.
        """
        index, window = self._contents.index, self._contents.window
        if window.batch_size != 1:
            return False
        if not len(index):
            return True
        joins = capability(index, JoinsBatch) is not None
        return searches and joins and capability(index, ObservesQueries) is None

    def asks(self, k: int) -> int:
        """Return how many rows per KV head to ask the index for; 0 if it is empty."""
        index = self._contents.index
        return rows_to_ask(index, k) if len(index) else 0

    def row(self, queries: Tensor, tokens: int, *, k: int) -> object | None:
        """Return the index's part of a joint step, or None if the index is empty.

        This also writes the rows of sink and window to their buffer, with room for `tokens` more
        tokens.
        """
        index = self._contents.index
        self._contents.window.resident(len(index), more=tokens)
        return required(index, JoinsBatch).batch_row(queries, k=k) if len(index) else None

    def count(self, attended: Attended) -> None:
        """Count a token whose rows a joint step has written, and the rows that the step read."""
        contents, window = self._contents, self._contents.window
        resident = window.count_staged()
        if len(contents.index):
            sizes = len(resident), resident.masked, len(contents), window.padded
            self._tally.count(Counts(attended.found, *sizes, self._row_bytes))

    def checkpoint(self) -> Any:
        """Return a checkpoint, without copying data. It is valid until the next update."""
        return self._contents.window.counted, self._tally.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Forget the tokens that were counted since a checkpoint."""
        counted, tally = checkpoint
        self._contents.window.uncount(counted)
        self._tally.rollback(tally)
