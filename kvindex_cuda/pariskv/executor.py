"""ParisKV on its kernels: codes in blocks, and searches that no code leaves the device for.

What a search reads lies at fixed addresses and is updated in place as tokens come and go; what it
writes on the way are buffers made once, its results are new each time. So a search that was
captured in a CUDA graph can be replayed while the index grows. Longer than most files: what a
search reads, who updates it and when it is made anew are one matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.ops.coarse import TIERS
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.code_blocks import CodeBlocks
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.base_step import State, words_of
from kvindex_cuda.pariskv.dispatch import kind_of, layout_of, room_of
from kvindex_cuda.pariskv.graph import Replay, Replays
from kvindex_cuda.pariskv.shared_step import SharedStep, capturing, shared
from kvindex_cuda.pariskv.stage_token import stage_token
from kvindex_cuda.pariskv.update_state import update_state

HEADROOM = 2**16
"""Room over what is needed, and no more than as much again: buffers are made anew past it."""

LAST = torch.iinfo(torch.int64).min


def serves(index: Any) -> bool:
    """Whether fused kernels serve this ParisKV; else its ops run one by one."""
    return kind_of(index) is not None


@dataclass
class _Use:
    """A step, and what an index asks of it: wanted int32 `[B]`, never more than it has room for.

    places: `0` to `k - 1`; captured: whether a graph holds it, so that it must
    stay; need: what it must have room for now; reads: what it read last beside a `ResidentRows`,
    and of what that was made.
    """

    step: SharedStep
    wanted: Tensor
    places: Tensor
    captured: bool = False
    need: int = 0
    reads: tuple[tuple[object, ...], State] | None = None

    def want(self, candidates: list[int], need: int) -> list[int]:
        """Have so many candidates asked for, of each row of the batch, for which room is needed.

        Gives what `wanted` must then hold.
        """
        self.need = need
        return [min(each, self.step.most) for each in candidates]

    @property
    def outgrown(self) -> bool:
        """Whether there is room for fewer than that."""
        return self.need > self.step.most


class Fused:
    """What `ParisKV` keeps beside its codes when its kernels are fused.

    codes: blocks that take the place of the index's `Columns`, new ones unless given. cache: of
    rows that `attend` fetched from the host; `search` fetches none.
    """

    def __init__(self, index: Any, codes: CodeBlocks | None = None) -> None:
        self._geometry, self._config = index.geometry, index.config
        self._layout, self._kind = layout_of(index), kind_of(index) or ""
        if codes is None:
            codes = CodeBlocks(self._layout, index.geometry.kv_heads, index.geometry.device)
        self.codes = codes
        self.cleared()
        self._length = len(codes)  # with their centers

    @property
    def length(self) -> Tensor | None:
        """Tokens of the index on the device, int64 `[1]` at one address; None before a step."""
        return None if self._state is None else self._state.length

    def attends(self, store: Any) -> bool:
        """Whether `attend` reads this store's rows: in whole chunks of 8 elements."""
        return isinstance(store, HostStore) and self._geometry.value_dim % 8 == 0

    def cleared(self) -> None:
        """Everything was forgotten."""
        self._state: State | None = None
        self._uses: list[_Use] = []  # of each k the newest one last
        self.cache: RowCache | None = None
        self._length = 0
        self._replays = Replays(self._geometry.device)

    def changed(self, index: Any) -> Fused:
        """Tokens came or went, or the batch did: what serves the index from here on."""
        if index._codes is not self.codes:  # reordered or repeated
            return Fused(index, index._codes).changed(index)
        first = min(self._length, len(index)) // BLOCK
        if self.cache is not None and len(index) < self._length:
            self.cache.forget()
        self._length = len(index)
        if "centers" in index._learned and self._length:
            index._codes.put_centers(index._learned["centers"], first)
        if self._state is not None:
            if self._state.codes is not self.codes.table:  # another batch has begun
                self.cleared()
                return self.changed(index)
            self._update(index, self._state, first)
            if any(use.captured for use in self._uses):
                index._store.wait()  # nobody does when a graph is replayed
        return self

    def warm_up(self, index: Any, k: int, most: int, tokens: int) -> None:
        """Have a step for `k` rows with room for `most` candidates of so many tokens."""
        room, use = room_of(self._kind, tokens, most), self._newest(k)
        if use is None or use.step.most < room:
            self._begin(index, k, room)

    def reserve(self, index: Any, tokens: int) -> None:
        """As `ParisKV.reserve`: of rows, which may be refused, then of codes."""
        if hasattr(index._store, "reserve_tokens"):
            index._store.reserve_tokens(tokens)
        self.codes.reserve_tokens(tokens)

    def search(self, index: Any, queries: Tensor, k: int) -> Hits:
        """As `ParisKV.search`: the group's candidates, reranked, the best `k`."""
        use, state = self._ready(index, k)
        step = use.step
        step.select(queries.contiguous(), state)
        # scores descending, then ids ascending, as one integer
        bits = (step.scores + 0.0).view(torch.int32)
        order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | (0xFFFFFFFF - step.ids)
        order.masked_fill_(use.places >= step.found[:, None], LAST)
        order, at = order.sort(dim=-1, descending=True)
        unused = order == LAST
        ids = (0xFFFFFFFF - (order & 0xFFFFFFFF)).masked_fill_(unused, UNUSED)
        scores = step.scores.gather(-1, at).masked_fill_(unused, float("-inf"))
        shape = (len(queries), self._geometry.kv_heads, k)
        return Hits(ids.view(shape), scores.view(shape))

    def attend(
        self,
        index: Any,
        queries: Tensor,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `protocol.Attends.attend`; wrong: int32 `[]`, set to 1 where a query is not finite."""
        use, state = self._ready(index, k, resident, wrong)
        output = use.step(queries.contiguous(), state)
        return output, use.step.found.view(len(queries), -1)

    def decode_step(
        self,
        index: Any,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        k: int,
        wrong: Tensor | None,
        graphs: bool,
    ) -> tuple[Tensor, Tensor]:
        """As `ParisKV.decode_step`; wrong: as in `attend`.

        What is the same for the third time is captured, if it may be, and replayed from then on.
        """
        if graphs and (replay := self._replay_of(index, resident, k, wrong)):
            index._store.wait()
            replay.acquire()
            stage_token(resident, token, window, queries, replay.asked)
            output, _, found = replay()
            return output, found
        if capturing(self._geometry.device):
            raise RuntimeError(
                "graph: got a layer's step, which puts a token where the host says it is; allowed "
                "is index.attend, beside rows that are added between the replays (docs/cuda.md)"
            )
        stage_token(resident, token, window, queries)
        return self.attend(index, queries, resident, k, wrong)

    def attend_hits(
        self, index: Any, queries: Tensor, hits: Hits, resident: ResidentRows
    ) -> Tensor:
        """As `protocol.Attends.attend_hits`, with the buffers of any step."""
        k = self._uses[-1].step.k if self._uses else hits.ids.shape[-1]
        use, state = self._ready(index, k, resident)
        return use.step.attend(queries.contiguous(), state, hits)

    # What a search reads

    def _replay_of(
        self, index: Any, resident: ResidentRows, k: int, wrong: Tensor | None
    ) -> Replay | None:
        """The graph of a step that reads the same as those before it, if there is one by now."""
        device, use = self._geometry.device, self._newest(k)
        if use is None or use.outgrown or self._state is None or capturing(device):
            return None
        return self._replays.of(use.step, self._reads(index, use, resident, wrong))

    def _reads(self, index: Any, use: _Use, resident: ResidentRows, wrong: Tensor | None) -> State:
        """What a step reads: the same object for as long as that stays the same."""
        store = index._store
        made_of = self._state, resident, wrong, store.table, self.cache
        if use.reads is None or any(
            old is not new for old, new in zip(use.reads[0], made_of, strict=True)
        ):
            assert self._state is not None
            state = replace(
                self._state,
                wanted=use.wanted,
                rows=store.table.contiguous(),  # a view's is not
                row_bytes=store.row_bytes,
                codec=store.row_codec,
                cache=self.cache,
                resident=resident.rows,
                resident_mask=resident.mask,
                resident_count=resident.count,
                wrong=wrong,
            )
            use.reads = made_of, state
        return use.reads[1]

    def _ready(
        self, index: Any, k: int, resident: ResidentRows | None = None, wrong: Tensor | None = None
    ) -> tuple[_Use, State]:
        """A step with room enough, its turn, and what it reads, to attend if there is a `resident`.

        Its results are the caller's: buffers are shared by all layers, these are new each time.
        """
        captured, use = capturing(self._geometry.device), self._newest(k)
        if use is None or use.outgrown:
            if captured:
                raise RuntimeError(
                    f"graph: got a first search for k = {k} rows, or one for more candidates than "
                    "there are buffers for; allowed is one after warm_up() or a search like it"
                )
            need = self._need(index, k)
            use = self._begin(index, k, need + min(need, HEADROOM))
        assert self._state is not None
        use.captured |= captured
        if not captured:
            index._store.wait()
            use.step.acquire()
        use.step.renew()
        if resident is not None:
            return use, self._reads(index, use, resident, wrong)
        store, wanted = index._store, use.wanted
        rows = store.table.contiguous()  # a view's is not
        return use, replace(self._state, wanted=wanted, rows=rows, row_bytes=store.row_bytes)

    def _begin(self, index: Any, k: int, most: int) -> _Use:
        """A step for `k` rows with room for `most`, from here on the newest."""
        if self._state is None:
            self._state = self._opened(index)
            self._update(index, self._state, 0)
            store, batch = index._store, len(self.codes.table)
            if store.far:
                groups, device = batch * self._geometry.kv_heads, self._geometry.device
                self.cache = RowCache(groups, store.row_bytes, device)
        device, (batch, blocks) = self._geometry.device, self.codes.table.shape
        sizes = dict(batch=batch, blocks=blocks, k=k, most=max(most, 1))
        step = shared(self._geometry, self._layout, self._kind, self._config, **sizes)
        wanted = torch.zeros(batch, dtype=torch.int32, device=device)
        use = _Use(step, wanted, torch.arange(k, device=device))
        put(wanted, use.want(index._wanted(k), self._need(index, k)))
        self._uses = [*(u for u in self._uses if u.captured or u.step.k != k), use]
        return use

    def _need(self, index: Any, k: int) -> int:
        """What a step for `k` rows must have room for now."""
        return room_of(self._kind, len(index), max(index._wanted(k)))

    def _newest(self, k: int) -> _Use | None:
        return next((use for use in reversed(self._uses) if use.step.k == k), None)

    def _opened(self, index: Any) -> State:
        """Room for all that the table of blocks has room for."""
        g, device, table = self._geometry, self._geometry.device, self.codes.table
        batch, blocks = table.shape

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        none, tiers = ints(0), self._kind == "tiers"
        return State(
            codes=table,
            rows=none,
            valid=ints(batch, blocks, 8),
            length=ints(1, dtype=torch.int64),
            wanted=none,
            counted=ints(batch),
            weight_scale=torch.zeros((batch, g.kv_heads), device=device),
            resident=none,
            resident_mask=none,
            resident_count=none,
            row_bytes=0,
            histogram=torch.zeros_like(index._histogram).contiguous() if tiers else None,
            tiers=ints(batch, len(TIERS), dtype=torch.int64) if tiers else None,
        )

    def _update(self, index: Any, state: State, first: int) -> None:
        """What has changed from block `first` on, in place: in one launch where rows are alike."""
        start, tokens, counts = first * BLOCK, len(index), index.counts.tolist()
        real = index.valid is None or start >= index._valid.all_from
        together: dict[str, Any] = {"first": first if real else None}
        if alike := len(set(counts)) == 1:
            together["count"] = counts[0]
        else:
            put(state.counted, counts)
        for use in self._uses:
            candidates = index._wanted(use.step.k)
            asked = use.want(candidates, room_of(self._kind, tokens, max(candidates)))
            if alike and use is self._uses[-1]:
                together |= dict(wanted=use.wanted, candidates=asked[0])
            else:
                put(use.wanted, asked)
        update_state(state, tokens, weight_scale=index._learned.get("weight_scale"), **together)
        if not real:
            last = -(-tokens // BLOCK)
            bits = words_of(index.valid[:, start:], last - first)
            state.valid[:, first:last].copy_(bits)
        if state.histogram is not None and state.tiers is not None:
            state.histogram.copy_(index._histogram)
            for tier, bounds in enumerate(index._tiers().T.tolist()):
                put(state.tiers[:, tier], bounds)


def put(target: Tensor, values: list[int]) -> None:
    """Copy numbers, one for each row, into `target` `[B]` without waiting for its device."""
    if len(set(values)) == 1:
        target.fill_(values[0])  # no memory is pinned for what is the same in all rows
        return
    staged = torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cuda":
        staged = staged.pin_memory()
    target.copy_(staged, non_blocking=True)


def fused(index: Any) -> Fused | None:
    """The fused kernels for a ParisKV, where they serve it."""
    return Fused(index) if serves(index) else None
