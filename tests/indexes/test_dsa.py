"""DSA: the lightning indexer's score, the error of 8-bit keys, and rows chosen for a layer."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, left_padding

CASE = Case(q_heads=4, kv_heads=2, head_dim=32, value_dim=8, batch=2)


def lightning(keys, queries, weights):
    """Compute equation 1, one head and key at a time: float64 `[B, G, T, N]`."""
    B, G, N, _ = keys.shape
    heads, T = queries.shape[1] // G, queries.shape[2]
    scores = torch.zeros(B, G, T, N, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(G * heads), range(T)):
        for s, key in enumerate(keys[b, h // heads].double()):
            product = float(queries[b, h, t].double() @ key)
            scores[b, h // heads, t, s] += float(weights[b, h, t]) * max(product, 0.0)
    return scores


def best(scores, k):
    """Return ids of the best finite scores, -1 for none, and the lowest id among equal scores."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return ids.masked_fill(values.isneginf(), -1)[..., :k]


def of_all(index, queries, count):
    """Return the score of every token, float32 `[B, G, count]`."""
    hits = index.search(queries, k=count)
    return torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)


def test_scores_are_those_of_the_paper():
    keys, values = CASE.tokens(20)
    index = CASE.index("dsa", key_codec="plain")
    index.append(keys, values)
    queries, weights = CASE.queries(), CASE.tensor(5, 2, 4, 1).abs()
    want = lightning(keys, queries[:, :, None], torch.ones(2, 4, 1))[:, :, 0].float()
    torch.testing.assert_close(of_all(index, queries, 20), want, rtol=1e-5, atol=1e-5)
    weighed = lightning(keys, queries[:, :, None], weights)[:, :, 0].float()
    got = of_all(index, queries * weights, 20)  # a weight that is a factor of its query
    torch.testing.assert_close(got, weighed, rtol=1e-5, atol=1e-5)


def test_rows_of_several_tokens_are_the_best_up_to_each(monkeypatch):
    """Weights have both signs. Keys and queries are processed in one block or in several."""
    keys, values = CASE.tokens(30)
    queries, weights = CASE.tensor(3, 2, 4, 7, 32), CASE.tensor(4, 2, 4, 7)
    index = CASE.index("dsa", key_codec="plain")
    valid = left_padding([0, 26], 30)
    index.append(keys, values, valid=valid)
    scores = lightning(keys, queries, weights)
    seen = (torch.arange(30) <= torch.arange(23, 30)[:, None]) & valid[:, None, None]
    want = best(scores.masked_fill(~seen, float("-inf")), 5)
    assert torch.equal(index.choose(queries, weights, k=5), want)
    assert (want == -1).any()
    monkeypatch.setattr("kvindex.indexes.dsa.BLOCK", 8)
    monkeypatch.setattr("kvindex.indexes.dsa.PRODUCTS", 150)
    assert torch.equal(index.choose(queries, weights, k=5), want)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_a_score_is_off_by_what_the_keys_codes_are(seed):
    """A ReLU does not increase an error: `|I - estimate| ≤ Σ_j ‖q_j‖ ‖k - codes‖`.

    An 8-bit number (e4m3) has an error of at most a 16th, or of 2^-10 of the scale.
    """
    keys, values = CASE.tokens(25, seed)
    queries = CASE.queries(seed)
    coded, plain = CASE.index("dsa"), CASE.index("dsa", key_codec="plain")
    for index in (coded, plain):
        index.append(keys, values)
    sizes = queries.norm(dim=-1).reshape(2, 2, 2).sum(-1)
    scale = keys.norm(dim=-1) / 448  # bound by the rotated key's norm
    off = (of_all(coded, queries, 25) - of_all(plain, queries, 25)).abs()
    bound = keys.norm(dim=-1) / 16 + 32**0.5 * scale * 2**-10
    assert (off <= sizes[..., None] * bound + 1e-4).all()
    assert off.max() > 1e-3


def test_a_layer_attends_to_the_rows_that_were_chosen():
    """In a prompt and steps: one index stores the indexer's keys, another one the rows to attend
    to."""
    shape = Case(q_heads=4, kv_heads=1, head_dim=16, value_dim=8)
    indexer = Case(q_heads=3, kv_heads=1, head_dim=8, value_dim=8)
    small, layer = indexer.index("dsa", key_codec="plain"), shape.index("exact", store="host")
    layer = AttentionLayer(layer, k=1, sink=2, local_window=4, update_every=4, dense_below=0)
    keys, values = shape.tokens(40)
    index_keys, unread = indexer.tokens(40)
    queries = shape.tensor(7, 1, 4, 40, 16)
    index_queries, weights = indexer.tensor(8, 1, 3, 40, 8), indexer.tensor(9, 1, 3, 40)
    scores = lightning(index_keys, index_queries, weights)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    chosen = best(scores.masked_fill(~causal, float("-inf")), 6)
    mask = (chosen[..., None] == torch.arange(40)).any(-2)
    want = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.expand(-1, 4, -1, -1), values.expand(-1, 4, -1, -1), attn_mask=mask
    )
    start = 0
    for count in [25] + [1] * 15:
        new = slice(start, start + count)
        small.append(index_keys[:, :, new], unread[:, :, new])
        ids = small.choose(index_queries[:, :, new], weights[:, :, new], k=6)
        got = layer.step(queries[:, :, new], keys[:, :, new], values[:, :, new], ids=ids)
        torch.testing.assert_close(got, want[:, :, new], rtol=1e-4, atol=1e-5)
        start += count


def test_bytes_of_a_key():
    """DeepSeek's indexer stores 128 bytes and a scale per token."""
    case = Case(q_heads=64, kv_heads=1, head_dim=128, value_dim=8, dtype=torch.bfloat16)
    for codec, want in (("fp8", 132), ("plain", 256)):
        index = case.index("dsa", key_codec=codec)
        index.append(*case.tokens(10))
        assert index.bytes_per_key() == {"stored": want, "scanned": want}


def test_what_is_wrong_is_refused():
    with pytest.raises(ValueError, match="key_codec: got 'int4', allowed is one of"):
        CASE.index("dsa", key_codec="int4")
    index = CASE.index("dsa")
    index.append(*CASE.tokens(5))
    queries, weights = CASE.tensor(3, 2, 4, 6, 32), CASE.tensor(4, 2, 4, 6)
    with pytest.raises(
        ValueError, match=r"queries.shape\[2\] \(tokens\): got 6, allowed is 1 to 5"
    ):
        index.choose(queries, weights, k=2)
    with pytest.raises(ValueError, match=r"weights: got shape \[2, 4, 6\]"):
        index.choose(queries[:, :, :5], weights, k=2)
    with pytest.raises(ValueError, match="weights: got nan"):
        index.choose(queries[:, :, :5], weights[:, :, :5] * float("nan"), k=2)
    with pytest.raises(ValueError, match="k: got 0"):
        index.choose(queries[:, :, :5], weights[:, :, :5], k=0)
    assert len(index) == 5
