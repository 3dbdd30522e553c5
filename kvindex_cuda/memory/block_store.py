"""Store of rows (keys and values) in memory blocks that kernels read. The blocks are in pinned host
memory, in device memory, or in both."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable
from kvindex.storage.centers import JoinedRows, center_of, check_center, is_centered, of_rows
from kvindex.storage.codecs import BITS, codec
from kvindex_cuda.memory.async_copy import Offload
from kvindex_cuda.memory.block_table import BlockTable, spans
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.counted_pool import CountedPool
from kvindex_cuda.memory.layout import BLOCK, MAX_TOKENS
from kvindex_cuda.memory.slab_pool import Allocator, Tier
from kvindex_cuda.memory.write_rows import fits, load_kernel, write_rows
from kvindex_cuda.ops.attend_latents import LatentAttention, unserved
from kvindex_cuda.ops.fetch import gather_blocks

SLAB_BYTES = 32 * 2**20
"""Slab size on the host: 32 blocks (8K tokens) of 8 KV heads with 512-byte rows."""

DEVICE_SLAB_BYTES = 4 * 2**20
"""Slab size on the device. It is smaller, because a layer's last slab is half empty on average."""

AT_ONCE = 64 * BLOCK
"""Maximum number of tokens of a saved state that are on the device at a time."""

MOST_PAIRS = {512: 128, 1024: 64, 2048: 32}
"""Largest number of pairs of a token and a query head of one KV head that a program of the kernel
`attend_pages` processes, by the largest number of bytes of a key or value (rounded up to a power of
two elements)."""

FEW = BLOCK
"""Up to this number of tokens (a window update), one kernel launch takes the host less time than
copies."""


