"""One decoding step of one layer, from query to attention output, in 6 launches.

    ask -> scan -> exact -> rerank -> agree -> attend

Signed dots with one 16-bit log weight per key, one list of candidates per group (the presets
`fast` and `precise`). Nothing here waits for the device, or allocates more than results: buffers
are made once, lengths are read on the device, so that a step can be captured in a CUDA graph and
replayed while the index grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import transform
from kvindex.protocol import Hits
from kvindex.rows import NAMES
from kvindex_cuda.launch import launch
from kvindex_cuda.layout import BLOCK, Layout
from kvindex_cuda.row_cache import RowCache

BINS, SAMPLED, EDGE, BUCKETS, STAGES = 2048, 4096, 1024, 256, 2
"""As in the kernels' sources."""

MOST_SPLITS, AT_ONCE = 64, 4
"""Of `attend.cu`."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

PLANES = {4: 5, 6: 21, 8: 85}
"""Digits to the base -2 and the largest number that they hold of either sign (`votes.cuh`)."""

MOST_HEADS = 16
"""Query heads per KV head: their exponentials are summed in shared memory (`rerank.cu`)."""


@dataclass(frozen=True)
class State:
    """What a step reads of a layer, all on the device and at fixed addresses.

    codes, rows: addresses of blocks, int64 `[B, S]` each; valid: bits of tokens, int32 `[B, S, 8]`;
    length: int64 `[1]`, tokens in the index; wanted, counted: int32 `[B]`, candidates `C` and
    valid keys; reference: float32 `[B, G]`; near: rows of sink and window `[B, G, W, D + Dv]`;
    shown: uint8 `[B, W]`; held: int64 `[1]`, how many of the `W` there are; row_bytes: of a row in
    a block; row_head: bytes from one KV head's rows in it to the next one's, 0 for 256 rows; codec:
    of those rows, a name of `kvindex.rows`; cache: of rows that were fetched, as they lie; wrong:
    int32 of one element, which a step sets to 1 where a query is not finite.
    """

    codes: Tensor
    rows: Tensor
    valid: Tensor
    length: Tensor
    wanted: Tensor
    counted: Tensor
    reference: Tensor
    near: Tensor
    shown: Tensor
    held: Tensor
    row_bytes: int
    row_head: int = 0
    codec: str = "plain"
    cache: RowCache | None = None
    wrong: Tensor | None = None


class Step:
    """Buffers and launches of a step for a batch of `B` rows.

    most: the largest `C` that `State.wanted` will hold; seed, largest, policy: as `ParisKVConfig`;
    centred: whether blocks hold centres. Raises ValueError for what the kernels do
    not serve.
    """

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        batch: int,
        k: int,
        most: int,
        seed: int = 0,
        largest: int = 21,
        policy: str = "mean_share",
        centred: bool = True,
        multiprocessors: int = 132,
    ) -> None:
        g, group = geometry, geometry.group_size
        if group > MOST_HEADS:
            raise ValueError(f"q_heads: got {group} per KV head, allowed is up to {MOST_HEADS}")
        if policy not in ("mean_share", "max_share"):
            raise ValueError(f"group: got {policy!r}, allowed is 'mean_share' or 'max_share'")
        self.geometry, self.layout, self.k, self.batch = g, layout, k, batch
        self.most = most
        device, groups = g.device, batch * g.kv_heads
        self.capacity = 4 * (most + SAMPLED)  # `exact` serves what is more
        self._groups, self._multiprocessors = groups, multiprocessors
        self._largest = min(largest, 2**15 // g.head_dim)
        planes = next((digits for digits, most in PLANES.items() if self._largest <= most), None)
        if planes is None:
            most = PLANES[max(PLANES)]
            raise ValueError(f"largest: got {self._largest}, allowed is up to {most}")
        self._defines = dict(D=g.head_dim, GROUP=group, DTYPE=DTYPES[g.dtype])
        self._votes = self._defines | dict(CENTRED=int(centred), PLANES=planes)
        self._softcap = dict(SOFTCAP=int(g.softcap is not None))
        self._agree = dict(GROUP=group, POLICY=int(policy == "max_share"), **self._softcap)
        self._rerank = self._softcap | dict(D=g.head_dim, GROUP=group, CENTRED=int(centred))
        self._rerank["BITS"] = layout.magnitude_bits
        self._level = reference.lloyd_max(g.head_dim, 0)[0]
        self._turn = transform.rotation(g.head_dim, seed, device).T.contiguous()
        self._levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        self._factors = reference.log_factors(16, device)
        quads = -(-(layout.stride // 4) // 4)
        sets, halves = -(-group // 4), -(-group // 8)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def longs(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        # of `ask`
        self._planes = ints(groups, sets, quads, planes // 2, 32)
        self._sums, self._units = ints(groups, 4 * sets), floats(groups, 4 * sets)
        self._operands = ints(groups, halves, quads, 8, 32, 4)
        self._ups = floats(groups, 8 * halves)
        self._sample, self._asked = ints(groups, SAMPLED), ints(groups)
        self._thresholds, self._bases, self._shifts = ints(groups), ints(groups), ints(groups)
        # of `scan` and `exact`
        self._products: Tensor | None = None
        self._list = longs(groups, self.capacity)
        # of `rerank` and `agree`
        self._kept = longs(groups, self.capacity)
        self._estimates = floats(groups, self.capacity, group)
        self._edge, self._places = longs(groups, EDGE), ints(groups, EDGE)
        self._cuts, self._slots = ints(groups, 2), ints(groups, k)
        self._finalists = longs(groups, self.capacity)
        self.ids, self.scores, self.found = longs(groups, k), floats(groups, k), ints(groups)
        # what counts, cleared by `ask` at once: 8-byte words first
        sizes = [2 * group * BUCKETS, BINS, *[1] * 6]
        self._cleared = ints(groups * sum(sizes))
        parts = torch.split(self._cleared, [groups * size for size in sizes])
        self._buckets, self._hist, self.counts, self._many, self._edges, self._filled = parts[:6]
        self._tickets = parts[6:]
        # of `attend`
        self.splits = max(1, min(MOST_SPLITS // 4, 2 * multiprocessors // groups))
        self._partial = floats(groups, self.splits, group, g.value_dim + 2)
        self.output = torch.empty((batch, g.q_heads, g.value_dim), dtype=g.dtype, device=device)

    def __call__(self, queries: Tensor, state: State) -> Tensor:
        """Attention of queries `[B, H, D]` over the best `k` rows and the near ones: `output`."""
        self.select(queries, state)
        return self.attend(queries, state)

    def renew(self) -> None:
        """Whoever has `output` and `found` keeps them: what comes now is written to new ones."""
        self.output, self.found = torch.empty_like(self.output), torch.empty_like(self.found)

    def select(self, queries: Tensor, state: State) -> None:
        """The best `k` rows of each group: the first `found` of `ids`, in any order, with `scores`.

        scores: what `group.agree` gives.
        """
        g, L, kv = self.geometry, self.layout, self.geometry.kv_heads
        groups, row = self._groups, state.codes.shape[1]
        if self._products is None or self._products.shape[1] != row:
            shape = (groups, row, g.group_size)
            self._products = torch.empty(shape, device=g.device)
        codes, keys = (state.codes, row, L.head_bytes), (state.valid, state.length)
        limits = state.wanted, state.counted
        launch(
            "ask.cu",
            "ask",
            (max(1, min(16, 2 * self._multiprocessors // groups)), groups),
            (256,),
            *(queries, self._turn, state.reference, *codes, *keys, *limits),
            self._factors,
            *(self._planes, self._sums, self._units, self._operands, self._ups),
            *(self._sample, self._asked, self._thresholds, self._bases, self._shifts),
            *(self._cleared, len(self._cleared), state.wrong, self._largest, self._level),
            *(float(reference.FACTOR), kv),
            overlap=True,
            **self._votes,
        )
        query = (self._planes, self._sums, queries, self._units, self._factors)
        wide = g.head_dim > 128
        launch(
            "scan.cu",
            "scan",
            ((1 if wide else 2) * self._multiprocessors,),
            (256,),
            *(*codes, *query, *keys, self._thresholds, self._bases, self._shifts),
            *(self.counts, self._list, self._hist, self._products, self.capacity, groups, kv),
            shared_bytes=8 * STAGES * self._stage(),
            overlap=True,
            **self._votes,
        )
        launch(
            "scan.cu",
            "exact",
            (groups,),
            (256,),
            *(*codes, *query, *keys, *limits, self.counts, self._list, self.capacity, kv),
            overlap=True,
            **self._votes,
        )
        cache = state.cache
        known = (cache.tags, cache.stamps, cache.clocks, cache.counts) if cache else (None,) * 4
        cached = cache.rows if cache else 0
        listed = (self._bases, self._shifts, self.counts, self._list, self._hist)
        softcap = g.softcap if g.softcap is not None else 0.0
        splits = max(1, 2 * self._multiprocessors // groups)
        launch(
            "rerank.cu",
            "rerank",
            (min(splits, -(-self.capacity // 256)), groups),
            (256,),
            *(*codes, L.logs, L.magnitudes, self._operands, self._ups, self._products),
            *(self._levels, state.reference, *limits, *listed, self._kept, self._many),
            *(self._estimates, self._buckets, self._edge, self._places, self._edges, self._cuts),
            *(self.capacity, kv, g.scale, softcap, float(reference.OCTAVES)),
            overlap=True,
            **self._rerank,
        )
        launch(
            "agree.cu",
            "agree",
            (-(-self.capacity // 4096), groups),
            (1024,),
            *(self._estimates, self._buckets, *limits, *listed[:3], self._kept, self._many),
            *(self._cuts, self._edge, self._places, self._edges),
            *(self._finalists, self._filled, self._tickets[0]),
            *(self.ids, self.scores, self.found, *known, self._slots, cached),
            *(self.k, self.capacity, kv, g.scale, softcap),
            overlap=True,
            **self._agree,
        )

    def attend(self, queries: Tensor, state: State, hits: Hits | None = None) -> Tensor:
        """Attention over the rows that `select` found, or those of `hits`, and the near rows.

        hits: any number of rows, all of them tokens'.
        """
        g, kv = self.geometry, self.geometry.kv_heads
        softcap, cache = g.softcap if g.softcap is not None else 0.0, state.cache
        ids, found, weights, slots, k = self.ids, self.found, None, self._slots, self.k
        if hits is not None:
            ids, weights, k = hits.ids.contiguous(), hits.log_weight, hits.ids.shape[-1]
            weights = weights if weights is None else weights.contiguous()
            found = torch.full_like(self.found, k)
            if cache:
                slots = torch.empty_like(ids, dtype=torch.int32)
                launch(
                    "look_up.cu",
                    "given",
                    (self._groups,),
                    (256,),
                    *(ids, cache.tags, cache.stamps, cache.clocks, cache.counts, slots),
                    *(cache.rows, k),
                )
        launch(
            "attend.cu",
            "attend",
            (self.splits, self._groups),
            (256,),
            *(queries, ids, found, state.rows, state.rows.shape[1]),
            *(state.row_head or BLOCK * state.row_bytes, state.row_bytes),
            *(state.near, state.shown, state.held, state.near.shape[2]),
            *(cache.data if cache else None, slots, cache.rows if cache else 0),
            *(weights, self._partial, self.output, self._tickets[1], k, kv, g.scale, softcap),
            shared_bytes=4 * (g.value_dim + 2) * 8 * min(AT_ONCE, g.group_size),
            overlap=hits is None,  # else what is near may just be being written
            **(self._defines | self._softcap | dict(DV=g.value_dim)),
            **dict(CODEC=NAMES.index(state.codec), GIVEN=int(hits is not None)),
        )
        return self.output

    def _stage(self) -> int:
        """Bytes of a block that `scan` copies to shared memory, and of its valid bits."""
        L = self.layout
        scanned = L.centre + (2 * L.head_dim if self._votes["CENTRED"] else 0)
        return -(-(scanned + 32) // 128) * 128


def words_of(valid: Tensor, blocks: int) -> Tensor:
    """Bits of valid tokens, bool `[B, N]`, as int32 `[B, blocks, 8]`."""
    padded = torch.zeros((len(valid), blocks * BLOCK), dtype=torch.int64, device=valid.device)
    padded[:, : valid.shape[1]] = valid
    bits = padded.view(len(valid), blocks, 8, 32) << torch.arange(32, device=valid.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
