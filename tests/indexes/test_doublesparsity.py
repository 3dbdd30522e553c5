"""Double Sparsity: its channels, its labels, and the error of their estimates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=4, kv_heads=2, head_dim=32, value_dim=8, batch=2)


def calibrated(keys, queries, count):
    """Return the best channels by the paper's rule, one head and coordinate at a time."""
    B, G, _, D = keys.shape
    heads = queries.unflatten(1, (G, -1)).double()
    best = torch.empty(B, G, count, dtype=torch.int64)
    for b in range(B):
        for g in range(G):
            scores = [
                sum(head[:, j].abs().mean() for head in heads[b, g]) * keys[b, g, :, j].abs().mean()
                for j in range(D)
            ]
            best[b, g] = torch.stack(scores).argsort(descending=True)[:count]
    return best


def test_channels_are_those_of_the_largest_products():
    keys, values = CASE.tokens(50)
    queries = CASE.tensor(3, 2, 4, 50, 32) * torch.linspace(0.2, 3, 32)
    index = CASE.index("doublesparsity", channels=8, queries=50)
    index.observe_queries(queries, torch.arange(50))
    index.append(keys, values)
    want = calibrated(keys.double(), queries, 8)
    assert torch.equal(index.state_dict()["learned.channels"], want)
    blind = CASE.index("doublesparsity", channels=8)
    blind.append(keys, values)
    assert torch.equal(
        blind.state_dict()["learned.channels"], calibrated(keys.double(), queries.sign(), 8)
    )


def test_channels_stay_whatever_comes_later():
    index, tokens = CASE.index("doublesparsity", channels=4), CASE.tokens(60)
    index.append(*part(tokens, 0, 20))
    before = index.state_dict()["learned.channels"]
    index.observe_queries(CASE.tensor(3, 2, 4, 5, 32), torch.arange(20, 25))
    index.append(*part(tokens, 20, 60))
    assert torch.equal(index.state_dict()["learned.channels"], before)


def test_padded_queries_do_not_calibrate():
    keys, values = CASE.tokens(30)
    queries = CASE.tensor(3, 2, 4, 30, 32)
    wild = queries.clone()
    wild[1, :, :7, 5] = 1e4
    learned = []
    for seen in (queries, wild):
        index = CASE.index("doublesparsity", channels=4)
        index.observe_queries(seen, torch.arange(30))
        index.append(keys, values, valid=left_padding([0, 7], 30))
        learned.append(index.state_dict()["learned.channels"])
    assert torch.equal(*learned)


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_all_channels_as_they_are_are_exact(group):
    options = dict(group=group)
    index = CASE.index("doublesparsity", channels=32, bits=None, **options)
    exact = CASE.index("exact", **options)
    for each in (index, exact):
        each.append(*CASE.tokens(40))
    got, want = (each.search(CASE.queries(), k=9) for each in (index, exact))
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 4, 8]))
def test_an_estimate_is_off_by_what_the_other_channels_and_the_codes_are(seed, bits):
    """`|q·k - estimate| ≤ ‖q‖ ‖k outside‖ + ‖q‖ ‖k inside - label‖`, one head per group."""
    case = Case(q_heads=2, kv_heads=2, head_dim=32, value_dim=8)
    keys, values = case.tokens(25, seed)
    index = case.index("doublesparsity", channels=12, bits=bits)
    index.append(keys, values)
    queries = case.queries(seed)
    hits = index.search(queries, k=25)
    scores = torch.empty(1, 2, 25).scatter_(-1, hits.ids, hits.scores)
    channels = index.state_dict()["learned.channels"][:, :, None].expand(-1, -1, 25, -1)
    inside = keys.gather(-1, channels)
    span = inside.amax(-1) - inside.amin(-1) + inside.amin(-1).abs() * 2**-7
    labels = 12**0.5 * span / (2**bits - 1) * (1 + 2**-7) / 2
    outside = keys.scatter(-1, channels, 0).norm(dim=-1)
    off = (scores - (keys @ queries[..., None])[..., 0]).abs()
    assert (off <= queries.norm(dim=-1)[..., None] * (outside + labels) + 1e-4).all()


def test_bytes_of_a_label():
    case = Case(q_heads=2, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16)
    for bits, want in ((2, 8), (4, 12), (8, 20), (None, 32)):
        index = case.index("doublesparsity", bits=bits)
        index.append(*case.tokens(64))
        assert index.bytes_per_key()["scanned"] == want


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(channels=0), "channels: got 0"),
        (dict(queries=0), "queries: got 0"),
        (dict(bits=3), r"bits: got 3, allowed is one of \[2, 4, 8\] or None"),
        (dict(group="x"), "group: got 'x'"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("doublesparsity", **options)
