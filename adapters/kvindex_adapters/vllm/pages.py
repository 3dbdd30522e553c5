"""Read and write keys, values and codes in vLLM's pages, by a sequence's block table.

A row is one token's key and value. Rows of a block are `[G, tokens, 2 D]`, with the key before the
value. A segment is 256 consecutive tokens of a block. A record contains the codes of a segment, in
the layout of `kvindex.pariskv.block_layout`; the records of a block are `[G, tokens / 256, bytes]`.
A table is int `[blocks]`, the blocks of a sequence in order. A slot is the position of a token,
`block · tokens + offset` (PagedAttention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.pariskv.block_layout import BLOCK


def write_rows(pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values `[T, G, D]` into pages `[blocks, G, tokens, 2 D]`. Slots of -1 are
    skipped."""
    used = slots >= 0
    blocks, places = _places(slots[used], pages.shape[2])
    pages[blocks, :, places] = torch.cat([keys[used], values[used]], dim=-1)


def read_rows(pages: Tensor, table: Tensor, start: int, stop: int) -> Rows:
    """Return the rows of the tokens from `start` to `stop - 1`, `[1, G, n, D]`."""
    tokens = pages.shape[2]
    first = start // tokens
    some = pages[table[first : -(-stop // tokens)].long()].transpose(0, 1).flatten(1, 2)
    return _halves(some[:, start - first * tokens : stop - first * tokens])


def gather_rows(pages: Tensor, table: Tensor, ids: Tensor) -> Rows:
    """Return the rows `[1, G, K, D]` of tokens int64 `[1, G, K]`. A negative id gives the first
    token."""
    blocks, places = _places(ids[0].clamp_min(0), pages.shape[2])
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    return _halves(pages[table.long()[blocks], heads, places])


def filled(slots: Tensor) -> Tensor:
    """Return the segments of 256 tokens whose last token is in `slots`, numbered over all
    blocks."""
    ends = slots[slots >= 0] + 1
    return torch.div(ends[ends % BLOCK == 0], BLOCK, rounding_mode="floor") - 1


def segment_keys(pages: Tensor, segments: Tensor) -> Tensor:
    """Return the keys `[E, G, 256, D]` of segments int64 `[E]`."""
    # [blocks, G, tokens / 256, 256, 2 D]
    parts = pages.view(*pages.shape[:2], -1, BLOCK, pages.shape[3])
    blocks, places = _places(segments, parts.shape[2])
    return parts[blocks, :, places][..., : pages.shape[3] // 2]


def write_records(records: Tensor, segments: Tensor, codes: Tensor) -> None:
    """Write codes of segments, uint8 `[E, G, bytes]`, into `[blocks, G, tokens / 256, bytes]`."""
    blocks, places = _places(segments, records.shape[2])
    records[blocks, :, places] = codes


def read_records(records: Tensor, table: Tensor, count: int) -> Tensor:
    """Return the codes of a sequence's first segments, uint8 `[count, G, bytes]`."""
    parts = records.shape[2]
    some = records[table[: -(-count // parts)].long()].transpose(1, 2)
    return some.flatten(0, 1)[:count]


def _places(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the block of each segment number, and the segment's position in that block."""
    return torch.div(numbers, size, rounding_mode="floor"), numbers % size


def _halves(rows: Tensor) -> Rows:
    """Split rows `[G, n, 2 D]` into keys and values."""
    keys, values = rows[None].chunk(2, dim=-1)
    return Rows(keys, values)
