"""`Session`: the state of one generation, from an empty sequence to its last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex.core.guard import in_plain_torch
from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.layers import forward
from kvindex_adapters.decoder.weights import Weights
from kvindex_adapters.hf.placement import make_room
from kvindex_adapters.hf.prefill import Progress, chunks
from kvindex_adapters.hf.report import Report, sum_up

Attention = AttentionLayer | DenseAttention
"""What a layer attends through."""


class Session:
    """Attention of all layers, and the place of the next token.

    attentions: one a layer, without tokens; padding: padded tokens on the left of each row.
    A token's step reads its id and its position where they lie on the device.
    """

    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        attentions: Sequence[Attention],
        padding: Sequence[int],
    ) -> None:
        self._weights, self._config, self._attentions = weights, config, attentions
        device = weights.embedding.device
        self._longest = max(padding)
        self._position = -torch.tensor(padding, device=device)[:, None]  # of the next token, [B, 1]
        self._id = torch.zeros_like(self._position)
        self.length = 0

    def read_prompt(
        self, ids: Tensor, chunk: int, room: int, report: Progress | None = None
    ) -> Tensor:
        """Logits `[B, V]` after ids int64 `[B, N]`, read about `chunk` at a time.

        room: tokens for which memory is taken before the last piece. That one has several tokens,
        so that its attention is exact.
        """
        N = ids.shape[1]
        stop = max(N - chunk, 0)
        for start, end in chunks(stop, chunk):
            self._read(ids[:, start:end])
            self._tell(ids[:, start:end])
            if report:
                report("prefill", end, N)
        make_room(self.indexes(), room)
        logits = self._read(ids[:, stop:])
        self._tell(ids[:, stop:])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[B, V]` after one more token of each row, int64 `[B]`."""
        self._id.copy_(tokens[:, None])
        logits = self._read(self._id)
        self._tell(tokens[:, None])
        return logits

    def indexes(self) -> list[KVIndex]:
        """The indexes of the layers that hold tokens."""
        return [layer.index for layer in self._indexed() if len(layer)]

    def report(self) -> Report:
        """Rows and bytes that the searching steps have read so far, and memory of the layers."""
        dense = [layer for layer in self._attentions if isinstance(layer, DenseAttention)]
        other = sum(layer.nbytes for layer in dense) if dense else None
        layers = self._indexed()
        return sum_up([layer for layer in layers if len(layer)], len(layers), other)

    def _indexed(self) -> list[AttentionLayer]:
        return [layer for layer in self._attentions if isinstance(layer, AttentionLayer)]

    @in_plain_torch
    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        """Append ids int64 `[B, T]` to every layer: logits `[B, V]` after the last."""
        T, positions, valid = ids.shape[1], self._position, None
        if T > 1:
            positions = positions + torch.arange(T, device=ids.device)
        if self.length < self._longest:
            valid = positions >= 0
            positions = positions.clamp_min(0)
        head_dim, layers = self._config.head_dim, self._attentions
        logits = forward(self._weights, ids, positions, layers, head_dim, valid)
        self._position += T
        self.length += T
        return logits

    def _tell(self, ids: Tensor) -> None:
        """Show the indexes the newest ids int64 `[B, T]`."""
        for layer in self._indexed():
            layer.index.observe_tokens(ids, first=self.length - ids.shape[1])
