"""InfLLM: representatives equal those of lists, for any order of observation; their guarantees."""

import pytest
import torch

from kvindex.layer import AttentionLayer
from tests.support import literal
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
NONE = float("-inf")


def seen(case, count, seed=0, batch=None):
    """Return queries `[B, H, T, D]`."""
    batch = case.batch if batch is None else batch
    return case.tensor(20_000 + seed, batch, case.q_heads, count, case.head_dim)


def observe_queries(index, queries, start, stop):
    index.observe_queries(queries[:, :, start:stop], torch.arange(start, stop))


def in_words(keys, queries, ends, span):
    """Return scores of keys `[N][D]`; `ends[m]` is the number of queries seen when key m came."""
    scores = []
    for m, key in enumerate(keys):
        after = queries[m + 1 : min(m + span + 1, ends[m])]
        scores.append(sum(literal.dot(q, key) for q in after) / len(after) if after else NONE)
    return scores


def stand_for(keys, scores, most):
    """Return the mean of the keys that represent one page."""
    if all(score == NONE for score in scores):
        scores = [literal.norm(key) for key in keys]
    best = [keys[i] for i in literal.best(scores, most)]
    return [sum(column) / len(best) for column in zip(*best, strict=True)]


def assert_as_in_words(index, keys, queries, ends):
    config, P = index.config, index.config.page
    for b, h in torch.cartesian_prod(torch.arange(len(keys)), torch.arange(6)).tolist():
        mine = keys[b, h // 3].tolist()
        scores = in_words(mine, queries[b, h].tolist(), ends, config.span)
        marks = index._codes["marks"][b, h // 3, :, :, h % 3].flatten()[: len(mine)].tolist()
        assert marks == pytest.approx(scores, rel=1e-4, abs=1e-4)
        for page, start in enumerate(range(0, len(mine), P)):
            some = slice(start, start + P)
            want = stand_for(mine[some], scores[some], config.representatives)
            got = index._codes["representatives"][b, h // 3, page, h % 3].tolist()
            assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("span", "most"), [(4096, 4), (7, 2), (1, 1), (3, 99)])
def test_representatives_are_those_in_words(span, most, monkeypatch):
    monkeypatch.setattr("kvindex.indexes.infllm.CHUNK", 11)
    tokens, queries = CASE.tokens(64), seen(CASE, 80)
    index = CASE.index("infllm", page=8, span=span, representatives=most)
    ends, at = [], 0
    for looked, stop in ((40, 30), (41, 31), (41, 41), (60, 60), (80, 64)):
        observe_queries(index, queries, ends[-1] if ends else 0, looked)
        index.append(*part(tokens, at, stop))
        ends += [looked] * (stop - at)
        at = stop
    assert_as_in_words(index, tokens[0], queries, ends)


def test_the_comparison_can_fail():
    tokens, queries = CASE.tokens(32), seen(CASE, 40)
    index = CASE.index("infllm", page=8)
    observe_queries(index, queries.roll(1, 2), 0, 40)
    index.append(*tokens)
    with pytest.raises(AssertionError):
        assert_as_in_words(index, tokens[0], queries, [40] * 32)


def test_a_query_seen_before_finds_the_block_of_its_best_key():
    """With one representative, which the query itself chose, a block's score is its largest
    product."""
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    tokens, query = case.tokens(200), case.queries()
    index = case.index("infllm", page=10, representatives=1)
    observe_queries(index, query[:, :, None].expand(-1, -1, 201, -1), 0, 201)
    index.append(*tokens)
    products = (tokens[0] @ query[..., None])[..., 0]
    hits = index.search(query, k=200)
    scores = torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)
    most = products.unflatten(-1, (20, 10)).amax(-1).repeat_interleave(10, -1)
    torch.testing.assert_close(scores, most, rtol=1e-5, atol=1e-5)
    best = index.search(query, k=10).ids
    assert (best == products.argmax(-1, keepdim=True)).any(-1).all()


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_blocks_of_one_token_are_exact(group):
    index, exact = CASE.index("infllm", page=1, group=group), CASE.index("exact", group=group)
    observe_queries(index, seen(CASE, 41), 0, 41)
    for each in (index, exact):
        each.append(*CASE.tokens(40))
    got, want = (each.search(CASE.queries(), k=9) for each in (index, exact))
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5)


