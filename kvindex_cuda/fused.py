"""ParisKV on its kernels: codes in blocks, and searches that no code leaves the device for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvindex.protocol import UNUSED, Hits, Rows
from kvindex_cuda.code_blocks import CodeBlocks
from kvindex_cuda.host_store import HostStore
from kvindex_cuda.layout import BLOCK, Layout
from kvindex_cuda.step import MOST_HEADS, State, Step, words_of

SERVED = dict(coarse="dots", weights="log", weight_bits=16, block="key", lists="group")
"""Of `ParisKVConfig`, what the fused kernels are for: `fast` and `precise`, one list per group."""


def serves(index: Any) -> bool:
    """Whether the fused kernels serve this ParisKV; else its ops run one by one."""
    config, g = index.config, index.geometry
    return (
        all(getattr(config, name) == value for name, value in SERVED.items())
        and config.group in ("mean_share", "max_share")
        and config.centre in (0, BLOCK)
        and g.group_size <= MOST_HEADS
        and g.head_dim % 8 == 0
    )


class Fused:
    """What `ParisKV` keeps beside its codes when its kernels are fused.

    codes: takes the place of the index's `Columns`.
    """

    def __init__(self, index: Any) -> None:
        self._geometry, self._config = index.geometry, index.config
        self._layout = Layout(index.geometry.head_dim, index.config.magnitude_bits)
        self.codes = CodeBlocks(self._layout, index.geometry.kv_heads, index.geometry.device)
        self._steps: dict[tuple[int, int], Step] = {}  # by batch and k
        self._state: tuple[Any, dict[str, Any]] | None = None
        self._length = 0

    def changed(self, index: Any) -> None:
        """Tokens came or went: new segments' centres go to their blocks."""
        first = min(self._length, len(index)) // BLOCK
        self._state, self._length = None, len(index)
        if "centres" in index._learnt and self._length:
            index._codes.put_centres(index._learnt["centres"], first)

    def cleared(self) -> None:
        """Everything was forgotten."""
        self._state, self._length = None, 0

    def search(self, index: Any, queries: Tensor, k: int) -> Hits:
        """As `ParisKV.search`: the group's candidates, reranked, the best `k`."""
        step, state = self._step(index, len(queries), k), self._of(index, k)
        step.select(queries.contiguous(), state)
        g = self._geometry
        place = torch.arange(step.capacity, device=g.device)
        real = (place < step.counts[:, None]) & (step.shares > float("-inf"))
        # shares descending, then ids ascending, as one integer
        bits = (step.shares + 0.0).view(torch.int32)
        order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | step.list & 0xFFFFFFFF
        order = order.masked_fill(~real, torch.iinfo(torch.int64).min)
        width = min(k, step.capacity)
        best, at = order.topk(width, dim=-1)
        missing = best == torch.iinfo(torch.int64).min
        ids = (0xFFFFFFFF - (best & 0xFFFFFFFF)).masked_fill(missing, UNUSED)
        scores = step.shares if g.group_size > 1 else step.estimates[..., 0]
        scores = scores.gather(-1, at).masked_fill(missing, float("-inf"))
        shape, pad = (len(queries), g.kv_heads, width), (0, k - width)
        return Hits(
            torch.nn.functional.pad(ids.view(shape), pad, value=UNUSED),
            torch.nn.functional.pad(scores.view(shape), pad, value=float("-inf")),
        )

    def attend(
        self, index: Any, queries: Tensor, near: Rows, shown: Tensor, k: int
    ) -> tuple[Tensor, Hits]:
        """As `BaseIndex.attend`."""
        device, batch = self._geometry.device, len(queries)
        step, state = self._step(index, batch, k), self._of(index, k)
        table, row_head, row_bytes = self._rows(index)
        rows = torch.cat([near.keys, near.values], dim=-1)
        state = replace(
            state,
            rows=table,
            row_head=row_head,
            row_bytes=row_bytes,
            near=rows,
            shown=shown.to(torch.uint8),
            held=torch.tensor([rows.shape[2]], device=device),
        )
        output = step(queries.contiguous(), state, ids=True)
        used = torch.arange(k, device=device) < step.found[:, None]
        ids = step.ids.masked_fill(~used, UNUSED).view(batch, -1, k)
        return output.clone(), Hits(ids, torch.zeros(ids.shape, device=device))

    def _rows(self, index: Any) -> tuple[Tensor, int, int]:
        """Addresses of blocks of rows, bytes from head to head in them, and of a row."""
        store = index._store
        if not isinstance(store, HostStore):
            found: tuple[Tensor, int, int] = store.table(BLOCK)
            return found
        store.wait()
        return store.table, BLOCK * store.row_bytes, store.row_bytes

    def _step(self, index: Any, batch: int, k: int) -> Step:
        """Buffers for this batch and `k`, made anew where candidates have outgrown them."""
        most = int(index._limits(k)[1].max())
        step = self._steps.get((batch, k))
        if step is None or step.most < most:
            device = self._geometry.device
            count = 4
            if device.type == "cuda":
                count = torch.cuda.get_device_properties(device).multi_processor_count
            step = Step(
                self._geometry,
                self._layout,
                batch=batch,
                k=k,
                most=2 * most,
                seed=self._config.seed,
                largest=self._config.largest,
                policy=self._config.group,
                centred=bool(self._config.centre),
                multiprocessors=count,
            )
            self._steps[batch, k] = step
        return step

    def _of(self, index: Any, k: int) -> State:
        """What a search reads, made anew when the index has changed."""
        device, blocks = self._geometry.device, -(-len(index) // BLOCK)
        if self._state is None or self._state[0] is not index._codes:
            flags = index.valid
            if flags is None:
                shape = (index._batch, len(index))
                flags = torch.ones(shape, dtype=torch.bool, device=device)
            self._state = (
                index._codes,
                {
                    "codes": index._codes.table[:, :blocks].contiguous(),
                    "valid": words_of(flags, blocks),
                    "length": torch.tensor([len(index)], device=device),
                    "counted": index.counts.int().to(device),
                    "reference": index._learnt["reference"].contiguous(),
                },
            )
        wanted = index._limits(k)[1].int().to(device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return State(
            **self._state[1],
            wanted=wanted,
            rows=none,
            near=none,
            shown=none,
            held=none,
            row_bytes=0,
        )


def fused(index: Any) -> Fused | None:
    """The fused kernels for a ParisKV, where they serve it."""
    return Fused(index) if serves(index) else None
