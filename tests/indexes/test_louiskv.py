"""LouisKV: units of one key are exact; clusters, segments, boundaries, budgets of whole units."""

import pytest
import torch

from kvindex.testing.contract.common import N
from tests import contract
from tests.support.exactly import assert_follows_exact_in_a_layer, assert_stays_exact, unchanged
from tests.support.helpers import Case, assert_same_hits, left_padding, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
SINGLE = dict(per_cluster=1, longest=1)


def prompt_ended(case=CASE, count=N, tokens=None, valid=None, **options):
    """Make an index whose prompt of `count` tokens is complete."""
    index = case.index("louiskv", **options)
    index.append(*(case.tokens(count) if tokens is None else tokens), valid=valid)
    index.end_prompt()
    return index


def units(index):
    """Return the ids of each cluster, then of each segment, for each sequence and head."""
    learned, found = index._learned, {}
    for b in range(len(index.counts)):
        for h in range(index.geometry.kv_heads):
            ids = learned["members"][b, h].tolist()
            first, split = 0, []
            for size in learned["sizes"][b, h].tolist():
                split.append(ids[first : first + size])
                first += size
            first = index._sequence.prompt
            for size in learned["counts"][b].tolist():
                split.append(ids[first : first + size])
                first += size
            found[b, h] = split
    return found


def segments(index, row=0):
    return units(index)[row, 0][index._learned["sizes"].shape[2] :]


def assert_units_are_means(index, keys):
    learned = index._learned
    means = torch.cat([learned["centroids"], learned["means"]], dim=2)
    for (b, h), split in units(index).items():
        for unit, ids in enumerate(split):
            if ids:
                torch.testing.assert_close(means[b, h, unit], keys[b, h, ids].mean(0))


@pytest.mark.parametrize("policy", ["mean_share", "max_share", "union", "mean_query"])
def test_units_of_one_key_are_exact(policy):
    """The hits stay exact through appends, boundaries, truncations and reordering."""
    pads, tokens, more = left_padding([0, 9], N), CASE.tokens(N), CASE.tokens(30, seed=1)
    index = prompt_ended(tokens=tokens, valid=pads, group=policy, **SINGLE)
    exact = CASE.index("exact", group=policy)
    exact.append(*tokens, valid=pads)
    changes = [
        unchanged,
        lambda i: i.append(*part(more, 0, 1)),
        lambda i: (i.mark_boundary(), i.append(*part(more, 1, 30))),
        lambda i: i.truncate(50),
        lambda i: i.reorder(torch.tensor([1, 1, 0])),
        lambda i: i.truncate(N - 10),
        lambda i: i.append(*CASE.tokens(3, seed=2, batch=3)),
    ]
    assert_stays_exact(CASE, index, exact, changes)


def test_larger_units_are_not():
    index, exact = prompt_ended(), CASE.index("exact")
    exact.append(*CASE.tokens(N))
    hits, want = (each.search(CASE.queries(), k=5) for each in (index, exact))
    with pytest.raises(AssertionError):
        assert_same_hits(hits, want, close=1e-5)


