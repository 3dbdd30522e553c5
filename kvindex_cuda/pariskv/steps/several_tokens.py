"""One fused decode step for several consecutive tokens of each sequence, such as drafted tokens.

The tokens form a batch. The tables of all tokens of a sequence point to the same codes and rows, so
one launch of each kernel serves all tokens. Each token has its own candidates, and attends to the
rows of sink and window up to its own. A scan reads the codes once per token, all but the first time
mostly from L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Rows
from kvindex.core.protocol.results import MOST_FOUND
from kvindex.core.resident import ResidentRows
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.append.stage_token import load_stage_token, stage_token
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.ragged_batch import (
    PER_BLOCK,
    WHOLE,
    BatchRow,
    ParisKVBatch,
    empty_state,
)
from kvindex_cuda.pariskv.steps.workspace import SharedStep

FEWEST_BLOCKS = 64
"""Fewest blocks for which the tables of a step have room."""

MadeOf = tuple[object, RowCache | None, ResidentRows, Tensor | None]
"""The objects from which `SeveralTokens.prepare` makes a decode step."""


class SeveralTokens(ParisKVBatch):
    """Runs decode steps of `count` consecutive tokens of each sequence of one index.

    A caller can capture such a step in a CUDA graph: it calls `prepare` before the capture and
    before each replay. The row cache is that of the index, which steps of one token use as well.

    Args:
        geometry: Geometry of the index.
        config: Configuration of the index.
        kind: Kind of decode step, a key of `dispatch.STEPS`.
        layout: Layout of the blocks of codes.
        count: Number of tokens of each sequence in a step, `T`.
        sequences: Number of sequences of the index, `B`.
        limited: Whether steps select as many rows as a limit of the error asks for.
    """

    one_sequence = True

    def __init__(
        self,
        geometry: Geometry,
        config: ParisKVConfig,
        kind: str,
        layout: Layout,
        count: int,
        sequences: int = 1,
        limited: bool = False,
    ) -> None:
        super().__init__(geometry, config, kind, layout)
        self._count, self._sequences, self._limited = count, sequences, limited
        counts: dict[str, Any] = dict(dtype=torch.int64, device=geometry.device)
        tokens = sequences * count
        self._visible = torch.zeros(tokens, **counts)  # resident rows that each token attends to
        self._found_sum = torch.zeros(tokens, geometry.kv_heads, **counts)
        self._variances: Tensor | None = None  # the limit that steps read, float32 [B·T, G]
        self._histogram: Tensor | None = None  # how often a step found each number of rows
        if limited:
            self._variances = torch.zeros(tokens, geometry.kv_heads, device=geometry.device)
            self._histogram = torch.zeros(MOST_FOUND + 1, **counts)
        self._width = 0  # number of blocks for which the tables have room
        self._now: SharedStep
        self._last: tuple[MadeOf, int] | None = None
        load_stage_token(geometry)  # a kernel cannot be loaded during a capture

    def prepare(self, rows: Sequence[BatchRow], made_of: MadeOf, k: int) -> State:
        """Prepare the capture or a replay of a decode step on the current stream.

        Args:
            rows: The data about each sequence of the index. All have the state of the whole index.
            made_of: The index's version, its row cache or None, the rows of sink and window, and
                the flag for wrong queries.
            k: Rows to select per KV head and token, or at most with `limited`.

        Returns:
            The tensors that the kernels read. A captured graph may be replayed as long as this is
            the same object.
        """
        _, self._cache, resident, _ = made_of
        self._last = None  # until the state is complete
        entries = [row for row in rows for _ in range(self._count)]
        self._now, state = self._ready(entries, k)
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

    def put_limit(self, variance: Tensor) -> None:
        """Copy the limit of each sequence, float32 `[B, G]`, to its tokens, on the current stream.

        Only for a step with `limited`.
        """
        assert self._variances is not None
        self._variances.view(len(variance), self._count, -1).copy_(variance[:, None])

    def step(
        self, queries: Tensor, tokens: Rows, resident: ResidentRows, lse: Tensor | None = None
    ) -> Attended:
        """Append the tokens to the resident rows, search for each of them, and attend.

        Kernels read all counts on the device, and increase `resident.count` there.

        Args:
            queries: `[B·T, H, D]`, the `T` tokens of each sequence after each other.
            tokens: Keys `[B·T, G, 1, D]` and values `[B·T, G, 1, Dv]`.
            resident: The rows that were passed to `prepare`.
            lse: With a limit, the log-sum-exp of the logits of learned sinks, float32 `[B·T, H]`,
                or None.

        Raises:
            RuntimeError: `prepare` was not called for these rows.
        """
        if self._last is None or self._last[0][2] is not resident:
            raise RuntimeError("graph: call prepare_tokens() before captured_tokens()")
        parts: dict[str, Tensor] = dict(ticket=self._ticket, counts=self._visible)
        stage_token(resident, tokens, None, queries, **parts)
        step, reads = self._now, self._reads
        if lse is not None:
            reads = replace(reads, limit_lse=lse.contiguous())
        step.renew()
        output = step(queries.contiguous(), reads)
        return Attended(output, step.lse, self._found_sum, self._histogram)

    def _new_reads(self, state: State, resident: ResidentRows) -> State:
        reads = super()._new_reads(state, resident)
        more: dict[str, Any] = dict(found_sum=self._found_sum, variances=self._variances)
        more["found_histogram"] = self._histogram
        return replace(reads, resident_count=self._visible, **more)

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
        """Copy the state of each sequence to the entries of its tokens, if it has changed."""
        row = rows[0]
        assert row is not None
        if self._state is None or self._held != [row.version]:
            self._held, self._asked = [], (0, False)  # until the copy is complete
            self._state = self._state or empty_state(like, len(rows), self._width)
            copy_to_tokens(self._state, row, self._count)
            self._held = [row.version]
        return self._state

    def _with_cache(self, rows: Sequence[BatchRow | None], some: Sequence[BatchRow]) -> None:
        """Do nothing, because the index has a row cache."""


def copy_to_tokens(state: State, row: BatchRow, count: int) -> None:
    """Copy the state of an index, up to its last block, to a batch with `count` entries for each
    sequence of the index."""
    parts, own, blocks = vars(state), vars(row.state), -(-row.tokens // BLOCK)
    for name in (*PER_BLOCK, *WHOLE):
        if (part := parts[name]) is not None:
            given, each = own[name], part.view(-1, count, *part.shape[1:])
            if name in PER_BLOCK:
                given, each = given[:, :blocks], each[:, :, :blocks]
            each.copy_(given[:, None])
