"""A layer's decode step as a CUDA graph, which is captured once and replayed for later tokens.

A graph is valid as long as the tensors that the step reads stay at the same addresses; appends
update them in place (`executor.py`). Before a replay, queries are copied to a tensor that the graph
reads. After it, results are copied from a tensor that the graph writes. The graphs of all layers
share these two tensors.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kvindex.core.graphs import GRAPHS
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.workspace import SharedStep

WARM = 2
"""Number of steps that are launched without a graph before one is captured. The first step compiles
kernels."""


class Replay:
    """A decode step of a layer, captured as a CUDA graph.

    reads: The tensors that the graph reads. They must stay allocated as long as the graph is
        replayed.
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
            step.output, step.lse, step.found = before  # now only the graph writes to `_answer`

    def acquire(self) -> None:
        """Make the current CUDA stream wait until the previous decode step has used its buffers.

        Call this before you write to a tensor that the graph reads.
        """
        self._step.acquire()

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        """Replay the graph for the queries `[B, H, D]` in the buffer `asked`.

        Returns:
            Attention output, log-sum-exp of the logits, and number of rows found `[B, G]`.
        """
        self._graph.replay()
        return self._step.parts(self._answer.clone())


class Replays:
    """Captures a layer's decode step as a CUDA graph once several steps in succession have read the
    same tensors."""

    def __init__(self, device: torch.device) -> None:
        self._serves = device.type in GRAPHS
        self._last: State | None = None  # read by the last `_alike` steps
        self._alike = 0
        self.replay: Replay | None = None

    def of(self, step: SharedStep, reads: State) -> Replay | None:
        """Return the CUDA graph of a decode step that reads the tensors in `reads`, or None if
        there is none yet.

        If the driver refuses to capture the step, this warns once, and returns None from then on.
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
