"""Memory layout of codes: blocks of 256 tokens, with one record for each KV head.

The keys of a block share a center. Blocks never move in memory. A captured CUDA graph stores only
the address of a table of blocks, so it stays valid while an index grows. A record has these fields,
in this order:

- `signs`: one bit per coordinate of each key.
- `weights`: the upper byte of each key's 16-bit logarithmic weight.
- `center`: the mean key, which all keys of the block share.
- `logs`: both bytes of each key's weight.
- `magnitudes`: the quantized sizes of each key's coordinates, as bit planes.

The signs of a key are padded to whole 32-bit words, and so is each of its bit planes. The kernel
`scan`, which computes the coarse scores (votes), copies the first three fields at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

BLOCK = 256
"""Tokens in a block of codes or rows (`TOKENS` in kernels/common/common.cuh).

One update of the local window fills a block (paper, Table 1).
"""

MAX_TOKENS = 4 * 2**20
"""Longest context, in tokens. Its table of block addresses takes 128 KB per sequence."""

ALIGNED = 128
"""Records and fields begin at multiples of this many bytes."""


def places(device: torch.device | str = "cpu") -> Tensor:
    """Return the position at which the weight of each key of a block is stored, int64 `[256]`.

    In each group of 32 keys, the weights of the four keys whose ids are equal modulo 8 are
    adjacent. In the kernel `scan`, one thread of a tensor-core instruction handles these four keys,
    and reads their weights as one 32-bit word.
    """
    keys = torch.arange(BLOCK, device=device)
    return keys // 32 * 32 + keys % 8 * 4 + keys % 32 // 8


@dataclass(frozen=True)
class Layout:
    """Byte layout of a record, for codes with one 16-bit logarithmic weight per key.

    A record contains the codes of one block of 256 tokens for one KV head.

    The upper byte of a weight is stored twice. The coarse stage (kernel `scan`) reads it from the
    field `weights`, which contains only upper bytes. The rerank reads both bytes of a weight from
    adjacent addresses in the field `logs`.
    """

    head_dim: int
    magnitude_bits: int

    @cached_property
    def stride(self) -> int:
        """Number of bytes of one key's sign bits.

        The key also has `magnitude_bits` bit planes for its magnitudes. Each bit plane takes the
        same number of bytes as the sign bits.
        """
        return -(-self.head_dim // 32) * 4

    @cached_property
    def weights(self) -> int:
        """Byte offset of the field `weights` in the codes of a block for one KV head.

        The field is uint8 `[256]`: the upper byte of each key's weight. The byte of key `i` of the
        block is stored at position `places()[i]`.
        """
        return _up(BLOCK * self.stride)

    @cached_property
    def center(self) -> int:
        """Byte offset of the center, bfloat16 `[D]`, in the codes of a block for one KV head."""
        return self.weights + BLOCK

    @cached_property
    def logs(self) -> int:
        """Byte offset of the 16-bit log weights, uint16 `[256]`, in the codes of a block for one
        KV head."""
        return self.center + _up(2 * self.head_dim)

    @cached_property
    def magnitudes(self) -> int:
        """Byte offset of the magnitudes in the codes of a block for one KV head.

        The magnitudes are uint8 `[256, bits, stride]`.
        """
        return self.logs + 2 * BLOCK

    @cached_property
    def head_bytes(self) -> int:
        """Number of bytes of the codes of one block for one KV head."""
        return self.magnitudes + _up(BLOCK * self.magnitude_bits * self.stride)

    # Conversion between the fields of a record and the code tensors of `ParisKV`

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the code tensors of `ParisKV` that are stored for each block and KV head."""
        return "signs", "magnitudes", "weights", "fractions"

    def column(self, name: str, fields: dict[str, Tensor]) -> Tensor:
        """Extract one tensor of codes, such as "signs", from the fields that `views` returns."""
        if name in ("weights", "fractions"):
            return fields["logs"][..., 1:] if name == "weights" else fields["logs"][..., :1]
        return fields[name]

    def parts(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert code tensors of `ParisKV`, `[B, G, N, ...]`, to fields of the memory layout."""
        parts = {name: codes[name] for name in ("signs", "weights", "magnitudes")}
        parts["logs"] = torch.cat(
            [codes["fractions"], codes["weights"]], dim=-1
        )  # lower byte first
        return parts

    def order(self, name: str, device: torch.device | str) -> Tensor | None:
        """Return each key's position in the field `name`, int64 `[256]`.

        The result is None if the field stores key `i` at position `i`.
        """
        return places(device) if name == "weights" else None

    @property
    def key_bytes(self) -> int:
        """Number of bytes of one key's codes.

        Each key has a weight of two bytes. Its upper byte is stored twice: in the field `weights`
        and, with the lower byte, in the field `logs`. So the weight takes three bytes.
        """
        return self.stride * (1 + self.magnitude_bits) + 3

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return views `[..., G, 256, ...]` of the fields in blocks uint8 `[..., G, head_bytes]`.

        In the field of the weights, the keys are in the order that the function `places` defines.
        All other fields store the data of key `i` at position `i`.
        """
        return self._common(blocks) | {
            "weights": self._field(blocks, self.weights, BLOCK, 1),
            "logs": self._field(blocks, self.logs, BLOCK, 2),
            "center": self._field(blocks, self.center, self.head_dim, 2),
        }

    def _common(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return views of the fields `signs` and `magnitudes`.

        Subclasses use this method, because their blocks contain the same two fields.
        """
        M, planes = self.head_dim // 8, (self.magnitude_bits, self.stride)
        return {
            "signs": self._field(blocks, 0, BLOCK, self.stride)[..., :M],
            "magnitudes": self._field(blocks, self.magnitudes, BLOCK, *planes)[..., :M],
        }

    @staticmethod
    def _field(blocks: Tensor, start: int, *shape: int) -> Tensor:
        return blocks[..., start : start + prod(shape)].view(*blocks.shape[:-1], *shape)

    def pack(self, codes: dict[str, Tensor], centers: Tensor | None) -> Tensor:
        """Pack codes `[B, G, N, ...]` of `ParisKV` into blocks uint8 `[B, S, G, head_bytes]`.

        Args:
            codes: Name -> tensor of codes, for each of `names`.
            centers: Centers of the `S` blocks, bfloat16 `[B, G, S, D]`, or None without centers.
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
        """Return the codes `[B, G, count, ...]` that `pack` has stored in `blocks`."""
        fields = self.fields(blocks, count)
        return {name: self.column(name, fields) for name in self.names}

    def fields(self, blocks: Tensor, count: int) -> dict[str, Tensor]:
        """Return the bytes of every field except `center`, sorted by the positions of the keys.

        Args:
            blocks: Blocks of codes, uint8 `[B, S, G, head_bytes]`.
            count: Number of keys to return, counted from the first key of the first block.

        Returns:
            Name of a field -> bytes, uint8 `[B, G, count, ...]`.
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
        """Return the center of each block, bfloat16 `[B, G, S, D]`."""
        raw = self.views(blocks)["center"].transpose(1, 2).contiguous()
        return raw.view(torch.bfloat16)[..., 0]


@dataclass(frozen=True)
class SubspaceLayout(Layout):
    """Byte layout of a record: the codes (compressed keys) of 256 tokens for one KV head.

    In this layout, each key has a bfloat16 weight for each subspace, and there is no center. The
    fields of a record are signs, weights `[256, span]` and magnitudes, in this order.
    """

    @cached_property
    def span(self) -> int:
        """Bytes that the weights of one key take, rounded up to whole 32-bit words."""
        return -(-self.head_dim // 16) * 4

    @cached_property
    def magnitudes(self) -> int:
        """Byte offset of the magnitudes in the codes of a block for one KV head.

        The magnitudes are uint8 `[256, bits, stride]`.
        """
        return self.weights + _up(BLOCK * self.span)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the code tensors of `ParisKV` that are stored for each block and KV head."""
        return "signs", "magnitudes", "weights"

    def column(self, name: str, fields: dict[str, Tensor]) -> Tensor:
        """Extract one tensor of codes, such as "signs", from the fields that `views` returns."""
        return fields[name].view(torch.bfloat16) if name == "weights" else fields[name]

    def parts(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert code tensors of `ParisKV`, `[B, G, N, ...]`, to fields of the memory layout."""
        return {**codes, "weights": codes["weights"].contiguous().view(torch.uint8)}

    def order(self, name: str, device: torch.device | str) -> Tensor | None:
        """Return None: every field stores the codes of the keys in the order of the keys."""
        return None

    @property
    def key_bytes(self) -> int:
        """Bytes of one key's codes."""
        return self.stride * (1 + self.magnitude_bits) + self.span

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return views `[..., G, 256, ...]` of the fields in blocks uint8 `[..., G, head_bytes]`.

        The weights are returned as bytes, two for each bfloat16 number.
        """
        weights = self._field(blocks, self.weights, BLOCK, self.span)
        return self._common(blocks) | {"weights": weights[..., : self.head_dim // 4]}


def words_of(valid: Tensor, blocks: int) -> Tensor:
    """Pack the mask of valid tokens, bool `[B, N]`, into 32-bit words, int32 `[B, blocks, 8]`."""
    padded = torch.zeros((len(valid), blocks * BLOCK), dtype=torch.int64, device=valid.device)
    padded[:, : valid.shape[1]] = valid
    bits = padded.view(len(valid), blocks, 8, 32) << torch.arange(32, device=valid.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def flags_of(words: Tensor, count: int) -> Tensor:
    """Unpack 32-bit words, int32 `[B, blocks, 8]`, into the mask of valid tokens `[B, count]`."""
    bits = words[..., None] >> torch.arange(32, device=words.device) & 1
    return bits.flatten(1)[:, :count].bool()


def _up(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
