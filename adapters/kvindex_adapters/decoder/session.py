"""`Session`: a batch of token sequences in all layers of the decoder.

It reads prompts and runs decode steps, which append tokens to the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import Explains, KVIndex, ObservesQueries
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex.layer.retrieval import row_bytes
from kvindex.ops.block_sparse import BLOCK
from kvindex.wrappers import Sharded
from kvindex_adapters.common.exclusive import Exclusive
from kvindex_adapters.common.parallel import sharded
from kvindex_adapters.common.placement import expect, make_room
from kvindex_adapters.common.prompt_chunks import Progress, aligned, chunks
from kvindex_adapters.common.speculation import Acceptance, check_verifiable, draft_cost
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.prefill import Reader, read_by_layer
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.llama.fused import BATCH, Fused, refusal
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.weights import Weights


class Attention(layers.Attention, Protocol):
    """Protocol for the attention of one layer. A CUDA graph can capture its decode steps."""

    def capture_refusal(self, tokens: int = 1, *, full: bool | None = None) -> str | None:
        """Return the reason why a CUDA graph cannot run the next decode step, or None if it can.

        The arguments are those of `AttentionLayer.capture_refusal`.
        """
        ...

    def prepare_replay(self, tokens: int = 1) -> object | None:
        """Prepare a capture or a replay of a step of `tokens` tokens.

        Returns:
            An object that represents the layer's present state for CUDA graphs. A graph that was
            captured earlier is still valid if this call returns the same object as before. None if
            this step must run without a graph.
        """
        ...

    def prepare_next(self, tokens: int = 1, ahead: int = 0) -> object | None:
        """Prepare the next replay like `prepare_replay`, but in less time.

        Returns:
            The object that `prepare_replay` would return, or None if the caller must call it.
            `ahead` is the number of tokens that earlier replays append and that are not counted
            yet.
        """
        ...

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append one token or several to each sequence, and compute their attention.

        A CUDA graph can capture this, because the device counts the tokens.
        """
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and remove the rest."""
        ...

    def count_replay(
        self,
        kept: int | Sequence[int] = 1,
        of: int = 1,
        *,
        full: bool | None = None,
        held: bool = False,
    ) -> bool:
        """After a replay of the graph, which has appended `of` tokens, keep the first `kept`.

        See `AttentionLayer.count_replay`.
        """
        ...


class Captured(NamedTuple):
    """A wrapper around a layer whose `step` calls `captured_step` of the layer.

    With wrapped layers, a CUDA graph can capture the forward pass.
    """

    layer: Attention

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Run the layer's `captured_step`. Padding (`valid`) is not supported."""
        return self.layer.captured_step(queries, keys, values)


