"""Encode keys: subtract the block's center, normalize, rotate, then quantize.

Source: ParisKV, sections A.1 to A.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Codes
from kvindex.ops.codes import SUBSPACE
from kvindex.pariskv import sign_regression
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.config import ParisKVConfig


@dataclass(frozen=True)
class Encoding:
    """Constants of the encoding, which follow from the configuration before the first key.

    Attributes:
        config: Options of the index.
        ops: Operations of the backend (`kvindex.ops` or a compiled version).
        block: Coordinates that share one weight.
        rotation: Rotation matrix, float32 `[D, D]` (`ops.transform.rotation`).
        levels: Sizes that the magnitude codes represent, float32 `[2^bits]`.
        level: Size that a sign alone represents.
        factors: Integer factors of logarithmic weights, int32 `[256]`, or None for other weights.
    """

    config: ParisKVConfig
    ops: Any
    block: int
    rotation: Tensor
    levels: Tensor
    level: float
    factors: Tensor | None

    @staticmethod
    def of(config: ParisKVConfig, geometry: Geometry, ops: Any) -> Encoding:
        """Compute the constants for keys of a geometry."""
        D, bits, device = geometry.head_dim, config.magnitude_bits, geometry.device
        block = SUBSPACE if config.block == "subspace" else D
        rotation = ops.transform.rotation(D, config.seed, device)
        levels, level = ops.codes.levels(block, bits, device), ops.codes.lloyd_max(block, 0)[0]
        logs = config.weights == "log"
        factors = ops.codes.log_factors(config.weight_bits, device) if logs else None
        return Encoding(config, ops, block, rotation, levels, level, factors)

    @property
    def constants(self) -> list[Tensor]:
        """Return those of the constants that are tensors."""
        known = self.rotation, self.levels, self.factors
        return [tensor for tensor in known if tensor is not None]

    def encode(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Encode keys. The first key must be the first one of a block.

        Args:
            keys: Floating point, `[B, G, N, D]`.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            `signs` uint8 `[B, G, N, M]`, `magnitudes` uint8 `[B, G, N, bits, M]` and `weights` `[B,
            G, N, W]`. With 16-bit logarithmic weights `fractions` has their lower bytes, uint8 `[B,
            G, N, W]`. With centers `centers` is bfloat16 `[B, G, S, D]`, one for each block.
        """
        ops, centers = self.ops, self._centers(keys, valid)
        directions, norms = ops.transform.normalize(self._centered(keys, centers))
        rotated = ops.transform.rotate(directions, self.rotation)
        codes = ops.codes.encode(rotated, norms, self.levels, block=self.block) | centers
        return {**codes, **self._weights(codes["weights"], valid)}

    @property
    def block_tokens(self) -> int:
        """Number of tokens that are encoded together."""
        return self.config.center or (BLOCK if self.config.weights == "log" else 1)

    def fit(self, entries: Callable[[str, int, int], Tensor], blocks: int) -> Tensor:
        """Fit the sign regression (`sign_regression.fit`) to the first of `blocks` full blocks.

        Args:
            entries: A function that takes a column's name, an end and a step, and returns every
                step-th entry before the end (`Columns.every`).
            blocks: Number of full blocks.

        Returns:
            The fitted matrix, float16 `[B, G, D, D]`.
        """
        fitted = sign_regression.fitted_blocks(blocks) * self.block_tokens
        every = sign_regression.stride(fitted)
        names = "signs", "magnitudes", "weights"
        signs, magnitudes, weights = (entries(name, fitted, every) for name in names)
        return sign_regression.fit(signs, magnitudes, weights[..., 0] > 0, self.levels, self.level)

    def _centers(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Return the center of each block of keys, or nothing where blocks have no center."""
        tokens = self.config.center
        return {"centers": self.ops.codes.centers(keys, valid, tokens)} if tokens else {}

    def _centered(self, keys: Tensor, centers: Codes) -> Tensor:
        """Return keys as float32, minus the centers of their blocks."""
        floats = keys.float()
        if not centers:
            return floats
        spread = centers["centers"].repeat_interleave(self.config.center, dim=2)
        return floats - spread[:, :, : keys.shape[2]].float()

    def _weights(self, weights: Tensor, valid: Tensor | None) -> Codes:
        """Convert weights float32 `[B, G, N, W]` to the form in which they are stored.

        A 16-bit logarithm is stored as two bytes, because votes read only the upper one.
        """
        if self.config.weights == "bfloat16":
            return {"weights": weights.bfloat16()}
        logs = self.ops.codes.log_codes(weights, self.config.weight_bits)
        if valid is not None:
            logs = logs.masked_fill(~valid[:, None, :, None], 0)
        if self.config.weight_bits == 8:
            return {"weights": logs.to(torch.uint8)}
        lower = (logs & 255).to(torch.uint8)
        return {"weights": (logs >> 8).to(torch.uint8), "fractions": lower}
