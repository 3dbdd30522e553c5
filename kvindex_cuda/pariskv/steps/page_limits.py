"""Limits of the error for decode steps over the pages of an inference engine, if the expected error
determines the number of rows.

All limits are computed on the device, and the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.layer.output_scale import FEWEST, HORIZON, LAST
from kvindex_cuda.runtime.arguments import CODES, of_shape, of_type
from kvindex_cuda.runtime.constants import LENGTHS, WRITE_THREADS
from kvindex_cuda.runtime.launch import launch

INTERVAL = 16
"""Number of steps of the model from one copy of the counters to the host to the next, once decode
steps search."""

AT_ONCE = 1 << 22
"""Most numbers in a temporary tensor of `update`, unless a single layer has more."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of prompts in a batch whose outputs are measured, or the tokens of decode steps.

    Args:
        counts: Number of the chunk's newest tokens to measure, int64 `[S]`.
        digits: Number of binary digits of the sequence's length, int64 `[S]`.
        sums: Sums of squares of values and outputs, float32 `[layers, S, G + H]`. NaN for a layer
            that has not measured the batch.
        stops: Index in the batch of the token after each chunk, int64 `[S]`. None for decode steps.
    """

    counts: Tensor
    digits: Tensor
    sums: Tensor
    stops: Tensor | None = None


class PageLimits:
    """The limits of the error of all layers, for all sequences of an engine.

    A limit follows from the mean squares of a layer's values and outputs (`OutputScale`). An engine
    does not identify sequences, so these are measured for all sequences of a similar length
    together: lengths with the same number of binary digits are a class. `begin_batch` chooses the
    tokens of prompts to measure, `measure` measures them in one layer, and `update` computes new
    limits. Until limits are known, decode steps use full attention. Then the kernel `attend`
    measures them, in a CUDA graph too.

    Args:
        geometry: Geometry that all layers have.
        layers: Number of layers.
        error: Allowed error of a layer's output, relative to the size of its outputs.
        dense_below: Only tokens at this position of a sequence or later are measured, because
            shorter sequences are not searched.
        most_rows: Number of sequences in the largest batch of decode steps.

    Attributes:
        layers: Number of layers.
        table: Largest variance of attention weights for each class, float32 `[layers, LENGTHS, G]`.
            A class with too few measured tokens has that of the most similar length.
        known: Whether each layer has measured enough tokens, bool `[1]`. Until then, decode steps
            use full attention.
        variances: The limits of the sequences of a decode step, float32 `[layers, most_rows, G]`,
            which the kernel `read_pages` copies from `table`.
        found: Number of rows that decode steps have found, int64 `[layers, most_rows, G]`.
        squares: Squares of values and outputs of the last decode step, float32 `[layers, most_rows,
            G + H]`; only as long as limits are not known.
        searches: What the host knows of `known`, some steps later.
    """

    def __init__(
        self, geometry: Geometry, *, layers: int, error: float, dense_below: int, most_rows: int
    ) -> None:
        g, device, self.layers = geometry, geometry.device, layers
        self._geometry, self._error, self._dense_below = g, error, dense_below
        heads = g.kv_heads + g.q_heads
        self._means = torch.zeros(layers, LENGTHS, heads, device=device)
        self._seen = torch.zeros(layers, LENGTHS, dtype=torch.int64, device=device)
        self._chunks: list[Chunks] = []  # of the current step: of decode steps, and of prompts
        self.table = torch.zeros(layers, LENGTHS, g.kv_heads, device=device)
        self.known = torch.zeros(1, dtype=torch.bool, device=device)
        self.variances = torch.zeros(layers, most_rows, g.kv_heads, device=device)
        self.squares = torch.zeros(layers, most_rows, heads, device=device)
        self.found = torch.zeros(layers, most_rows, g.kv_heads, dtype=torch.int64, device=device)
        # for each class, how different the others are; of two equally similar ones, the longer
        digits = torch.arange(LENGTHS, device=device)
        differences = digits[None] - digits[:, None]
        self._differences = (2 * differences.abs() + (differences < 0)).float()
        self._steps = 0
        self._copy = torch.zeros(2, dtype=torch.int64)  # rows found so far, and `known`
        if device.type == "cuda":
            self._copy = self._copy.pin_memory()
        self._copied: Any = None  # an event that is recorded when `_copy` is complete
        self._read, self._new, self.searches = 0, 0, False  # rows read, and not yet taken

    def begin_step(self, lengths: Tensor, *, longest: int | None = None) -> None:
        """Compute new limits before a step of the model. As long as the host does not know of any,
        measure the step if it is a decode step.

        Args:
            lengths: Length of each sequence that has a decode step, int32 `[R]`; 0 for an unused
                entry.
            longest: No sequence is longer; None if the host does not know. An engine that only has
                sequences below `dense_below` then computes nothing here.
        """
        self.update()
        self._poll()
        short = longest is not None and longest < self._dense_below
        if self.searches or short or not len(lengths):
            return
        sums = self.squares[:, : len(lengths)].fill_(torch.nan)
        lengths = lengths.long()
        counts = self._counts(torch.ones_like(lengths), lengths)
        self._chunks.append(Chunks(counts, self._digits(lengths), sums))

    def begin_batch(self, starts: Tensor, lengths: Tensor, sequences: Sequence[int]) -> bool:
        """Choose the tokens of a batch whose outputs the layers measure: the newest ones of each
        chunk. Call `begin_step` before, for the decode steps of the batch.

        Args:
            starts: Index in the batch of each sequence's first new token, followed by the total
                number of new tokens, int32 `[R + 1]`.
            lengths: Length of each sequence including its new tokens, int32 `[R]`.
            sequences: Numbers of the sequences that get full attention, or sparse attention of
                prompts.

        Returns:
            True if there is such a sequence. Then call `measure` in each layer.
        """
        if not sequences:
            return False
        device = self._geometry.device
        given = torch.tensor(sequences)
        if device.type == "cuda":
            given = given.pin_memory()
        numbers = given.to(device, non_blocking=True)
        stops, lengths = starts[numbers + 1].long(), lengths[numbers].long()
        counts = self._counts((stops - starts[numbers]).clamp_max(LAST), lengths)
        shape = self.layers, len(given), self._means.shape[2]
        sums = self._means.new_full(shape, torch.nan)
        self._chunks.append(Chunks(counts, self._digits(lengths), sums, stops))
        return True

    def _counts(self, new: Tensor, lengths: Tensor) -> Tensor:
        """Return how many of the `new` newest tokens of sequences are measured."""
        some = torch.minimum(lengths, lengths - self._dense_below + 1)
        return torch.minimum(new, some).clamp_min(0)

    @staticmethod
    def _digits(lengths: Tensor) -> Tensor:
        """Return the number of binary digits of each length."""
        powers = 2 ** torch.arange(LENGTHS - 1, device=lengths.device)
        return (lengths[:, None] >= powers).sum(-1)

    def measure(self, layer: int, values: Tensor, outputs: Tensor) -> None:
        """Measure the tokens that `begin_batch` has chosen, in one layer.

        Args:
            layer: Number of the layer.
            values: Values of the tokens of the batch, `[T, G, Dv]`.
            outputs: Their attention outputs, `[T, H, Dv]`, in the dtype of the values.
        """
        chunks, g = self._chunks[-1], self._geometry
        assert chunks.stops is not None  # `begin_batch` has returned True
        of_type("values", values, *CODES)
        of_shape("values", values, len(values), g.kv_heads, g.value_dim)
        of_type("outputs", outputs, values.dtype)
        of_shape("outputs", outputs, len(outputs), g.q_heads, g.value_dim)
        if values.stride(2) != 1 or outputs.stride(2) != 1:
            raise ValueError(
                f"values: got strides {values.stride()} and outputs with {outputs.stride()}; the "
                "last dimension must be contiguous (stride 1)"
            )
        sums = chunks.sums[layer]
        launch(
            "append/measure_outputs.cu",
            "measure_outputs",
            (len(sums), g.kv_heads + g.q_heads),
            (WRITE_THREADS,),
            arguments=dict(
                values=values,
                outputs=outputs,
                stops=chunks.stops,
                counts=chunks.counts,
                sums=sums,
                kv_heads=g.kv_heads,
                value_dim=g.value_dim,
                value_token=values.stride(0),
                value_head=values.stride(1),
                output_token=outputs.stride(0),
                output_head=outputs.stride(1),
            ),
            DTYPE=CODES[values.dtype],
        )

    def update(self) -> None:
        """Compute new limits if tokens have been measured since the last call.

        The means are moving averages, as in `OutputScale`. Chunks of a batch whose lengths are in
        the same class count as one chunk. A chunk is ignored if a number in it is not finite, or if
        all values are 0, as in the empty pages of a step that warms up an engine.
        """
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return
        heads = self._geometry.kv_heads
        counts = torch.cat([one.counts for one in chunks])
        digits = torch.cat([one.digits for one in chunks])
        sums = torch.cat([one.sums for one in chunks], dim=1)
        some = sums.sum(-1).isfinite() & (sums[..., :heads].sum(-1) > 0) & (counts > 0)
        own = digits[:, None] == torch.arange(LENGTHS, device=digits.device)
        chosen = some[..., None] & own  # [layers, S, LENGTHS]
        new = (chosen * counts[:, None]).sum(1)  # [layers, LENGTHS]
        self._seen += new
        weights = (new / self._seen.clamp(1, HORIZON)).clamp_max(1)
        found = self._added(sums, chosen) / new.clamp_min(1)[..., None]
        self._means.lerp_(found, weights[..., None])
        values, outputs = self._means[..., :heads], self._means[..., heads:]
        allowed = self._error**2 * outputs.sum(-1, keepdim=True) / heads
        limits = allowed / values.clamp_min(torch.finfo(torch.float32).tiny)
        enough = self._seen >= FEWEST
        differences = self._differences.masked_fill(~enough[:, None], torch.inf)
        nearest = differences.argmin(-1, keepdim=True)  # [layers, LENGTHS, 1]
        self.table.copy_(limits.gather(1, nearest.expand_as(limits)))
        self.known.copy_(enough.any(-1).all())

    @staticmethod
    def _added(sums: Tensor, chosen: Tensor) -> Tensor:
        """Add up the sums of the chunks in each class.

        Every addition is in a fixed order, so the result is the same in each run.

        Args:
            sums: Float32 `[layers, S, heads]`.
            chosen: For each chunk, whether it belongs to a class, bool `[layers, S, LENGTHS]`.

        Returns:
            Float32 `[layers, LENGTHS, heads]`.
        """
        at_once = max(1, AT_ONCE // (LENGTHS * sums[0].numel()))  # layers
        parts = zip(torch.split(sums, at_once), torch.split(chosen, at_once), strict=True)
        return torch.cat(
            [part[:, :, None].masked_fill(~some[..., None], 0).sum(1) for part, some in parts]
        )

    def take_found(self) -> float:
        """Return how many rows decode steps have found since the last call: for each sequence the
        mean over KV heads and layers, added up. The last steps are not included yet."""
        found, self._new = self._new, 0
        return found / (self.layers * self.found.shape[2])

    def _poll(self) -> None:
        """Copy the counters to the host from time to time, without waiting for the device."""
        self._steps += 1
        if self._copied is not None and self._copied.query():
            self._receive()
        due = self._steps % INTERVAL == 0 or not self.searches
        if due and self._copied is None:
            counters = torch.stack([self.found.sum(), self.known[0].long()])
            self._copy.copy_(counters, non_blocking=True)
            if not counters.is_cuda:
                self._receive()
                return
            self._copied = torch.cuda.current_stream(counters.device).record_event()

    def _receive(self) -> None:
        self._copied = None
        found, known = self._copy.tolist()
        self._new, self._read = self._new + found - self._read, found
        self.searches = bool(known)
