"""Deterministic batched k-means (Lloyd's algorithm), used by all indexes that learn centroids."""

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
"""Number of rounds in which initial centroids are sampled from the points, several per round.

With at most this many clusters, each round samples one centroid.
"""

BLOCK = 2**20
"""Number of distances computed at a time on a CPU: 4 MiB, which fit into the cache of a core."""

DEVICE_BLOCK = 2**26
"""Number of distances computed at a time on other devices: 256 MiB, enough to occupy a GPU."""

CHUNK = 2**28
"""Number of float32 coordinates that are clustered at a time, 1 GiB.

A large batch is divided into groups of sequences of this size. The buffers need a few times as much
memory.
"""

OnPass: TypeAlias = Callable[[int, int], None]
"""Callback after each pass over the points: gets the passes done and the total number of passes."""

_watching: ContextVar[OnPass | None] = ContextVar("watching", default=None)


@contextmanager
def watched(on_pass: OnPass) -> Iterator[None]:
    """Return a context manager that sets the default of the argument `on_pass` of `kmeans`.

    Args:
        on_pass: `kmeans` calls this function after each pass over the points, with the number of
            passes done and the total number of passes. If the function raises an error, `kmeans`
            stops, and the index that needed the centroids is unchanged.
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
    """Cluster points with k-means, separately for each sequence of the batch.

    Results are the same in every run: random numbers come from a seed, and sums are computed with
    integers, so that the order of addition does not matter.

    Args:
        points: Float32 `[B, N, D]`.
        clusters: Number of clusters, 1 to `N`.
        iterations: Iterations of Lloyd's algorithm. 0 returns the initial centroids.
        seed: Seed for sampling the initial centroids. All sequences use the same random numbers.
        spherical: Scale the points to length 1, and cluster them by cosine. The centroids then have
            length 1, and `assign` requires points of length 1.
        on_pass: Called after each pass over the points. A batch of more than `CHUNK` coordinates is
            divided into groups of sequences, each with at most `ROUNDS + iterations` passes.

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
        raise ValueError(f"clusters: got {clusters}, allowed is 1 to {count} (number of points)")
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
    points = points - middle  # for precision, if all points are far from 0
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
        Index of the nearest centroid, int64 `[B, N]`, and squared distance to it, float32 `[B, N]`.
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
    """Compute the mean of the points of each cluster, and the number of these points.

    Results are the same in every run, because sums are computed with integers.

    Args:
        points: Float32 `[B, N, D]`.
        labels: Cluster of each point, int64 `[B, N]`.
        clusters: Number of clusters.

    Returns:
        Means, float32 `[B, clusters, D]`, 0 for an empty cluster, and numbers of points, int64 `[B,
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
    """Scale points to length 1. A zero vector stays zero.

    Args:
        points: Float32 `[..., D]`.
    """
    return torch.nn.functional.normalize(points, dim=-1, eps=torch.finfo(torch.float32).tiny)


def _start(points: Tensor, clusters: int, seed: int, tick: Callable[[], None]) -> Tensor:
    """Sample initial centroids from the points, in rounds.

    In each round, the probability of a point is proportional to its squared distance to the nearest
    centroid of earlier rounds, as in k-means++.
    """
    generator = torch.Generator().manual_seed(seed)
    count, rounds = points.shape[1], min(ROUNDS, clusters)
    first = torch.randint(count, (1,), generator=generator).to(points.device)
    chosen = points[:, first]
    distances = assign(points, chosen)[1]
    tick()
    for remaining in range(rounds - 1, 0, -1):
        waits = torch.empty(count).exponential_(generator=generator).to(points.device)
        take = math.ceil((clusters - chosen.shape[1]) / remaining)
        # Draw an exponentially distributed number for each point, with the squared distance as
        # rate. The points with the smallest numbers are a sample without replacement, in proportion
        # to the squared distances.
        order = (waits / distances).argsort(dim=1, stable=True)[:, :take]
        new = _rows(points, order)
        chosen = torch.cat([chosen, new], 1)
        distances = torch.minimum(distances, assign(points, new)[1])
        tick()
    return chosen


def _moved(points: Tensor, labels: Tensor, distances: Tensor, clusters: int) -> Tensor:
    """Return new centroids: the mean of the points of each cluster.

    The centroid of an empty cluster moves to one of the points with the largest `distances`, the
    distances of the points from their present centroids.
    """
    centroids, counts = means(points, labels, clusters)
    empty = counts == 0
    farthest = distances.argsort(dim=1, descending=True, stable=True)
    rank = (empty.cumsum(1) - 1).clamp_min(0)  # each empty cluster gets a different point
    return torch.where(empty[..., None], _rows(points, farthest.gather(1, rank)), centroids)


def _rows(points: Tensor, order: Tensor) -> Tensor:
    """Return the points `[B, C, D]` at the indices `order`, int64 `[B, C]`."""
    return points.gather(1, order[..., None].expand(-1, -1, points.shape[2]))


def _rows_at_once(points: Tensor) -> int:
    return int(max(CHUNK // max(points.shape[1] * points.shape[2], 1), 1))
