"""Decode step of one layer by tiered votes, the method of the ParisKV paper, in 6 launches. It
supports the preset `paper`.

    query_table -> vote -> candidates -> rerank_blocks -> select_rows -> attend

A key has a weight for each subspace of 8 coordinates. Its vote (approximate score) is a sum of
table entries, one per subspace. The kernel `query_table` computes the table, and the kernel `vote`
looks up the entries (`kvindex/ops/coarse.py`). Each query head has its own list of candidates:
exactly the keys with the most votes, found from a histogram of the votes of all keys. The index
counts the keys of each centroid when they are appended.
"""

from __future__ import annotations

from functools import cached_property
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
from kvindex_cuda.runtime.resolve import NamedLaunch

BLOCKS = 4
"""Number of thread blocks of `vote` that fit on a multiprocessor, limited by registers."""


class TieredVotesStep(BaseStep):
    """Buffers and launches of a decode step that finds candidates by tiered votes, that is, by
    approximate scores from a lookup table.

    Args:
        geometry: See `BaseStep`.
        layout: See `BaseStep`.
        most: Number of tokens for which there is room. With 4 query heads per KV head, a token
            takes 36 bytes per KV head. Tokens beyond this number are ignored.
        seed: Seed of the rotation (`ParisKVConfig.seed`).
        **options: Further arguments of `BaseStep`.
    """

    layout: SubspaceLayout

    def __init__(
        self,
        geometry: Geometry,
        layout: SubspaceLayout,
        *,
        most: int,
        seed: int = 0,
        **options: Any,
    ) -> None:
        g, group, M = geometry, geometry.group_size, geometry.head_dim // SUBSPACE
        super().__init__(
            geometry, layout, most=most, capacity=most, counted=group * POINTS, **options
        )
        device, groups, sets = g.device, self.groups, -(-group // 4)
        self.rotation = transform.rotation(g.head_dim, seed, device)
        self.levels = reference.levels(SUBSPACE, layout.magnitude_bits, device)

        ints = self._memory.zeros
        # `query_table` writes these buffers; padding entries (of heads or subspaces that do not
        # exist) stay 0
        self.operands = ints(groups, sets, -(-M // 2), 32, 4, dtype=torch.int16)
        self.table = ints(groups, sets, M, 256, 4, dtype=torch.uint8)
        self.ups = self._memory.empty(groups, group)
        # buffers of `vote`
        self.votes = ints(groups, sets, most)
        self.pieces, self.totals = ints(groups, group, PIECES, POINTS), self.more_counts
        # parameters of kernels that are numbers
        L = layout
        self.head_bytes, self.magnitudes, self.code_weights = L.head_bytes, L.magnitudes, L.weights

    @property
    def listed(self) -> Tensor:
        """Number of candidates that the last decode step has selected for each group, int32 `[B
        G]`."""
        return self.candidate_counts

    def select(self, queries: Tensor, state: State) -> None:
        """Select the best `k` rows for queries `[B, H, D]`, with five kernels."""
        g, groups = self.geometry, self.groups
        M, group = g.head_dim // SUBSPACE, dict(GROUP=g.group_size)
        self._table_launch(
            self,
            state,
            grid=(M, g.group_size, groups),
            block=(256,),
            defines=self._defines,
            overlap=True,
            queries=queries,
        )
        splits = max(1, BLOCKS * self._multiprocessors // groups)
        grid = min(splits, -(-self.most // CHUNK)), groups
        self._vote_launch(
            self,
            state,
            grid=grid,
            block=(256,),
            defines=group | self._ragged | dict(D=g.head_dim),
            shared_bytes=M * 1024,
            overlap=True,
        )
        self._candidates_launch(
            self, state, grid=grid, block=(256,), defines=group | self._ragged, overlap=True
        )
        bits = dict(D=g.head_dim, BITS=self.layout.magnitude_bits)
        self._rerank_launch(
            self,
            state,
            grid=(min(max(1, 2 * self._multiprocessors // groups), -(-self.most // 128)), groups),
            block=(256,),
            defines=group | self._capped | bits,
            overlap=True,
        )
        self._select_rows(state)

    @cached_property
    def _table_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/query_table.cu",
            "query_table",
            self,
            State,
            given=("queries",),
            words="words_cleared",
        )

    @cached_property
    def _vote_launch(self) -> NamedLaunch:
        return NamedLaunch("step/vote.cu", "vote", self, State, query_table="table")

    @cached_property
    def _candidates_launch(self) -> NamedLaunch:
        return NamedLaunch("step/candidates.cu", "candidates", self, State)

    @cached_property
    def _rerank_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/rerank_blocks.cu", "rerank_blocks", self, State, weights="code_weights"
        )
