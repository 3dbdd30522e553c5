"""Synthetic layers for timing decode steps, each with an index, a sink and a local window.

This module uses only public methods of an index, so that it can measure any version of the library.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

import kvindex
from benchmarks.common.timing import settled
from kvindex.core.capability import required
from kvindex.core.config import parse_spec
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import (
    Attended,
    Attends,
    DecodesStep,
    KVIndex,
    Placement,
    PlacesRows,
    WarmsUp,
)
from kvindex.core.resident import ResidentRows
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.slab_cache import pinned, release_pinned
from kvindex_cuda.memory.slab_pool import DeviceAllocator, Tier

H, G, D, K = 32, 8, 128, 100
WINDOW = 64 + 256
"""Number of tokens in sink (64) and local window (256), the defaults of `AttentionLayer`."""

SEGMENT = 256
"""Number of consecutive tokens whose synthetic keys have a common mean."""

PIECE = 2**16
"""Number of tokens that are generated together, and appended to an index in one call."""

SETS = 8
"""Number of different sets of queries. Decode steps use the sets one after another, repeatedly."""


LATENT = dict(kv_heads=1, head_dim=512 + 64, value_dim=512, scale=192**-0.5, value_in_key=True)
"""Shapes of an attention layer of DeepSeek-V3 (MLA).

Each token has a latent of 512 coordinates, and a key of 64 coordinates to which the rotary
embedding is applied. `scale` belongs to query heads of 128 + 64 coordinates.
"""


def geometry(device: str, latents: int | None = None) -> Geometry:
    """Return the shapes of the measured layer.

    Args:
        device: Name of the torch device.
        latents: Number of query heads of a layer with latent attention (MLA). None for a layer with
            32 query heads and 8 KV heads.
    """
    sizes: dict[str, Any] = dict(q_heads=H, kv_heads=G, head_dim=D)
    if latents is not None:
        sizes = dict(LATENT, q_heads=latents)
    return Geometry.of(**sizes, dtype=torch.bfloat16, device=device)


def synthetic(g: Geometry, sequence: int, start: int, count: int) -> Tensor:
    """Return synthetic keys `[1, G, count, D]` of `count` tokens, from position `start` on.

    `start` must be a multiple of 256. A key is the sum of normal noise and a mean. All tokens of a
    segment (256 consecutive tokens) have the same mean. From segment to segment, each coordinate of
    the mean follows a cosine of amplitude 1, with a random period of 20 to 2000 segments.
    """
    draw = torch.Generator(g.device)
    shape, options = (g.kv_heads, 1, g.head_dim), dict(generator=draw, device=g.device)
    draw.manual_seed(2 * sequence)
    phase = torch.rand(shape, **options) * 2 * math.pi
    period = 20 * 100 ** torch.rand(shape, **options)
    draw.manual_seed((2 * sequence + 1) * 2**32 + start)
    noise = torch.randn(g.kv_heads, count, g.head_dim, **options)
    segment = torch.arange(start // SEGMENT, -(-(start + count) // SEGMENT), device=g.device)
    mean = torch.cos(phase + segment[:, None] * 2 * math.pi / period)
    return (noise + mean.repeat_interleave(SEGMENT, 1)[:, :count]).to(g.dtype)[None]


def tokens_of(
    g: Geometry, layer: int, batch: int, tokens: int, piece: int = PIECE
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield synthetic keys and values of a layer, `[B, G, n, D]`, for `piece` tokens at a time."""
    for start in range(0, tokens, piece):
        count = min(piece, tokens - start)
        keys, values = (
            torch.cat([synthetic(g, first + layer * batch + b, start, count) for b in range(batch)])
            for first in (0, 10_000)
        )
        yield keys, keys[..., : g.value_dim] if g.value_in_key else values


def queries_of(g: Geometry, *shape: int, seed: int = 1) -> Tensor:
    """Return random queries `[..., H, D]`.

    Half of the variance of a query is common to all query heads of a KV head.
    """
    draw = torch.Generator(g.device).manual_seed(seed)
    options = dict(generator=draw, device=g.device)
    own = torch.randn(*shape, g.kv_heads, g.group_size, g.head_dim, **options)
    shared = torch.randn(*shape, g.kv_heads, 1, g.head_dim, **options)
    return ((own + shared) / math.sqrt(2)).flatten(-3, -2).to(g.dtype)


def created(g: Geometry, spec: str, **options: Any) -> KVIndex:
    """Return an empty index, with the backend "cuda" unless `options` name another one.

    `options` are passed to `kvindex.create`.
    """
    return kvindex.create(spec, **{**g.options(), "backend": "cuda", **options})


