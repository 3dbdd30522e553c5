"""Sparse attention to tokens that the caller chose, for example with a trained indexer.

The index does not search. It only stores and fetches keys and values.
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
"""Approximate limit, in bytes, of the rows that are fetched at a time. To stay below the limit, a
prompt is processed a few tokens at a time. The limit does not change the result."""


def check_ids(ids: Tensor, queries: Tensor, index: KVIndex, before: int) -> Tensor:
    """Check the token ids that a caller chose to attend to, and return them.

    On a CPU an id out of range raises ValueError. On a CUDA device an id out of range becomes -1,
    because the host must not wait for the device.

    Args:
        ids: Int64 `[B, G, T, K]`, positions of tokens, or -1 for an unused slot.
        queries: `[B, H, T, D]`.
        index: The index that stores the rows.
        before: Number of tokens of the sequence before the tokens of these queries.

    Returns:
        The ids, int64 `[B, G, T, K]`.

    Raises:
        ValueError: The shape, dtype or device does not fit. On a CPU also: an id is below -1, or
            after the position of its query.
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
            f"ids: got {int(ids[wrong][0])}, allowed is 0 to the position of the query, or -1 for "
            "an unused slot"
        )
    return ids


def attend_chosen(index: KVIndex, window: Window, queries: Tensor, ids: Tensor) -> list[Retrieved]:
    """Let each query attend only to the tokens whose ids the caller chose for it.

    Padding tokens are left out.

    Args:
        index: The index with the older tokens.
        window: The window with the newer tokens.
        queries: `[B, H, T, D]`.
        ids: Int64 `[B, G, T, K]`, positions of tokens, or -1 for an unused slot.

    Returns:
        The attention of each of the `T` queries.
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
    """Attend from queries `[B, H, D]` of one token to the tokens `ids` `[B, G, K]`.

    The index attends to keys and values where they are stored, without fetching them.
    """
    g, indexed, seen = index.geometry, len(index), ids != UNUSED
    if window.valid is not None:
        real = window.valid[:, None].expand(-1, g.kv_heads, -1)
        seen = seen & real.gather(-1, ids.clamp_min(0))
    inside = ids.masked_fill(~seen | (ids >= indexed), UNUSED)
    in_window = (ids - indexed).masked_fill(~seen | (ids < indexed), UNUSED)
    hits = Hits(inside, torch.zeros_like(inside, dtype=torch.float32))
    far = attends.attend_hits(queries, hits, ResidentRows(g, len(ids), 1))
    output, lse = ops.attention.attend(
        queries,
        gather_rows(window.rows.keys, in_window),
        gather_rows(window.rows.values, in_window),
        scale=g.scale,
        softcap=g.softcap,
        bias=bias_of(in_window >= 0).repeat_interleave(g.group_size, dim=1),
        return_lse=True,
    )
    near = Attended(output, lse, torch.zeros_like(far.found))
    masked = ids.shape[-1] - (in_window >= 0).sum(-1).float().mean()
    return Retrieved(ops.attention.merge([far, near]), ids.shape[-1], masked)


def _block(index: KVIndex, window: Window, queries: Tensor, ids: Tensor) -> list[Retrieved]:
    """Fetch the chosen keys and values of all queries together, and compute the attention.

    Each query attends only to the keys and values that were chosen for it.
    """
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
    one = queries.transpose(1, 2).flatten(0, 1)  # each token becomes a batch entry
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
    """Read the keys and values at the given token positions, int64 `[B, G, n]`, from index and
    window.
    """
    indexed = len(index)
    in_window = torch.where(ids < indexed, UNUSED, ids - indexed)
    keys, values = gather_rows(window.keys, in_window), gather_rows(window.values, in_window)
    if indexed:
        inside = ids.masked_fill(ids >= indexed, UNUSED)
        found = index.fetch(Hits(inside, torch.zeros_like(inside, dtype=torch.float32)))
        keys, values = keys + found.keys, values + found.values  # one of the two is 0
    return Rows(keys, values)
