"""The executor of a ParisKV index: it runs appends, searches and decode steps with fused kernels.

Codes stay on the device, in blocks. A search reads tensors at fixed addresses, which appends update
in place, and writes to buffers that are allocated once. So a search that was captured in a CUDA
graph can be replayed while the index grows. Without a graph, a search returns new tensors. The
methods for appends are in `append/codes.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Attended, Contents, ErrorLimit, Hits, Rows
from kvindex.core.protocol.results import MOST_FOUND
from kvindex.core.resident import ResidentRows
from kvindex.pariskv import row_budget
from kvindex.pariskv.config import NOMINAL, ParisKVConfig
from kvindex.storage.store import AddressedRows, AttendsToAllRows, CenteredRows, PlacedRows
from kvindex_cuda.memory.code_blocks import CodeBlocks
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.append.codes import AppendedCodes
from kvindex_cuda.pariskv.append.encode import Encoder, encoder_of
from kvindex_cuda.pariskv.append.stage_token import load_stage_token, stage_token, token_to_stage
from kvindex_cuda.pariskv.append.update_state import update_state
from kvindex_cuda.pariskv.device_state import FixedCopy, State, opened, put, put_tiers, put_valid
from kvindex_cuda.pariskv.dispatch import STEPS, kind_of, layout_of, room_of, unreadable
from kvindex_cuda.pariskv.steps.all_rows import AllRows
from kvindex_cuda.pariskv.steps.graph import Replay, Replays
from kvindex_cuda.pariskv.steps.hits import ordered_hits
from kvindex_cuda.pariskv.steps.ragged_batch import BatchRow, ParisKVBatch
from kvindex_cuda.pariskv.steps.several_tokens import SeveralTokens
from kvindex_cuda.pariskv.steps.workspace import Use, shared, with_headroom
from kvindex_cuda.runtime.launch import capturing


class ParisKVExecutor(AppendedCodes):
    """Runs a ParisKV index with fused kernels. The protocol `kvindex.core.protocol.Executor`
    documents its methods.

    Args:
        geometry: Geometry of the index.
        config: Configuration of the index.
        kind: Kind of decode step, a key of `dispatch.STEPS`.
        codes: See `AppendedCodes`.
        encoder: See `AppendedCodes`.

    Attributes:
        cache: Cache of rows that `attend` fetched from the host, or None if no rows are on the
            host. `search` fetches no rows.
    """

    _contents: Contents  # set by the first `update`

    def __init__(
        self,
        geometry: Geometry,
        config: ParisKVConfig,
        kind: str,
        codes: CodeBlocks,
        encoder: Encoder | None,
    ) -> None:
        super().__init__(codes, encoder)
        self._geometry, self._config, self._kind = geometry, config, kind
        self._store: object = None
        self._rows: AddressedRows | None = None  # the store's rows, if kernels can read them
        self._centered: CenteredRows | None = None  # the same rows, if they may have a center
        self._ticket = torch.zeros(1, dtype=torch.int32, device=geometry.device)  # of `stage_token`
        self.cleared()
        self._length = len(codes)

    @property
    def length(self) -> Tensor | None:
        """Number of tokens in the index, as a tensor on the device at a fixed address.

        Int64 `[1]`, or None before the first search.
        """
        return None if self._state is None else self._state.length

    @property
    def limits_error(self) -> bool:
        """True if searches and decode steps can choose the number of rows by their expected
        error."""
        return STEPS[self._kind].limits and self._config.sampling != "none"

    @property
    def limits_steps(self) -> bool:
        """True if decode steps can have a limit of the error."""
        return self.limits_error

    @property
    def attends(self) -> bool:
        """True if kernels can attend to the rows of the index's store."""
        return self._rows is not None

    def explain(self) -> str:
        """Return which kernels the index uses for appends and for attention, and why."""
        return "\n".join(
            [
                f"executor: fused {self._kind}",
                f"append: {'kernels write codes' if self._encode else 'codes are made op by op'}",
                f"attend: {unreadable(self._contents.rows, self._geometry) or 'in one go'}",
            ]
        )

    def cache_use(self) -> tuple[int, int, int]:
        """Return the number of slots of the row cache per KV head, and how many rows were looked up
        and found. Waits for the device."""
        cache = self.cache  # read only once: another thread may set it to None
        return (0, 0, 0) if cache is None else (cache.capacity, *cache.use())

    def cleared(self) -> None:
        """Discard the state that searches and decode steps read. The next search creates a new
        state."""
        self._state: State | None = None
        self._uses: list[Use] = []  # of several with equal k, the newest is last
        self.cache: RowCache | None = None
        self._regression: object = None  # the regression that was copied to the state
        self._length = self._read = 0  # tokens; full blocks that `State.largest` includes
        self._promised = 0  # tokens for which `reserve` made room
        self._replays = Replays(self._geometry.device)
        self._found_sum: Tensor | None = None  # number of rows that captured steps found
        self._found_histogram: Tensor | None = None  # how often a captured step found each number
        self._variances = FixedCopy()  # the limit that steps read, float32 [B, G]
        self._limit_lse: Tensor | None = None  # float32 [B, H], read together with the limit
        self._version, self._text = object(), object()  # see `BatchRow`
        # (number of tokens, whether the error is limited) -> their decode steps
        self._several: dict[tuple[int, bool], SeveralTokens] = {}
        # number of tokens -> the limit that their decode steps have, and its version
        self._limits_of: dict[int, tuple[Tensor, int | None]] = {}
        self._all: dict[int, AllRows] = {}  # number of tokens -> steps that attend to all rows

    def update(self, contents: Contents) -> ParisKVExecutor:
        """Adapt to a change of the index's tokens or batch size. Return the executor for the
        changed index."""
        if contents.codes is not self.codes:
            return self._over(contents.codes).update(contents)
        self._contents, self._version = contents, object()
        if contents.rows is not self._store:
            self._adopt(contents.rows)
        first = min(self._length, contents.length) // BLOCK
        if contents.length < self._length:
            self._text = object()
            if self.cache is not None:
                self.cache.forget()
        self._length = contents.length
        self._put_open(contents)
        if self._state is not None:
            if self._state.codes is not self.codes.table:  # the batch size has changed
                self.cleared()
                return self.update(contents)
            self._begin_cache()
            self._update(self._state, first)
            if self._rows is not None and any(use.captured for use in self._uses):
                self._rows.wait()  # a replayed graph does not wait by itself
        return self

    def _adopt(self, store: object) -> None:
        self._store, self._rows, self._centered = store, None, None
        if isinstance(store, AddressedRows) and unreadable(store, self._geometry) is None:
            self._rows = store
            self._centered = store if isinstance(store, CenteredRows) else None

    def _over(self, codes: object) -> ParisKVExecutor:
        """Return a new executor for codes that are a reordered or expanded copy of this executor's
        codes."""
        if not isinstance(codes, CodeBlocks):
            raise TypeError(f"codes: got {type(codes).__name__}, allowed is CodeBlocks")
        return ParisKVExecutor(self._geometry, self._config, self._kind, codes, self._encode)

    def warm_up(self, k: int, tokens: int, limited: bool = False) -> None:
        """Allocate the buffers and compile the kernels for searches of `k` rows in up to `tokens`
        tokens. `limited` is True for searches with a limit of the error."""
        room, use = self._room(k, tokens, limited), self._newest(k, limited)
        if use is None or use.step.most < room:
            self._begin(k, room, limited)

    def reserve(self, tokens: int) -> None:
        """Allocate memory for the codes of `tokens` tokens and for their candidates, so that later
        steps allocate nothing."""
        self.codes.reserve_tokens(tokens)
        self._promised = max(self._promised, tokens)
        for k, limited in {(use.step.k, use.step.limited) for use in self._uses}:
            self.warm_up(k, self._promised, limited)

    def _room(self, k: int, tokens: int, limited: bool) -> int:
        """Return the number of tokens or candidates for which the buffers of a decode step need
        room, if it selects up to `k` rows from an index of `tokens` tokens."""
        most = self._config.most_candidates(tokens, min(k, NOMINAL) if limited else k)
        return room_of(self._kind, tokens, min(tokens, max(most, 2 * k)) if limited else most)

    def search(self, queries: Tensor, k: int) -> Hits:
        """Return the `k` best rows for queries `[B, H, D]`."""
        use, state = self._ready(k)
        step = use.step
        step.select(queries.contiguous(), state)
        return ordered_hits(step, use.places)

    def search_within(self, queries: Tensor, k: int, limit: ErrorLimit) -> Hits:
        """Sample as many rows per KV head as a limit of the error asks for, at most `k`."""
        use, state = self._ready(k, limit=limit)
        use.step.select(queries.contiguous(), state)
        return ordered_hits(use.step, use.places)

    def attend(
        self,
        queries: Tensor,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None = None,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Search for `k` rows, or for as many as `limit` asks for, and attend to them and to the
        resident rows (sink and local window)."""
        use, state = self._ready(k, resident, wrong, limit)
        step = use.step
        output = step(queries.contiguous(), state)
        return Attended(output, step.lse, step.found.view(len(queries), -1))

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        k: int,
        wrong: Tensor | None,
        graphs: bool,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Write a token to the window, search for `k` rows, or for as many as `limit` asks for, and
        attend to these rows, the sink and the window.

        When several decode steps in succession have read the same tensors, the step is captured as
        a CUDA graph, which later steps replay.
        """
        if graphs and (replay := self._replay_of(resident, k, wrong, limit)):
            assert self._rows is not None
            self._rows.wait()
            replay.acquire()
            stage_token(resident, token, window, queries, replay.asked)
            return Attended(*replay())
        if capturing(self._geometry.device):
            raise RuntimeError(
                "graph: decode_step cannot be captured, because the host passes the token's "
                "position; capture captured_step, which reads it on the device (docs/cuda.md)"
            )
        stage_token(resident, token, window, queries)
        return self.attend(queries, resident, k, wrong, limit)

    def prepare_replay(
        self,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> State:
        """Prepare the capture or the replay of a CUDA graph on the current stream
        (`CapturesStep.prepare_replay`). A captured graph may be replayed as long as this method
        returns the same object as before the capture."""
        use = self._with_room(k, limit is not None)
        if self._rows is not None:
            self._rows.wait()
        use.step.acquire()
        shape = len(self.codes.table), self._geometry.kv_heads
        counts: dict[str, Any] = dict(dtype=torch.int64, device=self._geometry.device)
        if self._found_sum is None or self._found_sum.shape != shape:
            self._found_sum = torch.zeros(shape, **counts)
            self._found_histogram = None
            if not use.step.stages:
                load_stage_token(self._geometry)  # a kernel cannot be loaded during a capture
        if limit is not None and self._found_histogram is None:
            self._found_histogram = torch.zeros(MOST_FOUND + 1, **counts)
        return self._reads(use, resident, wrong, limit)

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run a decode step that a caller's CUDA graph may capture: the step reads all counts on
        the device, and the limit that was passed to `prepare_replay`."""
        if self._found_sum is None or (limit is not None and self._found_histogram is None):
            raise RuntimeError("graph: call prepare_replay() before captured_step()")
        histogram = None if limit is None else self._found_histogram
        known = None if limit is None else replace(limit, resident_lse=None)
        use, state = self._ready(k, resident, wrong, known)
        more: dict[str, Any] = dict(found_sum=self._found_sum, found_histogram=histogram)
        if limit is not None and limit.resident_lse is not None:
            more["limit_lse"] = limit.resident_lse.contiguous()
        if use.step.stages:
            more |= dict(token=token_to_stage(self._geometry, resident, token), ticket=self._ticket)
        else:
            stage_token(resident, token, None, queries, ticket=self._ticket)
        output = use.step(queries.contiguous(), replace(state, **more))
        return Attended(output, use.step.lse, self._found_sum, histogram)

    @property
    def captures_tokens(self) -> bool:
        """True if a caller can capture decode steps of several tokens in a CUDA graph."""
        return not self._geometry.value_in_key

    def prepare_tokens(
        self,
        resident: ResidentRows,
        k: int,
        tokens: int,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> State:
        """Prepare the capture or the replay of a decode step of several tokens on the current
        stream (`CapturesTokens.prepare_tokens`)."""
        kind = tokens, limit is not None
        rows, several = self._rows, self._several.get(kind)
        assert rows is not None
        made_of = self._version, self.cache, resident, wrong
        if several is None:
            given = self._geometry, self._config, self._kind, self._layout
            sizes = tokens, len(self.codes.table), limit is not None
            several = self._several[kind] = SeveralTokens(*given, *sizes)
            self._limits_of.pop(tokens, None)
        if limit is not None:
            variance, (last, before) = limit.variance, self._limits_of.get(tokens, (None, None))
            # tensors of `torch.inference_mode` do not count their changes
            version = None if variance.is_inference() else variance._version
            if last is not variance or version is None or version != before:
                several.put_limit(variance)
                self._limits_of[tokens] = variance, version
        if (reads := several.prepared(made_of, k)) is not None:
            rows.wait()
            return reads
        row, counts = self.batch_row(wrong), self._contents.counts.tolist()
        each = [replace(row, count=count) for count in counts]
        self._begin_cache()
        made_of = self._version, self.cache, resident, wrong
        return several.prepare(each, made_of, k)

    def captured_tokens(
        self,
        queries: Tensor,
        tokens: Rows,
        resident: ResidentRows,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run a decode step of several tokens that a caller's CUDA graph may capture.

        Args:
            queries: `[B·T, H, D]`, the `T` tokens of each sequence after each other.
            tokens: Keys `[B·T, G, 1, D]` and values `[B·T, G, 1, Dv]`.
            resident: The rows that were passed to `prepare_tokens`.
            limit: The limit that was passed to `prepare_tokens`, or None. Here its `resident_lse`
                is `[B·T, H]`.
        """
        several = self._several.get((len(queries) // len(self.codes.table), limit is not None))
        if several is None:
            raise RuntimeError("graph: call prepare_tokens() before captured_tokens()")
        lse = None if limit is None else limit.resident_lse
        return several.step(queries, tokens, resident, lse)

    @property
    def captures_all(self) -> bool:
        """True if a caller can capture decode steps that attend to all rows."""
        store = self._store
        reads = isinstance(store, AttendsToAllRows) and store.most_tokens > 0
        return self.captures_tokens and self.attends and reads

    def prepare_all(
        self, resident: ResidentRows, tokens: int, skip: int, masked: bool = False
    ) -> object:
        """Prepare the capture or the replay of a decode step of several tokens that attend to all
        rows (`CapturesAll.prepare_all`)."""
        rows, state = self._rows, self._opened_state()
        assert rows is not None
        rows.wait()
        if tokens not in self._all:
            self._all[tokens] = AllRows(self._geometry, tokens, len(self.codes.table))
        valid = state.valid if masked else None
        return self._all[tokens].prepare(rows, state.length, resident, skip, valid)

    def captured_all(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Run a decode step of several tokens that attend to all rows, and that a caller's CUDA
        graph may capture. The arguments are those of `captured_tokens`."""
        every = self._all.get(len(queries) // len(self.codes.table))
        if every is None:
            raise RuntimeError("graph: call prepare_all() before captured_all()")
        return every.step(queries, tokens, resident)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of `hits` and to the resident rows (sink and local window)."""
        k = self._uses[-1].step.k if self._uses else hits.ids.shape[-1]
        use, state = self._ready(k, resident)
        output = use.step.attend(queries.contiguous(), state, hits)
        found = (hits.ids != UNUSED).sum(-1, dtype=torch.int32)
        return Attended(output, use.step.lse, found)

    # The index as a part of a batch

    def new_batch(self) -> ParisKVBatch:
        """Return an object that runs decode steps for several indexes together."""
        return ParisKVBatch(self._geometry, self._config, self._kind, self._layout)

    def batch_row(self, wrong: Tensor | None) -> BatchRow:
        """Return the data about this index for a decode step that processes several indexes
        together. The data is valid until the index changes."""
        state, rows = self._opened_state(), self._rows
        assert rows is not None
        rows.wait()
        state = replace(state, wrong=wrong, **self._places(rows))
        return BatchRow(
            state=state,
            tokens=self._length,
            count=int(self._contents.counts[0]),
            on_host=rows.on_host,
            version=self._version,
            text=self._text,
        )

    # The state that a search reads

    def _replay_of(
        self,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> Replay | None:
        """Return the captured CUDA graph for this decode step, or None if its kernels must be
        launched normally."""
        device, use = self._geometry.device, self._newest(k, limit is not None)
        if use is None or use.outgrown or self._state is None or capturing(device):
            return None
        return self._replays.of(use.step, self._reads(use, resident, wrong, limit))

    def _limit_of(self, limit: ErrorLimit | None) -> dict[str, Any]:
        """Return the fields of `State` that contain a limit of the error, at fixed addresses.

        They are copied there on the current stream.
        """
        if limit is None:
            return dict(variances=None, limit_lse=None)
        variances, lse = self._variances.put(limit.variance), limit.resident_lse
        if lse is None:
            return dict(variances=variances, limit_lse=None)
        if self._limit_lse is None or self._limit_lse.shape != lse.shape:
            self._limit_lse = torch.empty(lse.shape, device=lse.device)
        self._limit_lse.copy_(lse)
        return dict(variances=variances, limit_lse=self._limit_lse)

    def _reads(
        self,
        use: Use,
        resident: ResidentRows,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> State:
        """Return the `State` that the kernels of a decode step read. If the tensors are those of
        the last call, return the same object again."""
        rows = self._rows
        assert rows is not None
        center = self._centered.center if self._centered is not None else None
        limits = self._limit_of(limit)
        made_of = self._state, resident, wrong, rows.table, center, self.cache, *limits.values()
        if use.reads is None or any(
            old is not new for old, new in zip(use.reads[0], made_of, strict=True)
        ):
            assert self._state is not None
            state = replace(
                self._state,
                wanted=use.wanted,
                cache=self.cache,
                resident=resident.rows,
                resident_mask=resident.mask,
                resident_count=resident.count,
                wrong=wrong,
                **limits,
                **self._places(rows),
            )
            use.reads = made_of, state
        return use.reads[1]

    def _places(self, rows: AddressedRows) -> dict[str, Any]:
        """Return the fields of `State` that describe where rows are stored, and in which format."""
        on_device = rows.on_device if isinstance(rows, PlacedRows) else None
        center = self._centered.center if self._centered is not None else None
        return dict(
            rows=rows.table.contiguous(),
            on_device=None if on_device is None else on_device.contiguous(),
            row_bytes=rows.row_bytes,
            codec=rows.row_codec,
            row_center=None if center is None else center.contiguous(),
            on_host=rows.on_host,
        )

    def _ready(
        self,
        k: int,
        resident: ResidentRows | None = None,
        wrong: Tensor | None = None,
        limit: ErrorLimit | None = None,
    ) -> tuple[Use, State]:
        """Prepare a decode step: provide buffers that are large enough, and the kernels' arguments.

        Several layers share the buffers, so the current stream waits until the previous use of the
        buffers has finished. The results of the step are written to new tensors. `resident` is
        required for attention, but not for a search.

        Returns:
            The object with the buffers and launches of the step, and the state that the kernels
            read.
        """
        captured, use = capturing(self._geometry.device), self._with_room(k, limit is not None)
        assert self._state is not None
        use.captured |= captured
        if not captured:
            if self._rows is not None:
                self._rows.wait()
            use.step.acquire()
        use.step.renew()
        if resident is not None:
            return use, self._reads(use, resident, wrong, limit)
        if limit is None:
            return use, replace(self._state, wanted=use.wanted)
        lse = None if limit.resident_lse is None else limit.resident_lse.contiguous()
        variances = limit.variance.contiguous()
        return use, replace(self._state, wanted=use.wanted, variances=variances, limit_lse=lse)

    def _with_room(self, k: int, limited: bool = False) -> Use:
        """Return an object whose buffers are large enough for a decode step that selects `k` rows,
        or up to `k` rows if it is limited.

        This is the object that was created last for `k`, or a new one if its buffers are too small.
        """
        use = self._newest(k, limited)
        if use is not None and not use.outgrown:
            return use
        if capturing(self._geometry.device):
            raise RuntimeError(
                f"graph: no buffers that are large enough for a search of k = {k} rows; call "
                "warm_up() or run the same search once before the capture"
            )
        promised = self._room(k, self._promised, limited) if self._promised else 0
        return self._begin(k, max(with_headroom(self._need(k, limited)), promised), limited)

    def _begin(self, k: int, most: int, limited: bool = False) -> Use:
        """Create a decode step object that selects `k` rows, and store it in `_uses`.

        Its buffers have room for `most` tokens if the step computes tiered votes, otherwise for
        `most` candidates.
        """
        self._opened_state()
        self._begin_cache()
        device, (batch, blocks) = self._geometry.device, self.codes.table.shape
        sizes: dict[str, Any] = dict(batch=batch, blocks=blocks, k=k, most=max(most, 1))
        sizes["limited"] = limited
        step = shared(self._geometry, self._layout, self._kind, self._config, **sizes)
        wanted = torch.zeros(batch, dtype=torch.int32, device=device)
        use = Use(step, wanted, torch.arange(k, device=device))
        put(wanted, use.want(self._candidates(k, limited), self._need(k, limited)))
        others = (u for u in self._uses if (u.step.k, u.step.limited) != (k, limited) or u.captured)
        self._uses = [*others, use]
        return use

    def _opened_state(self) -> State:
        """Return the `State` of the index, the tensors that the kernels of a decode step read.

        Create it if there is none. The fields about rows (keys and values) are not set.
        """
        if self._state is None:
            self._regression, self._read = None, 0  # an earlier state may be incomplete
            state = opened(self._geometry, self.codes.table, self._contents)
            self._update(state, 0)
            self._state = state  # set only when the state is complete
        return self._state

    def _begin_cache(self) -> None:
        """Create a row cache if rows are on the host and kernels use a cache."""
        rows, latents = self._rows, self._geometry.value_in_key  # kernels for latents use no cache
        if self.cache is None and rows is not None and rows.on_host and not latents:
            groups = len(self.codes.table) * self._geometry.kv_heads
            self.cache = RowCache(groups, rows.row_bytes, self._geometry.device)

    def _candidates(self, k: int, limited: bool = False) -> list[int]:
        """Return the number of candidates `C` of each sequence."""
        counts = self._contents.counts
        if limited:
            return [row_budget.candidates_of(self._config, n, k) for n in counts.tolist()]
        return [self._config.candidates(n, k) for n in counts.tolist()]

    def _need(self, k: int, limited: bool = False) -> int:
        """Return how large the buffers of a decode step that selects `k` rows must be.

        The result is for the present length of the index. It is a number of tokens or of
        candidates (`room_of`).
        """
        return room_of(self._kind, self._length, max(self._candidates(k, limited)))

    def _newest(self, k: int, limited: bool = False) -> Use | None:
        asked = k, limited
        steps = ((use, use.step) for use in reversed(self._uses))
        return next((use for use, step in steps if (step.k, step.limited) == asked), None)

    def _update(self, state: State, first: int) -> None:
        """Update the tensors that decode steps read, in place, after tokens of the index changed.

        `first` is the number of the first block of tokens that changed.

        If all sequences have equally many valid tokens, this takes one kernel launch.
        """
        contents, valid = self._contents, self._contents.valid
        start, tokens, counts = first * BLOCK, contents.length, contents.counts.tolist()
        real = valid is None or start >= contents.real_from
        together: dict[str, Any] = {"first": first if real else None}
        if alike := len(set(counts)) == 1:
            together["count"] = counts[0]
        else:
            put(state.counted, counts)
        for use in self._uses:
            candidates = self._candidates(use.step.k, use.step.limited)
            asked = use.want(candidates, room_of(self._kind, tokens, max(candidates)))
            if alike and use is self._uses[-1]:
                together |= dict(wanted=use.wanted, candidates=asked[0])
            else:
                put(use.wanted, asked)
        if state.largest is not None:
            full = tokens // BLOCK
            begin = self._read if self._read <= full else 0
            together |= dict(codes_from=begin, layout=self._layout)
            self._read = full
        update_state(state, tokens, **together)
        if valid is not None and not real:
            put_valid(state, valid, first, -(-tokens // BLOCK))
        regression = contents.regression
        if state.regression is not None and regression is not None:
            if regression is not self._regression:
                state.regression.copy_(regression())
            self._regression = regression
        if "histogram" in contents.statistics:
            bounds = [self._config.tier_bounds(n) for n in counts]
            put_tiers(state, contents.statistics["histogram"], bounds)


def executor_of(
    geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
) -> ParisKVExecutor | None:
    """Return the executor of a ParisKV index, or None if no fused step supports it."""
    kind = kind_of(config, geometry)
    if kind is None:
        return None
    layout = layout_of(config, geometry)
    encoder = encoder_of(config, layout, rotation, levels)
    centered = bool(config.center)
    unit = BLOCK if config.weights == "log" else 1
    codes = CodeBlocks(layout, geometry.kv_heads, geometry.device, unit=unit, centered=centered)
    return ParisKVExecutor(geometry, config, kind, codes, encoder)
