"""ArkVale: its volumes equal those of lists; their bounds; keys outside the published radius."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.indexes.arkvale import ArkVale
from tests.contract import CHECKS
from tests.support import literal
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
KINDS = [
    ("cuboid", "mean"),
    ("cuboid", "max"),
    ("ball", "mean"),
    ("ball", "max"),
    ("center", "mean"),
]


def page_scores(index, queries, count):
    """Return the score of every token's page, float32 `[B, G, count]`; one head per group."""
    hits = index.search(queries, k=count)
    return torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)


def assert_bounded(kind, seed, count, **options):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8)
    (keys, values), queries = case.tokens(count, seed), case.queries(seed)
    index = kind(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, **options)
    cut = count // 3
    index.append(keys[:, :, :cut], values[:, :, :cut])
    index.append(keys[:, :, cut:], values[:, :, cut:])
    products = (keys.double() @ queries.double()[..., None])[..., 0]
    scores = page_scores(index, queries, count)
    slack = 64 * torch.finfo(torch.float32).eps  # 16 products, twice, of numbers below 8 or so
    assert (scores + slack * scores.abs().amax() >= products).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 70),
    page=st.integers(1, 40),
    volume=st.sampled_from(["cuboid", "ball"]),
)
def test_with_the_largest_radius_a_page_scores_at_least_as_much_as_its_keys(
    seed, count, page, volume
):
    assert_bounded(ArkVale, seed, count, page=page, volume=volume, radius="max")


@pytest.mark.parametrize(("volume", "radius"), KINDS)
def test_the_mean_radius_leaves_out_a_key_that_stands_alone(volume, radius):
    """One key equals the query, among small ones. Every bound contains it, and the mean radius does
    not."""
    (keys, values), queries = CASE.tokens(64), CASE.queries()
    keys = keys / 16
    keys[:, :, 17] = queries
    index = CASE.index("arkvale", volume=volume, radius=radius)
    index.append(keys, values)
    product = queries.square().sum(-1)
    score = page_scores(index, queries, 64)[..., 17]
    assert ((score >= product * (1 - 1e-5)) == (radius == "max")).all()


def in_words(keys, query, volume, radius):
    """Compute the score of one page in Python's numbers."""
    columns = list(zip(*keys, strict=True))
    center = [(min(column) + max(column)) / 2 for column in columns]
    many = {"mean": lambda x: sum(x) / len(x), "max": max}[radius]
    if volume == "center":
        return literal.dot(query, center)
    if volume == "ball":
        far = [literal.norm([x - c for x, c in zip(key, center, strict=True)]) for key in keys]
        return literal.dot(query, center) + literal.norm(query) * many(far)
    total = 0.0
    for q, c, column in zip(query, center, columns, strict=True):
        r = many([abs(x - c) for x in column])
        total += max(q * (c - r), q * (c + r))
    return total


@pytest.mark.parametrize(("volume", "radius"), KINDS)
def test_scores_are_those_in_words(volume, radius):
    (keys, values), queries = CASE.tokens(45), CASE.queries()
    index = CASE.index("arkvale", page=10, volume=volume, radius=radius)
    index.append(*part((keys, values), 0, 17))
    index.append(*part((keys, values), 17, 45))
    scores = page_scores(index, queries, 45)
    for b in range(2):
        for h in range(2):
            for start in range(0, 45, 10):
                page, query = keys[b, h, start : start + 10].tolist(), queries[b, h].tolist()
                want = in_words(page, query, volume, radius)
                assert scores[b, h, start : start + 10].tolist() == pytest.approx(
                    [want] * len(page), rel=1e-4, abs=1e-4
                )


def test_the_largest_cuboid_is_quest():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    quest = case.index("quest", page=8)
    index = case.index("arkvale", page=8, radius="max")
    for each in (quest, index):
        each.append(*case.tokens(60))
    got, want = (each.search(case.queries(), k=20) for each in (index, quest))
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.scores, want.scores)


@pytest.mark.parametrize(("volume", "radius"), KINDS)
def test_pages_of_one_token_are_exact(volume, radius):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    index, exact = case.index("arkvale", page=1, volume=volume, radius=radius), case.index("exact")
    for each in (index, exact):
        each.append(*case.tokens(40))
    got, want = (each.search(case.queries(), k=9) for each in (index, exact))
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("volume", "radius"), KINDS)
def test_summaries_are_those_of_one_append_whatever_came_before(volume, radius):
    pads, tokens = [0, 5, 37], CASE.tokens(90, batch=3)
    index = CASE.index("arkvale", page=8, volume=volume, radius=radius)
    valid, start = left_padding(pads, 90), 0
    for stop in (3, 20, 21, 60, 75):
        index.append(*part(tokens, start, stop), valid=valid[:, start:stop])
        start = stop
    index.truncate(50)
    index.append(*part(tokens, 50, 90))
    for b, pad in enumerate(pads):
        want = index.encode(tokens[0][b : b + 1, :, pad:].expand(3, -1, -1, -1))
        for name in want:
            pages = want[name].shape[2]
            torch.testing.assert_close(index._codes[name][b, :, :pages], want[name][0])


def test_a_radius_of_a_short_type_is_around_the_center_that_is_kept():
    case = Case(q_heads=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    keys, values = case.tokens(96)
    index = case.index("arkvale", volume="ball", radius="max")
    index.append(keys + 100, values[..., :16])  # keys for which bfloat16 is coarse
    center, radius = (index._codes[name].float() for name in ("center", "radius"))
    far = ((keys + 100).float().unflatten(2, (3, 32)) - center[:, :, :, None]).norm(dim=-1)
    assert (far <= radius * (1 + 1e-6)).all()


@pytest.mark.parametrize(("volume", "want"), [("cuboid", 16), ("ball", 8 + 4 / 32), ("center", 8)])
def test_bytes_per_key_and_head(volume, want):
    case = Case(q_heads=4, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("arkvale", volume=volume)
    index.append(*case.tokens(64))
    assert index.bytes_per_key() == {"stored": want, "scanned": want}


@pytest.mark.parametrize("volume", ["ball", "center"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_other_volumes_keep_the_contract(check, volume):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, dtype=torch.float16, batch=2)
    check(lambda **options: case.index("arkvale", volume=volume, page=8, **options), case)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(page=0), "page: got 0, allowed is an integer of at least 1"),
        (dict(volume="sphere"), "volume: got 'sphere', allowed is one of"),
        (dict(radius="median"), "radius: got 'median', allowed is one of"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        CASE.index("arkvale", **options)
