"""Run decode steps on one thread, with kernel arguments that are prepared once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.protocol import Attended, Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu.attend_rows import Arguments, arguments
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.numbers import KINDS
from kvindex.cpu.kernels.scan import scan
from kvindex.cpu.kernels.step import attend_groups
from kvindex.cpu.kernels.token import put_token
from kvindex.cpu.pariskv.sign_votes import Call, Stages
from kvindex.cpu.state import ResidentState, places

UNCHECKED = -1.0
"""Value of the argument `limit` of `put_token` with which numbers are not checked."""


@dataclass
class WholeStep:
    """Runs decode steps of a layer with kernel arguments that were prepared once.

    The arguments are valid until the index changes, or until the rows of sink and window are in
    another buffer.

    Attributes:
        stages: The stages of the search.
        k: Number of rows to select.
        resident_state: Addresses of the rows in sink and window.
        buffers: An object (`Buffers.owner`) that identifies a thread. The arguments contain buffers
            of this thread, so only this thread may run the decode step.
        calls: The kernels that run before attention, each with its arguments.
        token: Arguments of the kernel `put_token` that are the same in every decode step.
        limit: Largest allowed magnitude of a number in a query or key.
        attention: Arguments of the kernel `attend_groups`.
        found: Number of rows that the last decode step selected, int32 `[B, G]`.
    """

    stages: Stages
    k: int
    resident_state: ResidentState
    buffers: object
    calls: list[Call]
    token: tuple[Any, ...]
    limit: float
    attention: Arguments
    found: np.ndarray
    _steps: np.ndarray
    _strides: object = field(default=None)

    @staticmethod
    def of(
        stages: Stages,
        k: int,
        limits: np.ndarray,
        resident: ResidentRows,
        resident_state: ResidentState,
    ) -> WholeStep:
        """Prepare the arguments of all kernels, for a search that runs on one thread.

        Args:
            stages: The stages for the current contents of the index.
            k: Number of rows to select.
            limits: Number of candidates of each group (KV head of a sequence), int64 `[B·G]`.
            resident: Rows in the sink and the window.
            resident_state: Addresses of `resident`.
        """
        g, groups = stages.geometry, len(limits)
        asked = stages.room_of(BUFFERS.array("asked", np.float32, groups, g.group_size, g.head_dim))
        votes, hits = stages.room_of_votes(asked), stages.room_of_hits(asked, k)
        kernel, found = stages.finding(asked, votes, limits, hits)
        calls = stages.preparing(asked)
        if not stages.config.center:
            calls.append((asked.products.fill, (0,)))
        calls.append((scan, (0, 1, *stages.scanning(asked, votes))))
        calls.append((kernel, (0, 1, *found)))
        room = BUFFERS.array("new keys", np.float32, groups * g.head_dim)
        rows = resident_state.rows, resident_state.row_bytes
        own = stages.state.rows, stages.state.row_bytes, 1
        hit = asked.queries, hits.ids, hits.log_weight
        return WholeStep(
            stages=stages,
            k=k,
            resident_state=resident_state,
            buffers=BUFFERS.owner,
            calls=calls,
            token=(KINDS[g.dtype], g.dtype.itemsize, *rows, asked.queries, room),
            limit=float(check.LIMITS.get(g.dtype, check.LARGEST)),
            attention=arguments(g, *own, *hit, resident.room, resident_state),
            found=hits.found.reshape(resident.batch, -1),
            _steps=np.zeros((2, groups), np.int64),
        )

    def serves(self, stages: Stages, k: int, resident_state: ResidentState) -> bool:
        """Return True if this object can run the decode step.

        This is the case if the object was made on this thread, for the same stages, the same state
        of the resident rows (sink and window), and the same `k`.
        """
        same = self.stages is stages and self.resident_state is resident_state
        return same and self.k == k and self.buffers is BUFFERS.owner

    def run(
        self, queries: Tensor, token: Rows, resident: ResidentRows, window: Rows, checks: bool
    ) -> Attended | None:
        """Add a new token to `resident` and `window`, search, and attend.

        Args:
            queries: `[B, H, D]`.
            token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`.
            resident: Rows in the sink and the window, with room for the token.
            window: Memory in the window to which the key and value are also copied.
            checks: True to check that no number in `queries` and `token.keys` is NaN, infinite or
                too large.

        Returns:
            The output of attention. None if the check fails; then the token was not added.
        """
        count, g = len(resident), self.stages.geometry
        some = [
            tensor if tensor.is_contiguous() else tensor.contiguous()
            for tensor in (queries, token.keys, token.values)
        ]
        given = [tensor.data_ptr() for tensor in (*some, window.keys, window.values)]
        limit = self.limit if checks else UNCHECKED
        place = resident.count.data_ptr(), count
        if not put_token(*given, self._window_steps(window), *place, limit, *self.token):
            return None
        resident.claim(1)
        for kernel, of in self.calls:
            kernel(*of)
        batch, heads, _ = queries.shape
        output = np.empty((batch, heads, g.value_dim), np.float32)
        lse = np.empty((batch, heads), np.float32)
        before, after = self.attention
        groups = len(self.resident_state.rows), g.group_size
        made = output.reshape(*groups, g.value_dim), lse.reshape(groups)
        attend_groups(0, 1, *before, count + 1, *after, *made)
        attended = torch.from_numpy(output)
        return Attended(
            attended if g.dtype is torch.float32 else attended.to(g.dtype),
            torch.from_numpy(lse),
            torch.from_numpy(self.found.copy()),
        )

    def _window_steps(self, window: Rows) -> np.ndarray:
        """Return where the key and the value of each group (KV head of a sequence) are in `window`.

        The result is int64 `[2, B·G]`: distances in bytes from the first key of the window to the
        key of each group, and from the first value to the value of each group.
        """
        strides = window.keys.stride(), window.values.stride()
        if strides != self._strides:
            batch, heads = places(*window.keys.shape[:2])
            size = window.keys.element_size()
            for i, (b, h, *_) in enumerate(strides):
                self._steps[i] = (batch * b + heads * h) * size
            self._strides = strides
        return self._steps
