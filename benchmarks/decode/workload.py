"""What lies in memory, and the step that reads it.

Codes of a pool of sequences, at least L (the layers) and at least 8 times the L2 cache: layer l of
batch row b reads sequence (l B + b) mod pool, so that as many bytes lie between two reads of one
byte at every batch size. The layers share one set of rows (those of 16 layers would take 64 GB),
and each starts to read it elsewhere, so that no two read the same rows. Sink and window lie on the
device, as in `KVIndexCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode.setting import Setting, synthetic
from benchmarks.decode.timing import Clock, Launches
from kvindex.storage.codecs import NAMES
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.memory.slab_pool import Budget
from kvindex_cuda.pariskv.base_step import BaseStep, State, words_of

PIECE = 65_536
"""Tokens drawn or encoded at once: the temporaries of encoding take 3 GB."""

ROWS = 2**20
"""Tokens of the shared set of rows: 4 GiB, past what the GPU's page tables cache."""

COLD = 8
"""Sizes of the L2 cache between two reads of one byte."""

SETS = 8
"""Of queries."""


@dataclass(frozen=True)
class Pool:
    """Codes of sequences: blocks uint8 `[Q, S, G, head_bytes]`, references float32 `[Q, G]`.

    histograms: of tiers alone, keys per centroid, int64 `[Q, G, M, 256]`.
    """

    blocks: Tensor
    references: Tensor
    histograms: Tensor | None = None

    @staticmethod
    def of(setting: Setting, tokens: int, sequences: int, clock: Clock) -> Pool:
        """Encode synthetic keys. Raises OutOfTimeError."""
        g, layout, index = setting.geometry, setting.layout, setting.index
        learn, S = index.ops.learn, -(-tokens // BLOCK)
        shape = (sequences, S, g.kv_heads, layout.head_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=g.device)
        references = torch.zeros((sequences, g.kv_heads), device=g.device)
        shape, histograms = (sequences, g.kv_heads, g.head_dim // 8, 256), None
        if setting.kind == "tiers":
            histograms = torch.zeros(shape, dtype=torch.int64, device=g.device)
        centered, logs = index.config.center > 0, index.config.weights == "log"
        for q in range(sequences):
            learned: dict[str, Tensor] = {}  # of the sequence's first piece
            for start in range(0, tokens, PIECE):
                clock.check()
                keys = synthetic(g, q, start, min(PIECE, tokens - start))
                centers: dict[str, Tensor] = {}
                if centered:
                    centers = learn.centers(keys, None, {}, start=0, every=BLOCK)
                if logs and not learned:
                    norms = index.ops.transform.normalize(keys)[1]
                    learned = learn.weight_scale(norms, None, {})
                codes = index._encode(keys, {**centers, **learned})
                packed = layout.pack(codes, centers.get("centers"))[0]
                blocks[q, start // BLOCK : start // BLOCK + len(packed)] = packed
                if histograms is not None:
                    histograms[q] += index.ops.coarse.histogram(codes["signs"])[0]
            if logs:
                references[q] = learned["weight_scale"][0]
        return Pool(blocks, references, histograms)

    def table(self, layer: int, batch: int) -> Tensor:
        """Addresses of a layer's blocks, int64 `[B, S]`."""
        Q, S = self.blocks.shape[:2]
        size = self.blocks[0, 0].nbytes
        sequence = (layer * batch + torch.arange(batch, device=self.blocks.device)) % Q
        slots = sequence[:, None] * S + torch.arange(S, device=self.blocks.device)
        return self.blocks.data_ptr() + slots * size

    def learned(self, layer: int, batch: int) -> dict[str, Tensor | None]:
        """Of a layer's rows: `reference` float32 `[B, G]`, `histogram` of tiers or None."""
        sequence = (layer * batch + torch.arange(batch)) % len(self.references)
        some, counts = sequence.to(self.references.device), self.histograms
        histogram = None if counts is None else counts[some].contiguous()
        return dict(weight_scale=self.references[some].contiguous(), histogram=histogram)


def sequences_of(scanned_bytes: int, layers: int, l2_bytes: int) -> int:
    """Sequences in the pool if a step scans so many bytes of each."""
    return max(layers, -(-COLD * l2_bytes // scanned_bytes))


@dataclass(frozen=True)
class RowPool:
    """Blocks of rows that the layers share: addresses int64 `[P]`, and what keeps them alive.

    codec: of the rows, a name of `kvindex.storage.codecs`.
    """

    addresses: Tensor
    row_bytes: int
    alive: Any
    codec: str = "plain"

    def table(self, blocks: int, place: int, places: int) -> Tensor:
        """Addresses int64 `[blocks]` for the `place`-th of so many readers."""
        P = len(self.addresses)
        slots = torch.arange(blocks, device=self.addresses.device) + place * P // places
        return self.addresses[slots % P]


def row_pools(setting: Setting, tokens: int, **options: Any) -> dict[str, RowPool]:
    """The same random rows of so many tokens on the `host`, as codes there, on the `device`.

    Of whole blocks, for layers begin with another one each and read them in a circle. Those as
    codes by the codec's name. options: for `HostStore`.
    """
    g, tokens = setting.geometry, -(-tokens // BLOCK) * BLOCK
    stores = {
        name: HostStore(g, rows=name, max_tokens=tokens, budget=Budget(), **options)
        for name in NAMES
    }
    S = tokens // BLOCK
    shape = (S, g.kv_heads, BLOCK, stores["plain"].row_bytes)
    device = torch.empty(shape, dtype=torch.uint8, device=g.device)
    draw = torch.Generator(g.device).manual_seed(2)
    for start in range(0, tokens, PIECE):
        count = min(PIECE, tokens - start)
        drawn = torch.randn(
            (2, 1, g.kv_heads, count, g.head_dim), generator=draw, device=g.device
        ).to(g.dtype)
        for store in stores.values():
            store.append(store.join(*drawn))
        rows = stores["plain"]._codec.encode(*drawn)[0]
        first, blocks = start // BLOCK, rows.unflatten(1, (-1, BLOCK)).transpose(0, 1)
        device[first : first + len(blocks)] = blocks
    pools = {}
    for name, store in stores.items():
        store.wait()
        store._pool.settle()
        place = "host" if name == "plain" else name
        pools[place] = RowPool(store.table[0, :S].contiguous(), store.row_bytes, store, name)
    if g.device.type == "cuda":
        torch.cuda.synchronize()
    found = device.data_ptr() + device[0].nbytes * torch.arange(S, device=g.device)
    return {**pools, "device": RowPool(found, pools["host"].row_bytes, device)}


@dataclass(frozen=True)
class Workload:
    """A step of L layers: all queries `[SETS, L, B, H, D]`, states for rows here and there.

    `cached`: rows on the host, and a cache for each layer. After `fill` the queries of a set come
    again, so that all their rows are found but those that `ask` has the caches forget.
    """

    step: BaseStep
    asked: Tensor
    queries: Tensor  # [L, B, H, D], what the step reads
    states: dict[str, list[State]]
    hit_rate: float = 1.0  # in the caches

    @staticmethod
    def of(
        setting: Setting,
        tokens: int,
        batch: int,
        layers: int,
        pool: Pool,
        rows: dict[str, RowPool],
        multiprocessors: int,
    ) -> Workload:
        """Of codes and rows that are shared; allocates what is the batch's own."""
        g = setting.geometry
        C, S = setting.candidates(tokens), -(-tokens // BLOCK)
        draw = torch.Generator(g.device).manual_seed(3)
        shape = (layers, batch, g.kv_heads, setting.resident, g.head_dim + g.value_dim)
        resident = torch.randn(shape, generator=draw, device=g.device, dtype=torch.float32).to(
            g.dtype
        )

        def filled(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=g.device)

        flags = torch.ones((1, tokens), dtype=torch.bool, device=g.device)
        shared = dict(
            valid=words_of(flags, S).repeat(batch, 1, 1),
            length=filled((1,), tokens, torch.int64),
            wanted=filled((batch,), C, torch.int32),
            counted=filled((batch,), tokens, torch.int32),
            resident_mask=filled((batch, setting.resident), 1, torch.uint8),
            resident_count=filled((1,), setting.resident, torch.int64),
            tiers=torch.tensor([setting.tiers(tokens)] * batch, device=g.device),
        )
        states: dict[str, list[State]] = {place: [] for place in rows}
        for layer in range(layers):
            codes, learned = pool.table(layer, batch), pool.learned(layer, batch)
            for place, part in rows.items():
                at = [part.table(S, layer * batch + b, layers * batch) for b in range(batch)]
                states[place].append(
                    State(
                        codes=codes,
                        rows=torch.stack(at),
                        **learned,
                        resident=resident[layer],
                        row_bytes=part.row_bytes,
                        codec=part.codec,
                        **shared,
                    )
                )
        step = setting.step(batch, tokens, multiprocessors)
        asked = setting.queries(SETS, layers, batch)
        if "host" in states:
            groups = batch * g.kv_heads
            states["cached"] = [
                replace(state, cache=RowCache(groups, state.row_bytes, g.device))
                for state in states["host"]
            ]
        return Workload(step, asked, asked[0].clone(), states, setting.hit_rate)

    def ask(self, number: int) -> None:
        """Let the step read another set of queries, and the caches forget some rows.

        From number 0 on they count anew what they find.
        """
        self.queries.copy_(self.asked[number % len(self.asked)])
        for state in self.states.get("cached", ()):
            assert state.cache is not None
            tags = state.cache.tags
            kept = self.hit_rate ** (1 / len(self.asked))  # a set's rows are asked for again
            lost = torch.rand(tags.shape, device=tags.device) >= kept  # when all sets were
            tags.masked_fill_(lost, -1)
            if not number:
                state.cache.counts.zero_()

    def fill(self) -> None:
        """Every set's rows come into the caches once."""
        for number in range(len(self.asked)):
            self.ask(number)
            self.run("cached")

    def run(self, place: str, launches: Launches | None = None) -> None:
        """The step of every layer, with rows on `place`."""
        for queries, state in zip(self.queries, self.states[place], strict=True):
            if launches is not None:
                launches.begin()
            self.step(queries, state)
