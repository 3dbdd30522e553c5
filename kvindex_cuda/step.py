"""One decoding step of one layer, from query to attention output, in 7 launches.

    ask -> sample -> scan -> exact -> rerank -> agree -> attend

Signed dots with one 16-bit log weight per key, one list of candidates per group (the preset
`fast`). Nothing here allocates or waits for the device: buffers are made once, lengths are read on
the device, so that a step can be captured in a CUDA graph and replayed while the index grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import transform
from kvindex_cuda.launch import launch
from kvindex_cuda.layout import BLOCK, Layout

BINS, SAMPLED, EDGE, BUCKETS = 2048, 4096, 1024, 256
"""As in the kernels' sources."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

MOST_HEADS = 16
"""Query heads per KV head: their exponentials are summed in shared memory (`rerank.cu`)."""


@dataclass(frozen=True)
class State:
    """What a step reads of a layer, all on the device and at fixed addresses.

    codes, rows: addresses of blocks, int64 `[B, S]` each; valid: bits of tokens, int32 `[B, S, 8]`;
    length: int64 `[1]`, tokens in the index; wanted, counted: int32 `[B]`, candidates `C` and
    valid keys; reference: float32 `[B, G]`; near: rows of sink and window `[B, G, W, D + Dv]`;
    shown: uint8 `[B, W]`; held: int64 `[1]`, how many of the `W` there are; row_bytes: of a row in
    a block; row_head: bytes from one KV head's rows in it to the next one's, 0 for 256 rows.
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
        largest: int = 127,
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
        self.capacity = 3 * most + 2 * SAMPLED  # `exact` serves what is more
        self._centred = centred
        self._groups, self._multiprocessors = groups, multiprocessors
        self._defines = dict(D=g.head_dim, GROUP=group, DTYPE=DTYPES[g.dtype])
        self._softcap = dict(SOFTCAP=int(g.softcap is not None))
        self._policy = dict(POLICY=int(policy == "max_share"))
        self._largest = min(largest, 2**15 // g.head_dim)
        self._level = reference.lloyd_max(g.head_dim, 0)[0]
        self._turn = transform.rotation(g.head_dim, seed, device).T.contiguous()
        self._levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        self._factors = reference.log_factors(16, device)
        sets, quads = -(-group // 4), -(-(layout.stride // 4) // 4)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        self._fragments, self._sums = ints(groups, sets, quads, 4, 32), ints(groups, 4 * sets)
        self._units, self.turned = floats(groups, group), floats(groups, group, g.head_dim)
        self._votes, self._edge = ints(groups, SAMPLED), ints(groups, EDGE)
        self._thresholds, self._shifts = ints(groups), ints(groups)
        self.list = torch.empty((groups, self.capacity), dtype=torch.int64, device=device)
        self.estimates = floats(groups, self.capacity, group)
        self.shares = floats(groups, self.capacity)
        self._products: Tensor | None = None
        # what counts, cleared by `ask` at once: 8-byte words first
        sizes = [2 * group * BUCKETS, BINS, BINS, *[1] * 6]
        self._cleared, self._words = ints(groups * sum(sizes)), sum(sizes)
        parts = torch.split(self._cleared, [groups * size for size in sizes])
        self._buckets, self._hist, self._hist_k, self.counts, self._edges, self.found = parts[:6]
        self._tickets = parts[6:]
        self.splits = max(1, min(32, 2 * multiprocessors // groups))
        self._partial = floats(groups, self.splits, group, g.value_dim + 2)
        self.output = torch.empty((batch, g.q_heads, g.value_dim), dtype=g.dtype, device=device)
        self.ids = torch.empty((groups, k), dtype=torch.int64, device=device)

    def __call__(self, queries: Tensor, state: State, *, ids: bool = False) -> Tensor:
        """Attention of queries `[B, H, D]` over the best `k` rows and the near ones: `output`.

        ids: whether to write which rows were selected to `ids` (`found` per group, in any order).
        """
        self.select(queries, state)
        return self.attend(queries, state, ids=ids)

    def select(self, queries: Tensor, state: State) -> None:
        """Candidates and what their group agrees on: `list`, `counts`, `estimates`, `shares`."""
        g, L, kv = self.geometry, self.layout, self.geometry.kv_heads
        groups, row = self._groups, state.codes.shape[1]
        if self._products is None or self._products.shape[1] != row:
            shape = (groups, row, g.group_size)
            self._products = torch.empty(shape, device=g.device)
        softcap = g.softcap if g.softcap is not None else 0.0
        D, defines = g.head_dim, self._defines
        launch(
            "ask.cu",
            "ask",
            (groups,),
            (-(-D // 32) * 32,),
            *(queries, self._turn, state.reference, self.turned, self._fragments, self._sums),
            *(self._units, self._cleared, self._words, self._largest, self._level),
            *(float(reference.FACTOR), g.q_heads, kv),
            **defines,
        )
        codes = (state.codes, row, L.head_bytes, L.weights, L.centre)
        query = (self._fragments, self._sums, queries, self._units, self._factors)
        keys = (state.valid, state.length)
        some = dict(**defines, CENTRED=int(self._centred))
        splits = min(8, max(1, self._multiprocessors // groups))
        launch(
            "scan.cu",
            "sample",
            (splits, groups),
            (256,),
            *(*codes, *query, *keys, state.wanted, state.counted, self._votes),
            *(self._tickets[0], self._thresholds, self._shifts, kv),
            **some,
        )
        launch(
            "scan.cu",
            "scan",
            ((3 if g.group_size <= 4 else 2) * self._multiprocessors,),
            (256,),
            *(*codes, *query, *keys, self._thresholds, self._shifts, self.counts, self.list),
            *(self._hist, self._products, self.capacity, groups, kv),
            **some,
        )
        launch(
            "scan.cu",
            "exact",
            (groups,),
            (256,),
            *(*codes, *query, *keys, state.wanted, state.counted, self._thresholds, self._shifts),
            *(self.counts, self.list, self._hist, self.capacity, kv),
            **some,
        )
        splits = max(1, 4 * self._multiprocessors // groups)
        more = dict(D=D, GROUP=g.group_size, **self._softcap)
        launch(
            "rerank.cu",
            "rerank",
            (splits, groups),
            (256,),
            *(state.codes, row, L.head_bytes, L.logs, L.magnitudes, self.turned, self._products),
            *(self._levels, state.reference, state.wanted, state.counted, self.counts, self.list),
            *(self._hist, self._thresholds, self._shifts, self.estimates, self._buckets),
            *(self._edge, self._edges, self._tickets[1], self.capacity, kv),
            *(g.scale, softcap, float(reference.OCTAVES)),
            **(more | dict(BITS=L.magnitude_bits, CENTRED=int(self._centred)) | self._policy),
        )
        launch(
            "rerank.cu",
            "agree",
            (splits, groups),
            (256,),
            *(self.estimates, self._buckets, self.counts, self.shares, self._hist_k),
            *(self.capacity, g.scale, softcap),
            **(more | dict(BITS=L.magnitude_bits, CENTRED=int(self._centred)) | self._policy),
        )

    def attend(self, queries: Tensor, state: State, *, ids: bool = False) -> Tensor:
        """Attention over the best `k` of the candidates that `select` found, and the near rows."""
        g, kv = self.geometry, self.geometry.kv_heads
        softcap = g.softcap if g.softcap is not None else 0.0
        launch(
            "attend.cu",
            "attend",
            (self.splits, self._groups),
            (256,),
            *(queries, self.list, self.counts, self.shares, self._hist_k, state.rows),
            *(state.rows.shape[1], state.row_head or BLOCK * state.row_bytes, state.row_bytes),
            *(
                state.near,
                state.shown,
                state.held,
                state.near.shape[2],
                self._partial,
                self.output,
                self.ids if ids else None,
            ),
            *(self.found, self._tickets[2], self.k, self.capacity, kv, g.scale, softcap),
            shared_bytes=4 * self.k,
            **(self._defines | self._softcap | dict(DV=g.value_dim)),
        )
        return self.output


def words_of(valid: Tensor, blocks: int) -> Tensor:
    """Bits of valid tokens, bool `[B, N]`, as int32 `[B, blocks, 8]`."""
    padded = torch.zeros((len(valid), blocks * BLOCK), dtype=torch.int64, device=valid.device)
    padded[:, : valid.shape[1]] = valid
    bits = padded.view(-1, blocks, 8, 32) << torch.arange(32, device=valid.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
