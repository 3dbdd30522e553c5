"""Prefill layer by layer: one layer's keys and values are on the device at a time.

Hidden states of the whole prompt stay; a layer goes through them piece by piece, in place, and what
it computes on the way is of one piece. Its keys and values lie in one buffer, which the next layer
overwrites: its index has got them by then, beside the computation where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core.protocol import Rows
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt_chunks import chunk_of
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.llama.weights import Weights

Told = Callable[[layers.Attention, int, int], None]
"""Called when a layer has read a piece: its attention, first and end of the piece."""


class AtHand:
    """An attention layer without tokens, and a buffer of the rows of the prompt that it reads."""

    def __init__(self, layer: AttentionLayer, buffer: Rows) -> None:
        self._layer, self._buffer = layer, buffer

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """As `AttentionLayer.step` of a piece, which attends to the buffer's rows."""
        start, end = len(self._layer), len(self._layer) + keys.shape[2]
        self._buffer.keys[:, :, start:end] = keys
        self._buffer.values[:, :, start:end] = values
        rows = Rows(self._buffer.keys[:, :, :end], self._buffer.values[:, :, :end])
        return self._layer.read_piece(queries, rows, valid=valid)


def default_chunk(weights: Weights, batch: int, device: torch.device) -> int:
    """Tokens of each of so many rows that a layer computes at a time, where nobody says."""
    return chunk_of(batch * token_bytes(weights), device)


def token_bytes(weights: Weights) -> int:
    """Bytes of a token's activations in a layer.

    Queries, keys, values and output of its attention, the gate, what it multiplies and their
    product, and what a layer adds to.
    """
    layer, (_, width) = weights.layers[0], weights.embedding.shape
    heads = 2 * (len(layer.query.weight) + len(layer.key.weight))
    count = heads + 3 * len(layer.gate.weight) + 2 * width
    return count * weights.embedding.element_size()


def read_by_layer(
    weights: Weights,
    config: DecoderConfig,
    ids: Tensor,
    padding: Tensor,
    longest: int,
    pieces: Sequence[tuple[int, int]],
    attentions: Sequence[layers.Attention],
    told: Told,
) -> Tensor:
    """Logits `[B, V]` after ids int64 `[B, N]`, which every layer appends, none of which has any.

    padding: padded tokens on the left of each row, int64 `[B, 1]`; longest: the most of them;
    pieces: first and end of each, in order.
    """
    hidden = functional.embedding(ids, weights.embedding)
    buffer, before = None, None
    for layer, attention in zip(weights.layers, attentions, strict=True):
        reader = attention
        if isinstance(attention, AttentionLayer) and has_plain_steps(attention):
            buffer = buffer or _buffer(config, hidden)
            reader = AtHand(attention, buffer)
        for start, end in pieces:
            positions, valid = torch.arange(start, end, device=ids.device) - padding, None
            if start < longest:
                valid, positions = positions >= 0, positions.clamp_min(0)
            angles = weights.rotary.at(positions, hidden.dtype)
            some = hidden[:, start:end]
            layers.add_block(some, layer, reader, angles, config.head_dim, valid)
            told(attention, start, end)
        if before is not None:
            before.settle()
        before = attention if isinstance(attention, AttentionLayer) else None
    if before is not None:
        before.settle()
    return layers.logits(hidden[:, -1], weights)


def has_plain_steps(layer: AttentionLayer) -> bool:
    """Whether its steps are `AttentionLayer`'s; one with others reads a prompt by those."""
    return type(layer).step is AttentionLayer.step


def _buffer(config: DecoderConfig, hidden: Tensor) -> Rows:
    """Room for keys and values `[B, G, N, D]` of hidden states `[B, N, hidden]`."""
    shape = len(hidden), config.kv_heads, hidden.shape[1], config.head_dim
    return Rows(hidden.new_empty(shape), hidden.new_empty(shape))
