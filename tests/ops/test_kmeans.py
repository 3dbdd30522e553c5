"""Batched k-means: what it finds, that results repeat, and which arguments raise."""

from itertools import pairwise

import pytest
import torch

from kvindex.ops import kmeans as module
from kvindex.ops.kmeans import assign, kmeans, watched
from tests.support.helpers import Case, assert_same_snapshot, snapshot


def points(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def objective(given, centroids):
    return assign(given, centroids)[1].double().sum(1)


def groups(middles, each, width=0.01):
    """Make `each` points around each of the middles `[C, D]`, shuffled, `[1, C · each, D]`."""
    near = middles.repeat_interleave(each, 0) + width * points(len(middles) * each, 3, seed=1)
    return near[torch.randperm(len(near), generator=torch.Generator().manual_seed(2))][None]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_separated_clusters_are_recovered(seed, far):
    middles = 10 * torch.eye(3).repeat(2, 1) * torch.tensor([1.0] * 3 + [-1.0] * 3)[:, None] + far
    found = kmeans(groups(middles, 30, 0.1), 6, seed=seed)[0]
    distances, nearest = torch.cdist(middles, found).min(1)
    assert sorted(nearest.tolist()) == list(range(6))
    assert distances.max() < 0.1  # 5 standard deviations of the mean of 30 points


def test_centroids_are_the_means_of_their_points_once_nothing_moves():
    given = points(2, 200, 3)
    found = kmeans(given, 5, iterations=100)
    labels = assign(given, found)[0]
    for row, own, centroids in zip(given, labels, found, strict=True):
        means = torch.stack([row[own == c].mean(0) for c in range(5)])
        torch.testing.assert_close(centroids, means, atol=1e-5, rtol=0)


def test_assign_finds_the_nearest_in_blocks_of_any_size(monkeypatch):
    given, centroids = points(3, 50, 4), points(3, 7, 4, seed=1)
    true = torch.cdist(given.double(), centroids.double()).square()
    for block in (1, 100, 2**20):
        monkeypatch.setattr(module, "BLOCK", block)
        labels, distances = assign(given, centroids)
        assert torch.equal(labels, true.argmin(-1))
        torch.testing.assert_close(distances, true.amin(-1).float(), atol=1e-5, rtol=1e-5)


def test_the_same_seed_gives_the_same_centroids_and_another_gives_others():
    given = points(2, 300, 4)
    first = kmeans(given, 20, seed=3)
    torch.rand(5)  # the state of torch's generator has no effect
    assert torch.equal(kmeans(given, 20, seed=3), first)
    assert not torch.equal(kmeans(given, 20, seed=4), first)


@pytest.mark.parametrize("clusters", [1, 8, 64, 200])
def test_the_objective_never_rises_with_the_iterations(clusters):
    given = points(2, 400, 4).repeat(1, 1, 2)
    given[:, :100] = given[:, :1]  # duplicates, so that clusters can be empty
    steps = [objective(given, kmeans(given, clusters, iterations=n)) for n in range(8)]
    for before, after in pairwise(steps):
        assert (after <= before * (1 + 1e-5)).all()
    if clusters > 1:
        assert (steps[-1] < 0.95 * steps[0]).all()


def test_the_order_of_the_points_hardly_matters():
    given = points(1, 1000, 4)
    shuffled = given[:, torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    ours, theirs = (objective(x, kmeans(x, 16, iterations=20)) for x in (given, shuffled))
    assert abs(ours / theirs - 1) < 0.05  # two local minima of the same data


def test_a_batch_equals_its_rows():
    given = torch.cat([points(2, 300, 4), 100 + 3 * points(1, 300, 4, seed=1)])
    together = kmeans(given, 12)
    for row, centroids in zip(given, together, strict=True):
        torch.testing.assert_close(kmeans(row[None], 12)[0], centroids, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("clusters", [1, 3, 7, 20])
def test_fewer_distinct_points_than_clusters(clusters):
    given = points(2, 3, 4).repeat(1, 10, 1)
    found = kmeans(given, clusters)
    assert found.shape == (2, clusters, 4)
    assert found.isfinite().all()
    if clusters >= 3:
        assert objective(given, found).max() < 1e-4  # rounding, of squares near 10
    assert objective(torch.zeros(1, 5, 2), kmeans(torch.zeros(1, 5, 2), 4)) == 0


def test_as_many_clusters_as_points():
    given = points(2, 9, 4)
    assert objective(given, kmeans(given, 9)).max() < 1e-4  # rounding, of squares near 10


def test_an_empty_cluster_moves_to_a_point_of_its_own():
    given = torch.tensor([[[0.0], [1.0], [5.0], [9.0]]])
    labels, distances = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0.0, 1, 25, 81]])
    found = module._moved(given, labels, distances, 3)
    assert found.tolist() == [[[3.75], [9.0], [5.0]]]


