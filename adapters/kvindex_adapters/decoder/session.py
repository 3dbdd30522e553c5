"""`Session`: the state of one generation, from an empty sequence to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import Explains, KVIndex
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Sharded
from kvindex_adapters.common.exclusive import Exclusive
from kvindex_adapters.common.parallel import sharded
from kvindex_adapters.common.placement import expect, make_room
from kvindex_adapters.common.prompt_chunks import Progress, chunks
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.prefill import read_by_layer
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.llama.fused import Fused, refusal
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.weights import Weights


class Attention(layers.Attention, Protocol):
    """The attention of one layer, whose steps may be captured (see `AttentionLayer`)."""

    def capture_refusal(self) -> str | None:
        """Return why a CUDA graph cannot run the next decode step, or None if it can."""
        ...

    def prepare_replay(self) -> object | None:
        """Prepare a capture or a replay. The same object is returned while a graph stays valid."""
        ...

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append one token of each sequence and attend from it, counting tokens on the device."""
        ...

    def count_replay(self) -> None:
        """Count the token that a replay has appended."""
        ...


class Captured(NamedTuple):
    """A layer whose steps are captured in a graph."""

    layer: Attention

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Run the layer's `captured_step`. No token is padding."""
        return self.layer.captured_step(queries, keys, values)


