"""The memory layout of codes: blocks of 256 tokens, one record for each KV head in it.

A block of codes shares a center. Blocks never move, so that captured graphs, which
hold the address of a table of blocks, stay valid while an index grows. A record's fields, in
order: signs, weights, center, logs, magnitudes; each key's signs and planes padded to whole words.
The first three are what the scan reads, in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

BLOCK = 256
"""Tokens of a block of codes or rows (`TOKENS` in kernels/common/common.cuh): an update of the
local window fills one (paper, Table 1)."""

MAX_TOKENS = 4 * 2**20
"""The longest context: 128 KB of table per row of the batch."""

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

    @cached_property
    def stride(self) -> int:
        """Bytes of a key's signs, and of each plane of its magnitudes."""
        return -(-self.head_dim // 32) * 4

    @cached_property
    def weights(self) -> int:
        """Offset of the weights, uint8 `[256]`, in the order of `places`."""
        return _up(BLOCK * self.stride)

    @cached_property
    def center(self) -> int:
        """Offset of the center, bfloat16 `[D]`."""
        return self.weights + BLOCK

    @cached_property
    def logs(self) -> int:
        """Offset of the logs, uint16 `[256]`."""
        return self.center + _up(2 * self.head_dim)

    @cached_property
    def magnitudes(self) -> int:
        """Offset of the magnitudes, uint8 `[256, bits, stride]`."""
        return self.logs + 2 * BLOCK

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of a record."""
        return self.magnitudes + _up(BLOCK * self.magnitude_bits * self.stride)

    # What columns a record holds: those of `ParisKV`

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns of codes."""
        return "signs", "magnitudes", "weights", "fractions"

    def column(self, name: str, fields: dict[str, Tensor]) -> Tensor:
        """The codes of a name, from bytes of fields `[..., 256, ...]` as `views` gives them."""
        if name in ("weights", "fractions"):
            return fields["logs"][..., 1:] if name == "weights" else fields["logs"][..., :1]
        return fields[name]

    def parts(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bytes of the fields, of codes `[B, G, N, ...]`."""
        parts = {name: codes[name] for name in ("signs", "weights", "magnitudes")}
        parts["logs"] = torch.cat([codes["fractions"], codes["weights"]], dim=-1)  # little-endian
        return parts

    def order(self, name: str, device: torch.device | str) -> Tensor | None:
        """Where each key's part of a field lies, int64 `[256]`, or None for in order."""
        return places(device) if name == "weights" else None

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes, what is kept twice included."""
        return self.stride * (1 + self.magnitude_bits) + 3

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """The fields of blocks uint8 `[..., G, head_bytes]`, as views `[..., G, 256, ...]`.

        The weights are in the order of `places`, all else in that of the keys.
        """
        return self._common(blocks) | {
            "weights": self._field(blocks, self.weights, BLOCK, 1),
            "logs": self._field(blocks, self.logs, BLOCK, 2),
            "center": self._field(blocks, self.center, self.head_dim, 2),
        }

    def _common(self, blocks: Tensor) -> dict[str, Tensor]:
        """Views of signs and magnitudes."""
        M, planes = self.head_dim // 8, (self.magnitude_bits, self.stride)
        return {
            "signs": self._field(blocks, 0, BLOCK, self.stride)[..., :M],
            "magnitudes": self._field(blocks, self.magnitudes, BLOCK, *planes)[..., :M],
        }

    @staticmethod
    def _field(blocks: Tensor, start: int, *shape: int) -> Tensor:
        return blocks[..., start : start + prod(shape)].view(*blocks.shape[:-1], *shape)

    def pack(self, codes: dict[str, Tensor], centers: Tensor | None) -> Tensor:
        """Blocks uint8 `[B, S, G, head_bytes]` of codes `[B, G, N, ...]` as `ParisKV` keeps them.

        centers: bfloat16 `[B, G, S, D]`, or None.
        """
        signs = codes["signs"]
        B, G, N, _ = signs.shape
        S = -(-N // BLOCK)
        blocks = torch.zeros((B, S, G, self.head_bytes), dtype=torch.uint8, device=signs.device)
        fields = self.views(blocks)
        for name, part in self.parts(codes).items():
            if part.numel() == 0:
                continue
            padded = part.new_zeros((B, G, S * BLOCK, *part.shape[3:]))
            padded[:, :, :N] = part
            padded = padded.view(B, G, S, BLOCK, *part.shape[3:])
            if (order := self.order(name, part.device)) is not None:
                padded = padded[:, :, :, order.argsort()]
            fields[name].copy_(padded.transpose(1, 2))
        if centers is not None:
            raw = centers[:, :, :S].transpose(1, 2).contiguous().view(torch.uint8)
            fields["center"].copy_(raw.view(B, S, G, self.head_dim, 2))
        return blocks

    def unpack(self, blocks: Tensor, count: int) -> dict[str, Tensor]:
        """Codes `[B, G, count, ...]` of blocks, as `pack` takes them."""
        fields = self.fields(blocks, count)
        return {name: self.column(name, fields) for name in self.names}

    def fields(self, blocks: Tensor, count: int) -> dict[str, Tensor]:
        """Bytes of the fields of blocks' first keys, in the order of the keys: `[B, G, count, …]`.

        blocks: uint8 `[B, S, G, head_bytes]`.
        """
        fields = {}
        for name, part in self.views(blocks).items():
            if name == "center":
                continue
            if (order := self.order(name, part.device)) is not None:
                part = part[:, :, :, order]
            fields[name] = part.transpose(1, 2).flatten(2, 3)[:, :, :count]
        return fields

    def centers(self, blocks: Tensor) -> Tensor:
        """Centers of blocks, bfloat16 `[B, G, S, D]`."""
        raw = self.views(blocks)["center"].transpose(1, 2).contiguous()
        return raw.view(torch.bfloat16)[..., 0]


@dataclass(frozen=True)
class SubspaceLayout(Layout):
    """Bytes of a record with a bfloat16 weight for each subspace, and no center.

    In order: signs, weights `[256, span]`, magnitudes.
    """

    @cached_property
    def span(self) -> int:
        """Bytes of a key's weights, in whole words."""
        return -(-self.head_dim // 16) * 4

    @cached_property
    def magnitudes(self) -> int:
        """Offset of the magnitudes, uint8 `[256, bits, stride]`."""
        return self.weights + _up(BLOCK * self.span)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns of codes."""
        return "signs", "magnitudes", "weights"

    def column(self, name: str, fields: dict[str, Tensor]) -> Tensor:
        """As `Layout.column`."""
        return fields[name].view(torch.bfloat16) if name == "weights" else fields[name]

    def parts(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `Layout.parts`."""
        return {**codes, "weights": codes["weights"].contiguous().view(torch.uint8)}

    def order(self, name: str, device: torch.device | str) -> Tensor | None:
        """None: all fields are in the order of the keys."""
        return None

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.stride * (1 + self.magnitude_bits) + self.span

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """As `Layout.views`; weights as bytes."""
        weights = self._field(blocks, self.weights, BLOCK, self.span)
        return self._common(blocks) | {"weights": weights[..., : self.head_dim // 4]}


def words_of(valid: Tensor, blocks: int) -> Tensor:
    """Bits of valid tokens, bool `[B, N]`, as int32 `[B, blocks, 8]`."""
    padded = torch.zeros((len(valid), blocks * BLOCK), dtype=torch.int64, device=valid.device)
    padded[:, : valid.shape[1]] = valid
    bits = padded.view(len(valid), blocks, 8, 32) << torch.arange(32, device=valid.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def flags_of(words: Tensor, count: int) -> Tensor:
    """Valid tokens, bool `[B, count]`, of their bits int32 `[B, blocks, 8]`."""
    bits = words[..., None] >> torch.arange(32, device=words.device) & 1
    return bits.flatten(1)[:, :count].bool()


def _up(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
