"""Decode step of one layer by sign votes, from query to attention output, in 5 launches. It
supports the presets `sampled` (the default), `fast` and `precise`.

    prepare_query -> scan -> rerank -> select_rows -> attend

A key is stored as a sign per coordinate and one 16-bit log weight. Its vote (approximate score) is
the dot product of the rounded query and the signs, scaled by the weight. The query heads of a KV
head have one common list of candidates. A step can be captured in a CUDA graph and replayed while
the index grows.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import codes as reference
from kvindex.ops import priority, transform
from kvindex.pariskv.sign_votes import PLANES
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.base import BaseStep
from kvindex_cuda.pariskv.steps.grid_sizes import rerank_splits
from kvindex_cuda.runtime.constants import SAMPLED, SCAN_STAGES, SCAN_WARPS
from kvindex_cuda.runtime.launch import capturing
from kvindex_cuda.runtime.resolve import NamedLaunch


class SignVotesStep(BaseStep):
    """Buffers and launches of a decode step that finds candidates by sign votes, that is, by
    approximate scores from the sign bits of keys.

    Args:
        geometry: See `BaseStep`.
        layout: See `BaseStep`.
        most: The largest number of candidates per sequence that `State.wanted` may contain.
        seed: Seed of the rotation (`ParisKVConfig.seed`).
        query_max: Largest integer of a quantized query (`ParisKVConfig.query_max`).
        centered: Whether blocks of codes contain centers.
        sampled: See `BaseStep`.
        limited: See `BaseStep`.
        together: Whether to decode all sign bits of a key together, with a matrix fitted by
            regression (`State.regression`).
        blocks: Number of blocks per sequence in the tables that the step will read; 0 if not known
            yet.
        **options: As `BaseStep`.

    Raises:
        ValueError: The kernels do not support these options.
    """

    stages = limits = True

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        most: int,
        seed: int = 0,
        query_max: int = 21,
        centered: bool = True,
        sampled: bool = False,
        limited: bool = False,
        together: bool = False,
        blocks: int = 0,
        **options: Any,
    ) -> None:
        capacity = 4 * (most + SAMPLED)  # `rerank` also handles lists that are longer than this
        options |= dict(most=most, capacity=capacity, sampled=sampled, limited=limited)
        super().__init__(geometry, layout, **options)
        g, device = geometry, geometry.device
        groups, group = self._open_heads()
        self.query_max = min(query_max, 2**15 // g.head_dim)
        planes = next((digits for digits, most in PLANES.items() if self.query_max <= most), None)
        if planes is None:
            most = PLANES[max(PLANES)]
            raise ValueError(f"query_max: got {self.query_max}, allowed is up to {most}")
        self._vote_defines = (
            self._defines | self._ragged | dict(CENTERED=int(centered), PLANES=planes)
        )
        self._vote_defines |= dict(GROUP=group, SAMPLING=int(sampled))
        self._prepares = self._vote_defines | dict(REGRESSION=int(together), LIMITED=int(limited))
        self._rerank = self._vote_defines | self._capped | dict(BITS=layout.magnitude_bits)
        resident = 1 if g.head_dim > 128 or layout.magnitude_bits > 3 or group > 8 else 2
        self._rerank_splits = rerank_splits(self.groups, self._multiprocessors, resident=resident)
        self.level = reference.lloyd_max(g.head_dim, 0)[0]
        odd = g.head_dim // (g.head_dim & -g.head_dim)
        angles = torch.arange(odd, dtype=torch.float64) * (2 * math.pi / odd)
        waves = (angles.cos() + angles.sin()).float().to(device)
        self.rotation = torch.cat([transform.rotation(g.head_dim, seed, device)[0], waves])
        self.levels = reference.levels(g.head_dim, layout.magnitude_bits, device)
        self.factors = reference.log_factors(16, device)
        quads, sets, parts = -(-(layout.stride // 4) // 4), -(-group // 4), 1 if group <= 4 else 2
        ints, floats = self._memory.zeros, self._memory.empty
        # buffers of `prepare_query`
        self.planes = ints(groups, sets, quads, planes // 2, 32)
        self.sums, self.units = ints(groups, 4 * sets), floats(groups, 4 * sets)
        self.operands = ints(
            groups, -(-group // 8), quads, 8, 32, parts, 2
        )  # stays 0 without a head
        self.ups = floats(groups, group)
        self.sample, self.sample_tickets = ints(groups, SAMPLED), ints(groups)
        self.scales = floats(groups, 4 * sets, 2) if sampled else None
        # parameters of kernels that are numbers
        L = layout
        self.seed, self.value_dim = seed, g.value_dim
        self.head_bytes, self.logs, self.magnitudes = L.head_bytes, L.logs, L.magnitudes
        self.factor_max = float(reference.FACTOR)
        self.octaves = self.scale / math.log(2)
        self.gain = self.scale * priority.UNIT / math.log(2)
        self.thresholds = ints(groups)
        # buffers of `scan`
        self.products = floats(self.groups, blocks, g.group_size) if blocks else None
        self.list = self._memory.empty(self.groups, self.capacity, dtype=torch.int64)

    def _open_heads(self) -> tuple[int, int]:
        """Return the number of sets of query heads, and the number of query heads in each set.

        The kernel that prepares the queries processes the heads of a set together. Here, a set
        contains the query heads that share a KV head.
        """
        return self.groups, self.geometry.group_size

    def _prepare(self, queries: Tensor, state: State) -> None:
        """Launch the first kernel, `prepare_query`.

        A kernel that overlaps with the previous launch may read codes before that launch has ended.
        If `prepare_query` also appends a new token, it overlaps only inside a CUDA graph. There, an
        overlap is safe: the previous launch writes no codes, because it only computes the query,
        key and value of the token. Outside of a graph, the previous launch may write codes.
        """
        groups, splits = self.groups, self.splits_of_residents(state)
        staged, reads = state.token, splits or state.token is not None
        keys = None if staged is None else staged.keys
        if keys is not None and splits and keys.data_ptr() % 16:
            keys = keys.clone()  # read 16 bytes at a time
        defines = self._prepares
        if splits and state.sink is not None:
            defines = defines | dict(PAGED=1 + int(state.segments is not None))
            defines |= dict(FP8_PAGES=int(state.key_scale is not None))
        self._prepare_launch(
            self,
            state,
            grid=(max(1, min(16, 2 * self._multiprocessors // groups)) + splits, groups),
            block=(256,),
            defines=defines,
            overlap=staged is None or capturing(queries.device),
            queries=queries,
            token_keys=keys,
            token_values=None if staged is None else staged.values,
            resident=state.resident if reads else None,
            resident_count=state.resident_count if reads else None,
            room=state.room if reads else 0,
            resident_splits=splits,
        )

    @cached_property
    def _prepare_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/prepare_query.cu",
            "prepare_query",
            self,
            State,
            given=(
                *("queries", "token_keys", "token_values"),
                *("resident", "resident_count", "room", "resident_splits"),
            ),
            cache="cached_rows",
            sink="sink_rows",
            tickets="sample_tickets",
            words="words_cleared",
        )

    def select(self, queries: Tensor, state: State) -> None:
        """Select the best `k` rows for queries `[B, H, D]`, with four kernels."""
        g, groups, row = self.geometry, self.groups, state.row
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        if self.products is None or self.products.shape[1] != row:
            shape = (groups, row, g.group_size)
            self.products = torch.empty(shape, device=g.device)
        self._prepare(queries, state)
        scanners = (1 if g.head_dim > 128 else 2) * self._multiprocessors
        self._scan_launch(
            self,
            state,
            grid=(scanners,),
            block=(32 * SCAN_WARPS,),
            defines=self._vote_defines,
            shared_bytes=SCAN_WARPS * SCAN_STAGES * self._stage(),
            overlap=True,
            queries=queries,
        )
        self.signalers = min(self._rerank_splits, -(-self.capacity // 128))
        self._rerank_launch(
            self,
            state,
            grid=(self.signalers, groups),
            block=(256,),
            defines=self._rerank,
            overlap=True,
            queries=queries,
            scanners=SCAN_WARPS * scanners,
        )
        self._select_rows(state)

    @cached_property
    def _scan_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/scan.cu", "scan", self, State, given=("queries",), histogram="hist"
        )

    @cached_property
    def _rerank_launch(self) -> NamedLaunch:
        return NamedLaunch(
            "step/rerank.cu",
            "rerank",
            self,
            State,
            given=("queries", "scanners"),
            histogram="hist",
        )

    def _stage(self) -> int:
        """Return how many bytes of each block of codes the kernel `scan` copies to shared
        memory."""
        L = self.layout
        scanned = L.center + (2 * L.head_dim if self._vote_defines["CENTERED"] else 0)
        return -(-scanned // 128) * 128
