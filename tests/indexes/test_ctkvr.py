"""CTkvr: lists equal a sort in Python's numbers; the queue, the choices, and when it is exact.

The file is long, because lists, queue and choices are tested with one prompt and one reference.
"""

import math

import pytest
import torch

from kvindex.bases.prompt_queries import PromptQueries, priority
from tests.support import literal
from tests.support.exactly import assert_follows_exact_in_a_layer
from tests.support.helpers import (
    Case,
    assert_same_hits,
    assert_same_snapshot,
    left_padding,
    part,
    snapshot,
)
from tests.support.policies import assert_bad_signals_are_refused

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
N = 64
ALL = dict(probes=500, rho=500)


def prompt(case=CASE, count=N, seed=0):
    """Return queries `[B, H, N, D]` of a prompt."""
    return case.tensor(500 + seed, case.batch, case.q_heads, count, case.head_dim)


def built(case=CASE, count=N, queries=None, tokens=None, valid=None, **options):
    """Make an index of a complete prompt of `count` tokens."""
    index = case.index("ctkvr", **options)
    index.append(*(case.tokens(count) if tokens is None else tokens), valid=valid)
    index.observe_queries(prompt(case, count) if queries is None else queries, torch.arange(count))
    index.end_prompt()
    return index


def step(index, case, queries):
    """Do what a layer does with one new query."""
    index.observe_queries(queries[:, :, None], torch.tensor([len(index)]))
    return index.search(queries, k=5)


def listed(keys, queries, rho, scale):
    """Run algorithm 1 for one centroid: the ids with the largest attention weight of any head."""
    log_weights = []
    for query in queries:
        logits = [scale * literal.dot(key, query) for key in keys]
        total = math.log(sum(math.exp(logit) for logit in logits))
        log_weights.append([logit - total for logit in logits])
    return literal.best([max(column) for column in zip(*log_weights, strict=True)], rho)


def assert_lists_as_literal(index, keys, centroids, rho):
    """Compare lists of centroids `[B, H, C, D]` with the reference."""
    g = index.geometry
    for b in range(len(keys)):
        for h in range(g.kv_heads):
            heads = slice(h * g.group_size, (h + 1) * g.group_size)
            for c in range(centroids.shape[2]):
                queries = centroids[b, heads, c].tolist()
                want = listed(keys[b, h].tolist(), queries, rho, g.scale)
                assert index._learned["lists"][b, h, c].tolist() == want


