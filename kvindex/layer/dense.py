"""Exact dense attention, causal or with a mask, to all tokens of an index and of the window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core.capability import capability
from kvindex.core.protocol import AttendsToAll, Hits, KVIndex, Rows
from kvindex.layer.retrieval import bias_of
from kvindex.layer.sink import Sink
from kvindex.ops.attention import attend_blocks, attend_causal, with_sink_logits

BLOCK = 1024
"""Number of queries, and number of rows, that are processed at a time. The block size limits the
memory in use, and does not change the result."""

FETCHED = 16 * BLOCK
"""Number of rows that one call of `fetch` returns where all rows are copied into one tensor."""

GATHERED_BYTES = 2**30
"""If all rows of the index have at most this many bytes, they are copied into one tensor for a
single call of torch's attention. On a CPU this is several times as fast as a loop over blocks
(benchmarks/results/reference.json). If the rows are larger, attention reads them block by block."""


def attend_densely(
    index: KVIndex,
    window: Rows,
    queries: Tensor,
    valid: Tensor | None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    *,
    indexed: int | None = None,
    sink: Sink | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attend from the newest tokens to all `N` tokens of a sequence.

    Args:
        index: The index with the older tokens.
        window: Keys `[B, G, W, D]` and values `[B, G, W, Dv]` of the tokens that are not read from
            the index, in order of position.
        queries: `[B, H, T, D]`, of the newest tokens.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.
        bias: `[B, H, T, N]`, added to the logits, or None.
        sink_logits: `[B, H, T]`, the logits of learned sinks, or None.
        indexed: Number of tokens to read from the index; None for all tokens in the index.
        sink: The first tokens that are not padding. Their exact keys and values replace those of
            the index. The keys of these tokens differ so much from all other keys that a row codec
            may store them inaccurately.
        visible: Bool `[B, T, N]`, the tokens that each query attends to; None for causal attention.

    Returns:
        Attention outputs `[B, H, T, Dv]`.
    """
    g, indexed = index.geometry, len(index) if indexed is None else indexed
    plain = g.softcap is None and bias is None and sink_logits is None and visible is None
    if plain and valid is None and 0 < indexed == len(index):
        reading, newest = capability(index, AttendsToAll), window.keys.shape[2]
        # a query whose own token is in the index must not attend to later tokens there
        if reading is not None and queries.shape[2] <= min(reading.most_tokens, newest):
            return _in_place(reading, window, queries, g.scale)
    width = g.kv_heads * (g.head_dim + g.value_dim) * queries.element_size()
    if plain and indexed * queries.shape[0] * width <= GATHERED_BYTES:
        return _gathered(index, window, indexed, queries, valid, sink)
    options: Any = dict(indexed=indexed, sink=sink, visible=visible)
    output, lse = attend_by_block(index, window, queries, valid, bias, **options)
    return output if sink_logits is None else with_sink_logits(output, lse, sink_logits)


