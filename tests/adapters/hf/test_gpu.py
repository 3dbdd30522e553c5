"""The adapter on a CUDA device, with rows on the device or on the host, and its memory
afterwards."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import kvindex_adapters.hf as kvhf
from tests.adapters.hf.cache.test_counters import asked_all_the_time
from tests.adapters.hf.cache.test_padding import asked
from tests.adapters.hf.model.test_rotary_length import alone, ask, ids, model_of
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
    """Its memory does not wait for Python's cycle collector, which does not count bytes."""
    model = build("llama", eos_token_id=None).to(device)
    inputs = {name: tensor.to(device) for name, tensor in prompt(1, 60).items()}
    gc.disable()
    try:
        with kvhf.attach(model, index=index, **REGIONS) as cache:
            model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
            references = [weakref.ref(made) for made in [cache, *cache.indexes()]]
        del cache
        assert len(references) > 1
        assert [name() for name in references] == [None] * len(references)
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["longrope", "phi3"])
@pytest.mark.parametrize("length", [28, 33])
def test_frequencies_change_in_answers_by_graphs(name, length):
    """The answer or the prompt crosses the length of the switch.

    Tokens are computed ahead of the host.
    """
    question = ids(length).to("cuda")
    answer = ask(model_of(name).to("cuda"), question, index="exact", k=500)
    assert torch.equal(answer.cpu(), alone(name, question).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("index", ["exact", "pariskv"])
def test_questions_about_one_document_by_graphs(index):
    """Padding between cached and new tokens, over two turns."""
    model = build("llama", eos_token_id=None).to("cuda")
    expected = asked(model, DynamicCache(config=model.config), turns=2)[0]
    with kvhf.attach(model, index=index, **REGIONS) as cache:
        assert torch.equal(asked(model, cache, turns=2)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["device", "auto"])
def test_a_report_never_meets_a_token_on_a_gpu(store):
    model = build("llama", eos_token_id=None).to("cuda")
    inputs = {name: tensor.to("cuda") for name, tensor in prompt(1, 60).items()}
    how = dict(index="pariskv", index_options={"store": store}, **REGIONS)
    options = dict(max_new_tokens=60, do_sample=False)
    with kvhf.attach(model, **how) as cache:
        expected = model.generate(**inputs, past_key_values=cache, **options)
        quiet = cache.report()
    with kvhf.attach(model, **how) as cache:
        with asked_all_the_time(cache.report, cache.get_seq_length):
            out = model.generate(**inputs, past_key_values=cache, **options)
        assert torch.equal(out, expected)
        assert cache.report().steps == quiet.steps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_a_gpu_saved_goes_on_on_a_cpu(tmp_path, dtype):
    inputs = prompt(1, 60)
    for device in ("cuda", "cpu"):
        model = build("llama", eos_token_id=None).to(device, dtype)
        with kvhf.attach(model, index="pariskv", **REGIONS) as cache, torch.no_grad():
            if device == "cuda":
                model(inputs["input_ids"].to(device), past_key_values=cache)
                cache.save(tmp_path / "saved")
            else:
                cache.load(tmp_path / "saved")
                assert cache.lengths() == [60] * len(cache.indexed)
