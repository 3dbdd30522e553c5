"""Block table: maps tokens to the blocks of memory that contain their rows, for kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED
from kvindex_cuda.memory.counted_pool import CountedPool
from kvindex_cuda.memory.layout import BLOCK


class BlockTable:
    """The blocks `[G, 256, row_bytes]` of each sequence, in the order of their tokens.

    A fork is a copy of the table that uses the same full blocks. `addresses` and `on_device` stay
    the same tensors until `B` changes, or until a write to a block that a fork also uses.

    Attributes:
        addresses: Addresses of blocks on the compute device, int64 `[B, S]`, where `S` is the
            number of blocks for `max_tokens`. 0 where there is no block.
        on_device: 1 for blocks in device memory, uint8 `[B, S]` on the device, or None if all
            blocks of the pool are in one memory tier.
        on_host: True if some block is in host memory.
        ledger: Numbers of all blocks that were taken from the pool.
    """

    def __init__(
        self, geometry: Geometry, row_bytes: int, max_tokens: int, pool: CountedPool
    ) -> None:
        self._pool, self._device = pool, geometry.device
        self.ledger: list[int] = []
        self._heads, self._row_bytes = geometry.kv_heads, row_bytes
        self._max_tokens = max_tokens
        self.addresses, self._numbers = self._empty(0)
        self.on_device, self.on_host = self._none_on_device(), False

    @property
    def batch(self) -> int:
        """Number of sequences, `B`; 0 before the first call of `room`."""
        return self._numbers.shape[0]

    @property
    def full(self) -> bool:
        """True if blocks for all `max_tokens` tokens are allocated."""
        return self._numbers.shape[1] == self.addresses.shape[1]

    def spare(self, length: int) -> int:
        """Count the allocated blocks that have none of the first `length` tokens."""
        return self.batch * (self._numbers.shape[1] - -(-length // BLOCK))

    def room(self, batch: int, length: int, count: int) -> None:
        """Allocate blocks for `count` tokens after the first `length` tokens of `batch` sequences.

        Raises ValueError if a sequence would exceed `max_tokens`, or if the store contains tokens
        of a different number of sequences. Also raises the errors of `Pool.take`. After an error,
        the table is unchanged.
        """
        if length + count > self._max_tokens:
            raise ValueError(
                f"max_tokens: got {length + count} tokens, allowed are up to {self._max_tokens}"
            )
        if self.batch != batch:
            if length:
                raise ValueError(f"rows: got {batch} sequences, but the store has {self.batch}")
            held = self.ledger.copy()  # no block has rows
            self.addresses, self._numbers = self._empty(batch)
            self.ledger.clear()
            self.on_device, self.on_host = self._none_on_device(), False
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
                self._name(row, before, blocks)
        except BaseException:
            self._pool.give(taken)
            raise
        self._numbers = numbers
        self.ledger += taken
        self.on_host = self.on_host or any(map(self._pool.is_on_host, taken))

    def fork(self, length: int) -> BlockTable:
        """Return a table that shares the full blocks of the first `length` tokens.

        The fork has its own list of blocks (`ledger`), and its own copy of the last block if that
        is not full. Before the call, writes to that block must have finished. Raises the errors of
        `Pool.take`.
        """
        twin, full = copy(self), length // BLOCK
        twin._numbers = self._numbers[:, :full].clone()
        twin.addresses = self.addresses.clone()
        twin.addresses[:, full:] = 0
        if self.on_device is not None:
            twin.on_device = self.on_device.clone()
            twin.on_device[:, full:] = 0
        twin.ledger = twin._numbers.flatten().tolist()
        self._pool.join(twin.ledger)
        if length % BLOCK:
            try:
                twin.room(self.batch, full * BLOCK, length % BLOCK)
            except BaseException:
                self._pool.leave(twin.ledger)
                raise
            twin._copy_blocks(self, full)
        return twin

    def has_shared_blocks(self, length: int) -> bool:
        """Return True if appended tokens would overwrite a block that a fork also uses.

        The tokens are appended after the first `length` tokens.
        """
        rows = self._numbers[:, length // BLOCK :].tolist()  # avoids a torch operation
        return any(self._pool.shared([number for row in rows for number in row]))

    def owned(self, length: int) -> BlockTable:
        """Return a copy of this table, for appends after the first `length` tokens.

        An append must not write to a block that a fork also uses. In the copy, such blocks are
        replaced by new blocks, which belong only to the copy. If the last block with tokens is only
        partly filled, its contents are copied, so earlier writes to it must have finished. Raises
        the errors of `Pool.take`.
        """
        slot = length // BLOCK
        own, shared = copy(self), self._pool.shared(self._numbers[:, slot:].flatten().tolist())
        taken = self._pool.take(sum(shared))
        self.ledger += taken
        numbers = self._numbers[:, slot:].flatten().clone()
        numbers[torch.tensor(shared)] = torch.tensor(taken)
        own._numbers = torch.cat([self._numbers[:, :slot], numbers.view(self.batch, -1)], dim=1)
        own.addresses = self.addresses.clone()
        own.on_device = None if self.on_device is None else self.on_device.clone()
        own.on_host = self.on_host or any(map(self._pool.is_on_host, taken))
        for row, blocks in enumerate(own._numbers[:, slot:].tolist()):
            own._name(row, slot, blocks)
        if length % BLOCK:
            own._copy_blocks(self, slot)
        return own

    def _copy_blocks(self, other: BlockTable, slot: int) -> None:
        """Copy block number `slot` of each sequence from another table, unless both tables share
        that block."""
        pairs = zip(self._numbers[:, slot].tolist(), other._numbers[:, slot].tolist(), strict=True)
        for to, come in pairs:
            if to != come:
                self._block(to).copy_(other._block(come))

    def tokens_on_device(self, length: int) -> int:
        """Count the tokens with rows on the device, among the first `length` tokens of each
        sequence."""
        held = -(-length // BLOCK)
        count = 0
        for numbers in self._numbers[:, :held].tolist():
            on_device = [not self._pool.is_on_host(number) for number in numbers]
            count += BLOCK * sum(on_device) - (
                on_device[-1] * (held * BLOCK - length) if on_device else 0
            )
        return count

    def memory(self) -> dict[int, int]:
        """Return the size in bytes of each block, keyed by the block's address."""
        held, pool = self._numbers.flatten().tolist(), self._pool
        return {pool.device_address(number): pool.block_bytes for number in held}

    def read(self, ids: Tensor) -> Tensor:
        """Return the encoded rows `[B, G, K, row_bytes]` of token ids int64 `[B, G, K]`. An id of
        -1 gives zeros."""
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
        """Yield the copies that are necessary to write new rows to the blocks, from token `start`
        on.

        A copy is a pair of views, the destination in the blocks and the source in `parts`. There
        are two kinds of copies. If whole blocks are next to each other in memory, one copy writes
        them, and its views are uint8 `[1, w]`. Otherwise a copy writes some tokens of one block,
        and its views are uint8 `[h, w]`, with one matrix row for each of the `h` KV heads. The
        numbers of a matrix row are contiguous in memory.

        parts: The new rows, in order of their tokens. A part with whole blocks is
            `[B, S, G, 256, row_bytes]`. The parts before and after the whole blocks are
            `[B, G, n, row_bytes]`.
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
        for b, new in enumerate(blocks):
            numbers = self._numbers[b, slot : slot + len(new)].tolist()
            for at, length in runs(numbers, self._pool.slab_blocks):
                slab, inside = divmod(numbers[at], self._pool.slab_blocks)
                target = self._slab(slab)[inside : inside + length]
                yield target.view(1, -1), new[at : at + length].view(1, -1)

    def copy_from(self, other: BlockTable, batch_indices: Tensor) -> None:
        """Copy blocks from another table: its sequence `batch_indices[b]` becomes sequence `b` of
        this table."""
        sources = other._numbers[batch_indices.cpu(), : self._numbers.shape[1]]
        for to, come in zip(self._numbers.flatten(), sources.flatten(), strict=True):
            self._block(int(to)).copy_(other._block(int(come)))

    def expand_batch(self, count: int) -> BlockTable:
        """Return a read-only view of a table with one sequence. The view is a batch of `count`
        equal sequences."""
        view = copy(self)
        if not self.batch:  # before the first append
            view.addresses, view._numbers = self._empty(count)
            view.on_device = view._none_on_device()
            return view
        view.addresses = self.addresses.expand(count, -1)
        view.on_device = None if self.on_device is None else self.on_device.expand(count, -1)
        view._numbers = self._numbers.expand(count, -1)
        return view

    def _empty(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the two tables of `batch` sequences that have no blocks yet: the addresses of
        blocks, which are all zeros, and the numbers of blocks, an empty int64 tensor `[B, 0]` on
        the CPU."""
        shape = (batch, -(-self._max_tokens // BLOCK))
        addresses = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return addresses, torch.zeros((batch, 0), dtype=torch.int64)

    def _none_on_device(self) -> Tensor | None:
        if not self._pool.mixed:
            return None
        return torch.zeros(self.addresses.shape, dtype=torch.uint8, device=self._device)

    def _name(self, row: int, start: int, blocks: list[int]) -> None:
        """Write the addresses of `blocks` to the address table of sequence `row`, from block number
        `start` on. Does not wait for the device."""
        size = self._pool.block_bytes
        for at, length in runs(blocks, self._pool.slab_blocks):
            first, places = (
                self._pool.device_address(blocks[at]),
                slice(start + at, start + at + length),
            )
            torch.arange(first, first + length * size, size, out=self.addresses[row, places])
            if self.on_device is not None:
                self.on_device[row, places] = not self._pool.is_on_host(blocks[at])

    def _block(self, number: int) -> Tensor:
        """Return a block of the pool by its number, uint8 `[G, 256, row_bytes]`."""
        return self._slab(number // self._pool.slab_blocks)[number % self._pool.slab_blocks]

    def _slab(self, slab: int) -> Tensor:
        """Return a slab of the pool by its number, uint8 `[blocks, G, 256, row_bytes]`."""
        return self._pool.view(slab).view(-1, self._heads, BLOCK, self._row_bytes)


def spans(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range of tokens at block boundaries: into the end of a block, whole blocks, and the
    beginning of a block."""
    whole = min(end, -(-start // BLOCK) * BLOCK)
    rest = max(whole, end // BLOCK * BLOCK)
    for first, last in ((start, whole), (whole, rest), (rest, end)):
        if first < last:
            yield first, last


def runs(numbers: list[int], slab_blocks: int) -> Iterator[tuple[int, int]]:
    """Group block numbers into runs of adjacent blocks. Yield (index in `numbers` of the first
    block, number of blocks) for each run."""
    at = 0
    for place in range(1, len(numbers) + 1):
        follows = place < len(numbers) and numbers[place] == numbers[place - 1] + 1
        if not follows or numbers[place] % slab_blocks == 0:
            yield at, place - at
            at = place
