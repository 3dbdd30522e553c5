"""Sparse attention to rows that the caller chose, for example by a trained indexer.

The index does not search. It only stores and fetches rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import UNUSED, Attended, Attends, Hits, KVIndex, Rows
from kvindex.core.resident import ResidentRows
from kvindex.layer.retrieval import Retrieved, bias_of
from kvindex.layer.window import Window
from kvindex.ops.fetch import gather_rows

FETCHED_BYTES = 2**28
"""Approximate memory of the rows that are fetched at a time. A prompt is processed a few tokens at
a time to stay below it. The limit does not change the result."""


def check_ids(ids: Tensor, queries: Tensor, index: KVIndex, before: int) -> Tensor:
    """Check the ids that a caller chose, and return them.

    On a CPU a wrong id raises ValueError. On a CUDA device it becomes -1, because the host must not
    wait for the device.

    Args:
        ids: Int64 `[B, G, T, K]`, positions of rows, or -1.
        queries: `[B, H, T, D]`.
        index: The index that stores the rows.
        before: Number of tokens before the first query's token.

    Returns:
        The ids, int64 `[B, G, T, K]`.

    Raises:
        ValueError: The shape, dtype or device does not fit, or an id is after the query's token.
        TypeError: `ids` is not a tensor.
    """
    B, _, T, _ = queries.shape
    shape = {"B": B, "G": index.geometry.kv_heads, "T": T, "K": None}
    check.tensor("ids", ids, shape, torch.int64, queries.device)
    check.at_least("ids.shape[3] (rows)", ids.shape[3], 1)
    own = torch.arange(before, before + T, device=ids.device)[:, None]
    wrong = (ids < UNUSED) | (ids > own)
    if ids.device.type != "cpu":
        return ids.masked_fill(wrong, UNUSED)
    if wrong.any():
        raise ValueError(
            f"ids: got {int(ids[wrong][0])}, allowed are positions up to the query's own, or -1 "
            "for none"
        )
    return ids


def attend_chosen(index: KVIndex, window: Window, queries: Tensor, ids: Tensor) -> list[Retrieved]:
    """Attend from each of `T` queries `[B, H, T, D]` only to its rows `ids` `[B, G, T, K]`.

    An id is a position in the sequence, or -1 for an unused slot. Padding is not attended to.
    """
    if ids.shape[2] == 1 and len(index) and (attends := capability(index, Attends)):
        return [_where_they_lie(attends, index, window, queries[:, :, 0], ids[:, :, 0])]
    g, read = index.geometry, []
    per_token = ids[:, :, :1].numel() * (g.head_dim + g.value_dim) * queries.element_size()
    size = max(FETCHED_BYTES // max(per_token, 1), 1)
    parts = torch.split(queries, size, dim=2), torch.split(ids, size, dim=2)
    for some, chosen in zip(*parts, strict=True):
        read += _block(index, window, some, chosen)
    return read


def _where_they_lie(
    attends: Attends, index: KVIndex, window: Window, queries: Tensor, ids: Tensor
) -> Retrieved:
    """Like `_block`, for one token and an index that attends to rows where they are stored.

    queries: `[B, H, D]`; ids: `[B, G, K]`.
    """
    g, indexed, seen = index.geometry, len(index), ids != UNUSED
    if window.valid is not None:
        real = window.valid[:, None].expand(-1, g.kv_heads, -1)
        seen = seen & real.gather(-1, ids.clamp_min(0))
    inside = ids.masked_fill(~seen | (ids >= indexed), UNUSED)
    beside = (ids - indexed).masked_fill(~seen | (ids < indexed), UNUSED)
    hits = Hits(inside, torch.zeros_like(inside, dtype=torch.float32))
    far = attends.attend_hits(queries, hits, ResidentRows(g, len(ids), 1))
    output, lse = ops.attention.attend(
        queries,
        gather_rows(window.rows.keys, beside),
        gather_rows(window.rows.values, beside),
        scale=g.scale,
        softcap=g.softcap,
        bias=bias_of(beside >= 0).repeat_interleave(g.group_size, dim=1),
        return_lse=True,
    )
    near = Attended(output, lse, torch.zeros_like(far.found))
    masked = ids.shape[-1] - (beside >= 0).sum(-1).float().mean()
    return Retrieved(ops.attention.merge([far, near]), ids.shape[-1], masked)


def _block(index: KVIndex, window: Window, queries: Tensor, ids: Tensor) -> list[Retrieved]:
    """Like `attend_chosen`, with the rows of all queries fetched together."""
    g, indexed = index.geometry, len(index)
    B, G, T, K = ids.shape
    rows = _rows(index, window.rows, ids.flatten(2))
    seen = ids != UNUSED
    if window.valid is not None:
        real = window.valid[:, None, None].expand(-1, G, T, -1)
        seen = seen & real.gather(-1, ids.clamp_min(0))
    keys, values = (
        part.view(B, G, T, K, -1).transpose(1, 2).flatten(0, 1) for part in (rows.keys, rows.values)
    )
    one = queries.transpose(1, 2).flatten(0, 1)  # each token is a sequence of the batch
    mask = bias_of(seen).transpose(1, 2).flatten(0, 1).repeat_interleave(g.group_size, dim=1)
    output, lse = ops.attention.attend(
        one, keys, values, scale=g.scale, softcap=g.softcap, bias=mask, return_lse=True
    )
    output, lse = output.view(B, T, *output.shape[1:]), lse.view(B, T, -1)
    found = (seen & (ids < indexed)).sum(-1, dtype=torch.int32)  # [B, G, T]
    masked = K - (seen & (ids >= indexed)).sum(-1).float().mean((0, 1))
    return [
        Retrieved(Attended(output[:, t], lse[:, t], found[:, :, t]), K, masked[t]) for t in range(T)
    ]


def _rows(index: KVIndex, window: Rows, ids: Tensor) -> Rows:
    """Return rows of the index or the window by their positions, int64 `[B, G, n]`."""
    indexed = len(index)
    beside = torch.where(ids < indexed, UNUSED, ids - indexed)
    keys, values = gather_rows(window.keys, beside), gather_rows(window.values, beside)
    if indexed:
        inside = ids.masked_fill(ids >= indexed, UNUSED)
        found = index.fetch(Hits(inside, torch.zeros_like(inside, dtype=torch.float32)))
        keys, values = keys + found.keys, values + found.values  # one of the two terms is 0
    return Rows(keys, values)
