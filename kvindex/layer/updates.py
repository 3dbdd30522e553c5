"""Updates of the window: when old tokens leave it for the index, and how they are appended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import AppendsAsync, EncodesBlocks, KVIndex
from kvindex.core.restore import Restorable
from kvindex.core.streams import side_stream
from kvindex.layer.contents import LayerContents
from kvindex.layer.window import Leaving

LAG = 4
"""Number of tokens during which an update may run concurrently with decode steps, so that no step
waits for the update (`benchmarks/append.py`). The window is up to this many rows longer."""


Append = Callable[[], None]


class AsyncAppend:
    """An append of rows to an index. It begins when this object is made; `end` completes it.

    On a CUDA device the append runs on a stream that all layers share, while the current stream can
    search the index without the new rows. Until `end` nobody may change the index or the rows.

    Args:
        index: The index to which the rows are appended.
        leaving: The rows.
        beside: The index, if its `start_append` is to be called now. None: `end` does the whole
            append.
        begun: Length of the sequence when the append begins.
    """

    _done: torch.cuda.Event | None = None  # set to None once the current stream has waited for it

    def __init__(
        self, index: KVIndex, leaving: Leaving, *, beside: AppendsAsync | None, begun: int = 0
    ) -> None:
        self.leaving, self.begun = leaving, begun
        self._device: torch.device = index.geometry.device
        rows, valid = leaving.rows, leaving.retrievable
        if beside is None:
            self._rest: Append = partial(index.append, rows.keys, rows.values, valid=valid)
            return
        begin = partial(beside.start_append, rows.keys, rows.values, valid=valid)
        if self._device.type == "cuda":
            self._rest = self._begun_beside(begin, [rows.keys, rows.values, valid])
        else:
            self._rest = begin()

    def end(self) -> None:
        """Complete the append. Later work of the current stream sees the rows in the index."""
        self.wait()
        self._rest()

    def wait(self) -> None:
        """Let later work of the current stream wait for the side stream."""
        done, self._done = self._done, None
        if done is not None:
            torch.cuda.current_stream(self._device.index).wait_event(done)

    def __del__(self) -> None:
        """Wait before the index's memory is freed: the side stream may still write to it."""
        if not sys.is_finalizing():
            self.wait()

    def _begun_beside(self, begin: Callable[[], Append], read: list[Tensor | None]) -> Append:
        """Call `begin` on the side stream; `read` are the tensors that it reads."""
        side, current = side_stream(self._device), torch.cuda.current_stream(self._device.index)
        side.wait_stream(current)
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(side)  # else it may be freed while the side stream reads it
        try:
            with torch.cuda.stream(side):
                rest = begin()
        except BaseException:
            current.wait_stream(side)  # `begin` may have launched work on the side stream
            raise
        self._done = side.record_event()
        return rest


def unit_of(index: KVIndex, update_every: int) -> int:
    """Return how many tokens move into the index together: the block of an index, or 1."""
    blocks = capability(index, EncodesBlocks)
    if blocks is None or update_every % blocks.block_tokens:
        return 1
    return blocks.block_tokens


def longest_buffer(
    index: KVIndex, unit: int, *, update_every: int, update_phase: float | None
) -> int:
    """Return the length of the buffer at which an update begins in any case.

    If layers take turns, a full block waits for the layer's turn, and meanwhile more tokens enter
    the buffer.
    """
    turns = update_phase is not None and capability(index, AppendsAsync) is not None
    return 2 * update_every if turns and unit > 1 else update_every