@pytest.mark.parametrize("group", [1, 3])
def test_lists_are_the_best_keys_by_the_largest_share_of_the_group(group):
    case = Case(q_heads=2 * group, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    index = built(case, rho=9, every=16)
    assert_lists_as_literal(index, case.tokens(N)[0], prompt(case)[:, :, -4:], 9)
    with pytest.raises(AssertionError):
        assert_lists_as_literal(index, case.tokens(N)[0], prompt(case)[:, :, -5:-1], 9)


def test_keys_appended_later_take_their_places_in_every_list():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    tokens = case.tokens(90)
    index = built(case, tokens=part(tokens, 0, N), rho=20)
    for start, stop in ((N, N + 1), (N + 1, 80), (80, 90)):
        index.append(*part(tokens, start, stop))
    assert_lists_as_literal(index, tokens[0], prompt(case)[:, :, -4:], 20)
    index.truncate(70)  # displaced entries are back
    assert_lists_as_literal(index, tokens[0][:, :, :70], prompt(case)[:, :, -4:], 20)


def test_blocks_and_chunks_change_no_list(monkeypatch):
    whole = built(every=2, rho=7)
    monkeypatch.setattr("kvindex.indexes.ctkvr.BLOCK", 13)
    monkeypatch.setattr("kvindex.bases.query_lists.SCORES", 500)
    pieces = built(every=2, rho=7)
    assert torch.equal(pieces._learned["lists"], whole._learned["lists"])


@pytest.mark.parametrize("policy", ["max_share", "mean_share", "union", "mean_query"])
@pytest.mark.parametrize("choice", ["last", "random"])
def test_with_all_centroids_and_whole_lists_it_is_exact(choice, policy):
    """With C' = C and ρ = n the lists contain all keys, also after appends, truncations and
    reorders."""
    case, pads = CASE, left_padding([0, 9], N)
    tokens, more = case.tokens(N), case.tokens(20, seed=1)
    index = built(tokens=tokens, valid=pads, choice=choice, group=policy, **ALL)
    exact = case.index("exact", group=policy)
    exact.append(*tokens, valid=pads)
    changes = [
        lambda i: None,
        lambda i: i.append(*part(more, 0, 1)),
        lambda i: i.append(*part(more, 1, 20)),
        lambda i: i.truncate(70),
        lambda i: i.reorder(torch.tensor([1, 1, 0])),
        lambda i: i.append(*case.tokens(3, seed=2, batch=3)),
    ]
    for seed, change in enumerate(changes):
        change(index), change(exact)
        for again in range(2):
            queries = case.queries(7 * seed + again, len(index.counts))
            index.observe_queries(queries[:, :, None], torch.tensor([len(index)]))
            for k in (5, 200):
                hits = index.search(queries, k=k)
                assert_same_hits(hits, exact.search(queries, k=k), close=1e-5)


def test_with_few_centroids_it_is_not():
    index, exact = built(rho=8, probes=1), CASE.index("exact", group="max_share")
    exact.append(*CASE.tokens(N))
    with pytest.raises(AssertionError):
        assert_same_hits(step(index, CASE, CASE.queries()), exact.search(CASE.queries(), k=5))


def test_a_search_scores_what_the_nearest_centroids_have_listed():
    index = built(rho=6, probes=2, every=4)
    queries, learned, g = CASE.queries(), index._learned, index.geometry
    hits = index.search(queries, k=20)
    for b in range(2):
        for h in range(2):
            near = []
            for c in range(16):
                pairs = [(queries[b, 3 * h + j], prompt()[b, 3 * h + j, c - 16]) for j in range(3)]
                near.append(max(float(torch.cosine_similarity(*pair, dim=0)) for pair in pairs))
            lists = [learned["lists"][b, h, c].tolist() for c in literal.best(near, 2)]
            recalled = sorted(set(lists[0]) | set(lists[1]))
            keys = CASE.tokens(N)[0][b, h, recalled].tolist()
            order = listed(keys, queries[b, 3 * h : 3 * h + 3].tolist(), 20, g.scale)
            want = [recalled[i] for i in order]
            assert hits.ids[b, h].tolist() == want + [-1] * (20 - len(want))


def test_a_search_before_seal_is_exact_and_a_repeated_search_is_the_same():
    tokens, queries = CASE.tokens(N), CASE.queries()
    index, exact = CASE.index("ctkvr", rho=4), CASE.index("exact", group="max_share")
    for each in (index, exact):
        each.append(*tokens)
    index.observe_queries(prompt(), torch.arange(N))
    assert_same_hits(index.search(queries, k=9), exact.search(queries, k=9))
    index.end_prompt()
    hits = index.search(queries, k=9)
    assert_same_hits(
        index.search(queries, k=9), hits
    )  # the queue waits for the next `observe_queries`


def test_searched_queries_replace_the_oldest_centroids():
    index = built(rho=6, probes=2)
    before = index._learned["centroids"].clone()
    assert before.shape[3] == 4
    for turn in range(6):
        queries = CASE.queries(turn)
        hits = step(index, CASE, queries)
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([N + turn]))
        slot = turn % 4
        assert torch.equal(index._learned["centroids"][..., slot, :].flatten(1, 2), queries)
        assert torch.equal(index._learned["lists"][:, :, slot, :5].long(), hits.ids)
        kept = slice(turn + 1, 4)
        assert torch.equal(index._learned["centroids"][..., kept, :], before[..., kept, :])


def test_without_update_the_centroids_stay():
    index = built(rho=6, update=False)
    before = index._learned["centroids"].clone()
    for turn in range(3):
        step(index, CASE, CASE.queries(turn))
    assert torch.equal(index._learned["centroids"], before)


def test_a_further_prompt_joins_the_queue_with_lists_over_all_keys():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    index, more = built(case, rho=6), prompt(case, 3, seed=1)
    index.observe_queries(more, torch.arange(N, N + 3))
    assert_lists_as_literal(
        index, case.tokens(N)[0], torch.cat([more, prompt(case)[:, :, -1:]], dim=2), 6
    )


@pytest.mark.parametrize("between", [False, True])
def test_a_key_from_the_generation_is_found_unless_stale(between):
    """The paper never offers such a key to a list."""
    found = []
    for stale in (False, True):
        index, queries = built(rho=6, stale=stale), CASE.queries()
        if between:
            step(index, CASE, queries)  # the waiting list must get the key too
        keys = 4 * queries.unflatten(1, (2, 3))[:, :, :1]
        index.append(keys, torch.zeros(2, 2, 1, 8))
        found.append((step(index, CASE, queries).ids == N).any(-1).all().item())
        assert found[-1] or not (index._learned["lists"] >= N).any()
    assert found == [True, False]


def test_stale_lists_lose_what_is_cut():
    index = built(rho=40, stale=True)
    index.truncate(50)
    assert (index._learned["lists"] < 50).all()
    assert (step(index, CASE, CASE.queries()).ids < 50).all()


def test_choices_of_queries():
    """Table 4: from 100 queries, seen in chunks, ten may be stored."""
    queries, got = torch.arange(100.0).expand(1, 1, 100)[..., None], {}
    for choice in ("last", "first", "evenly", "random"):
        seen = None
        for start in range(0, 100, 30):
            some = torch.arange(start, min(start + 30, 100))
            seen = PromptQueries.of(seen, queries[:, :, some], some, most=10, choice=choice)
        assert torch.equal(seen.queries[0, 0, :, 0].long(), seen.positions)
        assert seen.end == 100
        got[choice] = seen.positions.tolist()
        rows = seen.chosen(torch.tensor([4]), torch.ones(1, 10, dtype=torch.bool), choice=choice)
        got[choice, 4] = seen.positions[rows[0]].tolist()
    assert got["last"] == [*range(90, 100)]
    assert got["last", 4] == [*range(96, 100)]
    assert got["first"] == [*range(10)]
    assert got["first", 4] == [*range(4)]
    assert got["evenly", 4] == [0, 32, 64, 96]
    gaps = [after - before for before, after in zip(got["evenly"], got["evenly"][1:], strict=False)]
    assert set(gaps) <= {8, 16}
    assert len(set(got["random"])) == 10
    assert set(got["random", 4]) < set(got["random"])
    whole = priority(torch.arange(100), "random").argsort()[:10].sort().values
    assert got["random"] == whole.tolist(), "chunks change nothing"


