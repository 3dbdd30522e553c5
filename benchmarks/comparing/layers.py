"""Capture layers: record the keys, values and queries of a real model while it reads a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex import Hits
from kvindex.core.protocol import KVIndex, ObservesQueries
from kvindex.wrappers import Wrapper
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import prefill


@dataclass(frozen=True)
class Layer(Captured):
    """Keys, values and queries that one layer computed for all `N` tokens of a text.

    Args:
        keys: Keys `[G, N, D]`, after the rotary embedding.
        queries: Queries `[H, N, D]`, after the rotary embedding.
        scale: Factor by which the layer multiplies attention logits.
        softcap: Softcap of the attention logits, or None.
        values: Values `[G, N, Dv]`.
        rope: Inverse frequencies of the rotary embedding, `[F]`, or None if they are unknown.
        tokens: Token ids of the text, int64 `[N]` on the CPU, or None if they are unknown.
        name: Name of the text and number of the layer.
    """

    values: Tensor
    rope: Tensor | None = None
    tokens: Tensor | None = None
    name: str = ""

    def options(self) -> dict[str, Any]:
        """Return the shapes of the layer as keyword arguments of `kvindex.create`."""
        return dict(
            q_heads=len(self.queries),
            kv_heads=len(self.keys),
            head_dim=self.keys.shape[-1],
            value_dim=self.values.shape[-1],
            scale=self.scale,
            softcap=self.softcap,
            rope=self.rope,
            dtype=self.keys.dtype,
            device=self.keys.device,
        )

    def to(self, *, dtype: torch.dtype | None = None, device: str | None = None) -> Layer:
        """Return the same keys, values and queries in another dtype or on another device."""
        parts = dict(keys=self.keys, queries=self.queries, values=self.values)
        moved = {name: part.to(device=device, dtype=dtype) for name, part in parts.items()}
        rope = None if self.rope is None else self.rope.to(device=device)
        return replace(self, **moved, rope=rope)


class _Keeper(Wrapper):
    """A wrapper around the index of a layer, which records the queries of the layer.

    `wrappers` is a list of the wrappers of all layers, in the order of the layers. Only the wrapper
    of every `every`-th layer records queries.
    """

    own = frozenset({ObservesQueries})

    def __init__(self, inner: KVIndex, wrappers: list[_Keeper], every: int) -> None:
        super().__init__(inner)
        self._wrappers, self._every = wrappers, every
        self._queries: list[Tensor] = []

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        if self not in self._wrappers:
            self._wrappers.append(self)
        if self._wrappers.index(self) % self._every == 0:
            self._queries.append(queries[0])
        super().observe_queries(queries, positions)

    def layer(self, tokens: Tensor) -> Layer:
        g = self.geometry
        ids = torch.arange(len(self), device=g.device).expand(1, g.kv_heads, -1)
        rows = self.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
        queries = torch.cat(self._queries, 1)
        return Layer(rows.keys[0], queries, g.scale, g.softcap, rows.values[0], g.rope, tokens)


def capture(model: Any, ids: Tensor, *, every: int = 1, progress: Any = None) -> list[Layer]:
    """Let a model read a text with full attention, and record keys, values and queries of layers.

    Args:
        model: The model.
        ids: Token ids of the text, int64 `[N]`.
        every: Only the layers 0, `every`, 2 · `every` and so on are recorded.
        progress: Function that `prefill` calls to report how many tokens were read, or None.
    """
    wrappers: list[
        _Keeper
    ] = []  # `attach` also makes an index only to check options; it is not added

    def keeper(**geometry: Any) -> KVIndex:
        return _Keeper(kvindex.create("exact", **geometry), wrappers, every)

    # Without a local window, every token is appended to the index immediately. `dense_below` is
    # larger than any text, so the model always uses full attention.
    regions: Any = dict(sink=0, local_window=0, update_every=1, dense_below=2**62)
    with attach(model, index=keeper, **regions) as cache, torch.no_grad():
        prefill(model, ids.to(model.device), cache, stop=len(ids), chunk=1024, report=progress)
        return [index.layer(ids.cpu()) for index in wrappers[::every]]
