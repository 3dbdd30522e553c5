"""Layers together: the next tokens of several sequences as one step of their indexes' executor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import required
from kvindex.core.protocol import Attended, JoinsBatch, Rows
from kvindex.core.resident import ResidentRows
from kvindex.layer.attention_layer import AttentionLayer


class LayersTogether:
    """Steps of one list of layers after another, whose indexes join each other.

    Sinks and windows of the list lie in one buffer, each layer's in a row of it. A layer that comes
    into the list moves its rows there, and one that is no longer in it takes them along. like: a
    layer, of whose sort all are; graphs: as of `AttentionLayer`.
    """

    def __init__(self, like: AttentionLayer, *, graphs: bool) -> None:
        self._geometry, self._graphs = like.index.geometry, graphs
        self._batch = required(like.index, JoinsBatch).new_batch()
        self._resident = ResidentRows(self._geometry, 0, 0, ragged=True)
        self._places: list[tuple[weakref.ref[AttentionLayer], ResidentRows]] = []

    def step(
        self, layers: Sequence[AttentionLayer], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """As `AttentionLayer.step` of each, which all join: `[n, H, T, Dv]`.

        One index at least holds a token. Whoever calls this undoes it (`AttentionLayer.way_back`).
        """
        T, outputs = queries.shape[2], []
        if self._geometry.device.type != "cuda":  # as a layer: a device would be waited for
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
        """A token of each layer: queries `[n, H, D]`, keys `[n, G, 1, D]`, values."""
        k = max(layer.asks() for layer in layers)
        each = zip(layers, queries[:, None], strict=True)
        rows = [layer.row_of_step(query, 1, k=k) for layer, query in each]
        given = queries, Rows(keys, values), self._resident
        attended = self._batch.decode_step(rows, *given, k=k, graphs=self._graphs)
        for i, layer in enumerate(layers):
            own = slice(i, i + 1)
            parts = attended.output[own], attended.lse[own], attended.found[own]
            layer.count_joined(Attended(*parts))
        return attended

    def _place(self, layers: Sequence[AttentionLayer], tokens: int) -> None:
        """Have row `i` of the buffer be that of `layers[i]`, with room for so many tokens."""
        room = max(layer.resident_room(tokens) for layer in layers)
        if len(self._places) != len(layers) or self._resident.room < room:
            left, self._places = self._places, []  # where what follows fails, the next list is new
            for whose, place in left:
                _leave(whose, place)
            self._resident = ResidentRows(self._geometry, len(layers), room, ragged=True)
            self._places = [
                (weakref.ref(one), self._resident.row(i)) for i, one in enumerate(layers)
            ]
        for i, layer in enumerate(layers):
            whose, place = self._places[i]
            if whose() is not layer or not place.room:  # retired by a step that failed right then
                _leave(whose, place)
                place = self._resident.row(i)
                self._places[i] = weakref.ref(layer), place
            layer.lie_in(place)


def _leave(whose: weakref.ref[AttentionLayer], place: ResidentRows) -> None:
    """A layer's resident rows are no longer there, which is nobody's place from now on."""
    layer = whose()
    if layer is not None and layer.lies_in(place):
        layer.lie_in(None)
    place.retire()
