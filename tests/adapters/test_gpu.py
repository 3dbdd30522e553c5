"""The adapter on a CUDA device, rows beside the codes or in host memory; what it leaves there."""

import gc
import weakref

import pytest
import torch

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build, prompt

REGIONS = dict(k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.mark.gpu
@pytest.mark.parametrize("index", ["exact", "pariskv"])
@pytest.mark.parametrize("store", ["device", "host", "auto"])
@pytest.mark.parametrize("graphs", [True, False])
def test_generation_equals_full_attention(index, store, graphs):
    model = build("llama", eos_token_id=None).to("cuda")
    inputs = {name: tensor.to("cuda") for name, tensor in prompt(3, 60, padded=True).items()}
    options = dict(max_new_tokens=40, do_sample=False)
    expected = model.generate(**inputs, **options)
    how: dict = dict(index=index, index_options={"store": store}, graphs=graphs, token_graph=False)
    with kvhf.attach(model, **how, **REGIONS) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        if index == "pariskv":
            replays = [made._executor._replays.replay for made in cache.indexes()]
            assert [replay is not None for replay in replays] == [graphs] * len(replays)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("index", ["exact", "pariskv", "exact+vattention"])
def test_a_cache_that_nobody_holds_is_gone_at_once(index, device):
    """Its memory does not wait for Python's collector of cycles, which counts no bytes."""
    model = build("llama", eos_token_id=None).to(device)
    inputs = {name: tensor.to(device) for name, tensor in prompt(1, 60).items()}
    gc.disable()
    try:
        with kvhf.attach(model, index=index, **REGIONS) as cache:
            model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
            held = [weakref.ref(made) for made in [cache, *cache.indexes()]]
        del cache
        assert len(held) > 1
        assert [name() for name in held] == [None] * len(held)
    finally:
        gc.enable()
