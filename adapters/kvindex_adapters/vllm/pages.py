"""Pages of a serving engine: rows and codes of a sequence by its block table (PagedAttention).

Rows of a block: `[G, tokens, 2 D]`, key before value. Records: codes of 256 of its tokens, bytes
as `kvindex.pariskv.block_layout` says, `[G, tokens / 256, bytes]`. Tables: int `[blocks]`, the
blocks of a sequence in order; a slot is a token's place, `block · tokens + offset`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.pariskv.block_layout import BLOCK


def write_rows(pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values `[T, G, D]` into pages `[blocks, G, tokens, 2 D]`; a slot of -1 takes
    none.
    """
    used = slots >= 0
    blocks, places = _places(slots[used], pages.shape[2])
    pages[blocks, :, places] = torch.cat([keys[used], values[used]], dim=-1)


def read_rows(pages: Tensor, table: Tensor, start: int, stop: int) -> Rows:
    """The rows of the tokens from `start` to before `stop`, `[1, G, n, D]`."""
    tokens = pages.shape[2]
    first = start // tokens
    some = pages[table[first : -(-stop // tokens)].long()].transpose(0, 1).flatten(1, 2)
    return _halves(some[:, start - first * tokens : stop - first * tokens])


def gather_rows(pages: Tensor, table: Tensor, ids: Tensor) -> Rows:
    """The rows of tokens int64 `[1, G, K]`, `[1, G, K, D]`; of the first one for a negative id."""
    blocks, places = _places(ids[0].clamp_min(0), pages.shape[2])
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    return _halves(pages[table.long()[blocks], heads, places])


def filled(slots: Tensor) -> Tensor:
    """Segments of 256 tokens, counted over all blocks, whose last token is among the slots."""
    ends = slots[slots >= 0] + 1
    return torch.div(ends[ends % BLOCK == 0], BLOCK, rounding_mode="floor") - 1


def segment_keys(pages: Tensor, segments: Tensor) -> Tensor:
    """The keys of segments int64 `[E]`: `[E, G, 256, D]`."""
    parts = pages.view(*pages.shape[:2], -1, BLOCK, pages.shape[3])  # tokens / 256, 256
    blocks, places = _places(segments, parts.shape[2])
    return parts[blocks, :, places][..., : pages.shape[3] // 2]


def write_records(records: Tensor, segments: Tensor, codes: Tensor) -> None:
    """Put codes of segments, uint8 `[E, G, bytes]`, into `[blocks, G, tokens / 256, bytes]`."""
    blocks, places = _places(segments, records.shape[2])
    records[blocks, :, places] = codes


def read_records(records: Tensor, table: Tensor, count: int) -> Tensor:
    """The codes of a sequence's first segments, uint8 `[count, G, bytes]`."""
    parts = records.shape[2]
    some = records[table[: -(-count // parts)].long()].transpose(1, 2)
    return some.flatten(0, 1)[:count]


def _places(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which block a number is of, and where in it."""
    return torch.div(numbers, size, rounding_mode="floor"), numbers % size


def _halves(rows: Tensor) -> Rows:
    """Of keys and values side by side, `[G, n, 2 D]`."""
    keys, values = rows[None].chunk(2, dim=-1)
    return Rows(keys, values)
