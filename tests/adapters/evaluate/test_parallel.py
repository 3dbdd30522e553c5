"""Steps that run at once give what they give one at a time."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.fidelity import divergences, full_logits
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.generation import prefill
from tests.adapters.tiny import build, prompt, steps

REGIONS = dict(k=5, sink=4, local=8, update_every=8, full_threshold=0)


@pytest.fixture(scope="module")
def model():
    return build("llama")


def at_once(model, ids, start, sizes, index, **options):
    logits = []
    with kvhf.attach(model, index=index, layer=ParallelLayer, **{**REGIONS, **options}) as cache:
        prefill(model, ids, cache, stop=start, chunk=16)
        for layer in cache.attention_layers():
            layer.begin()
        for size in sizes:
            with torch.no_grad():
                piece = ids[None, start : start + size]
                logits.append(model(input_ids=piece, past_key_values=cache).logits)
            start += size
    return torch.cat(logits, 1)


@pytest.mark.parametrize("index", ["exact", "pariskv", "pariskv:preset=fast"])
@pytest.mark.parametrize("sizes", [[30], [1, 7, 8, 9, 5], [16, 14]], ids=str)
def test_steps_at_once_equal_single_steps(model, index, sizes):
    inputs = prompt(1, 80)
    with kvhf.attach(model, index=index, **REGIONS) as cache:
        first = {name: tensor[:, :50] for name, tensor in inputs.items()}
        steps(model, cache, first, [16, 16, 16, 2])
        want = []
        for step in range(50, 80):
            with torch.no_grad():
                here = inputs["input_ids"][:, step, None]
                want.append(model(input_ids=here, past_key_values=cache).logits)
    got = at_once(model, inputs["input_ids"][0], 50, sizes, index)
    assert torch.allclose(got, torch.cat(want, 1), atol=1e-4)


@pytest.mark.parametrize("sizes", [dict(sink=0), dict(local=0), dict(update_every=3)], ids=str)
def test_regions_of_other_sizes(model, sizes):
    ids = prompt(1, 70)["input_ids"][0]
    one = at_once(model, ids, 50, [1] * 20, "exact", **sizes)
    assert torch.allclose(at_once(model, ids, 50, [20], "exact", **sizes), one, atol=1e-4)


def test_a_divergence_per_token_is_0_where_all_is_read_and_not_where_it_is_not(model):
    ids = prompt(1, 90)["input_ids"][0]
    regions = {name: size for name, size in REGIONS.items() if name not in ("k", "full_threshold")}
    full = full_logits(model, ids[:60], ids[60:])
    options = dict(index="exact", attach_options=regions, chunk=16)
    everything = divergences(model, ids[:60], ids[60:], full, k=500, **options)
    little = divergences(model, ids[:60], ids[60:], full, k=1, **options)
    assert everything.shape == little.shape == (30,)
    assert everything.abs().max() < 1e-6
    assert little.min() > -1e-6
    assert little.mean() > 1e-3
