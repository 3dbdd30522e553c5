"""Capture the keys and queries of a real model while it reads a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvindex
from kvindex import Hits
from kvindex.core import check
from kvindex.core.protocol import KVIndex, ObservesQueries
from kvindex.wrappers import Wrapper
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import prefill


@dataclass(frozen=True)
class Captured:
    """The queries, keys and values of one full-attention layer, after the rotary embedding.

    Args:
        keys: `[G, N, D]`.
        queries: `[H, T, D]`, of the newest `T` tokens.
        scale: Factor of the layer's logits.
        softcap: Softcap of the layer's logits, or None.
        values: `[G, N, Dv]`.
    """

    keys: Tensor
    queries: Tensor
    scale: float
    softcap: float | None
    values: Tensor


class _Recorder(Wrapper):
    """Records the queries of the tokens from position `start` on."""

    own = frozenset({ObservesQueries})

    def __init__(self, inner: KVIndex, start: int) -> None:
        super().__init__(inner)
        self._start = start
        self.queries: list[Tensor] = []

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        self.queries.append(queries[0, :, positions >= self._start])
        super().observe_queries(queries, positions)

    def captured(self) -> Captured:
        g = self.geometry
        ids = torch.arange(len(self), device=g.device).expand(1, g.kv_heads, -1)
        rows = self.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
        queries = torch.cat(self.queries, 1)
        return Captured(rows.keys[0], queries, g.scale, g.softcap, rows.values[0])


def capture(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    queries: int,
    chunk: int = 1024,
    on_progress: Progress | None = None,
) -> list[Captured]:
    """Return the keys and queries of each full-attention layer after reading a text.

    The model reads the text with full attention.

    Args:
        model: The transformers model.
        ids: Int64 `[N]`.
        queries: Number of newest tokens whose queries are recorded.
        chunk: Tokens to read at a time.
        on_progress: Called with the phase, the tokens done and the tokens in total.

    Raises:
        ValueError: A size is out of range; also what `attach` raises.
    """
    check.tensor("ids", ids, {"N": None}, torch.int64)
    if check.at_least("queries", queries, 1) > len(ids):
        raise ValueError(f"queries: got {queries}, allowed is up to the {len(ids)} tokens")
    start = len(ids) - queries

    def recorder(**geometry: Any) -> KVIndex:
        return _Recorder(kvindex.create("exact", **geometry), start)

    # Without a window, each token is in the index after its step. `dense_below` is so large that no
    # step searches.
    regions: dict[str, Any] = dict(sink=0, local_window=0, update_every=1, dense_below=2**62)
    with attach(model, index=recorder, **regions) as cache, torch.no_grad():
        prefill(model, ids.to(model.device), cache, stop=len(ids), chunk=chunk, report=on_progress)
        return [index.captured() for index in cache.indexes() if isinstance(index, _Recorder)]