class CapturedTogether(NamedTuple):
    """A wrapper like `Captured`, for kernels that treat several tokens of a sequence as tokens of
    several sequences.

    `tokens` is the number of tokens of each sequence, `T`.
    """

    layer: Attention
    tokens: int

    def step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Run the layer's `captured_step`.

        Args:
            queries: `[B·T, H, 1, D]`.
            keys: `[B·T, G, 1, D]`.
            values: `[B·T, G, 1, D]`.

        Returns:
            Attention outputs `[B·T, H, 1, D]`.
        """
        several = (one.reshape(-1, self.tokens, *one.shape[1:]) for one in (queries, keys, values))
        parts = (one[:, :, :, 0].transpose(1, 2) for one in several)  # [B, H, T, D]
        return self.layer.captured_step(*parts).transpose(1, 2).flatten(0, 1)[:, :, None]


@dataclass
class _Speculation:
    """State of a session inside `Session.speculating`.

    Args:
        tokens: Largest number of tokens of a step.
        start: Number of tokens at the beginning.
        begun: Layers that postpone moves into their index themselves.
        due: Other layers, with tokens that are due to move into the index.
    """

    tokens: int
    start: int
    begun: list[AttentionLayer] = field(default_factory=list)
    due: list[AttentionLayer] = field(default_factory=list)


class Session:
    """A batch of token sequences: the attention objects of all layers, and the next position.

    A decode step reads its input token (`token`, int64 `[B, 1]`) and position from device memory.
    Only one thread at a time may read prompts or run steps; other threads get RuntimeError. Any
    thread may call `report` and read `length` at any time.

    Args:
        weights: The model's weights.
        config: Sizes of the model.
        attentions: The attention object of each layer, without tokens.
        padding: Number of padding tokens on the left of each sequence.
        fused: Kernels for decode steps, or None to use plain torch (`layers.forward`).
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
        self.padding = tuple(padding)
        """Number of padding tokens on the left of each sequence."""
        self._longest = max(padding)
        # position of the next token, [B, 1]
        self._position = -torch.tensor(padding, device=device)[:, None]
        # steps in which sequences have kept different numbers of tokens: the length before, and the
        # number of tokens of each sequence that became padding
        self._gaps: list[tuple[int, list[int]]] = []
        self.token = torch.zeros_like(self._position)
        self.length = 0
        self.reader: Reader = read_by_layer
        """Function that prefills the first prompt. With `Recording.read`, sessions share it."""
        # (number of tokens, whether they attend to all tokens) -> for each layer, what
        # `prepare_replay` will return, or None; empty if the layers have changed since
        # `prepare_ahead`
        self._ready: dict[tuple[int, bool], list[object | None]] = {}
        self._full = False  # inside `fully`
        self._speculation: _Speculation | None = None  # inside `speculating`
        self.acceptance = Acceptance()
        """Counts of drafted and accepted tokens, if calls have speculated."""

    def read_prompt(
        self,
        ids: Tensor,
        chunk: int,
        room: int,
        report: Progress | None = None,
        *,
        full: bool = False,
    ) -> Tensor:
        """Prefill a prompt in chunks, with full attention.

        The first prompt of a session is processed layer by layer. Later prompts are processed chunk
        by chunk, each chunk through all layers.

        Args:
            ids: Int64 `[B, N]`.
            chunk: Approximate number of tokens of each prompt to compute at a time.
            room: Reserve memory for this number of tokens per sequence while the prompt is read.
                The number includes the tokens that will follow the prompt.
            report: Called with the phase, the number of tokens done, and the total number.
            full: Attend fully even if a later prompt has only one token, which otherwise searches.

        Returns:
            Logits `[B, V]` for the token after the prompt.
        """
        with self.exclusive(), self.fully(full):
            return self._read_prompt(ids, chunk, room, report)

    def _read_prompt(self, ids: Tensor, chunk: int, room: int, report: Progress | None) -> Tensor:
        """Implement `read_prompt`. The calling thread holds the lock `exclusive`."""
        indexes = [layer.index for layer in self._indexed()]
        expect(indexes, room, len(ids))  # in the order in which the layers append
        try:
            return self._read_chunks(ids, chunk, room, report)
        except BaseException:
            expect(indexes, 0, len(ids))
            raise

    def _read_chunks(self, ids: Tensor, chunk: int, room: int, report: Progress | None) -> Tensor:
        """Implement `_read_prompt`, except for the allocation of memory in the background."""
        N = ids.shape[1]
        for layer in self._dense():
            layer.reserve(room)
        unit = 1
        for indexed in self._indexed():
            indexed.expect_prompt(self.length + N)
            unit = BLOCK if indexed.prefill == "sparse" else unit
        stop = aligned(max(N - chunk, 0), self.length, unit)
        if (
            self.length and stop == 1
        ):  # a chunk of one token would run as a decode step, which searches the index
            stop = 0
        parts = [*chunks(stop, chunk, first=self.length, unit=unit), (stop, N)]
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

    def step(self, tokens: Tensor, *, full: bool = False) -> Tensor:
        """Run one decode step.

        Args:
            tokens: The next token of each sequence, int64 `[B]`.
            full: Attend to all tokens instead of searching.

        Returns:
            Logits `[B, V]` for the token that follows `tokens`.
        """
        with self.exclusive(), self.fully(full):
            self.token.copy_(tokens[:, None])
            logits = self._read(self.token)
            self._observe(tokens[:, None])
            return logits

    # Speculation: tokens that may be rejected

    @contextmanager
    def speculating(self, tokens: int) -> Iterator[None]:
        """Context manager for tokens that may be removed again with `keep`.

        Inside, no token moves from a window into an index. If the `with` block raises an exception,
        the session has the tokens that it had at the beginning.

        Args:
            tokens: Largest number of tokens that one call of `score` appends.
        """
        with self.exclusive():
            self._speculation = block = _Speculation(tokens, self.length)
            try:
                try:
                    yield
                except BaseException:
                    self.undo_replay(block.start)
                    raise
                self._begin_speculating(block.due)
                while block.begun:
                    if block.begun[-1].end_speculating():
                        self.forget_prepared()
                    block.begun.pop()
            finally:
                self._speculation = None
                if block.begun:  # after an exception
                    self.forget_prepared()
                for layer in block.begun:
                    layer.end_speculating(failed=True)

    @in_plain_torch
    def duplicate(self) -> Self:
        """Make an independent session with the same tokens, outside of `speculating` and `fully`.

        As with `copy.deepcopy` of an index, the rows and codes of indexes are shared, not copied.
        The keys and values of layers without an index are copied.
        """
        with self.exclusive():
            self.forget_prepared()  # copying a layer finishes its pending append
            other = copy(self)
            other._speculation, other._full = None, False
            other.exclusive = Exclusive("session", "the same session")
            other._attentions = deepcopy(self._attentions)
            other._position, other.token = self._position.clone(), self.token.clone()
            other._gaps = [*self._gaps]
        return other

    def set_rows(self, k: int | str | None, *, error: float | None = None) -> None:
        """Change how many rows later decode steps retrieve, in all layers with an index.

        Args:
            k: As for `AttentionLayer.set_rows`; None for the present number.
            error: As for `AttentionLayer.set_rows`.

        Raises:
            ValueError: An argument is out of range, or an index does not support it.
        """
        with self.exclusive():
            self.forget_prepared()
            for layer in self._indexed():
                layer.set_rows(layer.k if k is None else k, error=error)

    @in_plain_torch
    @torch.no_grad()
    def begin_decoding(self) -> None:
        """Report the end of the prompt to the indexes, as the first decode step does.

        Some indexes compute their codes only then. Copies of the session that `duplicate` makes
        afterwards share these codes.
        """
        with self.exclusive():
            self.forget_prepared()
            for layer in self._indexed():
                layer.begin_decoding()

    def _begin_speculating(self, some: Sequence[AttentionLayer]) -> None:
        """Let some layers postpone moves into their index, inside `speculating`.

        Replays of CUDA graphs do without (`count_replay`), because this takes time in which a GPU
        waits.
        """
        block = self._speculation
        if block is not None and not block.begun:
            for layer in some:
                block.begun.append(layer)  # before it begins, so that it ends after an interrupt
                layer.begin_speculating(block.tokens, since=block.start)

    @in_plain_torch
    @torch.no_grad()
    def score(self, ids: Tensor, *, full: bool = False) -> Tensor:
        """Append several decoded tokens, each of which searches, and compute all their logits.

        Call this inside `speculating`. Token ids are not passed to the indexes; call `observe` with
        those that stay.

        Args:
            ids: Int64 `[B, T]`.
            full: Attend to all tokens instead of searching.

        Returns:
            Logits `[B, T, V]` for the token after each of `ids`.
        """
        T = ids.shape[1]
        positions = self._position + torch.arange(T, device=ids.device)
        given = self._weights, ids, positions, self._attentions, self._config.head_dim
        self.forget_prepared()
        self._begin_speculating(self._indexed())
        with self.fully(full):
            logits = layers.forward(*given, every=True)
        self._position += T
        self.length += T
        return logits

    def draft(self, tokens: Tensor) -> Tensor:
        """Run one decode step that may be undone with `keep`, inside `speculating`.

        Args:
            tokens: The next token of each sequence, int64 `[B]`.

        Returns:
            Logits `[B, V]` for the token that follows `tokens`.
        """
        self._begin_speculating(self._indexed())
        self.token.copy_(tokens[:, None])
        return self._read(self.token)

    @in_plain_torch
    def keep(self, length: int) -> None:
        """Remove the tokens from position `length` on, wherever a failed step has left the layers.

        Args:
            length: Number of tokens to keep, at most the number of tokens in the session.
        """
        self.forget_prepared()
        if self._speculation is not None and length <= self._speculation.start:
            self._speculation.due = []
        for layer in self._attentions:
            if not (isinstance(layer, AttentionLayer) and layer.undo_replays(length)):
                layer.truncate(length)
        self._position -= self.length - length
        self.length = length
        if self._gaps and self._gaps[-1][0] >= length:
            self._forget_gaps()

    def _forget_gaps(self) -> None:
        """Forget the gaps of removed steps, and compute all positions anew."""
        self._gaps = [gap for gap in self._gaps if gap[0] < self.length]
        counts = [self.padding, *(count for _, count in self._gaps)]
        padding = torch.tensor([*map(sum, zip(*counts, strict=True))], device=self.token.device)
        self._position.copy_((self.length - padding)[:, None])

    def observe(self, ids: Tensor) -> None:
        """Pass the ids of the newest tokens, int64 `[B, T]`, to the indexes."""
        self._observe(ids)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count a decode step with `drafted` tokens, of which `accepted` were accepted."""
        self.acceptance = self.acceptance.counted(drafted, accepted)

    def draft_cost(self) -> float:
        """Estimate the time of a decode step with the index, relative to full attention's.

        See `common.speculation.draft_cost`.
        """
        return draft_cost(self._indexed(), self._weights.read_bytes)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has, padding included."""
        return self._config.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights that a decode step reads."""
        return self._weights.read_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token of one sequence, in all layers with an index."""
        indexes = [layer.index for layer in self._indexed()]
        return sum(index.geometry.kv_heads * row_bytes(index) for index in indexes)

    def check_verifiable(self) -> None:
        """Check that full attention can verify drafts that are written with the indexes.

        Raises:
            ValueError: No layer has an index, or an index stores rows in a lossy codec.
        """
        check_verifiable(self._indexed())

    @contextmanager
    def fully(self, full: bool = True) -> Iterator[None]:
        """Context manager in which decoded tokens attend to all tokens, if `full` is True.

        Layers without an index always do.
        """
        before, self._full = self._full, self._full or full
        try:
            with ExitStack() as stack:
                for layer in self._indexed() if full else ():
                    stack.enter_context(layer.attending_fully())
                yield
        finally:
            self._full = before

    def agreed(self, tokens: Tensor) -> Tensor:
        """Broadcast the tokens that rank 0 has chosen. With one rank, return `tokens`.

        This is a collective operation, which a CUDA graph may contain.

        Args:
            tokens: The tokens that this rank has chosen, int64 `[B]`.

        Returns:
            Tokens int64 `[B]`, equal on all ranks.
        """
        ranks = self.ranks
        return tokens if ranks is None else ranks.first(tokens)

    @property
    def ranks(self) -> HeadRanks | Sharded | None:
        """The ranks that shard the model's heads or the index's tokens, or None for one process."""
        first = next(iter(self._indexed()), None)
        return self._weights.ranks or (None if first is None else sharded(first.index))

    # Decode steps in a CUDA graph

    def capture_refusal(self, tokens: int = 1, *, full: bool | None = None) -> str | None:
        """Return the reason why a CUDA graph cannot run the next decode step, or None if it can.

        The text names the first layer that cannot run in a CUDA graph, and says why it cannot.

        Args:
            tokens: Number of tokens of each sequence in the step.
            full: Whether the tokens attend to all tokens. None means that they do inside `fully`.
        """
        for number, layer in enumerate(self._attentions):
            why = layer.capture_refusal(tokens, full=full)
            if why is not None:
                return f"layer {number}: {why}"
        return None

    @in_plain_torch
    def prepare_replay(self, tokens: int = 1) -> list[object] | None:
        """Prepare all layers for the capture or the replay of `captured_step`, or of
        `captured_score` with several tokens.

        Args:
            tokens: Number of tokens of each sequence in the step.

        Returns:
            A list with one object per layer, the result of the layer's `prepare_replay`. None if
            this decode step must run without a CUDA graph.
        """
        if self.length < self._longest:
            return None
        ready = self._ready.get((tokens, self._full)) or [None] * len(self._attentions)
        reads, self._ready = list[object](), {}
        for known, layer in zip(ready, self._attentions, strict=True):
            read = known or layer.prepare_next(tokens) or layer.prepare_replay(tokens)
            if read is None:
                return None
            reads.append(read)
        return reads

    @in_plain_torch
    def prepare_ahead(self, tokens: int, ahead: int) -> None:
        """Prepare the next replay, of `tokens` tokens, while one of `ahead` tokens runs that is not
        counted yet. So the next call of `prepare_replay` takes less time."""
        ready = [layer.prepare_next(tokens, ahead) for layer in self._attentions]
        self._ready = {(tokens, self._full): ready}

    def forget_prepared(self) -> None:
        """Discard the results of `prepare_ahead`. Call this before a layer changes in any way that
        is no replay."""
        self._ready = {}

    @in_plain_torch
    @torch.no_grad()
    def captured_step(self) -> Tensor:
        """Run one decode step that a CUDA graph can capture. The device counts the tokens.

        Call `count_replay` after each replay. Token ids are not passed to the indexes; a layer
        whose index needs ids prevents the capture.

        Returns:
            Logits `[B, V]` for the token after `token`.
        """
        logits = self._forward_one([Captured(layer) for layer in self._attentions])
        self._position += 1
        return logits

    @in_plain_torch
    @torch.no_grad()
    def captured_score(self, ids: Tensor) -> Tensor:
        """Run a decode step of several tokens that a CUDA graph can capture.

        Call `count_replay` after each replay. Token ids are not passed to the indexes.

        Args:
            ids: Int64 `[B, T]`, contiguous.

        Returns:
            Logits `[B, T, V]` for the token after each of `ids`.
        """
        T, D = ids.shape[1], self._config.head_dim
        positions = self._position + torch.arange(T, device=ids.device)
        if self.fused is not None and ids.numel() <= BATCH:
            together = [CapturedTogether(layer, T) for layer in self._attentions]
            logits = self.fused.forward(ids.view(-1, 1), positions.view(-1, 1), together, D)
            logits = logits.view(*ids.shape, -1)
        else:
            captured = [Captured(layer) for layer in self._attentions]
            logits = layers.forward(self._weights, ids, positions, captured, D, every=True)
        self._position += T
        return logits

    @in_plain_torch
    def count_replay(
        self, kept: int | Sequence[int] = 1, of: int = 1, *, full: bool | None = None
    ) -> None:
        """After a replay of `captured_step` or `captured_score`, count its tokens on the host.

        Args:
            kept: Number of tokens that stay, or one number for each sequence. The others are
                removed. Where a sequence keeps fewer tokens than another one, it gets padding, so
                that all have the same length.
            of: Number of tokens that the replay has appended to each sequence.
            full: Whether they have attended to all tokens. None means that they have inside
                `fully`.
        """
        each = [kept] if isinstance(kept, int) else [*kept]
        most, uneven = max(each), len({*each}) > 1
        before, self.length = self.length, self.length + most
        due = [] if self._speculation is None else self._speculation.due
        held = self._speculation is not None
        for number, layer in enumerate(self._attentions):
            if not layer.count_replay(each if uneven else most, of, full=full, held=held):
                continue
            if not held:
                for ready in self._ready.values():
                    ready[number] = None
            elif isinstance(layer, AttentionLayer) and layer not in due:
                due.append(layer)
        if uneven:
            self._position -= of - torch.tensor(each, device=self.token.device)[:, None]
            self._gaps.append((before, [most - one for one in each]))
        elif most < of:
            self._position -= of - most

    @in_plain_torch
    def undo_replay(self, length: int) -> None:
        """Return to `length` tokens, wherever a failed replay or a failed count has left the
        session."""
        self.keep(length)
        self._forget_gaps()

    def indexes(self) -> list[KVIndex]:
        """List the indexes of all layers that contain tokens.

        Returns:
            The indexes, in the order of the layers.
        """
        return [layer.index for layer in self._indexed() if layer.tokens]

    @property
    def observes_queries(self) -> bool:
        """True if an index learns from the queries of the prompt."""
        indexes = (layer.index for layer in self._indexed())
        return any(capability(index, ObservesQueries) is not None for index in indexes)

    def report(self, *, all_ranks: bool = False) -> Report:
        """Report how many rows and bytes decode steps have read from the indexes, and the memory in
        use.

        Any thread may call this at any time. During a step, some layers may already include the new
        tokens, and others not yet.

        Args:
            all_ranks: Add up the reports of all processes. All processes must then call this
                method.

        Returns:
            The report.
        """
        dense = self._dense()
        other = sum(layer.nbytes for layer in dense) if dense else None
        indexed = self._indexed()
        report = sum_up([layer for layer in indexed if layer.tokens], len(indexed), other)
        if self.acceptance.steps:
            report = replace(report, acceptance=self.acceptance)
        return report.over_ranks() if all_ranks else report

    def explain(self, *, graphs: bool = True) -> str:
        """Describe how the next decode step will run: dtype, kernels, CUDA graph and index.

        Args:
            graphs: Whether a decode step may run as one CUDA graph.

        Returns:
            Text of several lines. It describes only the first index of the model.
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
        """Return a line about the shard of this rank, or [] if there is one process."""
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
        """Run a decode step with input `token`. Return logits `[B, V]`."""
        given = self.token, self._position, attentions, self._config.head_dim
        if self.fused is not None:
            return self.fused.forward(*given)
        return layers.forward(self._weights, *given)

    @in_plain_torch
    @torch.no_grad()
    def _read_by_layer(
        self, ids: Tensor, parts: Sequence[tuple[int, int]], report: Progress | None
    ) -> Tensor:
        """Prefill the first prompt, int64 `[B, N]`, layer by layer. Return logits `[B, V]`."""
        N, count, done = ids.shape[1], len(self._attentions), 0

        def on_chunk(layer: layers.Attention, start: int, end: int) -> None:
            nonlocal done
            if isinstance(layer, AttentionLayer):
                layer.index.observe_tokens(ids[:, start:end], first=start)
            done += end - start
            if report and end == N and done < N * count:
                report("prefill", done // count, N)

        self.forget_prepared()
        given = self._weights, self._config, ids, -self._position, self._longest, parts
        logits = self.reader(*given, self._attentions, on_chunk)
        self._position += N
        self.length = N
        return logits

    @in_plain_torch
    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        """Append ids int64 `[B, T]` to every layer. Return logits `[B, V]` for the next token."""
        self.forget_prepared()
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
