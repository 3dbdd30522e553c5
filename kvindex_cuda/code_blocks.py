"""Codes in blocks that never move: `Columns` for an index whose kernels follow a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy

import torch
from torch import Tensor

from kvindex_cuda.layout import BLOCK, MAX_TOKENS, Layout

SLAB_BYTES = 64 * 2**20
"""The most that one allocation takes ahead of need."""

NAMES = ("signs", "magnitudes", "weights", "fractions")


class CodeBlocks:
    """Codes of `ParisKV` with one 16-bit log weight per key, in blocks of 256 tokens.

    The interface of `kvindex.columns.Columns`; a column is put together when it is asked for.
    table: addresses of blocks, int64 `[B, S]`, 0 where there is none: the same tensor for as long
    as `B` stays. Raises ValueError beyond `max_tokens`.
    """

    def __init__(
        self, layout: Layout, kv_heads: int, device: torch.device, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.layout, self._heads, self._device = layout, kv_heads, device
        self._most = -(-max_tokens // BLOCK)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._slabs: list[Tensor] = []  # uint8 [blocks, G, head_bytes] each
        self._free: list[tuple[int, int]] = []  # (slab, block), the next to be taken last
        self._held: list[list[tuple[int, int]]] = []  # of each row of the batch, in order
        self._length = 0
        self.table = torch.zeros((0, self._most), dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES if self._held else ())

    def __contains__(self, name: str) -> bool:
        return name in tuple(self)

    def __getitem__(self, name: str) -> Tensor:
        """A copy of the column, `[B, G, N, ...]`."""
        field = {"fractions": "logs"}.get(name, name)
        rows = []
        for held in self._held:
            blocks = [self._fields(*at)[field] for at in held[: -(-self._length // BLOCK)]]
            rows.append(torch.cat(blocks, dim=1)[:, : self._length])
        column = torch.stack(rows)
        return column[..., :1] if name == "fractions" else column

    def reserve(self, new: Mapping[str, Tensor]) -> None:
        """Make room for `new`. May run out of memory; what is held stays as it was."""
        if not new:
            return
        batch, count = new["signs"].shape[0], new["signs"].shape[2]
        need = -(-(self._length + count) // BLOCK)
        if need > self._most:
            got, allowed = self._length + count, self._most * BLOCK
            raise ValueError(f"max_tokens: got {got} tokens, allowed are {allowed}")
        if not self._length and batch != len(self._held):
            self.reset()
            table = torch.zeros((batch, self._most), dtype=torch.int64, device=self._device)
            self._held, self.table = [[] for _ in range(batch)], table
        missing = sum(max(need - len(held), 0) for held in self._held) - len(self._free)
        if missing > 0:
            self._grow(missing)
        for row, held in enumerate(self._held):
            first = len(held)
            while len(held) < need:
                held.append(self._free.pop())
            if len(held) > first:
                addresses = [self._address(*at) for at in held[first:]]
                self.table[row, first : len(held)] = torch.tensor(addresses, device=self._device)

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Append codes that agree with the columns in all but the token axis."""
        if not new:
            return
        self.reserve(new)
        parts = dict(new)
        parts["logs"] = torch.cat([parts.pop("fractions"), parts["weights"]], dim=-1)
        count, start = new["signs"].shape[2], self._length
        for row, held in enumerate(self._held):
            for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
                first, last = max(start, block * BLOCK), min(start + count, (block + 1) * BLOCK)
                fields = self._fields(*held[block])
                inside = slice(first - block * BLOCK, last - block * BLOCK)
                for name, part in parts.items():
                    fields[name][:, inside] = part[row, :, first - start : last - start]
        self._length += count

    def put_centres(self, centres: Tensor, first: int) -> None:
        """Write centres bfloat16 `[B, G, S, D]` into the blocks from `first` on."""
        raw = centres.contiguous().view(torch.uint8)
        raw = raw.view(*centres.shape, 2)
        for row, held in enumerate(self._held):
            for block in range(first, centres.shape[2]):
                self._fields(*held[block])["centre"].copy_(raw[row, :, block])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; blocks stay with their rows."""
        self._length = min(self._length, length)

    def reordered(self, batch_indices: Tensor) -> CodeBlocks:
        """A copy in which row `b` is row `batch_indices[b]` of this."""
        other = CodeBlocks(self.layout, self._heads, self._device, self._most * BLOCK)
        order = batch_indices.tolist()
        other._held = [[] for _ in order]
        other.table = torch.zeros((len(order), self._most), dtype=torch.int64, device=self._device)
        blocks = -(-self._length // BLOCK)
        if blocks:
            other._grow(blocks * len(order))
        for row, source in enumerate(order):
            for at in self._held[source][:blocks]:
                place = other._free.pop()
                other._slabs[place[0]][place[1]] = self._slabs[at[0]][at[1]]
                other._held[row].append(place)
            addresses = [other._address(*at) for at in other._held[row]]
            other.table[row, :blocks] = torch.tensor(
                addresses, dtype=torch.int64, device=self._device
            )
        other._length = self._length
        return other

    def repeated(self, count: int) -> CodeBlocks:
        """A view of a batch of 1 as one of `count`; it cannot be appended to."""
        view = copy(self)
        view._held = self._held * count
        view.table = self.table.expand(count, -1).contiguous()
        return view

    def nbytes(self) -> int:
        """Bytes in use: what tokens take up, without the centres and what is not filled yet."""
        bits, stride = self.layout.magnitude_bits, self.layout.stride
        return len(self._held) * self._heads * self._length * (stride * (1 + bits) + 3)

    def _fields(self, slab: int, block: int) -> dict[str, Tensor]:
        return self.layout.views(self._slabs[slab][block])

    def _address(self, slab: int, block: int) -> int:
        return self._slabs[slab][block].data_ptr()

    def _grow(self, blocks: int) -> None:
        """Room for at least `blocks` more, as many again as there are up to `SLAB_BYTES`."""
        block_bytes = self._heads * self.layout.head_bytes
        held = sum(len(slab) for slab in self._slabs)
        count = max(blocks, min(held, SLAB_BYTES // block_bytes))
        shape = (count, self._heads, self.layout.head_bytes)
        self._slabs.append(torch.zeros(shape, dtype=torch.uint8, device=self._device))
        number = len(self._slabs) - 1
        self._free = [(number, block) for block in reversed(range(count))] + self._free
