"""The window: keys and values of the newest tokens, and of the sink (the first tokens that are not
padding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows, Shown
from kvindex.core.restore import Restorable
from kvindex.core.transaction import in_plain_torch
from kvindex.layer.sink import Sink, first_of, joined, joining
from kvindex.storage.columns import Columns, Valid
from kvindex.storage.layout import TensorSpec, check_layout, distinct
from kvindex.storage.state import NamedState, State


@dataclass(frozen=True, eq=False)
class Leaving:
    """The oldest rows of a window, which are about to move into the index.

    Args:
        rows: Keys `[B, G, n, D]` and values `[B, G, n, Dv]` of `n` tokens.
        retrievable: Bool `[B, n]`, True for rows that a search may return, which are neither
            padding nor sink. None if a search may return all rows.
        sink: The sink after the move.
    """

    rows: Rows
    retrievable: Tensor | None
    sink: Sink | None

    @property
    def count(self) -> int:
        """Number of tokens, `n`, that are about to move from the window into the index."""
        return self.rows.keys.shape[2]


class Window(NamedState, Restorable):
    """Rows (keys and values) of the newest tokens, and of the sink.

    From the oldest to the newest, the window contains:

    - `leaving` tokens, which are moving into the index;
    - `local` tokens, which stayed in the window when tokens last moved into the index;
    - `buffer` tokens, which were appended after that.

    Kernels read the rows of sink and window from one tensor, which is called the resident rows. A
    decode step in a CUDA graph writes the row of a new token only to this tensor, and the window
    copies it later. Until then, the token is called staged.

    In all methods, positions count from the start of the sequence, `indexed` is the number of
    tokens in the index, and `N` is the number of tokens in index and window together.

    Args:
        geometry: The layer's geometry.
        sink_size: Size of the sink in tokens.
        local_size: Number of tokens that stay in the window when older ones move into the index.
        room: Number of tokens to reserve memory for.
        unit: Tokens move so that the index then contains a multiple of this number of tokens.
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
        # buffer with the rows of sink and window, for an index that computes attention itself
        self._resident: ResidentRows | None = None
        self._moved = False  # True: rows were removed or moved, so `_resident` must be rewritten
        self._counted = 0  # tokens of the window with staged ones; only used if some are staged
        # flags of staged tokens, bool [B, n] from a position in the window on, if some are padding
        self._flags: list[tuple[int, Tensor]] = []
        self._padded: Tensor | float | None = 0.0  # number of padding tokens; None: not counted yet

    def checkpoint(self) -> Any:
        """Return the present state for `rollback`, without copying keys and values."""
        self._take_staged()
        sizes = self.leaving, self.local, self._local_before
        parts = self._window, self._window.checkpoint(), self._valid, self._valid.checkpoint()
        return sizes, parts, self.sink, self._resident, self._padded

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        sizes, parts, self.sink, self._resident, self._padded = checkpoint
        self.leaving, self.local, self._local_before = sizes
        self._counted, self._flags = 0, []
        self._window, window, self._valid, valid = parts
        self._window.rollback(window)
        self._valid.rollback(valid)
        self._moved = True  # the resident rows may contain tokens that are gone now

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with separate memory, because appending writes to the memory in place."""
        self._take_staged()
        memo[id(self._window)] = self._window.after(0, self._room)
        return super().__deepcopy__(memo)

    def _after_copy(self) -> None:
        self._resident = None

    def packed(self) -> State:
        """Return the state of the window as named tensors, for saving.

        Call this only while no tokens are moving from the window into the index.
        """
        self._take_staged()
        return self._packed()

    def check(self, state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Raise ValueError for a state that `packed` could not have returned.

        Args:
            state: Named tensors.
            sizes: `N`, the number of tokens in the index, and `B`, the number of sequences, if it
                is known.
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
        """Number of sequences in the batch, `B`. It is 0 before the first token."""
        return self._window.batch

    @property
    def buffer(self) -> int:
        """Number of tokens appended since tokens last moved into the index."""
        return len(self) - self.leaving - self.local

    @property
    def rows(self) -> Rows:
        """Keys `[B, G, W, D]` and values `[B, G, W, Dv]` of the window's tokens."""
        self._take_staged()
        return Rows(self._window["keys"], self._window["values"])

    @property
    def valid(self) -> Tensor | None:
        """Mask bool `[B, N]`: False for padding tokens. None if no token is padding."""
        self._take_staged()
        return self._valid.flags

    @property
    def padding(self) -> bool:
        """True if any token is padding. Unlike `valid`, this changes nothing in the window."""
        return self._valid.flags is not None

    def real(self, start: int, stop: int | None = None) -> Tensor | None:
        """Return the mask of tokens that are not padding (`valid`), from position `start` to
        `stop`.

        Returns None if no token from `start` on is padding.
        """
        if self.valid is None or start >= self._valid.all_from:
            return None
        return self.valid[:, start:stop]

    @property
    def padded(self) -> Tensor | float:
        """Number of padding tokens, mean over the batch.

        The property returns the same object again until an append or a truncation may have changed
        the number. So callers can compare with `is`, without waiting for the device.
        """
        if self._padded is None:
            flags = self._valid.flags  # those of staged tokens are in `_flags`
            every = [] if flags is None else [flags, *(own for _, own in self._flags)]
            self._padded = sum(((~own).sum(1).float().mean() for own in every), 0.0)
        return self._padded

    @property
    def masked(self) -> Tensor | float:
        """Number of rows that the mask of the resident rows hides (`ResidentRows.masked`)."""
        return 0.0 if self._resident is None else self._resident.masked

    # Append and truncate

    def append(self, indexed: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
        """Append `T` tokens.

        Args:
            indexed: Number of tokens in the index.
            keys: `[B, G, T, D]`.
            values: `[B, G, T, Dv]`.
            valid: Bool `[B, T]`, False for padding, or None if no token is padding.
        """
        places = self.claim(indexed, keys, values, valid)
        places.keys.copy_(keys)
        places.values.copy_(values)

    def claim(self, indexed: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> Rows:
        """Make room for `T` new tokens, and return the memory for their keys and values.

        The caller must write to this memory. The arguments are those of `append`.
        """
        self._take_staged()
        start = indexed + len(self)
        flags = self._valid.reserve(start, keys, valid)
        places = self._window.claim({"keys": keys, "values": values})
        self._valid.append(flags, all_real=valid is None)
        if valid is not None:
            self._padded = None
        return Rows(places["keys"], places["values"])

    def truncate(self, indexed: int, length: int, sink: Sink | None) -> None:
        """Remove the tokens from position `length` on.

        No update may be moving one of these tokens into the index at the time of the call. `sink`
        is the attention sink (the first tokens of the sequence) after the truncation.
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
        other._moved, other._padded, other._counted, other._flags = True, None, 0, []
        return other

    # A token is called staged if its row is only in the resident rows (the tensor with sink and
    # window that kernels read and append to), and the window has not copied the row yet.

    def count_staged(
        self, kept: int = 1, of: int = 1, shown: Shown | None = None, before: int = 0
    ) -> ResidentRows:
        """Count the tokens of a decode step that a CUDA graph has replayed.

        The graph writes the rows of new tokens only to the resident rows (the buffer with the rows
        of sink and window), and counts them on the device.

        Args:
            kept: Number of tokens that stay. The others are removed.
            of: Number of tokens of the decode step.
            shown: Which of the `kept` tokens each sequence keeps. The others become padding. None
                if all sequences keep as many.
            before: Only with `shown`: number of tokens of the sequence before the decode step.

        Returns:
            The resident rows.

        Raises:
            RuntimeError: The buffer was not prepared, or is full.
        """
        resident = self._resident
        if resident is None or self._moved or len(resident) + of > resident.room:
            raise RuntimeError(
                "graph: got a replay before prepare_replay(); call prepare_replay() first"
            )
        self._moved = True  # if this is interrupted, the buffer must be written again
        flags, padded = self._flags, self._padded
        if shown is not None:
            padded = self.padded + shown.hidden
            flags = [*flags, (len(self), shown.mask)]
            self._hide(shown, before, resident)
        # without a call in between, so that an interruption leaves all of them or none changed
        self._counted, self._flags, self._padded = len(self) + kept, flags, padded
        resident.claim(kept)
        if kept < of:
            resident.count.fill_(len(resident))
        self._moved = False
        return resident

    @in_plain_torch  # the caller is not in a transaction
    def _hide(self, shown: Shown, before: int, resident: ResidentRows) -> None:
        """Hide rows of new tokens, and prepare the flags of all tokens.

        The arguments are those of `count_staged`.
        """
        if self._valid.flags is None:
            known = before - (len(self) - len(self._window))  # without staged tokens
            real = torch.ones((self.batch_size, known), dtype=torch.bool, device=shown.mask.device)
            self._valid.append(self._valid.reserve(0, real[:, None], real), all_real=False)
        resident.hide(len(resident), shown)

    def drop_staged(self, count: int) -> bool:
        """Keep the first `count` tokens, if all tokens after them are staged.

        This takes less time than `truncate`, because no row is written again.

        Returns:
            False if other tokens would have to be removed, too. The window is then unchanged.
        """
        resident = self._resident
        if self._moved or resident is None or not len(self._window) <= count <= len(self):
            return False
        if any(start + flags.shape[1] > count for start, flags in self._flags):
            return False
        self._counted = count
        self.local = min(self.local, len(self) - self.leaving)
        resident.shorten(self._sink_width + count)
        return True

    @property
    def counted(self) -> int:
        """A number that represents the present end of the window. Pass it to `uncount` later, to
        remove the tokens that decode steps in a CUDA graph have appended in between.
        """
        return self._counted

    def uncount(self, counted: int) -> None:
        """Remove the tokens that decode steps in a CUDA graph have appended.

        No token may have left the window, or been truncated, since `counted` was read.

        Args:
            counted: The value of the attribute `counted` before these decode steps.
        """
        # The device's copy of the rows in sink and window, and their number, still include the
        # removed tokens. `_moved` requests that both are written again.
        self._counted, self._moved = counted, True
        self._flags = [one for one in self._flags if one[0] + one[1].shape[1] <= counted]
        self._padded = None

    def _take_staged(self) -> None:
        """Copy keys and values that are not yet in the window's own memory.

        Kernels of a decode step write the row of a new token to another buffer, which has the rows
        of sink and window (`resident`).
        """
        held, resident = len(self._window), self._resident
        if self._counted > held and resident is not None:
            self._take(held, resident)

    @in_plain_torch  # because the caller may not be in a transaction
    def _take(self, held: int, resident: ResidentRows) -> None:
        start = held + self._sink_width
        rows = resident.rows[:, :, start : start + self._counted - held]
        keys, values = rows.tensor_split([self._geometry.head_dim], dim=-1)
        before = self._window.checkpoint(), self._valid.checkpoint()
        try:
            flags = self._flags_of(held, keys)
            self._valid.append(self._valid.reserve(0, keys, flags), all_real=flags is None)
            self._window.append({"keys": keys, "values": values})
        except BaseException:
            self._window.rollback(before[0])
            self._valid.rollback(before[1])
            raise
        self._flags = []  # their padding is counted already

    def _flags_of(self, held: int, keys: Tensor) -> Tensor | None:
        """Return the flags of staged tokens with keys `[B, G, n, D]`, bool `[B, n]`; None if no one
        is padding. `held` is the position of the first in the window."""
        if not self._flags:
            return None
        shape = len(keys), keys.shape[2]
        together = torch.ones(shape, dtype=torch.bool, device=keys.device)
        for start, flags in self._flags:
            together[:, start - held : start - held + flags.shape[1]] = flags
        return together

    # The methods below move tokens from the window into the index. The class `Updates` calls
    # `oldest` and `begin` to start a move. Later it calls `without` and `end` to complete the
    # move, or `stay` to cancel it.

    def oldest(self, indexed: int) -> Leaving:
        """Return the tokens to move into the index: all but the newest `local_size`.

        If necessary, more tokens stay in the window, so that the index contains a multiple of
        `unit` tokens after the move.
        """
        count = len(self) - min(len(self), self._local_size)
        count = max(count - (indexed + count) % self._unit, 0)
        own = self.rows
        rows = Rows(own.keys[:, :, :count], own.values[:, :, :count])
        if not count:
            return Leaving(rows, None, self.sink)
        real = self.real(indexed, indexed + count)
        if self.sink is None and real is None and self._sink_size:  # needs no data from the device
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
        """Mark the oldest `count` tokens as `leaving`: they are moving into the index."""
        self._local_before, self.leaving = self.local, count
        self.local = min(len(self) - count, self._local_size)

    def without(self, count: int) -> Columns:
        """Return a copy of the window's keys and values, without the oldest `count` tokens.

        The copy has room for further tokens. Pass it to `end` as the argument `rest`.
        """
        self._take_staged()
        return self._window.after(count, self._room)

    def end(self, rest: Columns, sink: Sink | None) -> None:
        """Remove the oldest `leaving` tokens from the window, after they have moved into the index.

        This call replaces the window's keys and values with `rest`, and never raises an error.

        Args:
            rest: The result of `without`.
            sink: The sink (first tokens of the sequence) after the move.
        """
        self._counted = 0
        self._window.let_go()
        self._window, self.sink, self.leaving, self._moved = rest, sink, 0, True

    def stay(self) -> None:
        """Undo `begin`: the `leaving` tokens stay in the window."""
        self.leaving, self.local = 0, min(self._local_before, len(self))

    # Rows for attention

    @property
    def _sink_width(self) -> int:
        """Number of rows of the sink, which come first in the tensor of sink and window."""
        return 0 if self.sink is None else self.sink.ids.shape[1]

    def with_sink(self, seen: Tensor) -> tuple[Rows, Tensor]:
        """Return the rows of sink and window in one tensor, and a mask for attention.

        Args:
            seen: Bool `[B', W]`, True for the rows of the window to attend to.

        Returns:
            Keys `[B, G, S + W, D]` and values `[B, G, S + W, Dv]`, and a mask bool `[B', S + W]`,
            True for the rows of sink and window to attend to.
        """
        if self.sink is None:
            return self.rows, seen
        parts = [self.sink.rows, self.rows]
        keys = torch.cat([part.keys for part in parts], dim=2)
        values = torch.cat([part.values for part in parts], dim=2)
        return Rows(keys, values), torch.cat([self.sink.mask.expand(len(seen), -1), seen], dim=1)

    def positions(self, indexed: int) -> Tensor:
        """Return the token positions of the rows that `with_sink` returns.

        The result is int64 `[B, S + W]`, with -1 for an unused slot of the sink.
        """
        window = torch.arange(indexed, indexed + len(self), device=self._geometry.device)
        window = window.expand(self.batch_size, -1)
        return window if self.sink is None else torch.cat([self.sink.ids, window], dim=1)

    def resident(self, indexed: int, more: int = 0) -> ResidentRows:
        """Return the resident rows: a buffer with the rows of sink and window, brought up to date.

        `more` is the number of further rows for which the buffer must have room.
        """
        resident, length = self._resident, len(self)
        held, count = self._sink_width, length + more
        if self._moved:
            self._take_staged()
        if resident is None or resident.batch != self.batch_size or resident.room < held + count:
            self._take_staged()
            room = self.room(more)
            resident = ResidentRows(self._geometry, self.batch_size, room)
            self._resident, self._moved = resident, True
        if self._moved:  # not also if the buffer is empty: a capture would record the new count
            resident.replace(self._parts(indexed))
        elif (new := len(resident) - held) < length:
            window, seen = self.rows, self.real(indexed + new)
            resident.add(window.keys[:, :, new:], window.values[:, :, new:], seen)
        self._moved = False
        return resident

    def room(self, more: int) -> int:
        """Return the number of tokens for which a buffer for sink and window needs room.

        `more` is the number of tokens to append.
        """
        return max(self._sink_width, self._sink_size) + max(len(self) + more, self._room)

    def more_for(self, tokens: int) -> int:
        """Return for how many tokens, after those of the window, a buffer for steps of `tokens`
        tokens needs room so that it does not have to grow while the window fills up.

        Each new buffer needs another CUDA graph.
        """
        if tokens == 1:
            return 1
        # such a step may begin up to `tokens - 1` tokens later than one of a single token
        return max(self._room + tokens - 2 - len(self), 0) + tokens

    @property
    def outdated(self) -> bool:
        """True if the resident rows must be written again before kernels read them."""
        return self._moved

    def lies_in(self, resident: ResidentRows) -> bool:
        """Return True if this window stores keys and values of sink and window in the buffer
        `resident`."""
        return self._resident is resident

    def lie_in(self, resident: ResidentRows | None) -> None:
        """Store keys and values of sink and window in the buffer `resident` from now on.

        The buffer must have the batch size of the window. If `resident` is None, the window makes a
        new buffer.
        """
        if self._resident is not resident:
            self._take_staged()
            self._resident, self._moved = resident, True

    def _parts(self, indexed: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return keys and values of sink and window as arguments for `ResidentRows.replace`."""
        sink, parts = self.sink, list[tuple[Tensor, Tensor, Tensor | None]]()
        if sink is not None:
            parts.append((sink.rows.keys, sink.rows.values, None if sink.whole else sink.mask))
        if len(self):
            parts.append((self.rows.keys, self.rows.values, self.real(indexed)))
        return parts

    def nbytes(self) -> int:
        """Return how many bytes of memory the window, its mask and the sink use.

        Any thread may call this at any time.
        """
        g, valid, sink, resident = self._geometry, self._valid.nbytes(), self.sink, self._resident
        used = self.batch_size * len(self) * g.kv_heads * (g.head_dim + g.value_dim)
        used = used * g.dtype.itemsize + valid
        if valid:
            used += self.batch_size * (len(self) - len(self._window))
        used += 0 if sink is None else sink.nbytes()
        return used + (0 if resident is None else resident.nbytes())
