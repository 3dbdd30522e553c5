"""One attention layer over four regions: sink, retrieval, local, update buffer (paper, 4.2.1).

A token's id in the index is its position in the sequence. New tokens wait in the window (local,
then buffer); when the buffer is full the newest `local` tokens stay and the older ones move to
the index. A row's sink is its first real tokens among those that moved: they are always attended
to, and marked invalid in the index so that it never returns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex import check
from kvindex.columns import Columns, Valid
from kvindex.near import Near
from kvindex.ops.attention import attend, attend_blocks, attend_causal
from kvindex.ops.fetch import gather_rows
from kvindex.ops.select import compact
from kvindex.protocol import UNUSED, Hits, KVIndex, Rows
from kvindex.traffic import Traffic

BLOCK = 1024
"""Queries and rows that the exact path takes at a time: bounds its memory, not its result."""

GATHERED_BYTES = 2**30
"""Rows up to this size are copied out of the index for one fused call of torch's attention, several
times as fast on a CPU (benchmarks/results/reference.json); more are read block by block."""


@dataclass(frozen=True)
class Mark:
    """A point that a layer can go back to after a failure: `AttentionLayer.mark`."""

    length: int
    batch_size: int
    traffic: Traffic


class AttentionLayer:
    """Attention over an index: append, attend, and let old tokens go into the index.

    index: empty; k: rows per KV head that a step retrieves; mass: fewer, where fewer hold this
    share of the index's attention (`KVIndex.search`); sink, local, update_every: sizes of the
    regions in tokens; full_threshold: while the sequence is shorter, attention is dense (the
    index fills all the same). Raises ValueError for sizes out of range.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        k: int = 100,
        mass: float | None = None,
        sink: int = 64,
        local: int = 256,
        update_every: int = 256,
        full_threshold: int = 2048,
    ) -> None:
        self.k = check.at_least("k", k, 1)
        self.mass = None if mass is None else check.within("mass", mass, 0, 1)
        self.sink = check.at_least("sink", sink, 0)
        self.local = check.at_least("local", local, 0)
        self.update_every = check.at_least("update_every", update_every, 1)
        self.full_threshold = check.at_least("full_threshold", full_threshold, 0)
        if len(index):
            raise ValueError(f"index: got one that holds {len(index)} tokens, allowed is empty")
        self.index = index
        self._window = Columns()  # keys, values [B, G, R, D]: local, then buffer
        self._valid = Valid()  # of all tokens, in the index and in the window
        self._local = 0  # tokens of the window that are local; the others are the buffer
        self._sealed = False
        self._sink_ids: Tensor | None = None  # int64 [B, S], -1 for none, once tokens have moved
        self._sink_rows: Rows | None = None  # theirs, [B, G, S, D]
        self._beside: Near | None = None  # sink and window, for an index that attends itself
        self._moved = False  # whether rows have gone or moved since it was filled
        self.traffic = Traffic()

    def __len__(self) -> int:
        """Tokens seen, `N`: those in the index and those in the window."""
        return len(self.index) + len(self._window)

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        return self._valid.flags

    @property
    def batch_size(self) -> int:
        """Rows of the batch, `B`; 0 before the first token and after `reset`."""
        return self._window["keys"].shape[0] if "keys" in self._window else 0

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens and attend from them, causally: `[B, H, T, Dv]`.

        queries `[B, H, T, D]`, keys `[B, G, T, D]`, values `[B, G, T, Dv]`; valid bool `[B, T]`
        marks left padding. Several queries attend exactly to everything; a single query searches
        once the sequence is long enough. What a padded query gets means nothing.

        Raises ValueError or TypeError for a wrong tensor, NaN or infinity in valid keys (on a
        CUDA device later), or a padded token after a real one; the layer stays as it was.
        """
        keys, values = self._checked(queries, keys, values, valid)
        g, T = self.index.geometry, queries.shape[2]
        reserved = self._valid.reserve(len(self), keys, valid)
        if T == 1 and len(self) and not self._sealed:
            self.index.seal()
            self._sealed = True
        mark = self.mark()
        try:
            self._window.append({"keys": keys, "values": values})
            self._valid.append(reserved)
            positions = torch.arange(len(self) - T, len(self), device=g.device)
            self.index.observe(queries, positions)
            if self._searches(len(self), T):
                output = self._retrieve(queries[:, :, 0])[:, :, None]
            else:
                output = self._exact(queries, positions)
            self._update()
        except BaseException:
            self.back_to(mark)
            raise
        return output

    def mark(self) -> Mark:
        """Where the layer is now."""
        return Mark(len(self), self.batch_size, self.traffic)

    def back_to(self, mark: Mark) -> None:
        """Forget what came after `mark` (what the index was told by signals stays told)."""
        if mark.batch_size:
            self.truncate(mark.length)
        else:
            self.reset()
        self.traffic = mark.traffic

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. Raises ValueError below 0."""
        check.at_least("length", length, 0)
        indexed = len(self.index)
        if length < indexed:
            sink = self._truncated_sink(length)
            self.index.truncate(length)
            self._sink_ids, self._sink_rows = sink
        self._moved = True
        self._window.truncate(max(length - indexed, 0))
        self._local = min(self._local, len(self._window))
        self._valid.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Row `b` of the batch becomes what row `batch_indices[b]` was; int64 `[B']`."""
        check.rows("batch_indices", batch_indices, self.batch_size or None)
        if not self.batch_size:
            return
        window = self._window.reordered(batch_indices)
        valid = self._valid.reordered(batch_indices)
        sink = self._sink_ids, self._sink_rows
        if self._sink_ids is not None and self._sink_rows is not None:
            order, rows = batch_indices.to(self._sink_ids.device), self._sink_rows
            sink = self._sink_ids[order], Rows(rows.keys[order], rows.values[order])
        self.index.reorder(batch_indices)
        self._moved = True
        self._window, self._valid, (self._sink_ids, self._sink_rows) = window, valid, sink

    def reset(self) -> None:
        """Forget everything."""
        self.index.reset()
        self._window.reset()
        self._valid.reset()
        self._local, self._sealed = 0, False
        self._sink_ids = self._sink_rows = self._beside = None
        self.traffic = Traffic()

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per tier: the index's, and `window` (sink, local, buffer)."""
        window = self._window.nbytes() + self._valid.nbytes()
        if self._sink_rows is not None:
            window += self._sink_rows.keys.nbytes + self._sink_rows.values.nbytes
        if self._beside is not None:
            window += self._beside.nbytes()
        return {**self.index.nbytes(), "window": window}

    # Attention

    def _searches(self, length: int, T: int) -> bool:
        """Whether `T` queries, the newest of `length` tokens, search the index."""
        return T == 1 and length >= self.full_threshold and len(self.index) > 0

    def _exact(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Exact causal attention of the newest tokens to everything: `[B, H, T, Dv]`."""
        g, parts = self.index.geometry, []
        width = g.kv_heads * (g.head_dim + g.value_dim) * queries.element_size()
        copied = len(self.index) * queries.shape[0] * width
        if g.softcap is None and copied <= GATHERED_BYTES:
            return self._exact_gathered(queries, positions)
        for start in range(0, queries.shape[2], BLOCK):
            some = slice(start, start + BLOCK)
            blocks = self._causal_blocks(positions[some])
            output = attend_blocks(queries[:, :, some], blocks, scale=g.scale, softcap=g.softcap)
            parts.append(output)
        return torch.cat(parts, dim=2)

    def _exact_gathered(self, queries: Tensor, positions: Tensor) -> Tensor:
        """The same with all rows in one piece, where that fits."""
        scale, valid, T = self.index.geometry.scale, self._valid.flags, queries.shape[2]
        blocks = [rows for _, rows in self._blocks(len(self))] if len(self.index) else []
        keys, values = self._window["keys"], self._window["values"]
        if blocks:
            keys = torch.cat([rows.keys for rows in blocks], dim=2)
            values = torch.cat([rows.values for rows in blocks], dim=2)
        size = T if len(self) == T and valid is None else BLOCK  # a mask is held per block
        parts = []
        for start in range(0, T, size):
            some = queries[:, :, start : start + size]
            end = len(self) - T + start + some.shape[2]
            seen = None if valid is None else valid[:, :end]
            rows = keys[:, :, :end], values[:, :, :end]
            parts.append(attend_causal(some, *rows, scale=scale, valid=seen))
        return torch.cat(parts, dim=2)

    def _causal_blocks(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Everything up to the last of `positions`, block by block, with its bias."""
        first, last = int(positions[0]), int(positions[-1])
        for start, rows in self._blocks(last + 1):
            stop = start + rows.keys.shape[2]
            bias = None
            if stop > first + 1:
                columns = torch.arange(start, stop, device=positions.device)
                bias = _bias(columns <= positions[:, None])[None, None]  # [1, 1, T, R]
            if self._valid.flags is not None:
                padding = _bias(self._valid.flags[:, None, None, start:stop])  # [B, 1, 1, R]
                bias = padding if bias is None else bias + padding
            yield rows.keys, rows.values, bias

    def _blocks(self, end: int) -> Iterator[tuple[int, Rows]]:
        """The rows before position `end`, in order: (position of the first, rows)."""
        indexed = len(self.index)
        keys, values = self._window["keys"], self._window["values"]
        for start in range(0, min(indexed, end), BLOCK):
            ids = torch.arange(start, min(start + BLOCK, indexed, end), device=keys.device)
            ids = ids.expand(*keys.shape[:2], -1)
            yield start, self.index.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
        for start in range(indexed, end, BLOCK):
            some = slice(start - indexed, min(start + BLOCK, end) - indexed)
            yield start, Rows(keys[:, :, some], values[:, :, some])

    def _retrieve(self, queries: Tensor) -> Tensor:
        """Attention of queries `[B, H, D]` to sink, hits and window: `[B, H, Dv]`."""
        index: Any = self.index
        if self.mass is None and getattr(index, "attends", False):
            near = self._followed()
            output: Tensor
            output, found = index.attend(queries, near, k=self.k)
            self._count(found, found.float().mean() + near.visible)
            return output
        flags = self._valid.flags
        if flags is None:
            flags = torch.ones_like(queries[:, 0, :1], dtype=torch.bool).expand(-1, len(self))
        seen = flags[:, len(self.index) :]
        hits = index.search(queries, k=self.k, mass=self.mass)
        return self._over_regions(queries, hits, index.fetch(hits), seen)

    def _over_regions(self, queries: Tensor, hits: Hits, found: Rows, seen: Tensor) -> Tensor:
        """Attention of queries `[B, H, D]` to `found`, the sink and the window's `seen` rows.

        seen: bool `[B, R]`. Returns `[B, H, Dv]`. A layer of batch 1 serves any `B` queries.
        """
        g, B = self.index.geometry, len(queries)
        near, shown = self._near(seen)
        used = hits.ids != UNUSED
        visible = torch.cat([used, shown[:, None].expand(*used.shape[:2], -1)], dim=2)
        self._count(used, visible.sum(-1).float().mean(), hits.mass)
        bias = _bias(visible).repeat_interleave(g.group_size, dim=1)  # [B, H, K + W]
        if hits.log_weight is not None:
            bias[..., : hits.log_weight.shape[-1]] += hits.log_weight
        keys = torch.cat([found.keys, near.keys.expand(B, -1, -1, -1)], dim=2)
        values = torch.cat([found.values, near.values.expand(B, -1, -1, -1)], dim=2)
        return attend(queries, keys, values, scale=g.scale, softcap=g.softcap, bias=bias)

    def _near(self, seen: Tensor) -> tuple[Rows, Tensor]:
        """Rows of sink and window, and which of them are shown, bool `[B, W]`."""
        window = Rows(self._window["keys"], self._window["values"])
        if self._sink_ids is None or self._sink_rows is None:
            return window, seen
        parts = [self._sink_rows, window]
        rows = Rows(
            torch.cat([part.keys for part in parts], dim=2),
            torch.cat([part.values for part in parts], dim=2),
        )
        sink = (self._sink_ids != UNUSED).expand(len(seen), -1)
        return rows, torch.cat([sink, seen], dim=1)

    def _followed(self) -> Near:
        """Sink and window in a buffer that gets what has come since the last step."""
        sink = 0 if self._sink_rows is None else self._sink_rows.keys.shape[2]
        need, near = sink + len(self._window), self._beside
        if near is None or near.batch != self.batch_size or near.room < need:
            room = max(len(self._window), self.local + self.update_every)
            room += max(sink, self.sink)
            near = self._beside = Near(self.index.geometry, self.batch_size, room)
        elif self._moved:
            near.clear()
        if not len(near) and self._sink_ids is not None and self._sink_rows is not None:
            near.add(self._sink_rows.keys, self._sink_rows.values, self._sink_ids != UNUSED)
        new = slice(len(near) - sink, None)
        seen = (
            None if self._valid.flags is None else self._valid.flags[:, len(self.index) :][:, new]
        )
        near.add(self._window["keys"][:, :, new], self._window["values"][:, :, new], seen)
        self._moved = False
        return near

    def _count(self, fetched: Tensor, read: Tensor, mass: Tensor | None = None) -> None:
        """Add a step to `traffic`: rows fetched (summed), rows attended to, and `Hits.mass`."""
        g, valid = self.index.geometry, self._valid.flags
        plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
        row_bytes = getattr(self.index, "row_bytes", plain)
        self.traffic = self.traffic.counted(
            read=read,
            full=len(self) if valid is None else valid.sum(-1).float().mean(),
            fetched_bytes=fetched.sum().float() * row_bytes,
            mass=0.0 if mass is None else mass.mean(),
        )

    # Regions

    def _checked(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values with padded tokens as zeros, or an error and nothing changed."""
        g = self.index.geometry
        B = self.batch_size or None
        shape = {"B": B, "G": g.kv_heads, "T": None, "D": g.head_dim}
        check.tensor("keys", keys, shape, g.dtype, g.device)
        shape = {**shape, "B": keys.shape[0], "T": keys.shape[2]}
        check.tensor("values", values, {**shape, "D": g.value_dim}, g.dtype, g.device)
        shape = {"B": keys.shape[0], "H": g.q_heads, "T": keys.shape[2], "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        check.at_least("queries.shape[2] (tokens)", queries.shape[2], 1)
        if valid is not None:
            check.tensor("valid", valid, {"B": shape["B"], "T": shape["T"]}, torch.bool, g.device)
            self._check_padding(valid)
            padded = ~valid[:, None, :, None]
            keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
        if g.device.type != "cuda":
            check.finite("keys", keys)
            if self._searches(len(self) + 1, queries.shape[2]):
                check.finite("queries", queries)  # as the search would, but before it is too late
        return keys.detach(), values.detach()

    def _check_padding(self, valid: Tensor) -> None:
        """Padding is on the left: no padded token follows a real one."""
        sequence = valid
        if len(self):
            flags = self._valid.flags
            last = torch.ones_like(valid[:, :1]) if flags is None else flags[:, -1:]
            sequence = torch.cat([last, valid], dim=1)
        if bool((sequence[:, :-1] & ~sequence[:, 1:]).any()):
            raise ValueError(
                "valid: got a padded token after a real one, allowed is padding on the left"
            )

    def _update(self) -> None:
        """When the buffer is full, keep the newest `local` tokens and index the older ones."""
        held = len(self._window)
        if held - self._local < self.update_every:
            return
        count = held - min(held, self.local)
        if count:
            moved = Rows(self._window["keys"][:, :, :count], self._window["values"][:, :, :count])
            real = self._valid.flags
            if real is not None:
                real = real[:, len(self.index) : len(self.index) + count]
            new = self._new_sink(self.batch_size, count, real)
            retrievable = real if new is None else ~new if real is None else real & ~new
            rest = self._window.after(count)
            sink = (self._sink_ids, self._sink_rows) if new is None else self._with_sink(new, moved)
            self.index.append(moved.keys, moved.values, valid=retrievable)
            # from here on nothing fails
            self._window, (self._sink_ids, self._sink_rows) = rest, sink
            self._moved = True
        self._local = held - count

    def _new_sink(self, batch: int, count: int, real: Tensor | None) -> Tensor | None:
        """Which of the next `count` tokens belong to the sink, bool `[B, count]`, None for none."""
        have = torch.zeros(batch, dtype=torch.int64, device=self.index.geometry.device)
        if self._sink_ids is not None:
            have = (self._sink_ids != UNUSED).sum(1)
        if int(have.min()) >= self.sink:
            return None
        if real is None:
            real = torch.ones((batch, count), dtype=torch.bool, device=have.device)
        return real & (real.cumsum(1) + have[:, None] <= self.sink)

    def _with_sink(self, new: Tensor, moved: Rows) -> tuple[Tensor, Rows]:
        """Ids and rows of the sink once the tokens `new` (bool `[B, n]`) of `moved` join it."""
        ids = compact(new)
        wide = ids[:, None].expand(-1, moved.keys.shape[1], -1)
        rows = Rows(gather_rows(moved.keys, wide), gather_rows(moved.values, wide))
        ids = torch.where(ids == UNUSED, ids, ids + len(self.index))
        if self._sink_ids is None or self._sink_rows is None:
            return ids, rows
        ids = torch.cat([self._sink_ids, ids], dim=1)
        slots = compact(ids != UNUSED)  # rows that are padded differently leave gaps
        wide = slots[:, None].expand(-1, moved.keys.shape[1], -1)
        return ids.gather(1, slots.clamp_min(0)).masked_fill(slots == UNUSED, UNUSED), Rows(
            gather_rows(torch.cat([self._sink_rows.keys, rows.keys], dim=2), wide),
            gather_rows(torch.cat([self._sink_rows.values, rows.values], dim=2), wide),
        )

    def _truncated_sink(self, length: int) -> tuple[Tensor, Rows] | tuple[None, None]:
        """Ids and rows of the sink once the tokens from `length` on are gone."""
        if self._sink_ids is None or self._sink_rows is None:
            return None, None
        ids, rows = self._sink_ids, self._sink_rows
        ids = ids.masked_fill(ids >= length, UNUSED)
        some = (ids != UNUSED).any(0)  # slots that a row of the batch still uses
        return ids[:, some], Rows(rows.keys[:, :, some], rows.values[:, :, some])


def _bias(visible: Tensor) -> Tensor:
    """0 where a row is visible, `-inf` where it is not; float32."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))
