"""The attention layer that is measured, its queries and its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import kvindex
from kvindex.geometry import Geometry
from kvindex.ops.coarse import ceil_share
from kvindex_cuda.layout import BLOCK, Layout

H, G, D, K = 32, 8, 128, 100
NEAR = 64 + 256
"""Sink and local window, as `AttentionLayer` has them by default."""


@dataclass(frozen=True)
class Setting:
    """The attention layer, and what the index is told."""

    geometry: Geometry
    spec: str = "pariskv"
    k: int = K
    near: int = NEAR
    hit_rate: float = 0.9

    @property
    def index(self) -> kvindex.BaseIndex:
        """An empty reference index."""
        return self.made("torch")

    def made(self, backend: str) -> kvindex.BaseIndex:
        """An empty index of a backend, rows on the device."""
        return kvindex.create(self.spec, **self.geometry.options(), backend=backend)

    @property
    def layout(self) -> Layout:
        """Of the codes."""
        return Layout(self.geometry.head_dim, self.index.config.magnitude_bits)

    def candidates(self, tokens: int) -> int:
        """`C` (`ParisKV._limits`)."""
        config = self.index.config
        return min(max(ceil_share(tokens, config.beta), config.pool * self.k), tokens)

    def queries(self, *shape: int) -> Tensor:
        """`[..., H, D]`: the heads of a group share half of their variance."""
        g = self.geometry
        draw = torch.Generator(g.device).manual_seed(1)
        options = dict(generator=draw, device=g.device)
        own = torch.randn(*shape, g.kv_heads, g.group_size, g.head_dim, **options)
        shared = torch.randn(*shape, g.kv_heads, 1, g.head_dim, **options)
        return ((own + shared) / math.sqrt(2)).flatten(-3, -2).to(g.dtype)


def synthetic(geometry: Geometry, sequence: int, start: int, count: int) -> Tensor:
    """Keys `[1, G, count, D]` of a sequence's tokens from `start`, a multiple of 256.

    Normal noise around a mean for each 256 tokens, which moves on a wave of amplitude 1 per head
    and coordinate, with a period of 20 to 2000 segments.
    """
    g = geometry
    draw = torch.Generator(g.device)
    shape, options = (g.kv_heads, 1, g.head_dim), dict(generator=draw, device=g.device)
    draw.manual_seed(2 * sequence)
    phase = torch.rand(shape, **options) * 2 * math.pi
    period = 20 * 100 ** torch.rand(shape, **options)
    draw.manual_seed((2 * sequence + 1) * 2**32 + start)
    noise = torch.randn(g.kv_heads, count, g.head_dim, **options)
    segment = torch.arange(start // BLOCK, -(-(start + count) // BLOCK), device=g.device)
    mean = torch.cos(phase + segment[:, None] * 2 * math.pi / period)
    return (noise + mean.repeat_interleave(BLOCK, 1)[:, :count]).to(g.dtype)[None]
