"""`PagedAttention`: one layer's attention over vLLM's pages, to rows that a search selects or to
all tokens.

This is the reference implementation in plain torch, which processes one sequence at a time. The GPU
kernels of the plug-in compute the same results from the same pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes, ErrorLimit, Hits, Rows
from kvindex.layer.retrieval import bias_of
from kvindex.ops.attention import attend, attend_blocks, attend_causal, cap, with_sink_logits
from kvindex.pariskv import sampling, select_rows
from kvindex.pariskv.block_layout import BLOCK, Layout
from kvindex.pariskv.encoding import Encoding
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.costs import Limit, limit_of
from kvindex_adapters.vllm.fp8 import Scales
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.reading import Prompt, attend_prompt
from kvindex_adapters.vllm.row_budget import RowBudget

ROWS = 1024
"""Number of keys that attention with a soft cap or with learned sinks processes at a time, to limit
the memory for logits."""


@dataclass(frozen=True)
class Sequence:
    """One sequence in vLLM's pages.

    Args:
        rows: The pages with the keys and values of all sequences (layout: see `pages`).
        records: The pages with the codes (compressed keys) of all sequences.
        table: The block table of this sequence.
        length: Number of tokens in this sequence.
        scales: Scales of the layer, if its keys and values are in FP8.
    """

    rows: Tensor
    records: Tensor
    table: Tensor
    length: int
    scales: Scales | None = None

    def read(self, start: int, stop: int, geometry: Geometry) -> Rows:
        """Read the keys and values of the tokens at positions `start` to `stop - 1`."""
        return pages.read_rows(self.rows, self.table, start, stop, geometry, self.scales)


@dataclass(frozen=True)
class PagedAttention:
    """The attention of one layer. Keys, values and codes are in vLLM's pages.

    The object does not store the pages: each method receives them as arguments.

    Args:
        geometry: Sizes of the layer.
        options: Options of the plug-in.
        encoding: Encoding of keys.
        layout: Layout of the codes in pages.
        limit: The sequences that search.
        drafted: Largest number of drafted tokens that a step verifies (speculative decoding).
        budget: The limits of the error, or None if each search retrieves a fixed number of rows.
    """

    geometry: Geometry
    options: Options
    encoding: Encoding
    layout: Layout
    limit: Limit
    drafted: int = 0
    budget: RowBudget | None = field(default=None, compare=False)

    @staticmethod
    def of(options: Options, geometry: Geometry, drafted: int = 0) -> PagedAttention:
        """Create the `PagedAttention` object of one attention layer.

        Args:
            options: Options of the plug-in.
            geometry: Sizes of the layer.
            drafted: Largest number of drafted tokens that a step verifies.
        """
        encoding = Encoding.of(options.config, geometry, ops)
        layout = options.layout(geometry.head_dim)
        limit = limit_of(options.dense_below, geometry, None, batches=False)
        error = options.allowed_error
        budget = None if error is None else RowBudget(error, limit.dense_below)
        return PagedAttention(geometry, options, encoding, layout, limit, drafted, budget)

    def explain(self) -> str:
        """Return a description of the layer: its index, and the sequences that use the index."""
        text, reading = self.options.explain(self.limit), self.options.reading
        return f"{text}, in plain torch; {reading.explain()}"

    def encode(
        self, rows: Tensor, records: Tensor, slots: Tensor, scales: Scales | None = None
    ) -> None:
        """Encode the segments of 256 tokens that the new tokens complete.

        The codes of a segment depend only on its 256 keys. They overwrite the codes that the page
        contained for an earlier segment in the same place.

        Args:
            rows: Keys and values in the engine's pages.
            records: Codes in the engine's pages, written by this call.
            slots: Positions of the new tokens in the pages, int64 `[T]`.
            scales: Scales of the layer, if its keys and values are in FP8.
        """
        segments = pages.filled(slots)
        if not len(segments):
            return
        keys = pages.segment_keys(rows, segments, self.geometry, scales)
        codes = dict(self.encoding.encode(keys, None))
        packed = self.layout.pack(codes, codes.pop("centers", None))
        pages.write_records(records, segments, packed[:, 0])

    def attend_batch(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Iterable[Sequence],
        starts: list[int],
        *,
        prompts: list[bool],
        sparse: list[Prompt | None] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Compute the attention of the newest tokens of several sequences, one after another.

        Args:
            queries: Queries of all sequences, `[T, H, D]`.
            output: `[T, H, Dv]`, written by this call.
            sequences: The sequences of the batch.
            starts: Position of each sequence's first query, and the number of all queries.
            prompts: For each sequence, whether it is still reading its prompt. An empty list if
                this is not known.
            sparse: For each sequence, its prompt if this is read with sparse attention, otherwise
                None. Further sequences have none.
            sinks: Logits of the learned sinks `[H]`, or None in a model without sinks.
        """
        for number, sequence in enumerate(sequences):
            own = slice(starts[number], starts[number + 1])
            if own.start == own.stop:
                continue
            prompt = number < len(prompts) and prompts[number]
            chosen = sparse[number] if sparse and number < len(sparse) else None
            output[own] = self.attend(queries[own], sequence, sinks, prompt=prompt, sparse=chosen)

    def attend(
        self,
        queries: Tensor,
        sequence: Sequence,
        sinks: Tensor | None = None,
        *,
        prompt: bool = False,
        sparse: Prompt | None = None,
    ) -> Tensor:
        """Return the attention output `[T, H, Dv]` of a sequence's newest queries `[T, H, D]`.

        In a long sequence, the query of a decode step searches the index. So does each query of a
        step that verifies drafted tokens. The queries of a prompt use full causal attention, or
        attend to chosen blocks of keys if the prompt is read with sparse attention.

        Args:
            queries: Queries of the newest tokens.
            sequence: The sequence, whose pages already contain the rows of these tokens.
            sinks: Logits of the learned sinks `[H]`, or None in a model without sinks.
            prompt: Whether the queries are a chunk of a prompt, even if it is a single one.
            sparse: The prompt of the sequence if it is read with sparse attention, otherwise None.
        """
        count = len(queries)
        first = sequence.length - count
        if sparse is not None and sparse.has_blocks(first, sequence.length):
            rows = sequence.read(0, sequence.length, self.geometry)
            output = attend_prompt(queries, rows, sparse, self.geometry)
            self._measure(output, sequence)
            return output
        # drafts are verified as if the tokens were decoded one after another
        if not prompt and 1 < count <= 1 + self.drafted:
            parts = []
            for place in range(count):
                known = replace(sequence, length=sequence.length - count + 1 + place)
                parts.append(self.attend(queries[place, None], known, sinks))
            return torch.cat(parts)
        searches = count == 1 and not prompt and (self.budget is None or self.budget.known)
        if searches and (indexed := self.searched(sequence.length)):
            return self._search(queries, sequence, indexed, sinks)
        output = self.attend_dense(queries, sequence, sinks)
        self._measure(output, sequence)
        return output

    def _measure(self, output: Tensor, sequence: Sequence) -> None:
        """Measure the outputs `[T, H, Dv]` of the newest tokens of a sequence, if the expected
        error determines the numbers of rows."""
        if self.budget is None:
            return
        places = self.budget.places(sequence.length, len(output))
        if not places:
            return
        values = sequence.read(places.start, places.stop, self.geometry).values
        outputs = output[-len(places) :].transpose(0, 1)[None]
        self.budget.measure(values, outputs, sequence.length)

    def searched(self, length: int) -> int:
        """Return how many tokens a decode step searches in a sequence of this length. Only complete
        segments that are older than the local window are searched."""
        if length < self.limit.dense_below:
            return 0
        indexed = max(length - self.options.local_window, 0) // BLOCK * BLOCK
        return indexed if indexed > self.options.sink else 0

    def hits(
        self, queries: Tensor, sequence: Sequence, indexed: int, limit: ErrorLimit | None = None
    ) -> Hits:
        """Search the first `indexed` tokens of a sequence, except the sink.

        Args:
            queries: `[1, H, D]`.
            sequence: The sequence.
            indexed: Number of tokens.
            limit: Limit of the error, or None to retrieve `k` rows.
        """
        valid = torch.arange(indexed, device=queries.device)[None] >= self.options.sink
        tokens = Tokens.of_blocks(
            self.codes(sequence, indexed), self.encoding, self.geometry, valid
        )
        parts = tokens, Queries.of(queries, tokens), min(self.options.most_rows, int(tokens.counts))
        if limit is not None:
            found = sampling.search_within(*parts, limit)
            return found.narrowed(max(1, int((found.ids != UNUSED).sum(-1).max())))
        search = select_rows.search if self.encoding.config.sampling == "none" else sampling.search
        return search(*parts)

    def codes(self, sequence: Sequence, indexed: int) -> Codes:
        """Return the codes of a sequence's first `indexed` tokens, `[1, G, indexed, …]`."""
        records = pages.read_records(sequence.records, sequence.table, indexed // BLOCK)[None]
        codes = self.layout.unpack(records, indexed)
        if self.encoding.config.center:
            codes["centers"] = self.layout.centers(records)
        return codes

    def _search(
        self, queries: Tensor, sequence: Sequence, indexed: int, sinks: Tensor | None
    ) -> Tensor:
        g, place = self.geometry, (sequence.rows, sequence.table)
        sink = sequence.read(0, self.options.sink, g)
        newest = sequence.read(indexed, sequence.length, g)
        limit = None
        if self.budget is not None:
            lse = resident_lse(queries, (sink, newest), g, sinks)
            limit = self.budget.limit(lse, sequence.length)
        hits = self.hits(queries, sequence, indexed, limit)
        if self.budget is not None:
            self.budget.count(hits)
        found = pages.gather_rows(*place, hits.ids, g, sequence.scales)
        parts = found, sink, newest
        keys = torch.cat([part.keys for part in parts], dim=2)
        values = torch.cat([part.values for part in parts], dim=2)
        bias = queries.new_zeros((1, g.q_heads, keys.shape[2]), dtype=torch.float32)
        retrieved = bias[..., : hits.ids.shape[-1]]
        retrieved += bias_of(hits.ids != UNUSED).repeat_interleave(g.group_size, dim=1)
        if hits.log_weight is not None:
            retrieved += hits.log_weight
        output, lse = attend(
            queries, keys, values, scale=g.scale, softcap=g.softcap, bias=bias, return_lse=True
        )
        return output if sinks is None else with_sink_logits(output, lse, sinks)

    def attend_dense(
        self, queries: Tensor, sequence: Sequence, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the full causal attention of queries `[T, H, D]`, `[T, H, Dv]`."""
        g, heads = self.geometry, queries.transpose(0, 1)[None]  # [1, H, T, D]
        rows = sequence.read(0, sequence.length, g)
        if g.softcap is None and sinks is None:
            found = attend_causal(heads, rows.keys, rows.values, scale=g.scale)
        else:
            blocks = _causal_blocks(rows, len(queries))
            found, lse = attend_blocks(
                heads, blocks, scale=g.scale, softcap=g.softcap, return_lse=True
            )
            if sinks is not None:
                found = with_sink_logits(found, lse, sinks[:, None])
        return found[0].transpose(0, 1)


def resident_lse(
    queries: Tensor, parts: Iterable[Rows], g: Geometry, sinks: Tensor | None
) -> Tensor:
    """Return the log-sum-exp of the logits of some rows and of learned sinks, float32 `[1, H]`.

    Args:
        queries: `[1, H, D]`.
        parts: The rows.
        g: Geometry of the layer.
        sinks: Logits of the learned sinks `[H]`, or None.
    """
    keys = torch.cat([part.keys for part in parts], dim=2).float()
    folded = queries.float().view(1, g.kv_heads, -1, g.head_dim)
    lse = cap(folded @ keys.mT, g.scale, g.softcap).logsumexp(-1).flatten(1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float())


def _causal_blocks(rows: Rows, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield keys and values in blocks of `ROWS`, each with a causal mask for the newest `count`
    queries."""
    length = rows.keys.shape[2]
    positions = torch.arange(length, device=rows.keys.device)
    for start in range(0, length, ROWS):
        some = slice(start, start + ROWS)
        seen = positions[some] <= positions[length - count :, None]  # [T, R]
        yield rows.keys[:, :, some], rows.values[:, :, some], bias_of(seen)
