"""What every fused step ends with: the rows selected for a group, and attention over them.

Nothing here waits for the device, or allocates more than results: buffers are made once, lengths
are read on the device, so that a step can be captured in a CUDA graph and replayed while the index
grows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Hits
from kvindex.ops import priority
from kvindex.storage.codecs import CodecNumber
from kvindex_cuda.memory.arena import Arena
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.ops.attend_latents import LatentAttention
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.grid_sizes import attend_parts
from kvindex_cuda.runtime.arguments import CODES
from kvindex_cuda.runtime.constants import (
    APART,
    ATTEND_AHEAD,
    BINS,
    BUCKETS,
    EDGE,
    HEADS_AT_ONCE,
    MOST_SPLITS,
    SELECT_ENTRIES,
    SELECT_THREADS,
)
from kvindex_cuda.runtime.launch import launch

COUNTERS = 9
"""Of each group, in lines of memory of their own: entries listed, candidates, of them at the edge,
finalists; a ticket of `select_rows`; three signals; parts that `attend` is done with. Its tickets,
one for each part of a group's heads, come last."""

MOST_HEADS = SELECT_THREADS // 32
"""Query heads per KV head: each has a warp of `select_rows`."""


class BaseStep:
    """Buffers and launches that all steps for a batch of `B` rows have: `select_rows` and `attend`.

    A step's `select` fills candidates and estimates, as `rerank.cu` does, then `_select_rows`.
    most: as the step says; capacity: entries that a group's candidates have room for; counted:
    further int32 per group that a step has cleared, at a multiple of 16 bytes
    (`_counted`); policy: as `ParisKVConfig.group`; drawn: whether rows are drawn (`ops.priority`):
    there `weights` has the logarithm of how many keys each stands for, times `priority.temper` if
    tempered; ragged: whether `State.length` and `resident_count` are of each row of the batch;
    arena: whose memory its buffers are, shared with steps of other batches that never run
    beside it.
    Raises ValueError for what the kernels do not serve.
    """

    stages: ClassVar[bool] = False
    """Whether the first launch puts `State.token` behind the resident rows."""

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        batch: int,
        k: int,
        most: int,
        capacity: int,
        policy: str = "mean_share",
        multiprocessors: int = 132,
        counted: int = 0,
        drawn: bool = False,
        tempered: bool = False,
        ragged: bool = False,
        arena: Arena | None = None,
    ) -> None:
        g, group = geometry, geometry.group_size
        if policy not in ("mean_share", "max_share"):
            raise ValueError(f"group: got {policy!r}, allowed is 'mean_share' or 'max_share'")
        self.geometry, self.layout, self.k, self.batch = g, layout, k, batch
        self.most, self.capacity = most, capacity
        device, groups = g.device, batch * g.kv_heads
        self._groups, self._multiprocessors = groups, multiprocessors
        self._parts = attend_parts(groups, group)
        self._memory = memory = (arena or Arena(device)).begin()
        floats = memory.empty
        self._defines = dict(D=g.head_dim, GROUP=group, DTYPE=CODES[g.dtype])
        self._scale, self._softcap = float(g.scale), float(g.softcap or 0)
        self._ragged = dict(RAGGED=int(ragged))
        self._capped = dict(SOFTCAP=int(g.softcap is not None))
        self._selects = dict(GROUP=group, POLICY=int(policy == "max_share"), **self._capped)
        self._selects["DRAWN"] = int(drawn)
        self._temper = priority.temper(k) if tempered else 1.0

        self.ids = memory.empty(groups, k, dtype=torch.int64)
        self.scores = floats(groups, k)
        self.found = memory.zeros(groups)
        self.weights = floats(groups, k) if drawn else None
        self._open_selection(counted)
        # of `attend`
        self.splits = self._splits(1)
        width = 0 if g.value_in_key else g.value_dim + 2
        self._partial = floats(groups, self.splits, group, width)
        self._latents = LatentAttention(g) if g.value_in_key else None
        self.output = memory.empty(batch, g.q_heads, g.value_dim, dtype=g.dtype)
        self.lse = floats(batch, g.q_heads)

    def _splits(self, parts: int) -> int:
        """Blocks of `attend` for each of so many parts of a group's heads."""
        return max(1, min(MOST_SPLITS, 2 * self._multiprocessors // (self._groups * parts)))

    def _attend_bytes(self, heads: int) -> int:
        """Of shared memory, as attend.cu lays it out for so many heads."""
        g = self.geometry
        wider = max(g.head_dim, g.value_dim)
        lanes = next((lanes for lanes in (8, 16) if wider <= 8 * lanes), 32)
        chunks = -(-g.head_dim // (8 * lanes)) + -(-g.value_dim // (8 * lanes))
        chunks *= max(1, g.dtype.itemsize // 2)  # pieces of 16 bytes
        ring = 8 * (2 if chunks > 6 else ATTEND_AHEAD) * chunks * 512
        merged = 4 * (256 // lanes) * min(HEADS_AT_ONCE, heads) * (g.value_dim + 2)
        return max(ring, merged)

    def _open_selection(self, counted: int) -> None:
        """Make what `select` leaves for `select_rows`, and counters."""
        groups, group, capacity = self._groups, self.geometry.group_size, self.capacity
        drawn, ints, floats = self.weights is not None, self._memory.zeros, self._memory.empty
        if group > MOST_HEADS:
            raise ValueError(f"q_heads: got {group} per KV head, allowed is up to {MOST_HEADS}")

        def longs(*shape: int) -> Tensor:
            return self._memory.empty(*shape, dtype=torch.int64)

        self._bases, self._shifts = ints(groups), ints(groups)
        self._candidates = longs(groups, capacity)
        self._estimates = floats(groups, capacity, group)
        self._edge, self._edge_estimates = longs(groups, EDGE), floats(groups, EDGE, group)
        self._cuts = ints(groups, 2)
        self._finalists = longs(groups, capacity)
        self._finalist_weights = floats(groups, capacity) if drawn else None
        self._seeds = ints(groups) if drawn else None
        # counters, cleared by a step's first launch at once: 8-byte words first, counters last,
        # each in a line of memory of its own
        lines = COUNTERS + self._parts
        sizes = [2 * group * BUCKETS, BINS, counted, lines * APART]
        self._cleared = ints(groups * sum(sizes))
        parts = torch.split(self._cleared, [groups * size for size in sizes])
        self._buckets, self._hist, self._counted = parts[:3]
        counters = parts[3].view(lines, groups, APART)[..., 0]
        self.counts, self._candidate_counts, self._edge_counts = counters[:3].unbind()
        self._finalist_counts, self._select_tickets = counters[3:5].unbind()
        self._signals, self._attend_ends = counters[5:8], counters[8]
        self._attend_tickets = counters[9:]
        self._signalers = 0  # blocks of a group that signal `select_rows` that they are done

    def __call__(self, queries: Tensor, state: State) -> Tensor:
        """Attention of queries `[B, H, D]` over the best `k` rows and resident ones: `output`."""
        self.select(queries, state)
        return self.attend(queries, state, selected=True)

    @property
    def listed(self) -> Tensor:
        """How many entries the last step has listed of each group, int32 `[B G]`."""
        return self.counts

    def renew(self) -> None:
        """The caller keeps `output`, `lse` and `found`: a step from now on writes to new ones."""
        self.output, self.lse = torch.empty_like(self.output), torch.empty_like(self.lse)
        self.found = torch.empty_like(self.found)

    def select(self, queries: Tensor, state: State) -> None:
        """The best `k` rows of each group: the first `found` of `ids`, with `scores`.

        In ascending order (from 2,049 rows on in any order). scores: what `group.agree` gives.
        """
        raise NotImplementedError

    def _select_rows(self, state: State) -> None:
        """The best of the candidates."""
        g, cache = self.geometry, None if state.segments is not None else state.cache
        launch(
            "step/select_rows.cu",
            "select_rows",
            (self._groups, -(-self.capacity // (SELECT_THREADS * SELECT_ENTRIES))),
            (SELECT_THREADS,),
            arguments=dict(
                estimates=self._estimates,
                buckets=self._buckets,
                wanted=state.wanted,
                counted=state.counted,
                bases=self._bases,
                shifts=self._shifts,
                counts=self.counts,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                cuts=self._cuts,
                edge=self._edge,
                edge_estimates=self._edge_estimates,
                edge_counts=self._edge_counts,
                finalists=self._finalists,
                finalist_counts=self._finalist_counts,
                tickets=self._select_tickets,
                ids=self.ids,
                scores=self.scores,
                found=self.found,
                found_sum=state.found_sum,
                tags=cache.tags if cache else None,
                stamps=cache.stamps if cache else None,
                finalist_weights=self._finalist_weights,
                weights=self.weights,
                seeds=self._seeds,
                signals=self._signals,
                cached=cache.capacity if cache else 0,
                signalers=self._signalers,
                k=self.k,
                capacity=self.capacity,
                kv_heads=g.kv_heads,
                scale=self._scale,
                softcap=self._softcap,
                temper=self._temper,
            ),
            overlap=True,
            **self._selects,
        )

    def attend(
        self, queries: Tensor, state: State, hits: Hits | None = None, *, selected: bool = False
    ) -> Tensor:
        """Attention over the rows that `select` found, or those of `hits`, and the resident rows.

        Writes `output`, and `lse` `[B, H]`: the natural logarithm of the sum of exponentials of the
        logits, after scale, softcap and weights, -inf where no row is visible.

        hits: any number of rows, all of them tokens'; selected: whether `select` comes right
        before, which signals each group's blocks when to begin.
        """
        g, cache = self.geometry, state.cache
        ids, found, weights, k = self.ids, self.found, self.weights, self.k
        given = 0 if weights is None else 2
        if hits is not None:
            ids, weights, k = hits.ids.contiguous(), hits.log_weight, hits.ids.shape[-1]
            weights = weights if weights is None else weights.contiguous()
            found, given = torch.full_like(self.found, k), 1
        if self._latents is not None:
            self._latents(
                queries,
                ids,
                found=found,
                weights=weights,
                rows=state.rows,
                row_bytes=state.row_bytes,
                codec=state.codec,
                resident=state.resident,
                resident_mask=state.resident_mask,
                resident_count=state.resident_count,
                output=self.output,
                lse=self.lse,
                far=state.far,
                overlap=hits is None,
                ragged=bool(self._ragged["RAGGED"]),
            )
            return self.output
        parts = self._parts if state.segments is None else 1
        heads = g.group_size // parts
        launch(
            "step/attend.cu",
            "attend",
            (min(self.splits, self._splits(parts)), self._groups * parts),
            (256,),
            arguments=dict(
                queries=queries,
                ids=ids,
                found=found,
                rows=state.rows,
                near=state.near,
                resident=state.resident,
                resident_mask=state.resident_mask,
                resident_count=state.resident_count,
                length=state.length,
                segments=state.segments,
                cache=cache.data if cache else None,
                tags=cache.tags if cache else None,
                stamps=cache.stamps if cache else None,
                clocks=cache.clocks if cache else None,
                lookups=cache.counts if cache else None,
                weights=weights,
                partial=self._partial,
                output=self.output,
                lse=self.lse,
                tickets=self._attend_tickets,
                ends=self._attend_ends,
                signals=self._signals,
                row=state.rows.shape[1],
                head_bytes=state.head_bytes or BLOCK * state.row_bytes,
                row_bytes=state.row_bytes,
                room=state.resident.shape[2],
                cached=cache.capacity if cache else 0,
                sink=state.sink or 0,
                signaled=int(selected),
                k=k,
                kv_heads=g.kv_heads,
                scale=self._scale,
                softcap=self._softcap,
                center=state.row_center,
            ),
            shared_bytes=self._attend_bytes(heads),
            overlap=hits is None,  # else what is resident may just be being written
            **(self._defines | self._capped | dict(DV=g.value_dim, GROUP=heads, PARTS=parts)),
            **dict(
                CODEC=int(CodecNumber[state.codec.upper()]),
                GIVEN=given,
                NEAR=int(state.near is not None),
            ),
            **self._ragged,
            PAGED=int(state.sink is not None) + int(state.segments is not None),
        )
        return self.output
