"""One fused decode step for several consecutive tokens of one sequence, such as drafted tokens.

The tokens form a batch whose tables all point to the same codes and rows, so one launch of each
kernel serves all tokens. Each token has its own candidates, and attends to the rows of sink and
window up to its own. A scan reads the codes once per token, all but the first time mostly from L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Rows
from kvindex.core.resident import ResidentRows
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.append.stage_token import load_stage_token, stage_token
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.ragged_batch import (
    BatchRow,
    ParisKVBatch,
    copy_state,
    empty_state,
)
from kvindex_cuda.pariskv.steps.workspace import SharedStep

FEWEST_BLOCKS = 64
"""Fewest blocks for which the tables of a step have room."""

MadeOf = tuple[object, RowCache | None, ResidentRows, Tensor | None]
"""The objects from which `SeveralTokens.prepare` makes a decode step."""


class SeveralTokens(ParisKVBatch):
    """Runs decode steps of `count` consecutive tokens of one index with one sequence.

    A caller can capture such a step in a CUDA graph: it calls `prepare` before the capture and
    before each replay. The row cache is that of the index, which steps of one token use as well.

    Args:
        geometry: Geometry of the index.
        config: Configuration of the index.
        kind: Kind of decode step, a key of `dispatch.STEPS`.
        layout: Layout of the blocks of codes.
        count: Number of tokens of a step, `T`.
    """

    one_sequence = True

    def __init__(
        self, geometry: Geometry, config: ParisKVConfig, kind: str, layout: Layout, count: int
    ) -> None:
        super().__init__(geometry, config, kind, layout)
        self._count = count
        counts: dict[str, Any] = dict(dtype=torch.int64, device=geometry.device)
        self._visible = torch.zeros(count, **counts)  # resident rows that each token attends to
        self._found_sum = torch.zeros(count, geometry.kv_heads, **counts)
        self._width = 0  # number of blocks for which the tables have room
        self._now: SharedStep
        self._last: tuple[MadeOf, int] | None = None
        load_stage_token(geometry)  # a kernel cannot be loaded during a capture

    def prepare(self, row: BatchRow, made_of: MadeOf, k: int) -> State:
        """Prepare the capture or a replay of a decode step on the current stream.

        Args:
            row: The data about the index.
            made_of: The index's version, its row cache or None, the rows of sink and window, and
                the flag for wrong queries.
            k: Rows to select per KV head and token.

        Returns:
            The tensors that the kernels read. A captured graph may be replayed as long as this is
            the same object.
        """
        _, self._cache, resident, _ = made_of
        self._last = None  # until the state is complete
        self._now, state = self._ready([row] * self._count, k)
        reads, self._last = self._reads_of(self._now, state, resident), (made_of, k)
        return reads

    def prepared(self, made_of: MadeOf, k: int) -> State | None:
        """Return what `prepare` returned last, or None if anything has changed since then."""
        if self._last is None or self._last[1] != k:
            return None
        if any(old is not new for old, new in zip(self._last[0], made_of, strict=True)):
            return None
        self._now.acquire()
        return self._reads

    def step(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Append the tokens to the resident rows, search for each of them, and attend.

        Kernels read all counts on the device, and increase `resident.count` there.

        Args:
            queries: `[T, H, D]`.
            tokens: Keys `[T, G, 1, D]` and values `[T, G, 1, Dv]`.
            resident: The rows that were passed to `prepare`.

        Raises:
            RuntimeError: `prepare` was not called for these rows.
        """
        if self._last is None or self._last[0][2] is not resident:
            raise RuntimeError("graph: call prepare_tokens() before captured_tokens()")
        parts: dict[str, Tensor] = dict(ticket=self._ticket, counts=self._visible)
        stage_token(resident, tokens, None, queries, **parts)
        step = self._now
        step.renew()
        output = step(queries.contiguous(), self._reads)
        return Attended(output, step.lse, self._found_sum)

    def _new_reads(self, state: State, resident: ResidentRows) -> State:
        reads = super()._new_reads(state, resident)
        return replace(reads, resident_count=self._visible, found_sum=self._found_sum)

    def _ready(self, rows: Sequence[BatchRow | None], k: int) -> tuple[SharedStep, State]:
        row = rows[0]
        assert row is not None
        needed = -(-row.tokens // BLOCK)
        if needed > self._width:  # the tables grow rarely, because a graph must then be captured
            self._width = max(FEWEST_BLOCKS, 1 << needed.bit_length())
            self._state, self._held, self._step = None, [], None
        return super()._ready(rows, k)

    def _with_room(self, batch: int, blocks: int, k: int, need: int) -> SharedStep:
        return super()._with_room(batch, self._width, k, need)

    def _with_rows(self, rows: Sequence[BatchRow | None], like: State) -> State:
        """Copy the state of the index to all sequences of the batch, if it has changed."""
        row = rows[0]
        assert row is not None
        if self._state is None or self._held != [row.version]:
            self._held, self._asked = [], (0, False)  # until the copy is complete
            self._state = self._state or empty_state(like, len(rows), self._width)
            copy_state(self._state, slice(None), row)
            self._held = [row.version]
        return self._state

    def _with_cache(self, rows: Sequence[BatchRow | None], some: Sequence[BatchRow]) -> None:
        """Do nothing, because the index has a row cache."""
