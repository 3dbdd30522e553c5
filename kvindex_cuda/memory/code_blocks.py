"""Storage of an index's codes in memory blocks of 256 tokens, which never move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvindex.core.restore import Restorable
from kvindex.storage.sharing import Sharing
from kvindex_cuda.memory.block_table import spans
from kvindex_cuda.memory.layout import BLOCK, MAX_TOKENS, Layout

AHEAD_BYTES = 16 * 2**20
"""Most bytes by which one allocation may exceed the bytes needed now."""


class Run(NamedTuple):
    """A range of adjacent blocks in a slab: the slab's number, the first block, and the number of
    blocks."""

    slab: int
    first: int
    blocks: int


@dataclass(frozen=True)
class Fill:
    """Codes and centers that a kernel will write for new tokens.

    Attributes:
        batch: Number of sequences.
        count: Number of new tokens of each sequence.
        write: A function that launches the kernel. Its argument is the table of block addresses,
            int64 `[B, S]`.
        late: True if `write` must be called only when the codes are appended. Until then, searches
            read the last, partly filled block, which the kernel overwrites.
        beyond: Number of tokens after the `count` new ones that must also fit into memory. They are
            in a last, partly filled block, and are not appended.
    """

    batch: int
    count: int
    write: Callable[[Tensor], None]
    late: bool = False
    beyond: int = 0


class CodeBlocks(Restorable):
    """Codes of a ParisKV index, in blocks of 256 tokens that kernels read.

    The class has the interface of `kvindex.storage.columns.BlockColumns`; reading a column copies
    it out of the blocks. `table` contains the address of each block, int64 `[B, S]`, and 0 where no
    block exists. Kernels read this table. A new table replaces it in two cases: if the batch size
    `B` changes, and if this object is about to write to a block that a copy made by
    `copy.deepcopy` also uses. Appends beyond `max_tokens` raise ValueError.

    unit: Number of tokens that are added or removed at a time, 1 or 256.
    centered: Whether blocks have centers (mean keys).
    """

    def __init__(
        self,
        layout: Layout,
        kv_heads: int,
        device: torch.device,
        max_tokens: int = MAX_TOKENS,
        *,
        unit: int = 1,
        centered: bool = False,
    ) -> None:
        self.layout, self._heads, self._device = layout, kv_heads, device
        self._unit, self._centered = unit, centered
        self._most = -(-max_tokens // BLOCK)
        self._block_bytes = kv_heads * layout.head_bytes
        self.reset()

    def reset(self) -> None:
        """Remove all codes, and free the memory."""
        self._slabs: list[Tensor] = []  # uint8 [blocks, G, head_bytes] each
        self._free: list[Run] = []  # the last run is used first
        self._held: list[list[Run]] = []  # runs of each sequence, in order
        self._blocks = 0  # blocks of each sequence
        self._length = 0
        self._written: Fill | None = None  # codes that are written, but not yet appended
        # After a deep copy, the original and the copy use the same memory for the first blocks of
        # each sequence. `_shared` is the number of these blocks. A rollback does not change it.
        self._shared, self._sharing = [0], Sharing()
        self.table = torch.zeros((0, self._most), dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        names = self.layout.names + (("centers",) if self._centered else ())
        return iter(names if self._held else ())

    def __contains__(self, name: str) -> bool:
        return name in tuple(self)

    def __getitem__(self, name: str) -> Tensor:
        """Return a copy of a column for all tokens, `[B, G, N, ...]`. A column is one field of
        the codes, for example `signs`."""
        rows = []
        for held in self._held:
            runs = [self._column(name, run) for run in held]
            count = self._length // (BLOCK if name == "centers" else 1)
            rows.append(torch.cat(runs, dim=1)[:, :count])
        return torch.stack(rows)

    def every(self, name: str, tokens: int, stride: int) -> Tensor:
        """Return a copy of every `stride`-th entry of a column (one field of the codes, for example
        `signs`), for the first `tokens` tokens.

        Args:
            name: Name of the column.
            tokens: A multiple of 256.
            stride: A divisor or a multiple of 256.

        Returns:
            The entries, `[B, G, tokens / stride, ...]`.
        """
        apart, inside = max(1, stride // BLOCK), min(stride, BLOCK)
        rows = []
        for row in range(len(self._held)):
            some, at = [], 0
            for run in self._runs(row, 0, tokens // BLOCK):
                fields = self._fields(run)
                fields = {n: part[-at % apart :: apart, :, ::inside] for n, part in fields.items()}
                some.append(self.layout.column(name, fields).transpose(0, 1).flatten(1, 2))
                at += run.blocks
            rows.append(torch.cat(some, dim=1))
        return torch.stack(rows)

    @property
    def written(self) -> int:
        """Number of tokens whose codes can be read with `every`. These are the appended tokens, and
        tokens of an unfinished append whose codes have already been written."""
        return self._length + (0 if self._written is None else self._written.count)

    def _column(self, name: str, run: Run) -> Tensor:
        fields = self._fields(run)
        if name == "centers":
            return fields["center"].transpose(0, 1).contiguous().view(torch.bfloat16)[..., 0]
        return self.layout.column(name, fields).transpose(0, 1).flatten(1, 2)

    def reserve(self, new: Mapping[str, Tensor] | Fill) -> None:
        """Allocate memory for the codes `new`. Stored codes do not change, even if this fails."""
        if not new:
            return
        beyond = new.beyond if isinstance(new, Fill) else 0
        batch, count = _shape(new)
        self._room(batch, count + beyond)

    def reserve_open(self, batch: int) -> None:
        """Allocate memory for an open block (the last, partly filled block). The stored codes do
        not change, even if this fails."""
        self._room(batch, 1)

    def put_open(self, new: Mapping[str, Tensor]) -> None:
        """Write the codes of the open block (the last, partly filled block). `len` does not count
        the tokens of this block."""
        self._copy(new, self._length, _shape(new)[1])

    def reserve_tokens(self, tokens: int) -> None:
        """Allocate memory for `tokens` tokens now, so that later appends up to that length allocate
        nothing.

        This does nothing before the first append, which sets the batch size. Raises the errors of
        `reserve`.
        """
        if self._held and tokens > self._length:
            self._room(len(self._held), tokens - self._length, ahead=False)

    def _room(self, batch: int, count: int, *, ahead: bool = True) -> None:
        need = -(-(self._length + count) // BLOCK)
        if need > self._most:
            got, allowed = self._length + count, self._most * BLOCK
            raise ValueError(f"max_tokens: got {got} tokens, allowed are up to {allowed}")
        if not self._length and batch != len(self._held):
            self.reset()
            table = torch.zeros((batch, self._most), dtype=torch.int64, device=self._device)
            self._held, self.table = [[] for _ in range(batch)], table
        self._own(self._length // BLOCK)
        more = need - self._blocks
        if more <= 0:
            return
        missing = more * batch - sum(run.blocks for run in self._free)
        if missing > 0:
            self._grow(missing, ahead=ahead)
        free, rows = self._free.copy(), [held.copy() for held in self._held]
        for row, held in enumerate(rows):
            at = self._blocks
            for run in _taken(free, more):
                self._name(row, at, run)  # beyond the last block, which no kernel reads
                at += run.blocks
                last = held[-1] if held else Run(-1, 0, 0)
                if (last.slab, last.first + last.blocks) == run[:2]:
                    held[-1] = last._replace(blocks=last.blocks + run.blocks)
                else:
                    held.append(run)
        self._free, self._held, self._blocks = free, rows, need

    def _own(self, first: int) -> None:
        """Replace the blocks from block `first` on if a copy of this object also uses any of them.

        The table becomes a new tensor, and a rollback can return to the old one.
        """
        if first < self._shared[0] and not self._sharing.claim(self, first, first):
            before = self._held, self._blocks, self.table, self._shared
            try:
                self._replace(first)
            except BaseException:
                self._held, self._blocks, self.table, self._shared = before
                raise

    def _replace(self, first: int) -> None:
        """Replace the blocks from block `first` on by free blocks. Only the contents of block
        `first` are copied."""
        rows = range(len(self._held))
        old = [[*self._runs(row, first, 1)] for row in rows]
        blocks, self._blocks, self._shared = self._blocks, first, [first]
        self._held, self.table = [_first(held, first) for held in self._held], self.table.clone()
        self._room(len(rows), blocks * BLOCK - self._length)
        for row in rows:
            self._copy_block(old[row], [*self._runs(row, first, 1)], self)

    def _copy_block(self, come: list[Run], to: list[Run], other: CodeBlocks) -> None:
        """Copy one block of each sequence from `other` to this object. `come` has the positions of
        these blocks in `other`, and `to` the positions of their copies."""
        for source, target in zip(come, to, strict=True):
            block = other._slabs[source.slab][source.first]
            self._slabs[target.slab][target.first].copy_(block)

    def write(self, new: Mapping[str, Tensor] | Fill) -> None:
        """Write new codes to memory before they are appended.

        If `new` is a `Fill`, this launches the kernel that writes the codes. There are two
        exceptions, in which only `append` writes the codes: `Fill.late` is true, or `new` contains
        tensors. Call `write` between `reserve` and `append`.
        """
        if isinstance(new, Fill) and new.count and not new.late:
            self._fill(new)
        else:
            self._written = None

    def _fill(self, new: Fill) -> None:
        if new.count and self._written is not new:
            new.write(self.table)
            self._written = new

    def append(self, new: Mapping[str, Tensor] | Fill) -> None:
        """Append the codes of new tokens. `new` contains the codes themselves, tensors `[B, G, N,
        ...]` by name, or it is a `Fill`, which describes a kernel that writes them."""
        if not new:
            return
        self.reserve(new)
        count, start = _shape(new)[1], self._length
        if not isinstance(new, Fill):
            self._copy(new, start, count)
        else:
            self._fill(new)
        self._written = None
        self._length += count

    def forget(self) -> None:
        """Discard codes that were written with `write` but not appended."""
        self._written = None

    def _after_rollback(self) -> None:
        self._written = None  # a failed call may write to the same blocks

    def truncate(self, length: int) -> None:
        """Remove all codes after the first `length` tokens. Their blocks stay allocated for
        reuse."""
        self._length, self._written = min(self._length, length // self._unit * self._unit), None

    def reordered(self, batch_indices: Tensor) -> CodeBlocks:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this object."""
        other = self.emptied()
        order, blocks = batch_indices.tolist(), -(-self._length // BLOCK)
        other._held = [[] for _ in order]
        other.table = torch.zeros((len(order), self._most), dtype=torch.int64, device=self._device)
        if blocks and order:
            other._grow(blocks * len(order), ahead=False)
            for row, source in enumerate(order):
                (run,) = _taken(other._free, blocks)
                other._held[row].append(run)
                other._name(row, 0, run)
                copies = other._slabs[run.slab][run.first : run.first + run.blocks]
                held = [self._slabs[s][first : first + n] for s, first, n in self._held[source]]
                copies.copy_(torch.cat(held)[:blocks] if len(held) > 1 else held[0][:blocks])
        other._blocks, other._length = blocks, self._length
        return other

    def expand_batch(self, count: int) -> CodeBlocks:
        """Return a read-only view of codes with one sequence. The view is a batch of `count` equal
        sequences."""
        view = self._shallow()
        view._held = self._held * count
        view.table = self.table.expand(count, -1).contiguous()
        return view

    def emptied(self) -> CodeBlocks:
        """Return a new, empty object with the same options."""
        most, same = self._most * BLOCK, dict[str, Any](unit=self._unit, centered=self._centered)
        return CodeBlocks(self.layout, self._heads, self._device, most, **same)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeBlocks:
        """Return a copy. Full blocks never change, so the copy uses the same memory for them."""
        full = self._length // BLOCK
        twin = self._shallow()
        twin._held, twin._free = [_first(held, full) for held in self._held], []
        twin._blocks, twin._length, twin._written = full, full * BLOCK, None
        twin.table = self.table.clone()
        twin.table[:, full:] = 0
        self._shared[0], twin._shared = max(self._shared[0], full), [full]
        for user in (self, twin):
            self._sharing.join(user, full)
        if self._length > twin._length:
            twin._room(len(self._held), self._length - twin._length)
            for row in range(len(self._held)):
                runs = [*self._runs(row, full, 1)], [*twin._runs(row, full, 1)]
                twin._copy_block(*runs, self)
            twin._length = self._length
        return twin

    def nbytes(self) -> int:
        """Return the size in bytes of the codes and centers of all full blocks."""
        used = self._length * self.layout.key_bytes
        if self._centered:
            used += self._length // BLOCK * 2 * self.layout.head_dim
        return len(self._held) * self._heads * used

    def memory(self) -> dict[int, int]:
        """Return the size in bytes of each block, keyed by the block's address."""
        size, pieces = self._block_bytes, dict[int, int]()
        for run in (run for held in self._held for run in held):
            first = self._slabs[run.slab].data_ptr() + run.first * size
            pieces |= dict.fromkeys(range(first, first + run.blocks * size, size), size)
        return pieces

    def _copy(self, new: Mapping[str, Tensor], start: int, count: int) -> None:
        """Copy codes of new tokens, `[B, G, count, ...]`, to their blocks, from position `start` in
        the sequence on."""
        for name, part in self.layout.parts(new).items():
            order = self.layout.order(name, self._device)
            for row in range(len(self._held)):
                for first, last in spans(start, start + count):
                    inside = slice(first % BLOCK, first % BLOCK + min(BLOCK, last - first))
                    to = inside if order is None else order[inside]
                    given = part[row, :, first - start : last - start]
                    shape = len(given), -1, inside.stop - inside.start, *given.shape[2:]
                    given = given.reshape(shape).transpose(0, 1)  # [blocks, G, ...]
                    for run in self._runs(row, first // BLOCK, len(given)):
                        self._fields(run)[name][:, :, to] = given[: run.blocks]
                        given = given[run.blocks :]
        if self._centered:
            self._copy_centers(new["centers"], start // BLOCK)

    def _copy_centers(self, centers: Tensor, first: int) -> None:
        """Copy centers, bfloat16 `[B, G, S, D]`, to the blocks from block number `first` on."""
        raw = centers.contiguous().view(torch.uint8).view(*centers.shape, 2).transpose(1, 2)
        for row, given in enumerate(raw):  # [S, G, D, 2]
            for run in self._runs(row, first, len(given)):
                self._fields(run)["center"].copy_(given[: run.blocks])
                given = given[run.blocks :]

    def _runs(self, row: int, block: int, count: int) -> Iterator[Run]:
        """Find where `count` blocks of a sequence are stored, from block number `block` on.

        Yield one run for each range of blocks that are adjacent in memory.
        """
        for run in self._held[row]:
            some = min(run.blocks - block, count)
            if some > 0:
                yield Run(run.slab, run.first + block, some)
                block, count = block + some, count - some
            block -= run.blocks

    def _fields(self, run: Run) -> dict[str, Tensor]:
        """Return views of the fields (signs, magnitudes, …) of a run of adjacent blocks, `[count,
        G, 256, ...]`."""
        return self.layout.views(self._slabs[run.slab][run.first : run.first + run.blocks])

    def _name(self, row: int, block: int, run: Run) -> None:
        """Write the addresses of the blocks in `run` to the address table of sequence `row`, from
        block number `block` on. Does not wait for the device."""
        size = self._block_bytes
        first = self._slabs[run.slab].data_ptr() + run.first * size
        names = self.table[row, block : block + run.blocks]
        torch.arange(first, first + run.blocks * size, size, out=names)

    def _grow(self, blocks: int, *, ahead: bool) -> None:
        """Allocate at least `blocks` more blocks per sequence.

        If `ahead`, also allocate some in advance, so that appends allocate less often: at least a
        quarter of the number of existing blocks, but at most `AHEAD_BYTES`.
        """
        held = sum(len(slab) for slab in self._slabs)
        count = max(blocks, min(held // 4, AHEAD_BYTES // self._block_bytes) if ahead else 0)
        shape = (count, self._heads, self.layout.head_bytes)
        # zeros, because `_copy` leaves padding unwritten
        padded = self.layout.head_dim % 32
        make = torch.zeros if padded else torch.empty
        slab = make(shape, dtype=torch.uint8, device=self._device)
        run = Run(len(self._slabs), 0, count)
        self._slabs, self._free = [*self._slabs, slab], [run, *self._free]


def _first(held: list[Run], count: int) -> list[Run]:
    rest, first = count, []
    for run in held:
        if rest > 0:
            first.append(run._replace(blocks=min(run.blocks, rest)))
        rest -= run.blocks
    return first


def _taken(free: list[Run], count: int) -> Iterator[Run]:
    """Remove `count` blocks from `free`, a list of runs (ranges of adjacent blocks). Yield the
    removed blocks as runs."""
    while count:
        run = free.pop()
        if run.blocks > count:
            rest = run._replace(first=run.first + count, blocks=run.blocks - count)
            free.append(rest)
            run = run._replace(blocks=count)
        count -= run.blocks
        yield run


def _shape(new: Mapping[str, Tensor] | Fill) -> tuple[int, int]:
    """Return the number of sequences in `new`, and the number of tokens of each sequence."""
    if isinstance(new, Fill):
        return new.batch, new.count
    return new["signs"].shape[0], new["signs"].shape[2]
