"""Tables that the kernels read, which follow from an index's geometry and configuration."""

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
    """What follows from geometry and configuration, for kernels.

    rotation float32 `[D, D]`; levels float32 `[2^bits]`, and zeros up to 16; fine: weights of an
    octave by their codes, from 1 on, float32 `[2^11]`; factors: int32 `[256]`.
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
        """Those of an index with this rotation and these levels."""
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
