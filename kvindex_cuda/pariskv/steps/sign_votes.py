"""One decoding step of one layer, from query to attention output, in 5 launches.

    prepare_query -> scan -> rerank -> select_rows -> attend

Signed dots with one 16-bit log weight per key, one list of candidates per group (the presets
`fast` and `precise`). Nothing here waits for the device, or allocates more than results: buffers
are made once, lengths are read on the device, so that a step can be captured in a CUDA graph and
replayed while the index grows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import priority, transform
from kvindex.pariskv.sign_votes import PLANES
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.base import BaseStep
from kvindex_cuda.pariskv.steps.grid_sizes import rerank_splits
from kvindex_cuda.runtime.constants import SAMPLED, SCAN_STAGES, SCAN_WARPS
from kvindex_cuda.runtime.launch import capturing, launch


class SignVotesStep(BaseStep):
    """Buffers and launches of a step for a batch of `B` rows.

    most: the largest `C` that `State.wanted` will hold; seed, query_max, policy: as
    `ParisKVConfig`; centered: whether blocks hold centers; drawn, tempered: whether rows are drawn,
    with lower weights; together: whether signs vote together, by `State.regression`; blocks: `S` of
    the tables that it will read, 0 where it is not known yet.
    Raises ValueError for what the kernels do not serve.
    """

    stages = True

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        most: int,
        seed: int = 0,
        query_max: int = 21,
        centered: bool = True,
        drawn: bool = False,
        together: bool = False,
        blocks: int = 0,
        **options: Any,
    ) -> None:
        capacity = 4 * (most + SAMPLED)  # `rerank` serves what is more
        options |= dict(most=most, capacity=capacity, drawn=drawn)
        super().__init__(geometry, layout, **options)
        g, device = geometry, geometry.device
        groups, group = self._open_heads()
        self._query_max = min(query_max, 2**15 // g.head_dim)
        planes = next((digits for digits, most in PLANES.items() if self._query_max <= most), None)
        if planes is None:
            most = PLANES[max(PLANES)]
            raise ValueError(f"query_max: got {self._query_max}, allowed is up to {most}")
        self._votes = self._defines | self._ragged | dict(CENTERED=int(centered), PLANES=planes)
        self._votes |= dict(GROUP=group, DRAWN=int(drawn))
        self._prepares = self._votes | dict(TOGETHER=int(together))
        self._rerank = self._votes | self._capped | dict(BITS=layout.magnitude_bits)
        resident = 1 if g.head_dim > 128 or layout.magnitude_bits > 3 or group > 8 else 2
        self._rerank_splits = rerank_splits(self._groups, self._multiprocessors, resident=resident)
        self._level = reference.lloyd_max(g.head_dim, 0)[0]
        odd = g.head_dim // (g.head_dim & -g.head_dim)
        angles = torch.arange(odd, dtype=torch.float64) * (2 * math.pi / odd)
        waves = (angles.cos() + angles.sin()).float().to(device)
        self._rotation = torch.cat([transform.rotation(g.head_dim, seed, device)[0], waves])
        self._levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        self._factors = reference.log_factors(16, device)
        quads, sets, parts = -(-(layout.stride // 4) // 4), -(-group // 4), 1 if group <= 4 else 2
        ints, floats = self._memory.zeros, self._memory.empty
        # of `prepare_query`
        self._planes = ints(groups, sets, quads, planes // 2, 32)
        self._sums, self._units = ints(groups, 4 * sets), floats(groups, 4 * sets)
        self._operands = ints(groups, -(-group // 8), quads, 8, 32, parts, 2)  # 0 for no head
        self._ups = floats(groups, group)
        self._sample, self._sample_tickets = ints(groups, SAMPLED), ints(groups)
        self._scales = floats(groups, 4 * sets, 2) if drawn else None
        self._seed = seed
        self._thresholds = ints(groups)
        # of `scan`
        self._products = floats(self._groups, blocks, g.group_size) if blocks else None
        self._list = self._memory.empty(self._groups, self.capacity, dtype=torch.int64)

    def _open_heads(self) -> tuple[int, int]:
        """For how many groups queries are prepared, and of how many heads each."""
        return self._groups, self.geometry.group_size

    def _prepare(self, queries: Tensor, state: State) -> None:
        """The first launch.

        With a token it reads codes before the launch before has ended, which in a graph makes the
        token alone; outside of one that may have written codes, so that it begins no earlier.
        """
        groups = self._groups
        launch(
            "step/prepare_query.cu",
            "prepare_query",
            (max(1, min(16, 2 * self._multiprocessors // groups)), groups),
            (256,),
            arguments=dict(
                queries=queries,
                rotation=self._rotation,
                weight_scale=state.weight_scale,
                regression=state.regression,
                codes=state.codes,
                valid=state.valid,
                length=state.length,
                wanted=state.wanted,
                counted=state.counted,
                factors=self._factors,
                planes=self._planes,
                sums=self._sums,
                units=self._units,
                operands=self._operands,
                ups=self._ups,
                sample=self._sample,
                tickets=self._sample_tickets,
                thresholds=self._thresholds,
                bases=self._bases,
                shifts=self._shifts,
                scales=self._scales,
                seeds=self._seeds,
                cleared=self._cleared,
                wrong=state.wrong,
                token_keys=None if state.token is None else state.token.keys,
                token_values=None if state.token is None else state.token.values,
                resident=None if state.token is None else state.resident,
                resident_count=None if state.token is None else state.resident_count,
                ticket=state.ticket,
                row=state.codes.shape[1],
                head_bytes=self.layout.head_bytes,
                words=len(self._cleared),
                kv_heads=self.geometry.kv_heads,
                room=0 if state.token is None else state.resident.shape[2],
                value_dim=self.geometry.value_dim,
                query_max=self._query_max,
                seed=self._seed,
                level=self._level,
                factor_max=float(reference.FACTOR),
                octaves=self._scale / math.log(2),
                gain=self._scale * priority.UNIT / math.log(2),
            ),
            overlap=state.token is None or capturing(queries.device),
            **self._prepares,
        )

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, kv = self.geometry, self.layout, self.geometry.kv_heads
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        groups, row = self._groups, state.codes.shape[1]
        if self._products is None or self._products.shape[1] != row:
            shape = (groups, row, g.group_size)
            self._products = torch.empty(shape, device=g.device)
        self._prepare(queries, state)
        scanners = (1 if g.head_dim > 128 else 2) * self._multiprocessors
        launch(
            "step/scan.cu",
            "scan",
            (scanners,),
            (32 * SCAN_WARPS,),
            arguments=dict(
                codes=state.codes,
                planes=self._planes,
                sums=self._sums,
                queries=queries,
                units=self._units,
                weight_scale=state.weight_scale,
                factors=self._factors,
                valid=state.valid,
                length=state.length,
                thresholds=self._thresholds,
                bases=self._bases,
                shifts=self._shifts,
                scales=self._scales,
                seeds=self._seeds,
                counts=self.counts,
                list=self._list,
                histogram=self._hist,
                products=self._products,
                signals=self._signals,
                row=row,
                head_bytes=L.head_bytes,
                capacity=self.capacity,
                groups=groups,
                kv_heads=kv,
            ),
            shared_bytes=SCAN_WARPS * SCAN_STAGES * self._stage(),
            overlap=True,
            **self._votes,
        )
        self._signalers = min(self._rerank_splits, -(-self.capacity // 128))
        launch(
            "step/rerank.cu",
            "rerank",
            (self._signalers, groups),
            (256,),
            arguments=dict(
                codes=state.codes,
                operands=self._operands,
                ups=self._ups,
                products=self._products,
                levels=self._levels,
                wanted=state.wanted,
                counted=state.counted,
                bases=self._bases,
                shifts=self._shifts,
                counts=self.counts,
                list=self._list,
                histogram=self._hist,
                candidates=self._candidates,
                candidate_counts=self._candidate_counts,
                estimates=self._estimates,
                buckets=self._buckets,
                edge=self._edge,
                edge_estimates=self._edge_estimates,
                edge_counts=self._edge_counts,
                cuts=self._cuts,
                thresholds=self._thresholds,
                scales=self._scales,
                seeds=self._seeds,
                planes=self._planes,
                sums=self._sums,
                queries=queries,
                units=self._units,
                weight_scale=state.weight_scale,
                factors=self._factors,
                valid=state.valid,
                length=state.length,
                signals=self._signals,
                row=row,
                head_bytes=L.head_bytes,
                logs=L.logs,
                magnitudes=L.magnitudes,
                scanners=SCAN_WARPS * scanners,
                capacity=self.capacity,
                kv_heads=kv,
                scale=self._scale,
                softcap=self._softcap,
            ),
            overlap=True,
            **self._rerank,
        )
        self._select_rows(state)

    def _stage(self) -> int:
        """Bytes of a block that `scan` copies to shared memory."""
        L = self.layout
        scanned = L.center + (2 * L.head_dim if self._votes["CENTERED"] else 0)
        return -(-scanned // 128) * 128
