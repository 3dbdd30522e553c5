"""IceCache equals a tree in Python's own numbers; with every key an anchor it is exact."""

import math
from itertools import pairwise

import pytest
import torch

from kvindex.indexes import icecache
from tests.contract import CHECKS
from tests.support import literal
from tests.support.helpers import Case, assert_same_hits, left_padding, part

SMALL = dict(page=4, ratio=0.2, view=2, group="mean_share")

CASES = [
    Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2),
    Case(q_heads=3, kv_heads=1, head_dim=64, value_dim=24, dtype=torch.bfloat16, batch=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_small_pages_of_many_anchors_keep_the_contract(check, case):
    """With default options, so few tokens would have only one or two anchors."""
    check(lambda **options: case.index("icecache", **SMALL, **options), case)


def pages_in_words(index, keys, ids, prompt, b, h):
    """Return [(anchor's id, ids of a page)]: tokens by nearest anchor, along the line, cut evenly.

    `ids` are the sequence's valid ones, and `prompt` says how many of them came first.
    """
    rows = {i: keys[b, h, i].tolist() for i in ids}
    squares = {i: literal.dot(rows[i], rows[i]) for i in ids}
    radius = max(squares[i] for i in ids[:prompt])
    point = {i: [*rows[i], math.sqrt(max(radius - squares[i], 0.0))] for i in ids}
    anchors = [i for i in index._learned["anchor_ids"][b].tolist() if i >= 0]
    children = {anchor: [] for anchor in anchors}
    for i in ids:
        children[min(anchors, key=lambda a: math.dist(point[i], point[a]))].append(i)
    pages, line = [], index._line.tolist()
    for anchor, own in children.items():
        own.sort(key=lambda i: literal.dot(point[i], line))
        count = math.ceil(len(own) / index.config.page)
        cuts = [math.ceil(n * len(own) / count) for n in range(count + 1)]
        pages += [(anchor, own[start:stop]) for start, stop in pairwise(cuts)]
    return pages


def rows_in_words(index, pages, keys, b, h, query, k):
    """Return the rows of the best pages of the anchors that a search visits, in order."""

    def product(i):
        return literal.dot(keys[b, h, i].tolist(), query)

    looked, held = [], 0
    for anchor in sorted({anchor for anchor, _ in pages}, key=lambda a: -product(a)):
        if len(looked) < index.config.view or held < k:
            looked.append(anchor)
            held += sum(len(page) for own, page in pages if own == anchor)
    best = sorted(
        (-max(map(product, page)), page) for anchor, page in pages if anchor in looked and page
    )
    found = []
    for _, page in best:
        found += sorted(page)[: k - len(found)] if len(page) > k - len(found) else sorted(page)
    return found[:k]


@pytest.mark.parametrize("k", [1, 9, 30, 70])
def test_rows_are_those_of_the_best_pages_of_the_best_anchors(k):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    (keys, values), queries = case.tokens(60), case.queries()
    keys[:, :, 50] *= 3  # longer than all that settled the radius
    index = case.index("icecache", **SMALL)
    valid = left_padding([0, 9], 60)
    index.append(keys[:, :, :30], values[:, :, :30], valid=valid[:, :30])
    index.append(keys[:, :, 30:], values[:, :, 30:])
    hits = index.search(queries, k=k)
    for b, first in enumerate([0, 9]):
        for h in range(2):
            ids = list(range(first, 60))
            pages = pages_in_words(index, keys, ids, 30 - first, b, h)
            assert max(len(page) for _, page in pages) <= 4
            assert len({anchor for anchor, _ in pages}) >= 5
            got = [i for i in hits.ids[b, h].tolist() if i >= 0]
            query = queries[b, h].tolist()
            want = rows_in_words(index, pages, keys, b, h, query, k)
            # within the page that is cut, members lie along the line: any of them may be taken
            assert len(got) == len(want)
            by_token = {i: number for number, (_, page) in enumerate(pages) for i in page}
            assert [by_token[i] for i in got] == [by_token[i] for i in want]


def assert_same_tree(index, want):
    for name in ("first", "anchor_ids", "members", "sizes", "parents"):
        assert torch.equal(index._learned[name], want._learned[name]), name


def test_the_tree_is_that_of_one_append_however_the_tokens_came():
    case = Case(q_heads=4, kv_heads=2, head_dim=32, batch=2)
    tokens = case.tokens(120)
    valid = left_padding([0, 13], 120)
    whole, pieces = (case.index("icecache", **SMALL) for _ in range(2))
    cuts = [0, 20, 21, 22, 60, 61, 120]
    for index, stops in ((whole, [0, 20, 120]), (pieces, cuts)):
        for start, stop in pairwise(stops):
            index.append(*part(tokens, start, stop), valid=valid[:, start:stop])
    assert_same_tree(pieces, whole)
    for length in (100, 60, 22, 20, 15):  # the first anchors stay, then anchors go, then the prompt
        pieces.truncate(length)
        fresh = case.index("icecache", **SMALL)
        for start, stop in ((0, min(20, length)), (20, length)):
            if stop > start:
                fresh.append(*part(tokens, start, stop), valid=valid[:, start:stop])
        assert_same_tree(pieces, fresh)
    pieces.truncate(0)
    pieces.append(*part(tokens, 0, 30))
    fresh = case.index("icecache", **SMALL)
    fresh.append(*part(tokens, 0, 30))
    assert_same_tree(pieces, fresh)


def test_every_token_is_with_its_nearest_anchor_of_all_that_came():
    case = Case(q_heads=2, kv_heads=2, head_dim=32)
    tokens = case.tokens(200)
    index = case.index("icecache", **SMALL)
    for start in range(0, 200, 20):
        index.append(*part(tokens, start, start + 20))
    learned, keys = index._learned, tokens[0]
    lift = icecache._lift
    points = torch.cat([keys, lift(keys, learned["radius"])[..., None]], dim=-1)
    anchors = points[:, :, learned["anchor_ids"][0]]
    distances = torch.cdist(points.double(), anchors.double())
    assert torch.equal(distances.argmin(-1), learned["parents"].long())


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_with_every_key_an_anchor_it_is_exact(group):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, batch=2)
    tokens, queries = case.tokens(60), case.queries()
    index = case.index("icecache", group=group, ratio=1.0, view=60)
    exact = case.index("exact", group=group)
    for target in (index, exact):
        target.append(*part(tokens, 0, 33))
        target.append(*part(tokens, 33, 60))
    assert (index._learned["sizes"] == 1).all()
    assert_same_hits(index.search(queries, k=12), exact.search(queries, k=12), close=1e-5)


