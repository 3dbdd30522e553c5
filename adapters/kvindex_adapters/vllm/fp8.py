"""Keys and values in FP8 (vLLM's `kv_cache_dtype="fp8"`).

vLLM then stores each number of a key as an 8-bit float (e4m3, up to 448), and the layer has a scale
for all its keys and another one for all its values. A key is its stored number times the scale.
Keys and values are converted where they are read. Codes (compressed keys) are made from converted
keys, so they depend only on what is stored in a block's pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = "fp8", "fp8_e4m3"
"""vLLM's names of this dtype of a cache. "fp8" means e4m3."""

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Scales:
    """Converts the keys and values of one layer to FP8 and back.

    Args:
        key: Scale of keys.
        value: Scale of values.
        dtype: Dtype of the model.
    """

    key: float
    value: float
    dtype: torch.dtype

    @staticmethod
    def of(layer: Any, dtype: torch.dtype) -> Scales:
        """Read the scales of vLLM's attention layer.

        Raises:
            ValueError: The layer has a scale for each head.
        """
        for name, scale in zip(("k_scale", "v_scale"), device_scales(layer), strict=True):
            if scale.numel() != 1:
                raise ValueError(
                    f"kvindex: {name}: got {scale.numel()} scales, allowed is one scale for all "
                    "heads of a layer"
                )
        numbers = vars(layer)
        return Scales(numbers["_k_scale_float"], numbers["_v_scale_float"], dtype)

    def decode_keys(self, codes: Tensor) -> Tensor:
        """Convert stored keys, uint8, to numbers of the model's dtype."""
        return self._decode(codes, self.key)

    def decode_values(self, codes: Tensor) -> Tensor:
        """Convert stored values, uint8, to numbers of the model's dtype."""
        return self._decode(codes, self.value)

    def encode_keys(self, keys: Tensor) -> Tensor:
        """Convert keys to uint8, as vLLM does on a CPU."""
        return rounded(keys.float() / self.key)

    def encode_values(self, values: Tensor) -> Tensor:
        """Convert values to uint8, as vLLM does on a CPU."""
        return rounded(values.float() / self.value)

    def _decode(self, codes: Tensor, scale: float) -> Tensor:
        return (codes.view(FP8).float() * scale).to(self.dtype)


def device_scales(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the scales of the keys and of the values of vLLM's attention layer, on the device.

    vLLM 0.26 stores them as parameters if it loads them from a checkpoint, otherwise as buffers.
    """
    return _scale(layer, "_k_scale"), _scale(layer, "_v_scale")


def query_scale(layer: Any) -> Tensor:
    """Return the scale of the queries of vLLM's attention layer, on the device."""
    return _scale(layer, "_q_scale")


def rounded(numbers: Tensor) -> Tensor:
    """Round float32 numbers towards zero to FP8, as vLLM's kernels for CPUs do. The result is
    uint8. Numbers that are too large become the largest one."""
    inside = numbers.clamp(-LARGEST, LARGEST)
    nearest = inside.to(FP8)
    above = nearest.float().abs() > inside.abs()
    return nearest.view(torch.uint8) - above.to(torch.uint8)  # the next number towards zero


def _scale(layer: Any, name: str) -> Tensor:
    """Return a scale of an attention layer. With some checkpoints, vLLM 0.26 replaces the buffer by
    a parameter of the same name."""
    try:
        found: Tensor = layer.get_buffer(name)
    except AttributeError:
        found = layer.get_parameter(name).detach()
    return found
