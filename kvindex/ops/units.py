"""Rows of the best units: clusters, segments or pages of tokens, which do not overlap.

Members lie unit by unit in one tensor of ids: unit `s` is `members[starts[s] :][: sizes[s]]`,
ascending. `S` units, `P` members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops import select


def best_rows(
    scores: Tensor,
    starts: Tensor,
    sizes: Tensor,
    members: Tensor,
    k: int,
    singles: Tensor | None = None,
) -> Hits:
    """The rows of the best units, whole ones until `k` rows are reached, the last one cut.

    scores: float32 `[B, G, S]`, `-inf` for a unit that is never taken; starts, sizes: integers
    `[B, G, S]`; members: integers `[B, G, P]`, ids of tokens. A row's score is its unit's.
    singles: int64 `[B, R]`, ids of tokens that are units of their own, -1 for none: then scores
    and sizes (0 or 1) are `[B, G, S + R]`, those of singles last.
    """
    scores = scores.masked_fill(sizes == 0, float("-inf"))
    best, taken = select.top_k(scores, min(k, scores.shape[-1]))
    slot, offset = walk(at(sizes, taken, 0), k)
    units = at(taken, slot, UNUSED)
    ids = rows_at(units, offset, starts, members, singles)
    return ranked(ids, at(best, slot, float("-inf")))


def rows_at(
    units: Tensor, offset: Tensor, starts: Tensor, members: Tensor, singles: Tensor | None
) -> Tensor:
    """Ids of the rows at offsets in units, both int64 `[B, G, K]`; -1 where a unit is -1.

    starts, members, singles: as `best_rows` takes them.
    """
    S = starts.shape[-1]
    listed = units.masked_fill(units >= S, UNUSED)
    position = (at(starts, listed, 0) + offset).masked_fill(listed < 0, UNUSED)
    ids = at(members, position, UNUSED).long()
    if singles is None:
        return ids
    table = singles[:, None].expand(-1, units.shape[1], -1)
    return torch.where(units >= S, at(table, (units - S).clamp_min(UNUSED), UNUSED), ids)


def walk(sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Unit and offset of each of `k` slots if units of these sizes are laid end to end.

    sizes: integers `[B, G, S]`. Returns the position of a slot's unit, -1 past the last unit, and
    its offset within the unit, both int64 `[B, G, k]`.
    """
    ends = sizes.long().cumsum(-1)
    slots = torch.arange(k, device=sizes.device).expand(*sizes.shape[:-1], k).contiguous()
    unit = torch.searchsorted(ends, slots, right=True)  # the first that ends after the slot
    unit = unit.masked_fill(unit == sizes.shape[-1], UNUSED)
    return unit, slots - at(ends - sizes, unit, 0)


def ranked(ids: Tensor, scores: Tensor, log_weight: Tensor | None = None) -> Hits:
    """Hits in the protocol's order: scores descending, equal ones by the lower id.

    ids: int64 `[B, G, K]`, -1 where unused (whatever the score); scores: float32 `[B, G, K]`;
    log_weight: float32 `[B, H, K]` or None, in the order of the ids.
    """
    by_id = ids.sort(dim=-1, stable=True).indices
    scores = scores.masked_fill(ids == UNUSED, float("-inf")).gather(-1, by_id)
    order = scores.sort(dim=-1, descending=True, stable=True)
    place = by_id.gather(-1, order.indices)
    ids = ids.gather(-1, place)
    if log_weight is not None:
        heads = log_weight.shape[1] // ids.shape[1]
        slots = place.repeat_interleave(heads, dim=1)
        unused = (ids == UNUSED).repeat_interleave(heads, dim=1)
        log_weight = log_weight.gather(-1, slots).masked_fill(unused, float("-inf"))
    return Hits(ids, order.values, log_weight)


def at(table: Tensor, positions: Tensor, otherwise: float) -> Tensor:
    """Entries `[..., K]` of a table `[..., S]`; `otherwise` where a position int64 is negative."""
    if not table.shape[-1]:
        return torch.full_like(positions, otherwise, dtype=table.dtype)
    entries = table.gather(-1, positions.clamp_min(0))
    return entries.masked_fill(positions < 0, otherwise)
