"""Clusters depend only on the tokens and on the length of the first append."""

from functools import partial

import pytest
import torch
from hypothesis import settings

import kvindex
from kvindex.bases.clusters import ClusteredIndex, Cut, Plan
from kvindex.ops import kmeans
from kvindex.testing.stateful import STEPS, check_any_interleaving
from tests.contract import CHECKS
from tests.support.helpers import Case, all_rows, left_padding, mostly_slow, part, sampled, slow

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
SMALL = dict(block=8, per_cluster=4)
OWN = dict(segment=16, block_clusters=2)  # for indexes with these options
NAMES = [name for name in kvindex.names() if issubclass(kvindex.get(name), ClusteredIndex)]


def small(name, case=CASE, **options):
    return case.index(name, **{**small_options(name), **options})


def small_options(name):
    return {**SMALL, **{option: value for option, value in OWN.items() if has(name, option)}}


def has(name, option):
    return hasattr(kvindex.get(name).Config, option)


BY_BLOCKS = ["clusterkv", "squeezed"]
"""Indexes that only have clusters of keys that were appended together."""


@pytest.mark.parametrize(
    "case",
    [
        Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2),
        slow(Case(q_heads=3, kv_heads=1, head_dim=64, value_dim=24, dtype=torch.bfloat16, batch=3)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("check", "name"),
    sampled(CHECKS, BY_BLOCKS),
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_small_clusters_keep_the_contract(check, name, case):
    """With default options, so few tokens would all wait, and there would be no cluster."""
    check(partial(small, name, case), case)


@pytest.mark.parametrize(("name", "clusters"), [*zip(BY_BLOCKS, (10, 40), strict=True)])
def test_bytes_per_key_and_head(name, clusters):
    case = Case(head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index(name, iterations=1)
    index.append(*case.tokens(800))
    assert index._learned["sizes"].shape == (1, 2, clusters)
    scanned = clusters * (2 * 128 + 4)
    assert index.nbytes()["codes"] == 2 * (800 * 4 + scanned) + 2 * 8
    assert index.bytes_per_key()["scanned"] == scanned / 800


def grown(name, tokens, valid, cuts):
    """Make an index of the tokens, appended in parts that end at `cuts`."""
    index = small(name)
    for start, stop in zip([0, *cuts], cuts, strict=False):
        chunk = None if valid is None else valid[:, start:stop]
        index.append(*part(tokens, start, stop), valid=chunk)
    return index


def assert_same_clusters(got, want):
    assert got._learned.keys() == want._learned.keys()
    for name in want._learned:
        assert torch.equal(got._learned[name], want._learned[name]), name


def test_there_is_an_index_of_clusters():
    assert NAMES


@pytest.mark.parametrize("name", mostly_slow(NAMES, "retroinfer"))
def test_any_interleaving_of_calls_agrees_with_a_fresh_index(name):
    """The test is like `test_stateful.py`, but with enough tokens to make clusters."""
    make = partial(kvindex.get(name), **small_options(name))
    check_any_interleaving(make, CASE, steps=settings(STEPS, max_examples=12))


def test_the_plan_cuts_the_prompt_and_then_blocks():
    plan = Plan(segment=10, per_cluster=4, block=8, per_block=3)
    assert plan.cuts(23, 45) == [
        Cut(0, 10, 2),
        Cut(10, 20, 2),
        Cut(20, 23, 1),
        Cut(23, 31, 3),
        Cut(31, 39, 3),
    ]
    assert plan.cuts(0, 7) == []
    assert Plan(None, 4, 8, 3).cuts(23, 30) == [Cut(0, 23, 6)]


@pytest.mark.parametrize(
    ("cut", "pads", "name"),
    sampled(
        [
            ([25, 60], 50),  # cuts a block
            ([25, 33, 60], 33),  # removes the last append
            ([40, 60], 21),  # cuts the prompt
            ([40, 60], 6),  # cuts the prompt so short that the rest waits
            ([5, 60], 30),
            ([5, 60], 0),
        ],
        [None, [0, 5], [19, 33], [60, 2]],
        NAMES,
    ),
)
def test_after_truncate_clusters_are_those_of_the_tokens_that_are_left(name, pads, cut):
    tokens, (cuts, length) = CASE.tokens(80), cut
    valid = None if pads is None else left_padding(pads, 80)
    index = grown(name, tokens, valid, cuts)
    index.truncate(length)
    left = sorted({min(stop, length) for stop in cuts} - {0})
    fresh = grown(name, tokens, valid, left)
    if left:
        assert_same_clusters(index, fresh)
    for target in (index, fresh):
        later = None if valid is None else valid[:, length:]
        target.append(*part(tokens, length, 80), valid=later)
    assert_same_clusters(index, fresh)
    assert torch.equal(all_rows(index, 2).keys, tokens[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pads", [None, [0, 5], [24, 9]])
def test_clusters_do_not_depend_on_how_later_tokens_came(name, pads):
    tokens = CASE.tokens(80)
    valid = None if pads is None else left_padding(pads, 80)
    index = grown(name, tokens, valid, [25, 26, 30, 31, 60, 80])
    assert_same_clusters(index, grown(name, tokens, valid, [25, 80]))


@pytest.mark.parametrize("name", NAMES)
def test_every_valid_token_is_in_one_cluster_or_waits(name):
    tokens, valid = CASE.tokens(60), left_padding([0, 9], 60)
    index = grown(name, tokens, valid, [30, 31, 60])
    learned = index._learned
    for b in range(2):
        waiting = [i for i in learned["waiting"][b].tolist() if i >= 0]
        for h in range(2):
            count = int(learned["sizes"][b, h].sum())
            ids = learned["members"][b, h, :count].tolist() + waiting
            assert sorted(ids) == valid[b].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_centroids_are_the_means_of_the_raw_keys(name):
    keys, values = CASE.tokens(60)
    index = grown(name, (keys, values), None, [30, 60])
    learned = index._learned
    for b in range(2):
        for h in range(2):
            start = 0
            for s, size in enumerate(learned["sizes"][b, h].tolist()):
                ids = learned["members"][b, h, start : start + size].long()
                assert (ids.diff() > 0).all()
                start += size
                if not size:
                    continue
                torch.testing.assert_close(learned["centroids"][b, h, s], keys[b, h, ids].mean(0))
                if "means" in learned:
                    torch.testing.assert_close(learned["means"][b, h, s], values[b, h, ids].mean(0))


@pytest.mark.parametrize("name", NAMES)
def test_like_directions_are_clustered_whatever_their_lengths(name):
    """Keys are around 4 distant directions with lengths from 1 to 9. Clusters match the
    directions."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(4).repeat(8)
    lengths = 1 + 8 * torch.rand(32, 1, generator=generator)
    keys = lengths * (torch.eye(16)[which] + 0.05 * torch.randn(32, 16, generator=generator))
    case = Case(q_heads=1, kv_heads=1)
    index = small(name, case, per_cluster=8, **({"segment": 32} if has(name, "segment") else {}))
    index.append(keys[None, None], keys[None, None])
    order = index._learned["members"][0, 0].view(4, 8).long()
    assert index._learned["sizes"].tolist() == [[[8, 8, 8, 8]]]
    assert (which[order] == which[order][:, :1]).all()


def test_spherical_centroids_are_directions_and_the_objective_never_falls():
    points = torch.randn(2, 200, 4, generator=torch.Generator().manual_seed(0))
    points[:, 0] = 0
    units, last = kmeans.directions(points), -1.0
    for iterations in range(8):
        found = kmeans.kmeans(points, 6, iterations=iterations, spherical=True)
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(2, 6))
        cosines = float((units @ found.mT).amax(-1).sum())
        assert cosines >= last * (1 - 1e-5)
        last = cosines
    longer = points * torch.rand(2, 200, 1, generator=torch.Generator().manual_seed(1)).add(0.5)
    torch.testing.assert_close(kmeans.kmeans(longer, 6, iterations=7, spherical=True), found)
