"""Compare ParisKV's search with a literal implementation of the paper."""

from itertools import pairwise

import pytest
import torch

from kvindex import Hits
from kvindex.ops.coarse import histogram
from kvindex.ops.codes import levels
from kvindex.ops.transform import rotation
from kvindex.pariskv.config import PAPER, ParisKVConfig
from tests.support import literal
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding

LEVELS = levels(8, 3).tolist()


def wanted(index, keys, queries, k):
    """Return the hits of the literal implementation, for one query per KV head: `[B, G, D]`."""
    matrix = rotation(index.geometry.head_dim, index.config.seed).tolist()
    options = dict(beta=index.config.beta, rho=index.config.rho)
    rows = [
        [
            literal.search(
                keys[b, h].tolist(), queries[b, h].tolist(), matrix, LEVELS, k, **options
            )
            for h in range(keys.shape[1])
        ]
        for b in range(len(queries))
    ]
    pad = [(-1, float("-inf"))]
    rows = [[row + pad * (k - len(row)) for row in heads] for heads in rows]
    pairs = torch.tensor(rows, dtype=torch.float64)
    return Hits(pairs[..., 0].long(), pairs[..., 1].float())


def searched(case, count, k, seed=0, **options):
    index = case.index("pariskv:preset=paper", **options)
    keys, values = case.tokens(count, seed)
    index.append(keys, values)
    return index, keys, index.search(case.queries(seed), k=k)


@pytest.mark.parametrize("dim", [8, 64, 80, 96])
@pytest.mark.parametrize("options", [{}, dict(beta=0.1, rho=0.2), dict(beta=1.0, rho=0.5)], ids=str)
def test_whole_search_is_that_of_the_spec(dim, options):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, batch=2)
    index, keys, hits = searched(case, 50, 6, **options)
    assert_same_hits(hits, wanted(index, keys, case.queries(), 6), close=ROUNDED)


def test_whole_search_of_a_group_by_its_mean_query():
    case = Case(q_heads=8, kv_heads=2, head_dim=24)
    index, keys, hits = searched(case, 50, 6, group="mean_query", beta=0.3)
    means = case.queries().double().reshape(1, 2, 4, 24).mean(2)
    assert_same_hits(hits, wanted(index, keys, means, 6), close=ROUNDED)


@pytest.mark.parametrize("broken", ["keys", "query", "rotation", "beta"])
def test_the_comparison_with_the_spec_can_fail(broken):
    case = Case(q_heads=2, kv_heads=2, head_dim=16)
    index, keys, hits = searched(case, 50, 6, beta=0.2)
    queries = case.queries()
    if broken == "keys":
        keys = keys.roll(1, 2)
    if broken == "query":
        queries = -queries
    if broken in ("rotation", "beta"):
        index = case.index(
            "pariskv:preset=paper", **({"seed": 1} if broken == "rotation" else {}), beta=0.12
        )
    with pytest.raises(AssertionError):
        assert_same_hits(hits, wanted(index, keys, queries, 6), close=ROUNDED)


# the schedule


@pytest.mark.parametrize(
    ("n", "beta", "rho"),
    [
        (1, 0.5, 0.5),
        (4_999, 0.5, 0.5),
        (5_000, 0.25, 0.30),
        (9_999, 0.25, 0.30),
        (10_000, 0.20, 0.25),
        (29_999, 0.20, 0.25),
        (30_000, 0.10, 0.20),
        (10**6, 0.10, 0.20),
    ],
)
def test_schedule_as_published(n, beta, rho):
    index = Case().index("pariskv:preset=paper", preset="paper")
    assert index.config.fractions(n) == literal.schedule(n) == (beta, rho)
    assert Case().index("pariskv:preset=paper", beta=0.03).config.fractions(n) == (0.03, rho)
    assert Case().index("pariskv:preset=paper", rho=0.03).config.fractions(n) == (beta, 0.03)


