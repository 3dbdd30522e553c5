"""Updates of an attention layer: when and how old tokens move from its window into its index."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import AppendsAsync, EncodesBlocks, KVIndex, LearnsOnce
from kvindex.core.restore import Restorable
from kvindex.core.streams import side_stream
from kvindex.layer.contents import LayerContents
from kvindex.layer.window import Leaving

LAG = 4
"""Number of decode steps during which tokens may move into the index in the background, so that no
decode step waits for the move (`benchmarks/append.py`). The window can be longer by this number of
tokens."""


Append = Callable[[], None]


class AsyncAppend:
    """An append to an index. The constructor begins the append, and `end` completes it.

    On a CUDA device the append runs on a side stream that all layers share. In the meantime the
    current stream can search the index, and does not find the new rows yet. Until `end` returns,
    nobody may change the index or the rows.

    Args:
        index: The index to which the rows are appended.
        leaving: The rows to append. They move from the window to the index.
        asynchronous: The same index, whose `start_append` the constructor calls to begin the
            append. If it is None, `end` does the whole append.
        begun: Length of the sequence when the append begins.
    """

    _done: torch.cuda.Event | None = None  # end of the work on the side stream; None after `wait`

    def __init__(
        self, index: KVIndex, leaving: Leaving, *, asynchronous: AppendsAsync | None, begun: int = 0
    ) -> None:
        self.leaving, self.begun = leaving, begun
        self._device: torch.device = index.geometry.device
        rows, valid = leaving.rows, leaving.retrievable
        if asynchronous is None:
            self._rest: Append = partial(index.append, rows.keys, rows.values, valid=valid)
            return
        begin = partial(asynchronous.start_append, rows.keys, rows.values, valid=valid)
        if self._device.type == "cuda":
            self._rest = self._begun_on_side_stream(begin, [rows.keys, rows.values, valid])
        else:
            self._rest = begin()

    def end(self) -> None:
        """Complete the append. Later searches on the current stream can find the new tokens."""
        self.wait()
        self._rest()

    def wait(self) -> None:
        """Make the current CUDA stream wait until the append on the side stream has finished."""
        done, self._done = self._done, None
        if done is not None:
            torch.cuda.current_stream(self._device.index).wait_event(done)

    def __del__(self) -> None:
        """Wait for the side stream, which may still write to the index's memory."""
        if not sys.is_finalizing():
            self.wait()

    def _begun_on_side_stream(
        self, begin: Callable[[], Append], read: list[Tensor | None]
    ) -> Append:
        """Call `begin`, which begins the append, on the side stream.

        `read` are the tensors that `begin` reads.
        """
        side, current = side_stream(self._device), torch.cuda.current_stream(self._device.index)
        side.wait_stream(current)
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(side)  # keep its memory until the side stream has read it
        try:
            with torch.cuda.stream(side):
                rest = begin()
        except BaseException:
            current.wait_stream(side)  # `begin` may have launched work on the side stream
            raise
        self._done = side.record_event()
        return rest


def unit_of(index: KVIndex, update_every: int) -> int:
    """Return the block size of the index if tokens move into the index in whole blocks, else 1.

    Tokens move in whole blocks if the index encodes blocks and `update_every` is a multiple of the
    block size.
    """
    blocks = capability(index, EncodesBlocks)
    if blocks is None or update_every % blocks.block_tokens:
        return 1
    return blocks.block_tokens


def longest_buffer(
    index: KVIndex, unit: int, *, update_every: int, update_phase: float | None
) -> int:
    """Return the maximum number of new tokens in the window before an update must begin.

    An update moves old tokens from the window into the index. Normally it begins when the window
    has `update_every` new tokens. But with `update_phase`, the layers of a model begin updates at
    different decode steps. If the index encodes whole blocks, a full block may have to wait until
    it is this layer's turn. In the meantime, up to `update_every` further tokens enter the window.
    """
    turns = update_phase is not None and capability(index, AppendsAsync) is not None
    return 2 * update_every if turns and unit > 1 else update_every


