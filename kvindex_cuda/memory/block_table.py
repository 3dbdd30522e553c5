"""Block table: which block of memory holds which tokens' rows, as kernels follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.slab_pool import Pool


class BlockTable:
    """Blocks `[G, 256, row_bytes]` of one batch row each, in the order of their tokens.

    addresses: of blocks, for kernels: int64 `[B, S]` on the compute device, `S` blocks of
    `max_tokens`; 0 where there is none. The same tensor for as long as `B` stays.
    """

    def __init__(self, geometry: Geometry, row_bytes: int, max_tokens: int, pool: Pool) -> None:
        self._pool, self._device = pool, geometry.device
        self._heads, self._row_bytes = geometry.kv_heads, row_bytes
        self._max_tokens = max_tokens
        self.addresses, self._numbers = self._empty(0)

    @property
    def batch(self) -> int:
        """`B`, 0 before there is room."""
        return self._numbers.shape[0]

    @property
    def full(self) -> bool:
        """Whether there is room for `max_tokens`."""
        return self._numbers.shape[1] == self.addresses.shape[1]

    def spare(self, length: int) -> int:
        """Blocks held for tokens that come after the first `length`."""
        return self.batch * (self._numbers.shape[1] - -(-length // BLOCK))

    def room(self, batch: int, length: int, count: int) -> None:
        """Make room for `count` tokens after `length` others of a batch of `batch`.

        Raises ValueError beyond `max_tokens` or for another batch than that of the others, and as
        `Pool.take`; then the blocks are the same as before.
        """
        if length + count > self._max_tokens:
            raise ValueError(
                f"max_tokens: got {length + count} tokens, allowed are {self._max_tokens}"
            )
        if self.batch != batch:
            if length:
                raise ValueError(f"rows: got a batch of {batch}, allowed is {self.batch}")
            held = self._numbers.flatten().tolist()  # nothing is in them
            self.addresses, self._numbers = self._empty(batch)
            self._pool.give(held)
        before = self._numbers.shape[1]
        more = -(-(length + count) // BLOCK) - before
        if more <= 0:
            return
        taken = self._pool.take(batch * more)
        try:
            new = torch.tensor(taken).view(batch, more)
            numbers = torch.cat([self._numbers, new], dim=1)
            for row, blocks in enumerate(new.tolist()):
                self._name(self.addresses[row, before : before + more], blocks)
        except BaseException:
            self._pool.give(taken)
            raise
        self._numbers = numbers

    def read(self, ids: Tensor) -> Tensor:
        """Bytes `[B, G, K, row_bytes]` of tokens int64 `[B, G, K]`, on the CPU; -1: zeros."""
        rows = torch.zeros((*ids.shape, self._row_bytes), dtype=torch.uint8)
        b, g, k = (ids > UNUSED).nonzero(as_tuple=True)
        token = ids[b, g, k]
        number = self._numbers[b, token // BLOCK]
        slabs, inside = number // self._pool.slab_blocks, number % self._pool.slab_blocks
        for slab in slabs.bincount().nonzero().flatten().tolist():
            (of,) = (slabs == slab).nonzero(as_tuple=True)
            rows[b[of], g[of], k[of]] = self._slab(slab)[inside[of], g[of], token[of] % BLOCK]
        return rows

    def pieces(self, parts: Iterable[Tensor], start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Where bytes of the tokens from `start` on go, as views: pairs of (host, one of `parts`).

        parts: in order, blocks `[B, S, G, 256, row_bytes]` that are filled whole, and other rows
        `[B, G, n, row_bytes]`. Both of a pair are uint8 `[h, w]` with contiguous rows: blocks that
        follow one another (`h` is 1), or the heads of what comes into one block.
        """
        for part in parts:
            if part.ndim == 5:
                yield from self._whole(part, start // BLOCK)
                start += part.shape[1] * BLOCK
                continue
            end = start + part.shape[2]
            while start < end:
                slot, offset = divmod(start, BLOCK)
                count = min(BLOCK - offset, end - start)
                for b, new in enumerate(part[:, :, part.shape[2] - (end - start) :][:, :, :count]):
                    to = self._block(int(self._numbers[b, slot]))[:, offset : offset + count]
                    yield to.view(len(new), -1), new.view(len(new), -1)
                start += count

    def _whole(self, blocks: Tensor, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `pieces`, of blocks `[B, S, G, 256, row_bytes]` from `slot` on."""
        for b, new in enumerate(blocks):
            numbers = self._numbers[b, slot : slot + len(new)].tolist()
            for at, length in runs(numbers, self._pool.slab_blocks):
                slab, inside = divmod(numbers[at], self._pool.slab_blocks)
                target = self._slab(slab)[inside : inside + length]
                yield target.view(1, -1), new[at : at + length].view(1, -1)

    def copy_from(self, other: BlockTable, batch_indices: Tensor) -> None:
        """Fill row `b` with the blocks of row `batch_indices[b]` of another, as many as fit."""
        sources = other._numbers[batch_indices.cpu(), : self._numbers.shape[1]]
        for to, come in zip(self._numbers.flatten(), sources.flatten(), strict=True):
            self._block(int(to)).copy_(other._block(int(come)))

    def expand_batch(self, count: int) -> BlockTable:
        """A view of a batch of 1 as one of `count`, to read."""
        view = copy(self)
        view.addresses = self.addresses.expand(count, -1)
        view._numbers = self._numbers.expand(count, -1)
        return view

    def _empty(self, batch: int) -> tuple[Tensor, Tensor]:
        """Addresses, and numbers of blocks in the pool, int64 `[B, blocks held]` on the CPU."""
        shape = (batch, -(-self._max_tokens // BLOCK))
        addresses = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return addresses, torch.zeros((batch, 0), dtype=torch.int64)

    def _name(self, places: Tensor, blocks: list[int]) -> None:
        """Put addresses of blocks into places int64 `[n]`; neither pins memory nor waits."""
        size = self._pool.block_bytes
        for at, length in runs(blocks, self._pool.slab_blocks):
            first = self._pool.device_address(blocks[at])
            torch.arange(first, first + length * size, size, out=places[at : at + length])

    def _block(self, number: int) -> Tensor:
        """Uint8 `[G, 256, row_bytes]`."""
        return self._slab(number // self._pool.slab_blocks)[number % self._pool.slab_blocks]

    def _slab(self, slab: int) -> Tensor:
        """Uint8 `[blocks, G, 256, row_bytes]`."""
        return self._pool.view(slab).view(-1, self._heads, BLOCK, self._row_bytes)


def spans(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Tokens from `start` to `end` cut into a block's rest, whole blocks and a block's start."""
    whole = min(end, -(-start // BLOCK) * BLOCK)
    rest = max(whole, end // BLOCK * BLOCK)
    for first, last in ((start, whole), (whole, rest), (rest, end)):
        if first < last:
            yield first, last


def runs(numbers: list[int], slab_blocks: int) -> Iterator[tuple[int, int]]:
    """Blocks that follow one another in a slab: (place in `numbers`, count)."""
    at = 0
    for place in range(1, len(numbers) + 1):
        follows = place < len(numbers) and numbers[place] == numbers[place - 1] + 1
        if not follows or numbers[place] % slab_blocks == 0:
            yield at, place - at
            at = place
