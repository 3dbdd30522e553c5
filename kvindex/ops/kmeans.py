"""Deterministic k-means (Lloyd) for a batch, for every index that learns centroids."""

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
"""Number of rounds in which the starting points are sampled.

With at most this many clusters, each round samples one point.
"""

BLOCK = 2**20
"""Distances that are computed at a time on a CPU: 4 MiB, which fit into a core's cache."""

DEVICE_BLOCK = 2**26
"""Distances that are computed at a time on other devices: 256 MiB, enough work for a whole GPU."""

CHUNK = 2**28
"""Number of coordinates in a group of sequences that are clustered together: 1 GiB.

The buffers need a few times that memory.
"""

OnPass: TypeAlias = Callable[[int, int], None]
"""Function called after each pass over the points, with the number of passes done and the total."""

_watching: ContextVar[OnPass | None] = ContextVar("watching", default=None)


@contextmanager
def watched(on_pass: OnPass) -> Iterator[None]:
    """Within the context, call `on_pass` for every k-means that has no callback of its own.

    Args:
        on_pass: A function that gets the number of passes done and the total number. An error that
            it raises ends the k-means, and the index that called it is unchanged.
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
    """Cluster points into `clusters` clusters, separately for each sequence of the batch.

    Results are the same from run to run. Random numbers are generated on the CPU and are the same
    for all sequences. Sums are over integers, so they do not depend on the order of addition.

    Args:
        points: Float32 `[B, N, D]`.
        clusters: Number of clusters, 1 to `N`.
        iterations: Iterations of Lloyd's algorithm; 0 returns the starting points.
        seed: Seed of the starting points.
        spherical: Cluster the points' directions by their cosines. Centroids are then directions,
            and `assign` expects directions.
        on_pass: Called after each pass over `CHUNK` points, at most `ROUNDS + iterations` times for
            each such chunk.

    Returns:
        Centroids, float32 `[B, clusters, D]`.

    Raises:
        TypeError: `points` is not a tensor.
        ValueError: The tensor does not fit or is not finite, or a number is out of range.

    Source: Lloyd, Least Squares Quantization in PCM (1982); for `spherical`, Dhillon and Modha,
    Concept Decompositions for Large Sparse Text Data Using Clustering (2001).
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
    points = points - middle  # keeps precision where all points are far from 0
    centroids = _start(points, clusters, seed, tick)
    for _ in range(iterations):
        centroids = _moved(points, *assign(points, centroids), clusters)
        if spherical:
            centroids = directions(centroids)
        tick()
    return centroids + middle


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest centroid of each point.

    Args:
        points: Float32 `[B, N, D]`.
        centroids: Float32 `[B, C, D]`.

    Returns:
        Labels int64 `[B, N]` and squared distances float32 `[B, N]`.
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
    """Compute the mean and the number of the points of each cluster.

    Results are the same from run to run, because the sums are over integers.

    Args:
        points: Float32 `[B, N, D]`.
        labels: Cluster of each point, int64 `[B, N]`.
        clusters: Number of clusters.

    Returns:
        Means float32 `[B, clusters, D]`, 0 for an empty cluster, and numbers of points int64 `[B,
        clusters]`.
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
    """Scale points to length 1; a zero point stays zero.

    Args:
        points: Float32 `[..., D]`.
    """
    return torch.nn.functional.normalize(points, dim=-1, eps=torch.finfo(torch.float32).tiny)


def _start(points: Tensor, clusters: int, seed: int, tick: Callable[[], None]) -> Tensor:
    """Sample starting points in rounds, in proportion to the squared distance to earlier ones."""
    generator = torch.Generator().manual_seed(seed)
    count, rounds = points.shape[1], min(ROUNDS, clusters)
    first = torch.randint(count, (1,), generator=generator).to(points.device)
    chosen = points[:, first]
    distances = assign(points, chosen)[1]
    tick()
    for remaining in range(rounds - 1, 0, -1):
        waits = torch.empty(count).exponential_(generator=generator).to(points.device)
        take = math.ceil((clusters - chosen.shape[1]) / remaining)
        # the points with the shortest exponential waiting times are a sample in proportion to
        # the squared distances
        order = (waits / distances).argsort(dim=1, stable=True)[:, :take]
        new = _rows(points, order)
        chosen = torch.cat([chosen, new], 1)
        distances = torch.minimum(distances, assign(points, new)[1])
        tick()
    return chosen


def _moved(points: Tensor, labels: Tensor, distances: Tensor, clusters: int) -> Tensor:
    """Return the mean of each cluster's points; an empty cluster moves to a distant point."""
    centroids, counts = means(points, labels, clusters)
    empty = counts == 0
    farthest = distances.argsort(dim=1, descending=True, stable=True)
    rank = (empty.cumsum(1) - 1).clamp_min(0)  # each empty cluster gets another point
    return torch.where(empty[..., None], _rows(points, farthest.gather(1, rank)), centroids)


def _rows(points: Tensor, order: Tensor) -> Tensor:
    """Return the points `[B, C, D]` with the indices `order` `[B, C]`."""
    return points.gather(1, order[..., None].expand(-1, -1, points.shape[2]))


def _rows_at_once(points: Tensor) -> int:
    return int(max(CHUNK // max(points.shape[1] * points.shape[2], 1), 1))
