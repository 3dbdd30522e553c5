"""Joined decode steps: the same kernels compute a decode step of several sequences."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import required
from kvindex.core.protocol import Attended, ErrorLimit, JoinsBatch, Rows
from kvindex.core.resident import ResidentRows
from kvindex.layer.attention_layer import AttentionLayer


class LayersTogether:
    """Runs a decode step of several sequences together, if the index supports it.

    Each sequence is an `AttentionLayer` whose index offers `protocol.JoinsBatch`. The kernels read
    the sinks and windows of all sequences from one buffer, which has an entry per sequence. A
    sequence that joins the batch copies its rows into the buffer. A sequence that leaves the batch
    goes back to a buffer of its own.

    Args:
        like: A layer with the same options as the layers of all sequences.
        graphs: Whether the index may capture the step in a CUDA graph (see `AttentionLayer`).
    """

    def __init__(self, like: AttentionLayer, *, graphs: bool) -> None:
        self._geometry, self._graphs = like.index.geometry, graphs
        self._batch = required(like.index, JoinsBatch).new_batch()
        self._resident = ResidentRows(self._geometry, 0, 0, ragged=True)
        self._places: list[tuple[weakref.ref[AttentionLayer], ResidentRows]] = []
        self._limits: list[Tensor] = []  # the limit of each layer in the last step
        self._limit: ErrorLimit | None = None  # the same in one tensor

    def step(
        self, layers: Sequence[AttentionLayer], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Append `T` tokens to each of `n` layers, and return their attention `[n, H, T, Dv]`.

        The result is the same as if `AttentionLayer.step` of each layer were called. At least one
        index must contain a token. If this method raises an error, the caller must undo its changes
        to the layers (`AttentionLayer.way_back`).
        """
        T, outputs = queries.shape[2], []
        if self._geometry.device.type != "cuda":  # on a GPU, the host would wait for the result
            check.finite("keys", keys)
            check.finite("queries", queries)
        self._place(layers, T)
        for t in range(T):
            one = slice(t, t + 1)
            attended = self._token(layers, queries[:, :, t], keys[:, :, one], values[:, :, one])
            outputs.append(attended.output)
        for layer in layers:
            layer.end_joined(T)
        return torch.stack(outputs, dim=2)

    def _token(
        self, layers: Sequence[AttentionLayer], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Attended:
        """Run one decode step of `n` layers: append one token to each layer, search and attend.

        `queries` is `[n, H, D]`, `keys` is `[n, G, 1, D]`, and `values` is `[n, G, 1, Dv]`.
        """
        k = max(layer.asks() for layer in layers)
        each = zip(layers, queries[:, None], strict=True)
        rows = [layer.row_of_step(query, 1, k=k) for layer, query in each]
        given = queries, Rows(keys, values), self._resident
        how: dict[str, Any] = dict(k=k, graphs=self._graphs)
        if (limit := self._limit_of(layers)) is not None:
            how["limit"] = limit
        attended = self._batch.decode_step(rows, *given, **how)
        for i, layer in enumerate(layers):
            own = slice(i, i + 1)
            parts = attended.output[own], attended.lse[own], attended.found[own]
            layer.count_joined(Attended(*parts))
        return attended

    def _limit_of(self, layers: Sequence[AttentionLayer]) -> ErrorLimit | None:
        """Return the limit of the error of a step, or None if it retrieves a fixed number of rows.

        The result is the same object until the limit of a layer changes.
        """
        limits = [limit for layer in layers if (limit := layer.limit_of_step()) is not None]
        same = len(limits) == len(self._limits)
        if not same or any(new is not old for new, old in zip(limits, self._limits, strict=True)):
            self._limit = ErrorLimit(torch.cat(limits)) if limits else None
            self._limits = limits
        return self._limit

    def _place(self, layers: Sequence[AttentionLayer], tokens: int) -> None:
        """Let each layer store its sink and window in the joint buffer.

        `layers[i]` uses entry `i` of the batch dimension, with room for `tokens` more tokens.
        """
        room = max(layer.resident_room(tokens) for layer in layers)
        if len(self._places) != len(layers) or self._resident.room < room:
            left, self._places = self._places, []  # stays empty if an error is raised below
            for whose, place in left:
                _leave(whose, place)
            self._resident = ResidentRows(self._geometry, len(layers), room, ragged=True)
            self._places = [
                (weakref.ref(one), self._resident.row(i)) for i, one in enumerate(layers)
            ]
        for i, layer in enumerate(layers):
            whose, place = self._places[i]
            if whose() is not layer or not place.room:  # room is 0 after a failed step
                _leave(whose, place)
                place = self._resident.row(i)
                self._places[i] = weakref.ref(layer), place
            layer.lie_in(place)


def _leave(whose: weakref.ref[AttentionLayer], place: ResidentRows) -> None:
    """Remove a layer from the shared buffer of a batch, and free its entry.

    The layer stores the rows of its sink and window in a buffer of its own again.

    Args:
        whose: Reference to the layer.
        place: The layer's entry of the shared buffer.
    """
    layer = whose()
    if layer is not None and layer.lies_in(place):
        layer.lie_in(None)
    place.retire()