def attend_by_block(
    index: KVIndex,
    window: Rows,
    queries: Tensor,
    valid: Tensor | None,
    bias: Tensor | None = None,
    *,
    indexed: int | None = None,
    sink: Sink | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the newest tokens to all tokens, block by block.

    The arguments are those of `attend_densely`. Only the logits of one block are in memory at a
    time.

    Returns:
        Attention outputs `[B, H, T, Dv]`, and the log-sum-exp of the logits, float32 `[B, H, T]`.
        The log-sum-exp is `-inf` for a padding token that attends to nothing.
    """
    g, parts, indexed = index.geometry, [], len(index) if indexed is None else indexed
    N, T = indexed + window.keys.shape[2], queries.shape[2]
    for start in range(0, T, BLOCK):
        some = queries[:, :, start : start + BLOCK]
        more = None if bias is None else bias[:, :, start : start + BLOCK]
        own = None if visible is None else visible[:, start : start + BLOCK]
        places = N - T + start, some.shape[2]
        blocks = _visible_blocks(index, window, indexed, valid, *places, more, sink, own)
        parts.append(attend_blocks(some, blocks, scale=g.scale, softcap=g.softcap, return_lse=True))
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _in_place(index: AttendsToAll, window: Rows, queries: Tensor, scale: float) -> Tensor:
    """Attend from the newest tokens to all tokens, without copying the rows of the index.

    The newest tokens must all be in the window.
    """
    output, lse = index.attend_all(queries)
    T, W = queries.shape[2], window.keys.shape[2]
    places = torch.arange(W, device=queries.device)
    bias = bias_of(places <= torch.arange(W - T, W, device=queries.device)[:, None])  # [T, W]
    block = window.keys, window.values, bias[None, None]
    newer, newer_lse = attend_blocks(queries, [block], scale=scale, return_lse=True)
    fraction = torch.sigmoid(newer_lse - lse)[..., None]
    return torch.lerp(output.float(), newer.float(), fraction).to(output.dtype)


def _gathered(
    index: KVIndex,
    window: Rows,
    indexed: int,
    queries: Tensor,
    valid: Tensor | None,
    sink: Sink | None,
) -> Tensor:
    """Attend from the newest tokens to all tokens, after copying all keys into one tensor."""
    rows = _all_rows(index, window, indexed, valid, sink)
    return attend_rows(rows, queries, valid, index.geometry.scale)


def attend_rows(rows: Rows, queries: Tensor, valid: Tensor | None, scale: float) -> Tensor:
    """Attend causally from the newest `T` tokens to all `N` tokens, with torch's attention.

    Args:
        rows: Keys `[B, G, N, D]` and values `[B, G, N, Dv]` of all tokens.
        queries: `[B, H, T, D]`, of the newest tokens.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.
        scale: Factor by which attention logits are multiplied.

    Returns:
        Attention outputs `[B, H, T, Dv]`.
    """
    if valid is None:
        return attend_causal(queries, rows.keys, rows.values, scale=scale)
    N, T, parts = rows.keys.shape[2], queries.shape[2], []
    for start in range(0, T, BLOCK):  # block by block, so that only one block's mask is in memory
        some = queries[:, :, start : start + BLOCK]
        end = N - T + start + some.shape[2]
        seen = rows.keys[:, :, :end], rows.values[:, :, :end]
        parts.append(attend_causal(some, *seen, scale=scale, valid=valid[:, :end]))
    return torch.cat(parts, dim=2)


def _all_rows(
    index: KVIndex, window: Rows, indexed: int, valid: Tensor | None, sink: Sink | None
) -> Rows:
    if not indexed:
        return window
    end = indexed + window.keys.shape[2]
    blocks = [rows for _, rows in _blocks(index, window, indexed, end, valid, sink, FETCHED)]
    keys = torch.cat([rows.keys for rows in blocks], dim=2)
    return Rows(keys, torch.cat([rows.values for rows in blocks], dim=2))


def _visible_blocks(
    index: KVIndex,
    window: Rows,
    indexed: int,
    valid: Tensor | None,
    first: int,
    count: int,
    more: Tensor | None,
    sink: Sink | None,
    visible: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield blocks of keys, values and logit bias for `count` queries from position `first` on.

    Args:
        index: The index with the older tokens.
        window: Keys and values of the newer tokens.
        indexed: Number of tokens to read from the index.
        valid: Bool `[B, N]`, False for padding, or None.
        first: Position of the first query.
        count: Number of queries.
        more: The caller's bias for the logits of these queries, `[B, H, count, N]`, or None.
        sink: Exact rows (keys and values) of the first tokens, or None. They are used instead of
            the rows of these tokens that the index has, which may be quantized.
        visible: The tokens that each query attends to, bool `[B, count, N]`; None for causal
            attention.
    """
    positions = torch.arange(first, first + count, device=window.keys.device)
    end = first + count if visible is None else visible.shape[2]
    for start, rows in _blocks(index, window, indexed, end, valid, sink):
        stop = start + rows.keys.shape[2]
        bias = None
        if visible is not None:
            bias = bias_of(visible[:, None, :, start:stop])  # [B, 1, T, R]
        elif stop > first + 1:
            columns = torch.arange(start, stop, device=positions.device)
            bias = bias_of(columns <= positions[:, None])[None, None]  # [1, 1, T, R]
        if valid is not None:
            padding = bias_of(valid[:, None, None, start:stop])  # [B, 1, 1, R]
            bias = padding if bias is None else bias + padding
        if more is not None:
            term = more[..., start:stop].float()
            bias = term if bias is None else bias + term
        yield rows.keys, rows.values, bias


def _blocks(
    index: KVIndex,
    window: Rows,
    indexed: int,
    end: int,
    valid: Tensor | None,
    sink: Sink | None,
    size: int = BLOCK,
) -> Iterator[tuple[int, Rows]]:
    """Yield blocks of up to `size` keys and values before position `end`, each with its first
    position."""
    keys, values = window.keys, window.values
    for start in range(0, min(indexed, end), size):
        ids = torch.arange(start, min(start + size, indexed, end), device=keys.device)
        ids = ids.expand(*keys.shape[:2], -1)
        rows = index.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
        if sink is not None and (valid is not None or start < sink.ids.shape[1]):
            rows = _with_sink(rows, start, sink)
        yield start, rows
    for start in range(indexed, end, size):
        some = slice(start - indexed, min(start + size, end) - indexed)
        yield start, Rows(keys[:, :, some], values[:, :, some])


def _with_sink(rows: Rows, start: int, sink: Sink) -> Rows:
    """Replace the keys and values of sink tokens in `rows` by their exact values.

    A row codec may have changed them in `rows`. `start` is the position of the first token of
    `rows`.
    """
    count, places = rows.keys.shape[2], sink.ids - start
    places = torch.where((places >= 0) & (places < count), places, count)[:, None, :, None]

    def put(part: Tensor, own: Tensor) -> Tensor:
        room = pad(part, (0, 0, 0, 1))  # sink tokens outside of `rows` go to the extra row
        return room.scatter(2, places.expand_as(own), own)[:, :, :count]

    return Rows(put(rows.keys, sink.rows.keys), put(rows.values, sink.rows.values))
