"""A store for rows (keys and values) in torch tensors, which compiled kernels read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvindex.core.protocol import Attended, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu import threads, views
from kvindex.cpu.attend_rows import attending
from kvindex.cpu.fetch import gather_rows
from kvindex.cpu.state import ResidentState, addresses
from kvindex.storage.store import TensorStore

MOST_TOKENS = 8
"""Number of tokens for which `attend_all` is faster than torch's attention to copied rows."""


class CompiledStore(TensorStore):
    """A `TensorStore` whose rows are gathered by a compiled kernel.

    If rows are not quantized, another kernel computes attention over the rows directly
    (`AttendsToRows`, `AttendsToAllRows`).
    """

    _resident_state: ResidentState | None = None
    _no_resident: tuple[ResidentRows, ResidentState] | None = None

    @property
    def attends(self) -> bool:
        """True if the rows are not quantized, so that `attend` is supported."""
        return self.row_codec == "plain"

    def gather(self, ids: Tensor) -> Rows:
        """Return the keys and values of the tokens `ids`."""
        return (
            self._decoded(gather_rows(self._columns["rows"], ids), ids)
            if len(self)
            else super().gather(ids)
        )

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens per sequence that `attend_all` supports; 0 if rows are quantized
        or logits have a softcap."""
        return MOST_TOKENS if self.attends and self._geometry.softcap is None else 0

    def attend_all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with queries `[B, H, T, D]` to all rows, which are read where they are. Return
        outputs `[B, H, T, Dv]` and log-sum-exp values, float32 `[B, H, T]`."""
        g, (batch, heads, count, D) = self._geometry, queries.shape
        folded = views.array(queries.float(), batch * g.kv_heads, g.group_size * count, D)
        ids = np.broadcast_to(np.arange(len(self)), (len(folded), len(self))).copy()
        if self._no_resident is None or self._no_resident[0].batch != batch:
            none = ResidentRows(g, batch, 1)
            self._no_resident = none, ResidentState.of(none, None)
        most = views.parts(folded.size * len(self), len(folded))
        lie = addresses(self.contiguous_rows()), self.row_bytes
        output, lse, part = attending(g, *lie, most, folded, ids, None, *self._no_resident)
        threads.run(part, most)
        shape = batch, heads, count
        return (
            torch.from_numpy(output).view(*shape, -1).to(g.dtype),
            torch.from_numpy(lse).view(shape),
        )

    def attend(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Compute attention over the rows that a search selected, and over those in `resident`."""
        g, (batch, heads, D) = self._geometry, queries.shape
        folded = views.array(queries.float(), batch * g.kv_heads, g.group_size, D)
        ids = views.array(hits.ids, len(folded), hits.ids.shape[-1])
        rows, resident_state = self.contiguous_rows(), self._resident_state
        self._resident_state = resident_state = ResidentState.of(resident, resident_state)
        most = views.parts(folded.size * (ids.shape[1] + len(resident)), len(folded))
        lie = addresses(rows), self.row_bytes
        output, lse, part = attending(
            g, *lie, most, folded, ids, hits.log_weight, resident, resident_state
        )
        threads.run(part, most)
        return Attended(
            torch.from_numpy(output).view(batch, heads, -1).to(g.dtype),
            torch.from_numpy(lse).view(batch, heads),
            torch.from_numpy((ids >= 0).sum(1, dtype=np.int32)).view(batch, -1),
        )