def test_large_and_tiny_values():
    for size in (1e13, 1e-15):
        found = kmeans(points(1, 100, 4) * size, 5)
        assert found.isfinite().all()
        torch.testing.assert_close(found / size, kmeans(points(1, 100, 4), 5), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(clusters=11), "clusters: got 11, allowed is 1 to 10 "),
        (dict(clusters=0), "clusters: got 0, allowed is an integer of at least 1"),
        (dict(clusters=2.0), "clusters: got 2.0"),
        (dict(iterations=-1), "iterations: got -1"),
        (dict(seed=-1), "seed: got -1"),
        (dict(points=torch.zeros(10, 4)), r"points: got shape \[10, 4\], allowed is \[B, N, D\]"),
        (dict(points=torch.zeros(1, 10, 4).double()), "points: got dtype torch.float64"),
        (dict(points=torch.full((1, 10, 4), float("nan"))), "points: got nan"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_words(change, message):
    given = {"points": points(1, 10, 4), "clusters": 3, **change}
    with pytest.raises(ValueError, match=message):
        kmeans(given.pop("points"), given.pop("clusters"), **given)


@pytest.mark.gpu
def test_the_same_from_run_to_run_on_a_gpu():
    given = points(4, 5000, 8).cuda()
    first = kmeans(given, 64)
    for _ in range(5):
        assert torch.equal(kmeans(given, 64), first)
    assert (
        abs(
            objective(given, first).cpu() / objective(given.cpu(), kmeans(given.cpu(), 64)) - 1
        ).max()
        < 0.02
    )


@pytest.mark.parametrize("spherical", [False, True])
def test_rows_may_be_clustered_in_chunks(monkeypatch, spherical):
    given = points(5, 60, 4)
    whole = kmeans(given, 7, spherical=spherical)
    labels = assign(given, whole)[0]
    sums = module.means(given, labels, 7)
    monkeypatch.setattr(module, "CHUNK", 2 * 60 * 4)
    torch.testing.assert_close(kmeans(given, 7, spherical=spherical), whole)
    for ours, theirs in zip(module.means(given, labels, 7), sums, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("clusters", "iterations"), [(1, 0), (5, 3), (40, 2)])
def test_each_pass_is_reported_and_their_number_is_bounded(clusters, iterations):
    told = []
    given = points(2, 60, 4)
    found = kmeans(given, clusters, iterations=iterations, on_pass=lambda *of: told.append(of))
    passes = min(module.ROUNDS, clusters) + iterations
    assert told == [(done, passes) for done in range(1, passes + 1)]
    assert torch.equal(found, kmeans(given, clusters, iterations=iterations))


def test_rows_that_are_clustered_in_chunks_are_counted_together(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 60 * 4)  # one sequence at a time
    told = []
    kmeans(points(3, 60, 4), 2, iterations=1, on_pass=lambda *of: told.append(of))
    assert told == [(done, 9) for done in range(1, 10)]


def test_who_watches_sees_what_indexes_cluster_and_nobody_else_does():
    told, own = [], []
    case = Case()
    with watched(lambda *of: told.append(of)):
        index = case.index("clusterkv", block=8, block_clusters=2)
        index.append(*case.tokens(100))
        assert told[-1] == (len(told), len(told))
        count = len(told)
        with watched(lambda *of: own.append(of)):
            kmeans(points(1, 20, 3), 2)
        kmeans(points(1, 20, 3), 2, on_pass=lambda *of: own.append(of))
        assert (len(told), len(own)) == (count, 2 * 12)
        kmeans(points(1, 20, 3), 2)
        assert len(told) == count + 12
    kmeans(points(1, 20, 3), 2)
    assert len(told) == count + 12


def test_who_watches_may_stop_it_and_the_index_is_as_it_was():
    case = Case()
    index = case.index("clusterkv", block=8, block_clusters=2)
    index.append(*case.tokens(20))
    before = snapshot(index, case.queries())

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(stop):
        index.append(*case.tokens(100, seed=1))
    assert_same_snapshot(snapshot(index, case.queries()), before)
