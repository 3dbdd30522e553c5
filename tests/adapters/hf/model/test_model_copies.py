"""Copies and pickles of an attached model are plain models, which can be attached themselves."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.model.patch import IMPLEMENTATION
from tests.adapters.hf.batching.test_batching import EXACT, batch, prompts
from tests.adapters.tiny import build, prompt
from tests.support.helpers import sampled

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
GREEDY = dict(do_sample=False, max_new_tokens=8)


def saved(model):
    """Save with torch.save, and load again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=0)),
    "python's pickle": lambda model: pickle.loads(pickle._dumps(model)),
}


def assert_plain(model, like):
    """Check that classes and attention functions of all modules are those of an unattached
    model."""
    pairs = list(zip(model.modules(), like.modules(), strict=True))
    assert [type(one) for one, _ in pairs] == [type(other) for _, other in pairs]
    for one, other in pairs:
        config, plain = vars(one).get("config"), vars(other).get("config")
        if plain is not None:
            assert vars(config)[IMPLEMENTATION] == vars(plain)[IMPLEMENTATION]
            assert type(vars(config)[IMPLEMENTATION]) is str


@pytest.mark.parametrize(("family", "how"), sampled(["llama", "qwen3"], COPIES))
def test_a_copy_is_a_plain_model(family, how):
    model, plain = build(family), build(family)
    inputs = prompt(2, 40, padded=True)
    expected = plain.generate(**inputs, **GREEDY)
    with kvhf.attach(model, **REGIONS) as cache:
        other = COPIES[how](model)
        if how != "copy":  # a shallow copy shares the modules
            assert_plain(other, plain)
            assert torch.equal(other.generate(**inputs, **GREEDY), expected)
            with kvhf.attach(other, **REGIONS) as own:
                assert torch.equal(
                    other.generate(**inputs, past_key_values=own, **GREEDY), expected
                )
                assert own.report().steps
        out = model.generate(**inputs, past_key_values=cache, **GREEDY)
        assert torch.equal(out, expected)
        assert cache.report().steps
    assert_plain(other, plain)
    assert_plain(model, plain)
    assert torch.equal(other.generate(**inputs, **GREEDY), expected)


@pytest.mark.parametrize("part", ["model", "model.layers.1", "model.layers.0.self_attn"])
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_of_a_part_is_plain(part, how):
    model, plain = build("llama"), build("llama")
    with kvhf.attach(model, **REGIONS):
        other = COPIES[how](model.get_submodule(part))
    assert_plain(other, plain.get_submodule(part))


def test_a_copy_of_a_configuration_names_the_model_s_own_attention():
    model = build("llama")
    with kvhf.attach(model, **REGIONS):
        assert copy.deepcopy(model.config)._attn_implementation == "sdpa"
        assert json.loads(model.config.to_json_string()) == json.loads(
            build("llama").config.to_json_string()
        )
        model.set_attn_implementation("eager")
        assert copy.deepcopy(model).config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"


@pytest.mark.slow
def test_a_copy_inside_continuous_batching_is_a_plain_model():
    model, inputs = build("llama", num_hidden_layers=2), prompts(40, 25)
    plain = build("llama", num_hidden_layers=2)
    expected = batch(plain, inputs)
    with kvhf.attach_batch(model, **EXACT):
        other, loaded = copy.deepcopy(model), saved(model)
        assert batch(model, inputs) == expected
    for one in (other, loaded):
        assert_plain(one, plain)
        configs = [vars(module).get("config", one.config) for module in one.modules()]
        assert all(config is one.config for config in configs)
        assert batch(one, inputs) == expected


@pytest.mark.slow
def test_a_file_is_loaded_without_the_package(tmp_path):
    with kvhf.attach(build("llama", num_hidden_layers=1), **REGIONS) as cache:
        torch.save(cache.attachment.decoder, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['kvindex'] = sys.modules['kvindex_adapters'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "assert model(torch.tensor([[3, 4]])).last_hidden_state.shape == (1, 2, 64)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], check=True, timeout=300)


def test_moving_an_attached_model_keeps_it_attached():
    model, inputs = build("llama"), prompt(1, 40)
    expected = model.generate(**inputs, **GREEDY)
    with kvhf.attach(model, **REGIONS) as cache:
        assert model.to("cpu").float() is model
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), expected)
        assert cache.report().steps
