"""Attention of a decoded token to the sink, to rows from the index, and to the window.

The attention is computed in one of three ways, depending on the capabilities of the index:

1. An index with `DecodesStep` computes the whole decode step.
2. An index with `Attends` searches, and attends to the rows where they are stored.
3. Any other index searches and fetches rows. Then this module concatenates these rows with the rows
   of sink and window, and attends to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.capability import capability, required
from kvindex.core.protocol import (
    UNUSED,
    Attended,
    Attends,
    ChecksTokens,
    DecodesStep,
    ErrorLimit,
    Hits,
    KVIndex,
    LimitsError,
    LimitsSteps,
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
from kvindex.ops.attention import cap, with_sink_logits


@dataclass(frozen=True, eq=False)
class Wanted:
    """How many rows a search shall retrieve.

    Attributes:
        k: Number of rows per KV head, or the largest number if one of the others is given.
        coverage: Fraction of attention weight to reach, or None (see `AttentionLayer`).
        variance: Largest variance of the attention weights of sampled rows, float32 `[B, G]`
            (`protocol.ErrorLimit`), or None.
    """

    k: int
    coverage: float | None = None
    variance: Tensor | None = None

    def limit(self, queries: Tensor, lse: Tensor | None) -> ErrorLimit | None:
        """Return the limit of the error of a search, or None if there is none.

        Args:
            queries: `[B, H, D]`.
            lse: `ErrorLimit.resident_lse`.
        """
        variance, B = self.variance, len(queries)
        if variance is None:
            return None
        return ErrorLimit(variance if len(variance) == B else variance.expand(B, -1), lse)

    def suits(self, index: KVIndex) -> bool:
        """Return True if the index itself can attend to as many rows as are wanted."""
        if self.coverage is not None:
            return False
        return self.variance is None or capability(index, LimitsSteps) is not None


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The attention of one decoded token, and how many rows it has read.

    Attributes:
        attended: The output, its log-sum-exp, and the number of rows from the index.
        resident: Number of rows of sink and window.
        masked: How many of the rows of sink and window are masked out, mean over the batch.
        coverage: `Hits.coverage` of the search, or None.
    """

    attended: Attended
    resident: int
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
    limit: ErrorLimit | None = None,
) -> Retrieved:
    """Let the index compute a whole decode step: append a token, search with its queries, and
    attend.
    """
    resident = window.resident(indexed, more=1)
    places = window.claim(indexed, token.keys, token.values, None)
    how: Any = dict(k=k, graphs=graphs, **_given(limit))
    attended = index.decode_step(queries, token, resident, places, **how)
    return Retrieved(attended, len(resident), resident.masked)


def _given(limit: ErrorLimit | None) -> dict[str, ErrorLimit]:
    """Return a limit as an argument for an index with `LimitsSteps`, or nothing without one."""
    return {} if limit is None else {"limit": limit}


def attend_resident(
    index: Attends,
    window: Window,
    indexed: int,
    queries: Tensor,
    *,
    k: int,
    limit: ErrorLimit | None = None,
) -> Retrieved:
    """Let the index search with queries `[B, H, D]`, and attend to the `k` best rows.

    The index also attends to the rows (keys and values) of sink and window. With a limit of the
    error, it attends to as many rows as the limit asks for, at most `k`.
    """
    resident = window.resident(indexed)
    how: Any = dict(k=k, **_given(limit))
    attended = index.attend(queries, resident, **how)
    return Retrieved(attended, len(resident), resident.masked)


def search_and_attend(
    index: KVIndex,
    window: Window,
    queries: Tensor,
    *,
    wanted: Wanted,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    newer: int = 0,
) -> Retrieved:
    """Search, fetch the rows, and attend to sink, window and these rows.

    Args:
        index: The index to search.
        window: The window, which also contains the sink.
        queries: `[B, H, D]`.
        wanted: How many rows to retrieve per KV head.
        bias: Added to the logits of all tokens, `[B, H, N]`, or None.
        sink_logits: Logits of learned sinks `[B, H]`, used only to estimate the coverage and to
            limit the error.
        newer: Number of tokens after the queries' token, which are not attended to.
    """
    seen = window.real(len(index))
    if seen is None:
        seen = torch.ones_like(queries[:, 0, :1], dtype=torch.bool)
        seen = seen.expand(-1, len(window))
    if newer:
        seen = seen.clone()
        seen[:, -newer:] = False
    hits = search(index, window, queries, seen, wanted, bias, sink_logits)
    attends = capability(index, Attends)
    if attends is not None and wanted.variance is not None and bias is None and not newer:
        resident = window.resident(len(index))
        attended = attends.attend_hits(queries, hits, resident)
        return Retrieved(attended, len(resident), resident.masked)
    found = index.fetch(hits)
    return attend_over(index, window, queries, hits, found, seen, bias, sink_logits)


