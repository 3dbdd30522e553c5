"""The window: keys and values of the newest tokens, and of the sink (the first real tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable
from kvindex.core.transaction import in_plain_torch
from kvindex.layer.sink import Sink, first_of, joined, joining
from kvindex.storage.columns import Columns, Valid
from kvindex.storage.layout import TensorSpec, check_layout, distinct
from kvindex.storage.state import NamedState, State


@dataclass(frozen=True, eq=False)
class Leaving:
    """The oldest rows of a window, `[B, G, n, D]`, which are about to move into the index.

    retrievable: bool `[B, n]`, which of these rows a search may return, or None for all rows; sink:
    the sink after the move.
    """

    rows: Rows
    retrievable: Tensor | None
    sink: Sink | None

    @property
    def count(self) -> int:
        """Number of tokens, `n`."""
        return self.rows.keys.shape[2]


class Window(NamedState, Restorable):
    """Rows (keys and values) of the newest tokens, and of the sink.

    In order of position, the window contains three kinds of tokens. `leaving` tokens are moving
    into the index. `local` tokens were the newest ones at the last update. Tokens in the `buffer`
    were appended since then. The newest tokens may be staged: a captured step has written their
    rows to the buffer of the resident rows (sink and window, for kernels), and the window copies
    them when its own rows are read.

    In all methods, positions count from the start of the sequence, `indexed` is the number of
    tokens in the index, and `N` is the number of tokens in index and window together.

    Args:
        geometry: The layer's geometry.
        sink_size: Size of the sink in tokens.
        local_size: Number of tokens that stay in the window at an update.
        room: Number of tokens to reserve memory for.
        unit: Number of tokens that leave together, counted from the index's first token.
    """

    statistics = ("_window", "_valid", "local", "sink")

    _window: Columns  # keys, values [B, G, W, D]
    _valid: Valid  # flags of all tokens, in the index and in the window
    local: int
    sink: Sink | None

    def __init__(
        self, geometry: Geometry, *, sink_size: int, local_size: int, room: int, unit: int = 1
    ) -> None:
        self._geometry, self._unit = geometry, unit
        self._sink_size, self._local_size, self._room = sink_size, local_size, room
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
        self._window, self._valid, self.sink = Columns(), Valid(), None
        self.leaving = self.local = self._local_before = 0
        self._resident: ResidentRows | None = (
            None  # rows of sink and window, for an index that attends by itself
        )
        self._moved = False  # whether rows were removed or moved since `_resident` was filled
        self._counted = 0  # tokens of the window with staged ones; may be less if none is staged
        self._padded: Tensor | float | None = 0.0  # padded tokens; None: not counted yet

    def checkpoint(self) -> Any:
        """Return the present state, for `rollback`. It lists the attributes, because it must be
        fast.
        """
        self._take_staged()
        sizes = self.leaving, self.local, self._local_before
        parts = self._window, self._window.checkpoint(), self._valid, self._valid.checkpoint()
        return sizes, parts, self.sink, self._resident, self._padded

    def rollback(self, checkpoint: Any) -> None:
        """Go back to a checkpoint."""
        sizes, parts, self.sink, self._resident, self._padded = checkpoint
        self.leaving, self.local, self._local_before = sizes
        self._counted = 0
        self._window, window, self._valid, valid = parts
        self._window.rollback(window)
        self._valid.rollback(valid)
        self._moved = True  # the resident rows may contain tokens that are gone now

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with memory of its own, because the next step of either writes to it."""
        self._take_staged()
        memo[id(self._window)] = self._window.after(0, self._room)
        return super().__deepcopy__(memo)

    def _after_copy(self) -> None:
        self._resident = None

    def packed(self) -> State:
        """Return the state as named tensors. No token may be leaving."""
        self._take_staged()
        return self._packed()

    def check(self, state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Raise ValueError for a state that `packed` of a window of these sizes never returns.

        sizes: number of tokens `N` in the index and, if known, number of sequences `B`.
        """
        g, indexed = self._geometry, sizes.get("N", 0)
        keys, ids = state.get("window.keys"), state.get("sink.ids")
        W = 0 if keys is None or keys.ndim != 4 else keys.shape[2]
        known = {"G": g.kv_heads, "D": g.head_dim, "Dv": g.value_dim, "N": indexed + W}
        known |= {"B": sizes["B"]} if "B" in sizes else {}
        layout = self._layout_of_attributes(state)
        layout["local"] = TensorSpec("", torch.int64, least=0, most=W)
        if keys is not None or "window.values" in state or indexed:
            layout["window.keys"] = TensorSpec(f"B G {W} D", g.dtype)
            layout["window.values"] = TensorSpec(f"B G {W} Dv", g.dtype)
        if ids is not None:
            last = max(indexed - 1, 0)
            places = TensorSpec(
                f"B S<={self._sink_size}",
                torch.int64,
                least=-1,
                most=last,
                allowed="distinct positions",
                rule=lambda parts: distinct(parts["sink.ids"]),
            )
            layout["sink.ids"] = places
            layout["sink.rows.keys"] = TensorSpec("B G S D", g.dtype)
            layout["sink.rows.values"] = TensorSpec("B G S Dv", g.dtype)
            layout["sink.fewest"] = TensorSpec(
                "",
                torch.int64,
                allowed="the least number of places in use",
                rule=lambda parts: (
                    (parts["sink.ids"] >= 0).sum(1).min() == parts["sink.fewest"].cpu()
                ),
            )
        check_layout(layout, state, known)

    def unpack(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `packed` returned."""
        self.reset()
        self._unpack(state, self._geometry.device)
        self._padded = None

    def __len__(self) -> int:
        """Number of tokens in the window, `W`."""
        return max(len(self._window), self._counted)

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`; 0 before the first token."""
        return self._window.batch

    @property
    def buffer(self) -> int:
        """Number of tokens that are neither leaving nor local."""
        return len(self) - self.leaving - self.local

    @property
    def rows(self) -> Rows:
        """Keys and values of the window's tokens, `[B, G, W, D]`."""
        self._take_staged()
        return Rows(self._window["keys"], self._window["values"])

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        self._take_staged()
        return self._valid.flags

    def real(self, start: int, stop: int | None = None) -> Tensor | None:
        """Return `valid` from position `start` on, or None if no token is padded from there on."""
        if self.valid is None or start >= self._valid.all_from:
            return None
        return self.valid[:, start:stop]

    @property
    def padded(self) -> Tensor | float:
        """Number of padded tokens, mean over the batch.

        The same object is returned as long as the number cannot have changed.
        """
        if self._padded is None:
            flags = self._valid.flags  # without staged tokens, which are all real
            self._padded = 0.0 if flags is None else (~flags).sum(1).float().mean()
        return self._padded

    # Append and truncate

    def append(self, indexed: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
        """Append tokens: keys `[B, G, T, D]`, values `[B, G, T, Dv]`.

        valid: bool `[B, T]`, or None if no token is padded.
        """
        places = self.claim(indexed, keys, values, valid)
        places.keys.copy_(keys)
        places.values.copy_(values)

    def claim(self, indexed: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> Rows:
        """Like `append`, but return the memory to which the caller must write keys and values."""
        self._take_staged()
        start = indexed + len(self)
        flags = self._valid.reserve(start, keys, valid)
        places = self._window.claim({"keys": keys, "values": values})
        self._valid.append(flags, all_real=valid is None)
        if valid is not None:
            self._padded = None
        return Rows(places["keys"], places["values"])

    def truncate(self, indexed: int, length: int, sink: Sink | None) -> None:
        """Remove the tokens from position `length` on, which must not be leaving.

        sink: the sink after the truncation.
        """
        self._take_staged()
        self.sink, self._moved, self._counted = sink, True, 0
        self._window.truncate(max(length - indexed, 0))
        self.local = min(self.local, len(self) - self.leaving)
        self._valid.truncate(length)
        self._padded = None

    def reordered(self, batch_indices: Tensor) -> Window:
        """Return a copy in which sequence `b` is sequence `batch_indices[b]` of this window."""
        self._take_staged()
        other = self._shallow()
        other._window = self._window.reordered(batch_indices)
        other._valid = self._valid.reordered(batch_indices)
        other.sink = None if self.sink is None else self.sink.reordered(batch_indices)
        other._moved, other._padded, other._counted = True, None, 0
        return other

    # Staged tokens: a captured step has written their rows behind the rows of sink and window

    def count_staged(self) -> ResidentRows:
        """Count one more staged token, and return the buffer with the rows of sink and window.

        Raises RuntimeError if there is no such buffer, or if it has no room.
        """
        resident = self._resident
        if resident is None or self._moved or len(resident) >= resident.room:
            raise RuntimeError("graph: got a replay before prepare_replay(), allowed is one after")
        self._counted = len(self) + 1
        resident.claim(1)
        return resident

    @property
    def counted(self) -> int:
        """Number of counted tokens, for `uncount`."""
        return self._counted

    def uncount(self, counted: int) -> None:
        """Forget the tokens that were staged since `counted` returned this number.

        No token may have left the window or been truncated in between.
        """
        self._counted, self._moved = counted, True  # the count on the device may be larger

    def _take_staged(self) -> None:
        """Copy the rows of staged tokens into the window."""
        held, resident = len(self._window), self._resident
        if self._counted > held and resident is not None:
            self._take(held, resident)

    @in_plain_torch  # the caller may be outside of a transaction
    def _take(self, held: int, resident: ResidentRows) -> None:
        start = held + self._sink_width
        rows = resident.rows[:, :, start : start + self._counted - held]
        keys, values = rows.tensor_split([self._geometry.head_dim], dim=-1)
        before = self._window.checkpoint(), self._valid.checkpoint()
        try:
            self._valid.append(self._valid.reserve(0, keys, None), all_real=True)
            self._window.append({"keys": keys, "values": values})
        except BaseException:
            self._window.rollback(before[0])
            self._valid.rollback(before[1])
            raise

    # A move of tokens into the index calls `oldest` and `begin`, and later `without` and `end`.
    # `stay` cancels the move.

    def oldest(self, indexed: int) -> Leaving:
        """Return the tokens that are to leave: all but the newest `local_size`, in whole units."""
        count = len(self) - min(len(self), self._local_size)
        count = max(count - (indexed + count) % self._unit, 0)
        own = self.rows
        rows = Rows(own.keys[:, :, :count], own.values[:, :, :count])
        if not count:
            return Leaving(rows, None, self.sink)
        real = self.real(indexed, indexed + count)
        if self.sink is None and real is None and self._sink_size:  # known without the device
            first = min(count, self._sink_size)
            leaves = torch.arange(count, device=rows.keys.device) >= first
            sink = first_of(first, rows, indexed)
            return Leaving(rows, leaves.repeat(self.batch_size, 1), sink)
        new = joining(self.sink, self._sink_size, rows, real)
        if new is None:
            return Leaving(rows, real, self.sink)
        sink = joined(self.sink, new, rows, indexed)
        return Leaving(rows, ~new if real is None else real & ~new, sink)

    def begin(self, count: int) -> None:
        """Mark the oldest `count` tokens as leaving."""
        self._local_before, self.leaving = self.local, count
        self.local = min(len(self) - count, self._local_size)

    def without(self, count: int) -> Columns:
        """Return a copy without the oldest `count` tokens, and with room for more, for `end`."""
        self._take_staged()
        return self._window.after(count, self._room)

    def end(self, rest: Columns, sink: Sink | None) -> None:
        """Replace the window by `rest`: the tokens have left. This never fails."""
        self._counted = 0
        self._window.let_go()
        self._window, self.sink, self.leaving, self._moved = rest, sink, 0, True

    def stay(self) -> None:
        """Undo `begin`: no token is leaving."""
        self.leaving, self.local = 0, min(self._local_before, len(self))

    # Rows for attention

    @property
    def _sink_width(self) -> int:
        """Number of places of the sink, which come first in the buffer of sink and window."""
        return 0 if self.sink is None else self.sink.ids.shape[1]

    def with_sink(self, seen: Tensor) -> tuple[Rows, Tensor]:
        """Return the rows of sink and window `[B, G, S + W, D]`, and which are attended to.

        seen: bool `[B', W]`, which of the window's rows are attended to. The result is bool
        `[B', S + W]`.
        """
        if self.sink is None:
            return self.rows, seen
        parts = [self.sink.rows, self.rows]
        keys = torch.cat([part.keys for part in parts], dim=2)
        values = torch.cat([part.values for part in parts], dim=2)
        return Rows(keys, values), torch.cat([self.sink.mask.expand(len(seen), -1), seen], dim=1)

    def positions(self, indexed: int) -> Tensor:
        """Return the positions of the rows of `with_sink`, int64 `[B, S + W]`, -1 if unused."""
        window = torch.arange(indexed, indexed + len(self), device=self._geometry.device)
        window = window.expand(self.batch_size, -1)
        return window if self.sink is None else torch.cat([self.sink.ids, window], dim=1)

    def resident(self, indexed: int, more: int = 0) -> ResidentRows:
        """Return the rows of sink and window in one buffer, after adding the newest tokens to it.

        more: number of further rows that the buffer must have room for.
        """
        resident, length = self._resident, len(self)
        held, count = self._sink_width, length + more
        if self._moved:
            self._take_staged()
        if resident is None or resident.batch != self.batch_size or resident.room < held + count:
            self._take_staged()
            room = self.room(more)
            resident = self._resident = ResidentRows(self._geometry, self.batch_size, room)
        if self._moved or not len(resident):
            resident.replace(self._parts(indexed))
        elif (new := len(resident) - held) < length:
            window, seen = self.rows, self.real(indexed + new)
            resident.add(window.keys[:, :, new:], window.values[:, :, new:], seen)
        self._moved = False
        return resident

    def room(self, more: int) -> int:
        """Return how many rows sink and window have after `more` further tokens."""
        return max(self._sink_width, self._sink_size) + max(len(self) + more, self._room)

    def lies_in(self, resident: ResidentRows) -> bool:
        """Return whether `resident` is the buffer of sink and window."""
        return self._resident is resident

    def lie_in(self, resident: ResidentRows | None) -> None:
        """From now on, use `resident`, of the same batch size, as the buffer; None: a new one."""
        if self._resident is not resident:
            self._take_staged()
            self._resident, self._moved = resident, True

    def _parts(self, indexed: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return sink and window in the form that `ResidentRows.replace` takes."""
        sink, parts = self.sink, list[tuple[Tensor, Tensor, Tensor | None]]()
        if sink is not None:
            parts.append((sink.rows.keys, sink.rows.values, None if sink.whole else sink.mask))
        if len(self):
            parts.append((self.rows.keys, self.rows.values, self.real(indexed)))
        return parts

    def nbytes(self) -> int:
        """Bytes in use. Any thread may call this at any time."""
        g, valid, sink, resident = self._geometry, self._valid.nbytes(), self.sink, self._resident
        used = self.batch_size * len(self) * g.kv_heads * (g.head_dim + g.value_dim)
        used = used * g.dtype.itemsize + valid
        if valid:
            used += self.batch_size * (len(self) - len(self._window))
        used += 0 if sink is None else sink.nbytes()
        return used + (0 if resident is None else resident.nbytes())
