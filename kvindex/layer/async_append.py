"""What runs when the buffer is full: an append of old rows, beside steps that still read them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvindex.core.protocol import AppendsAsync, KVIndex
from kvindex.core.streams import side_stream
from kvindex.layer.regions import Leaving

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
