"""Read the buffers of a decode step's kernels in the form of the torch reference (`kvindex.ops`).

This is the only place where tests of the reference know the private buffers of a step, and where
the kernels' layouts are converted to plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from kvindex.core.protocol import Attended
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.decode_step import Prepared, SamplingTerms, Scanned, Selected
from kvindex.pariskv.sign_votes import SAMPLED
from kvindex.pariskv.step_state import BINS, BUCKETS, EMPTY, Reranked, State
from kvindex.pariskv.tiered_votes import PIECES, POINTS, Candidates, QueryTable, Voted
from kvindex_cuda.pariskv import device_state
from kvindex_cuda.pariskv.steps import base
from kvindex_cuda.runtime.constants import EDGE


@dataclass(frozen=True)
class Buffers:
    """Buffers of a step that has run once, for the presets `fast`, `precise` or `paper` (of the
    latter, from the query to the selected rows).
    """

    step: base.BaseStep
    tokens: int
    wrong: Tensor

    def _read(self, name: str, *shape: int) -> Tensor:
        """Return a buffer as `[B, G, *shape]` on the CPU, without what lies past that size."""
        size = self.step.batch * self.step.geometry.kv_heads * prod(shape)
        part: Tensor = getattr(self.step, name).cpu().flatten()[:size]
        return part.view(self.step.batch, -1, *shape)

    @property
    def _drawn(self) -> bool:
        return self.step.weights is not None

    @property
    def _group(self) -> int:
        return self.step.geometry.group_size

    @property
    def _sets(self) -> int:
        return -(-self._group // 4)  # sets of 4 heads

    def _operands(self, places: Tensor) -> Tensor:
        """Return float16 operands `[B, G, g, D, 2]`, gathered from `places` of each group's
        buffer.
        """
        B, G = self.step.batch, self.step.geometry.kv_heads
        halves = self.step.operands.cpu().view(B, G, -1).view(torch.float16)
        return halves[:, :, places]

    def _entries(self, name: str, room: int, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first `counts` entries of a list, best first, and their positions in the list.

        Kernels write unsigned entries, whose highest bit is the inverse of the reference's.
        """
        counts = counts.clamp_max(room)
        there = torch.arange(room) < counts[..., None]
        raw = torch.where(there, self._read(name, room) ^ EMPTY, EMPTY)
        entries, order = raw.sort(dim=-1, descending=True)
        return entries[..., : int(counts.max())], order[..., : int(counts.max())]

    def _estimates(self, name: str, room: int, entries: Tensor, order: Tensor) -> Tensor:
        """Return the estimates `[B, G, K, g]` of sorted entries `[B, G, K]`, `-inf` where there is
        no entry.
        """
        spread = order[..., None].expand(*order.shape, self._group)
        estimates = self._read(name, room, self._group).gather(2, spread)
        return estimates.masked_fill((entries == EMPTY)[..., None], -torch.inf)

    @cached_property
    def prepared(self) -> Prepared:
        """The output of `prepare_query`."""
        g, group = self.step.geometry, self._group
        fragments = self.step.planes.cpu().unflatten(0, (self.step.batch, -1))
        return Prepared(
            planes=planes_of(fragments)[:, :, :group, :, : g.head_dim],
            sums=self._read("sums", 4 * self._sets)[..., :group],
            units=self._read("units", 4 * self._sets)[..., :group],
            operands=self._operands(places_of_words(group, g.head_dim)),
            ups=self._read("ups", group),
            sample=self._read("sample", SAMPLED),
            thresholds=self._read("thresholds"),
            bases=self._read("bases"),
            shifts=self._read("shifts"),
            wrong=self.wrong.cpu(),
            sampling=self._draw if self._drawn else None,
        )

    @property
    def _draw(self) -> SamplingTerms:
        gains, totals = self._read("scales", 4 * self._sets, 2)[:, :, : self._group].unbind(-1)
        return SamplingTerms(gains, totals, self._read("seeds").long() & 0xFFFFFFFF)

    @cached_property
    def scanned(self) -> Scanned:
        """The output of `scan`."""
        counts = self._read("counts")
        products = self._read("products", self.step.products.shape[1], self._group)
        return Scanned(
            counts=counts,
            list=self._entries("list", self.step.capacity, counts)[0],
            histogram=self._read("hist", BINS),
            products=products[:, :, : -(-self.tokens // BLOCK)],
        )

    @cached_property
    def query(self) -> QueryTable:
        """The output of `query_table`."""
        g, group = self.step.geometry, self._group
        table = self._read("table", self._sets, g.head_dim // 8, 256, 4)
        return QueryTable(
            operands=self._operands(places_of_subspaces(group, g.head_dim)),
            ups=self._read("ups", group),
            table=table.permute(0, 1, 2, 5, 3, 4).flatten(2, 3)[:, :, :group],
            wrong=self.wrong.cpu(),
        )

    @cached_property
    def voted(self) -> Voted:
        """The output of `vote`, which packs the votes of four heads into one word."""
        votes = self._read("votes", self._sets, self.step.most)[..., None].view(torch.uint8)
        votes = votes.transpose(3, 4).flatten(2, 3)[:, :, : self._group, : self.tokens]
        return Voted(
            votes=votes.int(),
            totals=self._read("totals", self._group, POINTS),
            pieces=self._read("pieces", self._group, PIECES, POINTS),
        )

    @cached_property
    def chosen(self) -> Candidates:
        """The output of `candidates`."""
        counts = self._read("candidate_counts")
        return Candidates(self._entries("candidates", self.step.capacity, counts)[0], counts)

    @cached_property
    def reranked(self) -> Reranked:
        """The output of `rerank`, or of `rerank_blocks`, which has no cut."""
        tiers, room = not hasattr(self.step, "planes"), self.step.capacity
        counts, edge_counts = self._read("candidate_counts"), self._read("edge_counts")
        candidates, order = self._entries("candidates", room, counts)
        edge, edge_order = self._entries("edge", EDGE, edge_counts)
        cuts = self._read("cuts", 2)
        return Reranked(
            candidates=candidates,
            candidate_counts=counts,
            estimates=self._estimates("estimates", room, candidates, order),
            buckets=self._read("buckets", 2 * self._group * BUCKETS)
            .view(torch.int64)
            .unflatten(-1, (self._group, BUCKETS)),
            edge=edge,
            edge_estimates=self._estimates("edge_estimates", EDGE, edge, edge_order),
            edge_counts=edge_counts,
            cuts=torch.tensor([-1, 0], dtype=torch.int32).expand_as(cuts) if tiers else cuts,
        )

    @cached_property
    def selected(self) -> Selected:
        """The output of `select_rows`."""
        found, k = self._read("found"), self.step.k
        none = torch.arange(k) >= found[..., None]
        ids, scores = self._read("ids", k), self._read("scores", k)
        weights = self._read("weights", k) if self._drawn else torch.zeros_like(scores)
        if k > 2 * EDGE:  # kernels write them in any order
            ids, order = ids.masked_fill(none, 2**62).sort(-1)
            scores, weights = scores.gather(-1, order), weights.gather(-1, order)
        scores, weights = (part.masked_fill(none, -torch.inf) for part in (scores, weights))
        return Selected(ids.masked_fill(none, -1), scores, found, weights if self._drawn else None)

    @cached_property
    def attended(self) -> Attended:
        """The output of `attend`."""
        step = self.step
        return Attended(step.output.cpu(), step.lse.cpu(), self._read("found"))


def planes_of(fragments: Tensor) -> Tensor:
    """Return digits `[B, G, heads, PLANES, coordinates]` from the fragments that lanes load
    (`prepare_query.cu`).

    fragments: int32 `[B, G, sets, quads, parts, 32]`.
    """
    B, G, sets, quads, parts, _ = fragments.shape
    lanes = fragments.view(B, G, sets, quads, parts, 4, 2, 4)  # head, odd plane, word
    words = lanes.permute(0, 1, 2, 5, 4, 6, 3, 7).reshape(B, G, sets * 4, 2 * parts, -1, 1)
    return (words >> torch.arange(32) & 1).flatten(-2).to(torch.uint8)


def places_of_words(group: int, D: int) -> Tensor:
    """Positions of `operand_of` in operands.cuh, for all heads, coordinates and parts: int64 `[g,
    D, 2]`.
    """
    h, j, part = torch.meshgrid(*map(torch.arange, (group, D, 2)), indexing="ij")
    folded, quads, word, bit = group <= 4, -(-D // 128), j // 32, j % 32
    step, at = 2 * (bit % 4) + bit // 16, bit % 16 // 4
    lane = (h + 4 * part if folded else h % 8) * 4 + word % 4
    i = ((h // 8 * quads + word // 4) * 8 + step) * 32 + lane
    return i * 4 + at if folded else i * 8 + part * 4 + at


def places_of_subspaces(group: int, D: int) -> Tensor:
    """Positions of `place_of` in query_table.cu: int64 `[g, D, 2]`."""
    h, j, part = torch.meshgrid(*map(torch.arange, (group, D, 2)), indexing="ij")
    steps, b = -(-(D // 8) // 2), j // 8
    lane = (h % 4 + 4 * (b % 2)) * 4 + j % 8 // 2
    return ((h // 4 * steps + b // 2) * 32 + lane) * 4 + part * 2 + j % 2


def addressed(state: State, device: str) -> tuple[device_state.State, Tensor, object]:
    """Return the state as kernels read it, with addresses of blocks; its flag; and the tensors
    behind these addresses.
    """

    def table(blocks: Tensor) -> Tensor:
        B, S = blocks.shape[:2]
        places = blocks.data_ptr() + blocks[0, 0].numel() * torch.arange(B * S)
        return places.view(B, S).to(device)

    moved = {
        name: part.to(device) if isinstance(part, Tensor) else part
        for name, part in vars(state).items()
    }
    tables = {name: table(moved[name]) for name in ("codes", "rows")}
    wrong = torch.zeros((), dtype=torch.int32, device=device)
    whole = device_state.State(**moved | tables, row_bytes=state.row_bytes, wrong=wrong)
    return whole, wrong, moved
