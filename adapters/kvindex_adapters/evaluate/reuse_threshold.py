"""Calibrate the threshold `tau` of `kvindex.wrappers.Reuse`, which reuses hits, for a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.ops import group
from kvindex.ops.select import top_k
from kvindex.wrappers.reuse import similarity
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.evaluate.recall import SINK

ALWAYS = math.nextafter(1.0, 2.0)
"""Least threshold at which every step searches."""

TAUS = (-1.0, 0.0, *(percent / 100 for percent in range(50, 101)), ALWAYS)
"""Thresholds to try: queries that follow each other are seldom less alike than .5."""


@dataclass(frozen=True)
class Point:
    """Means over layers and steps. rate: share of steps that searched; held: share of a step's own
    best `k` rows that are among the hits it used.
    """

    tau: float
    rate: float
    held: float


@dataclass(frozen=True)
class Calibration:
    """tau: the least of those tried that holds enough; points: all of them, ascending."""

    tau: float
    points: tuple[Point, ...]

    @property
    def chosen(self) -> Point:
        """The point of `tau`."""
        return next(point for point in self.points if point.tau == self.tau)


def calibrate_tau(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    steps: int = 256,
    k: int = 100,
    held: float = 0.8,
    taus: Sequence[float] = TAUS,
    chunk: int = 1024,
    on_progress: Progress | None = None,
) -> Calibration:
    """The least tau at which reused hits hold the share `held` of what a search would find.

    The model reads ids int64 `[N]`; its newest `steps` tokens are taken as steps, and search the
    tokens before them exactly, without the first `SINK`. A tau at which every step searches is
    always tried. Raises ValueError for sizes out of range, and what `capture` raises.
    """
    check.within("held", held, 0, 1)
    check.tensor("ids", ids, {"N": None}, torch.int64)
    check.at_least("k", k, 1)
    room = len(ids) - SINK - k
    if check.at_least("steps", steps, 1) > room:
        raise ValueError(f"steps: got {steps}, allowed is up to {room} for {len(ids)} tokens")
    layers = capture(model, ids, queries=steps + 1, chunk=chunk, on_progress=on_progress)
    return calibrated(layers, k=k, held=held, taus=taus)


def calibrated(
    layers: Sequence[Captured], *, k: int, held: float, taus: Sequence[float] = TAUS
) -> Calibration:
    """The same from captured layers, whose first query is that before the first step."""
    tried = sorted({float(tau) for tau in taus} | {ALWAYS})
    rates, shares = torch.zeros(2, len(tried), dtype=torch.float64)
    for layer in layers:
        best, similar = _best(layer, k), _similarities(layer)
        for i, tau in enumerate(tried):
            searched = similar < tau
            searched[0] = True
            steps = torch.arange(len(searched), device=searched.device)
            source = torch.where(searched, steps, 0).cummax(0).values
            retrieved = (best[..., None] == best[source][:, :, None]).any(-1)
            rates[i] += searched.double().mean().cpu()
            shares[i] += retrieved.double().mean().cpu()
    points = tuple(
        Point(tau, float(rate) / len(layers), float(share) / len(layers))
        for tau, rate, share in zip(tried, rates, shares, strict=True)
    )
    return Calibration(next(p.tau for p in points if p.held >= held or p.tau >= ALWAYS), points)


def _similarities(layer: Captured) -> Tensor:
    """Similarity of the query of each step to the one before, `[T - 1]`."""
    directions = normalize(layer.queries.float(), dim=-1).transpose(0, 1)  # [T, H, D]
    return similarity(directions[:-1], directions[1:]).clamp(-1, 1)


def _best(layer: Captured, k: int) -> Tensor:
    """The best `k` rows of each step, int64 `[T - 1, G, k]`, as `exact` finds them."""
    T = layer.queries.shape[1] - 1
    keys = layer.keys[:, SINK : layer.keys.shape[1] - T].float()
    queries = layer.queries[:, 1:].float()
    queries = queries.view(len(keys), -1, *queries.shape[1:])  # [G, g, T, D]
    best = []
    for block in torch.split(queries, 64, dim=2):
        scores = (block @ keys[:, None].mT).permute(2, 0, 1, 3).contiguous()  # [t, G, g, N]
        agreed = group.agree(scores, "mean_share", scale=layer.scale, softcap=layer.softcap)
        best.append(top_k(agreed, k)[1])
    return torch.cat(best)
