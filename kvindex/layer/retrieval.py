"""A decoded token's attention: sink, window, and the rows that the index retrieves.

Three ways, the shortest that the index offers: the whole step at once (`DecodesStep`), attention to
rows where they lie (`Attends`), or search, fetch, and attention over what is put together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    UNUSED,
    Attended,
    Attends,
    DecodesStep,
    Hits,
    KVIndex,
    ObservesQueries,
    ReportsCoverage,
    ReportsRowBytes,
    Rows,
    RunsOps,
)
from kvindex.layer.arguments import check_tokens, checked_sinks
from kvindex.layer.stats import Counts, Traffic
from kvindex.layer.updates import WindowUpdates
from kvindex.layer.window import Window
from kvindex.ops.attention import with_sink_logits


@dataclass(frozen=True, eq=False)
class Retrieved:
    """What a step attends to, and what it has read.

    beside: rows of sink and window; masked: how many of those are not attended to, mean over the
    batch; coverage: of `Hits`, or None.
    """

    attended: Attended
    beside: int
    masked: Tensor | float
    coverage: Tensor | None = None


def decode_step(
    index: DecodesStep,
    queries: Tensor,
    token: Rows,
    window: Window,
    indexed: int,
    k: int,
    graphs: bool,
) -> Retrieved:
    """As `attend_resident`, once the window holds the token, keys `[B, G, 1, D]`."""
    resident = window.resident(indexed, more=1)
    places = window.claim(indexed, token.keys, token.values, None)
    attended = index.decode_step(queries, token, resident, places, k=k, graphs=graphs)
    return Retrieved(attended, len(resident), resident.masked)


def attend_resident(
    index: Attends, window: Window, indexed: int, queries: Tensor, *, k: int
) -> Retrieved:
    """Attention of queries `[B, H, D]` to sink and window in their buffer, and to `k` rows."""
    resident = window.resident(indexed)
    attended = index.attend(queries, resident, k=k)
    return Retrieved(attended, len(resident), resident.masked)


def search_and_attend(
    index: KVIndex,
    window: Window,
    queries: Tensor,
    *,
    k: int,
    coverage: float | None = None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    newer: int = 0,
) -> Retrieved:
    """The same by search and fetch.

    bias: a term of the logits, of all tokens `[B, H, N]`; sink_logits: `[B, H]`, which the coverage
    counts; newer: how many of the newest tokens are not seen.
    """
    seen = window.real(len(index))
    if seen is None:
        seen = torch.ones_like(queries[:, 0, :1], dtype=torch.bool)
        seen = seen.expand(-1, len(window))
    if newer:
        seen = seen.clone()
        seen[:, -newer:] = False
    hits = index.search(queries, k=k, coverage=coverage)
    found = index.fetch(hits)
    return attend_over(index, window, queries, hits, found, seen, bias, sink_logits)


def attend_over(
    index: KVIndex,
    window: Window,
    queries: Tensor,
    hits: Hits,
    found: Rows,
    seen: Tensor,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Retrieved:
    """Attention of queries `[B, H, D]` to `found`, the sink and the window's `seen` rows.

    seen: bool `[B, W]`; bias: a term of the logits, of all tokens `[B, H, N]`; sink_logits:
    `[B, H]`, which the coverage counts, but not the attention. A window of batch 1 serves any `B`
    queries.
    """
    g, B = index.geometry, len(queries)
    resident, seen = window.with_sink(seen)
    used = hits.ids != UNUSED
    visible = torch.cat([used, seen[:, None].expand(*used.shape[:2], -1)], dim=2)
    mask = bias_of(visible).repeat_interleave(g.group_size, dim=1)  # [B, H, K + S + W]
    if hits.log_weight is not None:
        mask[..., : hits.log_weight.shape[-1]] += hits.log_weight
    if bias is not None:
        beside = window.positions(len(index))[:, None]
        places = torch.cat([hits.ids, beside.expand(-1, g.kv_heads, -1)], dim=2)
        places = places.repeat_interleave(g.group_size, dim=1)
        mask += bias.float().gather(-1, places.clamp_min(0)).masked_fill(places < 0, 0)
    keys = torch.cat([found.keys, resident.keys.expand(B, -1, -1, -1)], dim=2)
    values = torch.cat([found.values, resident.values.expand(B, -1, -1, -1)], dim=2)
    runs = capability(index, RunsOps)
    attend = (ops if runs is None else runs.ops).attention.attend
    options = dict(scale=g.scale, softcap=g.softcap, return_lse=True)
    output, lse = attend(queries, keys, values, bias=mask, **options)
    attended = Attended(output, lse, used.sum(-1, dtype=torch.int32))
    masked, covered = (~seen).sum(1).float().mean(), hits.coverage
    if covered is not None and sink_logits is not None:
        bias = mask[..., : used.shape[2]].contiguous()
        _, lse = attend(queries, found.keys, found.values, bias=bias, **options)
        covered = ops.coverage.with_sink_logits(covered, lse, sink_logits)
    return Retrieved(attended, seen.shape[1], masked, covered)


def output_of(attended: Attended, sink_logits: Tensor | None) -> Tensor:
    """The output, with logits of learned sinks `[B, H]` in its denominator unless None."""
    if sink_logits is None:
        return attended.output
    return with_sink_logits(attended.output, attended.lse, sink_logits)


def bias_of(visible: Tensor) -> Tensor:
    """0 where a row is visible, `-inf` where it is not; float32."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def rows_to_ask(index: KVIndex, k: int) -> int:
    """`k`, but not far above what an index can hold, a summary a token."""
    held = len(index)
    most: int = k if k <= held else 2 ** (2 * held - 1).bit_length()
    return min(k, most)


