"""Decode steps of several tokens of one sequence with full attention, which verify drafted tokens.

The tokens are appended to the rows of sink and window, and attend to them and to all rows of the
index. The kernels read all counts on the device, so a caller can capture the step in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Rows
from kvindex.core.resident import ResidentRows
from kvindex.storage.store import AddressedRows
from kvindex_cuda.pariskv.append.stage_token import load_stage_token, stage_token


class AllRows:
    """Runs decode steps of `count` tokens with full attention.

    Args:
        geometry: Geometry of the index.
        count: Number of tokens of a step, `T`.
    """

    def __init__(self, geometry: Geometry, count: int) -> None:
        self._geometry = geometry
        counts: dict[str, Any] = dict(dtype=torch.int64, device=geometry.device)
        self._visible = torch.zeros(count, **counts)  # resident rows that each token attends to
        self._found = torch.zeros(count, geometry.kv_heads, **counts)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=geometry.device)
        self._made_of: tuple[object, ...] = ()
        self._reads: object = None
        self._skip = 0
        self._rows: AddressedRows
        self._length: Tensor
        self._place: Tensor  # address of the resident rows, int64 [1, 1]
        load_stage_token(geometry)  # a kernel cannot be loaded during a capture

    def prepare(
        self, rows: AddressedRows, length: Tensor, resident: ResidentRows, skip: int
    ) -> object:
        """Prepare the capture or a replay of a step on the current stream.

        Args:
            rows: The rows of the index.
            length: Number of tokens in the index, int64 `[1]`.
            resident: The rows of sink and window.
            skip: Number of rows of the sink, which are also in the index.

        Returns:
            An object that stands for the addresses that the step reads. A captured graph may be
            replayed as long as this is the same object.
        """
        made_of = rows, rows.table, length, resident, resident.rows, skip
        same = len(made_of) == len(self._made_of)
        if not same or any(old is not new for old, new in zip(self._made_of, made_of, strict=True)):
            self._made_of = ()  # until all attributes are set
            self._rows, self._length, self._skip = rows, length, skip
            address = [[resident.rows.data_ptr()]]
            self._place = torch.tensor(address, device=self._geometry.device)
            self._reads, self._made_of = object(), made_of
        return self._reads

    def step(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Append the tokens to the resident rows, and attend to all rows.

        Args:
            queries: `[T, H, D]`.
            tokens: Keys `[T, G, 1, D]` and values `[T, G, 1, Dv]`.
            resident: The rows that were passed to `prepare`.

        Returns:
            Attention. The numbers of found rows are 0, because no search was run.

        Raises:
            RuntimeError: `prepare` was not called for these rows.
        """
        from kvindex_cuda.triton.pages import Newest, attend_pages  # Triton is optional

        if not self._made_of or self._made_of[3] is not resident:
            raise RuntimeError("graph: call prepare_all() before captured_all()")
        g, rows = self._geometry, self._rows
        parts: dict[str, Tensor] = dict(ticket=self._ticket, counts=self._visible)
        stage_token(resident, tokens, None, queries, **parts)
        output, lse = attend_pages(
            queries.transpose(0, 1)[None].contiguous(),
            rows.table,
            self._length,
            kv_heads=g.kv_heads,
            value_dim=g.value_dim,
            scale=g.scale,
            row_bytes=rows.row_bytes,
            head_bytes=rows.head_bytes,
            page_tokens=rows.page_tokens,
            causal=False,
            newest=Newest(self._place, resident.count, resident.rows, self._skip),
        )
        return Attended(output[0].transpose(0, 1), lse[0].T, self._found)
