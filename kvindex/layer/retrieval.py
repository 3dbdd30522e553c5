"""A decoded token's attention: sink, window, and the rows that the index retrieves.

Three ways, the shortest that the index offers: the whole step at once (`DecodesStep`), attention to
rows where they lie (`Attends`), or search, fetch, and attention over what is put together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    UNUSED,
    Attended,
    Attends,
    DecodesStep,
    Hits,
    KVIndex,
    Rows,
    RunsOps,
    TellsRowBytes,
)
from kvindex.layer.regions import Regions
from kvindex.ops.attention import with_sink_logits


@dataclass(frozen=True, eq=False)
class Retrieved:
    """What a step attends to, and what it has read.

    beside: rows of sink and window; masked: how many of those are not attended to, mean over the
    batch; coverage: of `Hits`, or None.
    """

    attended: Attended
    beside: int
    masked: Tensor | float
    coverage: Tensor | None = None


def decode_step(
    index: DecodesStep,
    queries: Tensor,
    token: Rows,
    regions: Regions,
    indexed: int,
    k: int,
    graphs: bool,
) -> Retrieved:
    """As `attend_resident`, once the window holds the token, keys `[B, G, 1, D]`."""
    resident = regions.resident(indexed, more=1)
    window = regions.claim(indexed, token.keys, token.values, None)
    attended = index.decode_step(queries, token, resident, window, k=k, graphs=graphs)
    return Retrieved(attended, len(resident), resident.masked)


def attend_resident(
    index: Attends, regions: Regions, indexed: int, queries: Tensor, *, k: int
) -> Retrieved:
    """Attention of queries `[B, H, D]` to sink and window in their buffer, and to `k` rows."""
    resident = regions.resident(indexed)
    attended = index.attend(queries, resident, k=k)
    return Retrieved(attended, len(resident), resident.masked)


def search_and_attend(
    index: KVIndex,
    regions: Regions,
    queries: Tensor,
    *,
    k: int,
    coverage: float | None = None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    newer: int = 0,
) -> Retrieved:
    """The same by search and fetch.

    bias: a term of the logits, of all tokens `[B, H, N]`; sink_logits: `[B, H]`, which the coverage
    counts; newer: how many of the newest tokens are not seen.
    """
    seen = regions.real(len(index))
    if seen is None:
        seen = torch.ones_like(queries[:, 0, :1], dtype=torch.bool)
        seen = seen.expand(-1, len(regions))
    if newer:
        seen = seen.clone()
        seen[:, -newer:] = False
    hits = index.search(queries, k=k, coverage=coverage)
    found = index.fetch(hits)
    return attend_over(index, regions, queries, hits, found, seen, bias, sink_logits)


def attend_over(
    index: KVIndex,
    regions: Regions,
    queries: Tensor,
    hits: Hits,
    found: Rows,
    seen: Tensor,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Retrieved:
    """Attention of queries `[B, H, D]` to `found`, the sink and the window's `seen` rows.

    seen: bool `[B, W]`; bias: a term of the logits, of all tokens `[B, H, N]`; sink_logits:
    `[B, H]`, which the coverage counts, but not the attention. Regions of batch 1 serve any `B`
    queries.
    """
    g, B = index.geometry, len(queries)
    resident, seen = regions.rows(seen)
    used = hits.ids != UNUSED
    visible = torch.cat([used, seen[:, None].expand(*used.shape[:2], -1)], dim=2)
    mask = bias_of(visible).repeat_interleave(g.group_size, dim=1)  # [B, H, K + S + W]
    if hits.log_weight is not None:
        mask[..., : hits.log_weight.shape[-1]] += hits.log_weight
    if bias is not None:
        beside = regions.positions(len(index))[:, None]
        places = torch.cat([hits.ids, beside.expand(-1, g.kv_heads, -1)], dim=2)
        places = places.repeat_interleave(g.group_size, dim=1)
        mask += bias.float().gather(-1, places.clamp_min(0)).masked_fill(places < 0, 0)
    keys = torch.cat([found.keys, resident.keys.expand(B, -1, -1, -1)], dim=2)
    values = torch.cat([found.values, resident.values.expand(B, -1, -1, -1)], dim=2)
    runs = capability(index, RunsOps)
    attend = (ops if runs is None else runs.ops).attention.attend
    options = dict(scale=g.scale, softcap=g.softcap, return_lse=True)
    output, lse = attend(queries, keys, values, bias=mask, **options)
    attended = Attended(output, lse, used.sum(-1, dtype=torch.int32))
    masked, covered = (~seen).sum(1).float().mean(), hits.coverage
    if covered is not None and sink_logits is not None:
        bias = mask[..., : used.shape[2]].contiguous()
        _, lse = attend(queries, found.keys, found.values, bias=bias, **options)
        covered = ops.coverage.with_sink_logits(covered, lse, sink_logits)
    return Retrieved(attended, seen.shape[1], masked, covered)


def output_of(attended: Attended, sink_logits: Tensor | None) -> Tensor:
    """The output, with logits of learned sinks `[B, H]` in its denominator unless None."""
    if sink_logits is None:
        return attended.output
    return with_sink_logits(attended.output, attended.lse, sink_logits)


def bias_of(visible: Tensor) -> Tensor:
    """0 where a row is visible, `-inf` where it is not; float32."""
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def rows_to_ask(index: KVIndex, k: int) -> int:
    """`k`, but not far above what an index can hold, a summary a token."""
    held = len(index)
    most: int = k if k <= held else 2 ** (2 * held - 1).bit_length()
    return min(k, most)


def row_bytes(index: KVIndex) -> int:
    """What a fetched row costs: as the index says, or its key and value as they are."""
    g, tells = index.geometry, capability(index, TellsRowBytes)
    plain = (g.head_dim + g.value_dim) * g.dtype.itemsize
    return plain if tells is None else tells.row_bytes
