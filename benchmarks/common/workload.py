"""Synthetic workload of a decode step: layers with an index, a sink and a window.

It uses only public calls of an index, so that it can measure any version of the library.
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
"""Sizes of sink and local window in tokens: the defaults of `AttentionLayer`."""

SEGMENT = 256
"""Number of consecutive tokens whose keys have a common mean."""

PIECE = 2**16
"""Number of tokens that are generated and appended at a time."""

SETS = 8
"""Number of sets of queries that are used repeatedly."""


LATENT = dict(kv_heads=1, head_dim=512 + 64, value_dim=512, scale=192**-0.5, value_in_key=True)
"""A layer of DeepSeek-V3: a latent of 512 and a rotated key of 64; its heads have 128 + 64."""


def geometry(device: str, latents: int | None = None) -> Geometry:
    """Return the geometry of the measured layer.

    latents: number of query heads of a layer over latents; None for a layer with 8 KV heads.
    """
    sizes: dict[str, Any] = dict(q_heads=H, kv_heads=G, head_dim=D)
    if latents is not None:
        sizes = dict(LATENT, q_heads=latents)
    return Geometry.of(**sizes, dtype=torch.bfloat16, device=device)


def synthetic(g: Geometry, sequence: int, start: int, count: int) -> Tensor:
    """Return synthetic keys `[1, G, count, D]` of a sequence from token `start`, a multiple of 256.

    The keys are normal noise around a mean that 256 consecutive tokens (a segment) have in common.
    The mean follows a wave of amplitude 1 for each head and coordinate, with a period of 20 to 2000
    segments.
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
    """Yield keys and values `[B, G, n, D]` of a layer, `piece` tokens at a time."""
    for start in range(0, tokens, piece):
        count = min(piece, tokens - start)
        keys, values = (
            torch.cat([synthetic(g, first + layer * batch + b, start, count) for b in range(batch)])
            for first in (0, 10_000)
        )
        yield keys, keys[..., : g.value_dim] if g.value_in_key else values


def queries_of(g: Geometry, *shape: int, seed: int = 1) -> Tensor:
    """Return queries `[..., H, D]`. The heads of a group have half of their variance in common."""
    draw = torch.Generator(g.device).manual_seed(seed)
    options = dict(generator=draw, device=g.device)
    own = torch.randn(*shape, g.kv_heads, g.group_size, g.head_dim, **options)
    shared = torch.randn(*shape, g.kv_heads, 1, g.head_dim, **options)
    return ((own + shared) / math.sqrt(2)).flatten(-3, -2).to(g.dtype)


def created(g: Geometry, spec: str, **options: Any) -> KVIndex:
    """Return an empty index; options: `store`, and `backend`, which is "cuda" by default."""
    return kvindex.create(spec, **{**g.options(), "backend": "cuda", **options})


def split_store(g: Geometry, spec: str, tokens: int, batch: int, share: float) -> BlockStore:
    """Return an empty store for which a fraction of rows, `share`, is on the device.

    The first rows are on the device and the others on the host. `store="auto"` makes such a store
    when the device has only this much room.
    """
    device, near = g.device, DeviceAllocator(g.device)
    row_codec = parse_spec(spec.partition("+")[0])[1].get("row_codec", "plain")
    options: dict[str, Any] = dict(row_codec=row_codec)
    size, blocks = BlockStore(g, near, **options).block_bytes, batch * -(-tokens // BLOCK)
    options |= dict(slab_bytes=size * max(1, blocks // 32), budget=shared_budget())
    preferred = Tier(near, Budget(int(share * blocks) * size))
    far = pinned(device) if device.type == "cuda" else near
    return BlockStore(g, far, preferred=preferred, **options)


def measurable(spec: str) -> str:
    """Return `spec`, for argparse's `type=`. Raises ValueError if the index has no fused step."""
    index = kvindex.create(spec, **geometry("cpu").options())
    if not isinstance(index, DecodesStep):
        raise ValueError(f"index: got {spec!r}, allowed is one whose steps are kernels")
    return spec


class Layers:
    """The indexes of L layers with `tokens` tokens each. A run computes one step of all layers.

    Queries `[L, B, H, D]` come from one of `SETS` sets. With a hit rate below 1, some KV heads get
    new queries instead, so that the rows that they select are not in the cache.

    place: Where rows are stored: "host", "device", or the fraction of rows on the device.
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
        """Run a step of every layer."""
        layers = zip(self.indexes, self.queries, self.residents, strict=True)
        return [
            required(index, Attends).attend(queries, resident, k=self.k)
            for index, queries, resident in layers
        ]

    def ask(self, number: int, hit_rate: float = 0.0) -> None:
        """Set the next step's queries.

        A fraction `hit_rate` of the KV heads gets the queries of a set, and the others get new
        queries.
        """
        g, again = self.geometry, self._sets[number % SETS]
        fresh = queries_of(g, *again.shape[:2], seed=1000 + number).unflatten(2, (g.kv_heads, -1))
        draw = torch.Generator(g.device).manual_seed(number)
        shape = (*again.shape[:2], g.kv_heads, 1, 1)
        known = torch.rand(shape, generator=draw, device=g.device) < hit_rate
        self.queries.copy_(again.unflatten(2, (g.kv_heads, -1)).where(known, fresh).flatten(2, 3))

    def fill(self) -> None:
        """Run the queries of every set once, so that the selected rows are in the caches."""
        for number in range(SETS):
            self.queries.copy_(self._sets[number])
            self.run()

    def placement(self) -> Placement:
        """Return where the rows of all layers are, and the hit counts of their caches so far."""
        return reduce(add, [required(each, PlacesRows).placement() for each in self.indexes])

    def answers(self) -> Tensor:
        """Return outputs `[L, B, H, D]` for the first set of queries.

        Raises SystemExit if the outputs cannot be right.
        """
        self.queries.copy_(self._sets[0])
        done = self.run()
        outputs = torch.stack([attended.output for attended in done])
        found = torch.stack([attended.found for attended in done])
        least = int(found.min()) if outputs.isfinite().all() else "outputs not finite,"
        if least != self.k:
            raise SystemExit(f"the step is wrong and is not timed: {least} rows, not {self.k}")
        return outputs.clone()


def layers_that_fit(g: Geometry, tokens: int, batch: int, most: int, share: float = 0.6) -> int:
    """Return the number of layers, at most `most`, whose rows fit on the device and the host."""
    need = tokens * batch * g.kv_heads * (g.head_dim + g.value_dim) * g.dtype.itemsize
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if g.device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info()[0])
    return min(most, int(share * room) // need)


def free() -> None:
    """Free all unused memory."""
    gc.collect()
    release_pinned()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
