"""Compare the calibrated threshold with the wrapper itself on the same queries."""

import pytest
import torch

import kvindex
from kvindex.wrappers import Reuse
from kvindex_adapters.evaluate.capture import capture
from kvindex_adapters.evaluate.recall import SINK
from kvindex_adapters.evaluate.reuse_threshold import ALWAYS, calibrate_tau, calibrated
from tests.adapters.tiny import build, prompt

STEPS, K = 30, 12


@pytest.fixture(scope="module")
def layers():
    return capture(build("llama"), prompt(1, 200)["input_ids"][0], queries=STEPS + 1)


def replayed(layer, tau):
    """Run the wrapper. Return the fractions of steps that searched and of true rows in hits."""
    G, N, D = layer.keys.shape
    geometry = dict(q_heads=len(layer.queries), kv_heads=G, head_dim=D, scale=layer.scale)
    index, keys = kvindex.create("exact", **geometry), layer.keys[None, :, SINK : N - STEPS]
    index.append(keys, keys)
    reuse, overlap = Reuse(index, tau=tau), []
    for step in range(STEPS + 1):
        queries = layer.queries[None, :, step : step + 1]
        if not step:  # the prompt's last query
            reuse.observe_queries(queries.expand(-1, -1, 2, -1), torch.arange(2))
            continue
        reuse.observe_queries(queries, torch.tensor([step]))
        got, want = (each.search(queries[:, :, 0], k=K).ids for each in (reuse, index))
        overlap.append((want[..., None] == got[:, :, None]).any(-1).double().mean())
    return reuse.rate(), float(torch.stack(overlap).mean())


def test_rates_and_shares_are_those_of_the_wrapper(layers):
    found = calibrated(layers, k=K, overlap=0.9)
    similar = [point for point in found.points if 0 < point.rate < 1]
    assert len({point.rate for point in similar}) > 3, "the text has something to choose from"
    for point in (found.points[0], *similar[:: len(similar) // 4], found.points[-1]):
        want = [replayed(layer, point.tau) for layer in layers]
        assert point.rate == pytest.approx(sum(rate for rate, _ in want) / len(layers))
        assert point.overlap == pytest.approx(sum(overlap for _, overlap in want) / len(layers))


def test_the_least_tau_that_holds_enough_is_chosen(layers):
    found = calibrated(layers, k=K, overlap=0.7)
    assert found.chosen.overlap >= 0.7
    assert all(point.overlap < 0.7 for point in found.points if point.tau < found.tau)
    everything = calibrated(layers, k=K, overlap=1.0, taus=[-1.0, 0.0])
    assert (everything.tau, everything.chosen.rate, everything.chosen.overlap) == (ALWAYS, 1.0, 1.0)
    assert calibrated(layers, k=K, overlap=0.01).chosen.rate == pytest.approx(1 / STEPS)


def test_of_a_model_and_a_text(layers):
    model, ids = build("llama"), prompt(1, 200)["input_ids"][0]
    assert calibrate_tau(model, ids, steps=STEPS, k=K, overlap=0.7) == calibrated(
        layers, k=K, overlap=0.7
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(overlap=0), "overlap: got 0"),
        (dict(steps=125), "steps: got 125, allowed is at most 124 for a text of 200"),
        (dict(k=0), "k: got 0"),
    ],
)
def test_bad_numbers_are_refused(options, words):
    model, ids = build("llama"), prompt(1, 200)["input_ids"][0]
    with pytest.raises(ValueError, match=words):
        calibrate_tau(model, ids, **{**dict(steps=STEPS, k=K), **options})
