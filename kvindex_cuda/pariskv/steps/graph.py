"""A step of an index as a graph: captured once, replayed for every token after it.

What a step reads is at fixed addresses and updated in place (`executor.py`), so that one graph
serves a layer for as long as these stay. Queries are copied to where it reads them, and its results
from where it writes them: buffers that all layers share, as they share those of a step.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kvindex.core.graphs import GRAPHS
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.workspace import SharedStep

WARM = 2
"""Steps that are launched one by one before one is captured: the first compiles kernels."""


class Replay:
    """A captured step of a layer.

    reads: what it reads, which must be the same, and kept, for as long as it is replayed.
    """

    def __init__(self, step: SharedStep, reads: State) -> None:
        self.reads, self._step = reads, step
        device = step.geometry.device
        self.asked, self._answer = step.fixed()
        before = step.output, step.lse, step.found
        step.output, step.lse, step.found = step.parts(self._answer)
        try:
            self._graph = GRAPHS[device.type](device, lambda: step(self.asked, reads))
        finally:
            step.output, step.lse, step.found = before  # nobody else writes there

    def acquire(self) -> None:
        """As `SharedStep.acquire`, before anything is written that the graph reads."""
        self._step.acquire()

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of the queries in `asked` `[B, H, D]`: `output`, `lse`, `found` `[B, G]`."""
        self._graph.replay()
        return self._step.parts(self._answer.clone())


class Replays:
    """When a layer's steps are captured: once several in a row have read the same."""

    def __init__(self, device: torch.device) -> None:
        self._serves = device.type in GRAPHS
        self._last: State | None = None  # what was read last, and by how many steps in a row
        self._alike = 0
        self.replay: Replay | None = None

    def of(self, step: SharedStep, reads: State) -> Replay | None:
        """The graph of a step that reads this, or None where it is to be launched.

        Warns where the driver refuses to capture it, and does not ask again.
        """
        if not self._serves:
            return None
        if self.replay is not None and self.replay.reads is reads:
            return self.replay
        self._alike = self._alike + 1 if self._last is reads else 1
        self._last, self.replay = reads, None
        if self._alike < WARM:
            return None
        try:
            self.replay = Replay(step, reads)
        except RuntimeError as error:
            self._serves = False
            warnings.warn(
                f"graphs: the driver refuses to capture a step ({error}), so that steps are "
                "launched one by one; graphs=False does so without a warning",
                stacklevel=2,
            )
        return self.replay
