"""One decoding step over latents for many query heads of one KV head, in 8 launches.

    prepare_latents -> sample_latents -> vote_latents -> take_candidates -> estimate_latents
        -> select_latents -> attend_latents -> merge_latents

The stages of `step.py` (the same presets, the same rows) where registers and shared memory have no
room for the heads or the head dimension: heads come in tiles, votes of all keys are kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import priority
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
from kvindex_cuda.runtime.launch import launch, warpgroups

TILE = 8
"""Heads of a tile at most: what `estimate_latents` multiplies at once, and fits 48 KB."""


def tile_of(heads: int) -> int:
    """Heads of a tile: the most that divide a group's."""
    return next(size for size in range(TILE, 0, -1) if heads % size == 0)


class LatentsStep(SignVotesStep):
    """Buffers and launches of such a step for a batch of `B` rows.

    most: candidates that there is room for, as of `SignVotesStep`; votes have room for
    a table's tokens.
    Raises ValueError for more than one KV head.
    """

    stages = False

    def __init__(self, geometry: Geometry, layout: Layout, **options: Any) -> None:
        if geometry.kv_heads != 1:
            raise ValueError(f"kv_heads: got {geometry.kv_heads}, allowed is 1")
        self._tile = tile_of(geometry.group_size)
        self._tiles = geometry.group_size // self._tile
        super().__init__(geometry, layout, **options)
        self._all_votes: Tensor | None = None
        width, device = layout.stride * 8, geometry.device
        self._by_warpgroups = dict(WARPGROUPS=warpgroups(device))
        rows = self._groups, geometry.group_size
        columns = -(-geometry.group_size // 16) * 16
        self._integers = torch.zeros(
            (self._groups, width // 16, columns, 16), dtype=torch.int8, device=device
        )  # as byte_votes.cuh has them
        self._voting = torch.empty((*rows, geometry.head_dim), device=device)
        self._prepare_tickets = torch.zeros(
            (self._groups, self._tiles), dtype=torch.int32, device=device
        )
        stage = -(-BLOCK * (layout.stride + 1) // 128) * 128
        self._shared_bytes = columns * width + VOTE_STAGES * stage  # as vote_latents.cu lays it out

    def _open_selection(self, counted: int) -> None:
        """As `BaseStep._open_selection`."""
        g, groups, capacity = self.geometry, self._groups, self.capacity
        device, heads = g.device, g.group_size

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def longs(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        self._bases, self._shifts = ints(groups), ints(groups)
        self._seeds = ints(groups) if self.weights is not None else None
        self._candidates, self._words = longs(groups, capacity), longs(groups, capacity)
        self._estimates = floats(groups, capacity, heads)
        self._totals, self._cuts = floats(groups, heads), ints(groups, 2)
        self._candidate_weights = floats(groups, capacity) if self.weights is not None else None
        # cleared by the first launch, 8-byte words first
        sizes = [2 * heads * BUCKETS, BINS, BINS, self._tiles, COUNTERS * APART]
        sizes[3] += -self._tiles % 4  # what comes after lies at a multiple of 16 bytes
        self._cleared = ints(groups * sum(sizes))
        split = torch.split(self._cleared, [groups * size for size in sizes])
        self._buckets, self._hist, self._score_hist, self._tile_tickets = split[:4]
        counters = split[4].view(COUNTERS, groups, APART)[..., 0]
        self.counts, self._candidate_counts, self._select_tickets = counters[:3].unbind()

    def _open_heads(self) -> tuple[int, int]:
        """As `SignVotesStep._open_heads`."""
        return self._groups * self._tiles, self._tile

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, tiles = self.geometry, self.layout, self._tiles
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        groups, row = self._groups, state.codes.shape[1]
        room = row * BLOCK
        if self._products is None or self._products.shape[1] != row:
            self._products = torch.empty((groups, row, g.group_size), device=g.device)
        if self._all_votes is None or self._all_votes.shape[1] != room:
            self._all_votes = torch.empty((groups, room), dtype=torch.int32, device=g.device)
        tiled = dict(TILES=tiles, GROUP=self._tile, D=g.head_dim)
        self._prepare_latents(queries, state)
        launch(
            "step/sample_latents.cu",
            "sample_latents",
            (SAMPLED // 32, groups),
            (256,),
            arguments=dict(
                codes=state.codes,
                valid=state.valid,
                length=state.length,
                weight_scale=state.weight_scale,
                wanted=state.wanted,
                counted=state.counted,
                factors=self._factors,
                integers=self._integers,
                sums=self._sums,
                units=self._units,
                products=self._products,
                scales=self._scales,
                seeds=self._seeds,
                sample=self._sample,
                tickets=self._sample_tickets,
                thresholds=self._thresholds,
                bases=self._bases,
                shifts=self._shifts,
                row=row,
            ),
            overlap=True,
            **(self._votes | tiled),
        )
        launch(
            "step/vote_latents.cu",
            "vote_latents",
            (max(1, self._multiprocessors // groups), groups),
            (256,),
            arguments=dict(
                codes=state.codes,
                integers=self._integers,
                sums=self._sums,
                units=self._units,
                products=self._products,
                weight_scale=state.weight_scale,
                factors=self._factors,
                valid=state.valid,
                length=state.length,
                thresholds=self._thresholds,
                bases=self._bases,
                shifts=self._shifts,
                scales=self._scales,
                seeds=self._seeds,
                votes=self._all_votes,
                counts=self.counts,
                list=self._list,
                histogram=self._hist,
                row=row,
                room=room,
                capacity=self.capacity,
            ),
            shared_bytes=self._shared_bytes,
            overlap=True,
            **(self._votes | tiled | self._by_warpgroups),
        )
        ragged = dict(RAGGED=self._ragged["RAGGED"])
        drawn = dict(DRAWN=self._votes["DRAWN"], CENTERED=self._votes["CENTERED"])
        estimates = tiled | ragged | drawn | self._capped | dict(BITS=L.magnitude_bits)
        launch(
            "step/estimate_latents.cu",
            "take_candidates",
            (groups,),
            (TAKE_THREADS,),
            arguments=dict(
                votes=self._all_votes,
                counts=self.counts,
                list=self._list,
                histogram=self._hist,
                thresholds=self._thresholds,
                bases=self._bases,
                shifts=self._shifts,
                length=state.length,
                wanted=state.wanted,
                counted=state.counted,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                cuts=self._cuts,
                room=room,
                capacity=self.capacity,
            ),
            overlap=True,
            **estimates,
        )
        # tiles of a block, candidates at once, blocks for which there is room: estimate_latents.cu
        pair, threads = 2 if tiles % 2 == 0 else 1, 32 * -(-L.stride // 16)
        at_once = 32 if tiles // pair > 2 else 16
        most = 320 // threads * self._multiprocessors // (groups * (tiles // pair))
        launch(
            "step/estimate_latents.cu",
            "estimate_latents",
            (max(1, min(-(-self.most // at_once), most)), tiles // pair, groups),
            (threads,),
            arguments=dict(
                codes=state.codes,
                operands=self._operands,
                ups=self._ups,
                products=self._products,
                levels=self._levels,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                cuts=self._cuts,
                seeds=self._seeds,
                estimates=self._estimates,
                buckets=self._buckets,
                tickets=self._tile_tickets,
                totals=self._totals,
                row=row,
                logs=L.logs,
                magnitudes=L.magnitudes,
                capacity=self.capacity,
                scale=self._scale,
                softcap=self._softcap,
            ),
            overlap=True,
            **estimates,
        )
        launch(
            "step/select_latents.cu",
            "select_latents",
            (max(1, min(-(-self.most // 16), self._multiprocessors // groups)), groups),
            (SELECT_THREADS,),
            arguments=dict(
                estimates=self._estimates,
                totals=self._totals,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                cuts=self._cuts,
                seeds=self._seeds,
                words=self._words,
                candidate_weights=self._candidate_weights,
                histogram=self._score_hist,
                tickets=self._select_tickets,
                ids=self.ids,
                scores=self.scores,
                weights=self.weights,
                found=self.found,
                found_sum=state.found_sum,
                k=self.k,
                capacity=self.capacity,
                scale=self._scale,
                softcap=self._softcap,
                temper=self._temper,
            ),
            overlap=True,
            HEADS=g.group_size,
            SOFTCAP=self._capped["SOFTCAP"],
            POLICY=self._selects["POLICY"],
            DRAWN=self._votes["DRAWN"],
        )

    def _prepare_latents(self, queries: Tensor, state: State) -> None:
        """The first launch."""
        g, tiles, together = self.geometry, self._tiles, self._prepares["TOGETHER"]
        columns = 3 if tiles > 8 else 2 if tiles > 4 else 1  # sixteens of the matrix a block
        blocks = tiles * (-(-g.head_dim // (16 * columns)) if together else 1)
        row, spread = state.codes.shape[1], 0
        if self._votes["CENTERED"]:
            free = (2 * self._multiprocessors - self._groups * blocks) // (self._groups * tiles)
            spread = min(-(-row // 64), max(4, free))  # a warp has 8 centers at once
        launch(
            "step/prepare_latents.cu",
            "prepare_latents",
            (blocks + tiles * spread + 1, self._groups),
            (256,),
            arguments=dict(
                queries=queries,
                rotation=self._rotation,
                weight_scale=state.weight_scale,
                regression=state.regression,
                codes=state.codes,
                valid=state.valid,
                length=state.length,
                counted=state.counted,
                voting=self._voting,
                integers=self._integers,
                sums=self._sums,
                units=self._units,
                operands=self._operands,
                ups=self._ups,
                products=self._products,
                tickets=self._prepare_tickets,
                scales=self._scales,
                seeds=self._seeds,
                cleared=self._cleared,
                wrong=state.wrong,
                row=row,
                words=len(self._cleared),
                spread=spread,
                query_max=self._query_max,
                seed=self._seed,
                level=self._level,
                factor_max=float(reference.FACTOR),
                octaves=self._scale / math.log(2),
                gain=self._scale * priority.UNIT / math.log(2),
            ),
            overlap=True,
            **(self._prepares | dict(TILES=tiles, GROUP=self._tile, SIXTEENS=columns)),
        )