def split_store(g: Geometry, spec: str, tokens: int, batch: int, fraction: float) -> BlockStore:
    """Return an empty store for keys and values, of which only a part is on the device.

    The first tokens, a fraction `fraction` of all tokens, are stored on the device, and all later
    tokens on the host. `store="auto"` makes such a store when device memory is short.
    """
    device, on_device = g.device, DeviceAllocator(g.device)
    row_codec = parse_spec(spec.partition("+")[0])[1].get("row_codec", "plain")
    options: dict[str, Any] = dict(row_codec=row_codec)
    size, blocks = BlockStore(g, on_device, **options).block_bytes, batch * -(-tokens // BLOCK)
    options |= dict(slab_bytes=size * max(1, blocks // 32), budget=shared_budget())
    preferred = Tier(on_device, Budget(int(fraction * blocks) * size))
    on_host = pinned(device) if device.type == "cuda" else on_device
    return BlockStore(g, on_host, preferred=preferred, **options)


def measurable(spec: str) -> str:
    """Return `spec`, the name and options of an index that has a fused step.

    Raise ValueError if the index has no fused step, that is, no kernels for a whole decode step.
    """
    index = kvindex.create(spec, **geometry("cpu").options())
    if not isinstance(index, DecodesStep):
        raise ValueError(
            f"index: got {spec!r}, which has no fused step; pass an index with one, for example "
            "pariskv"
        )
    return spec


class Layers:
    """The indexes of several layers, filled with synthetic tokens, for timing decode steps.

    There are `SETS` fixed sets of queries `[L, B, H, D]` for `L` layers. A decode step uses one of
    the sets. To lower the hit rate of the device cache, some KV heads get new queries instead.
    These queries retrieve tokens whose rows are not in the device cache.

    Args:
        g: Shapes of a layer.
        spec: Name and options of the index.
        place: Memory that stores keys and values: "host", "device", or a number: the fraction of
            them that is on the device, with all others on the host.
        tokens: Number of tokens in each layer and sequence.
        batch: Number of sequences.
        layers: Number of layers.
        k: Number of tokens to retrieve per KV head.
        window: Number of tokens in sink and local window.
    """

    def __init__(
        self,
        g: Geometry,
        spec: str,
        place: str | float,
        *,
        tokens: int,
        batch: int = 1,
        layers: int = 1,
        k: int = K,
        window: int = WINDOW,
    ) -> None:
        self.geometry, self.k, self.place = g, k, place
        self.indexes: list[KVIndex] = []
        self.residents: list[ResidentRows] = []
        for layer in range(layers):
            store: Any = place
            if isinstance(place, float):
                store = split_store(g, spec, tokens, batch, place)
            index, resident = created(g, spec, store=store), ResidentRows(g, batch, window)
            for keys, values in tokens_of(g, layer, batch, tokens):
                index.append(keys, values)
            resident.add(keys[:, :, -window:], values[:, :, -window:], None)
            required(index, WarmsUp).warm_up(k=k, tokens=tokens)
            self.indexes.append(index)
            self.residents.append(resident)
        self._sets = queries_of(g, SETS, layers, batch)
        self.queries = self._sets[0].clone()
        settled()

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.indexes)

    def run(self) -> list[Attended]:
        """Run a decode step of every layer, and return the results of the layers."""
        layers = zip(self.indexes, self.queries, self.residents, strict=True)
        return [
            required(index, Attends).attend(queries, resident, k=self.k)
            for index, queries, resident in layers
        ]

    def ask(self, number: int, hit_rate: float = 0.0) -> None:
        """Set the queries of the next decode step.

        A fraction `hit_rate` of the KV heads gets queries that earlier steps have used. All other
        KV heads get new queries, so that they retrieve tokens that are not in the device cache.

        Args:
            number: Number of the decode step, which selects the set of queries.
            hit_rate: Fraction of the KV heads, in [0, 1].
        """
        g, again = self.geometry, self._sets[number % SETS]
        fresh = queries_of(g, *again.shape[:2], seed=1000 + number).unflatten(2, (g.kv_heads, -1))
        draw = torch.Generator(g.device).manual_seed(number)
        shape = (*again.shape[:2], g.kv_heads, 1, 1)
        known = torch.rand(shape, generator=draw, device=g.device) < hit_rate
        self.queries.copy_(again.unflatten(2, (g.kv_heads, -1)).where(known, fresh).flatten(2, 3))

    def fill(self) -> None:
        """Run a step with each set of queries, which puts the retrieved tokens into the row
        caches."""
        for number in range(SETS):
            self.queries.copy_(self._sets[number])
            self.run()

    def placement(self) -> Placement:
        """Return where rows of all layers are stored, and how often row caches contained a row."""
        return reduce(add, [required(each, PlacesRows).placement() for each in self.indexes])

    def answers(self) -> Tensor:
        """Return the attention outputs `[L, B, H, D]` for the first set of queries.

        Raise SystemExit if an output is not finite, or fewer than `k` tokens were found.
        """
        self.queries.copy_(self._sets[0])
        done = self.run()
        outputs = torch.stack([attended.output for attended in done])
        found = torch.stack([attended.found for attended in done])
        fewest = int(found.min())
        if not outputs.isfinite().all() or fewest != self.k:
            raise SystemExit(
                f"the decode step is wrong and is not timed: a KV head found {fewest} tokens, not "
                f"{self.k}, or an output is NaN or infinite"
            )
        return outputs.clone()


def layers_that_fit(g: Geometry, tokens: int, batch: int, most: int, fraction: float = 0.6) -> int:
    """Return how many layers, at most `most`, fit into the memory of the device and of the host.

    The layers may use only a part of the free memory: `fraction`, between 0 and 1.
    """
    need = tokens * batch * g.kv_heads * (g.head_dim + g.value_dim) * g.dtype.itemsize
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if g.device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info()[0])
    return min(most, int(fraction * room) // need)


def free() -> None:
    """Free unused host memory, device memory and pinned memory."""
    gc.collect()
    release_pinned()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
