"""Growable per-token tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core.restore import Restorable
from kvindex.storage.sharing import Sharing


class Columns(Restorable):
    """Named tensors that grow along their token axis, like the columns of a table.

    Capacity doubles when it runs out, so that `N` appends of one token copy `O(N)` rows. On a CPU
    there is as much to spare from the first append on: memory that nobody touches is none. The
    first append fixes names, dtypes, devices and all sizes but that of the token axis.
    A deep copy shares what both hold: the one that appends while the other could read there, of a
    length that it has held, copies first.
    fill: what room holds that nobody has written; None for anything.
    """

    def __init__(self, axis: int = 2, fill: int | None = None) -> None:
        self._axis, self._fill = axis, fill
        self._data: dict[str, Tensor] = {}  # each as long as its capacity
        self._length = 0
        self._most = 0  # that was held: a checkpoint may hold it still
        self._sharing = Sharing()  # of this memory, with deep copies
        self._lent = False  # whether this is a view of others' memory

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def __getitem__(self, name: str) -> Tensor:
        """A view of the column: its shape has `len(self)` at the token axis."""
        return self._data[name].narrow(self._axis, 0, self._entries(name, self._length))

    def every(self, name: str, tokens: int, stride: int) -> Tensor:
        """A view of every so many of a column's first tokens, from the first one on."""
        index = [slice(None)] * self._axis + [slice(0, tokens, stride)]
        return self[name][tuple(index)]

    @property
    def written(self) -> int:
        """Tokens that `every` may read: those held, and others that `write` put after them."""
        return self._length

    @property
    def batch(self) -> int:
        """Rows of the batch, 0 before the first append."""
        for tensor in self._data.values():
            return tensor.size(0)
        return 0

    def reserve(self, new: Mapping[str, Tensor]) -> None:
        """Make room for `new`. May run out of memory; what is held stays as it was.

        Raises RuntimeError for a view.
        """
        if self._lent:
            raise RuntimeError(
                "append: got a view of expand_batch(), allowed are search and fetch, or a deep copy"
            )
        if self._sharing.shared and not self._claimed(new):
            self._data, self._sharing = self._room(new, anew=True), Sharing()
        elif not self._fits(new):
            self._data = self._room(new)

    def write(self, new: Mapping[str, Tensor]) -> None:
        """Nothing: `append` copies."""

    def append(self, new: Mapping[str, Tensor]) -> None:
        """Append tensors that agree with the columns in all but the token axis."""
        if not new:
            return
        for name, place in self.claim(new).items():
            place.copy_(new[name])

    def claim(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `append`, but for copying: where the caller is to write each of `new`."""
        self.reserve(new)
        axis, start = self._axis, self._length
        self._length += max(tensor.size(axis) for tensor in new.values())
        self._most = max(self._most, self._length)
        return {
            name: self._data[name].narrow(axis, self._entries(name, start), tensor.size(axis))
            for name, tensor in new.items()
        }

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = min(self._length, length)

    def let_go(self) -> None:
        """Hold nothing, for other columns have come in this one's place.

        Whoever keeps a checkpoint from when this was empty keeps it, too, but not what came since.
        """
        self._data, self._length = {}, 0

    def after(self, count: int, room: int = 0) -> Columns:
        """A copy without the first `count` tokens, with room for `room` tokens at least."""
        copy, rest = Columns(self._axis, self._fill), len(self) - count
        for name, tensor in self._data.items():
            shape = list(tensor.shape)
            shape[self._axis] = max(rest, room)
            copy._data[name] = self._new(tensor, shape)
        copy.append({name: self[name].narrow(self._axis, count, rest) for name in self._data})
        return copy

    def reordered(self, batch_indices: Tensor) -> Self:
        """A copy in which row `b` is row `batch_indices[b]` of this."""
        copy = self._fresh()
        copy._length = self._length
        for name, tensor in self._data.items():
            held = self[name].index_select(0, batch_indices.to(tensor.device))
            copy._data[name] = self._new(tensor, [len(held), *tensor.shape[1:]])
            copy[name].copy_(held)
        return copy

    def expand_batch(self, count: int) -> Columns:
        """A view of a batch of 1 as one of `count`; it cannot be appended to."""
        view = self._fresh()
        view._length, view._lent = self._length, True
        view._data = {
            name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in self._data.items()
        }
        return view

    def checkpoint(self) -> Any:
        """What is held now, for `rollback`: an object of few attributes, many times a step."""
        return self._data, self._length, self._sharing

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says."""
        self._data, self._length, self._sharing = checkpoint

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares what is held now, until one of both writes where the other reads.

        Of a view, memory of its own.
        """
        if self._lent:
            return self.reordered(torch.arange(self.batch))
        self._sharing.join(self, max(self._most, self._length))
        twin = self._shallow()
        twin._most = twin._length
        twin._sharing.join(twin, twin._length)
        return twin

    def emptied(self) -> Self:
        """The same before its first append, names and sizes included."""
        return self._fresh()

    def nbytes(self) -> int:
        """Bytes in use (what is reserved beyond the length is not counted)."""
        return sum(nbytes for _, nbytes in self._in_use())

    def memory(self) -> dict[int, int]:
        """As `protocol.ReportsMemory.memory`: a column is in one piece, of the bytes in use."""
        return {column.data_ptr(): nbytes for column, nbytes in self._in_use() if nbytes}

    def _in_use(self) -> list[tuple[Tensor, int]]:
        """The columns, and the number of bytes of each that are in use.

        If another thread changes the columns meanwhile, columns and length may not belong together,
        so the length is limited to the size of each column.
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
        """Entries of a column for so many tokens."""
        return tokens

    def _fits(self, new: Mapping[str, Tensor]) -> bool:
        """Whether there is room for `new` after what is held, as there mostly is."""
        axis, length = self._axis, self._length
        for name, tensor in new.items():
            held = self._data.get(name) if length else None
            if held is None or self._entries(name, length) + tensor.size(axis) > held.size(axis):
                return False
        return True

    def _claimed(self, new: Mapping[str, Tensor]) -> bool:
        """Whether no copy reads where `new` will be written, nor will from now on."""
        count = max((tensor.size(self._axis) for tensor in new.values()), default=0)
        return self._sharing.claim(self, self._length, self._length + count)

    def _room(self, new: Mapping[str, Tensor], anew: bool = False) -> dict[str, Tensor]:
        """Columns with room for `new`; anew: all of them in memory of their own."""
        grown = dict(self._data)
        for name in grown.keys() - new.keys() if anew else ():
            grown[name] = grown[name].clone()
        for name, tensor in new.items():
            held_entries = self._entries(name, self._length)
            need = held_entries + tensor.shape[self._axis]
            held = self._data.get(name)
            if held is not None and not self._length and not _alike(held, tensor, self._axis):
                held = None  # left by a first append that failed
            capacity = 0 if held is None else held.shape[self._axis]
            if held is not None and need <= capacity and not anew:
                continue
            shape = list(tensor.shape)
            cpu = tensor.device.type == "cpu"
            shape[self._axis] = 2 * need if cpu else max(need, capacity if anew else 2 * capacity)
            grown[name] = self._new(tensor, shape)
            if held is not None:
                grown[name].narrow(self._axis, 0, held_entries).copy_(self[name])
        return grown

    def _new(self, like: Tensor, shape: list[int]) -> Tensor:
        made = torch.empty(shape, dtype=like.dtype, device=like.device)
        return made if self._fill is None else made.fill_(self._fill)


class BlockColumns(Columns):
    """Columns of whole blocks of `block` tokens; the column `centers` has an entry for each block.

    What is appended begins and ends a block, and one that `truncate` cuts into goes whole.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self._block = block

    def truncate(self, length: int) -> None:
        """Keep the blocks that the first `length` tokens fill."""
        super().truncate(length // self._block * self._block)

    def _entries(self, name: str, tokens: int) -> int:
        """As `Columns._entries`."""
        return tokens // self._block if name == "centers" else tokens

    def _fresh(self) -> Self:
        return type(self)(self._block)


def _alike(held: Tensor, new: Tensor, axis: int) -> bool:
    return held.shape[:axis] == new.shape[:axis] and held.shape[axis + 1 :] == new.shape[axis + 1 :]


class Valid(Restorable):
    """Which tokens are real, bool `[B, N]`: takes no memory before the first padded token.

    all_from: tokens from this one on are real, as far as the host knows without asking a device;
    their flags are what unwritten room holds, so that they cost no operation.
    """

    def __init__(self) -> None:
        self._columns = Columns(axis=1, fill=1)
        self._touched = [0]  # of this room, tokens that ever had flags; going back leaves it
        self.all_from = 0

    @staticmethod
    def of(flags: Tensor) -> Valid:
        """That of tokens with these flags, bool `[B, N]`."""
        valid = Valid()
        valid.append(valid.reserve(0, flags[:, None], flags), all_real=False)
        return valid

    @property
    def flags(self) -> Tensor | None:
        """Bool `[B, N]`, or None while every token is real."""
        return self._columns["valid"] if len(self._columns) else None

    def reserve(self, length: int, like: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Make room for tokens `[B, G, n, ...]` `like` after `length` others; gives the flags."""
        B, count, device = like.shape[0], like.shape[2], like.device
        if valid is None and self.flags is None:
            return {}
        if valid is None:
            valid = self._columns["valid"][:, :1].expand(B, count)  # of that shape: not read
        elif self.flags is None:
            before = torch.ones((B, length), dtype=torch.bool, device=device)
            valid = torch.cat([before, valid], dim=1)
        self._columns.reserve({"valid": valid})
        return {"valid": valid}

    def append(self, reserved: dict[str, Tensor], *, all_real: bool) -> None:
        """Append what `reserve` gave; all_real: whether it had no flags to go by."""
        if not reserved:
            return
        start, touched = len(self._columns), self._touched
        place = self._columns.claim(reserved)["valid"]
        if not all_real:
            touched[0] = max(touched[0], len(self._columns))
            place.copy_(reserved["valid"])
            self.all_from = len(self._columns)
        elif start < touched[0]:
            place.fill_(1)  # of a sequence that was cut, or of a call that failed

    def checkpoint(self) -> Any:
        """What is held now, for `rollback`."""
        return self._columns, self._columns.checkpoint(), self._touched, self.all_from

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says."""
        self._columns, columns, self._touched, self.all_from = checkpoint
        self._columns.rollback(columns)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._columns.truncate(length)
        self.all_from = min(self.all_from, length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Valid:
        """A copy that shares flags, and what is known of the room after them, as `Columns`."""
        twin = self._shallow()
        twin._columns = deepcopy(self._columns, memo)
        return twin

    def reordered(self, batch_indices: Tensor) -> Valid:
        """A copy in which row `b` is row `batch_indices[b]` of this."""
        copy = Valid()
        copy._columns = self._columns.reordered(batch_indices)
        copy._touched, copy.all_from = self._touched.copy(), self.all_from
        return copy

    def emptied(self) -> Valid:
        """The same before its first append."""
        return Valid()

    def nbytes(self) -> int:
        """Bytes in use."""
        return self._columns.nbytes()
