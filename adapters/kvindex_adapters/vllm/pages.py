"""Read and write keys, values and codes in vLLM's pages, with a sequence's block table.

The functions of this module use these terms:

- A row is one token's key and value. The rows of a block are `[G, tokens, 2 D]`; the first `D`
  numbers of a row are the key. In multi-head latent attention the value is a part of the key
  (`Geometry.value_in_key`), so a row is the key alone, `[G, tokens, D]`.
- A segment is 256 consecutive tokens of a block.
- A record contains the codes (compressed keys) of a segment, in the layout of
  `kvindex.pariskv.block_layout`. The records of a block are `[G, tokens / 256, bytes]`.
- A block table is int `[blocks]`: the numbers of a sequence's blocks, in order.
- A slot is the position of a token in the pages: `block · tokens + offset`, as in PagedAttention.
- Scales convert rows from FP8 and to FP8, in pages of uint8 (see `fp8`). They are None in pages of
  the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm.fp8 import Scales


def write_rows(
    pages: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor | None,
    scales: Scales | None = None,
) -> None:
    """Write keys and values `[T, G, D]` to slots int64 `[T]` of pages `[blocks, G, tokens, 2 D]`.

    Tokens with slot -1 are skipped. `values` is None if each value is a part of its key.
    """
    if scales is not None:
        keys = scales.encode_keys(keys)
        values = None if values is None else scales.encode_values(values)
    used = slots >= 0
    blocks, places = _places(slots[used], pages.shape[2])
    parts = [part[used] for part in (keys, values) if part is not None]
    pages[blocks, :, places] = torch.cat(parts, dim=-1)


def read_rows(
    pages: Tensor,
    table: Tensor,
    start: int,
    stop: int,
    geometry: Geometry | None = None,
    scales: Scales | None = None,
) -> Rows:
    """Read keys and values `[1, G, n, D]` of the tokens at positions `start` to `stop - 1` of a
    sequence.

    Without `geometry`, keys and values have the same number of coordinates.
    """
    tokens = pages.shape[2]
    first = start // tokens
    blocks = table[first : -(-stop // tokens)].long()
    some = pages.transpose(0, 1)[:, blocks].flatten(1, 2)  # index_select would copy all pages
    return _parts(some[:, start - first * tokens : stop - first * tokens], geometry, scales)


def gather_rows(
    pages: Tensor,
    table: Tensor,
    ids: Tensor,
    geometry: Geometry | None = None,
    scales: Scales | None = None,
) -> Rows:
    """Read keys and values `[1, G, K, D]` of the token positions `ids`, int64 `[1, G, K]`.

    A negative id reads the first token. Without `geometry`, keys and values have the same number of
    coordinates.
    """
    blocks, places = _places(ids[0].clamp_min(0), pages.shape[2])
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    return _parts(pages[table.long()[blocks], heads, places], geometry, scales)


def filled(slots: Tensor) -> Tensor:
    """Return the numbers of the segments whose last token is written to one of `slots`.

    A segment is 256 consecutive tokens of a block. Segments are numbered across all blocks.
    """
    ends = slots[slots >= 0] + 1
    return torch.div(ends[ends % BLOCK == 0], BLOCK, rounding_mode="floor") - 1


def segment_keys(
    pages: Tensor,
    segments: Tensor,
    geometry: Geometry | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Return the keys `[E, G, 256, D]` of the segments with numbers int64 `[E]`.

    Without `geometry`, keys and values have the same number of coordinates.
    """
    # [blocks, G, tokens / 256, 256, 2 D]
    parts = pages.view(*pages.shape[:2], -1, BLOCK, pages.shape[3])
    blocks, places = _places(segments, parts.shape[2])
    width = pages.shape[3] // 2 if geometry is None else geometry.head_dim
    keys = parts[blocks, :, places][..., :width]
    return keys if scales is None else scales.decode_keys(keys)


def write_records(records: Tensor, segments: Tensor, codes: Tensor) -> None:
    """Write the codes of segments of 256 tokens to pages.

    Args:
        records: The pages, uint8 `[blocks, G, tokens / 256, bytes]`.
        segments: Numbers of the segments, int64 `[E]`.
        codes: Codes of the segments, uint8 `[E, G, bytes]`.
    """
    blocks, places = _places(segments, records.shape[2])
    records[blocks, :, places] = codes


def read_records(records: Tensor, table: Tensor, count: int) -> Tensor:
    """Read the codes of a sequence's first `count` segments of 256 tokens.

    The result is uint8 `[count, G, bytes]`.
    """
    parts = records.shape[2]
    some = records[table[: -(-count // parts)].long()].transpose(1, 2)
    return some.flatten(0, 1)[:count]


def _places(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Convert the numbers of slots (or of segments) to block numbers, and to positions in a block.

    A block has `size` slots (or segments).
    """
    return torch.div(numbers, size, rounding_mode="floor"), numbers % size


def _parts(rows: Tensor, geometry: Geometry | None, scales: Scales | None) -> Rows:
    """Return the keys and values of rows `[G, n, 2 D]`."""
    if geometry is None:
        keys, values = rows[None].chunk(2, dim=-1)
    else:
        start = geometry.value_start
        keys = rows[None, ..., : geometry.head_dim]
        values = rows[None, ..., start : start + geometry.value_dim]
    if scales is None:
        return Rows(keys, values)
    return Rows(scales.decode_keys(keys), scales.decode_values(values))
