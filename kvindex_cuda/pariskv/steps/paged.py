"""Decode steps of all layers over the pages of an inference engine such as vLLM. All layers use the
same block table.

Before each step of the model, `begin` reads the engine's tables for all layers in two launches.
Then `attend` runs the fused step of each layer. `attend` can be captured in a CUDA graph, because
kernels read addresses, lengths and scales from fixed places on the device, and the host never waits
for the device.

When a block of tokens becomes full, the next `begin` encodes it from the rows in its page. If pages
of rows are in host memory, each layer has a cache of rows on the device. If the expected error
determines the number of rows, `begin` also reads the limits of the error (`page_limits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.geometry import Geometry
from kvindex.ops.attention import with_sink_logits
from kvindex.pariskv import row_budget
from kvindex.pariskv.block_layout import words_of
from kvindex.pariskv.config import ParisKVConfig
from kvindex.pariskv.encoding import Encoding
from kvindex_cuda.memory.arena import Arena
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.pages import PagedLayout, Pages
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.ops import attend_latents
from kvindex_cuda.pariskv.append.encode import Encoder, encoder_of
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.dispatch import (
    OPTIONS,
    STEPS,
    kind_of,
    layout_of,
    options_of,
    refusal,
    room_of,
)
from kvindex_cuda.pariskv.steps.base import BaseStep
from kvindex_cuda.pariskv.steps.page_limits import PageLimits
from kvindex_cuda.runtime.arguments import multiprocessors, of_type
from kvindex_cuda.runtime.constants import UPDATE_THREADS
from kvindex_cuda.runtime.launch import launch

WAVES = 8
"""Most thread blocks of `read_pages` for each multiprocessor."""


KINDS = "sign_votes", "latents"
"""The kinds of step that support pages (see `dispatch.STEPS`)."""


def unserved(config: ParisKVConfig, geometry: Geometry) -> str | None:
    """Return why decode steps over pages do not support a configuration, or None if they support
    it."""
    if why := refusal(config, geometry):
        return why
    kind = kind_of(config, geometry)
    if kind == "tiered_votes":
        return (
            f"coarse: got {config.coarse!r}, allowed is {OPTIONS[KINDS[0]]['coarse']!r} "
            "(pariskv:preset=fast or preset=precise): over pages preset=paper was slower than "
            "FlashAttention from four sequences on; transformers runs it, and vLLM on a CPU"
        )
    if config.sign_decoder != "mean":
        return (
            f"sign_decoder: got {config.sign_decoder!r}, allowed is 'mean' "
            "(pariskv:sign_decoder=mean, or preset=fast): a regression is fitted to one sequence, "
            "and sequences share pages"
        )
    if kind not in KINDS:
        return f"kind of step: got {kind!r}, allowed is one of {', '.join(KINDS)}"
    if geometry.value_in_key and (why := attend_latents.unserved(geometry)):
        return why
    if _encoder(config, geometry, layout_of(config, geometry)) is None:
        return f"head_dim: got {geometry.head_dim}, which the kernel encode does not support"
    return None


class PagedSteps:
    """Runs the decode steps of all layers over `Pages`, for batches of up to `most_rows` sequences.

    Args:
        geometry: Geometry that all layers have.
        config: Configuration of the index.
        pages: Codes and rows of all layers.
        k: Rows to select per KV head, or with `limits` the largest number. This argument and the
            next three are options of the vLLM plug-in.
        sink: Number of first tokens of a sequence that are always attended to.
        local_window: Number of newest tokens that are always attended to. It is at least 1, so that
            a block of 256 tokens is searched only in the step after it was filled, when its codes
            exist.
        dense_below: Sequences of fewer tokens get full attention.
        most_rows: Number of sequences in the largest batch.
        tokens: Length of the longest sequence.
        new_tokens: Largest number of new tokens in one step of the model.
        loads: Whether the argument `slots` of `begin` may also contain the last slots of all blocks
            of all sequences of a batch, so that these blocks are encoded too.
        caches: If rows are on the host, a row cache for each layer, with a group for each KV head.
            All caches must have the same tensor `clocks`, which counts decode steps. `write_pages`
            removes the rows that it overwrites from the cache.
        limits: The limits of the error if the expected error determines the number of rows of each
            KV head, otherwise None.

    Raises:
        ValueError: No kernel supports the configuration.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: ParisKVConfig,
        pages: Pages,
        *,
        k: int,
        sink: int,
        local_window: int,
        dense_below: int,
        most_rows: int,
        tokens: int,
        new_tokens: int,
        loads: bool = False,
        caches: Sequence[RowCache] | None = None,
        limits: PageLimits | None = None,
    ) -> None:
        if why := unserved(config, geometry):
            raise ValueError(f"index: {why}")
        if local_window < 1:
            raise ValueError(f"local_window: got {local_window}, allowed is at least 1")
        if geometry.value_in_key and (limits, caches, pages.scales) != (None, None, None):
            raise ValueError(
                "geometry: got value_in_key=True with limits, caches or scales; allowed is none of "
                "them, because the kernels for latents read all rows unchanged from device memory"
            )
        self._kind = kind_of(config, geometry) or KINDS[0]  # `unserved` has checked it
        self._geometry, self._config, self._pages, self._k = geometry, config, pages, k
        self._errors = limits
        self._caches = [None] * len(pages.rows) if caches is None else list(caches)
        self._limits = dict(sink=sink, window=local_window, dense_below=dense_below)
        device, layers, G = geometry.device, len(pages.rows), geometry.kv_heads
        self._most_rows, blocks = most_rows, -(-tokens // BLOCK)
        codes = pages.codes[0]
        record = codes.stride(1) if G > 1 else codes.stride(0)
        self._layout = PagedLayout(geometry.head_dim, config.magnitude_bits, record)
        encoder = _encoder(config, geometry, self._layout)
        assert encoder is not None  # `unserved` has checked this
        self._encoder: Encoder = encoder
        searched = [max(count * BLOCK - sink, 0) for count in range(blocks + 1)]
        of = config.candidates if limits is None else partial(row_budget.candidates_of, config)
        candidates = [of(count, k) if count else 0 for count in searched]
        self._most = max(room_of(self._kind, blocks * BLOCK, max(candidates)), 1)
        self._candidates = torch.tensor(candidates, dtype=torch.int32, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._codes, self._rows = (zeros(layers, most_rows, max(blocks, 1)) for _ in range(2))
        self._segments: Tensor | None = None
        if caches is not None:
            _check_caches(self._caches, pages)
            self._segments = zeros(most_rows, max(blocks, 1), dtype=torch.int32)
        self._length, self._resident_count = zeros(most_rows), zeros(most_rows)
        self._counted, self._wanted = (zeros(most_rows, dtype=torch.int32) for _ in range(2))
        self._scales = zeros(layers, most_rows, G, dtype=torch.float32)
        filled = min(new_tokens, new_tokens // BLOCK + most_rows)
        self._due = zeros(1 + filled + (most_rows * blocks if loads else 0))
        seen = torch.arange(max(blocks, 1) * BLOCK, device=device) >= sink
        self._valid = words_of(seen[None], max(blocks, 1)).expand(most_rows, -1, -1).contiguous()
        self._none = torch.empty(0, 0, 0, 0, device=device)
        self._arena, self._reserved = Arena(device), 0
        self._steps: dict[int, tuple[BaseStep, list[State]]] = {}

    def begin(
        self,
        tables: Tensor,
        lengths: Tensor,
        slots: Tensor,
        *,
        rows: int,
        whole: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        """Read the engine's tables before a step of the model, and encode the blocks that have
        become full. Do not call this during the capture of a CUDA graph.

        Args:
            tables: Pages of each sequence, int32 `[R, blocks]`.
            lengths: Length of each sequence including its new token, int32 `[R]`; 0 for an unused
                entry.
            slots: Slots to which new tokens are written, int64 `[T]`; below 0 if a token is not
                written.
                Blocks whose last slot is among them are encoded by the next call.
            rows: Number of sequences for which `attend` will run: `R`, or 0 if it will not run.
            whole: True for each sequence that gets full attention whatever its length, bool `[R]`;
                None if there is no such sequence.
            longest: No sequence of these `R` is longer; None if the host does not know.
        """
        self._encode_due()
        if rows > self._most_rows:
            raise ValueError(f"rows: got {rows} sequences, allowed are up to {self._most_rows}")
        new, errors = bool(rows) and rows not in self._steps, self._errors
        if rows:
            self._scales.zero_()
        if errors is not None:
            errors.begin_step(lengths[:rows], longest=longest)
        layers, codes = len(self._pages.rows), self._pages.codes[0]
        splits = WAVES * multiprocessors(self._geometry.device) // (layers * max(rows, 1))
        most = -(-self._codes.shape[2] * self._geometry.kv_heads * (BLOCK // 16) // UPDATE_THREADS)
        launch(
            "append/read_pages.cu",
            "read_pages",
            (max(1, min(splits, most)) if rows else 1, rows + 1, layers if rows else 1),
            (UPDATE_THREADS,),
            arguments=dict(
                tables=of_type("tables", tables, torch.int32),
                lengths=of_type("lengths", lengths, torch.int32),
                slots=of_type("slots", slots, torch.int64),
                whole=None if whole is None else of_type("whole", whole, torch.bool),
                bases=self._pages.bases,
                candidates=self._candidates,
                codes=self._codes,
                rows=self._rows,
                length=self._length,
                resident_count=self._resident_count,
                counted=self._counted,
                wanted=self._wanted,
                weight_scale=self._scales,
                due=self._due,
                segments=self._segments,
                clock=self._caches[0].clocks if self._caches[0] else None,
                limits=errors.table if errors else None,
                known=errors.known if errors else None,
                variances=errors.variances if errors else None,
                batch=rows,
                room=self._most_rows,
                row=self._codes.shape[2],
                table=tables.stride(0),
                pages=len(codes),
                parts=codes.shape[2],
                kv_heads=self._geometry.kv_heads,
                count=len(slots),
                most=len(self._due) - 1,
                codes_head=self._layout.head_bytes,
                weights=self._layout.weights,
                **self._pages.strides,
                **self._limits,
            ),
        )
        if new:
            self._grow(rows)
            step, states = self._steps[rows] = self._step_for(rows), self._states()
            g = self._geometry
            queries = torch.zeros(rows, g.q_heads, g.head_dim, dtype=g.dtype, device=g.device)
            # compiles kernels now, as none can be compiled in a graph
            unused = None if errors is None else torch.empty_like(errors.squares[0])
            step(queries, replace(states[0], found_sum=None, squares=unused))

    def attend(
        self, layer: int, queries: Tensor, output: Tensor, *, sinks: Tensor | None = None
    ) -> None:
        """Compute attention for queries `[R, H, D]`, one per sequence, and write the result to
        `output` `[R, H, D]`. `sinks` `[H]` are the logits of learned sinks, if the layer has any.

        `R` must be the argument `rows` of the last call of `begin`. If a CUDA graph captures this
        method, `R` must be the argument `rows` of the last call of `begin` before the capture.
        """
        step, states = self._steps[len(queries)]
        own, state = step.output, states[layer]
        if sinks is not None and self._errors is not None:  # they have a part of the weights
            lse = sinks.float().expand(len(queries), -1).contiguous()
            state = replace(state, limit_lse=lse)
        step.output = output
        step(queries.contiguous(), state)
        step.output = own  # `output` may be memory of a graph, which the next capture uses again
        if sinks is not None:
            output.copy_(with_sink_logits(output, step.lse, sinks))

    def _encode_due(self) -> None:
        scales = self._pages.key_scales
        self._encoder.of_pages(
            self._pages.rows[0],
            due=self._due,
            bases=self._pages.bases,
            layers=len(self._pages.rows),
            parts=self._pages.codes[0].shape[2],
            fp8=None if scales is None else (self._geometry.dtype, scales),
            **self._pages.strides,
        )

    def _grow(self, rows: int) -> None:
        """Allocate buffers for steps of `rows` sequences, or of twice as many as before if that is
        more.

        The earlier, smaller buffers stay allocated, because CUDA graphs contain their addresses.
        All buffers together take less than twice the memory of the newest ones.
        """
        if rows <= self._reserved:
            return
        reserved = min(max(rows, 2 * self._reserved), self._most_rows)
        self._step_for(reserved)
        self._reserved = reserved

    def _step_for(self, rows: int) -> BaseStep:
        """Return a decode step for `rows` sequences. All such steps use the same memory for their
        buffers."""
        g, options = self._geometry, options_of(self._kind, self._config)
        options |= dict(batch=rows, k=self._k, most=self._most, ragged=True, arena=self._arena)
        options |= dict(blocks=self._codes.shape[2], multiprocessors=multiprocessors(g.device))
        options |= dict(limited=self._errors is not None)
        return STEPS[self._kind](g, self._layout, **options)

    def _states(self) -> list[State]:
        """Return the `State` of each layer, the tensors that decode steps read."""
        g, kept = self._geometry, self._pages.rows[0]
        common: dict[str, Any] = dict(
            valid=self._valid,
            length=self._length,
            wanted=self._wanted,
            counted=self._counted,
            resident=self._none,
            resident_mask=self._none,
            resident_count=self._resident_count,
            row_bytes=kept.stride(2) * kept.element_size(),
            page_head_bytes=(kept.stride(1) if g.kv_heads > 1 else 0) * kept.element_size(),
            sink=self._limits["sink"],
            segments=self._segments,
        )
        fp8: Sequence[dict[str, Any]] = [{} for _ in self._pages.rows]
        if self._pages.scales is not None:
            fp8 = [
                dict(codec="fp8", key_scale=key, value_scale=value)
                for key, value in self._pages.scales
            ]
        errors: Sequence[dict[str, Any]] = [{} for _ in self._pages.rows]
        if self._errors is not None:
            shared, names = self._errors, ("variances", "found_sum", "squares")
            limits = zip(shared.variances, shared.found, shared.squares, strict=True)
            errors = [dict(zip(names, own, strict=True), known=shared.known) for own in limits]
        kinds = "codes", "rows", "weight_scale", "cache"
        places = zip(self._codes, self._rows, self._scales, self._caches, strict=True)
        return [
            State(**dict(zip(kinds, place, strict=True)), **common, **coded, **limited)
            for place, coded, limited in zip(places, fp8, errors, strict=True)
        ]


def _encoder(config: ParisKVConfig, geometry: Geometry, layout: Layout) -> Encoder | None:
    """Return the encoder for whole blocks of tokens, or None if no kernel supports the layout of
    codes."""
    known = Encoding.of(config, geometry, ops)
    return encoder_of(config, layout, known.rotation, known.levels)


def _check_caches(caches: Sequence[RowCache | None], pages: Pages) -> None:
    """Raise ValueError unless each layer whose pages are on the host has a row cache of the right
    size."""
    rows = pages.rows[0]
    shape = rows.shape[1], rows.shape[3] * rows.element_size()
    found = {
        (len(one.tags), one.row_bytes, one.clocks.data_ptr(), one.clocks.numel())
        for one in caches
        if one is not None
    }
    if len(caches) != len(pages.rows) or {one[:2] for one in found} != {shape} or len(found) > 1:
        raise ValueError(
            f"caches: got {len(caches)} caches with (groups, row_bytes) in "
            f"{[one[:2] for one in found]}; each of {len(pages.rows)} layers needs a cache with "
            f"{shape}, and all caches must share one tensor `clocks`"
        )
    if pages.tokens * len(rows) >= 2**31:
        raise ValueError(
            f"pages: got {len(rows)} pages of {pages.tokens} tokens, allowed are fewer than 2^31 "
            "tokens in total"
        )
