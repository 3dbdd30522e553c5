"""Encode keys: subtract the mean key of the block, normalize, rotate, then quantize.

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

Constants = tuple[Tensor, Tensor, float, Tensor | None]
"""`rotation`, `levels`, `level` and `factors` of `Encoding`."""

RECENT = 16
"""Number of `Constants` that are kept for further layers."""

_recent: list[tuple[Any, tuple[Any, ...], Constants]] = []
"""The last `Constants`, newest first, with the operations and sizes from which they were made."""


def _constants(
    ops: Any,
    dim: int,
    block: int,
    bits: int,
    seed: int,
    weight_bits: int | None,
    device: torch.device,
) -> Constants:
    """Compute the constants of an `Encoding`."""
    rotation = ops.transform.rotation(dim, seed, device)
    levels, level = ops.codes.levels(block, bits, device), ops.codes.lloyd_max(block, 0)[0]
    factors = None if weight_bits is None else ops.codes.log_factors(weight_bits, device)
    return rotation, levels, level, factors


@dataclass(frozen=True)
class Encoding:
    """Constants for encoding keys. They depend on the configuration alone, not on the keys.

    Attributes:
        config: Options of the index.
        ops: Operations of the backend (`kvindex.ops` or a compiled version).
        block: Number of coordinates that share one weight.
        rotation: Rotation matrix, float32 `[D, D]` (`ops.transform.rotation`).
        levels: Absolute value of a coordinate for each magnitude code, float32 `[2^bits]`.
        level: Mean absolute value of a coordinate, which is used where only the sign is read.
        factors: For each logarithmic weight, the integer by which coarse scores (votes) are
            multiplied, int32 `[256]`. None if weights are not logarithmic.
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
        """Compute the constants with which all keys are encoded, such as the rotation matrix.

        The layers of a model share these tensors. `geometry` gives the head dimension and the
        device.
        """
        D, bits, device = geometry.head_dim, config.magnitude_bits, geometry.device
        block = SUBSPACE if config.block == "subspace" else D
        weight_bits = config.weight_bits if config.weights == "log" else None
        wanted = D, block, bits, config.seed, weight_bits, device
        for other, sizes, known in tuple(_recent):
            if other is ops and sizes == wanted:
                return Encoding(config, ops, block, *known)
        made = _constants(ops, *wanted)
        _recent[:] = [(ops, wanted, made), *_recent[: RECENT - 1]]
        return Encoding(config, ops, block, *made)

    @property
    def constants(self) -> list[Tensor]:
        """Return the tensors that do not depend on keys: `rotation`, `levels` and, if weights are
        stored as logarithms, `factors`.
        """
        known = self.rotation, self.levels, self.factors
        return [tensor for tensor in known if tensor is not None]

    def encode(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Encode keys. The first key must begin a block.

        Args:
            keys: Floating point, `[B, G, N, D]`.
            valid: Bool `[B, N]`, False for padding. None if no token is padding.

        Returns:
            `signs`: Uint8 `[B, G, N, M]`.
            `magnitudes`: Uint8 `[B, G, N, bits, M]`.
            `weights`: `[B, G, N, W]`, bfloat16, or uint8 for logarithmic weights.
            `fractions`: Lower bytes of 16-bit logarithmic weights, uint8 `[B, G, N, W]`. Absent
            for other weights.
            `centers`: Mean key of each block, bfloat16 `[B, G, S, D]`. Absent if `center` is 0.
        """
        ops, centers = self.ops, self._centers(keys, valid)
        directions, norms = ops.transform.normalize(self._centered(keys, centers))
        rotated = ops.transform.rotate(directions, self.rotation)
        codes = ops.codes.encode(rotated, norms, self.levels, block=self.block) | centers
        return {**codes, **self._weights(codes["weights"], valid)}

    @property
    def block_tokens(self) -> int:
        """Number of tokens in a block that is encoded as a unit; 1 if each key is encoded alone."""
        return self.config.center or (BLOCK if self.config.weights == "log" else 1)

    def fit(self, entries: Callable[[str, int, int], Tensor], blocks: int) -> Tensor:
        """Fit the regression of keys on their sign bits (`sign_regression`) to the codes of full
        blocks.

        Args:
            entries: Function `(name, end, stride)` that returns the codes `name` of every
                `stride`-th token before the token `end` (`Columns.every`).
            blocks: Number of full blocks. The fit uses `sign_regression.fitted_blocks` of them.

        Returns:
            The fitted matrix, float16 `[B, G, D, D]`.
        """
        fitted = sign_regression.fitted_blocks(blocks) * self.block_tokens
        every = sign_regression.stride(fitted)
        names = "signs", "magnitudes", "weights"
        signs, magnitudes, weights = (entries(name, fitted, every) for name in names)
        return sign_regression.fit(signs, magnitudes, weights[..., 0] > 0, self.levels, self.level)

    def _centers(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Return `{"centers": mean key of each block}`, or an empty dict if `center` is 0."""
        tokens = self.config.center
        return {"centers": self.ops.codes.centers(keys, valid, tokens)} if tokens else {}

    def _centered(self, keys: Tensor, centers: Codes) -> Tensor:
        """Convert keys to float32 and subtract the centers of their blocks."""
        floats = keys.float()
        if not centers:
            return floats
        spread = centers["centers"].repeat_interleave(self.config.center, dim=2)
        return floats - spread[:, :, : keys.shape[2]].float()

    def _weights(self, weights: Tensor, valid: Tensor | None) -> Codes:
        """Convert weights float32 `[B, G, N, W]` to the form in which they are stored.

        A 16-bit logarithm is stored as two separate bytes, because the coarse stage reads only the
        upper byte.
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
