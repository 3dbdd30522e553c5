"""Decode steps of several tokens of each sequence with full attention, which verify drafted tokens.

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
        count: Number of tokens of each sequence in a step, `T`.
        sequences: Number of sequences, `B`.
    """

    def __init__(self, geometry: Geometry, count: int, sequences: int = 1) -> None:
        self._geometry, self._sequences, tokens = geometry, sequences, sequences * count
        counts: dict[str, Any] = dict(dtype=torch.int64, device=geometry.device)
        self._visible = torch.zeros(tokens, **counts)  # resident rows that each token attends to
        self._found = torch.zeros(tokens, geometry.kv_heads, **counts)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=geometry.device)
        self._made_of: tuple[object, ...] = ()
        self._reads: object = None
        self._skip = 0
        self._rows: AddressedRows
        self._length: Tensor
        self._valid: Tensor | None = None
        self._place: Tensor  # address of each sequence's resident rows, int64 [B, 1]
        load_stage_token(geometry)  # a kernel cannot be loaded during a capture

    def prepare(
        self,
        rows: AddressedRows,
        length: Tensor,
        resident: ResidentRows,
        skip: int,
        valid: Tensor | None = None,
    ) -> object:
        """Prepare the capture or a replay of a step on the current stream.

        Args:
            rows: The rows of the index.
            length: Number of tokens in the index, int64 `[1]`.
            resident: The rows of sink and window.
            skip: Number of rows at the beginning of `resident` that are also read from the index.
            valid: One bit per token of the index, int32 `[B, S, 8]`: 1 for rows to attend to. The
                mask of `resident` then applies, too. None to attend to all rows.

        Returns:
            An object that stands for the addresses that the step reads. A captured graph may be
            replayed as long as this is the same object.
        """
        made_of = rows, rows.table, length, resident, resident.rows, skip, valid
        same = len(made_of) == len(self._made_of)
        if not same or any(old is not new for old, new in zip(self._made_of, made_of, strict=True)):
            self._made_of = ()  # until all attributes are set
            self._rows, self._length, self._skip, self._valid = rows, length, skip, valid
            parts, size = range(self._sequences), resident.rows[0].nbytes
            addresses = [[resident.rows.data_ptr() + size * b] for b in parts]
            self._place = torch.tensor(addresses, device=self._geometry.device)
            self._reads, self._made_of = object(), made_of
        return self._reads

    def step(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Append the tokens to the resident rows, and attend to all rows.

        Args:
            queries: `[B·T, H, D]`, the `T` tokens of each sequence after each other.
            tokens: Keys `[B·T, G, 1, D]` and values `[B·T, G, 1, Dv]`.
            resident: The rows that were passed to `prepare`.

        Returns:
            Attention. The numbers of found rows are 0, because no search was run.

        Raises:
            RuntimeError: `prepare` was not called for these rows.
        """
        from kvindex_cuda.triton.pages import Newest, attend_pages  # Triton is optional

        if not self._made_of or self._made_of[3] is not resident:
            raise RuntimeError("graph: call prepare_all() before captured_all()")
        g, rows, B, valid = self._geometry, self._rows, self._sequences, self._valid
        shown = None if valid is None else resident.mask
        parts: dict[str, Tensor] = dict(ticket=self._ticket, counts=self._visible)
        stage_token(resident, tokens, None, queries, **parts)
        output, lse = attend_pages(
            queries.reshape(B, -1, *queries.shape[1:]).transpose(1, 2),
            rows.table,
            self._length.expand(B),
            kv_heads=g.kv_heads,
            value_dim=g.value_dim,
            scale=g.scale,
            row_bytes=rows.row_bytes,
            head_bytes=rows.head_bytes,
            page_tokens=rows.page_tokens,
            causal=False,
            valid=None if valid is None else valid.flatten(1),
            newest=Newest(self._place, resident.count.expand(B), resident.rows, self._skip, shown),
        )
        # [B, H, T, ...] -> [B·T, H, ...], without copies
        output, lse = (part.transpose(1, 2).flatten(0, 1) for part in (output, lse))
        return Attended(output, lse, self._found)
