"""Tables that the kernels read, which follow from an index's geometry and configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.cpu.served import query_max_of
from kvindex.indexes.pariskv import ParisKVConfig
from kvindex.ops import codes as coding


@dataclass(frozen=True)
class Constants:
    """What follows from geometry and configuration, for kernels.

    rotation float32 `[D, D]`; levels: signed, float32 `[2 · 2^bits]`; sizes: of weights by their
    codes, float32 `[2^16]`; spread: a byte's bits as bytes, uint64 `[256]`; factors: int32 `[256]`.
    """

    rotation: np.ndarray
    levels: np.ndarray
    sizes: np.ndarray
    spread: np.ndarray
    factors: Tensor
    level: float
    query_max: int

    @staticmethod
    def of(
        geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
    ) -> Constants:
        """Those of an index with this rotation and these levels."""
        spread = coding.unpack(torch.arange(256, dtype=torch.uint8))
        return Constants(
            rotation=rotation.contiguous().numpy(),
            levels=torch.cat([-levels, levels]).numpy(),
            sizes=coding.log_weights(torch.arange(2**16), 16).numpy(),
            spread=spread.contiguous().numpy().view(np.uint64)[:, 0],
            factors=coding.log_factors(config.weight_bits),
            level=coding.lloyd_max(geometry.head_dim, 0)[0],
            query_max=query_max_of(config, geometry),
        )