class Updates(Restorable):
    """Moves old tokens of the window into the index.

    An update that begins in a step of one token may run concurrently with the next steps, if the
    index offers `protocol.AppendsAsync`. Until the update ends, the tokens that are leaving stay in
    the window, and attention reads them there. All decisions depend only on lengths, and never on a
    clock, so that results are reproducible.

    Args:
        contents: The index and the window.
        update_every: Tokens in the buffer at which an update is due.
        update_phase: The length at which this layer may begin an update, as in `AttentionLayer`, or
            None if layers do not take turns.
        most: Tokens in the buffer at which an update begins in any case (`longest_buffer`).
    """

    def __init__(
        self, contents: LayerContents, *, update_every: int, update_phase: float | None, most: int
    ) -> None:
        self._contents, self._every, self._most = contents, update_every, most
        self.turn = None if update_phase is None else int(update_phase * update_every)
        """The layer's turn comes when the length modulo `update_every` is this. None: no turns."""
        self.pending: AsyncAppend | None = None
        """The pending append, whose tokens are leaving the window; None if there is none."""
        self.prompt_ended = False
        """Whether the index knows that its prompt has ended."""
        self._deferred_from: int | None = None

    @property
    def deferred(self) -> bool:
        """Whether a step of several tokens has deferred an update to the next step."""
        return self._deferred_from is not None

    # Calls before a step of the layer

    def catch_up(self) -> None:
        """Run the update that a step of several tokens deferred, if it is still due.

        The caller may have truncated some of these tokens in the meantime.
        """
        start, self._deferred_from = self._deferred_from, None
        if start is not None and len(self._contents) > start:
            self.update(len(self._contents) - start)

    def begin_decoding(self) -> None:
        """Run what was deferred to the next decode step, and end the prompt once."""
        self.catch_up()
        if not self.prompt_ended:
            self.end_prompt()

    def end_prompt(self) -> None:
        """Tell the index that the prompt has ended."""
        self._contents.index.end_prompt()
        self.prompt_ended = True

    # Calls after a step

    def update_if_due(self, decoded: int) -> None:
        """Begin or end an update if one is due.

        decoded: number of new tokens, or 0 for a chunk of a prompt.
        """
        if self.is_due(decoded):
            self.update(decoded)

    def defer(self, start: int) -> None:
        """Defer the update to the next step: the tokens from `start` on may be rejected."""
        self._deferred_from = start

    def update(self, decoded: int = 0) -> None:
        """If the buffer is full, move all but the newest `local_window` tokens into the index.

        decoded: as in `update_if_due`. If `decoded` is not 0 and the index can append
        asynchronously, the move ends in a later step.
        """
        index = self._contents.index
        beside = capability(index, AppendsAsync) if decoded else None
        if self.pending is not None:
            if beside is not None and not self._may_end(decoded):
                return
            self.finish()
        if self._may_begin(decoded if beside is not None else 0):
            self._begin(beside)

    def update_chunk(self) -> None:
        """If the buffer is full, begin to move tokens of a prompt, asynchronously if possible."""
        if self._contents.window.buffer >= self._every:
            self._begin(capability(self._contents.index, AppendsAsync))

    def settle(self) -> None:
        """Run a deferred update of the window, and finish a pending one."""
        self.catch_up()
        self.finish()

    # When an update is due

    def is_due(self, decoded: int) -> bool:
        """Return whether an update may begin or end.

        This compares a few numbers, so that the caller can avoid a transaction if nothing changes.
        A transaction is slower, because it records a checkpoint.
        """
        return self._may_begin(decoded) if self.pending is None else self._may_end(decoded)

    def due_from(self) -> int:
        """Return a length of the sequence below which no single token can make an update due."""
        length, pending = len(self._contents), self.pending
        first = length + self._most - self._contents.window.buffer
        if self.turn is not None:
            first = min(first, length + 1 + (self.turn - length - 1) % self._every)
        return first if pending is None else min(first, pending.begun + LAG)

    def idle_for(self, tokens: int) -> bool:
        """Return whether a step of `tokens` decoded tokens runs no update, before or after it."""
        settled = self.prompt_ended and not self.deferred
        return settled and (tokens != 1 or len(self._contents) + 1 < self.due_from())

    def _may_begin(self, decoded: int) -> bool:
        """Return whether the buffer is full, or one of the new tokens brings the layer's turn."""
        full = self._most if decoded else self._every
        return self._contents.window.buffer >= full or self._has_turn(decoded)

    def _may_end(self, decoded: int) -> bool:
        """Return whether the pending append may finish.

        It may after `LAG` tokens, when the buffer is full, or when the layer's next turn comes.
        """
        pending = self.pending
        if pending is None or not decoded or self._has_turn(decoded):
            return pending is not None
        late = len(self._contents) - pending.begun >= LAG
        return late or self._contents.window.buffer >= self._most

    def _has_turn(self, decoded: int) -> bool:
        """Return whether one of the new tokens brings the layer's turn."""
        if self.turn is None:
            return False
        return (len(self._contents) - self.turn) % self._every < decoded

    # How tokens move

    def _begin(self, beside: AppendsAsync | None) -> None:
        """Begin to move all but the newest `local_window` tokens.

        beside: the index, for an asynchronous move; None: the move is finished immediately.
        """
        contents = self._contents
        index, window = contents.index, contents.window
        leaving = window.oldest(len(index))
        if leaving.count:
            self.pending = AsyncAppend(index, leaving, beside=beside, begun=len(contents))
        window.begin(leaving.count)
        if beside is None:
            self.finish()

    def finish(self) -> None:
        """Finish the pending append: the tokens are in the index, and no longer in the window."""
        contents, pending = self._contents, self.pending
        self.pending = None
        if pending is None:
            return
        rest = contents.window.without(pending.leaving.count)
        with contents.moving():
            pending.end()
            contents.window.end(rest, pending.leaving.sink)

    def keep(self, length: int) -> None:
        """Cancel the pending append if it has tokens from position `length` on."""
        pending = self.pending
        if pending is not None and length < len(self._contents.index) + pending.leaving.count:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the pending append: the tokens that were leaving stay in the window."""
        if self.pending is not None:
            self.pending.wait()  # because the index will write to the same memory again
            self.pending = None
            self._contents.window.stay()

    def reset(self) -> None:
        """Cancel the pending append, and wait for a new prompt."""
        self._cancel()
        self.prompt_ended, self._deferred_from = False, None

    def checkpoint(self) -> Any:
        """Return the present state, for `rollback`. Index and window are not part of it."""
        return self.pending, self.prompt_ended, self._deferred_from

    def rollback(self, checkpoint: Any) -> None:
        """Go back to a checkpoint. The caller must roll back index and window after this."""
        pending, self.prompt_ended, self._deferred_from = checkpoint
        if self.pending is not None and self.pending is not pending:
            self.pending.wait()  # because the index will write to the same memory again
        self.pending = pending
