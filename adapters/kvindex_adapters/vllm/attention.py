"""Attention of one layer over an engine's pages: all of them, or the rows that a search finds.

In plain torch, a sequence at a time: what kernels over the same pages will have to equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes, Hits, Rows
from kvindex.layer.retrieval import bias_of
from kvindex.ops.attention import attend, attend_blocks, attend_causal
from kvindex.pariskv import sampling, select_rows
from kvindex.pariskv.block_layout import BLOCK, Layout
from kvindex.pariskv.encoding import Encoding
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.options import Options

ROWS = 1024
"""Rows that attention with a softcap takes at a time, which bounds its logits."""


@dataclass(frozen=True)
class Sequence:
    """Where the tokens of one sequence are: rows and records (`pages`), its table, its length."""

    rows: Tensor
    records: Tensor
    table: Tensor
    length: int


@dataclass(frozen=True)
class PagedAttention:
    """What a layer does with pages, whoever keeps them."""

    geometry: Geometry
    options: Options
    encoding: Encoding
    layout: Layout

    @staticmethod
    def of(options: Options, geometry: Geometry) -> PagedAttention:
        """For a layer of a geometry."""
        encoding = Encoding.of(options.config, geometry, ops)
        return PagedAttention(geometry, options, encoding, options.layout(geometry.head_dim))

    def explain(self) -> str:
        """Describe which index a layer uses, and which sequences it searches in."""
        return f"{self.options.explain()}, in plain torch; prefill is exact"

    def encode(self, rows: Tensor, records: Tensor, slots: Tensor) -> None:
        """Write the codes of the blocks whose last key lies at one of the slots int64 `[T]`.

        From the block's own 256 keys, whatever came when: an earlier code is written over.
        """
        segments = pages.filled(slots)
        if not len(segments):
            return
        codes = dict(self.encoding.encode(pages.segment_keys(rows, segments), None))
        packed = self.layout.pack(codes, codes.pop("centers", None))
        pages.write_records(records, segments, packed[:, 0])

    def attend(self, queries: Tensor, sequence: Sequence) -> Tensor:
        """Attention of the newest tokens' queries `[T, H, D]`, of the same shape.

        A single one of a sequence that is long enough searches; others see all that is before them.
        """
        if len(queries) == 1 and (indexed := self.searched(sequence.length)):
            return self._search(queries, sequence, indexed)
        return self.attend_dense(queries, sequence)

    def searched(self, length: int) -> int:
        """Tokens of whole blocks before the window that a step of such a sequence searches."""
        if length < self.options.dense_below:
            return 0
        indexed = max(length - self.options.local_window, 0) // BLOCK * BLOCK
        return indexed if indexed > self.options.sink else 0

    def hits(self, queries: Tensor, sequence: Sequence, indexed: int) -> Hits:
        """What is retrieved for queries `[1, H, D]` of the first `indexed` tokens but the sink."""
        valid = torch.arange(indexed, device=queries.device)[None] >= self.options.sink
        tokens = Tokens.of_blocks(
            self.codes(sequence, indexed), self.encoding, self.geometry, valid
        )
        search = select_rows.search if self.encoding.config.sampling == "none" else sampling.search
        k = min(self.options.k, int(tokens.counts))
        return search(tokens, Queries.of(queries, tokens), k)

    def codes(self, sequence: Sequence, indexed: int) -> Codes:
        """Codes of the first tokens of a sequence, whole blocks of them, `[1, G, indexed, …]`."""
        records = pages.read_records(sequence.records, sequence.table, indexed // BLOCK)[None]
        codes = self.layout.unpack(records, indexed)
        if self.encoding.config.center:
            codes["centers"] = self.layout.centers(records)
        return codes

    def _search(self, queries: Tensor, sequence: Sequence, indexed: int) -> Tensor:
        hits = self.hits(queries, sequence, indexed)
        sink = pages.read_rows(sequence.rows, sequence.table, 0, self.options.sink)
        newest = pages.read_rows(sequence.rows, sequence.table, indexed, sequence.length)
        found = pages.gather_rows(sequence.rows, sequence.table, hits.ids)
        parts = found, sink, newest
        keys = torch.cat([part.keys for part in parts], dim=2)
        values = torch.cat([part.values for part in parts], dim=2)
        g = self.geometry
        bias = queries.new_zeros((1, g.q_heads, keys.shape[2]), dtype=torch.float32)
        retrieved = bias[..., : hits.ids.shape[-1]]
        retrieved += bias_of(hits.ids != UNUSED).repeat_interleave(g.group_size, dim=1)
        if hits.log_weight is not None:
            retrieved += hits.log_weight
        return attend(queries, keys, values, scale=g.scale, softcap=g.softcap, bias=bias)

    def attend_dense(self, queries: Tensor, sequence: Sequence) -> Tensor:
        """The same over all that is before them, in whatever sequence."""
        g, heads = self.geometry, queries.transpose(0, 1)[None]  # [1, H, T, D]
        rows = pages.read_rows(sequence.rows, sequence.table, 0, sequence.length)
        if g.softcap is None:
            found = attend_causal(heads, rows.keys, rows.values, scale=g.scale)
        else:
            blocks = _causal_blocks(rows, len(queries))
            found = attend_blocks(heads, blocks, scale=g.scale, softcap=g.softcap)
        return found[0].transpose(0, 1)


def _causal_blocks(rows: Rows, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """All rows, some at a time, with what hides them from the newest `count` tokens."""
    length = rows.keys.shape[2]
    positions = torch.arange(length, device=rows.keys.device)
    for start in range(0, length, ROWS):
        some = slice(start, start + ROWS)
        seen = positions[some] <= positions[length - count :, None]  # [T, R]
        yield rows.keys[:, :, some], rows.values[:, :, some], bias_of(seen)