def search(
    index: KVIndex,
    window: Window,
    queries: Tensor,
    seen: Tensor,
    wanted: Wanted,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Hits:
    """Search an index for as many rows as are wanted.

    Args:
        index: The index.
        window: The window, which also contains the sink.
        queries: `[B, H, D]`.
        seen: Bool `[B, W]`, the tokens of the window to attend to.
        wanted: How many rows to retrieve per KV head.
        bias: Added to the logits of all tokens, `[B, H, N]`, or None.
        sink_logits: Logits of learned sinks `[B, H]`, or None.
    """
    if wanted.variance is None:
        return index.search(queries, k=wanted.k, coverage=wanted.coverage)
    limit = wanted.limit(queries, _resident_lse(index, window, queries, seen, bias, sink_logits))
    assert limit is not None
    hits = required(index, LimitsError).search_within(queries, k=wanted.k, limit=limit)
    if hits.ids.is_cuda:  # the host would wait for the number of used slots
        return hits
    return hits.narrowed(max(1, int((hits.ids != UNUSED).sum(-1).max())))


def _resident_lse(
    index: KVIndex,
    window: Window,
    queries: Tensor,
    seen: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Return the log-sum-exp of the logits of sink, window and learned sinks, float32 `[B, H]`.

    The arguments are those of `attend_over`.
    """
    g = index.geometry
    resident, seen = window.with_sink(seen)
    folded = queries.detach().float().reshape(len(queries), g.kv_heads, -1, g.head_dim)
    logits = folded @ resident.keys.float().mT
    logits = cap(logits, g.scale, g.softcap).flatten(1, 2)  # [B, H, S + W]
    if bias is not None:
        at = window.positions(len(index))[:, None].expand(*logits.shape[:2], -1)
        logits = logits + bias.float().gather(-1, at.clamp_min(0))
    lse = logits.masked_fill(~seen[:, None], float("-inf")).logsumexp(-1)
    return lse if sink_logits is None else torch.logaddexp(lse, sink_logits)


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
    """Attend to rows that a search has found, to the sink, and to the window.

    Args:
        index: The index, for its geometry and its implementation of attention.
        window: The window, which also contains the sink. If its batch size is 1, all `B` queries
            share it.
        queries: `[B, H, D]`.
        hits: The result of the search.
        found: The rows that `index.fetch(hits)` returned.
        seen: Bool `[B, W]`, the tokens of the window to attend to.
        bias: Added to the logits of all tokens, `[B, H, N]`, or None.
        sink_logits: Logits of learned sinks `[B, H]`, used only to estimate the coverage.
    """
    g, B = index.geometry, len(queries)
    resident, seen = window.with_sink(seen)
    used = hits.ids != UNUSED
    visible = torch.cat([used, seen[:, None].expand(*used.shape[:2], -1)], dim=2)
    mask = bias_of(visible).repeat_interleave(g.group_size, dim=1)  # [B, H, K + S + W]
    if hits.log_weight is not None:
        mask[..., : hits.log_weight.shape[-1]] += hits.log_weight
    if bias is not None:
        in_window = window.positions(len(index))[:, None]
        places = torch.cat([hits.ids, in_window.expand(-1, g.kv_heads, -1)], dim=2)
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
    """Return the attention output, after adding learned sinks `[B, H]` to the denominator."""
    if sink_logits is None:
        return attended.output
    return with_sink_logits(attended.output, attended.lse, sink_logits)


def bias_of(visible: Tensor) -> Tensor:
    """Convert a bool mask to a float32 bias: 0 where the mask is True, `-inf` where it is False."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def rows_to_ask(index: KVIndex, k: int) -> int:
    """Return `k`, or a smaller number if the index has too few tokens for `k` rows.

    An index returns at most two rows per token: the token's own row, and a summary row. If the
    index has fewer than `k` tokens, the limit is twice the number of tokens, rounded up to a power
    of two.
    """
    held = len(index)
    most: int = k if k <= held else 2 ** (2 * held - 1).bit_length()
    return min(k, most)


def row_bytes(index: KVIndex) -> int:
    """Return the bytes of one row (key and value) that the index fetches.

    If the index does not report this number, return the size of an uncompressed key and value.
    """
    g, tells = index.geometry, capability(index, ReportsRowBytes)
    plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
    return plain if tells is None else tells.row_bytes


class Retrieval(Restorable):
    """Computes the attention of decoded tokens to sink, retrieved rows and window.

    Args:
        contents: The index and the window.
        tally: Counts the rows that each token reads.
    """

    def __init__(self, contents: LayerContents, tally: Tally) -> None:
        self._contents, self._tally = contents, tally
        self.row_bytes = row_bytes(contents.index)

    def checks_keys(self, valid: Tensor | None, bias: Tensor | None, wanted: Wanted) -> bool:
        """Return True if the index itself checks the key of the token that `decode` appends.

        `decode` then raises ValueError for a key that is NaN, infinite or too large, and the caller
        need not check the key (`bases.executed.ExecutedIndex.checks_tokens`).
        """
        if self._decodes(valid, bias, wanted) is None:
            return False
        index = capability(self._contents.index, ChecksTokens)
        return index is not None and index.checks_tokens

    def _decodes(
        self, valid: Tensor | None, bias: Tensor | None, wanted: Wanted
    ) -> DecodesStep | None:
        """Return the index if it can compute the whole decode step, otherwise None."""
        index = self._contents.index
        plain = valid is None and bias is None and wanted.suits(index)
        return capability(index, DecodesStep) if plain else None

    def decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        wanted: Wanted,
        graphs: bool,
    ) -> Tensor:
        """Append `T` tokens one by one, and search and attend with each token's query.

        The caller has checked the arguments. `sinks` are the logits of learned sinks, `[B, H, T]`,
        or None. All other arguments have the same meaning as in `AttentionLayer` and in its method
        `step`.

        Returns:
            Attention outputs `[B, H, T, Dv]`.
        """
        T, how = queries.shape[2], dict[str, Any](wanted=wanted, graphs=graphs)
        if T == 1:
            return self._decode_one(queries, keys, values, valid, bias, sinks, **how)
        before, outputs = len(self._contents), []
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
        wanted: Wanted,
        graphs: bool,
    ) -> Tensor:
        index, window = self._contents.index, self._contents.window
        indexed, observer = len(index), capability(index, ObservesQueries)
        sinks = None if sinks is None else sinks[..., 0]
        decodes = self._decodes(valid, bias, wanted)
        if decodes is None or observer is not None:
            check_finite(
                "queries", queries
            )  # raise before the token is appended; the index would check only afterwards
        if decodes is None:
            window.append(indexed, keys, values, valid)
            self.observe(queries, valid)
            some = None if bias is None else bias[:, :, 0]
            return self.attend(queries[:, :, 0], some, sinks, wanted=wanted)[:, :, None]
        if observer is not None:
            self.observe(queries, new=1)
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(index, wanted.k)
        limit = wanted.limit(one, sinks)
        read = decode_step(decodes, one, token, window, indexed, k, graphs, limit)
        return output_of(self.counted(read, len(self._contents)), sinks).unsqueeze(2)

    def attend(
        self,
        queries: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        *,
        wanted: Wanted,
        newer: int = 0,
    ) -> Tensor:
        """Search the index, and attend to sink, retrieved rows and window.

        Args:
            queries: `[B, H, D]`.
            bias: Added to the logits of all tokens, `[B, H, N]`, or None.
            sinks: Logits of learned sinks, `[B, H]`, or None.
            wanted: How many rows to retrieve per KV head.
            newer: Number of stored tokens that come after the token of the queries. The queries do
                not attend to these tokens.

        Returns:
            Attention outputs `[B, H, Dv]`.
        """
        index, window = self._contents.index, self._contents.window
        wanted = replace(wanted, k=rows_to_ask(index, wanted.k))
        length = len(self._contents)
        plain = bias is None and wanted.suits(index) and not newer
        attends = capability(index, Attends) if plain else None
        if attends is not None:
            how: Any = dict(k=wanted.k, limit=wanted.limit(queries, sinks))
            read = attend_resident(attends, window, len(index), queries, **how)
            return output_of(self.counted(read, length), sinks)
        options: Any = dict(wanted=wanted, bias=bias, sink_logits=sinks, newer=newer)
        read = search_and_attend(index, window, queries, **options)
        return output_of(self.counted(read, length - newer), sinks)

    def observe(self, queries: Tensor, valid: Tensor | None = None, new: int = 0) -> None:
        """Pass queries to the index if it learns from queries.

        The queries of padding tokens are replaced by zeros.

        Args:
            queries: Queries of the newest `T` tokens, `[B, H, T, D]`.
            valid: Bool `[B, T]`, False for padding, or None.
            new: Number of these tokens whose keys and values have not been appended to the window
                yet.
        """
        observer = capability(self._contents.index, ObservesQueries)
        if observer is not None:
            if valid is not None:
                queries = queries.masked_fill(~valid[:, None, :, None], 0)
            length, T = len(self._contents) + new, queries.shape[2]
            positions = torch.arange(length - T, length, device=queries.device)
            observer.observe_queries(queries, positions)

    def counted(self, read: Retrieved, length: int) -> Attended:
        """Count the rows (keys and values) that attention has read for a token.

        Returns the attention output of the token. `length` is the number of tokens that full
        attention would have read.
        """
        padded, found = self._contents.window.padded, read.attended.found
        size = self.row_bytes
        step = Counts(found, read.resident, read.masked, length, padded, size, read.coverage)
        self._tally.count(step)
        return read.attended
