"""Encode keys: call the kernel that computes the centers and codes (`kernels/encode.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.cpu import threads
from kvindex.cpu.kernels.encode import AT_ONCE, encode
from kvindex.cpu.kernels.numbers import KINDS
from kvindex.cpu.state import addresses
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.config import ParisKVConfig

FEW_KEYS = 2**9
"""Total number of keys, over all groups, up to which one thread is faster than several."""


@dataclass(frozen=True)
class Encoder:
    """A callable object that encodes keys. Its attributes are tables that the kernel reads.

    Attributes:
        flips: Signs of the rotation, float32 `[D]` (`factors`).
        hartley: Matrix of the rotation, float32 `[p, p]` (`factors`).
        edges: Boundaries between the levels, padded with infinity, float32 `[E]`.
        levels: Absolute value of a coordinate for each magnitude code, padded with zeros, float32
            `[E + 1]`.
        bits: Number of bits of a magnitude code.
        block: Number of tokens in a block.
        centered: True if the mean key of a block is subtracted from its keys.
    """

    flips: np.ndarray
    hartley: np.ndarray
    edges: np.ndarray
    levels: np.ndarray
    bits: int
    block: int
    centered: bool

    @staticmethod
    def of(config: ParisKVConfig, rotation: Tensor, levels: Tensor) -> Encoder:
        """Create the encoder of an index.

        Args:
            config: Options of the index.
            rotation: The index's random rotation of keys.
            levels: Absolute value of a coordinate for each magnitude code, float32 `[2^bits]`.
        """
        flips, hartley = factors(rotation)
        edges = (levels[1:] + levels[:-1]) / 2
        none = -len(edges) % AT_ONCE
        return Encoder(
            flips=flips.numpy(),
            hartley=hartley.numpy(),
            edges=pad(edges, (0, none), value=torch.inf).numpy(),
            levels=pad(levels, (0, none)).numpy(),
            bits=config.magnitude_bits,
            block=config.center or BLOCK,
            centered=bool(config.center),
        )

    def __call__(self, keys: Tensor, valid: Tensor | None, wrong: Tensor | None = None) -> Codes:
        """Encode keys. The first of them must be the first key of a block.

        Args:
            keys: Floating point, `[B, G, N, D]`; invalid keys must be zero.
            valid: Mask of valid keys, bool `[B, N]`, or None if all are valid.
            wrong: Int32 `[]`, which is set to 1 if a coordinate is NaN, infinite or too large
                (`check.out_of_range`). None if this is not checked.

        Returns:
            Codes as ParisKV stores them.
        """
        keys = keys if keys.stride(-1) == 1 else keys.contiguous()
        (B, G, N, D), blocks = keys.shape, -(-keys.shape[2] // self.block)
        codes = self._empty(B, G, N, D, blocks)
        made = [tensor.flatten(0, 1) for tensor in codes.values()]
        made[0], made[-1] = made[0][:, :, None], made[-1].view(torch.uint16)
        outputs = [tensor.numpy() for tensor in made]
        valid = None if valid is None else valid.contiguous()
        flags = np.zeros(B * G, np.int64)
        if valid is not None:
            flags = addresses(valid[:, None].expand(-1, G, -1))
        found = np.zeros(1, np.int32) if wrong is None else wrong.view(1).numpy()
        asked = addresses(keys), keys.stride(2) * keys.element_size(), KINDS[keys.dtype], flags
        limit = check.LIMITS.get(keys.dtype, check.LARGEST)
        tables = self.block, self.flips, self.hartley, self.edges, self.levels

        def part(i: int, parts: int) -> None:
            encode(i, parts, *asked, limit, *tables, *outputs, found)

        threads.run(part, B * G * blocks if B * G * N > FEW_KEYS else 1)
        return {name: codes[name] for name in codes if name != "centers" or self.centered}

    def _empty(self, B: int, G: int, N: int, D: int, blocks: int) -> Codes:
        """Allocate tensors for the codes, in the order of the kernel's arguments."""
        byte, M = torch.uint8, D // 8
        return {
            "signs": torch.empty((B, G, N, M), dtype=byte),
            "magnitudes": torch.empty((B, G, N, self.bits, M), dtype=byte),
            "weights": torch.empty((B, G, N, 1), dtype=byte),
            "fractions": torch.empty((B, G, N, 1), dtype=byte),
            "centers": torch.empty((B, G, blocks * self.centered, D), dtype=torch.bfloat16),
        }


def factors(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Split a rotation matrix into factors, which `ops.transform.rotation` defines.

    rotation: float32 `[D, D]`. Returns the signs `s`, float32 `[D]`, and the matrix `Q / √D`,
    float32 `[p, p]`.
    """
    D = len(rotation)
    power = D & -D
    signs = rotation[0].sign()  # the first rows of Q and H are ones
    angle = torch.arange(D // power, dtype=torch.float64) * (2 * math.pi * power / D)
    angle = angle[:, None] * torch.arange(D // power)
    return signs, ((angle.cos() + angle.sin()) / math.sqrt(D)).float()
