"""Sliding windows in a decode step's graph: a ring of rows gives the results of transformers.

On a CPU, graphs are recorded functions (`tests/cuda/graphs.py`), of an index in plain torch.
"""

from copy import deepcopy
from itertools import product

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.cache import sliding
from kvindex_adapters.hf.cache.sliding import SlidingLayer
from tests.adapters.hf.graph.test_token_graph import EAGER, REGIONS
from tests.adapters.tiny import build, prompt
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.helpers import mostly_slow, slow

WINDOW = 24
"""Sliding window of the tiny models."""

KINDS = dict(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
TWO = {
    "gemma2": dict(**KINDS, sliding_window=WINDOW),
    "gemma3_text": dict(**KINDS, sliding_window=WINDOW),
    "gpt_oss": dict(**KINDS, sliding_window=WINDOW),
    "ministral": dict(**KINDS, sliding_window=WINDOW),
    "qwen2": dict(**KINDS, sliding_window=WINDOW),
}
"""Two layers of families: with a softcap, normalized queries and keys, a learned sink, or none."""


SIZES = [(1, 60), (3, 60), (3, 17)]
CASES = mostly_slow(
    product(SIZES, TWO), *zip(SIZES, ("gemma2", "gemma3_text", "gpt_oss"), strict=True)
)


@pytest.fixture
def graphs():
    """Count graphs and replays."""
    with recorded(WholeGraph) as counting:
        yield counting


def model_of(family="gemma3_text", **options):
    return build(family, **{**TWO.get(family, {}), "eos_token_id": None, **options})


@pytest.mark.parametrize(("size", "family"), CASES, ids=str)
def test_tokens_are_those_of_transformers(graphs, family, size):
    """With a window that is full or not, more than once around it; sequences start at other
    tokens."""
    batch, length = size
    model, inputs = model_of(family), prompt(batch, length, padded=batch > 1)
    how = dict(max_new_tokens=60, do_sample=False)
    want = model.generate(**inputs, **how)
    with kvhf.attach(model, **REGIONS) as cache:
        got = model.generate(**inputs, past_key_values=cache, **how)
        said = cache.report().graph
    assert torch.equal(got, want)
    # after a short prompt, the index has no rows yet
    assert graphs.replays == (59 - EAGER if length == 60 else 50)
    assert said == f"{graphs.replays} of 59 tokens were replays"


def life(model, token_graph):
    """Return logits of several turns, reorders, copies and rollbacks to a checkpoint."""
    logits, ids = [], prompt(2, 60)["input_ids"]

    def tokens(cache, count):
        for _ in range(count):
            start = cache.get_seq_length()
            positions = torch.full((2, 1), start)
            given = ids[:, start % 60 : start % 60 + 1]
            logits.append(model(given, position_ids=positions, past_key_values=cache).logits)

    with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache, torch.no_grad():
        for length in (60, 9):
            model(ids[:, :length], past_key_values=cache)
            tokens(cache, 8)
            if length < WINDOW:
                cache.crop(-3)
                tokens(cache, 5)
            logits.append(model(ids[:, :7], past_key_values=cache).logits)
            tokens(cache, 6)
            cache.reorder_cache(torch.tensor([1, 0]))
            tokens(cache, 5)
            before = cache.checkpoint()
            tokens(cache, 3)
            cache.rollback(before)
            fork = cache.fork()
            tokens(cache, 5)
            tokens(fork, 6)
            tokens(cache, 3)
            logits += [cache.layers[0].keys, cache.layers[0].values]
            tokens(cache, 4)
            assert cache.layers[0].get_seq_length() == cache.get_seq_length()
            cache.batch_select_indices(torch.tensor([1, 1]))
            tokens(cache, 5)
            cache.reset()
    return logits


@pytest.mark.parametrize("family", mostly_slow(["gemma3_text", "gpt_oss"], "gemma3_text"))
def test_turns_cuts_orders_and_copies(graphs, family):
    model = model_of(family)
    for mine, theirs in zip(life(model, None), life(model, False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert graphs.replays > 50


def test_beams(graphs):
    model, inputs = model_of(), prompt(2, 40, padded=True)
    how = dict(max_new_tokens=30, num_beams=3, do_sample=False)
    want = model.generate(**inputs, **how)
    with kvhf.attach(model, **REGIONS) as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), want)
        assert cache.report().graph == f"{29 - EAGER} of 29 tokens were replays"


def test_a_cut_is_refused_as_transformers_does(graphs):
    model = model_of()
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        how = dict(past_key_values=cache, do_sample=False)
        some = model.generate(**prompt(1, 60), max_new_tokens=10, **how)
        assert cache.layers[0].ring is not None
        with pytest.raises(RuntimeError, match="sliding window size was already reached"):
            cache.crop(-2)
        got = model.generate(some, max_new_tokens=10, **how)
    assert torch.equal(got, model.generate(**prompt(1, 60), max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("length", [60, slow(9)])
def test_a_replay_that_fails_takes_its_token_back(graphs, monkeypatch, length):
    model, inputs = model_of(), prompt(1, length)
    want = model.generate(**inputs, max_new_tokens=50, do_sample=False)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        ids, made = inputs["input_ids"], []
        positions = torch.arange(length)[None]
        layer = type(cache.attention_layers()[0]) if cache.attention_layers() else None
        assert layer is None
        failed = 0
        while len(made) < 50:
            with monkeypatch.context() as patch:
                if len(made) in (8, 30) and failed <= len(made) // 30:
                    counted = "kvindex.layer.AttentionLayer.count_replay"
                    patch.setattr(counted, lambda _: 1 / 0)  # after the device's work
                try:
                    out = model(ids, past_key_values=cache, position_ids=positions)
                except ZeroDivisionError:
                    failed += 1
                    assert cache.layers[0].get_seq_length() == length + len(made) - 1
                    continue
            ids, positions = out.logits[:, -1:].argmax(-1), torch.tensor([[length + len(made)]])
            made.append(ids)
    assert failed == 2
    assert torch.equal(torch.cat(made, 1), want[:, length:])


def test_a_saved_cache_has_the_layers_of_transformers(graphs, tmp_path):
    """So it can be loaded where decode steps are no graphs, and the other way round."""
    model, how = model_of(), dict(do_sample=False, max_new_tokens=10)
    want = model.generate(**prompt(1, 60), do_sample=False, max_new_tokens=20)
    for number, (writes, reads) in enumerate([(None, False), (False, None), (None, None)]):
        with kvhf.attach(model, **{**REGIONS, "index": "exact"}, token_graph=writes) as cache:
            some = model.generate(**prompt(1, 60), past_key_values=cache, **how)
            if writes is None:
                cache.roll()
            cache.save(tmp_path / str(number))
            kinds = [type(layer) for layer in cache.layers]
            assert (SlidingLayer in kinds) == (writes is None)
        with kvhf.attach(model, **{**REGIONS, "index": "exact"}, token_graph=reads) as cache:
            cache.load(tmp_path / str(number))
            kinds = [type(layer) for layer in cache.layers]
            assert (DynamicSlidingWindowLayer in kinds) == (reads is False)
            assert torch.equal(model.generate(some, past_key_values=cache, **how), want)


def test_a_mask_of_the_models_own_is_no_graph(graphs):
    """Chunked attention has no sliding window, but has the same mask until the first chunk ends."""
    kinds = dict(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=WINDOW)
    model = build("llama4_text", **{**KINDS, **kinds}, eos_token_id=None)
    for batch, length in ((1, 9), (2, 40)):
        inputs, how = prompt(batch, length, padded=True), dict(max_new_tokens=40, do_sample=False)
        want = model.generate(**inputs, **how)
        with kvhf.attach(model, **REGIONS) as cache:
            assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), want)
            assert "got a mask that the model computes for each" in cache.report().graph
    assert graphs.made == 0


def test_a_window_that_is_too_wide_or_looks_back_is_no_ring(graphs, monkeypatch):
    model, how = model_of(), dict(max_new_tokens=10, do_sample=False)
    with monkeypatch.context() as patch:
        patch.setattr(sliding, "LARGEST", WINDOW - 1)
        with kvhf.attach(model, **REGIONS) as cache:
            model.generate(**prompt(1, 60), past_key_values=cache, **how)
            assert "layer 0: sliding_window: got 24, allowed is at most 23" in cache.report().graph
    with kvhf.attach(model, **REGIONS) as cache:
        cache.activate_past_recording()
        model.generate(**prompt(1, 60), past_key_values=cache, **how)
        assert "layer 0: its window keeps older tokens" in cache.report().graph
        assert cache.layers[0].keys.shape[2] > WINDOW
    assert graphs.made == 0


def test_what_a_model_does_to_the_ring_is_refused():
    keys = torch.zeros(1, 2, 5, 8)
    layer = SlidingLayer(WINDOW)
    layer.update(keys, keys)
    layer.roll(None)
    layer.update(keys[:, :, :1], keys[:, :, :1])
    with pytest.raises(kvhf.UnsupportedError, match="keys: got 3 keys for a window of 24"):
        layer.seen(keys[:, :, :3], keys[:, :, :3], None)


def test_a_copy_has_no_part_in_the_ring():
    keys = torch.randn(1, 2, 30, 8)
    layer = SlidingLayer(WINDOW)
    layer.update(keys, keys)
    layer.roll(None)
    other = deepcopy(layer)
    assert layer.ring is other.ring is None
    assert torch.equal(other.keys, keys[:, :, -WINDOW + 1 :])
    assert torch.equal(layer.values, other.values)
    assert other.cumulative_length == 30
