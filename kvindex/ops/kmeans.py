"""Batched k-means (Lloyd), deterministic, for every index that learns centroids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor

from kvindex.core import check

ROUNDS = 16
"""Rounds that draw the starting points; up to this many clusters get one point a round."""

BLOCK = 2**20
"""Distances per block on a CPU: 4 MiB, which fit into a core's cache."""

DEVICE_BLOCK = 2**26
"""Distances per block elsewhere: 256 MiB, enough work for a whole GPU."""

CHUNK = 2**28
"""Coordinates of the rows that are clustered at once: 1 GiB, and a few times that as scratch."""

OnPass: TypeAlias = Callable[[int, int], None]
"""Called after each pass of a k-means over its points: passes done, passes in all."""

_watching: ContextVar[OnPass | None] = ContextVar("watching", default=None)


@contextmanager
def watched(on_pass: OnPass) -> Iterator[None]:
    """Within the context, every k-means without an `on_pass` of its own calls this one.

    An error that it raises passes through the k-means; an index is then as it was.
    """
    token = _watching.set(on_pass)
    try:
        yield
    finally:
        _watching.reset(token)


def kmeans(
    points: Tensor,
    clusters: int,
    *,
    iterations: int = 10,
    seed: int = 0,
    spherical: bool = False,
    on_pass: OnPass | None = None,
) -> Tensor:
    """Centroids float32 `[B, clusters, D]` of points float32 `[B, N, D]`, each row on its own.

    iterations: of Lloyd's; 0 gives the starting points. seed: of those. spherical: the points'
    directions are clustered by their cosines, and centroids are directions (Dhillon and Modha,
    2001); `assign` points' directions to them. on_pass: called after each pass over the points, at
    most `ROUNDS + iterations` times for every `CHUNK` of them. The same from run to run on every
    device: random numbers are drawn on the CPU, alike for all rows, and sums are of integers, whose
    order does not matter. Raises TypeError or ValueError for a wrong tensor, NaN or infinity
    in it, fewer points than clusters, or a number out of range.
    """
    check.tensor("points", points, {"B": None, "N": None, "D": None}, torch.float32)
    check.finite("points", points)
    count = points.shape[1]
    if check.at_least("clusters", clusters, 1) > count:
        raise ValueError(f"clusters: got {clusters}, allowed is 1 to the {count} points")
    check.at_least("iterations", iterations, 0)
    check.at_least("seed", seed, 0)
    chunks = torch.split(points, _rows_at_once(points))
    passes = len(chunks) * (min(ROUNDS, clusters) + iterations)
    callback, done = on_pass or _watching.get(), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if callback is not None:
            callback(done, passes)

    centroids = [_lloyd(chunk, clusters, iterations, seed, spherical, tick) for chunk in chunks]
    return torch.cat(centroids)


def _lloyd(
    points: Tensor,
    clusters: int,
    iterations: int,
    seed: int,
    spherical: bool,
    tick: Callable[[], None],
) -> Tensor:
    if spherical:
        points = directions(points)
        middle = torch.zeros_like(points[:, :1])
    else:
        middle = points.double().mean(1, keepdim=True).float()
    points = points - middle  # distances lose nothing where all points are far from 0
    centroids = _start(points, clusters, seed, tick)
    for _ in range(iterations):
        centroids = _moved(points, *assign(points, centroids), clusters)
        if spherical:
            centroids = directions(centroids)
        tick()
    return centroids + middle


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of centroids `[B, C, D]` to each point `[B, N, D]`, all float32.

    Returns labels int64 `[B, N]` and squared distances float32 `[B, N]`.
    """
    lengths = centroids.square().sum(-1)[:, None]  # [B, 1, C]
    size = BLOCK if points.device.type == "cpu" else DEVICE_BLOCK
    step = max(size // max(lengths.numel(), 1), 1)
    labels, distances = [], []
    for block in torch.split(points, step, dim=1):
        least = torch.baddbmm(lengths, block, centroids.mT, alpha=-2).min(-1)
        labels.append(least.indices)
        distances.append((least.values + block.square().sum(-1)).clamp_min(0))
    return torch.cat(labels, 1), torch.cat(distances, 1)


def means(points: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Mean float32 `[B, clusters, D]`, 0 of none, and number int64 `[B, clusters]` of the points.

    points: float32 `[B, N, D]`; labels: int64 `[B, N]`. The same from run to run: sums are of
    integers.
    """
    step = _rows_at_once(points)
    parts = [
        _means(*part, clusters)
        for part in zip(torch.split(points, step), torch.split(labels, step), strict=True)
    ]
    sums, counts = zip(*parts, strict=True)
    return torch.cat(sums), torch.cat(counts)


def _means(points: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    B, N, D = points.shape
    counts = labels.new_zeros(B, clusters).scatter_add_(1, labels, torch.ones_like(labels))
    largest = points.abs().amax((1, 2)).double().clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(61 - math.ceil(math.log2(N)) - torch.log2(largest).ceil())[:, None, None]
    whole = (points * scale).round().long()
    sums = labels.new_zeros(B, clusters, D)
    sums.scatter_add_(1, labels[..., None].expand(-1, -1, D), whole)
    return (sums / scale / counts.clamp_min(1)[..., None]).float(), counts


def directions(points: Tensor) -> Tensor:
    """Points float32 `[..., D]` scaled to length 1; a zero point stays."""
    return torch.nn.functional.normalize(points, dim=-1, eps=torch.finfo(torch.float32).tiny)


def _start(points: Tensor, clusters: int, seed: int, tick: Callable[[], None]) -> Tensor:
    """Draw starting points in rounds, in proportion to the squared distance to those so far."""
    generator = torch.Generator().manual_seed(seed)
    count, rounds = points.shape[1], min(ROUNDS, clusters)
    first = torch.randint(count, (1,), generator=generator).to(points.device)
    chosen = points[:, first]
    distances = assign(points, chosen)[1]
    tick()
    for remaining in range(rounds - 1, 0, -1):
        waits = torch.empty(count).exponential_(generator=generator).to(points.device)
        take = math.ceil((clusters - chosen.shape[1]) / remaining)
        order = (waits / distances).argsort(dim=1, stable=True)[:, :take]  # the shortest waits
        new = _rows(points, order)
        chosen = torch.cat([chosen, new], 1)
        distances = torch.minimum(distances, assign(points, new)[1])
        tick()
    return chosen


def _moved(points: Tensor, labels: Tensor, distances: Tensor, clusters: int) -> Tensor:
    """Mean of the points of each cluster; an empty one moves to a point far from its centroid."""
    centroids, counts = means(points, labels, clusters)
    empty = counts == 0
    farthest = distances.argsort(dim=1, descending=True, stable=True)
    rank = (empty.cumsum(1) - 1).clamp_min(0)  # each empty cluster gets a point of its own
    return torch.where(empty[..., None], _rows(points, farthest.gather(1, rank)), centroids)


def _rows(points: Tensor, order: Tensor) -> Tensor:
    """Rows `[B, C, D]` of points `[B, N, D]` at order `[B, C]`."""
    return points.gather(1, order[..., None].expand(-1, -1, points.shape[2]))


def _rows_at_once(points: Tensor) -> int:
    return int(max(CHUNK // max(points.shape[1] * points.shape[2], 1), 1))
