"""Calibrate the threshold `tau` of `kvindex.wrappers.Reuse` for a model."""

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
"""Smallest threshold with which every step searches."""

TAUS = (-1.0, 0.0, *(percent / 100 for percent in range(50, 101)), ALWAYS)
"""Thresholds to try. The similarity of successive queries is rarely below 0.5."""


@dataclass(frozen=True)
class Point:
    """Results of one threshold, as means over layers and steps.

    Args:
        tau: The threshold.
        rate: Fraction of steps that searched.
        overlap: Fraction of a step's best `k` rows (by exact search) that are among the hits that
            it used.
    """

    tau: float
    rate: float
    overlap: float


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Args:
        tau: The smallest threshold whose overlap is large enough.
        points: Results of all thresholds, ascending.
    """

    tau: float
    points: tuple[Point, ...]

    @property
    def chosen(self) -> Point:
        """The point of the threshold `tau`."""
        return next(point for point in self.points if point.tau == self.tau)


def calibrate_tau(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    steps: int = 256,
    k: int = 100,
    overlap: float = 0.8,
    taus: Sequence[float] = TAUS,
    chunk: int = 1024,
    on_progress: Progress | None = None,
) -> Calibration:
    """Find the smallest `tau` with which the hits in use contain enough of each step's best rows.

    The model reads the text. Its newest tokens are treated as decode steps. These steps search all
    earlier tokens, except the first `SINK` tokens, exactly. A threshold with which every step
    searches is always tried.

    Args:
        model: The transformers model.
        ids: Text, int64 `[N]`.
        steps: Number of newest tokens that count as decode steps.
        k: Rows to retrieve.
        overlap: Fraction of a step's best `k` rows that the used hits must contain, in (0, 1].
        taus: Thresholds to try.
        chunk: Tokens to read at a time.
        on_progress: Called with the phase, the tokens done and the tokens in total.

    Returns:
        The threshold, and the results of all thresholds.

    Raises:
        ValueError: A size is out of range; also what `capture` raises.
    """
    check.within("overlap", overlap, 0, 1)
    check.tensor("ids", ids, {"N": None}, torch.int64)
    check.at_least("k", k, 1)
    room = len(ids) - SINK - k
    if check.at_least("steps", steps, 1) > room:
        raise ValueError(f"steps: got {steps}, allowed is up to {room} for {len(ids)} tokens")
    layers = capture(model, ids, queries=steps + 1, chunk=chunk, on_progress=on_progress)
    return calibrated(layers, k=k, overlap=overlap, taus=taus)


def calibrated(
    layers: Sequence[Captured], *, k: int, overlap: float, taus: Sequence[float] = TAUS
) -> Calibration:
    """Calibrate from captured layers, whose first query is that of the token before the first
    step."""
    tried = sorted({float(tau) for tau in taus} | {ALWAYS})
    rates, overlaps = torch.zeros(2, len(tried), dtype=torch.float64)
    for layer in layers:
        best, similar = _best(layer, k), _similarities(layer)
        for i, tau in enumerate(tried):
            searched = similar < tau
            searched[0] = True
            steps = torch.arange(len(searched), device=searched.device)
            source = torch.where(searched, steps, 0).cummax(0).values
            retrieved = (best[..., None] == best[source][:, :, None]).any(-1)
            rates[i] += searched.double().mean().cpu()
            overlaps[i] += retrieved.double().mean().cpu()
    points = tuple(
        Point(tau, float(rate) / len(layers), float(overlap) / len(layers))
        for tau, rate, overlap in zip(tried, rates, overlaps, strict=True)
    )
    return Calibration(
        next(p.tau for p in points if p.overlap >= overlap or p.tau >= ALWAYS), points
    )


def _similarities(layer: Captured) -> Tensor:
    """Return the similarity of each step's query to the one before, `[T - 1]`."""
    directions = normalize(layer.queries.float(), dim=-1).transpose(0, 1)  # [T, H, D]
    return similarity(directions[:-1], directions[1:]).clamp(-1, 1)


def _best(layer: Captured, k: int) -> Tensor:
    """Return the best `k` rows of each step, int64 `[T - 1, G, k]`, as `exact` finds them."""
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