@pytest.mark.parametrize("n", [4_999, 5_000])
def test_whole_search_on_both_sides_of_a_boundary(n):
    """At D = 8 there is one subspace, so nearly all votes are ties."""
    case = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=1)
    index, keys, hits = searched(case, n, 20)
    assert_same_hits(hits, wanted(index, keys, case.queries(), 20), close=ROUNDED)


def test_schedule_follows_the_number_of_valid_tokens_of_each_row():
    case = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=1, batch=2)
    index = case.index("pariskv:preset=paper")
    index.append(*case.tokens(5_010), valid=left_padding([0, 20], 5_010))
    tiers, candidates = index.config.limits(index.counts, 1)
    assert candidates.tolist() == [1_253, 2_495]  # ⌈.25 · 5010⌉ and .5 · 4990
    assert tiers[0].tolist() == [76, 226, 451, 752, 1_128, 1_503]  # ⌈5010 · .3 · t⌉
    assert tiers[1].tolist() == [125, 375, 749, 1_248, 1_872, 2_495]


def test_candidates_are_at_least_k():
    case = Case(q_heads=2, kv_heads=2, head_dim=16)
    _, _, hits = searched(case, 50, 30, beta=0.01)
    assert (hits.ids >= 0).all()


# codes and statistics


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_codes_take_six_bytes_per_subspace(dim):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, batch=3)
    index = case.index("pariskv:preset=paper")
    index.append(*case.tokens(1))
    before = index.nbytes()["codes"]
    index.append(*case.tokens(70))
    M = dim // 8
    assert index.nbytes()["codes"] - before == 3 * 2 * 70 * (M + 3 * M + 2 * M)
    codes = index.encode(case.tokens(2)[0])
    assert codes["signs"].shape == (3, 2, 2, M)
    assert codes["magnitudes"].shape == (3, 2, 2, 3, M)
    assert (codes["weights"].shape, codes["weights"].dtype) == ((3, 2, 2, M), torch.bfloat16)


def assert_histogram_is_current(index):
    want = histogram(index._codes["signs"], index.valid)
    assert torch.equal(index._histogram, want)
    assert index._histogram.dtype == torch.int64


def test_histogram_follows_append_truncate_reorder_and_reset():
    case = Case(q_heads=2, kv_heads=2, head_dim=24, batch=2)
    index = case.index("pariskv:preset=paper")
    index.append(*case.tokens(30), valid=left_padding([4, 13], 30))
    assert_histogram_is_current(index)
    index.append(*case.tokens(9, 1))
    assert_histogram_is_current(index)
    index.truncate(21)
    assert_histogram_is_current(index)
    index.reorder(torch.tensor([1, 0, 1]))
    assert_histogram_is_current(index)
    index.truncate(8)  # sequences 0 and 2 contain only padding
    assert_histogram_is_current(index)
    assert index.counts.tolist() == [0, 4, 0]
    index.truncate(0)
    assert not index._histogram.any()
    index.reset()
    index.append(*case.tokens(3, batch=1))
    assert_histogram_is_current(index)


def test_encoding_does_not_depend_on_the_seed_of_anything_but_the_signs():
    case = Case(q_heads=2, kv_heads=2, head_dim=64)
    keys = case.tokens(5)[0]
    first = case.index("pariskv:preset=paper").encode(keys)
    torch.manual_seed(123)
    assert torch.equal(first["signs"], case.index("pariskv:preset=paper").encode(keys)["signs"])
    assert not torch.equal(
        first["signs"], case.index("pariskv:preset=paper", seed=1).encode(keys)["signs"]
    )


# properties


def true_top(keys, queries, k):
    return (queries[:, :, None] @ keys.mT)[:, :, 0].topk(k).indices


def recalled(hits, true):
    return float((true[..., None] == hits.ids[:, :, None]).any(-1).float().mean())