def row_bytes(index: KVIndex) -> int:
    """What a fetched row costs: as the index says, or its key and value as they are."""
    g, tells = index.geometry, capability(index, ReportsRowBytes)
    plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
    return plain if tells is None else tells.row_bytes


class RetrievingSteps(WindowUpdates):
    """A layer's decoded tokens: what each is checked for, how it attends, what of it is counted.

    Base of `AttentionLayer`, which says what the options mean.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        k: int,
        coverage: float | None,
        dense_below: int,
        graphs: bool,
        **sizes: Any,
    ) -> None:
        self.k = check.wanted_rows(k)
        self.coverage = None if coverage is None else check.within("coverage", coverage, 0, 1)
        self.dense_below = check.at_least("dense_below", dense_below, 0)
        self.graphs = check.flag("graphs", graphs)
        tells = capability(index, ReportsCoverage)
        if coverage is not None and tells is not None:
            tells.check_coverage(coverage)
        super().__init__(index, **sizes)
        self._row_bytes = row_bytes(index)
        self._usual: object = None  # kinds of tensors that were checked last

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        return self._window.valid

    @property
    def batch_size(self) -> int:
        """Rows of the batch, `B`; 0 before the first token and after `reset`."""
        return self._window.batch_size

    @property
    def traffic(self) -> Traffic:
        """What the searching steps have read so far."""
        return self._tally.traffic

    def _check_shapes(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raises TypeError or ValueError; what is as in the step before is seen at a glance."""
        kinds = check.kind(queries), check.kind(keys), check.kind(values), self.batch_size
        if kinds == self._usual:
            return
        check_tokens(self.index.geometry, self.batch_size, queries, keys, values)
        self._usual = kinds

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        """As `check.finite`, where that does not wait for a device."""
        if self.index.geometry.device.type != "cuda":
            check.finite(name, tensor)

    def _sinks(self, sink_logits: Tensor | None, queries: Tensor) -> Tensor | None:
        """Logits of learned sinks as float32 `[B, H, T]`, or None."""
        return None if sink_logits is None else checked_sinks(sink_logits, queries)

    def _observe(self, queries: Tensor, valid: Tensor | None = None, new: int = 0) -> None:
        """Pass queries `[B, H, T, D]` to an index that observes them, with zeros for padding.

        valid: bool `[B, T]`, or None for no padding; new: how many of their tokens are not in the
        window yet.
        """
        observer = capability(self.index, ObservesQueries)
        if observer is not None:
            if valid is not None:
                queries = queries.masked_fill(~valid[:, None, :, None], 0)
            length, T = len(self) + new, queries.shape[2]
            positions = torch.arange(length - T, length, device=queries.device)
            observer.observe_queries(queries, positions)

    def _search(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Append `T` tokens one by one, each of which searches: `[B, H, T, Dv]`."""
        before, T = len(self), queries.shape[2]
        if T == 1:
            return self._search_one(queries, keys, values, valid, bias, sinks)
        outputs = []
        for t in range(T):
            one = slice(t, t + 1)
            real = None if valid is None else valid[:, one]
            term = None if bias is None else bias[:, :, one, : before + t + 1]
            parts = queries[:, :, one], keys[:, :, one], values[:, :, one]
            own = None if sinks is None else sinks[..., one]
            outputs.append(self._search_one(*parts, real, term, own))
        return torch.cat(outputs, dim=2)

    def _search_one(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `_search`, of one token."""
        index, window, indexed = self.index, self._window, len(self.index)
        sinks = None if sinks is None else sinks[..., 0]
        plain = valid is None and bias is None and self.coverage is None
        decodes = capability(index, DecodesStep) if plain else None
        if decodes is None or capability(index, ObservesQueries) is not None:
            self._check_finite("queries", queries)  # as the index would, but before it is too late
        if decodes is None:
            window.append(indexed, keys, values, valid)
            self._observe(queries, valid)
            some = None if bias is None else bias[:, :, 0]
            return self._retrieve(queries[:, :, 0], some, sinks)[:, :, None]
        self._observe(queries, new=1)
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(index, self.k)
        read = decode_step(decodes, one, token, window, indexed, k, self.graphs)
        return output_of(self._counted(read, len(self)), sinks).unsqueeze(2)

    def _retrieve(
        self, queries: Tensor, bias: Tensor | None, sinks: Tensor | None, newer: int = 0
    ) -> Tensor:
        """Attention of queries `[B, H, D]` to sink, hits and window: `[B, H, Dv]`.

        bias: of all tokens, `[B, H, N]`; sinks: `[B, H]`; newer: newest tokens that are not seen.
        """
        index, window, k = self.index, self._window, rows_to_ask(self.index, self.k)
        plain = bias is None and self.coverage is None and not newer
        attends = capability(index, Attends) if plain else None
        if attends is not None:
            read = attend_resident(attends, window, len(index), queries, k=k)
            return output_of(self._counted(read, len(self)), sinks)
        length = len(self) - newer
        options: Any = dict(k=k, coverage=self.coverage, bias=bias, sink_logits=sinks, newer=newer)
        read = search_and_attend(index, window, queries, **options)
        return output_of(self._counted(read, length), sinks)

    def _counted(self, read: Retrieved, length: int) -> Attended:
        """What a step attended to, which `traffic` counts. length: tokens of the sequence."""
        padded, found = self._window.padded, read.attended.found
        size = self._row_bytes
        step = Counts(found, read.beside, read.masked, length, padded, size, read.coverage)
        self._tally.count(step)
        return read.attended
