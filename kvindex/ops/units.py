"""Select units (clusters, segments or pages of tokens) and return the rows that are in them.

Units do not overlap. The ids of their tokens are in one tensor `members`: unit `s` has the ids
`members[starts[s] :][: sizes[s]]`, ascending. `S` is the number of units, `P` the number of
members.
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
    """Return the first `k` rows of the units, best unit first; the last unit may be cut.

    Args:
        scores: Float32 `[B, G, S]`, `-inf` for a unit that is never taken. A row has its unit's
            score.
        starts: First member of each unit, integers `[B, G, S]`.
        sizes: Number of members of each unit, integers `[B, G, S]`.
        members: Token ids, integers `[B, G, P]`.
        k: Number of rows.
        singles: Ids of `R` tokens, each of which is a unit by itself, int64 `[B, R]`, -1 where
            there is none; or None. With singles, scores and sizes are `[B, G, S + R]`, and the last
            `R` entries are those of the singles, with sizes 0 or 1.

    Returns:
        Ids `[B, G, k]` and scores `[B, G, k]`.
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
    """Look up token ids by unit and offset.

    Args:
        units: Int64 `[B, G, K]`, -1 for none.
        offset: Position within the unit, int64 `[B, G, K]`.
        starts: First member of each unit, integers `[B, G, S]`.
        members: Token ids, integers `[B, G, P]`.
        singles: Ids of tokens, each of which is a unit by itself, int64 `[B, R]`, or None.

    Returns:
        Int64 `[B, G, K]`, -1 where a unit is -1.
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
    """Find the unit and the offset of each of the first `k` rows of consecutive units.

    Args:
        sizes: Number of rows of each unit, integers `[B, G, S]`.
        k: Number of rows.

    Returns:
        Position of each row's unit, -1 after the last unit, and the row's offset within the unit,
        both int64 `[B, G, k]`.
    """
    ends = sizes.long().cumsum(-1)
    slots = torch.arange(k, device=sizes.device).expand(*sizes.shape[:-1], k).contiguous()
    unit = torch.searchsorted(ends, slots, right=True)  # the first unit that ends after the slot
    unit = unit.masked_fill(unit == sizes.shape[-1], UNUSED)
    return unit, slots - at(ends - sizes, unit, 0)


def ranked(ids: Tensor, scores: Tensor, log_weight: Tensor | None = None) -> Hits:
    """Sort rows into the order of hits: scores descending, equal ones by the lower id.

    Args:
        ids: Int64 `[B, G, K]`, -1 where unused.
        scores: Float32 `[B, G, K]`.
        log_weight: Float32 `[B, H, K]` in the order of the ids, or None.
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
    """Look up entries of a table.

    Args:
        table: `[..., S]`.
        positions: Int64 `[..., K]`.
        otherwise: Entry for a negative position.

    Returns:
        `[..., K]`.
    """
    if not table.shape[-1]:
        return torch.full_like(positions, otherwise, dtype=table.dtype)
    entries = table.gather(-1, positions.clamp_min(0))
    return entries.masked_fill(positions < 0, otherwise)
