"""Decode steps in a caller's CUDA graph, or together with the decode steps of other sequences.

The kernels of such a step append the new token's key and value to the resident rows, which is one
buffer with the rows of sink and window. The layer only counts the token. The window copies the key
and value later, when its rows are read; until then, the token is called staged. So a step can be
undone without a copy of data, unless it moves tokens into the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvindex.core.capability import capability, required
from kvindex.core.protocol import (
    Attended,
    CapturesAll,
    CapturesStep,
    CapturesTokens,
    ErrorLimit,
    JoinsBatch,
    KVIndex,
    LimitsSteps,
    ObservesQueries,
    Rows,
)
from kvindex.core.resident import ResidentRows, shown_first
from kvindex.core.restore import Restorable
from kvindex.layer.contents import LayerContents
from kvindex.layer.retrieval import Wanted, output_of, rows_to_ask
from kvindex.layer.stats import Counts, Tally
from kvindex.layer.updates import Updates

Situation = tuple[Any, ...]
"""Values that change when a layer changes (`AttentionLayer._situation`)."""

Prepared = tuple[Situation, Callable[[], object], ResidentRows]
"""The data of a prepared step: the layer's situation at that time, a function that prepares the
index again, and the rows of sink and window."""


class CapturedSteps(Restorable):
    """Decode steps that the caller captures in a CUDA graph and replays.

    A step has one token of each sequence, or several, of which the caller may reject the last ones.

    Args:
        contents: The index and the window.
        updates: Moves tokens from the window into the index, which cannot happen inside a replay.
        tally: Counts the rows that the steps read.
        row_bytes: Bytes of one row (key and value) that the index fetches.
    """

    _due_at = 0  # while the sequence is shorter than this, no tokens move into the index

    def __init__(
        self, contents: LayerContents, updates: Updates, tally: Tally, row_bytes: int
    ) -> None:
        self._contents, self._updates, self._tally = contents, updates, tally
        self._row_bytes = row_bytes
        # (number of tokens, whether they attend to all) -> arguments of the last `prepare`
        self._prepared: dict[tuple[int, bool], Prepared] = {}

    def refusal(
        self, coverage: float | None, error: float | None, *, dense_below: int, tokens: int = 1
    ) -> str | None:
        """Return why a graph cannot capture the next decode step, or None if it can.

        Args:
            coverage: The layer's option `coverage`, which must be None.
            error: The layer's option `error`, which must be None unless the index has
                `protocol.LimitsSteps`.
            dense_below: Decode steps search the index only if the sequence has at least this many
                tokens. Steps of a shorter sequence attend to all tokens.
            tokens: Number of tokens of the step.
        """
        index, length = self._contents.index, len(self._contents)
        name = type(index).__name__
        if coverage is not None:
            return f"coverage: got {coverage}, allowed is None in a CUDA graph"
        if capability(index, ObservesQueries) is not None:
            return f"index: got {name}, which reads the queries of every token on the host"
        if not self._updates.prompt_ended or length + 1 < dense_below or not len(index):
            return f"tokens: got {length}, too few for a step that searches the index"
        if capability(index, CapturesStep) is None:
            return f"index: got {name}, which has no decode step that a CUDA graph can capture"
        if tokens > 1 and capability(index, CapturesTokens) is None:
            return (
                f"index: got {name}, which has no decode step of several tokens that a CUDA graph "
                "can capture"
            )
        if error is not None and capability(index, LimitsSteps) is None:
            return (
                f"error: got {error}, allowed is None and a number for k in a CUDA graph, because "
                f"the kernels for this {name} do not choose the number of rows"
            )
        deferred = self._updates.deferred
        return "tokens must move into the index before the next token" if deferred else None

    def full_refusal(self) -> str | None:
        """Return why a graph cannot capture the next step with full attention, or None if it
        can.
        """
        index, length = self._contents.index, len(self._contents)
        name = type(index).__name__
        if capability(index, ObservesQueries) is not None:
            return f"index: got {name}, which reads the queries of every token on the host"
        if not self._updates.prompt_ended or not len(index):
            return f"tokens: got {length}, allowed are some in the index, after a decode step"
        if capability(index, CapturesAll) is None:
            return f"index: got {name}, whose steps with full attention no CUDA graph can capture"
        deferred = self._updates.deferred
        return "tokens must move into the index before the next token" if deferred else None

    def prepare(
        self, situation: Situation, wanted: Wanted, tokens: int = 1, *, full: bool = False
    ) -> object | None:
        """Prepare a capture or a replay: write all data to the addresses that the CUDA graph reads.

        Args:
            situation: Numbers that change when the layer changes, except by the method `count`. The
                first is the number of calls of the layer's methods, this one included.
                `prepare_next` checks whether they are still the same.
            wanted: How many rows to retrieve per KV head.
            tokens: Number of tokens of the decode step.
            full: Whether the tokens attend to all tokens instead of searching.

        Returns:
            An object that identifies the graph. A graph that was captured earlier may be replayed
            if this method still returns the same object.
        """
        index, resident = self._capturing(tokens)
        self._due_at = self._updates.due_from()
        if full:
            window = self._contents.window
            # Without padding, the sink is read from the index, and no mask is read. Sequences of a
            # batch may get padding later, if they keep different numbers of tokens.
            padded = window.padding or window.batch_size > 1
            skip = 0 if padded else len(resident) - len(self._contents.window)
            entire = required(index, CapturesAll)
            again = partial(entire.prepare_all, resident, tokens=tokens, skip=skip, masked=padded)
        elif tokens > 1:
            several, how = required(index, CapturesTokens), self._asked(wanted, None)
            again = partial(several.prepare_tokens, resident, tokens=tokens, **how)
        else:
            how = self._asked(wanted, None)
            again = partial(required(index, CapturesStep).prepare_replay, resident, **how)
        self.unchanged(situation)
        self._prepared[tokens, full] = situation, again, resident
        return again()

    def unchanged(self, situation: Situation) -> None:
        """Record that the running call of a layer's method changes nothing that replays depend on.

        Otherwise `prepare_next` would return None after the call. `situation` is that of now.
        """
        calls, *others = situation
        before = calls - 1, *others
        for kind, (seen, *_) in self._prepared.items():
            if seen == before:
                self._prepared[kind] = situation, *self._prepared[kind][1:]

    def prepare_next(
        self, situation: Situation, tokens: int = 1, ahead: int = 0, *, full: bool = False
    ) -> object | None:
        """Prepare the next replay of the CUDA graph like `prepare`, but in less time.

        This method only calls a method of the index. In four cases, this is not enough. Then the
        method returns None, and you must call `prepare`: if `situation` is not the value that was
        passed to `prepare`; if no such step was prepared, or with another buffer for the rows of
        sink and window; if the buffer must be written again; or if it has no room for the tokens,
        after `ahead` tokens that are not counted yet.
        """
        if (prepared := self._prepared.get((tokens, full))) is None:
            return None
        before, again, resident = prepared
        window = self._contents.window
        same = before == situation and window.lies_in(resident) and not window.outdated
        if not same or len(resident) + ahead + tokens > resident.room:
            return None
        return again()

    def _asked(self, wanted: Wanted, lse: Tensor | None) -> dict[str, Any]:
        """Return the arguments for the index that say how many rows are wanted.

        lse: log-sum-exp of the logits of learned sinks, `[B, H]`, or None.
        """
        k, variance = rows_to_ask(self._contents.index, wanted.k), wanted.variance
        return dict(k=k) if variance is None else dict(k=k, limit=ErrorLimit(variance, lse))

    def step(
        self,
        queries: Tensor,
        token: Rows,
        sinks: Tensor | None,
        wanted: Wanted,
        *,
        full: bool = False,
    ) -> Tensor:
        """Launch the kernels of a decode step, so that a graph captures them.

        Args:
            queries: `[B, H, T, D]`.
            token: Keys `[B, G, T, D]` and values `[B, G, T, Dv]` of the new tokens.
            sinks: Logits of learned sinks `[B, H, T]`, or None.
            wanted: How many rows to retrieve per KV head, as for `prepare`.
            full: Whether the tokens attend to all tokens, as for `prepare`.

        Returns:
            Attention outputs `[B, H, T, Dv]`.
        """
        index, resident = self._capturing(queries.shape[2])
        if full or queries.shape[2] > 1:
            parts = queries, token.keys, token.values
            return self._several(index, resident, parts, sinks, wanted, full=full)
        sinks = None if sinks is None else sinks[..., 0]
        how = self._asked(wanted, sinks)
        step = required(index, CapturesStep).captured_step
        attended = step(queries.select(2, 0), token, resident, **how)
        self._tally.watch(attended.found, attended.histogram)
        return output_of(attended, sinks).unsqueeze(2)

    def _several(
        self,
        index: KVIndex,
        resident: ResidentRows,
        parts: Sequence[Tensor],
        sinks: Tensor | None,
        wanted: Wanted,
        *,
        full: bool,
    ) -> Tensor:
        """Launch the kernels of a decode step of several tokens of each sequence.

        `parts` are its queries, keys and values; the other arguments are those of `step`.
        """
        # each token is a sequence of a batch for the kernels: [B, H, T, D] -> [B·T, H, 1, D]
        batch = len(parts[0])
        queries, keys, values = (one.transpose(1, 2).flatten(0, 1)[:, :, None] for one in parts)
        sinks = None if sinks is None else sinks.transpose(1, 2).flatten(0, 1)
        given = queries[:, :, 0], Rows(keys, values), resident
        if full:
            attended = required(index, CapturesAll).captured_all(*given)
        else:
            limited = self._asked(wanted, sinks)
            limited.pop("k")
            attended = required(index, CapturesTokens).captured_tokens(*given, **limited)
            tokens = len(queries) // batch
            self._tally.watch(attended.found, attended.histogram, tokens=tokens)
        output = output_of(attended, sinks)
        return output.reshape(batch, -1, *output.shape[1:]).transpose(1, 2)

    def count(self, kept: int | Sequence[int] = 1, of: int = 1, *, full: bool = False) -> bool:
        """Count the tokens that a replay of the graph has appended.

        Args:
            kept: Number of tokens that stay, or one number for each sequence. The others are
                removed; those before the largest number become padding.
            of: Number of tokens that the replay has appended.
            full: Whether they have attended to all tokens. The rows that they have read are then
                not counted, as in other steps with full attention.

        Returns:
            True if old tokens must move from the window into the index now.
        """
        contents, window = self._contents, self._contents.window
        before = len(contents)
        hidden = window.masked, window.padded  # before the new tokens, of which each is read
        shown = None
        if not isinstance(kept, int):
            shown = shown_first(tuple(kept), contents.index.geometry.device)
            kept = max(kept)
        resident = window.count_staged(kept, of, shown, before)
        # rows are also read for tokens that are then removed, each time one more than before
        sums = [of * (old + 1) + of * (of - 1) // 2 for old in (len(resident) - kept, before)]
        sizes = sums[0], hidden[0], sums[1], hidden[1]
        if not full:
            self._tally.count(Counts(None, *sizes, self._row_bytes, steps=of))
        return before + kept >= self._due_at and self._updates.is_due(kept)

    def check_updates(self) -> None:
        """Check after every step whether tokens must move into the index.

        Call this when tokens were removed: the next move may be due earlier than at the last
        `prepare`.
        """
        self._due_at = 0

    def forget(self) -> None:
        """Discard the prepared replay, so that `prepare` must be called before the next replay."""
        self._prepared = {}

    def _capturing(self, tokens: int) -> tuple[KVIndex, ResidentRows]:
        """Return the index, and the buffer with the keys and values of sink and window.

        A decode step needs both. The buffer has room for `tokens` more tokens.
        """
        index, window = self._contents.index, self._contents.window
        return index, window.resident(len(index), more=window.more_for(tokens))

    def _after_copy(self) -> None:
        self.forget()


class JoinedSteps(Restorable):
    """Runs decode steps of one sequence together with those of other sequences.

    `pool.LayerPool` uses it.

    Args:
        contents: The index and the window.
        tally: Counts the rows that the steps read.
        row_bytes: Bytes of one row (key and value) that the index fetches.
    """

    def __init__(self, contents: LayerContents, tally: Tally, row_bytes: int) -> None:
        self._contents, self._tally, self._row_bytes = contents, tally, row_bytes

    def possible(self, *, searches: bool, limited: bool) -> bool:
        """Return True if the next decode step can run together with those of other sequences.

        This is so if the index is empty, because queries then attend only to the window, or if the
        index offers `protocol.JoinsBatch`.

        Args:
            searches: True if the sequence is long enough to search.
            limited: True if the expected error determines the number of rows. The step must then
                search, and the index must offer `protocol.LimitsSteps`.
        """
        index, window = self._contents.index, self._contents.window
        if window.batch_size != 1:
            return False
        if not len(index):
            return not limited
        if limited and capability(index, LimitsSteps) is None:
            return False
        joins = capability(index, JoinsBatch) is not None
        return searches and joins and capability(index, ObservesQueries) is None

    def asks(self, k: int) -> int:
        """Return how many rows per KV head to request from the index, or 0 if the index is empty.

        A row is the key and the value of one token.
        """
        index = self._contents.index
        return rows_to_ask(index, k) if len(index) else 0

    def row(self, queries: Tensor, tokens: int, *, k: int) -> object | None:
        """Prepare one token's search in a decode step that runs together with other sequences.

        This also writes the rows of sink and window to their buffer.

        Args:
            queries: `[1, H, D]`.
            tokens: Number of further tokens for which the buffer must have room.
            k: Number of rows to retrieve per KV head.

        Returns:
            The result of `JoinsBatch.batch_row`, or None if the index is empty.
        """
        index = self._contents.index
        self._contents.window.resident(len(index), more=tokens)
        return required(index, JoinsBatch).batch_row(queries, k=k) if len(index) else None

    def count(self, attended: Attended) -> None:
        """Count a token that a joined step has appended, and the rows that attention has read.

        A joined step is a decode step that runs together with other sequences. A row is a key and
        its value. `attended` is the attention output of the token.
        """
        contents, window = self._contents, self._contents.window
        resident = window.count_staged()
        if len(contents.index):
            sizes = len(resident), resident.masked, len(contents), window.padded
            self._tally.count(Counts(attended.found, *sizes, self._row_bytes))

    def checkpoint(self) -> Any:
        """Return the present state for `rollback`, without copying data.

        The checkpoint is valid until tokens move into the index.
        """
        return self._contents.window.counted, self._tally.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Return to the state that `checkpoint` recorded.

        Tokens that were appended since then are removed.
        """
        counted, tally = checkpoint
        self._contents.window.uncount(counted)
        self._tally.rollback(tally)