def test_random_choices_follow_the_seed_and_favor_nobody():
    """The mean position of 1,000 of 100,000 is within 5 standard errors (p < 1e-6)."""
    positions = torch.arange(100_000)
    picked = [priority(positions, "random", seed).argsort()[:1000] for seed in range(3)]
    assert not torch.equal(picked[0].sort().values, picked[1].sort().values)
    for some in picked:
        assert abs(float(some.double().mean()) - 50_000) < 5 * 100_000 / 12**0.5 / 1000**0.5
    assert len(priority(positions, "random").unique()) == 100_000


def test_queries_of_a_sequence_that_was_cut_go():
    index, queries = CASE.index("ctkvr", rho=6), prompt()
    index.append(*CASE.tokens(N))
    index.observe_queries(prompt(seed=1), torch.arange(N))
    index.observe_queries(queries[:, :, 10:], torch.arange(10, N))  # observed again from 10 on
    index.end_prompt()
    assert torch.equal(index._learned["centroids"].flatten(1, 2), queries[:, :, -4:])


def test_padding_changes_nothing_but_ids():
    keys, values = CASE.tokens(N)
    queries = prompt().clone()
    queries[1, :, :24] = float("nan")
    padded = built(tokens=(keys, values), queries=queries, rho=6, valid=left_padding([0, 24], N))
    alone = CASE.index("ctkvr", rho=6)
    alone.append(keys[1:, :, 24:], values[1:, :, 24:])
    alone.observe_queries(queries[1:, :, 24:], torch.arange(N - 24))
    alone.end_prompt()
    assert padded._learned["known"].tolist() == [[True] * 4, [False, False, True, True]]
    hits = padded.search(CASE.queries(), k=9)
    got = type(hits)(hits.ids[1:], hits.scores[1:])
    assert_same_hits(got, alone.search(CASE.queries()[1:], k=9), close=1e-5, shift=24)


def test_queries_may_come_before_the_keys():
    """This happens in a layer if the prompt is still in the window when the prompt ends."""
    tokens, order = CASE.tokens(N), torch.tensor([1, 0])
    late = CASE.index("ctkvr", rho=6)
    late.observe_queries(prompt()[order], torch.arange(N))
    late.reorder(order)
    with pytest.raises(ValueError, match="batch_indices"):
        late.reorder(torch.tensor([2]))
    with pytest.raises(ValueError, match=r"keys.*B=2"):
        late.append(*CASE.tokens(N, batch=1))
    late.end_prompt()
    late.append(*tokens)
    assert_same_hits(late.search(CASE.queries(), k=9), built(rho=6).search(CASE.queries(), k=9))
    assert late.nbytes() == {**built(rho=6).nbytes(), "codes": late.nbytes()["codes"]}


def test_a_failed_append_leaves_lists_and_queue_as_they_were():
    index = built(rho=6)
    step(index, CASE, CASE.queries(1))
    before = snapshot(index, CASE.queries())
    keys, values = CASE.tokens(4, seed=3)
    keys[1, 1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match="keys"):
        index.append(keys, values)
    assert_same_snapshot(snapshot(index, CASE.queries()), before)


def test_bytes():
    """Centroids, int32 ids and float32 scores of lists, normalizers and flags are counted."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, dtype=torch.float16)
    index = built(case, rho=6)
    assert index.nbytes()["codes"] == 4 * (6 * 16 * 2 + 2 * 6 * 8 + 6 * 4 + 1)
    index.reset()
    assert index.nbytes()["codes"] == 0


def test_published_defaults():
    config = CASE.index("ctkvr").config
    assert (config.most, config.every, config.probes, config.rho) == (2048, 16, 4, 1280)
    assert CASE.index("ctkvr", preset="paper1024").config.rho == 2560


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(probes=0), "probes: got 0"),
        (dict(rho=0), "rho: got 0"),
        (dict(choice="middle"), "choice: got 'middle'"),
        (dict(group="sum"), "group: got 'sum'"),
        (dict(stale=1), "stale: got 1"),
        (dict(seed=2**31), "seed: got"),
    ],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("ctkvr", **options)


def test_bad_signals_are_refused():
    assert_bad_signals_are_refused(built(), prompt())


def test_in_a_layer_it_follows_exact():
    assert_follows_exact_in_a_layer(CASE, "ctkvr", policy="max_share", **ALL)
