"""Two stages with a weight for each subspace, in 6 launches (the presets `paper` and `accurate`).

    turn -> count -> choose -> weigh -> agree -> attend

Votes are looked up in a table made for the query (`kvindex/ops/coarse.py`): of tiers, with a
list of candidates for each query head (`paper`), or of dots, with one list for the group
(`accurate`). Votes of all keys are kept, and candidates found from their histograms: exact, with no
sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import transform
from kvindex.ops.codes import SUBSPACE
from kvindex_cuda.memory.layout import SubspaceLayout
from kvindex_cuda.pariskv.base_step import BINS, BaseStep, State
from kvindex_cuda.runtime.launch import launch

CHUNK, PIECES, POINTS = 1024, 256, 256
"""Of `tier_votes.cuh`."""

BLOCKS = {False: 4, True: 2}
"""Of `count` on a multiprocessor, for tiers and for dots: what registers leave room for."""


class TableStep(BaseStep):
    """Buffers and launches of a step by look-ups.

    most: tokens that there is room for, 36 bytes for each and KV head at 4 heads; those past it
    are not seen. dots: whether the table is of dots, else of tiers; weight_bits: of a logarithm,
    where layout.weight_bytes is 1; seed, query_max: as for `Step`.
    """

    layout: SubspaceLayout

    def __init__(
        self,
        geometry: Geometry,
        layout: SubspaceLayout,
        *,
        most: int,
        dots: bool,
        weight_bits: int = 8,
        seed: int = 0,
        query_max: int = 21,
        **options: Any,
    ) -> None:
        g, group, M = geometry, geometry.group_size, geometry.head_dim // SUBSPACE
        counted = BINS + 1 if dots else group * POINTS
        super().__init__(geometry, layout, most=most, capacity=most, counted=counted, **options)
        device, groups, sets = g.device, self._groups, -(-group // 4)
        self._dots, self._bits = dots, weight_bits
        self._query_max = min(query_max, 2**15 // g.head_dim)
        self._level = reference.lloyd_max(SUBSPACE, 0)[0]
        self._rotation = transform.rotation(g.head_dim, seed, device)
        self._levels = reference.levels(SUBSPACE, layout.magnitude_bits, device)
        self._factors = reference.log_factors(weight_bits, device) if dots else None

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # of `turn`: what no head or subspace fills stays 0
        self._operands = ints(groups, sets, -(-M // 2), 32, 4, dtype=torch.int16)
        entries = torch.int16 if dots else torch.uint8
        self._table = ints(groups, sets, M, 256, 4, dtype=entries)
        self._ups, self._units = (torch.empty((groups, group), device=device) for _ in range(2))
        # of `count`
        self._votes = ints(groups, 1 if dots else sets, most)
        self._pieces = None if dots else ints(groups, group, PIECES, POINTS)
        self._products: Tensor | None = None
        sizes = [groups * BINS, groups] if dots else [groups * group * POINTS, 0]
        self._totals, self._tops = torch.split(self._counted, sizes)
        if dots:
            self.counts = self._many  # what is listed may be more than there are candidates

    @property
    def listed(self) -> Tensor:
        """As `BaseStep.listed`."""
        return self._many

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, kv, groups = self.geometry, self.layout, self.geometry.kv_heads, self._groups
        M, row, limits = g.head_dim // SUBSPACE, state.codes.shape[1], (state.wanted, state.counted)
        if L.centered and (self._products is None or self._products.shape[1] != row):
            self._products = torch.empty((groups, row, g.group_size), device=g.device)
        launch(
            "step/query_table.cu",
            "query_table",
            (1 if self._dots else M, g.group_size, groups),
            (256,),
            *(queries, self._rotation, state.weight_scale, state.histogram, state.tiers),
            *(self._operands, self._ups, self._units, self._table),
            *(self._cleared, len(self._cleared), state.wrong, self._query_max, self._level),
            *(float(reference.FACTOR), kv),
            overlap=True,
            **(self._defines | dict(TABLE=2 if self._dots else 1)),
        )
        wide, codes = dict(WIDE=int(self._dots)), (state.codes, row, L.head_bytes)
        blocks = BLOCKS[self._dots] * self._multiprocessors
        chunks = -(-self.most // CHUNK)
        grid = min(max(1, blocks // groups), chunks), groups
        launch(
            "step/vote.cu",
            "vote",
            grid,
            (256,),
            *(*codes, L.weights, L.center, self._table, queries, self._units, self._factors),
            *(state.valid, state.length, self._votes, self._totals, self._pieces, self._tops),
            *(self._products, self.capacity, kv),
            shared_bytes=M * 1024 * (2 if self._dots else 1),
            overlap=True,
            **(self._defines | wide | dict(CENTERED=int(L.centered))),
        )
        group, listed = dict(GROUP=g.group_size), (self._kept, self._many)
        if self._dots:
            launch(
                "step/candidates.cu",
                "group",
                grid,
                (256,),
                *(self._votes, self._totals, self._tops, state.length, *limits, *listed),
                *(self._hist, self._bases, self._shifts, self.capacity, kv),
                overlap=True,
                **(wide | group),
            )
        else:
            launch(
                "step/candidates.cu",
                "heads",
                grid,
                (256,),
                *(self._votes, self._totals, self._pieces, state.valid, state.length, *limits),
                *(*listed, row, self.capacity, kv),
                overlap=True,
                **(wide | group),
            )
        step, top = reference.OCTAVES / 2**self._bits, 2**self._bits - 1
        softcap = g.softcap if g.softcap is not None else 0.0
        launch(
            "step/rerank_blocks.cu",
            "rerank_blocks",
            (min(max(1, 2 * self._multiprocessors // groups), -(-self.most // 128)), groups),
            (256,),
            *(*codes, L.weights, L.magnitudes, self._operands, self._ups, self._products),
            *(self._levels, state.weight_scale, *limits, self._bases, self._shifts, self.counts),
            *(self._many, self._kept, self._hist, self._estimates, self._buckets),
            *(self._edge, self._edge_estimates, self._edges, self._cuts),
            *(self.capacity, kv, g.scale, softcap, step, top),
            overlap=True,
            **(self._softcap | group | dict(D=g.head_dim, BITS=L.magnitude_bits)),
            **dict(CENTERED=int(L.centered), WEIGHTS=L.weight_bytes),
        )
        self._agree(state)
