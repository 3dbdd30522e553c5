"""How codes lie in memory on a GPU: blocks of 256 tokens, one record for each KV head in it.

A block is also a segment that shares a centre. Blocks never move, so that captured graphs, which
hold the address of a table of blocks, stay valid while an index grows. A record's fields, in
order: signs, weights, centre, logs, magnitudes; each key's signs and planes padded to whole words.
The first three are what the scan reads, in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Tokens of a block of codes or rows (`TOKENS` in kernels/common.cuh): an update of the local
window fills one (paper, Table 1)."""

MAX_TOKENS = 4 * 2**20
"""The longest context of issue 4: 128 KB of table per row of the batch."""

ALIGNED = 128
"""Bytes at whose multiples records and fields begin."""


def places(device: torch.device | str = "cpu") -> Tensor:
    """Where the weight of each key of a block lies, int64 `[256]`.

    Of 32 keys, those of a row of the scan's matrices, 8 apart, lie side by side: a lane has their
    four weights in one word.
    """
    keys = torch.arange(BLOCK, device=device)
    return keys // 32 * 32 + keys % 8 * 4 + keys % 32 // 8


@dataclass(frozen=True)
class Layout:
    """Bytes of a record of one KV head in a block of codes with one 16-bit log weight per key.

    The weight's upper byte is kept twice: alone, for the scan, and in `logs` with the lower one, so
    that reranking a key touches one place for it.
    """

    head_dim: int
    magnitude_bits: int

    @property
    def stride(self) -> int:
        """Bytes of a key's signs, and of each plane of its magnitudes."""
        return -(-self.head_dim // 32) * 4

    @property
    def weights(self) -> int:
        """Offset of the weights, uint8 `[256]`, in the order of `places`."""
        return _up(BLOCK * self.stride)

    @property
    def centre(self) -> int:
        """Offset of the centre, bfloat16 `[D]`."""
        return self.weights + BLOCK

    @property
    def logs(self) -> int:
        """Offset of the logs, uint16 `[256]`."""
        return self.centre + _up(2 * self.head_dim)

    @property
    def magnitudes(self) -> int:
        """Offset of the magnitudes, uint8 `[256, bits, stride]`."""
        return self.logs + 2 * BLOCK

    @property
    def head_bytes(self) -> int:
        """Bytes of a record."""
        return self.magnitudes + _up(BLOCK * self.magnitude_bits * self.stride)

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """The fields of blocks uint8 `[..., G, head_bytes]`, as views `[..., G, 256, ...]`.

        The weights are in the order of `places`, all else in that of the keys.
        """
        M, width = self.head_dim // 8, self.stride
        planes = (self.magnitude_bits, width)

        def field(start: int, *shape: int) -> Tensor:
            count = 1
            for size in shape:
                count *= size
            return blocks[..., start : start + count].view(*blocks.shape[:-1], *shape)

        return {
            "signs": field(0, BLOCK, width)[..., :M],
            "weights": field(self.weights, BLOCK, 1),
            "logs": field(self.logs, BLOCK, 2),
            "magnitudes": field(self.magnitudes, BLOCK, *planes)[..., :M],
            "centre": field(self.centre, self.head_dim, 2),
        }

    def pack(self, codes: dict[str, Tensor], centres: Tensor | None) -> Tensor:
        """Blocks uint8 `[B, S, G, head_bytes]` of codes `[B, G, N, ...]` as `ParisKV` keeps them.

        centres: bfloat16 `[B, G, S, D]`, or None.
        """
        signs = codes["signs"]
        B, G, N, _ = signs.shape
        S = -(-N // BLOCK)
        blocks = torch.zeros((B, S, G, self.head_bytes), dtype=torch.uint8, device=signs.device)
        fields = self.views(blocks)
        both = torch.cat([codes["fractions"], codes["weights"]], dim=-1)  # little-endian
        parts = {**codes, "logs": both}
        for name in ("signs", "weights", "logs", "magnitudes"):
            part = parts[name]
            if part.numel() == 0:
                continue
            padded = part.new_zeros((B, G, S * BLOCK, *part.shape[3:]))
            padded[:, :, :N] = part
            if name == "weights":
                order = places(part.device).argsort()
                padded = padded.view(B, G, S, BLOCK, 1)[:, :, :, order]
            fields[name].copy_(padded.view(B, G, S, BLOCK, *part.shape[3:]).transpose(1, 2))
        if centres is not None:
            raw = centres[:, :, :S].transpose(1, 2).contiguous().view(torch.uint8)
            fields["centre"].copy_(raw.view(B, S, G, self.head_dim, 2))
        return blocks


def _up(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
