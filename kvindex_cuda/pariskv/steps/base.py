"""Base class of fused decode steps, with the two launches that all kinds of step have:
`select_rows` selects rows among candidates, and `attend` computes attention.

A step can be captured in a CUDA graph and replayed while the index grows: its buffers are allocated
once, kernels read lengths on the device, and the host does not wait for the device.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Hits
from kvindex.ops import priority
from kvindex.pariskv import row_budget
from kvindex.storage.codecs import CodecNumber
from kvindex_cuda.memory.arena import Arena
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.ops.attend_latents import LatentAttention
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.grid_sizes import attend_parts, resident_splits
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
from kvindex_cuda.runtime.resolve import NamedLaunch

COUNTERS = 9
"""Number of counters of each group (a KV head of a sequence). Each counter has a memory line of its
own.

In order, they count: entries listed, candidates, candidates in the histogram bin that contains the
cut, finalists, finished thread blocks of `select_rows`, three signals, and parts that `attend` has
finished. After these come the counters of `attend` for finished thread blocks, one for each part of
a group's heads."""

MOST_HEADS = SELECT_THREADS // 32
"""Most query heads per KV head, because each one has a warp of `select_rows`."""


class BaseStep:
    """Buffers and launches that all kinds of decode step have, for a batch of `B` sequences.

    `select` of a subclass finds candidates and estimates their scores, and then calls
    `_select_rows`. Tensors that kernels read or write are attributes with the names of the kernels'
    parameters; launches find their arguments by these names (`runtime.resolve`).

    Args:
        geometry: Shapes, dtype and device of the layer.
        layout: Layout of the blocks of codes.
        batch: Number of sequences, `B`.
        k: Rows to select per KV head.
        most: Number of tokens or of candidates for which the buffers have room. The subclass says
            which.
        capacity: Number of entries for which a group's list of candidates has room.
        policy: How the scores of a group's query heads are combined (see `ParisKVConfig.group`).
        multiprocessors: Number of multiprocessors of the device, from which grid sizes are
            computed.
        counted: Number of further int32 counters per group that a subclass needs (`more_counts`).
            They are cleared together with the others, and begin at a multiple of 16 bytes.
        sampled: Whether to sample rows (`ops.priority`). If so, `weights` contains the logarithm of
            the number of keys that each sampled row represents.
        tempered: Whether to multiply these logarithms by `priority.temper`.
        limited: Whether the expected error of attention determines the number of rows of each KV
            head (`State.variances`). `k` is then the largest number. Only for a subclass that
            computes `resident_parts`, with `sampled`.
        ragged: Whether `State.length` and `State.resident_count` have an entry for each sequence.
        one_sequence: Whether the entries of the batch are consecutive tokens of a sequence, which
            share its resident rows and its row cache. Only with `ragged`.
        sequences: With `one_sequence`, number of sequences that the batch has tokens of, each
            equally many. The tokens of a sequence follow each other.
        arena: Memory for the buffers, which is shared with steps that never run at the same time.

    Raises:
        ValueError: The kernels do not support these options.
    """

    stages: ClassVar[bool] = False
    """True if the first launch appends `State.token` to the resident rows."""

    limits: ClassVar[bool] = False
    """True if the step supports the option `limited`."""

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
        sampled: bool = False,
        tempered: bool = False,
        limited: bool = False,
        ragged: bool = False,
        one_sequence: bool = False,
        sequences: int = 1,
        arena: Arena | None = None,
    ) -> None:
        g, group = geometry, geometry.group_size
        if policy not in ("mean_share", "max_share"):
            raise ValueError(f"group: got {policy!r}, allowed is 'mean_share' or 'max_share'")
        self.geometry, self.layout, self.k, self.batch = g, layout, k, batch
        self.most, self.capacity = most, capacity
        device, groups = g.device, batch * g.kv_heads
        self.groups, self.kv_heads, self._multiprocessors = groups, g.kv_heads, multiprocessors
        self._parts = attend_parts(groups, group)
        self._memory = memory = (arena or Arena(device)).begin()
        floats = memory.empty
        self._defines = dict(D=g.head_dim, GROUP=group, DTYPE=CODES[g.dtype])
        self.scale, self.softcap = float(g.scale), float(g.softcap or 0)
        self._ragged = dict(RAGGED=int(ragged))
        if one_sequence and (not ragged or g.value_in_key):
            raise ValueError(
                f"one_sequence: got True with ragged={ragged} and value_in_key={g.value_in_key}, "
                "allowed is True and False"
            )
        self._one_sequence = one_sequence
        self.consecutive = batch // sequences if one_sequence else 1  # tokens of each sequence
        self._capped = dict(SOFTCAP=int(g.softcap is not None))
        self._selects = dict(GROUP=group, POLICY=int(policy == "max_share"), **self._capped)
        self._selects["SAMPLING"] = int(sampled)
        self.limited = self._checked_limit(limited, sampled)
        if limited:
            self._selects["COUNTS"] = len(row_budget.counts_of(k))
        self._resident_splits = resident_splits(groups, multiprocessors) if limited else 0
        self.temper = priority.temper(k) if tempered else 1.0

        self.ids = memory.empty(groups, k, dtype=torch.int64)
        self.scores = floats(groups, k)
        self.found = memory.zeros(groups)
        self.weights = floats(groups, k) if sampled else None
        self._open_selection(counted)
        # buffers of `attend`
        self.splits = self._splits(1)
        width = 0 if g.value_in_key else g.value_dim + 2
        self.partial = floats(groups, self.splits, group, width)
        # written by the subclass, see common/resident_sums.cuh
        shape = groups, self._resident_splits, group, 2
        self.resident_parts = floats(*shape) if limited else None
        self._latents = LatentAttention(g) if g.value_in_key else None
        if self._latents is not None and arena is not None:
            self._latents.reserve(floats, groups, multiprocessors)
        self.output = memory.empty(batch, g.q_heads, g.value_dim, dtype=g.dtype)
        self.lse = floats(batch, g.q_heads)

    def _checked_limit(self, limited: bool, sampled: bool) -> bool:
        """Return `limited`, or raise ValueError if this step does not support it."""
        if not limited:
            return False
        allowed = {
            "sampled": (sampled, True),
            "limits": (self.limits, True),
        }
        for name, (got, needed) in allowed.items():
            if got != needed:
                raise ValueError(
                    f"limited: got True with {name}={got}, allowed is {name}={needed}: only a step "
                    "by sign votes that samples rows chooses the number of rows by their expected "
                    "error"
                )
        return True

    def splits_of_residents(self, state: State) -> int:
        """Return how many thread blocks per group add up the weights of the resident rows in
        `state`; 0 if their weights are not needed, or if there are none."""
        some = state.resident.numel() or state.sink is not None
        return self._resident_splits if some else 0

    def _splits(self, parts: int) -> int:
        """Choose among how many thread blocks the kernel `attend` divides the rows of a group.

        The query heads of a group are divided into `parts` parts. Each part has this number of
        thread blocks.
        """
        return max(1, min(MOST_SPLITS, 2 * self._multiprocessors // (self.groups * parts)))

    def _attend_bytes(self, heads: int) -> int:
        g = self.geometry
        wider = max(g.head_dim, g.value_dim)
        lanes = next((lanes for lanes in (8, 16) if wider <= 8 * lanes), 32)
        chunks = -(-g.head_dim // (8 * lanes)) + -(-g.value_dim // (8 * lanes))
        chunks *= max(1, g.dtype.itemsize // 2)  # pieces of 16 bytes
        ring = 8 * (2 if chunks > 6 else ATTEND_AHEAD) * chunks * 512
        merged = 4 * (256 // lanes) * min(HEADS_AT_ONCE, heads) * (g.value_dim + 2)
        return max(ring, merged)

    def _open_selection(self, counted: int) -> None:
        """Allocate counters, and the buffers through which `select` passes candidates to
        `select_rows`."""
        groups, group, capacity = self.groups, self.geometry.group_size, self.capacity
        sampled, ints, floats = self.weights is not None, self._memory.zeros, self._memory.empty
        if group > MOST_HEADS:
            raise ValueError(f"q_heads: got {group} per KV head, allowed are up to {MOST_HEADS}")

        def longs(*shape: int) -> Tensor:
            return self._memory.empty(*shape, dtype=torch.int64)

        self.bases, self.shifts = ints(groups), ints(groups)
        self.candidates = longs(groups, capacity)
        self.estimates = floats(groups, capacity, group)
        self.edge, self.edge_estimates = longs(groups, EDGE), floats(groups, EDGE, group)
        self.cuts = ints(groups, 2)
        self.finalists = longs(groups, capacity)
        self.finalist_weights = floats(groups, capacity) if sampled else None
        self.seeds = ints(groups) if sampled else None
        # The tensor `cleared` contains all buffers that the first launch of a decode step sets to
        # zero. Its buffers of 8-byte words come first, and its counters last. Each counter takes
        # 128 bytes (`APART` words), so that no two counters are in the same cache line.
        lines = COUNTERS + self._parts
        sizes = [2 * group * BUCKETS, BINS, counted, lines * APART]
        self.cleared = ints(groups * sum(sizes))
        self.words_cleared = len(self.cleared)
        parts = torch.split(self.cleared, [groups * size for size in sizes])
        self.buckets, self.hist, self.more_counts = parts[:3]
        counters = parts[3].view(lines, groups, APART)[..., 0]
        self.counts, self.candidate_counts, self.edge_counts = counters[:3].unbind()
        self.finalist_counts, self.select_tickets = counters[3:5].unbind()
        self.signals, self.attend_ends = counters[5:8], counters[8]
        self.attend_tickets = counters[9:]
        self.signalers = 0  # thread blocks per group that send signals to `select_rows`

    def __call__(self, queries: Tensor, state: State) -> Tensor:
        """Select the best `k` rows for queries `[B, H, D]`, attend to them and to the resident rows
        (sink and local window), and return `output`."""
        self.select(queries, state)
        return self.attend(queries, state, selected=True)

    @property
    def listed(self) -> Tensor:
        """Number of keys that the last decode step has put into the candidate list of each group,
        int32 `[B G]`."""
        return self.counts

    def renew(self) -> None:
        """Replace `output`, `lse` and `found` by new tensors. The caller keeps the old ones as
        results."""
        self.output, self.lse = torch.empty_like(self.output), torch.empty_like(self.lse)
        self.found = torch.empty_like(self.found)

    def select(self, queries: Tensor, state: State) -> None:
        """Select the best `k` rows of each group. The results are the first `found` entries of
        `ids` and `scores`.

        Ids are in ascending order for up to 2,048 rows, and in any order beyond. The score of a row
        combines the estimates of the group's query heads as `group.agree` does.
        """
        raise NotImplementedError

    def _select_rows(self, state: State) -> None:
        """Launch the kernel `select_rows`, which selects the `k` best candidates."""
        # rows of a cache that several sequences share are not expected in advance
        cache = None if self._one_sequence or state.segments is not None else state.cache
        self._select_launch(
            self,
            state,
            grid=(self.groups, -(-self.capacity // (SELECT_THREADS * SELECT_ENTRIES))),
            block=(SELECT_THREADS,),
            defines=self._selects,
            overlap=True,
            tags=cache.tags if cache else None,
            stamps=cache.stamps if cache else None,
            cached=cache.capacity if cache else 0,
            resident_splits=self.splits_of_residents(state),
        )

    @cached_property
    def _select_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/select_rows.cu",
            "select_rows",
            self,
            State,
            given=("tags", "stamps", "cached", "resident_splits"),
            tickets="select_tickets",
        )

    def attend(
        self, queries: Tensor, state: State, hits: Hits | None = None, *, selected: bool = False
    ) -> Tensor:
        """Attend to the resident rows (sink and local window), and to the selected rows.

        The selected rows are the rows in `hits`. Without `hits`, they are the rows that `select`
        has found. The kernel writes the buffers `output` and `lse`. `lse` `[B, H]` is the
        log-sum-exp of the logits after scale, softcap and weights, or -inf where no row is visible.

        Args:
            queries: `[B, H, D]`.
            state: The tensors of the layer that the step reads.
            hits: Rows to attend to instead of those that `select` has found. No slot may be unused.
            selected: True if `select` was launched just before. Its kernel then signals when the
                rows of a group are selected, and the thread blocks of this group start to read
                them.
        """
        g = self.geometry
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
                length=None if state.sink is None else state.length,
                sink=state.sink,
                head_bytes=state.rows_head_bytes,
                on_host=state.on_host,
                overlap=hits is None,
                ragged=bool(self._ragged["RAGGED"]),
            )
            return self.output
        parts = self._parts if state.segments is None else 1
        heads = g.group_size // parts
        self._attend_launch(
            self,
            state,
            grid=(min(self.splits, self._splits(parts)), self.groups * parts),
            block=(256,),
            defines=self._defines
            | self._capped
            | dict(DV=g.value_dim, GROUP=heads, PARTS=parts)
            | dict(CODEC=int(CodecNumber[state.codec.upper()]), GIVEN=given)
            | dict(MIXED_ROWS=int(state.on_device is not None))
            | self._ragged
            | dict(ONE_SEQUENCE=int(self._one_sequence))
            | dict(PAGED=int(state.sink is not None) + int(state.segments is not None))
            | dict(FP8_PAGES=int(state.key_scale is not None))
            | dict(MEASURED=int(state.squares is not None)),
            shared_bytes=self._attend_bytes(heads),
            overlap=hits is None,  # with hits, the previous launch may still write rows
            queries=queries,
            ids=ids,
            found=found,
            weights=weights,
            k=k,
            signaled=int(selected),
        )
        return self.output

    @cached_property
    def _attend_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/attend.cu",
            "attend",
            self,
            State,
            given=("queries", "ids", "found", "weights", "k", "signaled"),
            cache="cached_rows",
            center="row_center",
            ends="attend_ends",
            head_bytes="rows_head_bytes",
            row="table_row",
            sink="sink_rows",
            tickets="attend_tickets",
        )
