"""Some of the `k` rows are drawn at random and weighted for all that are left out.

The best `k` rows are not the best use of `k` reads: attention over them alone takes the missing
share for nothing. Here the best `k - r` rows are kept, and `r` are drawn from the inner index's
next best, each with a known probability `π` and a log-weight of `-log π` (Horvitz and Thompson,
1952), so that numerator and denominator of the softmax are right on average. What it gains on a
real model: docs/decisions/0010-rows-drawn-at-random.md.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kvindex import check
from kvindex.near import Near
from kvindex.ops.attention import cap
from kvindex.protocol import UNUSED, Hits, KVIndex
from kvindex.wrappers.base import Wrapper

POLICIES = ("mean_share", "max_share")
"""Whose scores are logarithms of shares."""


class Sample(Wrapper):
    """`share` of the `k` rows are drawn from the `pool · k` best of the inner index.

    Hits' `log_weight` is 0 for the rows that are sure. Drawing is systematic, in order of ids, so
    that the rows drawn are spread over the sequence and the same from run to run.

    Raises ValueError for sizes out of range, and for an index whose scores are no shares
    (`group` other than `mean_share` and `max_share`, unless groups have one head).
    """

    def __init__(self, inner: KVIndex, *, share: float = 0.5, pool: int = 8) -> None:
        super().__init__(inner)
        self.share = check.within("share", share, 0, 1)
        self.pool = check.at_least("pool", pool, 2)
        policy = getattr(inner.config, "group", None)
        if inner.geometry.group_size > 1 and policy not in POLICIES:
            raise ValueError(f"inner: got one with group={policy!r}, allowed is {list(POLICIES)}")

    def repeated(self, count: int) -> Sample:
        """As `BaseIndex.repeated`."""
        view = copy(self)
        # not of the protocol: what `BaseIndex` has, a wrapper around one passes on
        view.inner = self.inner.repeated(count)  # type: ignore[attr-defined]
        return view

    def prepare(self, *, k: int, tokens: int) -> None:
        """As `ParisKV.prepare`, for an inner index that has it."""
        inner, g = self.inner, self.geometry
        inner.prepare(k=k * self.pool, tokens=tokens)  # type: ignore[attr-defined]
        if self.attends:
            batch = len(inner.counts)  # type: ignore[attr-defined]
            queries = torch.zeros((batch, g.q_heads, g.head_dim), dtype=g.dtype, device=g.device)
            self.attend(queries, Near(g, batch, 1), k=k)

    def search(self, queries: Tensor, *, k: int, mass: float | None = None) -> Hits:
        """The best rows and some that stand for the rest.

        Raises ValueError for a mass, and for an inner index whose rows have weights of their own.
        """
        if mass is not None:
            raise ValueError(f"mass: got {mass}, allowed is None where rows are drawn at random")
        drawn = int(self.share * check.at_least("k", k, 1))
        hits = self.inner.search(queries, k=k * self.pool)
        if hits.log_weight is not None:
            raise ValueError(
                f"inner: got {type(self.inner).__name__}, whose rows stand for others already; "
                "allowed is an index that selects rows"
            )
        g = self.geometry
        logits = hits.scores if g.group_size > 1 else cap(hits.scores, g.scale, g.softcap)
        chances = inclusion(logits, k - drawn, drawn)
        picked = chances >= 1
        picked |= drawn_in_order(hits.ids, chances.masked_fill(picked, 0))
        slots = picked.cumsum(-1) - 1  # ranks of the inner index's order are kept
        slots = torch.where(picked & (slots < k), slots, k)
        weights = -chances.clamp_min(torch.finfo(chances.dtype).tiny).log()
        ids = _placed(hits.ids, slots, k, UNUSED)
        log_weight = _placed(weights, slots, k, float("-inf"))
        return Hits(
            ids,
            _placed(hits.scores, slots, k, float("-inf")),
            log_weight.repeat_interleave(g.group_size, dim=1),
        )


def inclusion(logits: Tensor, sure: int, drawn: int) -> Tensor:
    """Chances to be picked, float32 `[B, G, P]`: 1 for the `sure` best, and `drawn` in all for
    the others in proportion to `exp(logits)`, none above 1.

    logits: descending, `-inf` for no row.
    """
    rest = logits[..., sure:].double()
    rest = (rest - rest[..., :1].clamp_min(torch.finfo(rest.dtype).min)).exp()  # no row: 0
    tail = rest.flip(-1).cumsum(-1).flip(-1)
    # chances above 1 belong to a prefix: it ends where the rest can share what is left
    left = drawn - torch.arange(rest.shape[-1], device=logits.device)
    shares = left * rest <= tail
    capped = ~shares.cummax(-1).values if rest.shape[-1] else shares
    count = capped.sum(-1, keepdim=True)
    total = rest.masked_fill(capped, 0).sum(-1, keepdim=True).clamp_min(TINY)
    chances = torch.where(capped, 1.0, rest * (drawn - count) / total).clamp(0, 1)
    top = (logits[..., :sure] > float("-inf")).double()
    found = chances.masked_fill(rest == 0, 0)
    return torch.cat([top, found], dim=-1).float()


TINY = torch.finfo(torch.float64).tiny


def drawn_in_order(ids: Tensor, chances: Tensor) -> Tensor:
    """Systematic drawing, bool `[B, G, P]`: along the ids, at every unit of summed chances."""
    order = ids.argsort(dim=-1)
    summed = chances.gather(-1, order).double().cumsum(-1) + 0.5
    before = summed - chances.gather(-1, order).double()
    return torch.zeros_like(chances, dtype=torch.bool).scatter_(
        -1, order, summed.floor() != before.floor()
    )


def _placed(values: Tensor, slots: Tensor, k: int, empty: float) -> Tensor:
    """`values` moved to their slots, `[B, G, k]`; the slot `k` is dropped."""
    shape = (*values.shape[:-1], k + 1)
    placed = torch.full(shape, empty, dtype=values.dtype, device=values.device)
    return placed.scatter_(-1, slots, values)[..., :k]
