"""Record the queries, keys and values of a real model while it reads a text."""

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
    """The queries, keys and values that one full-attention layer computed for a text.

    Args:
        keys: Keys of all `N` tokens after the rotary embedding, `[G, N, D]`.
        queries: Queries of the last `T` tokens after the rotary embedding, `[H, T, D]`.
        scale: Factor by which the layer multiplies attention logits.
        softcap: Softcap of the attention logits, or None.
        values: Values of all `N` tokens, `[G, N, Dv]`.
    """

    keys: Tensor
    queries: Tensor
    scale: float
    softcap: float | None
    values: Tensor


class _Recorder(Wrapper):
    """Wrapper around an index that records all queries after those of the first `start` tokens."""

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
    """Let a model read a text with full attention, and return queries, keys and values by layer.

    Args:
        model: The transformers model.
        ids: Token ids of the text, int64 `[N]`.
        queries: Number of tokens at the end of the text whose queries are recorded.
        chunk: Number of tokens that the model reads in one forward pass.
        on_progress: Function that is called with the phase ("prefill"), the number of tokens read,
            and the number of all tokens.

    Returns:
        The recorded tensors of each full-attention layer.

    Raises:
        ValueError: A size is out of range, or `attach` does not support the model.
    """
    check.tensor("ids", ids, {"N": None}, torch.int64)
    if check.at_least("queries", queries, 1) > len(ids):
        raise ValueError(f"queries: got {queries}, but the text has only {len(ids)} tokens")
    start = len(ids) - queries

    def recorder(**geometry: Any) -> KVIndex:
        return _Recorder(kvindex.create("exact", **geometry), start)

    # Without a local window, every token is appended to the index immediately. `dense_below` is
    # larger than any text, so the model always uses full attention.
    regions: dict[str, Any] = dict(sink=0, local_window=0, update_every=1, dense_below=2**62)
    with attach(model, index=recorder, **regions) as cache, torch.no_grad():
        prefill(model, ids.to(model.device), cache, stop=len(ids), chunk=chunk, report=on_progress)
        return [index.captured() for index in cache.indexes() if isinstance(index, _Recorder)]
