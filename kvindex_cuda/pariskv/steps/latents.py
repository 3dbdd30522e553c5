"""Decode step of one layer over latents (compressed keys and values), in 8 kernel launches.

A layer over latents has one KV head for many query heads. The kernels run in this order:

    prepare_latents -> sample_latents -> vote_latents -> take_candidates -> estimate_latents
        -> select_latents -> attend_latents -> merge_latents

If the expected error determines the number of rows (`limited`), `resident_latents` runs before all
others. It adds up the attention weights of sink and window.

This step selects the same rows as the step `sign_votes`, for the same presets. It is for layers
whose query heads or head dimension exceed the registers and shared memory of the kernels of
`sign_votes`. Therefore heads are processed in tiles, and the votes (approximate scores) of all keys
are stored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.pariskv.sign_votes import SAMPLED
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.base import COUNTERS
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.runtime.constants import (
    APART,
    BINS,
    BUCKETS,
    SELECT_THREADS,
    TAKE_THREADS,
    VOTE_STAGES,
)
from kvindex_cuda.runtime.launch import warpgroups
from kvindex_cuda.runtime.resolve import NamedLaunch

TILE = 8
"""Most query heads of a tile: `estimate_latents` multiplies 8 heads at once, and their queries fit
into 48 KB of shared memory."""


def tile_of(heads: int) -> int:
    """Return the number of query heads per tile: the largest divisor of `heads` that is at most
    `TILE`."""
    return next(size for size in range(TILE, 0, -1) if heads % size == 0)


class LatentsStep(SignVotesStep):
    """Buffers and launches of a decode step over latents. The arguments are those of
    `SignVotesStep`.

    Raises:
        ValueError: There is more than one KV head.
    """

    stages = False

    def __init__(self, geometry: Geometry, layout: Layout, **options: Any) -> None:
        if geometry.kv_heads != 1:
            raise ValueError(f"kv_heads: got {geometry.kv_heads}, allowed is 1")
        self._tile = tile_of(geometry.group_size)
        self._tiles = geometry.group_size // self._tile
        super().__init__(geometry, layout, **options)
        memory, width = self._memory, layout.stride * 8
        self.votes: Tensor | None = None
        if tokens := BLOCK * options.get("blocks", 0):
            self.votes = memory.empty(self.groups, tokens, dtype=torch.int32)
        self._by_warpgroups = dict(WARPGROUPS=warpgroups(geometry.device))
        columns = -(-geometry.group_size // 16) * 16
        # layout of byte_votes.cuh; columns without a head stay 0
        self.integers = memory.zeros(self.groups, width // 16, columns, 16, dtype=torch.int8)
        self.voting = memory.empty(self.groups, geometry.group_size, geometry.head_dim)
        self.prepare_tickets = memory.zeros(self.groups, self._tiles)
        stage = -(-BLOCK * (layout.stride + 1) // 128) * 128
        self._shared_bytes = columns * width + VOTE_STAGES * stage  # layout of vote_latents.cu

    def _open_selection(self, counted: int) -> None:
        """Allocate counters, and the buffers through which the kernels pass votes (approximate
        scores), candidates and estimated scores."""
        groups, capacity, heads = self.groups, self.capacity, self.geometry.group_size
        ints, floats = self._memory.zeros, self._memory.empty

        def longs(*shape: int) -> Tensor:
            return self._memory.empty(*shape, dtype=torch.int64)

        self.bases, self.shifts = ints(groups), ints(groups)
        self.seeds = ints(groups) if self.weights is not None else None
        self.candidates, self.words = longs(groups, capacity), longs(groups, capacity)
        self.estimates = floats(groups, capacity, heads)
        self.totals, self.cuts = floats(groups, heads), ints(groups, 2)
        self.candidate_weights = floats(groups, capacity) if self.weights is not None else None
        # The first kernel launch sets the following buffers to zero. The buffer with 8-byte numbers
        # comes first in memory, so that these numbers are aligned.
        sizes = [2 * heads * BUCKETS, BINS, BINS, self._tiles, COUNTERS * APART]
        sizes[3] += -self._tiles % 4  # aligns the counters to 16 bytes
        self.cleared = ints(groups * sum(sizes))
        self.words_cleared = len(self.cleared)
        split = torch.split(self.cleared, [groups * size for size in sizes])
        self.buckets, self.hist, self.score_hist, self.tile_tickets = split[:4]
        counters = split[4].view(COUNTERS, groups, APART)[..., 0]
        self.counts, self.candidate_counts, self.select_tickets = counters[:3].unbind()

    def _open_heads(self) -> tuple[int, int]:
        """Return the number of tiles in all groups of query heads, and the heads of each tile."""
        return self.groups * self._tiles, self._tile

    def select(self, queries: Tensor, state: State) -> None:
        """Select the best `k` rows for queries `[B, H, D]`, with six kernels."""
        g, tiles, multiprocessors = self.geometry, self._tiles, self._multiprocessors
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        groups, row = self.groups, state.row
        room = row * BLOCK
        if self.products is None or self.products.shape[1] != row:
            self.products = torch.empty((groups, row, g.group_size), device=g.device)
        if self.votes is None or self.votes.shape[1] != room:
            self.votes = torch.empty((groups, room), dtype=torch.int32, device=g.device)
        tiled = dict(TILES=tiles, GROUP=self._tile, D=g.head_dim)
        splits = self.splits_of_residents(state)
        if splits:
            self._resident_launch(
                self,
                state,
                grid=(tiles, splits, groups),
                block=(256,),
                defines=self._defines | self._ragged | tiled,
                overlap=True,
                queries=queries,
                token_keys=None,
                resident_splits=splits,
            )
        self._prepare_latents(queries, state)
        self._sample_launch(
            self,
            state,
            grid=(SAMPLED // 32, groups),
            block=(256,),
            defines=self._vote_defines | tiled,
            overlap=True,
        )
        self._vote_launch(
            self,
            state,
            grid=(max(1, multiprocessors // groups), groups),
            block=(256,),
            defines=self._vote_defines | tiled | self._by_warpgroups,
            shared_bytes=self._shared_bytes,
            overlap=True,
            room=room,
        )
        ragged = dict(RAGGED=self._ragged["RAGGED"])
        sampled = dict(
            SAMPLING=self._vote_defines["SAMPLING"], CENTERED=self._vote_defines["CENTERED"]
        )
        bits = dict(BITS=self.layout.magnitude_bits)
        estimates = tiled | ragged | sampled | self._capped | bits
        self._take_launch(
            self,
            state,
            grid=(groups,),
            block=(TAKE_THREADS,),
            defines=estimates,
            overlap=True,
            room=room,
        )
        # These three numbers must equal those in the kernel file estimate_latents.cu: tiles per
        # thread block, candidates per iteration, and thread blocks per multiprocessor.
        pair, threads = 2 if tiles % 2 == 0 else 1, 32 * -(-self.layout.stride // 16)
        at_once = 32 if tiles // pair > 2 else 16
        most = 320 // threads * multiprocessors // (groups * (tiles // pair))
        self._estimate_launch(
            self,
            state,
            grid=(max(1, min(-(-self.most // at_once), most)), tiles // pair, groups),
            block=(threads,),
            defines=estimates,
            overlap=True,
        )
        self._select_latents_launch(
            self,
            state,
            grid=(max(1, min(-(-self.most // 16), multiprocessors // groups)), groups),
            block=(SELECT_THREADS,),
            defines=dict(
                HEADS=g.group_size,
                SOFTCAP=self._capped["SOFTCAP"],
                POLICY=self._selects["POLICY"],
                SAMPLING=self._vote_defines["SAMPLING"],
                COUNTS=self._selects.get("COUNTS", 0),
            ),
            overlap=True,
            resident_splits=splits,
        )

    @cached_property
    def _resident_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/resident_latents.cu",
            "resident_latents",
            self,
            State,
            given=("queries", "token_keys", "resident_splits"),
        )

    @cached_property
    def _sample_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/sample_latents.cu", "sample_latents", self, State, tickets="sample_tickets"
        )

    @cached_property
    def _vote_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/vote_latents.cu", "vote_latents", self, State, given=("room",), histogram="hist"
        )

    @cached_property
    def _take_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/estimate_latents.cu",
            "take_candidates",
            self,
            State,
            given=("room",),
            histogram="hist",
        )

    @cached_property
    def _estimate_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/estimate_latents.cu",
            "estimate_latents",
            self,
            State,
            tickets="tile_tickets",
        )

    @cached_property
    def _select_latents_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/select_latents.cu",
            "select_latents",
            self,
            State,
            given=("resident_splits",),
            histogram="score_hist",
            tickets="select_tickets",
        )

    def _prepare_latents(self, queries: Tensor, state: State) -> None:
        g, tiles, together = self.geometry, self._tiles, self._prepares["REGRESSION"]
        columns = (
            3 if tiles > 8 else 2 if tiles > 4 else 1
        )  # groups of 16 matrix columns per thread block
        blocks = tiles * (-(-g.head_dim // (16 * columns)) if together else 1)
        spread = 0
        if self._vote_defines["CENTERED"]:
            free = (2 * self._multiprocessors - self.groups * blocks) // (self.groups * tiles)
            spread = min(-(-state.row // 64), max(4, free))  # a warp processes 8 centers at once
        self._prepare_latents_launch(
            self,
            state,
            grid=(blocks + tiles * spread + 1, self.groups),
            block=(256,),
            defines=self._prepares
            | dict(LIMITED=0, TILES=tiles, GROUP=self._tile, SIXTEENS=columns),
            overlap=True,
            queries=queries,
            spread=spread,
        )

    @cached_property
    def _prepare_latents_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/prepare_latents.cu",
            "prepare_latents",
            self,
            State,
            given=("queries", "spread"),
            tickets="prepare_tickets",
            words="words_cleared",
        )
