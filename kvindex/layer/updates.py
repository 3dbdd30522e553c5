"""Updates of the window: old tokens move into the index; what a layer holds comes and goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import AppendsAsync, ChecksState, EncodesBlocks, KeepsState, KVIndex
from kvindex.core.restore import Restorable, cut_back
from kvindex.core.streams import side_stream
from kvindex.core.transaction import Guarded
from kvindex.layer.stats import Tally
from kvindex.layer.window import Leaving, Window
from kvindex.storage.layout import TensorSpec, check_layout
from kvindex.storage.state import (
    ABOUT,
    State,
    above,
    below,
    check_signed,
    length_and_batch,
    signed,
)

LAG = 4
"""Tokens that come while an update runs beside the steps, so that none waits for it
(`benchmarks/append.py`); each of them is a row more in the window."""

SETTLING = frozenset({"state_dict", "__deepcopy__"})
"""Reads that first let a pending append finish, which is a change."""

Append = Callable[[], None]


class AsyncAppend:
    """An append of rows to an index that begins now and that `end` completes.

    beside: the index as one whose `start_append` is called at once, on a CUDA device by a stream
    that all layers share, so that the current one goes on with the index as it was; without it
    `end` does it all. In between the index and the rows must stay as they are. begun: tokens of the
    sequence now. Raises as `append`.
    """

    _done: torch.cuda.Event | None = None  # until the current stream has waited for it

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
        """The index holds the rows, for what the current stream runs from here on."""
        self.wait()
        self._rest()

    def wait(self) -> None:
        """What the current stream runs from here on comes after all that was begun."""
        done, self._done = self._done, None
        if done is not None:
            torch.cuda.current_stream(self._device.index).wait_event(done)

    def __del__(self) -> None:
        """An index that is let go of gives its memory to others, which must not be written to."""
        if not sys.is_finalizing():
            self.wait()

    def _begun_beside(self, begin: Callable[[], Append], read: list[Tensor | None]) -> Append:
        """Call `begin`, which reads these tensors, on the side stream."""
        side, current = side_stream(self._device), torch.cuda.current_stream(self._device.index)
        side.wait_stream(current)
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(side)  # it may be let go of before the side stream is done
        try:
            with torch.cuda.stream(side):
                rest = begin()
        except BaseException:
            current.wait_stream(side)  # some of it may be under way
            raise
        self._done = side.record_event()
        return rest


class WindowUpdates(Guarded):
    """An index, the window of the tokens after its own, and what is on its way from one to the
    other: all that a layer holds, and how it changes but for new tokens.

    Base of `AttentionLayer`, which says what the sizes mean, and when an update is due.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        sink: int,
        local_window: int,
        update_every: int,
        search_up_to: int,
        update_phase: float | None,
    ) -> None:
        self.sink = check.at_least("sink", sink, 0)
        self.local_window = check.at_least("local_window", local_window, 0)
        self.update_every = check.at_least("update_every", update_every, 1)
        self.search_up_to = check.at_least("search_up_to", search_up_to, 1)
        if update_phase is not None and not 0 <= update_phase < 1:
            raise ValueError(
                f"update_phase: got {update_phase}, allowed is a number in [0, 1), or None"
            )
        if len(index):
            raise ValueError(f"index: got one that holds {len(index)} tokens, allowed is empty")
        self.index, self.update_phase = index, update_phase
        self._turn = None if update_phase is None else int(update_phase * update_every)
        unit = self._unit()
        turns = self._turn is not None and capability(index, AppendsAsync) is not None
        # of the buffer: a block that is full waits for the layer's turn, and tokens come
        self._most = 2 * update_every if turns and unit > 1 else update_every
        room = local_window + self._most + LAG + search_up_to - 1
        sizes = dict(sink_size=sink, local_size=local_window, room=room)
        self._window = Window(index.geometry, unit=unit, **sizes)
        self._move: AsyncAppend | None = None  # of the rows that are leaving
        self._sealed = False
        self._looked: int | None = None  # length up to which updates were made, if one may be due
        self._searched = 0  # tokens of the last step, if it searched
        self._tally = Tally()
        # while rows move between window and index: `len(self)` before the move
        self._length_in_move: list[int] = []

    def __len__(self) -> int:
        """Tokens seen, `N`: those in the index and those in the window."""
        return len(self.index) + len(self._window)

    @property
    def tokens(self) -> int:
        """`len(self)`, which any thread may read at any time, also while rows move to the index."""
        while True:
            in_move = self._length_in_move
            length = in_move[0] if in_move else len(self)
            if self._length_in_move is in_move:  # no move began or ended in between
                return length

    def _unit(self) -> int:
        """Tokens that go into the index together."""
        blocks = capability(self.index, EncodesBlocks)
        if blocks is None or self.update_every % blocks.block_tokens:
            return 1
        return blocks.block_tokens

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per memory tier. Any thread may call this at any time.

        Returns:
            The entries of the index, and `window` (sink, local window, update buffer).
        """
        return {**self.index.nbytes(), "window": self._window.nbytes()}

    # Updates

    def _update_due(self) -> None:
        """The update that waits since a step of several tokens, if one is due for what is left."""
        looked, self._looked = self._looked, None
        if looked is not None and len(self) > looked:
            self._update_window(len(self) - looked)

    def decodes(self, tokens: int) -> bool:
        """Whether so many tokens are no piece of a prompt."""
        return len(self) > 0 and tokens <= self.search_up_to

    def _begin_decoding(self) -> None:
        """What waits for tokens that are no piece of a prompt is done."""
        self._update_due()
        if not self._sealed:
            self.index.end_prompt()
            self._sealed = True

    def _update(self, decoded: int) -> None:
        """Let an update begin or end, with so many tokens that are no piece of a prompt."""
        if self._is_due(decoded):
            self._update_window(decoded)

    def _update_window(self, decoded: int = 0) -> None:
        """When the buffer is full, all but the newest `local` tokens go into the index.

        decoded: so many tokens have come, and are no piece of a prompt; the index, if it can,
        appends while the next steps run, which attend to them where they are.
        """
        beside = capability(self.index, AppendsAsync) if decoded else None
        if self._move is not None:
            if beside is not None and not self._may_end(decoded):
                return
            self._finish()
        if self._may_begin(decoded if beside is not None else 0):
            self._begin_update(beside)

    def _is_due(self, decoded: int) -> bool:
        """Whether an update may begin or end, with so many tokens: no more than a few numbers.

        A call that changes nothing would still copy what it might have to undo.
        """
        return self._may_begin(decoded) if self._move is None else self._may_end(decoded)

    def _due_from(self) -> int:
        """Length of the sequence before which single tokens let no update begin or end."""
        length, begun = len(self), self._move
        first = length + self._most - self._window.buffer
        if self._turn is not None:
            first = min(first, length + 1 + (self._turn - length - 1) % self.update_every)
        return first if begun is None else min(first, begun.begun + LAG)

    def _may_begin(self, decoded: int) -> bool:
        """Whether the buffer is full, or the layer's turn has come with one of so many tokens."""
        full = self._most if decoded else self.update_every
        return self._window.buffer >= full or self._has_turn(decoded)

    def _may_end(self, decoded: int) -> bool:
        """Whether what is leaving has had its `LAG` tokens, or waits for the next turn's update."""
        move = self._move
        if move is None or not decoded or self._has_turn(decoded):
            return move is not None
        return len(self) - move.begun >= LAG or self._window.buffer >= self._most

    def _begin_update(self, beside: AppendsAsync | None) -> None:
        """All but the newest `local` tokens begin to leave; without `beside` they are gone, too."""
        leaving = self._window.oldest(len(self.index))
        if leaving.count:
            self._move = AsyncAppend(self.index, leaving, beside=beside, begun=len(self))
        self._window.begin(leaving.count)
        if beside is None:
            self._finish()

    def _has_turn(self, decoded: int) -> bool:
        """Whether the layer's turn has come with one of so many tokens."""
        if self._turn is None:
            return False
        return (len(self) - self._turn) % self.update_every < decoded

    def _finish(self) -> None:
        """What is leaving is in the index."""
        move, self._move = self._move, None
        if move is None:
            return
        rest = self._window.without(move.leaving.count)
        with self._rows_moving():
            move.end()
            self._window.end(rest, move.leaving.sink)

    @contextmanager
    def _rows_moving(self) -> Iterator[None]:
        """Keep `tokens` at its present value inside the context, while rows move."""
        self._length_in_move = [len(self)]
        try:
            yield
        finally:
            self._length_in_move = []

    def settle(self) -> None:
        """What is on its way into the index arrives, after an update that is due."""
        self._update_due()
        self._finish()

    def _give_up(self) -> None:
        """What is leaving stays."""
        if self._move is not None:
            self._move.wait()  # the index writes to the same places again
            self._move = None
            self._window.stay()

    # Tokens go, and rows of the batch move

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. Raises ValueError below 0."""
        check.at_least("length", length, 0)
        self._searched = 0
        window, indexed = self._window, len(self.index)
        if self._move is not None and length < indexed + self._move.leaving.count:
            self._give_up()
        sink = window.sink
        with self._rows_moving():
            if length < indexed:
                sink = None if sink is None else sink.before(length)
                self.index.truncate(length)
            window.truncate(indexed, length, sink)

    def reorder(self, batch_indices: Tensor) -> None:
        """Row `b` of the batch becomes what row `batch_indices[b]` was; int64 `[B']`."""
        batch = self._window.batch_size
        check.rows("batch_indices", batch_indices, batch or None)
        if not batch:
            return
        self._finish()
        window = self._window.reordered(batch_indices)
        self.index.reorder(batch_indices)
        self._window = window

    def reset(self) -> None:
        """Forget everything."""
        self._give_up()
        with self._rows_moving():
            self.index.reset()
            self._window.reset()
        self._sealed, self._looked, self._searched, self._broken = False, None, 0, None
        self._tally = Tally()

    # Copies and state

    def _alone(self, name: str) -> bool:
        return name in SETTLING or super()._alone(name)

    def checkpoint(self) -> Any:
        """What the layer is now, for `rollback`: it asks the device for nothing."""
        index, window, tally = self.index, self._window, self._tally
        before = index.checkpoint() if isinstance(index, Restorable) else len(index)
        parts = before, window, window.checkpoint(), tally, tally.checkpoint()
        return parts, self._move, self._sealed, self._looked, self._searched

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says, the index, too.

        One that is no `Restorable` is truncated to what it held, and keeps what signals told it.
        """
        parts, move, self._sealed, self._looked, self._searched = checkpoint
        before, self._window, window, self._tally, tally = parts
        if self._move is not None and self._move is not move:
            self._move.wait()  # the index writes to the same places again
        self._move = move
        with self._rows_moving():
            self._window.rollback(window)
            self._tally.rollback(tally)
            if isinstance(self.index, Restorable):
                self.index.rollback(before)
            else:
                cut_back(self.index, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A layer that goes on from here by itself; what is on its way into the index arrives."""
        self.settle()
        twin = super().__deepcopy__(memo)
        if not isinstance(self.index, Restorable):
            twin.index = deepcopy(self.index, memo)
        return twin

    def state_dict(self) -> State:
        """The index's state, with names below `index`, and that of window and sink.

        What is on its way into the index arrives before; `traffic` is no state. Raises ValueError
        for an index that does not offer `protocol.KeepsState`.
        """
        self.settle()
        state = above("index", self._stateful().state_dict()) | self._window.packed()
        return signed(self._whose(), {**state, "sealed": torch.tensor(self._sealed)})

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Check a state as `protocol.ChecksState` says: first the index, then window and sink."""
        check_signed(self._whose(), state)
        index = capability(self.index, ChecksState)
        if index is not None:
            index.check_state(below("index", state))
        self._check_own(state)

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        parts = {
            name: part
            for name, part in state.items()
            if name != ABOUT and not name.startswith("index.")
        }
        sealed = {name: parts.pop(name) for name in ("sealed",) if name in parts}
        check_layout({"sealed": TensorSpec("", torch.bool)}, sealed, {})
        self._window.check(parts, length_and_batch(below("index", state)))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Become what a layer of the same sizes was, around an index of the same configuration.

        Raises TypeError or ValueError for anything else, and for a layer that holds tokens; it
        stays as it was.
        """
        check_signed(self._whose(), state)
        self._check_own(state)
        if len(self):
            raise ValueError(f"state: got a layer that holds {len(self)} tokens, allowed is empty")
        with self._rows_moving():
            self._stateful().load_state_dict(below("index", state))
            self._window.unpack(state)
        self._sealed, self._broken = bool(state["sealed"]), None

    def _stateful(self) -> KeepsState:
        index = capability(self.index, KeepsState)
        if index is None:
            name = type(self.index).__name__
            raise ValueError(f"index: got {name}, allowed is one that offers KeepsState")
        return index

    def _whose(self) -> dict[str, Any]:
        sizes = dict(sink=self.sink, local_window=self.local_window, update_every=self.update_every)
        return {"layer": sizes}
