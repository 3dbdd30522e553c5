"""Copies of a cache, which transformers uses to reuse a prefix, are independent caches."""

import copy
import io
import itertools
import pickle
from dataclasses import replace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.model.cache_argument import CACHE
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.support.helpers import mostly_slow

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


def go_on(model, cache, ids, start):
    """Return logits of ids `[1, N]` from position `start` on, one token at a time."""
    logits = []
    for place in range(start, ids.shape[1]):
        position = torch.tensor([[place]])
        with torch.no_grad():
            step = dict(input_ids=ids[:, place, None], position_ids=position)
            logits.append(model(**step, past_key_values=cache).logits)
    return torch.cat(logits, 1)


COPIED = ["llama", "qwen3", "gemma4_text", "zamba2", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("family", mostly_slow(COPIED, "llama", "zamba2"))
def test_a_prefix_is_reused_and_no_copy_shows_in_another(family):
    """Models have sliding windows, linear attention, both in one layer, or latents."""
    linear = dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR)
    model = build(family, **(linear if family == "qwen3_next" else {}))
    texts = prompt(2, 60)["input_ids"]
    texts[1, :40] = texts[0, :40]
    dense = [dense_steps(model, _inputs(text), [40] + [1] * 20) for text in texts[:, None]]
    expected = [torch.cat(logits[1:], 1) for logits in dense]
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, _inputs(texts[:1, :40]), [40])
        first, second = copy.deepcopy(cache), copy.deepcopy(cache)
        third = copy.deepcopy(first)
        got = [
            go_on(model, first, texts[:1], 40),
            go_on(model, second, texts[1:], 40),
            go_on(model, third, texts[:1], 40),
        ]
        assert (cache.get_seq_length(), first.get_seq_length()) == (40, 60)
        last = go_on(model, cache, texts[1:], 40)
    for logits, want in zip([*got, last], [*expected, expected[0], expected[1]], strict=True):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


LINEAR = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)


def _inputs(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_generate_goes_on_from_a_copy_as_from_the_whole_prompt(model):
    """The test follows transformers' documentation: prefill once, then copy for each prompt."""
    ids = prompt(1, 50)["input_ids"]
    options = dict(max_new_tokens=8, do_sample=False)
    expected = model.generate(**_inputs(ids), **options)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache)
        for _ in range(2):
            got = model.generate(**_inputs(ids), past_key_values=copy.deepcopy(cache), **options)
            assert torch.equal(got, expected)
        assert cache.get_seq_length() == 40


def test_changes_of_a_copy_do_not_show(model):
    inputs = prompt(2, 40)
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, inputs, [30] + [1] * 10)
        before, other = cache.report(), copy.deepcopy(cache)
        # memory for steps is allocated again
        assert replace(other.report(), nbytes=before.nbytes) == before
        other.crop(-25)
        other.reorder_cache(torch.tensor([1, 1, 0]))
        assert other.get_seq_length() == 15
        other.reset()
        assert (other.get_seq_length(), cache.lengths()) == (0, [40, 40])
        assert cache.report() == before
        step = copy.deepcopy(cache)
        ids = inputs["input_ids"][:, :1]
        with torch.no_grad():
            alike = [model(input_ids=ids, past_key_values=c).logits for c in (step, cache)]
    assert torch.equal(*alike)


def test_a_step_that_fails_undoes_its_own_cache_alone(model):
    inputs = prompt(1, 40)

    def fail(*call):
        raise KeyboardInterrupt

    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, inputs, [40])
        other = copy.deepcopy(cache)
        steps(model, other, prompt(1, 5), [1] * 5)
        handle = model.model.layers[-1].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=other)
        handle.remove()
        assert (cache.lengths(), other.lengths()) == ([40, 40], [45, 45])


def test_copies_close_with_the_context_and_belong_to_it(model):
    ids = prompt(1, 20)["input_ids"]
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        old = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="context has ended"):
        model(input_ids=ids, past_key_values=old)
    with (
        kvhf.attach(model, **REGIONS),
        pytest.raises(ValueError, match=f"{CACHE}: got IndexCache, allowed inside attach"),
    ):
        model(input_ids=ids, past_key_values=old)
    assert old.report().tokens == 20