class BlockStore(Restorable):
    """Stores rows (one token's key and value) as bytes in blocks `[G, 256, row_bytes]`. A block has
    rows of one sequence, and never moves.

    It implements the protocols `RowStore`, `PlacedRows` (each block is a page), `AttendsToAllRows`
    and, for latents, `AttendsToRows` of `kvindex.storage.store`. Only one thread may use a store at
    a time.

    Args:
        geometry: Geometry of the index.
        allocator: Allocates pinned memory (`async_copy.PinnedAllocator`) or device memory
            (`slab_pool.DeviceAllocator`).
        row_codec: Name of a codec in `kvindex.storage.codecs`.
        max_tokens: Maximum number of tokens, for which the table has room.
        slab_bytes: Bytes of an allocation, rounded down to whole blocks, at least one. The default
            is `SLAB_BYTES` for host memory and `DEVICE_SLAB_BYTES` for device memory.
        budget: Limit of the memory from `allocator`. The default is the process's budget for host
            memory, and no limit for device memory.
        preferred: Memory tier in which blocks are allocated as long as its budget has room and its
            allocator does not fail. Later blocks are allocated by `allocator`.
    """

    page_tokens = BLOCK

    def __init__(
        self,
        geometry: Geometry,
        allocator: Allocator,
        *,
        row_codec: str = "plain",
        max_tokens: int = MAX_TOKENS,
        slab_bytes: int | None = None,
        budget: Budget | None = None,
        preferred: Tier | None = None,
    ) -> None:
        self._geometry, self.row_codec = geometry, row_codec
        self._codec = codec(row_codec, geometry)
        self._max_tokens = check.at_least("max_tokens", max_tokens, 1)
        if slab_bytes is None:
            slab_bytes = SLAB_BYTES if allocator.on_host else DEVICE_SLAB_BYTES
        self._slab_bytes = check.at_least("slab_bytes", slab_bytes, 1)
        if budget is None:
            budget = shared_budget() if allocator.on_host else Budget()
        self._tiers = (*([preferred] if preferred else []), Tier(allocator, budget))
        self._open()

    def _open(self) -> None:
        slab_blocks = max(1, self._slab_bytes // self.block_bytes)
        sizes, device = (self.block_bytes, slab_blocks), self._geometry.device
        self._pool = CountedPool(*sizes, *self._tiers, device=device)
        self._offload = Offload(self._geometry.device)
        self._launched = self._geometry.device.type == "cuda"  # True if a kernel writes few rows
        self._lent_by: BlockStore | None = None  # the store whose rows this view reads
        self._length = 0
        self._promised = 0  # tokens that `reserve_tokens` allocated memory for
        self._written: dict[str, Tensor] | None = None  # rows after the last one, not yet appended
        self._writing: torch.cuda.Event | None = None  # recorded when `_written` is complete
        self._copied: torch.cuda.Event | None = None  # recorded when appended rows are complete
        self._table = BlockTable(self._geometry, self.row_bytes, self._max_tokens, self._pool)
        # the center that was subtracted from stored keys; always the same tensor, because CUDA
        # graphs read it
        self._center: Tensor | None = None
        if is_centered(self.row_codec, self._geometry):
            shape = (0, self._geometry.kv_heads, self._geometry.head_dim)
            self._center = torch.zeros(shape, device=device)
        self._pool.join(self._table.ledger)
        self._close = weakref.finalize(self, self._pool.leave, self._table.ledger)

    def __len__(self) -> int:
        return self._length

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (a token's key and value for one head), a multiple of 16."""
        return self._codec.row_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of a head's rows in a block, `256 · row_bytes`."""
        return BLOCK * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, `G · 256 · row_bytes`."""
        return self._geometry.kv_heads * self.head_bytes

    @property
    def on_host(self) -> bool:
        """True if some rows are in host memory, so that a row cache on the device helps. If the
        store first uses device memory (a `preferred` tier), this becomes True once a block is
        allocated on the host."""
        return self._table.on_host if self._pool.mixed else self._tiers[-1].allocator.on_host

    @property
    def table(self) -> Tensor:
        """Addresses of blocks, int64 `[B, S]` on the compute device, 0 where there is no block.

        The table is `[0, S]` before the first append, and the same tensor from then on until
        `reset`. There is one exception: if a truncation ends inside a block that a copy made by
        `copy.deepcopy` also uses, the next append makes a new table. Call `wait` before a kernel
        reads through the table.
        """
        return self._table.addresses

    @property
    def on_device(self) -> Tensor | None:
        """For each block, 1 if it is in device memory and 0 if it is on the host, uint8 `[B, S]` on
        the device. None if all blocks are in one kind of memory. This tensor is replaced only when
        `table` is replaced."""
        return self._table.on_device

    @property
    def center(self) -> Tensor | None:
        """The center that was subtracted from the keys before they were encoded, float32 `[B, G,
        D]`. None means that nothing was subtracted. Undefined while the store is empty."""
        return self._center

    def wait(self) -> None:
        """Make the current stream wait for copies of appended rows. Do not call this during the
        capture of a CUDA graph.

        It does not wait for rows that `write` has copied but that are not yet appended. Small
        appends use a kernel on the current stream, which needs no wait.
        """
        self._offload.wait(self._copied)

    def _settle(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._offload.synchronize()

    def join(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Encode keys `[B, G, N, D]` and values `[B, G, N, Dv]` as rows that `append` can copy.

        The result has several entries. Rows for whole blocks are `[B, S, G, 256, row_bytes]`, the
        layout of the store, so that adjacent blocks need only one copy. Rows before and after the
        whole blocks are `[B, G, n, row_bytes]`.

        If there are at most `FEW` rows and one kernel can encode and write them, the result is the
        unchanged keys and values.

        Some codecs need a center (a mean key). It is computed from the keys where `valid`, bool
        `[B, N]`, is True; None means all keys.
        """
        N, start, encode = keys.shape[2], self._length, self._codec.encode
        center = self._center
        if center is not None and not start and N:
            center = center_of(keys, valid)
        joined, center_rows = JoinedRows(), of_rows(center)
        joined.center = center
        if self._launched and N <= FEW:
            as_they_are = self.row_codec == "plain" and not self._geometry.value_in_key
            if as_they_are and fits(keys) and fits(values):
                return {"keys": keys, "values": values}
            joined["rows"] = encode(keys, values, center_rows)
            return joined
        for first, last in spans(start, start + N):
            some = [part[:, :, first - start : last - start] for part in (keys, values)]
            if (last - first) % BLOCK:
                joined["end" if joined else "begin"] = encode(some[0], some[1], center_rows)
            else:
                of_blocks = None if center_rows is None else center_rows[:, None]
                joined["blocks"] = encode(_in_blocks(some[0]), _in_blocks(some[1]), of_blocks)
        if not joined:
            joined["rows"] = encode(keys, values)
        return joined

    def reserve(self, rows: dict[str, Tensor]) -> None:
        """Allocate memory for `rows`, a result of `join`. The stored rows do not change.

        Raises ValueError if the store would exceed `max_tokens`, MemoryError if it would exceed the
        budget, and MemoryError or RuntimeError if memory cannot be pinned.
        """
        self._room(next(iter(rows.values())).shape[0], _count(rows))

    def reserve_tokens(self, tokens: int) -> None:
        """Allocate the memory for `tokens` tokens now, so that later appends up to that length
        allocate nothing.

        Pinning memory delays kernel launches. For this reason, appends up to that length also do
        not pin slabs in the background. The method also loads the kernel for small appends. It does
        nothing before the first append, which sets the batch size. It raises the errors of
        `reserve`.
        """
        if self._table.batch:
            self._room(self._table.batch, tokens - self._length)
            self._promised = max(self._promised, tokens)
            if self._launched:
                load_kernel(self._geometry.device)

    def pin_ahead(self, tokens: int, batch: int) -> None:
        """Start to pin memory for `tokens` tokens of `batch` sequences in the background. Does not
        wait.

        The call replaces an earlier one, also of a copy that uses the same memory. With 0 tokens,
        an earlier call of this store ends, and no more memory is pinned for it than is in use.
        """
        self._pool.expect(batch * -(-tokens // BLOCK), self._table.ledger)

    def _room(self, batch: int, count: int) -> None:
        if self._lent_by is not None:
            raise RuntimeError("append: got a view that expand_batch returned, which is read-only")
        if count > 0 and self._table.has_shared_blocks(self._length):
            if self._length % BLOCK:
                self._settle()
            self._table = self._table.owned(self._length)
        if count > 0:
            self._table.room(batch, self._length, count)

    def write(self, rows: dict[str, Tensor]) -> None:
        """Copy `rows`, a result of `join`, to their blocks. Call `reserve` before this, and
        `append` with the same rows after it.

        If there are few rows, a kernel on the current stream writes them. Otherwise they are copied
        on another stream (see `wait`). Raises ValueError if the length of the store has changed
        since `join`.
        """
        if "blocks" in rows and (self._length + _count(rows, upto="blocks")) % BLOCK:
            raise ValueError(
                "rows: got the result of a join that was made when the store had another length; "
                f"call join again at the present length of {self._length} tokens"
            )
        self._written = rows
        if self._launched and _count(rows) <= FEW:
            self._offload.wait(self._writing)  # an abandoned copy may write to the same blocks
            write_rows(tuple(rows.values()), self.table, self._length)
            return
        pieces = self._table.pieces(rows.values(), self._length)
        self._writing = self._offload.copy(pieces, rows.values())

    def append(self, rows: dict[str, Tensor]) -> None:
        """Append rows. `rows` is a result of `join`. Raises the same errors as `reserve`."""
        self.reserve(rows)
        count = _count(rows)
        if not count:
            return
        if self._written is not rows:
            self.write(rows)
        if self._center is not None and not self._length:
            self._center = self._put(self._center, rows)
        self._written, self._copied = None, self._writing
        self._length += count
        if self._length + BLOCK <= self._promised or self._table.full:
            return  # `reserve_tokens` has left room: no need to pin more
        if self._table.spare(self._length) < self._pool.slab_blocks:
            self._pool.ahead()

    def _put(self, held: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Copy the center of the rows into the tensor `held`, and return `held`.

        The center is the mean key that the first append has computed. If the batch size has
        changed, a new tensor is filled and returned instead of `held`.
        """
        batch, center = self._table.batch, rows.center if isinstance(rows, JoinedRows) else None
        if len(held) != batch:
            held = held.new_empty((batch, *held.shape[1:]))
        return held.zero_() if center is None else held.copy_(center)

    def gather(self, ids: Tensor) -> Rows:
        """Return the rows of token ids int64 `[B, G, K]`. An id of -1 gives zeros; other ids must
        be from 0 to N - 1."""
        encoded, center = self._gathered(ids), self._center
        if center is None or not self._length:
            return self._codec.decode(encoded)
        rows = self._codec.decode(encoded, of_rows(center))
        return Rows(rows.keys.masked_fill((ids < 0)[..., None], 0), rows.values)

    @property
    def attends(self) -> bool:
        """True if `attend` can read the stored rows.

        It can if the rows are latents (of multi-head latent attention) with a supported shape and
        codec. Attention over all other rows is part of the fused decode step (`pariskv.executor`).
        """
        latents = self._geometry.value_in_key and self.row_codec not in BITS
        return latents and unserved(self._geometry) is None

    def attend(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of `hits` and to the resident rows (sink and local window).

        The stored rows must be latents of multi-head latent attention (see `attends`).
        """
        g, (batch, heads, _) = self._geometry, queries.shape
        output = torch.empty((batch, heads, g.value_dim), dtype=g.dtype, device=g.device)
        lse = torch.empty((batch, heads), dtype=torch.float32, device=g.device)
        self.wait()
        weights, attend = hits.log_weight, LatentAttention(g)
        attend(
            queries.contiguous(),
            hits.ids.contiguous(),
            found=None,
            weights=None if weights is None else weights.contiguous(),
            rows=self.table.contiguous(),  # a view's table is not contiguous
            row_bytes=self.row_bytes,
            codec=self.row_codec,
            resident=resident.rows,
            resident_mask=resident.mask,
            resident_count=resident.count,
            output=output,
            lse=lse,
            on_host=self.on_host,
        )
        return Attended(output, lse, (hits.ids >= 0).sum(-1, dtype=torch.int32))

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens per sequence for which `attend_all` reads each row only once; 0
        if its kernel cannot read the rows."""
        g = self._geometry
        plain = self.row_codec == "plain" and not g.value_in_key and g.softcap is None
        if not plain or g.device.type != "cuda" or not has_triton():
            return 0
        wide = g.dtype.itemsize << (max(g.head_dim, g.value_dim) - 1).bit_length()
        return next((n for most, n in MOST_PAIRS.items() if wide <= most), 0) // g.group_size

    def attend_all(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with queries `[B, H, T, D]` to all rows, which are read where they are. Return
        outputs `[B, H, T, Dv]` and log-sum-exp values, float32 `[B, H, T]`."""
        from kvindex_cuda.triton import attend_pages  # imported here, because Triton is optional

        self.wait()
        g = self._geometry
        return attend_pages(
            queries.contiguous(),
            self.table,
            torch.full((len(queries),), len(self), device=queries.device),
            kv_heads=g.kv_heads,
            value_dim=g.value_dim,
            scale=g.scale,
            row_bytes=self.row_bytes,
            head_bytes=self.head_bytes,
            page_tokens=BLOCK,
            causal=False,
        )

    def _gathered(self, ids: Tensor) -> Tensor:
        """Return the encoded rows of token ids `[B, G, K]`, uint8 `[B, G, K, row_bytes]`."""
        if self._geometry.device.type == "cuda" and len(self):
            self.wait()
            sizes = dict(kv_heads=self._geometry.kv_heads, row_bytes=self.row_bytes)
            return gather_blocks(self.table, ids, tokens=len(self), **sizes)
        where = ids.cpu()
        self._settle()
        return self._table.read(where).to(self._geometry.device)

    def encoded(self) -> Tensor:
        """Return a copy of all encoded rows, uint8 `[B, G, N, row_bytes]`.

        The copy is on the CPU if rows are on the host, since the device may not have enough memory.
        """
        shape = self._table.batch, self._geometry.kv_heads, len(self), self.row_bytes
        device = torch.device("cpu") if self.on_host else self._geometry.device
        rows = torch.empty(shape, dtype=torch.uint8, device=device)
        for start in range(0, len(self), AT_ONCE):
            part = rows[:, :, start : start + AT_ONCE]
            ids = torch.arange(start, start + part.shape[2], device=self._geometry.device)
            part.copy_(self._gathered(ids.expand(*shape[:2], -1)))
        return rows

    def append_encoded(self, rows: Tensor, center: Tensor | None = None) -> None:
        """Append encoded rows.

        Args:
            rows: `[B, G, N, row_bytes]`.
            center: The vector that was subtracted from the keys before they were encoded. None
                means that nothing was subtracted.

        Raises:
            ValueError: A center is given, but the store is not empty, or its codec has no center.
                The errors of `reserve` may also be raised.
        """
        check_center(center, centered=self._center is not None, held=self._length)
        start = self._length
        for first, last in spans(start, start + rows.shape[2]):
            for at in range(first, last, AT_ONCE):
                some = rows[:, :, at - start : min(last, at + AT_ONCE) - start]
                some = some.to(self._geometry.device).contiguous()
                few = self._launched and some.shape[2] <= FEW
                if few or some.shape[2] % BLOCK:
                    joined = JoinedRows(rows=some)
                else:
                    joined = JoinedRows(blocks=_in_blocks(some).contiguous())
                joined.center = center
                self.append(joined)

    def blocks(self, size: int) -> Iterator[tuple[int, Rows]]:
        """Yield all rows in order, in portions of at most `size` tokens, as pairs (position of the
        first token, rows)."""
        shape = (self._table.batch, self._geometry.kv_heads, -1)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            ids = torch.arange(start, stop, device=self._geometry.device)
            yield start, self.gather(ids.expand(shape))

    def truncate(self, length: int) -> None:
        """Remove all rows after the first `length` tokens. Their blocks stay allocated for
        reuse."""
        self._length, self._written = min(self._length, length), None

    def reordered(self, batch_indices: Tensor) -> BlockStore:
        """Return a copy in which sequence `b` is sequence `batch_indices[b]` of this store. The
        copy has blocks of its own. Raises the errors of `reserve`."""
        copied = self._shallow()
        copied._open()
        if not self._length:
            return copied
        try:
            if (center := self._center) is not None:
                copied._center = center[batch_indices.to(center.device)]
            copied._table.room(len(batch_indices), 0, self._length)
            self._settle()
            copied._table.copy_from(self._table, batch_indices)
        except BaseException:
            copied.reset()
            raise
        copied._length = self._length
        return copied

    def expand_batch(self, count: int) -> BlockStore:
        """Return a read-only view of a store with one sequence. The view is a batch of `count`
        equal sequences."""
        view = self._shallow()
        view._lent_by = self
        view._table = self._table.expand_batch(count)
        if self._center is not None and self._length:
            view._center = self._center.expand(count, -1, -1)
        return view

    def emptied(self) -> BlockStore:
        """Return a new, empty store with the same options."""
        empty = self._shallow()
        empty._open()
        return empty

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockStore:
        """Return a copy. The copy and this store use the same memory for their full blocks.

        No store writes to a block that another store also uses. If another store also uses the last
        block of a truncated store, the truncated store copies this block before it appends. A copy
        of a view has its own memory.
        """
        if self._lent_by is not None:
            return self.reordered(torch.arange(self._table.batch))
        if self._length % BLOCK:
            self._settle()  # the fork copies the last, partly filled block
        twin = self._shallow()
        twin._offload = Offload(self._geometry.device)
        twin._center = None if self._center is None else self._center.clone()
        twin._table, twin._written, twin._promised = self._table.fork(self._length), None, 0
        twin._close = weakref.finalize(twin, self._pool.leave, twin._table.ledger)
        return twin

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of `checkpoint`.

        Afterwards, the memory behind the last row has undefined contents, because an asynchronous
        copy of removed rows may still write to it. Memory that this store has announced with
        `pin_ahead` is no longer pinned in the background, because the tokens will not come.
        """
        writing = self._writing
        super().rollback(checkpoint)
        self._pool.expect(0, self._table.ledger)
        self._written, self._writing = None, writing or self._writing

    def reset(self) -> None:
        """Remove all rows, and free the memory."""
        try:
            if self._lent_by is None:
                self._pool.settle()
                self._close()
        finally:
            self._open()

    def nbytes(self) -> int:
        """Return the bytes of the stored rows, without room for further rows."""
        return self._table.batch * self._geometry.kv_heads * self._length * self.row_bytes

    def memory(self) -> dict[int, int]:
        """Return the size in bytes of each block, keyed by the block's address."""
        return self._table.memory()

    def rows_by_place(self) -> dict[str, int]:
        """Return the number of rows on the `device` and on the `host`, over all heads and
        sequences."""
        g, rows = self._geometry, self._table.batch * self._length
        if self._pool.mixed:
            on_device = self._table.tokens_on_device(self._length)
        else:
            on_device = 0 if self.on_host else rows
        return {"device": on_device * g.kv_heads, "host": (rows - on_device) * g.kv_heads}

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all allocated slabs. A slab contains rows or room for further rows. One slab may
        have been pinned before it is needed."""
        return self._pool.pinned_bytes


@cache
def has_triton() -> bool:
    """Return True if Triton is installed, which is optional."""
    return find_spec("triton") is not None


def _in_blocks(part: Tensor) -> Tensor:
    """Return a view `[B, S, G, 256, D]` of keys or values `[B, G, N, D]`, where `N` is a multiple
    of 256."""
    B, G, _, D = part.shape
    return part.view(B, G, -1, BLOCK, D).transpose(1, 2)


def _count(rows: dict[str, Tensor], upto: str = "values") -> int:
    """Count the tokens in `rows`, a dict of tensors that `join` has returned.

    The tokens are divided among several tensors: whole blocks `[B, S, G, 256, row_bytes]`, or
    single rows `[B, G, n, row_bytes]`. Only the tensors before the one named `upto` are counted.
    """
    count = 0
    for name, part in rows.items():
        if name == upto:
            break
        count += part.shape[1] * BLOCK if part.ndim == 5 else part.shape[2]
    return count
