"""Layer-by-layer prefill of a new sequence: only one layer's keys and values are on the device.

Each layer updates the hidden states of the prompt in place, one chunk at a time, so temporary
tensors have the size of a chunk. The hidden states of a long prompt can be in host memory
(`hidden_states.py`). All layers use the same buffer for the keys and values of the prompt. Before
the next layer overwrites the buffer, the layer's index copies its contents, concurrently with the
computation where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt_chunks import chunk_of
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.hidden_states import states_of
from kvindex_adapters.llama.weights import Weights

OnChunk = Callable[[layers.Attention, int, int], None]
"""Function that is called after a layer has processed a chunk of the prompt.

Its arguments are the layer's attention object, and the first and end position of the chunk.
"""

Reader = Callable[
    [
        Weights,
        DecoderConfig,
        Tensor,
        Tensor,
        int,
        Sequence[tuple[int, int]],
        Sequence[layers.Attention],
        OnChunk,
    ],
    Tensor,
]
"""Function that prefills empty layers with a prompt, such as `read_by_layer`."""


class ReadsChunks(Protocol):
    """Protocol for a layer that attends to keys and values that the caller has stored."""

    def __len__(self) -> int:
        """Return the number of tokens of earlier chunks."""
        ...

    def read_chunk(self, queries: Tensor, rows: Rows, *, valid: Tensor | None = None) -> Tensor:
        """Attend from the tokens of a chunk. See `AttentionLayer.read_chunk`."""
        ...


class PromptLayer:
    """Prefills an empty attention layer.

    The keys and values of the prompt are in a buffer, which other layers may use afterwards.
    """

    def __init__(self, layer: ReadsChunks, buffer: Rows) -> None:
        self._layer, self._buffer = layer, buffer

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append one chunk of the prompt, and attend to all tokens in the buffer."""
        end = len(self._layer) + keys.shape[2]
        own = self.room(keys.shape[2])
        for given, target in ((keys, own.keys), (values, own.values)):
            if given.data_ptr() != target.data_ptr():
                target.copy_(given)
        rows = Rows(self._buffer.keys[:, :, :end], self._buffer.values[:, :, :end])
        return self._layer.read_chunk(queries, rows, valid=valid)

    def room(self, tokens: int) -> Rows:
        """Return the part of the buffer for the next `tokens` tokens, keys and values `[B, G, T,
        D]`. The caller may write them there before `step`."""
        new = slice(len(self._layer), len(self._layer) + tokens)
        return Rows(self._buffer.keys[:, :, new], self._buffer.values[:, :, new])


def default_chunk(weights: Weights, batch: int, device: torch.device) -> int:
    """Return the default chunk size: the tokens per sequence that a layer computes at a time."""
    return chunk_of(batch * token_bytes(weights), device)


def token_bytes(weights: Weights) -> int:
    """Return the bytes of one token's activations in a layer.

    The sum includes the queries, keys, values and output of attention; the MLP's gate, its up
    projection and their product; and the input and output of the residual addition.
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
    chunks: Sequence[tuple[int, int]],
    attentions: Sequence[layers.Attention],
    on_chunk: OnChunk,
) -> Tensor:
    """Prefill empty layers with a prompt, one layer after the other.

    Args:
        weights: The model's weights.
        config: Sizes of the model.
        ids: Int64 `[B, N]`.
        padding: Number of padded tokens on the left of each sequence, int64 `[B, 1]`.
        longest: Largest number in `padding`.
        chunks: First and end position of each chunk, in order.
        attentions: The attention object of each layer.
        on_chunk: Called after each chunk of each layer.

    Returns:
        Logits `[B, V]` for the token after the prompt.
    """
    buffer, before = None, None
    with states_of(weights, ids, chunks) as states:
        for layer, attention in zip(weights.layers, attentions, strict=True):
            reader: layers.Attention = attention
            if isinstance(attention, AttentionLayer) and has_plain_steps(attention):
                buffer = buffer or new_buffer(config, weights.embedding, ids)
                reader = PromptLayer(attention, buffer)
            for number, (start, end) in enumerate(chunks):
                positions, valid = torch.arange(start, end, device=ids.device) - padding, None
                if start < longest:
                    valid, positions = positions >= 0, positions.clamp_min(0)
                some = states.take(number)
                angles = weights.rotary.at(positions, some.dtype)
                into = reader.room(end - start) if isinstance(reader, PromptLayer) else None
                layers.add_block(some, layer, reader, angles, config.head_dim, valid, into)
                states.put(number)
                on_chunk(attention, start, end)
            if before is not None:
                before.settle()
            before = attention if isinstance(attention, AttentionLayer) else None
        if before is not None:
            before.settle()
        return layers.logits(states.last(), weights)


def has_plain_steps(layer: AttentionLayer) -> bool:
    """Return True if the layer's class does not override `AttentionLayer.step`."""
    return type(layer).step is AttentionLayer.step


def new_buffer(config: DecoderConfig, like: Tensor, ids: Tensor) -> Rows:
    """Allocate a buffer for the keys and values `[B, G, N, D]` of a layer, for ids `[B, N]`.

    The heads of a token are stored one after the other, so that strides within a sequence do not
    depend on the length of the prompt. cuDNN prepares its kernels anew for other strides.
    """
    shape = *ids.shape, config.kv_heads, config.head_dim
    keys, values = (like.new_empty(shape).transpose(1, 2) for _ in range(2))
    return Rows(keys, values)