def test_whoever_looks_at_all_anchors_finds_the_best_key():
    case = Case(q_heads=2, kv_heads=2, head_dim=32, batch=2)
    tokens, queries = case.tokens(300), case.queries()
    index, exact = case.index("icecache", view=300), case.index("exact")
    for target in (index, exact):
        target.append(*tokens)
    best = exact.search(queries, k=1)
    hits = index.search(queries, k=16)
    assert (hits.ids == best.ids).any(-1).all()
    torch.testing.assert_close(hits.scores[..., :1], best.scores)


def test_as_many_anchors_as_hold_k_rows_are_looked_at():
    case = Case(q_heads=4, kv_heads=2, head_dim=16)
    index = case.index("icecache", page=4, ratio=0.2, view=1)
    index.append(*case.tokens(100))
    for k in (1, 20, 100):
        assert (index.search(case.queries(), k=k).ids >= 0).all()


def test_anchors_are_about_as_many_as_the_ratio_says():
    case = Case(q_heads=1, kv_heads=1, head_dim=8)
    for ratio in (0.03, 0.2):
        index = case.index("icecache", ratio=ratio)
        index.append(*case.tokens(2000))
        spread = 4 * math.sqrt(2000 * ratio * (1 - ratio))  # fails once in 16,000 seeds
        assert abs(index._learned["anchor_ids"].shape[1] - 2000 * ratio) < spread


def test_bytes_per_key_and_head():
    case = Case(head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("icecache")
    index.append(*case.tokens(1000))
    anchors = index._learned["anchor_ids"].shape[1]
    kept = anchors * (256 + 4) + 1000 * 16 + (8 + 8 * anchors) / 2 + 4
    assert index.bytes_per_key()["stored"] == kept / 1000
    looked = round(min(30 / anchors, 1) * 1000)
    assert index.bytes_per_key()["scanned"] == (anchors * 260 + looked * 260) / 1000


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(page=0), "page: got 0, allowed"),
        (dict(ratio=0.0), r"ratio: got 0.0, allowed is a number in \(0, 1\]"),
        (dict(view=0), "view: got 0, allowed"),
        (dict(view_share=2), "view_share: got 2, allowed"),
        (dict(seed=2**31), "seed: got 2147483648, allowed"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        Case().index("icecache", **options)
