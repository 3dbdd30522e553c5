"""What attach() changes in a model, who sees the changes, and how the model is restored."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import AutoModelForCausalLM

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.attention import NAME, attention
from kvindex_adapters.hf.model.cache_argument import CACHE
from tests.adapters.tiny import build, dense_steps, prompt, steps

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
SIZES = [20] + [1] * 10


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=2)


def works(model):
    """Return True if the model gives a fresh model's logits, both with its own cache and
    attached."""
    inputs = prompt(1, sum(SIZES))
    fresh = build("llama", num_hidden_layers=2)
    expected = torch.cat(dense_steps(fresh, inputs, SIZES), 1)
    alone = torch.cat(dense_steps(model, inputs, SIZES), 1)
    with kvhf.attach(model, **REGIONS) as cache:
        inside = torch.cat(steps(model, cache, inputs, SIZES), 1)
    return torch.equal(alone, expected) and torch.allclose(inside, expected, atol=1e-4)


class Counting(ModelHook):
    """An accelerate hook that counts calls."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def copy_of(model):
    """Return another model with the same configuration object."""
    other = AutoModelForCausalLM.from_config(model.config).eval()
    other.load_state_dict(model.state_dict())
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = model.config
    return other


# Configurations


def test_a_model_with_the_same_configuration_object_keeps_its_own_attention(model):
    other, config, inputs = copy_of(model), model.config, prompt(1, sum(SIZES))
    expected = dense_steps(other, inputs, SIZES)
    with kvhf.attach(model, **REGIONS) as cache:
        assert other.config is config
        assert config._attn_implementation == "sdpa"
        inside = dense_steps(other, inputs, SIZES)
        with kvhf.attach(other, **REGIONS) as second:
            steps(other, second, inputs, SIZES)
            steps(model, cache, inputs, SIZES)
        between = dense_steps(other, inputs, SIZES)
    assert model.config is config
    for got in (inside, between, dense_steps(other, inputs, SIZES)):
        assert all(map(torch.equal, got, expected))
    assert works(model)


def test_no_module_keeps_a_copy_of_a_configuration(model):
    config = model.config
    with kvhf.attach(model, **REGIONS):
        assert model.config is not config
        assert model.model.config is model.config
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    assert len(configs) > 3
    assert all(one is config for one in configs)


def test_what_is_set_on_the_configuration_meanwhile_stays_set(model):
    with kvhf.attach(model, **REGIONS):
        model.config.use_cache = False
        model.config.mine = "said"
        model.model.layers[0].self_attn.config = other = type(model.config)()
    assert (model.config.use_cache, model.config.mine) == (False, "said")
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is other


def test_another_attention_chosen_meanwhile_stays_chosen(model):
    with kvhf.attach(model, **REGIONS):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_module_put_in_meanwhile_stays(model):
    with kvhf.attach(model, **REGIONS):
        model.lm_head = mine = torch.nn.Linear(64, 101)
        mine.config = model.config
    assert model.lm_head is mine
    assert mine.config is model.config
    assert mine.config._attn_implementation == "sdpa"


# Hooks of accelerate, which replace the `forward` of a module and restore it


def test_a_hook_that_comes_and_goes_inside(model):
    with kvhf.attach(model, **REGIONS) as cache:
        add_hook_to_module(model.model, hook := Counting())
        steps(model, cache, prompt(1, 20), [20])
        remove_hook_from_module(model.model)
        with pytest.raises(ValueError, match=f"{CACHE}: got NoneType"):
            model(**prompt(1, 20))
    assert hook.calls == 1
    assert works(model)


def test_a_hook_that_comes_inside_and_goes_after(model):
    with kvhf.attach(model, **REGIONS) as cache:
        add_hook_to_module(model.model, hook := Counting())
        steps(model, cache, prompt(1, 20), [20])
    assert works(model)
    assert hook.calls > 1
    remove_hook_from_module(model.model)
    assert works(model)


def test_a_hook_that_goes_inside_is_gone(model):
    add_hook_to_module(model.model, hook := Counting())
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 20), [20])
        remove_hook_from_module(model.model)
        with pytest.raises(ValueError, match=f"{CACHE}: got NoneType"):
            model(**prompt(1, 20))  # the hook around the decoder is still there
    assert hook.calls == 1
    assert works(model)
    assert hook.calls == 1


def test_a_class_put_over_the_decoder_meanwhile_stays_and_works(model):
    own = type(model.model)
    with kvhf.attach(model, **REGIONS) as cache:
        inside = type(model.model)
        assert (inside is own, inside.__name__, inside.__module__) == (
            False,
            own.__name__,
            own.__module__,
        )
        steps(model, cache, prompt(1, 20), [20])

        class Over(inside):
            pass

        model.model.__class__ = Over
    assert type(model.model) is Over
    assert works(model)
    model.model.__class__ = own
    assert works(model)


