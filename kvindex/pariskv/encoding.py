"""Keys become codes: a center off, normalized, rotated; signs, magnitudes and weights."""

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
    """What a configuration fixes before the first key.

    ops: of the backend; block: coordinates that share a weight; rotation: float32, as
    `ops.transform.rotation` makes it; levels: float32 `[2^bits]`, the sizes that magnitudes stand
    for; level: the size that a sign alone stands for; factors: of `ops.codes.log_factors`, int32
    `[256]`, or None where weights are no logarithms.
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
        """For keys of a geometry."""
        D, bits, device = geometry.head_dim, config.magnitude_bits, geometry.device
        block = SUBSPACE if config.block == "subspace" else D
        rotation = ops.transform.rotation(D, config.seed, device)
        levels, level = ops.codes.levels(block, bits, device), ops.codes.lloyd_max(block, 0)[0]
        logs = config.weights == "log"
        factors = ops.codes.log_factors(config.weight_bits, device) if logs else None
        return Encoding(config, ops, block, rotation, levels, level, factors)

    @property
    def constants(self) -> list[Tensor]:
        """The tensors that an index keeps of it."""
        known = self.rotation, self.levels, self.factors
        return [tensor for tensor in known if tensor is not None]

    def encode(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Codes of keys `[B, G, N, D]`, the first of which begins a block.

        signs uint8 `[B, G, N, M]`, magnitudes uint8 `[B, G, N, bits, M]`, weights `[B, G, N, W]`
        and, as options have it, the lower byte of these, `fractions`, and centers
        `[B, G, S, D]`, one for a block. valid: which keys are, bool `[B, N]`; None for all.
        """
        ops, centers = self.ops, self._centers(keys, valid)
        directions, norms = ops.transform.normalize(self._centered(keys, centers))
        rotated = ops.transform.rotate(directions, self.rotation)
        codes = ops.codes.encode(rotated, norms, self.levels, block=self.block) | centers
        return {**codes, **self._weights(codes["weights"], valid)}

    @property
    def block_tokens(self) -> int:
        """Tokens that are encoded together."""
        return self.config.center or (BLOCK if self.config.weights == "log" else 1)

    def fit(self, entries: Callable[[str, int, int], Tensor], blocks: int) -> Tensor:
        """`pariskv.sign_regression.fit` to the first of so many full blocks.

        entries: of a column of codes, every so many of the first tokens (`Columns.every`).
        """
        fitted = sign_regression.fitted_blocks(blocks) * self.block_tokens
        every = sign_regression.stride(fitted)
        names = "signs", "magnitudes", "weights"
        signs, magnitudes, weights = (entries(name, fitted, every) for name in names)
        return sign_regression.fit(signs, magnitudes, weights[..., 0] > 0, self.levels, self.level)

    def _centers(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """A center for each block of keys, where blocks have one."""
        tokens = self.config.center
        return {"centers": self.ops.codes.centers(keys, valid, tokens)} if tokens else {}

    def _centered(self, keys: Tensor, centers: Codes) -> Tensor:
        """Keys float32, less the centers of their blocks."""
        floats = keys.float()
        if not centers:
            return floats
        spread = centers["centers"].repeat_interleave(self.config.center, dim=2)
        return floats - spread[:, :, : keys.shape[2]].float()

    def _weights(self, weights: Tensor, valid: Tensor | None) -> Codes:
        """Weights float32 `[B, G, N, W]` as they are stored: a log of 16 bits as two bytes."""
        if self.config.weights == "bfloat16":
            return {"weights": weights.bfloat16()}
        logs = self.ops.codes.log_codes(weights, self.config.weight_bits)
        if valid is not None:
            logs = logs.masked_fill(~valid[:, None, :, None], 0)
        if self.config.weight_bits == 8:
            return {"weights": logs.to(torch.uint8)}
        lower = (logs & 255).to(torch.uint8)
        return {"weights": (logs >> 8).to(torch.uint8), "fractions": lower}
