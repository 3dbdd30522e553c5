"""Captured keys and queries are those that attention uses."""

import pytest
import torch

from kvindex_adapters.evaluate.capture import capture
from kvindex_adapters.evaluate.recall import SINK, bytes_per_key, measure
from tests.adapters.tiny import build, prompt
from tests.support.helpers import mostly_slow


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma2"], "llama"))
def test_captured_rows_give_the_models_attention(family):
    """Compare with the weights that transformers' eager attention reports."""
    options = dict(layer_types=["full_attention"] * 4) if family == "gemma2" else {}
    model, ids = build(family, **options), prompt(1, 40)["input_ids"][0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=ids[None], output_attentions=True).attentions
    layers = capture(model, ids, queries=7, chunk=16)
    assert len(layers) == 4
    for layer, want in zip(layers, weights, strict=True):
        assert layer.keys.shape == (2, 40, 16)
        assert layer.queries.shape == (4, 7, 16)
        logits = layer.queries @ layer.keys.repeat_interleave(2, 0).mT * layer.scale
        if layer.softcap:
            logits = layer.softcap * (logits / layer.softcap).tanh()
        future = torch.arange(40) > torch.arange(33, 40)[:, None]
        got = logits.masked_fill(future, float("-inf")).softmax(-1)
        torch.testing.assert_close(got, want[0, :, 33:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("queries", "match"), [(0, "queries: got 0"), (41, "the text has only 40 tokens")]
)
def test_more_queries_than_tokens_are_refused(queries, match):
    with pytest.raises(ValueError, match=match):
        capture(build("llama"), prompt(1, 40)["input_ids"][0], queries=queries)


def test_exact_search_recalls_everything_and_a_bad_index_does_not():
    model, ids = build("llama"), prompt(1, 300)["input_ids"][0]
    layers = capture(model, ids, queries=10)
    exact = measure(layers, "exact", k=20, prompt=290)
    assert exact.recall.shape == (4, 4)
    assert (exact.recall == 1).all()
    torch.testing.assert_close(exact.coverage, exact.coverage_true)
    rough = measure(layers, "pariskv:beta=.1:magnitude_bits=0", k=20, prompt=290)
    assert 20 / (290 - SINK) < rough.recall.mean() < 0.95
    assert (rough.coverage <= rough.coverage_true + 1e-9).all()


@pytest.mark.parametrize(
    ("spec", "stored", "scanned"),
    [
        ("pariskv:preset=paper", 96, 16),
        ("pariskv:preset=fast", 67, 18),
        ("pariskv:preset=accurate", 81, 33),
        ("pariskv:preset=precise", 99, 18),
        ("pariskv:preset=scan", 67, 67),
        ("exact", 0, 256),
    ],
)
def test_bytes_per_key(spec, stored, scanned):
    want = {"stored": stored, "scanned": scanned}
    shared = 300 / 4096  # bytes of learned tensors per token, mostly those of a mean center
    assert bytes_per_key(spec, 128) == pytest.approx(want, abs=shared)
