"""One decoding step of one layer, from query to attention output, in 5 launches.

    ask -> scan -> rerank -> agree -> attend

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
from kvindex.ops import transform
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.base_step import BaseStep, State
from kvindex_cuda.runtime.launch import launch

SAMPLED, WARPS, STAGES = 4096, 8, 2
"""As in the kernels' sources."""

PLANES = {4: 5, 6: 21, 8: 85}
"""Digits to the base -2 and the largest number that they hold of either sign (`votes.cuh`)."""


class Step(BaseStep):
    """Buffers and launches of a step for a batch of `B` rows.

    most: the largest `C` that `State.wanted` will hold; seed, query_max, policy: as
    `ParisKVConfig`; centered: whether blocks hold centers. Raises ValueError for what the kernels
    do not serve.
    """

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        most: int,
        seed: int = 0,
        query_max: int = 21,
        centered: bool = True,
        **options: Any,
    ) -> None:
        capacity = 4 * (most + SAMPLED)  # `rerank` serves what is more
        super().__init__(geometry, layout, most=most, capacity=capacity, **options)
        g, group, groups, device = geometry, geometry.group_size, self._groups, geometry.device
        self._query_max = min(query_max, 2**15 // g.head_dim)
        planes = next((digits for digits, most in PLANES.items() if self._query_max <= most), None)
        if planes is None:
            most = PLANES[max(PLANES)]
            raise ValueError(f"query_max: got {self._query_max}, allowed is up to {most}")
        self._votes = self._defines | dict(CENTERED=int(centered), PLANES=planes)
        self._rerank = self._votes | self._softcap | dict(BITS=layout.magnitude_bits)
        self._level = reference.lloyd_max(g.head_dim, 0)[0]
        odd = g.head_dim // (g.head_dim & -g.head_dim)
        angles = torch.arange(odd, dtype=torch.float64) * (2 * math.pi / odd)
        waves = (angles.cos() + angles.sin()).float().to(device)
        self._turn = torch.cat([transform.rotation(g.head_dim, seed, device)[0], waves])
        self._levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        self._factors = reference.log_factors(16, device)
        quads, sets, parts = -(-(layout.stride // 4) // 4), -(-group // 4), 1 if group <= 4 else 2

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        # of `ask`
        self._planes = ints(groups, sets, quads, planes // 2, 32)
        self._sums, self._units = ints(groups, 4 * sets), floats(groups, 4 * sets)
        self._operands = ints(groups, -(-group // 8), quads, 8, 32, parts, 2)  # 0 for no head
        self._ups = floats(groups, group)
        self._sample, self._asked = ints(groups, SAMPLED), ints(groups)
        self._thresholds = ints(groups)
        # of `scan`
        self._products: Tensor | None = None
        self._list = torch.empty((groups, self.capacity), dtype=torch.int64, device=device)

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, kv = self.geometry, self.layout, self.geometry.kv_heads
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        groups, row = self._groups, state.codes.shape[1]
        if self._products is None or self._products.shape[1] != row:
            shape = (groups, row, g.group_size)
            self._products = torch.empty(shape, device=g.device)
        codes, keys = (state.codes, row, L.head_bytes), (state.valid, state.length)
        limits = state.wanted, state.counted
        launch(
            "step/prepare_query.cu",
            "prepare_query",
            (max(1, min(16, 2 * self._multiprocessors // groups)), groups),
            (256,),
            *(queries, self._turn, state.weight_scale, *codes, *keys, *limits),
            self._factors,
            *(self._planes, self._sums, self._units, self._operands, self._ups),
            *(self._sample, self._asked, self._thresholds, self._bases, self._shifts),
            *(self._cleared, len(self._cleared), state.wrong, self._query_max, self._level),
            *(float(reference.FACTOR), kv),
            overlap=True,
            **self._votes,
        )
        query = (self._planes, self._sums, queries, self._units, self._factors)
        scanners = (1 if g.head_dim > 128 else 2) * self._multiprocessors
        launch(
            "step/scan.cu",
            "scan",
            (scanners,),
            (32 * WARPS,),
            *(*codes, *query, *keys, self._thresholds, self._bases, self._shifts),
            *(self.counts, self._list, self._hist, self._products, self._told),
            *(self.capacity, groups, kv),
            shared_bytes=WARPS * STAGES * self._stage(),
            overlap=True,
            **self._votes,
        )
        listed = (self._bases, self._shifts, self.counts, self._list, self._hist)
        softcap = g.softcap if g.softcap is not None else 0.0
        splits = max(1, 2 * self._multiprocessors // groups)
        self._tellers = min(splits, -(-self.capacity // 128))
        launch(
            "step/rerank.cu",
            "rerank",
            (self._tellers, groups),
            (256,),
            *(*codes, L.logs, L.magnitudes, self._operands, self._ups, self._products),
            *(self._levels, state.weight_scale, *limits, *listed, self._kept, self._many),
            *(self._estimates, self._buckets, self._edge, self._edge_estimates, self._edges),
            self._cuts,
            *(*query, *keys, self._told, WARPS * scanners, self.capacity, kv, g.scale, softcap),
            float(reference.OCTAVES),
            overlap=True,
            **self._rerank,
        )
        self._agree(state)

    def _stage(self) -> int:
        """Bytes of a block that `scan` copies to shared memory."""
        L = self.layout
        scanned = L.center + (2 * L.head_dim if self._votes["CENTERED"] else 0)
        return -(-scanned // 128) * 128
