"""Steps of a caller's CUDA graph, and tokens of several layers as one step.

In both the rows of a token lie behind the resident ones, and the window takes them over when
someone asks for them. So a token that brings no update is undone without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from kvindex.core.capability import capability, required
from kvindex.core.protocol import Attended, CapturesStep, JoinsBatch, ObservesQueries, Rows
from kvindex.core.resident import ResidentRows
from kvindex.layer.retrieval import RetrievingSteps, output_of, rows_to_ask
from kvindex.layer.stats import Counts


class CapturedSteps(RetrievingSteps):
    """A layer whose step of one token can be captured in a graph of the caller's.

    Before each replay comes `prepare_replay`, or `prepare_next`; after it `count_replay`.
    """

    _prepared: tuple[object, CapturesStep, ResidentRows, int] | None = None
    _due_at = 0  # length before which no replay lets an update begin or end

    def capture_refusal(self) -> str | None:
        """Why a graph cannot hold the step of the next token, or None where it can."""
        index, name = self.index, type(self.index).__name__
        if self.coverage is not None:
            return f"coverage: got {self.coverage}, allowed is None"
        if capability(index, ObservesQueries) is not None:
            return f"index: got {name}, which looks at every token's queries on the host"
        if not self._sealed or len(self) + 1 < self.dense_below or not len(index):
            return f"tokens: got {len(self)}, too few for a step that searches"
        if capability(index, CapturesStep) is None:
            return f"index: got {name}, whose steps are no kernels that read the device's counts"
        return None if self._looked is None else "an update is due before the next token"

    def prepare_replay(self) -> object | None:
        """Before a graph with `captured_step` is captured or replayed on the current stream.

        Then what it reads is where it reads it. Gives the same object for as long as one graph may
        be replayed; None where the next token must take `step` (`capture_refusal`).
        """
        self._prepared = None
        if self.capture_refusal() is not None:
            return None
        index, resident = self._capturing()
        k, self._due_at = rows_to_ask(self.index, self.k), self._due_from()
        self._prepared = self._prepared_for(), index, resident, k
        return index.prepare_replay(resident, k=k)

    def prepare_next(self) -> object | None:
        """As `prepare_replay`, or None where that must be called: where anything but `count_replay`
        was called since, or the resident rows have no room.

        Before each token of many layers: it asks the index alone.
        """
        if (prepared := self._prepared) is None:
            return None
        made_for, index, resident, k = prepared
        if made_for != self._prepared_for() or len(resident) >= resident.room:
            return None
        return index.prepare_replay(resident, k=k)

    def _prepared_for(self) -> object:
        """What `prepare_replay` depends on, but for the index's part."""
        return self.calls_begun, id(self.index), self.k, self.coverage, self.dense_below

    def captured_step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `step` of one real token for each row of the batch, for a CUDA graph of the caller's.

        Where the token goes and how many rows there are is read on the device. Before a capture
        and before each replay comes `prepare_replay`, after each replay `count_replay`; what is
        given back is overwritten by the next one. Raises as `step`, but for values.
        """
        self._check_shapes(queries, keys, values)
        sinks = self._sinks(sink_logits, queries)
        index, resident = self._capturing()
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(self.index, self.k)
        attended = index.captured_step(one, token, resident, k=k)
        self._tally.watch(attended.found)
        return output_of(attended, None if sinks is None else sinks[..., 0]).unsqueeze(2)

    def _capturing(self) -> tuple[CapturesStep, ResidentRows]:
        """The index, and its resident rows with room for a token."""
        resident = self._window.resident(len(self.index), more=1)
        return required(self.index, CapturesStep), resident

    def count_replay(self) -> None:
        """A graph with `captured_step` has been replayed: the token is the layer's, an update may
        begin or end. Where that raises, the token has come all the same.
        """
        window = self._window
        resident = window.count_staged()
        length = len(self)
        sizes = len(resident), resident.masked, length, window.padded
        self._tally.count(Counts(None, *sizes, self._row_bytes))
        if length >= self._due_at and self._is_due(1):
            self._update_replayed()

    def _update_replayed(self) -> None:
        """As `_update` after a token, as a call of its own."""
        self._update(1)

    def rollback(self, checkpoint: Any) -> None:
        """As the base; what was prepared for a replay is so no longer."""
        self._prepared = None
        super().rollback(checkpoint)


class JoinsSteps(RetrievingSteps):
    """A layer of a batch of 1 whose next tokens can be a row of a step with other layers'.

    Whoever steps them calls for each, in this order: `way_back`, `begin_decoding`, `joins`, for
    each token `row_of_step` and `count_joined`, then `end_joined`; and all ways back where one
    raises.
    """

    def joins(self, tokens: int) -> bool:
        """Whether so many tokens attend to sink, window and `k` rows of an index that joins others,
        or to the window alone.
        """
        index = self.index
        if not self.decodes(tokens) or self.coverage is not None or self._window.batch_size != 1:
            return False
        if not len(index):
            return True
        searches = len(self) + 1 >= self.dense_below
        joins = capability(index, JoinsBatch) is not None
        return searches and joins and capability(index, ObservesQueries) is None

    def way_back(self, tokens: int) -> Callable[[], None]:
        """What undoes all that so many tokens may change; with no copy where none is an update."""
        settled = self._sealed and self._looked is None
        if not settled or (tokens == 1 and len(self) + 1 >= self._due_from()):
            return partial(self.rollback, self.checkpoint())
        before = self._window.counted, self._tally.checkpoint(), self._searched
        return partial(self._uncount, before)

    def _uncount(self, before: tuple[int, Any, int]) -> None:
        counted, tally, self._searched = before
        self._looked = None
        self._window.uncount(counted)
        self._tally.rollback(tally)

    def begin_decoding(self) -> None:
        """What waits for tokens that are no piece of a prompt is done."""
        self._begin_decoding()

    def resident_room(self, tokens: int) -> int:
        """Rows of sink and window that `lie_in` must have room for, with so many tokens to come."""
        return self._window.room(tokens)

    def lies_in(self, resident: ResidentRows) -> bool:
        """Whether sink and window lie there for steps."""
        return self._window.lies_in(resident)

    def lie_in(self, resident: ResidentRows | None) -> None:
        """Have sink and window lie there for steps, of a batch of 1; None: in memory of their own.

        Changes nothing that can be seen.
        """
        self._window.lie_in(resident)

    def asks(self) -> int:
        """Rows per KV head that a step asks the index for, 0 where it is empty."""
        return rows_to_ask(self.index, self.k) if len(self.index) else 0

    def row_of_step(self, queries: Tensor, tokens: int, *, k: int) -> object | None:
        """What a step reads of the index for queries `[1, H, D]`, None where that is empty; sink
        and window are where they are to lie, with room for so many tokens.

        Raises as `JoinsBatch.batch_row`.
        """
        self._window.resident(len(self.index), more=tokens)
        if not len(self.index):
            return None
        return required(self.index, JoinsBatch).batch_row(queries, k=k)

    def count_joined(self, attended: Attended) -> None:
        """A step has put a token behind the resident rows, and attended to these rows."""
        resident = self._window.count_staged()
        if len(self.index):
            sizes = len(resident), resident.masked, len(self), self._window.padded
            self._tally.count(Counts(attended.found, *sizes, self._row_bytes))

    def end_joined(self, tokens: int) -> None:
        """So many tokens have come: an update may begin or end."""
        searched = len(self.index) > 0
        if tokens > 1:
            self._looked = len(self) - tokens
        else:
            self._update(1)
        self._searched = tokens if searched else 0
