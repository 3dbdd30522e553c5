"""Select units (clusters, segments or pages of tokens), and return the rows of their tokens.

A token belongs to at most one unit. The tensor `members` contains the token ids of all units: the
tokens of unit `s` are `members[starts[s] : starts[s] + sizes[s]]`, ascending. In shapes, `S` is the
number of units, and `P` is the length of `members`.
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
    """Select the best units until they have `k` rows, and return these rows.

    If the last unit does not fit, only its first tokens are returned. A row has the score of its
    unit.

    Args:
        scores: Scores of the units, float32 `[B, G, S]`, `-inf` for a unit that must not be
            selected.
        starts: Position in `members` where each unit begins, integers `[B, G, S]`.
        sizes: Number of tokens of each unit, integers `[B, G, S]`.
        members: Token ids of all units, integers `[B, G, P]`.
        k: Number of rows to return.
        singles: Ids of `R` further tokens, each of which is a unit, int64 `[B, R]`, -1 in unused
            slots; or None. With `singles`, `scores` and `sizes` are `[B, G, S + R]`: these tokens
            come last, and the size of an unused slot is 0.

    Returns:
        Hits with token ids `[B, G, k]` and scores `[B, G, k]`.
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
    """Look up the token ids at given offsets within units.

    Args:
        units: The unit of each token to look up, as its position in `starts`, int64 `[B, G, K]`;
            or -1.
        offset: Offset of the token within its unit, int64 `[B, G, K]`.
        starts: Position in `members` where each unit begins, integers `[B, G, S]`.
        members: Token ids of all units, integers `[B, G, P]`.
        singles: Ids of `R` further tokens, int64 `[B, R]`, or None. Each of these tokens is a unit
            of its own. The numbers of these units are `S`, `S + 1`, and so on.

    Returns:
        Token ids, int64 `[B, G, K]`, -1 where the unit is -1.
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
    """Find the first `k` rows of units (such as pages of tokens) that follow one another.

    For example, with the sizes 3, 5, … and `k = 4`, the first three rows are in unit 0 with the
    offsets 0, 1 and 2. The fourth row is in unit 1 with the offset 0.

    Args:
        sizes: Number of rows of each unit, integers `[B, G, S]`.
        k: Number of rows.

    Returns:
        For each row, the position of its unit in `sizes` (-1 if the units have too few rows), and
        its offset within the unit, both int64 `[B, G, k]`.
    """
    ends = sizes.long().cumsum(-1)
    slots = torch.arange(k, device=sizes.device).expand(*sizes.shape[:-1], k).contiguous()
    unit = torch.searchsorted(ends, slots, right=True)  # the first unit that ends after this row
    unit = unit.masked_fill(unit == sizes.shape[-1], UNUSED)
    return unit, slots - at(ends - sizes, unit, 0)


def ranked(ids: Tensor, scores: Tensor, log_weight: Tensor | None = None) -> Hits:
    """Sort rows by score, and return them as hits. Among equal scores, the lower id comes first.

    Args:
        ids: Token ids, int64 `[B, G, K]`, -1 in unused slots.
        scores: Scores of the rows, float32 `[B, G, K]`.
        log_weight: Log weights of the rows, float32 `[B, H, K]`, or None.
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
    """Gather entries along the last dimension, with a default for negative positions.

    Args:
        table: `[..., S]`.
        positions: Int64 `[..., K]`.
        otherwise: Result for a negative position.

    Returns:
        `[..., K]`.
    """
    if not table.shape[-1]:
        return torch.full_like(positions, otherwise, dtype=table.dtype)
    entries = table.gather(-1, positions.clamp_min(0))
    return entries.masked_fill(positions < 0, otherwise)
