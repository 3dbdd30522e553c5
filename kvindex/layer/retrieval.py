"""A decoded token's attention: to the sink, to rows that the index retrieves, and to the window.

There are three ways to compute it, depending on the capabilities of the index:

1. An index with `DecodesStep` computes the whole step.
2. An index with `Attends` searches, and attends to rows where they are stored.
3. Any other index searches and fetches rows. The layer concatenates them with the rows of sink and
   window, and attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    UNUSED,
    Attended,
    Attends,
    DecodesStep,
    Hits,
    KVIndex,
    ObservesQueries,
    ReportsRowBytes,
    Rows,
    RunsOps,
)
from kvindex.core.restore import Restorable
from kvindex.layer.arguments import check_finite
from kvindex.layer.contents import LayerContents
from kvindex.layer.stats import Counts, Tally
from kvindex.layer.window import Window
from kvindex.ops.attention import with_sink_logits


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The result of a step's attention, and the number of rows that it has read.

    beside: number of rows of sink and window; masked: how many rows of sink and window are not
    attended to, mean over the batch; coverage: `Hits.coverage`, or None.
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
    """Append a token with keys `[B, G, 1, D]`, and attend from it, with the index's executor."""
    resident = window.resident(indexed, more=1)
    places = window.claim(indexed, token.keys, token.values, None)
    attended = index.decode_step(queries, token, resident, places, k=k, graphs=graphs)
    return Retrieved(attended, len(resident), resident.masked)


def attend_resident(
    index: Attends, window: Window, indexed: int, queries: Tensor, *, k: int
) -> Retrieved:
    """Let the index attend from queries `[B, H, D]` to sink, window and `k` rows."""
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
    """Search, fetch and attend from queries `[B, H, D]` to sink, window and `k` rows.

    bias: added to the logits of all tokens, `[B, H, N]`; sink_logits: `[B, H]`, used only to
    estimate the coverage; newer: how many of the newest tokens the queries must not attend to.
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
    """Attend from queries `[B, H, D]` to the rows `found`, the sink, and the window's `seen` rows.

    seen: bool `[B, W]`; bias: added to the logits of all tokens, `[B, H, N]`; sink_logits:
    `[B, H]`, used only to estimate the coverage, and not in the attention. A window of batch size 1
    serves any number of queries.
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
    """Return the output, with logits of learned sinks `[B, H]` in the softmax's denominator."""
    if sink_logits is None:
        return attended.output
    return with_sink_logits(attended.output, attended.lse, sink_logits)


def bias_of(visible: Tensor) -> Tensor:
    """Return a float32 bias for logits: 0 where a row is visible, and `-inf` elsewhere."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def rows_to_ask(index: KVIndex, k: int) -> int:
    """Return `k`, limited to the least power of two that is at least twice the index's length.

    An index returns at most two rows for each token: the token's own, and a summary.
    """
    held = len(index)
    most: int = k if k <= held else 2 ** (2 * held - 1).bit_length()
    return min(k, most)


def row_bytes(index: KVIndex) -> int:
    """Return the bytes of a fetched row: the number that the index reports, or else the size of an
    unencoded key and value.
    """
    g, tells = index.geometry, capability(index, ReportsRowBytes)
    plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
    return plain if tells is None else tells.row_bytes


class Retrieval(Restorable):
    """Attends from decoded tokens, each to the sink, the rows that its query finds, and the window.

    Args:
        contents: The index and the window.
        tally: Counts what each search reads.
    """

    def __init__(self, contents: LayerContents, tally: Tally) -> None:
        self._contents, self._tally = contents, tally
        self.row_bytes = row_bytes(contents.index)

    def decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        k: int,
        coverage: float | None,
        graphs: bool,
    ) -> Tensor:
        """Append `T` tokens one by one, search with each token's query, and return the attention
        output `[B, H, T, Dv]`.

        The arguments are those of `AttentionLayer.step`, after its checks; sinks: `[B, H, T]`.
        """
        before, T = len(self._contents), queries.shape[2]
        how: Any = dict(k=k, coverage=coverage, graphs=graphs)
        if T == 1:
            return self._decode_one(queries, keys, values, valid, bias, sinks, **how)
        outputs = []
        for t in range(T):
            one = slice(t, t + 1)
            real = None if valid is None else valid[:, one]
            term = None if bias is None else bias[:, :, one, : before + t + 1]
            parts = queries[:, :, one], keys[:, :, one], values[:, :, one]
            own = None if sinks is None else sinks[..., one]
            outputs.append(self._decode_one(*parts, real, term, own, **how))
        return torch.cat(outputs, dim=2)

    def _decode_one(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        k: int,
        coverage: float | None,
        graphs: bool,
    ) -> Tensor:
        """Like `decode`, for one token."""
        index, window = self._contents.index, self._contents.window
        indexed = len(index)
        sinks = None if sinks is None else sinks[..., 0]
        plain = valid is None and bias is None and coverage is None
        decodes = capability(index, DecodesStep) if plain else None
        if decodes is None or capability(index, ObservesQueries) is not None:
            check_finite(
                "queries", queries
            )  # raise before the token is appended; the index would check only afterwards
        if decodes is None:
            window.append(indexed, keys, values, valid)
            self.observe(queries, valid)
            some = None if bias is None else bias[:, :, 0]
            return self.attend(queries[:, :, 0], some, sinks, k=k, coverage=coverage)[:, :, None]
        self.observe(queries, new=1)
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(index, k)
        read = decode_step(decodes, one, token, window, indexed, k, graphs)
        return output_of(self.counted(read, len(self._contents)), sinks).unsqueeze(2)

    def attend(
        self,
        queries: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        k: int,
        coverage: float | None,
        newer: int = 0,
    ) -> Tensor:
        """Search with queries `[B, H, D]`, and attend to sink, hits and window: `[B, H, Dv]`.

        bias: for all tokens, `[B, H, N]`; sinks: `[B, H]`; newer: how many of the newest tokens the
        queries must not attend to.
        """
        index, window = self._contents.index, self._contents.window
        k, length = rows_to_ask(index, k), len(self._contents)
        plain = bias is None and coverage is None and not newer
        attends = capability(index, Attends) if plain else None
        if attends is not None:
            read = attend_resident(attends, window, len(index), queries, k=k)
            return output_of(self.counted(read, length), sinks)
        options: Any = dict(k=k, coverage=coverage, bias=bias, sink_logits=sinks, newer=newer)
        read = search_and_attend(index, window, queries, **options)
        return output_of(self.counted(read, length - newer), sinks)

    def observe(self, queries: Tensor, valid: Tensor | None = None, new: int = 0) -> None:
        """Pass queries `[B, H, T, D]` to an index that observes them, with zeros for padding.

        valid: bool `[B, T]`, or None for no padding; new: how many of the queries' tokens are not
        in the window yet.
        """
        observer = capability(self._contents.index, ObservesQueries)
        if observer is not None:
            if valid is not None:
                queries = queries.masked_fill(~valid[:, None, :, None], 0)
            length, T = len(self._contents) + new, queries.shape[2]
            positions = torch.arange(length - T, length, device=queries.device)
            observer.observe_queries(queries, positions)

    def counted(self, read: Retrieved, length: int) -> Attended:
        """Count the rows that a step has read, and return its attention.

        length: number of tokens that full attention would have read.
        """
        padded, found = self._contents.window.padded, read.attended.found
        size = self.row_bytes
        step = Counts(found, read.beside, read.masked, length, padded, size, read.coverage)
        self._tally.count(step)
        return read.attended
