"""Attention layers that contain a synthetic prompt, and then run decode steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvindex
from benchmarks.common import workload
from benchmarks.common.timing import settled
from kvindex.core.capability import required
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Reserves
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.placement import default_placement

UPDATE = 256
"""Every 256 decode steps, a layer moves 256 tokens from its local window into its index."""

LOCAL = 256
"""Size of the local window in tokens. There is no sink."""


class Decoding:
    """Attention layers that contain `tokens` tokens each and run decode steps together.

    Once in each period of `UPDATE` decode steps, every layer moves tokens from its local window
    into its index. Each layer does so at a different step of the period.

    Args:
        g: Shapes of the layers.
        spec: Name and options of the index.
        tokens: Number of tokens in each layer.
        layers: Number of layers.
        room: Number of further tokens for which memory is reserved.
        options: Further options of `AttentionLayer`.
    """

    def __init__(
        self, g: Geometry, spec: str, tokens: int, layers: int, *, room: int = 0, **options: Any
    ) -> None:
        self._token, self.layers = 0, []
        options = dict(sink=0, local_window=LOCAL, update_every=UPDATE, dense_below=0) | options
        self.turns = [int(n / layers * options["update_every"]) for n in range(layers)]
        for number in range(layers):
            index = kvindex.create(spec, **g.options(), **default_placement(g.device, spec))
            layer = AttentionLayer(index, update_phase=number / layers, **options)
            keys, values = next(workload.tokens_of(g, number, 1, tokens, tokens))
            # Append these tokens to the index directly, because `layer.step` would also compute
            # the attention of all tokens, which takes long.
            index.append(keys[:, :, :-LOCAL], values[:, :, :-LOCAL])
            keys, values = keys[:, :, -LOCAL:], values[:, :, -LOCAL:]
            layer.step(keys.repeat_interleave(g.group_size, dim=1), keys, values)
            if room:
                required(index, Reserves).reserve(tokens + room)
            self.layers.append(layer)
        self._queries = workload.queries_of(g, 64, layers, 1)[..., None, :]
        rows = workload.queries_of(g, 2, 64, layers, 1, seed=2)
        self._rows = rows[..., : g.kv_heads, None, :]
        settled()

    def step(self) -> list[Tensor]:
        """Run a decode step of every layer, and return the attention outputs of the layers."""
        queries, (keys, values) = self._queries[self._token % 64], self._rows[:, self._token % 64]
        self._token += 1
        layers = zip(self.layers, queries, keys, values, strict=True)
        return [layer.step(*token) for layer, *token in layers]

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
