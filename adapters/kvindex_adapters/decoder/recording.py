"""`Recording`: a prompt that the model reads once, for sessions with different indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.layer import AttentionLayer
from kvindex.layer.dense import attend_rows
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.prefill import OnChunk, PromptLayer, new_buffer, read_by_layer
from kvindex_adapters.llama.weights import Weights


class Recording:
    """What the layers of a model compute for a prompt, or a batch of prompts, with full attention.

    Assign `recording.read` to the `reader` of several empty sessions of one decoder. The first of
    them that reads the prompt computes the recording. All of them copy keys and values from it, and
    then contain the same as if they had computed them.

    The recording has the keys and values of all layers and tokens, on the device of the model.
    `forget` frees queries and outputs that no further session needs.

    Args:
        queries: Whether to record the queries, for indexes that learn from them
            (`Session.observes_queries`).
        outputs: Whether to record the attention outputs, for layers with `error` or `k="auto"`.
    """

    def __init__(self, *, queries: bool = False, outputs: bool = False) -> None:
        self.queries, self.outputs = queries, outputs
        self._layers: list[_Recorder] = []
        self._ids = self._padding = self._logits = torch.empty(0)
        self._chunks: Sequence[tuple[int, int]] = ()

    def record(
        self,
        weights: Weights,
        config: DecoderConfig,
        ids: Tensor,
        padding: Tensor,
        longest: int,
        chunks: Sequence[tuple[int, int]],
    ) -> None:
        """Compute the recording, unless it has been computed. `read` calls this.

        The arguments are the first ones of `read_by_layer`.

        Raises:
            ValueError: The prompt or the chunks differ from those of the recording.
        """
        if not self._layers:
            how = config.scale, padding if longest else None, self.queries, self.outputs
            own = [_Recorder(*how) for _ in weights.layers]
            into = [PromptLayer(layer, new_buffer(config, weights.embedding, ids)) for layer in own]
            given = weights, config, ids, padding, longest, chunks
            self._logits = read_by_layer(*given, into, lambda *_: None)
            self._layers, self._ids, self._padding, self._chunks = own, ids, padding, chunks
        same = torch.equal(ids, self._ids) and torch.equal(padding, self._padding)
        if not same or chunks != self._chunks:
            raise ValueError("ids: got another prompt or other chunks than those of the recording")

    def forget(self, *, queries: bool = False, outputs: bool = False) -> None:
        """Free the queries or the outputs of all layers, or do not record them."""
        self.queries, self.outputs = self.queries and not queries, self.outputs and not outputs
        for layer in self._layers:
            layer.chunks = [chunk.without(queries, outputs) for chunk in layer.chunks]

    def read(
        self,
        weights: Weights,
        config: DecoderConfig,
        ids: Tensor,
        padding: Tensor,
        longest: int,
        chunks: Sequence[tuple[int, int]],
        attentions: Sequence[layers.Attention],
        on_chunk: OnChunk,
    ) -> Tensor:
        """Prefill empty layers as `read_by_layer` does. Compute only what is not yet recorded.

        Raises:
            ValueError: The prompt or the chunks differ from those of the recording, a layer needs
                queries or outputs that are not recorded, or it reads prompts with sparse attention.
        """
        self.record(weights, config, ids, padding, longest, chunks)
        for recorded, attention in zip(self._layers, attentions, strict=True):
            for (start, end), chunk in zip(chunks, recorded.chunks, strict=True):
                chunk.append_to(attention)
                on_chunk(attention, start, end)
        return self._logits


class _Chunk(NamedTuple):
    """Tensors of a layer for the tokens of a chunk: `[B, G, T, D]`, `[B, T]` and `[B, H, T, D]`."""

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    queries: Tensor | None
    outputs: Tensor | None

    def without(self, queries: bool, outputs: bool) -> _Chunk:
        """Return the chunk without its queries, its outputs, or both."""
        kept = None if queries else self.queries, None if outputs else self.outputs
        return _Chunk(self.keys, self.values, self.valid, *kept)

    def append_to(self, attention: layers.Attention) -> None:
        """Append the tokens to a layer."""
        if isinstance(attention, DenseAttention):
            attention.append(self.keys, self.values, self.valid)
        elif isinstance(attention, AttentionLayer) and attention.prefill == "dense":
            if self.outputs is None and attention.error is not None:
                raise ValueError(
                    "outputs: got a recording without outputs, allowed is Recording(outputs=True) "
                    "for a layer with error or k='auto'"
                )
            attention.append(**self._asdict())
        else:
            raise ValueError(
                f"session: got a {type(attention).__name__} with sparse attention in prompts, "
                "allowed are layers with prefill='dense'"
            )


class _Recorder:
    """Full attention of one layer to a prompt. It records what a `Recording` copies.

    `padding` is the number of padded tokens of each sequence, int64 `[B, 1]`, or None.
    """

    def __init__(self, scale: float, padding: Tensor | None, queries: bool, outputs: bool) -> None:
        self._scale, self._padding, self._queries, self._outputs = scale, padding, queries, outputs
        self._length = 0
        self.chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return self._length

    def read_chunk(self, queries: Tensor, rows: Rows, *, valid: Tensor | None = None) -> Tensor:
        start, end, every = self._length, rows.keys.shape[2], None
        if self._padding is not None:
            every = torch.arange(end, device=queries.device) >= self._padding
        outputs = attend_rows(rows, queries, every, self._scale)
        new = rows.keys[:, :, start:], rows.values[:, :, start:], valid
        more = queries if self._queries else None, outputs if self._outputs else None
        self.chunks.append(_Chunk(*new, *more))
        self._length = end
        return outputs
