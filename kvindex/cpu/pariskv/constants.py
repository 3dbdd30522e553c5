"""Tables for the kernels, computed from the options and the head dimension of an index."""

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
    """Tables and numbers that the kernels read, and that do not depend on the keys.

    Attributes:
        rotation: Rotation matrix, float32 `[D, D]`.
        levels: Absolute value of a coordinate for each magnitude code, float32 `[2^bits]`, padded
            with zeros to at least 16.
        fine: Table that decodes the weights of keys, which are stored as 16-bit logarithmic codes.
            It contains the weights from 1 to 2, indexed by the lower 11 bits of a code, float32
            `[2^11]`.
        factors: Integers by which the coarse scores (votes) of keys are multiplied, ascending,
            int32 `[256]`. They are proportional to the keys' weights (`ops.codes.log_factors`).
        level: Absolute value of a coordinate of which only the sign is known.
        query_max: Largest value of a coordinate after a query is rounded to integers.
        encoder: Function that encodes keys.
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
        """Compute all attributes for an index that has the given rotation and levels."""
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
