"""One stage: all keys are reranked, in 4 launches (the preset `scan`).

    turn -> all -> agree -> attend

One 16-bit log weight per key. What it reads, 67 bytes of each key at D = 128 and 3 bits, grows with
the length, and it has one launch fewer than two stages (`Step`): docs/cuda.md says up to which
length that is worth it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import transform
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.base_step import BaseStep, State
from kvindex_cuda.runtime.launch import launch

CUT = 1
"""The bin below that of all entries (`VOTE` in all.cu): none of them is at the cut."""


class OneStage(BaseStep):
    """Buffers and launches of a step that estimates all keys.

    most: tokens that there is room for, 32 bytes for each and KV head at 4 heads; those past it
    are not seen. seed, centered: as for `Step`.
    """

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        most: int,
        seed: int = 0,
        centered: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(geometry, layout, most=most, capacity=most, **options)
        g, group, device = geometry, geometry.group_size, geometry.device
        self._cuts[:, 0] = CUT
        self._rotation = transform.rotation(g.head_dim, seed, device)
        self._levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        quads, folded = -(-layout.stride // 16), group <= 4
        shape = (self._groups, -(-group // 8), quads, 8, 32, 4 if folded else 8)
        self._operands = torch.zeros(shape, dtype=torch.int16, device=device)
        self._ups = torch.empty((self._groups, group), device=device)
        self._all = self._defines | self._softcap | dict(BITS=layout.magnitude_bits)
        self._all["CENTERED"] = int(centered)

    @property
    def listed(self) -> Tensor:
        """As `BaseStep.listed`: all keys."""
        return self._many

    def select(self, queries: Tensor, state: State) -> None:
        """As `BaseStep.select`."""
        g, L, kv, groups = self.geometry, self.layout, self.geometry.kv_heads, self._groups
        launch(
            "step/query_table.cu",
            "query_table",
            (g.head_dim // 8, g.group_size, groups),
            (256,),
            *(queries, self._rotation, None, None, None, self._operands, self._ups, None, None),
            *(self._cleared, len(self._cleared), state.wrong, 0, 0.0, 0.0, kv),
            overlap=True,
            **(self._defines | dict(TABLE=0)),
        )
        softcap = g.softcap if g.softcap is not None else 0.0
        splits = max(1, 2 * self._multiprocessors // groups)
        launch(
            "step/all.cu",
            "all",
            (min(splits, -(-self.capacity // 512)), groups),
            (256,),
            *(queries, state.codes, state.codes.shape[1], L.head_bytes, L.logs, L.magnitudes),
            *(L.center, self._operands, self._ups, self._levels, state.weight_scale, state.valid),
            *(state.length, self._kept, self._estimates, self._many, self.counts, self._buckets),
            *(self.capacity, kv, g.scale, softcap, float(reference.OCTAVES)),
            overlap=True,
            **self._all,
        )
        self._agree(state)