def test_nothing_of_the_model_is_copied(model):
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 30), [30])
        rope = cache.indexes()[0].geometry.rope
        memo = {}
        other = copy.deepcopy(cache, memo)
        assert other.attachment is cache.attachment
        assert other._config is cache._config
        assert not any(isinstance(made, torch.nn.Module) for made in memo.values())
        assert torch.equal(other.indexes()[0].geometry.rope, rope)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, lambda c: torch.save(c, io.BytesIO())])
def test_pickle_and_shallow_copies_are_refused_in_words(model, how):
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(TypeError, match=r"use copy.deepcopy\(cache\)"):
            how(cache)
        steps(model, cache, prompt(1, 10), [10])  # the cache still works


def test_layers_describe_their_rows(model):
    """Transformers' code and users' read `layer.keys.shape`, though rows are stored elsewhere."""
    with kvhf.attach(model, **REGIONS) as cache:
        layer = cache.layers[0]
        assert layer.keys is layer.values is None
        assert not layer.is_initialized
        steps(model, cache, prompt(3, 25), [25])
        keys = layer.keys
        assert layer.is_initialized
        assert keys.shape == layer.values.shape == (3, 2, 25, 16)
        assert (keys.dtype, keys.device, keys.ndim) == (torch.float32, torch.device("cpu"), 4)
        assert (keys.size(), keys.size(-2), keys.dim(), len(keys)) == (keys.shape, 25, 4, 3)
        assert (keys.numel(), keys.nbytes) == (2400, 9600)
        with pytest.raises(AttributeError, match=r"got .mean, allowed are .* in the index"):
            keys.mean()
        for use in (lambda: keys[0], lambda: torch.cat([keys, keys]), lambda: torch.ones(1) + keys):
            with pytest.raises(ValueError, match="only the attributes shape, dtype and device, be"):
                use()


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3_text"], "llama"))
def test_forks_answer_several_questions_and_copy_no_row(family):
    """Layers without an index share their rows too. Each fork answers like a separate cache."""
    model = build(family)
    texts = prompt(3, 70)["input_ids"]
    texts[1:, :40] = texts[0, :40]
    options = {**REGIONS, "dense_layers": (3,)}
    alone = []
    for text in texts[:, None]:
        with kvhf.attach(model, **options) as cache:
            steps(model, cache, _inputs(text[:, :40]), [40])
            alone.append(go_on(model, cache, text, 40))
    with kvhf.attach(model, **options) as cache:
        steps(model, cache, _inputs(texts[:1, :40]), [40])
        forks = [cache.fork() for _ in texts]
        for layer, *others in zip(cache.layers, *(fork.layers for fork in forks), strict=True):
            assert {_rows(other) for other in others} == {_rows(layer)}
        got = [
            go_on(model, fork, text, 40) for fork, text in zip(forks, texts[:, None], strict=True)
        ]
        assert cache.get_seq_length() == 40
    for mine, want in zip(got, alone, strict=True):
        assert torch.equal(mine, want)


def _rows(layer):
    """Return the addresses of a layer's rows."""
    if getattr(layer, "attention", None) is None:
        return layer.keys.data_ptr()
    return layer.attention.index._store.contiguous_rows().data_ptr()


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma2", "deepseek_v3"], "llama"))
def test_a_cache_and_its_copy_go_in_and_out_of_inference_mode(family):
    model, inputs = build(family), prompt(2, 60)
    sizes = [40] + [1] * 20

    def logits(modes):
        outputs, start, modes = [], 0, itertools.cycle(modes)
        with kvhf.attach(model, **REGIONS) as cache:
            for size in sizes:
                with next(modes)():
                    if start == 50:
                        cache = copy.deepcopy(cache)
                    places = torch.arange(start, start + size).expand(2, -1)
                    some = inputs["input_ids"][:, start : start + size]
                    given = dict(input_ids=some, position_ids=places, past_key_values=cache)
                    outputs.append(model(**given).logits)
                start += size
        return torch.cat(outputs, 1)

    inside, outside = torch.inference_mode, torch.no_grad
    want = logits([outside])
    for modes in ([inside, outside], [outside, inside, inside]):
        torch.testing.assert_close(logits(modes), want)
