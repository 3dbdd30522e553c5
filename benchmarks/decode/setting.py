"""The attention layer that is measured, its queries and its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex.core.geometry import Geometry
from kvindex.ops.coarse import TIERS, ceil_share
from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.pariskv.dispatch import STEPS, kind_of, layout_of, options_of, room_of

H, G, D, K = 32, 8, 128, 100
NEAR = 64 + 256
"""Sink and local window, as `AttentionLayer` has them by default."""


@dataclass(frozen=True)
class Setting:
    """The attention layer, and what the index is told."""

    geometry: Geometry
    spec: str = "pariskv"
    k: int = K
    resident: int = NEAR
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
        return layout_of(self.index)

    @property
    def kind(self) -> str:
        """Of the step (`serving.kind_of`)."""
        kind = kind_of(self.index)
        assert kind is not None
        return kind

    @property
    def scanned_bytes(self) -> int:
        """Of a key, that a step reads of all keys at least; centers not counted."""
        layout = self.layout
        weights = layout.span if isinstance(layout, SubspaceLayout) else 1
        planes = layout.stride * layout.magnitude_bits
        beside = dict(votes=weights, dots=weights, tiers=0, all=planes + 2)
        return layout.stride + beside[self.kind]

    @property
    def record(self) -> tuple[int, int] | None:
        """Bytes that `scan` reads of a block's record of a KV head, and of the record."""
        index: Any = self.index
        if self.kind != "votes":
            return None
        layout, center = self.layout, 2 * self.geometry.head_dim
        return layout.center + (center if index.config.center else 0), layout.head_bytes

    def candidates(self, tokens: int) -> int:
        """`C`, of a head or of the group; all keys of one stage."""
        index: Any = self.index
        return tokens if self.kind == "all" else int(index._candidates_of(tokens, self.k))

    def tiers(self, tokens: int) -> list[int]:
        """Keys that bound each tier."""
        index: Any = self.index
        return [ceil_share(tokens, index._shares(tokens)[1], t) for t in TIERS]

    def step(self, batch: int, tokens: int, multiprocessors: int) -> Any:
        """A step for so many tokens."""
        kind = self.kind
        options = options_of(kind, self.index.config) | dict(batch=batch, k=self.k)
        most = room_of(kind, tokens, self.candidates(tokens))
        options |= dict(most=most, multiprocessors=multiprocessors)
        return STEPS[kind](self.geometry, self.layout, **options)

    def queries(self, *shape: int) -> Tensor:
        """`[..., H, D]`: the heads of a group share half of their variance."""
        g = self.geometry
        draw = torch.Generator(g.device).manual_seed(1)
        options = dict(generator=draw, device=g.device)
        own = torch.randn(*shape, g.kv_heads, g.group_size, g.head_dim, **options)
        shared = torch.randn(*shape, g.kv_heads, 1, g.head_dim, **options)
        return ((own + shared) / math.sqrt(2)).flatten(-3, -2).to(g.dtype)


def geometry(device: str) -> Geometry:
    """Of the layer that is measured."""
    return Geometry.of(q_heads=H, kv_heads=G, head_dim=D, dtype=torch.bfloat16, device=device)


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