@pytest.mark.parametrize("dim", [64, 80])
def test_recall_on_random_keys_rises_with_beta(dim):
    case = Case(q_heads=4, kv_heads=4, head_dim=dim, batch=2)
    keys, values = case.tokens(1_000)
    true = true_top(keys, case.queries(), 50)
    recalls = []
    for beta in (0.05, 0.2, 0.5, 1.0):
        index = case.index("pariskv:preset=paper", beta=beta, rho=0.25)
        index.append(keys, values)
        recalls.append(recalled(index.search(case.queries(), k=50), true))
    assert recalls == sorted(recalls)
    assert recalls[0] > 0.15  # random rows would give .05
    assert recalls[-1] > 0.85  # what 4 bits per coordinate allow


@pytest.mark.parametrize("heads", [1, 3])
def test_recall_never_falls_as_the_ratio_grows_if_reranking_is_exact(heads, monkeypatch):
    case = Case(q_heads=2 * heads, kv_heads=2, head_dim=16)
    keys, values = case.tokens(200)
    index = case.index("pariskv:preset=paper", group="mean_query", rho=0.3)
    index.append(keys, values)
    true = true_top(keys, case.queries().reshape(1, 2, heads, 16).mean(2), 20)
    found = []

    def exact_rerank(queries, signs, magnitudes, weights, levels):
        back = queries @ index.encoding.rotation  # Rᵀ R q
        table = keys.gather(2, found[-1].clamp_min(0)[..., None].expand(-1, -1, -1, 16))
        return back @ table.mT

    def remembered(*args, right=index.ops.select.candidates):
        found.append(right(*args))
        return found[-1]

    monkeypatch.setattr(index.ops.rerank, "estimate", exact_rerank)
    monkeypatch.setattr(index.ops.select, "candidates", remembered)
    recalls = []
    for beta in (0.01, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0):
        index.config = ParisKVConfig(**{**PAPER, "beta": beta}, rho=0.3, group="mean_query")
        recalls.append(recalled(index.search(case.queries(), k=20), true))
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1
    for fewer, more in pairwise(found):
        for a, b in zip(fewer.flatten(0, 1).tolist(), more.flatten(0, 1).tolist(), strict=True):
            assert {*a} <= {*b, -1}


@pytest.mark.parametrize("power", [-20, -1, 7])
@pytest.mark.parametrize("group", ["mean_query", "union"])
def test_scaling_queries_by_a_power_of_two_never_changes_ids(power, group):
    case = Case(q_heads=6, kv_heads=2, head_dim=80)
    index = case.index("pariskv:preset=paper", group=group, beta=0.2)
    index.append(*case.tokens(100))
    want = index.search(case.queries(), k=15)
    assert torch.equal(index.search(case.queries() * 2.0**power, k=15).ids, want.ids)


def test_keys_of_equal_votes_are_candidates_by_the_lower_id():
    """Keys differ only in their norms, so all have the same centroids, and all votes are equal."""
    case = Case(q_heads=1, kv_heads=1, head_dim=16)
    direction = case.tokens(1)[0]
    keys = direction * torch.linspace(1, 2, 40)[:, None]
    index = case.index("pariskv:preset=paper", beta=0.25)
    index.append(keys, keys)
    hits = index.search(direction[:, :, 0], k=10)
    assert sorted(hits.ids.flatten().tolist()) == list(range(10)), "not the longest, id 30 to 39"


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_any_head_dim_batch_and_dtype(dim, batch, dtype):
    """Head dimensions other than 128 and dtypes other than bfloat16 work.

    A padded batch gives the same hits as its sequences alone.
    """
    case = Case(q_heads=6, kv_heads=2, head_dim=dim, dtype=dtype, batch=batch)
    keys, values = case.tokens(60)
    pads = [0, 17, 31][:batch]
    index = case.index("pariskv:preset=paper", beta=0.3)
    index.append(keys, values, valid=left_padding(pads, 60))
    hits = index.search(case.queries(), k=8)
    for b, pad in enumerate(pads):
        one = slice(b, b + 1)
        alone = case.index("pariskv:preset=paper", beta=0.3)
        alone.append(keys[one, :, pad:], values[one, :, pad:])
        got = Hits(hits.ids[one], hits.scores[one])
        want = alone.search(case.queries()[one], k=8)
        assert_same_hits(got, want, close=ROUNDED, shift=pad)