class Updates(Restorable):
    """Moves old tokens of the window into the index.

    One such move is called an update. If the index offers `protocol.AppendsAsync`, an update that
    begins at a decode step of one token runs concurrently with the next decode steps. Until the
    update ends, its tokens stay in the window, and attention reads them there. Updates begin and
    end at fixed lengths of the sequence, whatever their speed, so results are reproducible.

    Args:
        contents: The index and the window.
        update_every: Number of new tokens in the window after which an update is due.
        update_phase: At which lengths of the sequence this layer begins an update, as a fraction of
            `update_every` (see `AttentionLayer`). None: an update begins when it is due.
        most: Number of new tokens in the window at which an update begins at any length
            (`longest_buffer`).
    """

    def __init__(
        self, contents: LayerContents, *, update_every: int, update_phase: float | None, most: int
    ) -> None:
        self._contents, self._every, self._most = contents, update_every, most
        self.turn = None if update_phase is None else int(update_phase * update_every)
        """The layer has its turn when the length modulo `update_every` equals this number."""
        self.pending: AsyncAppend | None = None
        """The append that has begun and not ended; its tokens are still in the window."""
        self.prompt_ended = False
        """True once `end_prompt` of the index has been called."""
        self._deferred_from: int | None = None
        self._held = False  # whether updates are postponed until `release`

    @property
    def deferred(self) -> bool:
        """True if an update (a move of tokens into the index) must run before the next token.

        `defer` has postponed it. Between `hold` and `release`, tokens may follow without it.
        """
        return self._deferred_from is not None and not self._held

    @property
    def overdue(self) -> bool:
        """True if the update that `defer` or `hold` has postponed must run now.

        If it is False although nothing is held, `drop` is as good as `catch_up`.
        """
        start, length = self._deferred_from, len(self._contents)
        return start is not None and length > start and self.is_due(length - start)

    # Methods that the layer calls before it appends tokens

    def catch_up(self) -> None:
        """Run the update (move of tokens into the index) that `defer` has postponed.

        The update may no longer be due, because the caller has truncated some of the tokens.
        Between `hold` and `release`, this does nothing.
        """
        if self._held:
            return
        start, self._deferred_from = self._deferred_from, None
        if start is not None and len(self._contents) > start:
            self.update(len(self._contents) - start)

    def begin_decoding(self) -> None:
        """Prepare a decode step: run a postponed update, and report the end of the prompt once.

        An update is a move of tokens from the window into the index. One that `update_chunk` has
        begun ends first, because its tokens belong to the prompt.
        """
        self.catch_up()
        if not self.prompt_ended:
            self.finish()
            self.end_prompt()

    def end_prompt(self) -> None:
        """Report to the index that the prompt has ended.

        An index that learns from its first append gets the prompt now, unless it already has it.
        """
        if not self._held and self._waits_for() and self._contents.window.buffer >= self._every:
            self._begin(None)
        self._contents.index.end_prompt()
        self.prompt_ended = True

    # Methods that the layer calls after it has appended tokens

    def update_if_due(self, decoded: int) -> None:
        """Begin or end an update (a move of tokens into the index), if one is due.

        `decoded` is the number of new tokens, or 0 for a chunk of a prompt.
        """
        if self.is_due(decoded):
            self.update(decoded)

    def defer(self, start: int) -> None:
        """Postpone the move of tokens into the index, because tokens from position `start` on may
        be rejected.

        `catch_up` moves the tokens before the next tokens are appended.
        """
        if not self._held:
            self._deferred_from = start

    def hold(self, since: int | None = None) -> None:
        """Postpone all updates until `release`, because tokens from position `since` on may be
        rejected. None means the next tokens."""
        self.catch_up()
        self._deferred_from = len(self._contents) if since is None else since
        self._held = True

    def release(self) -> None:
        """Allow updates again. Call `catch_up` to run one that `hold` has postponed."""
        self._held = False

    def drop(self) -> None:
        """Forget the update that `hold` has postponed, because it is not due."""
        self._deferred_from = None

    def update(self, decoded: int = 0) -> None:
        """Move all but the newest `local_window` tokens into the index, if the window is full.

        `decoded` is the number of newly decoded tokens, or 0 for a chunk of a prompt. If `decoded`
        is above 0 and the index can append asynchronously, the move ends a few decode steps later.
        """
        index = self._contents.index
        asynchronous = capability(index, AppendsAsync) if decoded else None
        if self.pending is not None:
            if asynchronous is not None and not self._may_end(decoded):
                return
            self.finish()
        if self._may_begin(decoded if asynchronous is not None else 0):
            self._begin(asynchronous)

    def update_chunk(self) -> None:
        """Begin to move tokens of a prompt into the index, if the window is full.

        The append runs asynchronously if the index offers `protocol.AppendsAsync`.
        """
        if not self._held and self._may_begin(0):
            self._begin(capability(self._contents.index, AppendsAsync))

    def settle(self) -> None:
        """Finish all moves of tokens into the index, including a postponed one."""
        self.catch_up()
        self.finish()

    # When an update is due

    def is_due(self, decoded: int) -> bool:
        """Return True if an update (a move of tokens into the index) can begin or end now.

        This is a fast check: if it returns False, the caller needs no transaction, which would
        record a checkpoint.
        """
        if self._held:
            return False
        return self._may_begin(decoded) if self.pending is None else self._may_end(decoded)

    def due_from(self) -> int:
        """Return the length at which the next move of tokens into the index may begin or end.

        As long as the sequence is shorter than this, a decode step of one token need not check
        whether tokens must move.
        """
        length, pending = len(self._contents), self.pending
        first = length + self._most - self._contents.window.buffer
        if self.turn is not None:
            first = min(first, length + 1 + (self.turn - length - 1) % self._every)
        return first if pending is None else min(first, pending.begun + LAG)

    def idle_for(self, tokens: int) -> bool:
        """Return True if a decode step of `tokens` tokens moves no tokens into the index."""
        settled = self.prompt_ended and not self.deferred
        return settled and (tokens != 1 or len(self._contents) + 1 < self.due_from())

    def _may_begin(self, decoded: int) -> bool:
        full = self._most if decoded else max(self._every, self._waits_for())
        return self._contents.window.buffer >= full or self._has_turn(decoded)

    def _waits_for(self) -> int:
        """Return how many tokens of a prompt must be in the window before the first of them move
        into an index that learns from its first append; 0 if nothing waits."""
        if self.prompt_ended or self.pending is not None or len(self._contents.index):
            return 0
        learns = capability(self._contents.index, LearnsOnce)
        return 0 if learns is None else learns.learns_from

    def _may_end(self, decoded: int) -> bool:
        """Return True if the append that has begun must finish now.

        It finishes after `LAG` tokens, when the window is full, or when this layer may begin the
        next append.
        """
        pending = self.pending
        if pending is None or not decoded or self._has_turn(decoded):
            return pending is not None
        late = len(self._contents) - pending.begun >= LAG
        return late or self._contents.window.buffer >= self._most

    def _has_turn(self, decoded: int) -> bool:
        """Return True if the sequence has just reached a length at which this layer moves tokens.

        The layers of a model move tokens into their indexes at different lengths (`update_phase`).
        `decoded` is the number of new tokens since the last check.
        """
        if self.turn is None:
            return False
        return (len(self._contents) - self.turn) % self._every < decoded

    # How tokens move

    def _begin(self, asynchronous: AppendsAsync | None) -> None:
        """Begin to move all but the newest `local_window` tokens into the index.

        Args:
            asynchronous: The index, if the append runs asynchronously. If it is None, this call
                also ends the move.
        """
        contents = self._contents
        index, window = contents.index, contents.window
        leaving = window.oldest(len(index))
        if leaving.count:
            self.pending = AsyncAppend(
                index, leaving, asynchronous=asynchronous, begun=len(contents)
            )
        window.begin(leaving.count)
        if asynchronous is None:
            self.finish()

    def finish(self) -> None:
        """Finish the append that has begun, and remove its tokens from the window."""
        contents, pending = self._contents, self.pending
        self.pending = None
        if pending is None:
            return
        rest = contents.window.without(pending.leaving.count)
        with contents.moving():
            pending.end()
            contents.window.end(rest, pending.leaving.sink)

    def keep(self, length: int) -> None:
        """Cancel the append that has begun if it contains a token at position `length` or later."""
        pending = self.pending
        if pending is not None and length < len(self._contents.index) + pending.leaving.count:
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the append that has begun, so that its tokens stay in the window."""
        if self.pending is not None:
            self.pending.wait()  # because the index will write to the same memory again
            self.pending = None
            self._contents.window.stay()

    def reset(self) -> None:
        """Cancel the append that has begun, and expect a new prompt."""
        self._cancel()
        self.prompt_ended, self._deferred_from, self._held = False, None, False

    def checkpoint(self) -> Any:
        """Return the state for `rollback`, without the contents of index and window."""
        return self.pending, self.prompt_ended, self._deferred_from

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of a checkpoint. The caller must then roll back index and window."""
        pending, self.prompt_ended, self._deferred_from = checkpoint
        if self.pending is not None and self.pending is not pending:
            self.pending.wait()  # because the index will write to the same memory again
        self.pending = pending
