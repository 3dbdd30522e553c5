"""Models inside wrappers, and ways to use a cache from earlier versions of transformers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import kvindex_adapters.hf as kvhf
from kvindex_adapters.decoder import Decoder
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.support.helpers import slow

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
GREEDY = dict(do_sample=False, max_new_tokens=8)


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


class Adapted(nn.Module):
    """A stand-in with the attributes of a `PeftModel` that the adapter reads."""

    def __init__(self, model, **config):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=False, **config)}

    def get_base_model(self):
        return self.base_model.model

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.base_model.model.generate(*args, **kwargs)


def adapted(model):
    """Make a model with LoRA adapters of peft that change its outputs."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("wrap", [Adapted, adapted])
def test_a_model_of_peft_is_unwrapped(model, wrap):
    wrapped, inputs = wrap(model), prompt(1, 40)
    with torch.no_grad():
        expected = wrapped.generate(**inputs, **GREEDY)
        logits = torch.cat(dense_steps(wrapped.get_base_model(), inputs, [30] + [1] * 10), 1)
    with kvhf.attach(wrapped, **REGIONS) as cache:
        assert torch.equal(wrapped.generate(**inputs, past_key_values=cache, **GREEDY), expected)
        assert cache.report().steps
        cache.reset()
        got = torch.cat(steps(wrapped, cache, inputs, [30] + [1] * 10), 1)
    assert torch.allclose(got, logits, atol=1e-4)
    answer = kvhf.generate(
        wrapped, Words(), inputs["input_ids"][0], index="exact", k=500, max_new_tokens=8
    )
    assert torch.equal(answer.answer_ids, expected[0, 40:])
    with kvhf.attach(wrapped, **REGIONS) as cache:
        kvhf.read(wrapped, Words(), inputs["input_ids"][0], cache=cache)
        assert cache.get_seq_length() == 40


def test_adapters_that_are_no_weights_are_refused(model):
    prefix = Adapted(model)
    prefix.peft_config["default"].is_prompt_learning = True
    with pytest.raises(kvhf.UnsupportedError, match="prompt learning"), kvhf.attach(prefix):
        pass
    with (
        pytest.raises(kvhf.UnsupportedError, match="alora_invocation_tokens"),
        kvhf.attach(Adapted(model, alora_invocation_tokens=[3])),
    ):
        pass


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (nn.DataParallel, "DataParallel.*model.module$"),
        slow(torch.compile, "OptimizedModule.*model._orig_mod$"),
        (lambda model: nn.Sequential(nn.Sequential(model)), "Sequential.*model.0.0$"),
        (lambda model: nn.Linear(2, 2), "Linear, allowed is a transformers model$"),
    ],
)
def test_of_other_wrappers_the_error_names_the_model_inside(model, wrap, inside):
    wrapped = wrap(model)
    for call in (
        lambda: kvhf.attach(wrapped).__enter__(),
        lambda: kvhf.attach_batch(wrapped).__enter__(),
        lambda: kvhf.generate(wrapped, Words(), "one"),
        lambda: Decoder.of(wrapped, Words()),
    ):
        with pytest.raises(TypeError, match=inside):
            call()


# Calls


def test_the_cache_by_its_place_among_the_arguments(model):
    inputs, places = prompt(1, 40), torch.arange(40)[None]
    with torch.no_grad():
        expected = model(**inputs).logits
    for called, head in ((model, nn.Identity()), (model.model, model.lm_head)):
        with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
            out = called(inputs["input_ids"], inputs["attention_mask"], places, cache)
            assert torch.allclose(head(out[0]), expected, atol=1e-4)
            assert cache.get_seq_length() == 40


@pytest.mark.parametrize("kind", ["static", "dynamic", "quantized"])
def test_a_cache_implementation_of_the_model_gives_way_to_the_cache(model, kind):
    inputs = prompt(1, 40)
    expected = model.generate(**inputs, **GREEDY)
    model.generation_config.cache_implementation = kind
    with kvhf.attach(model, **REGIONS) as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), expected)
        cache.reset()
        given = GenerationConfig(**GREEDY)
        assert torch.equal(
            model.generate(**inputs, past_key_values=cache, generation_config=given), expected
        )
        assert cache.report().steps
    assert model.generation_config.cache_implementation == kind


@pytest.mark.parametrize("how", ["keyword", "named", "second"])
def test_a_cache_implementation_of_the_call_is_refused(model, how):
    inputs, config = prompt(1, 20), GenerationConfig(**GREEDY, cache_implementation="static")
    args, options = {
        "keyword": ([], {**inputs, "cache_implementation": "static"}),
        "named": ([], {**inputs, "generation_config": config}),
        "second": ([inputs["input_ids"], config], {}),
    }[how]
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(kvhf.UnsupportedError, match="cache_implementation: got 'static'"),
    ):
        model.generate(*args, past_key_values=cache, **options)


# The cache


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("key_cache", "cache.layers"),
        ("value_cache", "cache.layers"),
        ("to_legacy_cache", "cache.fork"),
        ("seen_tokens", "get_seq_length"),
        ("other", "no attribute 'other'$"),
    ],
)
def test_what_earlier_caches_had_says_what_takes_its_place(model, name, instead):
    with kvhf.attach(model, **REGIONS) as cache:
        assert not hasattr(cache, name)
        with pytest.raises(AttributeError, match=f"{name}.*{instead}|{instead}"):
            getattr(cache, name)
        assert not hasattr(cache.fork(), name)


def test_a_cache_says_whether_it_has_seen_a_token(model):
    with kvhf.attach(model, dense_layers=(0,), **REGIONS) as cache:
        assert not cache.is_initialized
        steps(model, cache, prompt(1, 9), [9])
        assert cache.is_initialized
        assert cache.fork().is_initialized
        cache.reset()
        assert not cache.is_initialized
