"""Calibrate the threshold `tau` of the wrapper `kvindex.wrappers.Reuse` for a model.

The wrapper reuses the result of the last search while successive queries are similar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.layer.arguments import DEFAULT_K
from kvindex.ops import group
from kvindex.ops.select import top_k
from kvindex.wrappers.reuse import similarity
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.evaluate.recall import SINK

ALWAYS = math.nextafter(1.0, 2.0)
"""Smallest threshold with which every decode step searches: just above the largest similarity."""

TAUS = (-1.0, 0.0, *(percent / 100 for percent in range(50, 101)), ALWAYS)
"""Thresholds to try by default. The similarity of successive queries is rarely below 0.5."""


@dataclass(frozen=True)
class Point:
    """The effect of one threshold, as means over layers and decode steps.

    Args:
        tau: The threshold.
        rate: Fraction of decode steps that search. The other steps reuse the last search result.
        overlap: Of the tokens that an exact search would retrieve in a decode step, the fraction
            that the search result in use contains.
    """

    tau: float
    rate: float
    overlap: float


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Args:
        tau: The smallest threshold that reaches the required `Point.overlap`.
        points: The measured effect of each threshold, in ascending order of the thresholds.
    """

    tau: float
    points: tuple[Point, ...]

    @property
    def chosen(self) -> Point:
        """The measured results for the chosen threshold `tau`."""
        return next(point for point in self.points if point.tau == self.tau)


def calibrate_tau(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    steps: int = 256,
    k: int = DEFAULT_K,
    overlap: float = 0.8,
    taus: Sequence[float] = TAUS,
    chunk: int = 1024,
    on_progress: Progress | None = None,
) -> Calibration:
    """Find the smallest `tau` with which reused search results are still good enough.

    The model reads a text. Its last `steps` tokens are treated as decode steps that search all
    tokens before them exactly, except the first `SINK` tokens. A threshold with which every step
    searches is tried in addition to `taus`.

    Args:
        model: The transformers model.
        ids: Token ids of the text, int64 `[N]`.
        steps: Number of tokens at the end of the text that count as decode steps.
        k: Number of tokens to retrieve per KV head in each step.
        overlap: Fraction of the `k` best tokens of a step that the search result in use must
            contain, as a mean over steps and layers, in (0, 1].
        taus: Thresholds to try.
        chunk: Number of tokens that the model reads in one forward pass.
        on_progress: Function that is called with the phase ("prefill"), the number of tokens read,
            and the number of all tokens.

    Returns:
        The chosen threshold, and the effects of all thresholds.

    Raises:
        ValueError: A size is out of range, or `attach` does not support the model.
    """
    check.within("overlap", overlap, 0, 1)
    check.tensor("ids", ids, {"N": None}, torch.int64)
    check.at_least("k", k, 1)
    room = len(ids) - SINK - k
    if check.at_least("steps", steps, 1) > room:
        raise ValueError(
            f"steps: got {steps}, allowed is at most {room} for a text of {len(ids)} tokens"
        )
    layers = capture(model, ids, queries=steps + 1, chunk=chunk, on_progress=on_progress)
    return calibrated(layers, k=k, overlap=overlap, taus=taus)


def calibrated(
    layers: Sequence[Captured], *, k: int, overlap: float, taus: Sequence[float] = TAUS
) -> Calibration:
    """Find the threshold `tau` as `calibrate_tau` does, from queries and keys captured earlier.

    The first captured query is that of the token before the first decode step.
    """
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
    """Return the similarity of each decode step's query to the previous query, `[T - 1]`."""
    directions = normalize(layer.queries.float(), dim=-1).transpose(0, 1)  # [T, H, D]
    return similarity(directions[:-1], directions[1:]).clamp(-1, 1)


def _best(layer: Captured, k: int) -> Tensor:
    """Return the positions of the `k` tokens that an exact search retrieves in each decode step.

    The shape is `[T - 1, G, k]`, int64.
    """
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
