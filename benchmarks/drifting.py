"""Systems that `drift` compares: indexes and product quantization, of the prompt or of all keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

import kvindex
from kvindex.core.capability import required
from kvindex.core.protocol import ExpandsBatch
from kvindex.ops.coarse import ceil_share
from kvindex.ops.select import top_k
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.pq import Quantized
from kvindex_adapters.evaluate.recall import bytes_per_key

BETA, FACTOR = 0.05, 4
"""Share of the keys that the coarse stage leaves, and how many for a row at least."""


class Indexed:
    """An index of the library; what it learns, it learns from the keys that are added first."""

    def __init__(self, spec: str, layer: Captured) -> None:
        H, _, D = layer.queries.shape
        self.spec, self.share = spec, H // len(layer.keys)
        geometry = dict(q_heads=H, kv_heads=H, head_dim=D, value_dim=1, device=layer.keys.device)
        self.index = kvindex.create(spec, scale=layer.scale, softcap=layer.softcap, **geometry)

    def add(self, keys: Tensor) -> None:
        """Append keys `[G, N, D]`."""
        wide = keys.float().repeat_interleave(self.share, 0)[None]
        self.index.append(wide, wide[..., :1])

    def find(self, queries: Tensor, k: int) -> Tensor:
        """Ids `[H, T, k]` for queries `[H, T, D]`."""
        asked = queries.float().transpose(0, 1).contiguous()
        many = required(self.index, ExpandsBatch).expand_batch(len(asked))
        return many.search(asked, k=k).ids.transpose(0, 1)

    def bytes(self) -> dict[str, float]:
        """Per key and KV head, kept and scanned."""
        return bytes_per_key(self.spec, self.index.geometry.head_dim)


Searcher: TypeAlias = Indexed | Quantized


@dataclass(frozen=True)
class System:
    """What is compared: something that adds and finds, and which keys it learns from.

    rebuilt: made anew from all keys so far, as an index without drift; else the prompt's alone.
    rescored: only the coarse stage counts: `max(⌈β n⌉, 4 k)` candidates, scored again by `q·k`.
    """

    name: str
    make: Callable[[Captured], Searcher]
    rebuilt: bool = False
    rescored: bool = False

    def recall(self, searcher: Searcher, keys: Tensor, queries: Tensor, k: int) -> Tensor:
        """Share of the true top `k` of keys `[G, N, D]` that queries `[H, T, D]` find, `[H]`."""
        keys = keys.float().repeat_interleave(len(queries) // len(keys), 0)
        scores = queries.float() @ keys.mT  # [H, T, N]
        n = keys.shape[1]
        count = min(max(ceil_share(n, BETA), FACTOR * k), n) if self.rescored else k
        ids = searcher.find(queries.float(), count)
        chosen = torch.zeros(*ids.shape[:2], n + 1, dtype=torch.bool, device=ids.device)
        chosen = chosen.scatter_(-1, ids.where(ids >= 0, n), True)[..., :n]
        if count > k:
            best = top_k(scores.masked_fill(~chosen, -torch.inf), k)[1]
            chosen = torch.zeros_like(chosen).scatter_(-1, best, True)
        return chosen.gather(-1, top_k(scores, k)[1]).float().mean((1, 2)).cpu()


def systems() -> list[System]:
    """ParisKV's presets, and product quantization at 1 and at 4 bits per coordinate."""

    def preset(name: str, more: str = "") -> Callable[[Captured], Searcher]:
        return partial(Indexed, f"pariskv:preset={name}:beta={BETA}{more}")

    def pq(subspace: int) -> Callable[[Captured], Searcher]:
        return lambda layer: Quantized(subspace=subspace)

    paper, one = ":rho=.25", ":refine_factor=1"  # as many candidates as rows are asked for
    return [
        System("paper", preset("paper", paper)),
        System(
            f"paper, refine_factor {FACTOR}", preset("paper", f"{paper}:refine_factor={FACTOR}")
        ),
        System("fast", preset("fast")),
        System("fast", preset("fast"), rebuilt=True),
        System("fast, one center", preset("fast", ":center=65536")),
        System("accurate", preset("accurate")),
        System("PQ, m = 8", pq(8)),
        System("PQ, m = 2", pq(2)),
        System("PQ, m = 2", pq(2), rebuilt=True),
        System("paper", preset("paper", paper), rescored=True),
        System("fast", preset("fast", one), rescored=True),
        System("fast", preset("fast", one), rebuilt=True, rescored=True),
        System("accurate", preset("accurate", one), rescored=True),
        System("PQ, m = 8", pq(8), rescored=True),
        System("PQ, m = 8", pq(8), rebuilt=True, rescored=True),
    ]
