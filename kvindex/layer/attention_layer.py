"""One attention layer over its regions: sink, retrieval, local, update buffer (paper, 4.2.1).

A token's id in the index is its position in the sequence. New tokens wait in the window (local,
then buffer); when the buffer is full the newest `local` tokens stay and the older ones move to
the index. A row's sink is its first real tokens among those that moved: they are always attended
to, and marked invalid in the index so that it never returns them (docs/pipeline/regions.md).
Longer than most files: what a step does, in order.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import P, capability
from kvindex.core.guard import Guarded
from kvindex.core.protocol import (
    UNUSED,
    AppendsAsync,
    Attends,
    DecodesStep,
    Hits,
    KVIndex,
    ObservesQueries,
    Rows,
    TellsCoverage,
    TellsRowBytes,
)
from kvindex.core.restore import Restorable, cut_back
from kvindex.layer.async_append import AsyncAppend
from kvindex.layer.dense import attend_densely, bias_of
from kvindex.layer.regions import Regions
from kvindex.layer.stats import Counts, Tally, Traffic
from kvindex.ops.attention import attend

LAG = 4
"""Tokens that come while an update runs beside the steps, so that none waits for it
(`benchmarks/append.py`); each of them is a row more in the window."""


class AttentionLayer(Guarded):
    """Attention over an index: append, attend, and let old tokens go into the index.

    index: empty; k: rows per KV head that a step retrieves; coverage: fewer, where fewer hold this
    share of the index's attention (`KVIndex.search`); sink, local_window, update_every: sizes of
    the regions in tokens; dense_below: while the sequence is shorter, attention is dense (the index
    fills all the same).

    Of an index whose appends run beside searches (`protocol.AppendsAsync`), updates end `LAG`
    tokens after they began, and the window is so much longer; update_phase: when the length is this
    share of `update_every` past a multiple of it, they begin even so, that layers may take turns.
    graphs: on a GPU, steps that are all alike are captured in a CUDA graph and replayed, by an
    index that can (`protocol.DecodesStep`); results are the same. Raises ValueError for sizes out
    of range, or a coverage that the index cannot tell.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        k: int = 100,
        coverage: float | None = None,
        sink: int = 64,
        local_window: int = 256,
        update_every: int = 256,
        dense_below: int = 2048,
        update_phase: float | None = None,
        graphs: bool = True,
    ) -> None:
        self.k = check.wanted_rows(k)
        self.coverage = None if coverage is None else check.within("coverage", coverage, 0, 1)
        self.sink = check.at_least("sink", sink, 0)
        self.local_window = check.at_least("local_window", local_window, 0)
        self.update_every = check.at_least("update_every", update_every, 1)
        self.dense_below = check.at_least("dense_below", dense_below, 0)
        if update_phase is not None and not 0 <= update_phase < 1:
            raise ValueError(
                f"update_phase: got {update_phase}, allowed is a number in [0, 1), or None"
            )
        tells = capability(index, TellsCoverage)
        if coverage is not None and tells is not None:
            tells.check_coverage(coverage)
        if len(index):
            raise ValueError(f"index: got one that holds {len(index)} tokens, allowed is empty")
        self.index = index
        self.graphs = check.flag("graphs", graphs)
        self._turn = None if update_phase is None else int(update_phase * update_every)
        self._lag = min(LAG, update_every)
        sizes = dict(
            sink_size=sink, local_size=local_window, room=local_window + update_every + self._lag
        )
        self._regions = Regions(index.geometry, **sizes)
        self._move: AsyncAppend | None = None  # of the rows that are leaving
        self._sealed = False
        self._tally = Tally()
        self._usual: object = None  # shapes that were checked last

    def __len__(self) -> int:
        """Tokens seen, `N`: those in the index and those in the window."""
        return len(self.index) + len(self._regions)

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        return self._regions.valid

    @property
    def batch_size(self) -> int:
        """Rows of the batch, `B`; 0 before the first token and after `reset`."""
        return self._regions.batch_size

    @property
    def traffic(self) -> Traffic:
        """What the searching steps have read so far."""
        return self._tally.traffic

    def step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Append `T` tokens and attend from them, causally: `[B, H, T, Dv]`.

        queries `[B, H, T, D]`, keys `[B, G, T, D]`, values `[B, G, T, Dv]`; valid bool `[B, T]`
        marks left padding. Several queries attend exactly to everything; a single query searches
        once the sequence is long enough. What a padded query gets means nothing. bias: a term of
        the logits `[B, H, T, N + T]`, by which no index searches: it should be 0 for rows that have
        left the window (a bias by distance, of no more tokens than are `local`).

        Raises ValueError or TypeError for a wrong tensor, NaN or infinity in valid keys (on a
        CUDA device later), or a padded token after a real one; the layer stays as it was.
        """
        keys, values, valid = self._checked(queries, keys, values, valid)
        regions, T = self._regions, queries.shape[2]
        if T == 1 and len(self) and not self._sealed:
            self.index.end_prompt()
            self._sealed = True
        length = len(self) + T
        if bias is not None:
            shape = {"B": queries.shape[0], "H": queries.shape[1], "T": T, "N": length}
            check.tensor("bias", bias, dict(shape), device=keys.device)
            if not bias.is_floating_point():
                raise ValueError(f"bias: got dtype {bias.dtype}, allowed is one of floats")
        searches = self._searches(length, T)
        decoder = self._can(DecodesStep) if searches and valid is None and bias is None else None
        if decoder is None:
            regions.append(len(self.index), keys, values, valid)
        observer = capability(self.index, ObservesQueries)
        if observer is not None:
            positions = torch.arange(length - T, length, device=keys.device)
            observer.observe_queries(queries, positions)
        if decoder is not None:
            output = self._follow(decoder, queries[:, :, 0], Rows(keys, values))[:, :, None]
        elif searches:
            some = None if bias is None else bias[:, :, 0]
            output = self._retrieve(queries[:, :, 0], some)[:, :, None]
        else:
            output = attend_densely(self.index, regions.window, queries, regions.valid, bias)
        self._update(capability(self.index, AppendsAsync) if T == 1 else None)
        return output

    def checkpoint(self) -> Any:
        """What the layer is now, for `rollback`: it asks the device for nothing."""
        index, regions, tally = self.index, self._regions, self._tally
        before = index.checkpoint() if isinstance(index, Restorable) else len(index)
        parts = before, regions, regions.checkpoint(), tally, tally.checkpoint()
        return parts, self._move, self._sealed

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says, the index, too.

        One that is no `Restorable` is truncated to what it held, and keeps what signals told it.
        """
        parts, move, self._sealed = checkpoint
        before, self._regions, regions, self._tally, tally = parts
        if self._move is not None and self._move is not move:
            self._move.wait()  # the index writes to the same places again
        self._move = move
        self._regions.rollback(regions)
        self._tally.rollback(tally)
        if isinstance(self.index, Restorable):
            self.index.rollback(before)
        else:
            cut_back(self.index, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A layer that goes on from here by itself; what is on its way into the index arrives."""
        self._settle()
        twin = super().__deepcopy__(memo)
        if not isinstance(self.index, Restorable):
            twin.index = deepcopy(self.index, memo)
        return twin

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. Raises ValueError below 0."""
        check.at_least("length", length, 0)
        regions, indexed = self._regions, len(self.index)
        if self._move is not None and length < indexed + self._move.leaving.count:
            self._give_up()
        sink = regions.sink
        if length < indexed:
            sink = None if sink is None else sink.before(length)
            self.index.truncate(length)
        regions.truncate(indexed, length, sink)

    def reorder(self, batch_indices: Tensor) -> None:
        """Row `b` of the batch becomes what row `batch_indices[b]` was; int64 `[B']`."""
        check.rows("batch_indices", batch_indices, self.batch_size or None)
        if not self.batch_size:
            return
        self._finish()
        regions = self._regions.reordered(batch_indices)
        self.index.reorder(batch_indices)
        self._regions = regions

    def reset(self) -> None:
        """Forget everything."""
        self._give_up()
        self.index.reset()
        self._regions.reset()
        self._sealed, self._broken = False, None
        self._tally = Tally()

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per tier: the index's, and `window` (sink, local, buffer)."""
        return {**self.index.nbytes(), "window": self._regions.nbytes()}

    # Attention

    @property
    def _wanted(self) -> int:
        """Rows to ask for: `k`, but not far above what an index can hold, a summary a token."""
        most: int = 2 ** (2 * len(self.index) - 1).bit_length()
        return min(self.k, most)

    def _searches(self, length: int, T: int) -> bool:
        """Whether `T` queries, the newest of `length` tokens, search the index."""
        return T == 1 and length >= self.dense_below and len(self.index) > 0

    def _can(self, wanted: type[P]) -> P | None:
        """The index, if it attends by itself and so, without being asked for a coverage."""
        return None if self.coverage is not None else capability(self.index, wanted)

    def _follow(self, index: DecodesStep, queries: Tensor, token: Rows) -> Tensor:
        """As `_retrieve`, once the window holds the token, keys `[B, G, 1, D]`."""
        regions = self._regions
        resident = regions.resident(len(self.index), more=1)
        window = regions.claim(len(self.index), token.keys, token.values, None)
        some: Any = dict(k=self._wanted, graphs=self.graphs)
        output, found = index.decode_step(queries, token, resident, window, **some)
        self._count(found, len(resident), resident.masked)
        return output

    def _retrieve(self, queries: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attention of queries `[B, H, D]` to sink, hits and window: `[B, H, Dv]`.

        bias: of all tokens, `[B, H, N]`.
        """
        index = self.index
        attends = self._can(Attends) if bias is None else None
        if attends is not None:
            resident = self._regions.resident(len(index))
            output, found = attends.attend(queries, resident, k=self._wanted)
            self._count(found, len(resident), resident.masked)
            return output
        seen = self._regions.real(len(index))
        if seen is None:
            seen = torch.ones_like(queries[:, 0, :1], dtype=torch.bool)
            seen = seen.expand(-1, len(self._regions))
        hits = index.search(queries, k=self._wanted, coverage=self.coverage)
        return self._over_regions(queries, hits, index.fetch(hits), seen, bias)

    def _over_regions(
        self,
        queries: Tensor,
        hits: Hits,
        found: Rows,
        seen: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries `[B, H, D]` to `found`, the sink and the window's `seen` rows.

        seen: bool `[B, W]`; bias: a term of the logits, of all tokens `[B, H, N]`. Returns
        `[B, H, Dv]`. A layer of batch 1 serves any `B` queries.
        """
        g, B = self.index.geometry, len(queries)
        resident, seen = self._regions.rows(seen)
        used = hits.ids != UNUSED
        visible = torch.cat([used, seen[:, None].expand(*used.shape[:2], -1)], dim=2)
        masked = (~seen).sum(1).float().mean()
        self._count(used.sum(-1), seen.shape[1], masked, hits.coverage)
        mask = bias_of(visible).repeat_interleave(g.group_size, dim=1)  # [B, H, K + S + W]
        if hits.log_weight is not None:
            mask[..., : hits.log_weight.shape[-1]] += hits.log_weight
        if bias is not None:
            beside = self._regions.positions(len(self.index))[:, None]
            places = torch.cat([hits.ids, beside.expand(-1, g.kv_heads, -1)], dim=2)
            places = places.repeat_interleave(g.group_size, dim=1)
            mask += bias.float().gather(-1, places.clamp_min(0)).masked_fill(places < 0, 0)
        keys = torch.cat([found.keys, resident.keys.expand(B, -1, -1, -1)], dim=2)
        values = torch.cat([found.values, resident.values.expand(B, -1, -1, -1)], dim=2)
        return attend(queries, keys, values, scale=g.scale, softcap=g.softcap, bias=mask)

    def _count(
        self, found: Tensor, beside: int, masked: Tensor | float, coverage: Tensor | None = None
    ) -> None:
        """Add a step to `traffic`: rows found `[B, G]`, others, those of them not shown."""
        g = self.index.geometry
        full, tells = (len(self), self._regions.padded), capability(self.index, TellsRowBytes)
        plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
        row_bytes = plain if tells is None else tells.row_bytes
        self._tally.count(Counts(found, beside, masked, *full, row_bytes, coverage))

    # Updates

    def _update(self, beside: AppendsAsync | None = None) -> None:
        """When the buffer is full, all but the newest `local` tokens go into the index.

        beside: the index, to append while the next steps run, which attend to them where they are.
        """
        regions = self._regions
        turn = beside is not None and len(self) % self.update_every == self._turn
        if self._move is not None:
            if beside is not None and not turn and regions.buffer < self._lag:
                return
            self._finish()
        if regions.buffer < self.update_every and not turn:
            return
        leaving = regions.oldest(len(self.index))
        if leaving.count:
            self._move = AsyncAppend(self.index, leaving, beside=beside)
        regions.begin(leaving.count)
        if beside is None:
            self._finish()

    def _finish(self) -> None:
        """What is leaving is in the index."""
        move, self._move = self._move, None
        if move is None:
            return
        rest = self._regions.without(move.leaving.count)
        move.end()
        self._regions.end(rest, move.leaving.sink)

    def _settle(self) -> None:
        """As `_finish`, as a call of its own."""
        self._finish()

    def _give_up(self) -> None:
        """What is leaving stays."""
        if self._move is not None:
            self._move.wait()  # the index writes to the same places again
            self._move = None
            self._regions.stay()

    # Arguments

    def _checked(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with padded tokens as zeros, and `valid`, None where none is padded.

        Or an error, and nothing changed.
        """
        g = self.index.geometry
        self._check_shapes(queries, keys, values)
        if valid is not None:
            sizes: dict[str, int | None] = {"B": keys.shape[0], "T": keys.shape[2]}
            check.tensor("valid", valid, sizes, torch.bool, g.device)
            valid = self._regions.padding(len(self), valid)
        if valid is not None:
            padded = ~valid[:, None, :, None]
            keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
        if g.device.type != "cuda":
            check.finite("keys", keys)
            if self._searches(len(self) + 1, queries.shape[2]):
                check.finite("queries", queries)  # as the search would, but before it is too late
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        return keys, values, valid

    def _check_shapes(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raises TypeError or ValueError; what is as in the step before is seen at a glance."""
        g, given = self.index.geometry, (queries, keys, values)
        if all(isinstance(one, Tensor) and one.dtype is g.dtype for one in given) and all(
            one.layout is torch.strided and not one.is_nested for one in given
        ):
            shapes = (self.batch_size, *(one.shape for one in given))
            if shapes == self._usual and all(one.device == g.device for one in given):
                return
        shape = {"B": self.batch_size or None, "G": g.kv_heads, "T": None, "D": g.head_dim}
        check.tensor("keys", keys, shape, g.dtype, g.device)
        shape = {**shape, "B": keys.shape[0], "T": keys.shape[2]}
        check.tensor("values", values, {**shape, "D": g.value_dim}, g.dtype, g.device)
        shape = {"B": keys.shape[0], "H": g.q_heads, "T": keys.shape[2], "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        check.at_least("queries.shape[2] (tokens)", queries.shape[2], 1)
        self._usual = (self.batch_size, *(one.shape for one in given))