class Session:
    """The attention of all layers, and the position of the next token.

    A decode step reads its token (`token`, int64 `[B, 1]`) and its position from device memory.
    Only one thread at a time may read prompts and run steps (`exclusive`). Any thread may call
    `report` and read `length` at any time.

    Args:
        weights: The model's weights.
        config: Sizes of the model.
        attentions: One per layer, without tokens.
        padding: Number of padded tokens on the left of each sequence.
        fused: Kernels that run decode steps, or None for `layers.forward`.
    """

    @in_plain_torch
    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        attentions: Sequence[Attention],
        padding: Sequence[int],
        fused: Fused | None = None,
    ) -> None:
        self.fused = fused
        self.exclusive = Exclusive("session", "the same session")
        self._weights, self._config, self._attentions = weights, config, attentions
        device = weights.embedding.device
        self._longest = max(padding)
        # position of the next token, [B, 1]
        self._position = -torch.tensor(padding, device=device)[:, None]
        self.token = torch.zeros_like(self._position)
        self.length = 0

    def read_prompt(
        self, ids: Tensor, chunk: int, room: int, report: Progress | None = None
    ) -> Tensor:
        """Read a prompt in chunks, with exact attention.

        A first prompt is read layer by layer (`prefill`), a later one chunk by chunk through all
        layers.

        Args:
            ids: Int64 `[B, N]`.
            chunk: Approximate number of tokens of each prompt to compute at a time.
            room: Total number of tokens for which to reserve memory, concurrently with the
                computation.
            report: Called with the phase, the tokens done and the tokens in total.

        Returns:
            Logits `[B, V]` after the last token.
        """
        with self.exclusive():
            return self._read_prompt(ids, chunk, room, report)

    def _read_prompt(self, ids: Tensor, chunk: int, room: int, report: Progress | None) -> Tensor:
        """Run `read_prompt`, after this thread has entered `exclusive`."""
        batch, N = ids.shape
        expect([layer.index for layer in self._indexed()], room, batch)
        for layer in self._dense():
            layer.reserve(room)
        stop = max(N - chunk, 0)
        if self.length and stop == 1:  # a chunk of one token would run as a searching step
            stop = 0
        parts = [*chunks(stop, chunk), (stop, N)]
        if not self.length:
            logits = self._read_by_layer(ids, parts, report)
            make_room(self.indexes(), room)
            return logits
        for start, end in parts[:-1]:
            self._read(ids[:, start:end])
            self._observe(ids[:, start:end])
            if report:
                report("prefill", end, N)
        make_room(self.indexes(), room)
        logits = self._read(ids[:, stop:])
        self._observe(ids[:, stop:])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Run one decode step.

        Args:
            tokens: One token of each sequence, int64 `[B]`.

        Returns:
            Logits `[B, V]` after these tokens.
        """
        with self.exclusive():
            self.token.copy_(tokens[:, None])
            logits = self._read(self.token)
            self._observe(tokens[:, None])
            return logits

    def agreed(self, tokens: Tensor) -> Tensor:
        """Return the tokens that the first rank has chosen, or `tokens` if there is one rank.

        This is a collective operation, which a CUDA graph may contain.

        Args:
            tokens: Int64 `[B]`.

        Returns:
            Int64 `[B]`, equal on all ranks.
        """
        ranks = self.ranks
        return tokens if ranks is None else ranks.first(tokens)

    @property
    def ranks(self) -> HeadRanks | Sharded | None:
        """Ranks that share the model's heads or the index's tokens, or None for one process."""
        first = next(iter(self._indexed()), None)
        return self._weights.ranks or (None if first is None else sharded(first.index))

    # A decode step as one graph

    def capture_refusal(self) -> str | None:
        """Return why the next decode step cannot be one graph, or None if it can.

        Returns:
            The first layer that prevents it, with its reason, or None.
        """
        for number, layer in enumerate(self._attentions):
            why = layer.capture_refusal()
            if why is not None:
                return f"layer {number}: {why}"
        return None

    @in_plain_torch
    def prepare_replay(self) -> list[object] | None:
        """Prepare to capture or replay `captured_step` (see `AttentionLayer.prepare_replay`).

        Returns:
            The objects that the layers' `prepare_replay` returned, or None if a layer must run this
            step without a graph.
        """
        if self.length < self._longest:
            return None
        reads = []
        for layer in self._attentions:
            read = layer.prepare_replay()
            if read is None:
                return None
            reads.append(read)
        return reads

    @in_plain_torch
    @torch.no_grad()
    def captured_step(self) -> Tensor:
        """Run one decode step in a graph. All counts are updated on the device.

        Call `count_replay` after each replay. The ids of tokens are not passed to indexes; layers
        whose index needs them are not captured.

        Returns:
            Logits `[B, V]` after `token`.
        """
        logits = self._forward_one([Captured(layer) for layer in self._attentions])
        self._position += 1
        return logits

    def count_replay(self) -> None:
        """Count the token that a replay of `captured_step` has appended."""
        self.length += 1
        for layer in self._attentions:
            layer.count_replay()

    def indexes(self) -> list[KVIndex]:
        """List the indexes of all layers that store tokens.

        Returns:
            The indexes, in the order of the layers.
        """
        return [layer.index for layer in self._indexed() if layer.tokens]

    def report(self, *, all_ranks: bool = False) -> Report:
        """Report rows and bytes that searching steps have read so far, and memory of the layers.

        Any thread may call this at any time. During a step, some layers may already include the new
        tokens, and others not yet.

        Args:
            all_ranks: Add up the reports of all processes. All of them must call this
                (`Report.over_ranks`).

        Returns:
            The report.
        """
        dense = self._dense()
        other = sum(layer.nbytes for layer in dense) if dense else None
        indexed = self._indexed()
        report = sum_up([layer for layer in indexed if layer.tokens], len(indexed), other)
        return report.over_ranks() if all_ranks else report

    def explain(self, *, graphs: bool = True) -> str:
        """Report how the next decode step will run, and why.

        Args:
            graphs: Whether a decode step may be one graph.

        Returns:
            Text of several lines. Attention is described by the index of the first layer that has
            one.
        """
        weights, indexed, layers = self._weights, self._indexed(), len(self._attentions)
        dtype = str(weights.embedding.dtype).removeprefix("torch.")
        products, why = "Triton kernels", refusal(weights, len(self.token))
        if self.fused is None:
            products = f"torch ({why or 'fused: got False'})"
        apart = self._graph_refusal() if graphs else "graphs: got False"
        lines = [
            f"weights: {'FP8 in the layers, otherwise ' if weights.fp8 else ''}{dtype}",
            f"matrix products: {products}",
            *self._explained_ranks(),
            f"decode step: {'one graph' if apart is None else f'op by op ({apart})'}",
            f"attention: full in {layers - len(indexed)} layers, with an index in {len(indexed)}",
        ]
        described = capability(indexed[0].index, Explains) if indexed else None
        return "\n".join(lines if described is None else [*lines, described.explain()])

    def _explained_ranks(self) -> list[str]:
        """Describe which heads this rank has, if there are several ranks."""
        ranks = self._weights.ranks
        if ranks is None:
            return []
        how = "one kernel" if ranks.one_shot else "torch.distributed"
        return [f"heads: those of rank {ranks.rank} of {ranks.count}; sums with {how}"]

    def _graph_refusal(self) -> str | None:
        device = self.token.device.type
        if device not in GRAPHS:
            return f"device: got {device}, allowed is one of {sorted(GRAPHS)}"
        return self.capture_refusal()

    def _dense(self) -> list[DenseAttention]:
        return [layer for layer in self._attentions if isinstance(layer, DenseAttention)]

    def _indexed(self) -> list[AttentionLayer]:
        return [layer for layer in self._attentions if isinstance(layer, AttentionLayer)]

    def _forward_one(self, attentions: Sequence[layers.Attention]) -> Tensor:
        """Compute logits `[B, V]` after `token`. No token is padding."""
        given = self.token, self._position, attentions, self._config.head_dim
        if self.fused is not None:
            return self.fused.forward(*given)
        return layers.forward(self._weights, *given)

    @in_plain_torch
    @torch.no_grad()
    def _read_by_layer(
        self, ids: Tensor, parts: Sequence[tuple[int, int]], report: Progress | None
    ) -> Tensor:
        """Read the first ids, int64 `[B, N]`, layer by layer. Return logits `[B, V]`."""
        N, count, done = ids.shape[1], len(self._attentions), 0

        def on_chunk(layer: layers.Attention, start: int, end: int) -> None:
            nonlocal done
            if isinstance(layer, AttentionLayer):
                layer.index.observe_tokens(ids[:, start:end], first=start)
            done += end - start
            if report and end == N and done < N * count:
                report("prefill", done // count, N)

        given = self._weights, self._config, ids, -self._position, self._longest, parts
        logits = read_by_layer(*given, self._attentions, on_chunk)
        self._position += N
        self.length = N
        return logits

    @in_plain_torch
    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        """Append ids int64 `[B, T]` to every layer. Return logits `[B, V]` after the last one."""
        T, positions, valid = ids.shape[1], self._position, None
        if ids is self.token and self.length >= self._longest:
            logits = self._forward_one(self._attentions)
            self._position += 1
            self.length += 1
            return logits
        if T > 1:
            positions = positions + torch.arange(T, device=ids.device)
        if self.length < self._longest:
            valid = positions >= 0
            positions = positions.clamp_min(0)
        head_dim, attentions = self._config.head_dim, self._attentions
        logits = layers.forward(self._weights, ids, positions, attentions, head_dim, valid)
        self._position += T
        self.length += T
        return logits

    def _observe(self, ids: Tensor) -> None:
        """Pass the ids of the newest tokens, int64 `[B, T]`, to the indexes."""
        for layer in self._indexed():
            layer.index.observe_tokens(ids, first=self.length - ids.shape[1])
