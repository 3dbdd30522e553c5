"""`Columns`: tensors that grow along their token axis. `Valid`: a record of padding tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core.restore import Restorable
from kvindex.storage.sharing import Sharing

_Views = dict[str, tuple[Tensor | None, int, Sequence[Tensor]]]
"""Name -> a column, a position, and views of its entries from there on."""

VIEWS = 16
"""Number of views of single entries that are made at a time."""


class Columns(Restorable):
    """Named tensors that grow by appends along their token axis, like the columns of a table.

    The first append determines names, dtypes, devices, and all sizes except that of the token axis.
    Capacity doubles when it runs out, so `N` appends of one token copy `O(N)` tokens in total. On a
    CPU the first append already allocates twice its size, because the operating system provides
    memory only when it is written.

    A deep copy shares memory with the original. Each of the two copies the memory before it writes
    to a place where the other has ever stored tokens.

    Args:
        axis: The token axis.
        fill: Initial value of allocated memory; None to leave it uninitialized.
    """

    def __init__(self, axis: int = 2, fill: int | None = None) -> None:
        self._axis, self._fill = axis, fill
        self._data: dict[str, Tensor] = {}  # tensors whose token axis has the size of the capacity
        self._length = 0
        self._most = 0  # the longest length so far: a checkpoint may still need those tokens
        self._views: _Views = {}
        self._sharing = Sharing()  # users of this memory: this object and its deep copies
        self._lent = False  # whether this is a view of another object's memory

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def __getitem__(self, name: str) -> Tensor:
        """Return a view of the stored tokens of a column, without unused capacity."""
        return self._data[name].narrow(self._axis, 0, self._entries(name, self._length))

    def every(self, name: str, tokens: int, stride: int) -> Tensor:
        """Return a view of every `stride`-th token among the first `tokens` tokens of a column."""
        index = [slice(None)] * self._axis + [slice(0, tokens, stride)]
        return self[name][tuple(index)]

    @property
    def written(self) -> int:
        """Number of tokens that the method `every` may read: all appended tokens.

        A subclass may also count tokens that are not appended yet, if the method `write` has
        already written them to memory.
        """
        return self._length

    @property
    def batch(self) -> int:
        """Number of sequences in the batch; 0 before the first append."""
        for tensor in self._data.values():
            return tensor.size(0)
        return 0

    def reserve(self, new: Mapping[str, Tensor]) -> None:
        """Allocate memory for the new tokens in `new`, without changing the stored tokens.

        Raises RuntimeError for a view from `expand_batch`. The call may run out of memory.
        """
        if self._lent:
            raise RuntimeError(
                "append: got a view of expand_batch(), which is read-only; append to a deep copy"
            )
        if self._sharing.shared and not self._claimed(new):
            self._data, self._sharing = self._room(new, fresh=True), Sharing()
            self._views = {}
        elif not self._fits(new):
            self._data, self._views = self._room(new), {}

    def write(self, new: Mapping[str, Tensor]) -> None:
        """Write new tokens to memory before `append`, in subclasses that support this.

        The method of this class does nothing, because its `append` copies the tensors.
        """

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Append one tensor to each column.

        Args:
            new: Name of each column -> the tensor to append. It must have the same shape as the
                column, except for the token axis.
        """
        if not new:
            return
        for name, place in self.claim(new).items():
            place.copy_(new[name])

    def claim(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Extend the columns by the size of `new`, and return views into which the caller must copy
        `new`.
        """
        self.reserve(new)
        axis, start = self._axis, self._length
        sizes = {name: tensor.size(axis) for name, tensor in new.items()}
        self._length += max(sizes.values())
        self._most = max(self._most, self._length)
        return {
            name: self._places(name, self._entries(name, start), size)
            for name, size in sizes.items()
        }

    def _places(self, name: str, start: int, size: int) -> Tensor:
        """Return a view of `size` entries of a column from `start` on.

        If `size` is 1, the views of the next entries are created as well, for later calls. Creating
        many views in one torch call takes less time per view.
        """
        column = self._data[name]
        if size != 1:
            return column.narrow(self._axis, start, size)
        own, first, views = self._views.get(name, (None, 0, ()))
        if own is not column or not first <= start < first + len(views):
            first, count = start, min(VIEWS, column.size(self._axis) - start)
            views = torch.split(column.narrow(self._axis, start, count), 1, dim=self._axis)
            self._views[name] = column, first, views
        return views[start - first]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every column."""
        self._length = min(self._length, length)

    def let_go(self) -> None:
        """Release all memory of this object, because another object has replaced it.

        An old checkpoint may still refer to this object. Without this call, the checkpoint would
        keep the memory alive.
        """
        self._data, self._views, self._length = {}, {}, 0

    def after(self, count: int, room: int = 0) -> Columns:
        """Return a copy without the first `count` tokens, and with capacity for `room` tokens."""
        copy, rest = Columns(self._axis, self._fill), len(self) - count
        for name, tensor in self._data.items():
            shape = list(tensor.shape)
            shape[self._axis] = max(rest, room)
            copy._data[name] = self._new(tensor, shape)
        copy.append({name: self[name].narrow(self._axis, count, rest) for name in self._data})
        return copy

    def reordered(self, batch_indices: Tensor) -> Self:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this object."""
        copy = self._fresh()
        copy._length = self._length
        for name, tensor in self._data.items():
            held = self[name].index_select(0, batch_indices.to(tensor.device))
            copy._data[name] = self._new(tensor, [len(held), *tensor.shape[1:]])
            copy[name].copy_(held)
        return copy

    def expand_batch(self, count: int) -> Columns:
        """Return a read-only view in which the single sequence of this object appears `count`
        times.
        """
        view = self._fresh()
        view._length, view._lent = self._length, True
        view._data = {
            name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in self._data.items()
        }
        return view

    def checkpoint(self) -> Any:
        """Return the current state, to which `rollback` can return.

        This must be fast, because every decode step calls it.
        """
        return self._data, self._length, self._sharing

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        self._data, self._length, self._sharing = checkpoint
        self._views = {}  # they may keep other memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that uses the same memory at first.

        The memory is copied when one of the two objects must write where the other reads. For a
        view from `expand_batch`, the memory is copied at once.
        """
        if self._lent:
            return self.reordered(torch.arange(self.batch))
        self._sharing.join(self, max(self._most, self._length))
        twin = self._shallow()
        twin._most, twin._views = twin._length, {}
        twin._sharing.join(twin, twin._length)
        return twin

    def emptied(self) -> Self:
        """Return empty columns with the same options."""
        return self._fresh()

    def nbytes(self) -> int:
        """Return the bytes in use, without unused capacity."""
        return sum(nbytes for _, nbytes in self._in_use())

    def memory(self) -> dict[int, int]:
        """Return the bytes in use of each column, by the address of the column.

        `protocol.ReportsMemory.memory` describes this format.
        """
        return {column.data_ptr(): nbytes for column, nbytes in self._in_use() if nbytes}

    def _in_use(self) -> list[tuple[Tensor, int]]:
        """Return each column and the number of its bytes that contain entries.

        Another thread may change the columns during this call, so the recorded number of entries
        can exceed the capacity of a column. Therefore at most the capacity is counted.
        """
        data, length, sizes = self._data, self._length, list[tuple[Tensor, int]]()
        for name, column in data.items():
            room = column.size(self._axis)
            entries = min(self._entries(name, length), room)
            sizes.append((column, column.nbytes // room * entries if room else 0))
        return sizes

    def _fresh(self) -> Self:
        return type(self)(self._axis, self._fill)

    def _entries(self, name: str, tokens: int) -> int:
        """Return how many entries of the column `name` belong to the first `tokens` tokens."""
        return tokens

    def _fits(self, new: Mapping[str, Tensor]) -> bool:
        """Return True if the tensors `new` can be appended without allocating more memory."""
        axis, length = self._axis, self._length
        for name, tensor in new.items():
            held = self._data.get(name) if length else None
            if held is None or self._entries(name, length) + tensor.size(axis) > held.size(axis):
                return False
        return True

    def _claimed(self, new: Mapping[str, Tensor]) -> bool:
        """Return True if this object may write `new` behind its entries, in memory that its deep
        copies share. The result is False if a copy uses that part of the memory."""
        count = max((tensor.size(self._axis) for tensor in new.values()), default=0)
        return self._sharing.claim(self, self._length, self._length + count)

    def _room(self, new: Mapping[str, Tensor], fresh: bool = False) -> dict[str, Tensor]:
        """Return tensors of all columns, with free capacity for the entries `new`.

        A column that is too small is copied to new memory. If `fresh`, every column is copied.
        """
        grown = dict(self._data)
        for name in grown.keys() - new.keys() if fresh else ():
            grown[name] = grown[name].clone()
        for name, tensor in new.items():
            held_entries = self._entries(name, self._length)
            need = held_entries + tensor.shape[self._axis]
            held = self._data.get(name)
            if held is not None and not self._length and not _alike(held, tensor, self._axis):
                held = None  # left by a first append that failed; its shapes need not fit
            capacity = 0 if held is None else held.shape[self._axis]
            if held is not None and need <= capacity and not fresh:
                continue
            shape = list(tensor.shape)
            cpu = tensor.device.type == "cpu"
            shape[self._axis] = 2 * need if cpu else max(need, capacity if fresh else 2 * capacity)
            grown[name] = self._new(tensor, shape)
            if held is not None:
                grown[name].narrow(self._axis, 0, held_entries).copy_(self[name])
        return grown

    def _new(self, like: Tensor, shape: list[int]) -> Tensor:
        made = torch.empty(shape, dtype=like.dtype, device=like.device)
        return made if self._fill is None else made.fill_(self._fill)


class BlockColumns(Columns):
    """Columns that grow and shrink by whole blocks of tokens.

    The column `centers` has one entry per block, all other columns have one entry per token.
    `truncate` also removes the last block if only some of its tokens would remain.

    Args:
        block: Number of tokens in a block.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self._block = block

    def truncate(self, length: int) -> None:
        """Keep the blocks whose tokens are all among the first `length` tokens."""
        super().truncate(length // self._block * self._block)

    def _entries(self, name: str, tokens: int) -> int:
        """Return how many entries of the column `name` belong to the first `tokens` tokens."""
        return tokens // self._block if name == "centers" else tokens

    def _fresh(self) -> Self:
        return type(self)(self._block)


def _alike(held: Tensor, new: Tensor, axis: int) -> bool:
    return held.shape[:axis] == new.shape[:axis] and held.shape[axis + 1 :] == new.shape[axis + 1 :]


class Valid(Restorable):
    """Records which tokens are valid, as flags bool `[B, N]`: False for padding.

    No flags are stored until the first padded token. Unused capacity contains True, so appending
    tokens without padding launches no kernel.

    Attributes:
        all_from: Position from which on no token is padded, as far as the host knows.
    """

    def __init__(self) -> None:
        self._columns = Columns(axis=1, fill=1)
        # The number of tokens for which a flag (valid or padding) has ever been written, also if
        # the tokens were removed later. `rollback` must not reduce this number. So the number is
        # stored in a list, because `rollback` restores attributes, but not the contents of a list.
        self._touched = [0]
        self.all_from = 0

    @staticmethod
    def of(flags: Tensor) -> Valid:
        """Return a `Valid` with the given flags, bool `[B, N]`."""
        valid = Valid()
        valid.append(valid.reserve(0, flags[:, None], flags), all_real=False)
        return valid

    @property
    def flags(self) -> Tensor | None:
        """False for padding tokens, bool `[B, N]`; None if no token is padding."""
        return self._columns["valid"] if len(self._columns) else None

    def reserve(self, length: int, like: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Prepare an append: allocate memory for the flags of new tokens.

        Args:
            length: Number of tokens so far.
            like: A tensor `[B, G, n, ...]` with one entry per new token.
            valid: Flags of the new tokens, bool `[B, n]`; None if none of them is padded.

        Returns:
            The argument `reserved` with which `append` must be called next.
        """
        B, count, device = like.shape[0], like.shape[2], like.device
        if valid is None and self.flags is None:
            return {}
        if valid is None:
            valid = self._columns["valid"][:, :1].expand(B, count)  # `append` reads only the shape
        elif self.flags is None:
            before = torch.ones((B, length), dtype=torch.bool, device=device)
            valid = torch.cat([before, valid], dim=1)
        self._columns.reserve({"valid": valid})
        return {"valid": valid}

    def append(self, reserved: dict[str, Tensor], *, all_real: bool) -> None:
        """Append the flags of new tokens. A flag is False for a padding token.

        reserved: the result of `reserve`, which has allocated memory for these flags.
        all_real: True if the argument `valid` of `reserve` was None (no new token is padded).
        """
        if not reserved:
            return
        start, touched = len(self._columns), self._touched
        place = self._columns.claim(reserved)["valid"]
        if not all_real:
            touched[0] = max(touched[0], len(self._columns))
            place.copy_(reserved["valid"])
            self.all_from = len(self._columns)
        elif start < touched[0]:
            place.fill_(1)  # overwrite flags of truncated tokens, or of a failed call

    def checkpoint(self) -> Any:
        """Return the current state, to which `rollback` can return."""
        return self._columns, self._columns.checkpoint(), self._touched, self.all_from

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        self._columns, columns, self._touched, self.all_from = checkpoint
        self._columns.rollback(columns)

    def truncate(self, length: int) -> None:
        """Keep the flags of the first `length` tokens, and remove all others."""
        self._columns.truncate(length)
        self.all_from = min(self.all_from, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Valid:
        """Return a copy that uses the same memory at first.

        The memory is copied when one of the two objects must write where the other reads.
        """
        twin = self._shallow()
        twin._columns = deepcopy(self._columns, memo)
        return twin

    def reordered(self, batch_indices: Tensor) -> Valid:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this object."""
        copy = Valid()
        copy._columns = self._columns.reordered(batch_indices)
        copy._touched, copy.all_from = self._touched.copy(), self.all_from
        return copy

    def emptied(self) -> Valid:
        """Return an empty object of this class, which has no tokens."""
        return Valid()

    def nbytes(self) -> int:
        """Return the size in bytes of all stored flags."""
        return self._columns.nbytes()
