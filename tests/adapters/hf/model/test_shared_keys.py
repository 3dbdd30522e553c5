"""Layers that share keys (gemma3n, gemma4) search one index, in the layer that computes them."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.cache.layer import IndexedLayer
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.support.helpers import sampled

SIZES = [40] + [1] * 14 + [6] + [1] * 4
REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_hidden_layers=6,
    sliding_window=24,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=101,
)
"""Layers 4 and 5 use the keys of layers 2 and 3."""
GEMMA3N = {**GEMMA4, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6}


def model_of(family, **options):
    return build(family, **{**(GEMMA4 if family == "gemma4_text" else GEMMA3N), **options})


@pytest.fixture(scope="module")
def model():
    return model_of("gemma4_text")


@pytest.mark.parametrize(
    ("family", "padded"), sampled(["gemma4_text", "gemma3n_text"], [True, False])
)
def test_logits_are_those_of_full_attention(family, padded):
    model, inputs = model_of(family), prompt(2, sum(SIZES), padded=padded)
    expected = dense_steps(model, inputs, SIZES)
    with kvhf.attach(model, **REGIONS) as cache:
        logits = steps(model, cache, inputs, SIZES)
        indexed = [i for i, layer in enumerate(cache.layers) if isinstance(layer, IndexedLayer)]
        searched = [layer.traffic.steps for layer in cache.attention_layers()]
        assert cache.lengths() == [sum(SIZES)] * 2  # one append
    assert indexed == [1, 3]
    assert searched == [SIZES.count(1), 2 * SIZES.count(1)]
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert worst < 1e-4 < 0.01 * float(expected[-1].abs().max())
    # with few rows, logits may differ
    with kvhf.attach(model, **{**REGIONS, "k": 1, "sink": 0}) as cache:
        few = steps(model, cache, inputs, SIZES)
    assert max(float((a - b).abs().max()) for a, b in zip(few, expected, strict=True)) > 1e-3


@pytest.mark.parametrize("padded", [True, False])
def test_a_prompt_of_which_some_logits_are_wanted(model, padded):
    """The last layers may read only some of its tokens; with padding they read all."""
    inputs = prompt(2, 40, padded=padded)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(**inputs, position_ids=positions).logits[:, -2:]
        with kvhf.attach(model, **REGIONS) as cache:
            options = dict(past_key_values=cache, position_ids=positions, logits_to_keep=2)
            logits = model(**inputs, **options).logits
        with kvhf.attach(model, **REGIONS) as cache:
            answers = model.generate(**inputs, past_key_values=cache, max_new_tokens=12)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    own = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(answers, own)


def test_a_dense_layer_is_dense_for_those_that_share_its_keys(model):
    inputs = prompt(1, sum(SIZES))
    with kvhf.attach(model, **REGIONS, dense_layers=(3,)) as cache:
        logits = steps(model, cache, inputs, SIZES)
        assert [layer.traffic.steps for layer in cache.attention_layers()] == [SIZES.count(1)]
    expected = dense_steps(model, inputs, SIZES)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_without_keys_of_its_own_is_not_made_dense_alone(model):
    with (
        pytest.raises(
            ValueError, match="dense_layers: got 5, but this layer attends to the keys of layer 3"
        ),
        kvhf.attach(model, **REGIONS, dense_layers=(5,)),
    ):
        pass


def test_a_failed_step_is_undone_and_copies_go_on(model):
    inputs = prompt(1, 50)
    ids, expected = inputs["input_ids"], dense_steps(model, inputs, [40] + [1] * 10)
    last = model.model.layers[5].self_attn
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        steps(model, cache, inputs, [40] + [1] * 9)
        scaling, last.scaling = last.scaling, 0.5
        with pytest.raises(kvhf.UnsupportedError, match=r"scaling, softcap: got 0.5"):
            model(input_ids=ids[:, 49:], past_key_values=cache)
        last.scaling = scaling
        assert cache.lengths() == [49, 49]
        for one in (cache.fork(), cache):
            got = model(input_ids=ids[:, 49:], past_key_values=one).logits
            torch.testing.assert_close(got, expected[-1], rtol=1e-4, atol=1e-4)


def test_steps_at_once_are_refused(model):
    ids = prompt(1, 60)["input_ids"]
    with kvhf.attach(model, **REGIONS, layer=ParallelLayer) as cache, torch.no_grad():
        model(input_ids=ids[:, :50], past_key_values=cache)
        for layer in cache.attention_layers():
            layer.begin()
        with pytest.raises(ValueError, match="queries: got the queries of a layer that shares"):
            model(input_ids=ids[:, 50:], past_key_values=cache)
        assert cache.lengths() == [50, 50]