def test_padding_reordering_and_truncation_keep_what_was_seen():
    """A sequence equals one with only the remaining tokens, appended in the same parts."""
    pads, tokens, queries = [0, 5, 37], CASE.tokens(90, batch=3), seen(CASE, 95, batch=3)
    index, valid = CASE.index("infllm", page=8, span=12), left_padding(pads, 90)
    observe_queries(index, queries, 0, 80)
    index.append(*part(tokens, 0, 61), valid=valid[:, :61])
    order = torch.tensor([2, 0, 1])
    index.reorder(order)
    index.append(*(rows[order] for rows in part(tokens, 61, 75)))
    index.truncate(52)
    observe_queries(index, queries[order], 52, 95)
    index.append(*(rows[order] for rows in part(tokens, 52, 90)))
    for row, b in enumerate(order.tolist()):
        alone, pad = CASE.index("infllm", page=8, span=12), pads[b]
        alone.observe_queries(queries[b : b + 1, :, pad:80], torch.arange(80 - pad))
        one = tuple(rows[b : b + 1, :, pad:] for rows in tokens)
        alone.append(*part(one, 0, 52 - pad))
        alone.observe_queries(queries[b : b + 1, :, pad:], torch.arange(95 - pad))
        alone.append(*part(one, 52 - pad, 90 - pad))
        for name in alone._codes:
            want = alone._codes[name][0]
            got = index._codes[name][row, :, : want.shape[1]]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_was_seen_of_a_sequence_that_was_cut_is_forgotten():
    tokens, queries = CASE.tokens(40), seen(CASE, 60)
    index = CASE.index("infllm", page=8)
    observe_queries(index, queries, 0, 60)
    index.append(*part(tokens, 0, 30))
    index.truncate(20)
    index.append(*part(tokens, 20, 30))
    marks = index._codes["marks"].flatten(2, 3)
    assert (marks[:, :, :20] > NONE).all()
    assert (marks[:, :, 20:30] == NONE).all()
    observe_queries(index, queries, 30, 60)
    observe_queries(index, queries, 30, 40)  # observed again from 30 on
    assert index._positions.tolist() == list(range(30, 40))


def test_a_reorder_before_the_first_append_reorders_what_was_seen():
    tokens, queries, order = CASE.tokens(24), seen(CASE, 30), torch.tensor([1, 1, 0])
    index = CASE.index("infllm", page=8)
    observe_queries(index, queries, 0, 30)
    index.reorder(order)
    index.append(*(rows[order] for rows in tokens))
    assert_as_in_words(index, tokens[0][order], queries[order], [30] * 24)


def test_in_a_layer_every_key_is_scored_and_few_queries_are_kept():
    index = CASE.index("infllm", page=8)
    layer = AttentionLayer(index, k=16, sink=2, local_window=6, update_every=4, dense_below=20)
    keys, values = CASE.tokens(90)
    queries = seen(CASE, 90)
    for start, stop in [(0, 50), *((i, i + 1) for i in range(50, 90))]:
        some = slice(start, stop)
        layer.step(queries[:, :, some], keys[:, :, some], values[:, :, some])
        if stop > 50:
            assert len(index._positions) <= 6 + 4 + 1
    marks = index._codes["marks"].flatten(2, 3)[:, :, : len(index) - 2]  # without the sink
    assert len(index) > 70
    assert (marks > NONE).all()


def test_wrong_queries_are_refused():
    index = CASE.index("infllm")
    queries = seen(CASE, 5)
    with pytest.raises(ValueError, match=r"queries: got shape .* allowed is .*H=6, T, D=16"):
        index.observe_queries(queries[:, :2], torch.arange(5))
    with pytest.raises(ValueError, match=r"positions: got shape \[4\], allowed is \[T=5\]"):
        index.observe_queries(queries, torch.arange(4))
    observe_queries(index, queries, 0, 5)
    with pytest.raises(
        ValueError, match="keys: got a batch of 3, but queries of 2 sequences were observed"
    ):
        index.append(*CASE.tokens(4, batch=3))
    with pytest.raises(
        ValueError,
        match=r"batch_indices: got \[2\], allowed is a non-empty list of batch indices",
    ):
        index.reorder(torch.tensor([2]))
    assert len(index) == 0


def test_a_query_of_another_batch_than_the_first_keys_is_refused():
    """The call raises an error even if no key comes before the query, so that none needs it."""
    index = CASE.index("infllm")
    observe_queries(index, seen(CASE, 1), 0, 1)
    with pytest.raises(
        ValueError, match="keys: got a batch of 3, but queries of 2 sequences were observed"
    ):
        index.append(*CASE.tokens(4, batch=3))


def test_bytes_per_key_and_head():
    case = Case(q_heads=4, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("infllm")
    index.append(*case.tokens(256))
    assert index.bytes_per_key() == {"stored": 2 * 256 / 128 + 2 * 4, "scanned": 2 * 256 / 128}


@pytest.mark.parametrize("name", ["page", "representatives", "span"])
def test_bad_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: got 0, allowed is an integer of at least 1"):
        CASE.index("infllm", **{name: 0})
