"""Tables for the kernels, which follow from an index's geometry and configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.cpu.kernels.rerank import STEPS
from kvindex.cpu.kernels.vectors import LANES
from kvindex.cpu.pariskv.encoding import Encoder
from kvindex.cpu.pariskv.supported import query_max_of
from kvindex.ops import codes as coding
from kvindex.pariskv.config import ParisKVConfig


@dataclass(frozen=True)
class Constants:
    """Tables and numbers for the kernels.

    Attributes:
        rotation: Float32 `[D, D]`.
        levels: Sizes of magnitude codes, float32 `[2^bits]`, padded with zeros to 16.
        fine: Weights from 1 to 2 (one octave), indexed by the lower 11 bits of their code, float32
            `[2^11]`.
        factors: Integer factors of logarithmic weights, int32 `[256]`.
        level: Size that a sign alone represents.
        query_max: Largest coordinate of a rounded query.
        encoder: Encodes keys.
    """

    rotation: np.ndarray
    levels: np.ndarray
    fine: np.ndarray
    factors: Tensor
    level: float
    query_max: int
    encoder: Encoder

    @staticmethod
    def of(
        geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
    ) -> Constants:
        """Compute the constants of an index with this rotation and these levels."""
        octave = 2**15 + torch.arange(STEPS)
        return Constants(
            rotation=rotation.contiguous().numpy(),
            levels=torch.nn.functional.pad(levels, (0, max(0, LANES - len(levels)))).numpy(),
            fine=coding.log_weights(octave, 16).numpy(),
            factors=coding.log_factors(config.weight_bits),
            level=coding.lloyd_max(geometry.head_dim, 0)[0],
            query_max=query_max_of(config, geometry),
            encoder=Encoder.of(config, rotation, levels),
        )
