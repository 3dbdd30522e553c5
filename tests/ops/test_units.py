"""Compare rows of the best units with an implementation in Python lists."""

import pytest
import torch

from kvindex.ops import group
from kvindex.ops import units as unit_rows

INF = float("inf")


def in_words(scores, groups, k):
    """Return [(id, score)] of the first `k` rows of the best groups, in the protocol's order."""
    order = sorted(range(len(groups)), key=lambda s: (-scores[s], s))
    rows = [(i, scores[s]) for s in order if scores[s] > -INF for i in groups[s]][:k]
    return sorted(rows, key=lambda row: (-row[1], row[0])) + [(-1, -INF)] * (k - len(rows))


def random_units(seed, tokens=40, count=9):
    """Make scores, groups of shuffled ids (some empty), and the groups' members, starts and
    sizes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(tokens, generator=generator)
    cuts = torch.randint(0, tokens + 1, (count - 1,), generator=generator).sort().values.tolist()
    bounds = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    groups = [ids[start:stop].sort().values.tolist() for start, stop in bounds]
    scores = torch.randint(0, 5, (count,), generator=generator).float()  # ties
    scores[seed % count] = -INF
    members = torch.tensor([i for each in groups for i in each])
    return scores, groups, members, *(torch.tensor(x) for x in zip(*bounds, strict=True))


@pytest.mark.parametrize("k", [1, 7, 40, 50])
def test_rows_of_the_best_groups(k):
    batch = [random_units(seed) for seed in range(6)]
    stack = [torch.stack([row[i] for row in batch]).view(3, 2, -1) for i in (0, 2, 3, 4)]
    scores, members, starts, stops = stack
    hits = unit_rows.best_rows(scores, starts.int(), (stops - starts).int(), members.int(), k)
    assert (hits.ids.dtype, hits.ids.shape) == (torch.int64, (3, 2, k))
    pairs = zip(hits.ids.flatten(0, 1).tolist(), hits.scores.flatten(0, 1).tolist(), strict=True)
    for (ids, got), (values, groups, *_) in zip(pairs, batch, strict=True):
        assert list(zip(ids, got, strict=True)) == in_words(values.tolist(), groups, k)


def test_no_group_at_all():
    none = torch.zeros(1, 2, 0)
    hits = unit_rows.best_rows(none, none.long(), none.long(), none.long(), 3)
    assert (hits.ids == -1).all()
    assert (hits.scores == -INF).all()


def test_ranked_carries_the_weights_of_each_head_along():
    ids = torch.tensor([[[4, -1, -3, 2]]])
    scores = torch.tensor([[[1.0, 9.0, 1.0, 2.0]]])
    weights = torch.tensor([[[4.0, 1.0, 3.0, 2.0], [40.0, 10.0, 30.0, 20.0]]])
    hits = unit_rows.ranked(ids, scores, weights)
    assert hits.ids.tolist() == [[[2, -3, 4, -1]]]
    assert hits.scores.tolist() == [[[2, 1, 1, -INF]]]
    assert hits.log_weight.tolist() == [[[2, 3, 4, -INF], [20, 30, 40, -INF]]]


@pytest.mark.parametrize("policy", ["mean_share", "max_share"])
def test_a_candidate_of_several_rows_is_scored_as_one_of_them(policy):
    estimates = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1, 3, 2, 4]).expand(2, 1, 4)
    options = dict(scale=0.5, softcap=None)
    got = group.agree(estimates, policy, **options, sizes=sizes)
    each = torch.arange(4).repeat_interleave(sizes[0, 0])
    want = group.agree(estimates[..., each], policy, **options)
    torch.testing.assert_close(got[..., each], want)
