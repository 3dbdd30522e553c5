"""One fused decode step for several indexes, each with one sequence. The lengths of the sequences
may differ.

Tensors on the device contain a small part of the state of every index: the addresses of its blocks
of codes, a mask of its valid tokens, and the scale of its weights. Codes, keys and values are not
copied. When the state of an index changes, its part is copied again. In a layer, this happens every
`update_every` tokens. Kernels read the lengths of the sequences from device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, ErrorLimit, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.pariskv import row_budget
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.append.stage_token import stage_token
from kvindex_cuda.pariskv.device_state import FixedCopy, State, put
from kvindex_cuda.pariskv.dispatch import room_of
from kvindex_cuda.pariskv.steps.graph import Replays
from kvindex_cuda.pariskv.steps.hits import ordered_hits
from kvindex_cuda.pariskv.steps.workspace import SharedStep, shared, with_headroom
from kvindex_cuda.runtime.launch import capturing

PER_BLOCK = "codes", "rows", "on_device", "valid"
"""Fields of a `State` with an entry for each block."""

WHOLE = "weight_scale", "regression", "histogram", "tiers", "row_center"
"""Fields of a `State` that are not per block, with an entry for each sequence."""


@dataclass(frozen=True, eq=False)
class BatchRow:
    """The data about one index for a decode step that processes several indexes together.

    Attributes:
        state: The tensors of the index that the step's kernels read, without the resident rows.
        tokens: Number of tokens in the index.
        count: Number of valid tokens.
        on_host: True if some rows are in host memory.
        version: An object that identifies the contents of the index. Each change of the index makes
            a new object.
        text: An object that identifies the sequence of tokens, and so the rows. Removing tokens
            makes a new object, because a token id may then mean another row. Appending tokens does
            not.
    """

    state: State
    tokens: int
    count: int
    on_host: bool
    version: object
    text: object


EMPTY = object()
"""Value of `version` and `text` for an empty index."""


class ParisKVBatch:
    """Runs decode steps for several ParisKV indexes together. Implements
    `kvindex.core.protocol.IndexBatch`.

    The caller passes a list of indexes to each call. The buffers are allocated for the number of
    indexes and the `k` of the last call. The batch does not keep the memory of any index alive.
    """

    one_sequence: ClassVar[bool] = False
    """True if the entries of the batch are tokens of one index (`several_tokens`)."""

    def __init__(
        self, geometry: Geometry, config: ParisKVConfig, kind: str, layout: Layout
    ) -> None:
        self._geometry, self._config, self._kind, self._layout = geometry, config, kind, layout
        self._sequences = 1  # with `one_sequence`, the number of sequences of the index
        self._state: State | None = None
        self._held: list[object] = []  # `version` of each index in the state
        self._asked = 0, False  # `k` and `_limited` when `State.wanted` was computed, or 0
        self._limited = False  # whether the current step has a limit of the error
        self._limits = FixedCopy()  # the limits of the last step that had limits
        self._variances: Tensor | None = None  # the limits that steps read, float32 [B, G]
        self._step: SharedStep | None = None
        self._cache: RowCache | None = None
        self._texts: list[object] = []  # `text` of each sequence whose rows are in the cache
        self._wrong: Tensor | None = None  # the flag of the first index, which is used for all
        self._replays = Replays(geometry.device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=geometry.device)  # of `stage_token`
        self._made_of: tuple[object, ...] = (None,) * 6  # the objects from which `_reads` was made
        self._reads: State

    def search(self, rows: Sequence[object], queries: Tensor, *, k: int) -> Hits:
        """Return the `k` best rows of each index for queries `[B, H, D]`."""
        self._limited = False
        step, state = self._ready(cast(Sequence[BatchRow], rows), k)
        step.renew()
        step.select(queries.contiguous(), replace(state, wrong=self._wrong))
        return ordered_hits(step, torch.arange(k, device=queries.device))

    def attend(
        self,
        rows: Sequence[object],
        queries: Tensor,
        resident: ResidentRows,
        *,
        k: int,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Search for `k` rows in each index, or for as many as `limit` asks for, and attend to them
        and to the resident rows (sink and local window).

        When several decode steps in succession have read the same tensors, the step is captured as
        a CUDA graph, which later steps replay.
        """
        return self._attend(rows, queries, None, resident, k, limit, graphs=True)

    def decode_step(
        self,
        rows: Sequence[object],
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        *,
        k: int,
        graphs: bool = True,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Append a token of each sequence to the resident rows (sink and local window), then search
        and attend like `attend`."""
        return self._attend(rows, queries, token, resident, k, limit, graphs)

    def _attend(
        self,
        rows: Sequence[object],
        queries: Tensor,
        token: Rows | None,
        resident: ResidentRows,
        k: int,
        limit: ErrorLimit | None,
        graphs: bool,
    ) -> Attended:
        if limit is not None:
            self._check_limit(limit, len(rows))
        self._limited = limit is not None
        step, state = self._ready(cast(Sequence[BatchRow | None], rows), k)
        if limit is not None:
            self._variances = self._limits.put(limit.variance)
        reads = self._reads_of(step, state, resident)
        replay = self._replays.of(step, reads) if graphs else None
        asked = None if replay is None else replay.asked
        if token is not None:
            stage_token(resident, token, None, queries, asked, ticket=self._ticket)
        elif asked is not None:
            asked.copy_(queries)
        if replay is not None:
            return Attended(*replay())
        step.renew()
        output = step(queries.contiguous(), reads)
        return Attended(output, step.lse, step.found.view(len(queries), -1))

    def _ready(self, rows: Sequence[BatchRow | None], k: int) -> tuple[SharedStep, State]:
        """Prepare a decode step of several indexes in one batch.

        Return an object whose buffers and kernels run the decode step, and a `State` with the
        tensors that the kernels read. The current stream waits until the previous decode step that
        used the same buffers has finished.
        """
        if capturing(self._geometry.device):
            raise RuntimeError(
                "graph: a batch of indexes cannot be captured; capture the step of one index"
            )
        some = [row for row in rows if row is not None]
        candidates = [self._candidates(row.count, k) if row else 0 for row in rows]
        need = room_of(self._kind, max(row.tokens for row in some), max(candidates))
        step = self._with_room(len(rows), some[0].state.codes.shape[1], k, need)
        step.acquire()
        state = self._with_rows(rows, some[0].state)
        if self._asked != (k, self._limited):
            put(state.length, [row.tokens if row else 0 for row in rows])
            put(state.counted, [row.count if row else 0 for row in rows])
            put(state.wanted, candidates)
            self._asked = k, self._limited
        self._with_cache(rows, some)
        self._wrong = some[0].state.wrong
        return step, state

    def _candidates(self, count: int, k: int) -> int:
        """Return the number of candidates of an index with `count` valid tokens."""
        if not self._limited:
            return self._config.candidates(count, k)
        return row_budget.candidates_of(self._config, count, k)

    def _check_limit(self, limit: ErrorLimit, batch: int) -> None:
        """Raise ValueError if `limit` does not fit a batch of `batch` indexes."""
        g = self._geometry
        shape: dict[str, int | None] = {"B": batch, "G": g.kv_heads}
        check.tensor("limit.variance", limit.variance, shape, torch.float32, g.device)
        if limit.resident_lse is not None:
            raise ValueError(
                "limit.resident_lse: got a tensor, allowed is None in a batch of indexes"
            )

    def _reads_of(self, step: SharedStep, state: State, resident: ResidentRows) -> State:
        """Return the `State` that the kernel `attend` needs.

        If all arguments are the same objects as in the last call, return the last result again.
        """
        limits = self._variances if self._limited else None
        made_of = step, state, resident, self._cache, self._wrong, limits
        if any(old is not new for old, new in zip(self._made_of, made_of, strict=True)):
            self._made_of = (None,) * 6  # until `_reads` is complete
            self._reads = self._new_reads(state, resident)
            self._made_of = made_of
        return self._reads

    def _new_reads(self, state: State, resident: ResidentRows) -> State:
        return replace(
            state,
            cache=self._cache,
            wrong=self._wrong,
            resident=resident.rows,
            resident_mask=resident.mask,
            resident_count=resident.count,
            variances=self._variances if self._limited else None,
        )

    def _with_rows(self, rows: Sequence[BatchRow | None], like: State) -> State:
        """Update the state of the batch, and return it: copy the state of every index that has
        changed since the last call."""
        if self._state is None or len(rows) != len(self._held):
            self._state, self._held = empty_state(like, len(rows)), [None] * len(rows)
            self._asked = 0, False
        for b, row in enumerate(rows):
            version = row.version if row else EMPTY
            if self._held[b] is not version:
                self._held[b], self._asked = None, (0, False)  # until the copy is complete
                if row:
                    copy_state(self._state, slice(b, b + 1), row)
                self._held[b] = version
        return self._state

    def _with_room(self, batch: int, blocks: int, k: int, need: int) -> SharedStep:
        step = self._step
        kind = batch, k, self._limited
        if step is None or (step.batch, step.k, step.limited) != kind or step.most < need:
            step = self._step = shared(
                self._geometry,
                self._layout,
                self._kind,
                self._config,
                batch=batch,
                blocks=blocks,
                k=k,
                most=with_headroom(max(need, 1)),
                ragged=True,
                limited=self._limited,
                one_sequence=self.one_sequence,
                sequences=self._sequences,
            )
        return step

    def _with_cache(self, rows: Sequence[BatchRow | None], some: Sequence[BatchRow]) -> None:
        """Create a row cache if rows are on the host. Remove the cached rows of sequences whose
        rows may have changed."""
        if not any(row.on_host for row in some):
            self._cache = None
            return
        heads = self._geometry.kv_heads
        if self._cache is None or len(self._texts) != len(rows):
            groups, row_bytes = len(rows) * heads, some[0].state.row_bytes
            self._cache = RowCache(groups, row_bytes, self._geometry.device)
            self._texts = [None] * len(rows)
        for b, row in enumerate(rows):
            text = row.text if row else EMPTY
            if self._texts[b] is not text:
                self._cache.forget(slice(b * heads, (b + 1) * heads))
                self._texts[b] = text


def empty_state(like: State, batch: int, blocks: int | None = None) -> State:
    """Return a state with empty tensors for `batch` sequences of up to `blocks` blocks, or of as
    many as `like` has room for."""

    def tensor(part: Tensor | None, blocks: int | None) -> Tensor | None:
        if part is None:
            return None
        some = part if blocks is None else part[:, :blocks]
        return part.new_zeros((batch, *some.shape[1:]))

    parts: dict[str, Any] = {name: tensor(vars(like)[name], blocks) for name in PER_BLOCK}
    parts |= {name: tensor(vars(like)[name], None) for name in WHOLE}
    parts |= {name: like.counted.new_zeros(batch) for name in ("wanted", "counted")}
    return replace(like, length=like.length.new_zeros(batch), largest=None, wrong=None, **parts)


def copy_state(state: State, sequences: slice, row: BatchRow) -> None:
    """Copy the state of an index, up to its last block, to some sequences of the batch's state."""
    parts, own, blocks = vars(state), vars(row.state), -(-row.tokens // BLOCK)
    for name in PER_BLOCK:
        if parts[name] is not None:
            parts[name][sequences, :blocks].copy_(own[name][:1, :blocks])
    for name in WHOLE:
        if parts[name] is not None:
            parts[name][sequences].copy_(own[name][:1])