# Threads


def test_attaching_from_many_threads_attaches_one_at_a_time(model):
    gate, refusals, inputs = threading.Barrier(8), [], prompt(1, 20)

    def attach_and_run(_):
        gate.wait()
        for _ in range(5):
            try:
                with kvhf.attach(model, **REGIONS) as cache:
                    model(**inputs, past_key_values=cache)
                    while not refusals:  # wait until the other threads have tried
                        time.sleep(0.001)
            except ValueError as error:
                refusals.append(str(error))

    with ThreadPoolExecutor(8) as pool, torch.no_grad():
        list(pool.map(attach_and_run, range(8)))
    assert set(refusals) == {
        "model: got a model that is attached already; end its attach() context first (several "
        "chats: chat.fork(), or Chat(…, cache=…) with one attach() for all)"
    }
    assert not any(module in attached for module in model.modules())
    assert type(model.model).__mro__[0].__module__ == type(model.model).__module__
    assert model.config._attn_implementation != NAME
    assert works(model)


def test_attaching_in_another_thread_is_refused(model):
    with kvhf.attach(model, **REGIONS), ThreadPoolExecutor(1) as pool:
        entered = pool.submit(kvhf.attach(model, **REGIONS).__enter__)
        with pytest.raises(ValueError, match="attached already"):
            entered.result()
        assert model.config._attn_implementation == NAME  # the first attachment is still in place


def test_a_part_of_an_attached_model_is_attached(model):
    with (
        kvhf.attach(model, **REGIONS),
        pytest.raises(ValueError, match="attached already"),
        kvhf.attach(model.model, **REGIONS),
    ):
        pass


def test_models_in_threads_do_not_meet(model):
    """Two of the models share one configuration object."""
    inputs, gate = prompt(1, sum(SIZES)), threading.Barrier(3)
    models = [model, copy_of(model), build("qwen3")]
    expected = [torch.cat(dense_steps(model, inputs, SIZES), 1) for model in models]

    def run(model):
        gate.wait()
        with kvhf.attach(model, **REGIONS) as cache:
            return torch.cat(steps(model, cache, inputs, SIZES), 1)

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(run, models))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda model, cache: model(**prompt(1, 1), past_key_values=cache),
        lambda model, cache: cache.crop(-1),
        lambda model, cache: cache.reset(),
        lambda model, cache: cache.reorder_cache(torch.tensor([0])),
    ],
    ids=["call", "crop", "reset", "reorder"],
)
def test_a_call_beside_a_call_of_another_thread_is_refused_at_once(model, call):
    inside, go_on = threading.Event(), threading.Event()
    inputs = prompt(1, sum(SIZES))

    def wait(*_):
        inside.set()
        assert go_on.wait(30)

    with kvhf.attach(model, **REGIONS) as cache, ThreadPoolExecutor(1) as pool:
        handle = model.model.layers[1].register_forward_pre_hook(wait)
        running = pool.submit(steps, model, cache, inputs, SIZES)
        assert inside.wait(30)
        try:
            with pytest.raises(RuntimeError, match="while another thread is in a call"):
                call(model, cache)
        finally:
            handle.remove()
            go_on.set()
        logits = torch.cat(running.result(), 1)
    expected = torch.cat(dense_steps(model, inputs, SIZES), 1)
    assert torch.allclose(logits, expected, atol=1e-4)


# Autocast


@pytest.mark.parametrize("dense_layers", [(), (0,)])
def test_autocast_does_not_reach_the_attention(model, dense_layers):
    """Layers with and without an index get float32 tensors, in a prompt and in a step."""
    generator, module = torch.Generator().manual_seed(0), model.model.layers[0].self_attn
    calls = [
        [torch.randn(1, heads, count, 16, generator=generator) for heads in (4, 2, 2)]
        for count in (20, 1)
    ]

    def outputs():
        cache.reset()
        for queries, keys, values in calls:
            yield attention(module, queries, *cache.update(keys, values, 0), None)[0]

    with kvhf.attach(model, dense_layers=dense_layers, **REGIONS) as cache:
        expected = list(outputs())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = list(outputs())
    assert all(map(torch.equal, got, expected))


def test_a_model_runs_under_autocast_as_close_as_full_attention_does(model):
    inputs = prompt(1, sum(SIZES))
    exact = torch.cat(dense_steps(model, inputs, SIZES), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = torch.cat(dense_steps(model, inputs, SIZES), 1)
        with kvhf.attach(model, **REGIONS) as cache:
            got = torch.cat(steps(model, cache, inputs, SIZES), 1)
    assert 0 < (got - exact).norm() < 2 * (dense - exact).norm()
