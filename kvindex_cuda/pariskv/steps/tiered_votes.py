"""Two stages by tiers, with a weight for each subspace, in 6 launches (the preset `paper`).

    query_table -> vote -> candidates -> rerank_blocks -> select_rows -> attend

Votes are looked up in a table made for the query (`kvindex/ops/coarse.py`), with a list of
candidates for each query head. Votes of all keys are kept, and candidates found from their
histograms: exact, with no sample. Over an engine's pages `count_keys` comes first: of a sequence
that shares its codes with others nobody has counted them before.
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
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.base import BaseStep
from kvindex_cuda.runtime.constants import CHUNK, PIECES, POINTS
from kvindex_cuda.runtime.launch import launch

BLOCKS = 4
"""Of `vote` on a multiprocessor: what registers leave room for."""

COUNTED = 4 * CHUNK
"""Keys of a block of `count_keys` at least: it adds to as many counts as a centroid each."""


class TieredVotesStep(BaseStep):
    """Buffers and launches of a step by look-ups.

    most: tokens that there is room for, 36 bytes for each and KV head at 4 heads; those past it
    are not seen. seed: as for `SignVotesStep`; counts: whether each step counts keys per centroid
    itself, and reads no `State.histogram`.
    """

    layout: SubspaceLayout

    def __init__(
        self,
        geometry: Geometry,
        layout: SubspaceLayout,
        *,
        most: int,
        seed: int = 0,
        counts: bool = False,
        **options: Any,
    ) -> None:
        g, group, M = geometry, geometry.group_size, geometry.head_dim // SUBSPACE
        super().__init__(
            geometry, layout, most=most, capacity=most, counted=group * POINTS, **options
        )
        device, groups, sets = g.device, self._groups, -(-group // 4)
        self._rotation = transform.rotation(g.head_dim, seed, device)
        self._levels = reference.levels(SUBSPACE, layout.magnitude_bits, device)

        ints = self._memory.zeros
        # of `query_table`: what no head or subspace fills stays 0
        self._operands = ints(groups, sets, -(-M // 2), 32, 4, dtype=torch.int16)
        self._table = ints(groups, sets, M, 256, 4, dtype=torch.uint8)
        self._ups = self._memory.empty(groups, group)
        # of `vote`
        self._votes = ints(groups, sets, most)
        self._pieces = ints(groups, group, PIECES, POINTS)
        # of `count_keys`
        self._histogram = ints(groups, M, 256, dtype=torch.int64) if counts else None

    @property
    def listed(self) -> Tensor:
        """As `BaseStep.listed`."""
        return self._candidate_counts

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, kv, groups = self.geometry, self.layout, self.geometry.kv_heads, self._groups
        M, row, group = g.head_dim // SUBSPACE, state.codes.shape[1], dict(GROUP=g.group_size)
        if self._histogram is not None:
            self._count(state, self._histogram)
        launch(
            "step/query_table.cu",
            "query_table",
            (M, g.group_size, groups),
            (256,),
            arguments=dict(
                queries=queries,
                rotation=self._rotation,
                histogram=state.histogram if self._histogram is None else self._histogram,
                tiers=state.tiers,
                operands=self._operands,
                ups=self._ups,
                table=self._table,
                cleared=self._cleared,
                wrong=state.wrong,
                words=len(self._cleared),
                kv_heads=kv,
            ),
            overlap=True,
            **self._defines,
        )
        splits = max(1, BLOCKS * self._multiprocessors // groups)
        grid = min(splits, -(-self.most // CHUNK)), groups
        launch(
            "step/vote.cu",
            "vote",
            grid,
            (256,),
            arguments=dict(
                codes=state.codes,
                query_table=self._table,
                valid=state.valid,
                length=state.length,
                votes=self._votes,
                totals=self._counted,
                pieces=self._pieces,
                row=row,
                head_bytes=L.head_bytes,
                capacity=self.capacity,
                kv_heads=kv,
            ),
            shared_bytes=M * 1024,
            overlap=True,
            **(group | self._ragged | dict(D=g.head_dim)),
        )
        launch(
            "step/candidates.cu",
            "candidates",
            grid,
            (256,),
            arguments=dict(
                votes=self._votes,
                totals=self._counted,
                pieces=self._pieces,
                valid=state.valid,
                length=state.length,
                wanted=state.wanted,
                counted=state.counted,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                row=row,
                capacity=self.capacity,
                kv_heads=kv,
            ),
            overlap=True,
            **(group | self._ragged),
        )
        launch(
            "step/rerank_blocks.cu",
            "rerank_blocks",
            (min(max(1, 2 * self._multiprocessors // groups), -(-self.most // 128)), groups),
            (256,),
            arguments=dict(
                codes=state.codes,
                operands=self._operands,
                ups=self._ups,
                levels=self._levels,
                candidate_counts=self._candidate_counts,
                candidates=self._candidates,
                estimates=self._estimates,
                buckets=self._buckets,
                row=row,
                head_bytes=L.head_bytes,
                weights=L.weights,
                magnitudes=L.magnitudes,
                capacity=self.capacity,
                kv_heads=kv,
                scale=self._scale,
                softcap=self._softcap,
            ),
            overlap=True,
            **(group | self._capped | dict(D=g.head_dim, BITS=L.magnitude_bits)),
        )
        self._select_rows(state)

    def _count(self, state: State, histogram: Tensor) -> None:
        """Keys per centroid, of the codes."""
        g, groups = self.geometry, self._groups
        histogram.zero_()
        launch(
            "step/count_keys.cu",
            "count_keys",
            (max(1, min(2 * self._multiprocessors // groups, -(-self.most // COUNTED))), groups),
            (256,),
            arguments=dict(
                codes=state.codes,
                valid=state.valid,
                length=state.length,
                histogram=histogram,
                row=state.codes.shape[1],
                head_bytes=self.layout.head_bytes,
                kv_heads=g.kv_heads,
            ),
            shared_bytes=g.head_dim // SUBSPACE * 1024,
            **(self._ragged | dict(D=g.head_dim)),
        )
