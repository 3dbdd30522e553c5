"""Tokens of several layers as one step: what each layer does before it and after it.

As in a caller's graph (`AttentionLayer.captured_step`) the rows of a token lie behind the resident
ones, and the window takes them over when someone asks for them. So a token that brings no update
is undone without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from kvindex.core.capability import capability, required
from kvindex.core.protocol import Attended, JoinsBatch, ObservesQueries
from kvindex.core.resident import ResidentRows
from kvindex.layer.retrieval import RetrievingSteps, rows_to_ask
from kvindex.layer.stats import Counts


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
        if not self.decodes(tokens) or self.coverage is not None or self._regions.batch_size != 1:
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
        before = self._regions.counted, self._tally.checkpoint(), self._searched
        return partial(self._uncount, before)

    def _uncount(self, before: tuple[int, Any, int]) -> None:
        counted, tally, self._searched = before
        self._looked = None
        self._regions.uncount(counted)
        self._tally.rollback(tally)

    def begin_decoding(self) -> None:
        """What waits for tokens that are no piece of a prompt is done."""
        self._begin_decoding()

    def resident_room(self, tokens: int) -> int:
        """Rows of sink and window that `lie_in` must have room for, with so many tokens to come."""
        return self._regions.room(tokens)

    def lies_in(self, resident: ResidentRows) -> bool:
        """Whether sink and window lie there for steps."""
        return self._regions.lies_in(resident)

    def lie_in(self, resident: ResidentRows | None) -> None:
        """Have sink and window lie there for steps, of a batch of 1; None: in memory of their own.

        Changes nothing that can be seen.
        """
        self._regions.lie_in(resident)

    def asks(self) -> int:
        """Rows per KV head that a step asks the index for, 0 where it is empty."""
        return rows_to_ask(self.index, self.k) if len(self.index) else 0

    def row_of_step(self, queries: Tensor, tokens: int, *, k: int) -> object | None:
        """What a step reads of the index for queries `[1, H, D]`, None where that is empty; sink
        and window are where they are to lie, with room for so many tokens.

        Raises as `JoinsBatch.batch_row`.
        """
        self._regions.resident(len(self.index), more=tokens)
        if not len(self.index):
            return None
        return required(self.index, JoinsBatch).batch_row(queries, k=k)

    def count_joined(self, attended: Attended) -> None:
        """A step has put a token behind the resident rows, and attended to these rows."""
        resident = self._regions.count_staged()
        if len(self.index):
            sizes = len(resident), resident.masked, len(self), self._regions.padded
            self._tally.count(Counts(attended.found, *sizes, self._row_bytes))

    def end_joined(self, tokens: int) -> None:
        """So many tokens have come: an update may begin or end."""
        searched = len(self.index) > 0
        if tokens > 1:
            self._looked = len(self) - tokens
        else:
            self._update(1)
        self._searched = tokens if searched else 0