NOT_SEALED = {
    "check_a_needle_is_found": "a cluster dilutes it",
    "check_truncate_into_padding": "a prompt that is cut ends earlier",
    "check_an_append_that_runs_out_of_memory_changes_nothing": "here it is an append and a seal",
}
CHECKS = [check for check in contract.CHECKS if check.__name__ not in NOT_SEALED]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sealed_index_keeps_the_contract(check):
    """The contract appends first and ends the prompt later, if at all. Here the first append ends
    it."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=3)

    def make(**options):
        index = case.index("louiskv", per_cluster=4, longest=5, **options)
        append = index.append

        def and_seal(*tokens, **flags):
            append(*tokens, **flags)
            index.end_prompt()

        index.append = and_seal
        return index

    check(make, case)


def test_units_hold_every_token_once_and_are_its_mean():
    index, tokens = prompt_ended(count=60, valid=left_padding([0, 11], 60)), CASE.tokens(60)
    more = CASE.tokens(50, seed=1)
    for start, stop in ((0, 7), (7, 8), (8, 50)):
        index.append(*part(more, start, stop))
        index.mark_boundary()
    keys = torch.cat([tokens[0], more[0]], dim=2)
    for (row, _), split in units(index).items():
        assert sorted(i for ids in split for i in ids) == [*range([0, 11][row], 110)]
    assert_units_are_means(index, keys)
    index.truncate(80)
    assert_units_are_means(index, keys)
    assert segments(index) == [[*range(60, 67)], [67], [*range(68, 80)]]
    with pytest.raises(AssertionError):
        assert_units_are_means(index, keys.roll(1, 2))


def test_a_blob_of_the_prompt_is_a_cluster():
    """K-means finds distant groups from any starting points (here with one seed)."""
    case = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=8)
    centers = 20 * torch.eye(16)[:4]
    keys = (centers.repeat(8, 1) + case.tensor(3, 32, 16))[None, None]
    index = prompt_ended(case, tokens=(keys, case.tokens(32)[1]), per_cluster=8)
    assert sorted(units(index)[0, 0]) == [[*range(i, 32, 4)] for i in range(4)]
    hits = index.search(centers[2][None, None], k=11)
    assert hits.ids[0, 0, :8].tolist() == [*range(2, 32, 4)]
    assert (hits.scores[0, 0, :8] == hits.scores[0, 0, 0]).all()
    assert (hits.ids >= 0).all(), "the last unit is cut"


def test_units_that_tie_come_in_the_order_of_their_first_tokens():
    """With a query of zero scores and units of one key, the hits are those of `exact`."""
    index, exact = prompt_ended(**SINGLE), CASE.index("exact")
    exact.append(*CASE.tokens(N))
    nothing = torch.zeros_like(CASE.queries())
    assert torch.equal(index.search(nothing, k=7).ids, exact.search(nothing, k=7).ids)
    for split in units(prompt_ended(per_cluster=5)).values():
        first = [ids[0] for ids in split if ids]
        assert first == sorted(first)


def test_segments_end_where_a_boundary_was_marked_or_are_full():
    index, more = prompt_ended(longest=8), CASE.tokens(60, seed=1)
    index.append(*part(more, 0, 5))
    index.mark_boundary()
    index.mark_boundary()
    index.append(*part(more, 5, 26))
    assert segments(index) == [
        [*range(N, N + 5)],
        [*range(N + 5, N + 13)],
        [*range(N + 13, N + 21)],
        [*range(N + 21, N + 26)],
    ]


def test_boundaries_lie_at_the_newest_query_not_at_the_newest_key_held():
    """A layer's window has the newest tokens, so boundaries are known before keys come."""
    index, more = prompt_ended(), CASE.tokens(20, seed=1)
    for position in range(N, N + 20):
        if position in (N + 3, N + 12):
            index.mark_boundary()
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([position]))
    assert index._sequence.cuts == (N + 3, N + 12)
    index.append(*more)
    assert [len(segment) for segment in segments(index)] == [3, 9, 8]


def test_boundaries_of_a_sequence_that_was_cut_go():
    index, more = prompt_ended(), CASE.tokens(20, seed=1)
    for position in (N + 3, N + 9, N + 5):
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([position]))
        index.mark_boundary()
    assert index._sequence.cuts == (N + 4, N + 6)
    index.append(*more)
    index.mark_boundary()
    index.truncate(N + 5)
    assert index._sequence.cuts == (N + 4,)


def test_a_short_prompt_may_still_wait_in_the_window():
    index = CASE.index("louiskv", longest=8)
    index.end_prompt()
    index.append(*CASE.tokens(20))
    assert [len(segment) for segment in segments(index)] == [8, 8, 4]
    index.truncate(0)
    assert (index.search(CASE.queries(), k=3).ids == -1).all()


def test_seal_clusters_once():
    index = prompt_ended()
    index.append(*CASE.tokens(5, seed=1))
    index.end_prompt()
    assert index._sequence.prompt == N


def test_a_boundary_before_seal_means_nothing():
    index = CASE.index("louiskv")
    index.append(*CASE.tokens(5))
    index.mark_boundary()
    assert index._sequence.cuts == ()


def test_bytes():
    """Means, sizes, and an int32 id for every token are counted."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, dtype=torch.float16)
    index = prompt_ended(case, count=64)
    index.append(*case.tokens(40, seed=1))
    assert index.nbytes()["codes"] == 2 * (4 * (32 + 4) + 104 * 4 + 2 * 32) + 2 * 4
    kept, scanned = 104 * 2, 2 * (4 * (32 + 4) + 2 * 32) + 2 * 4
    assert index.bytes_per_key()["scanned"] == pytest.approx(scanned / kept)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(per_cluster=0), "per_cluster: got 0"),
        (dict(longest=0), "longest: got 0"),
        (dict(iterations=-1), "iterations: got -1"),
        (dict(group="sum"), "group: got 'sum'"),
    ],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("louiskv", **options)


def test_in_a_layer_single_units_follow_exact():
    assert_follows_exact_in_a_layer(CASE, "louiskv", **SINGLE)
