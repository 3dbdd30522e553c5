"""The Phi-3 family reads all tokens again where its rotary frequencies change."""

import copy
import inspect
import io
from itertools import product

import pytest
import torch
from transformers import DynamicCache, Phi3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.graph import run_ahead
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.reread import FAMILIES
from tests.adapters.hf.generation.test_conversation import Stops
from tests.adapters.hf.generation.test_generation import NEW, REGIONS, Collect, Words, full
from tests.adapters.hf.model.test_rotary_length import SWITCH, alone, ask, ids, model_of
from tests.adapters.tiny import prompt
from tests.support.helpers import mostly_slow, sampled, slow

plain_is_right = pytest.mark.skipif(
    "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation),
    reason="in this version of transformers the plain model reads one id alone after the switch",
)


def generated(model, inputs, **options):
    """Return tokens with an index, and without."""
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    expected = model.generate(**inputs, **options)
    with kvhf.attach(model, **REGIONS) as cache:
        return model.generate(**inputs, past_key_values=cache, **options), expected, cache.lengths()


@pytest.mark.parametrize(("length", "name"), sampled([28, 32, 33, 60], FAMILIES))
def test_a_prompt_and_an_answer_across_the_switch(name, length):
    model = model_of(name)
    with kvhf.attach(model, **REGIONS) as cache:
        mine = full(model, prompt(1, length), past_key_values=cache)[0, length:]
        assert cache.lengths() == [length + NEW - 1] * 4
    assert torch.equal(mine, alone(name, ids(length)))


TURNS = [(10, 20), (8, 2, 30), (14, 2, 9)]


@plain_is_right
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        slow(3, {}),
        (3, dict(num_beams=2)),
        slow(1, dict(prompt_lookup_num_tokens=3)),
        slow(1, dict(prefill_chunk_size=8)),
    ],
    ids=str,
)
def test_batches_beams_assisted_decoding_and_transformers_own_chunks(batch, options):
    model = model_of("phi3")
    for length in (28, 60):
        mine, theirs, _ = generated(model, prompt(batch, length, padded=batch > 1), **options)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("turns", "name"),
    mostly_slow(product(TURNS, FAMILIES), *product(TURNS[:2], ["phi3"])),
    ids=str,
)
def test_a_turn_across_the_switch_is_answered_as_one_prompt(name, turns):
    model, said = model_of(name), []
    with kvhf.attach(model, **REGIONS) as cache:
        for turn in turns:
            branch = ask(model, ids(turn), cache=cache, used="branch")
            answer = ask(model, ids(turn), cache=cache, used="continue", max_new_tokens=4)
            said += [ids(turn)]
            assert torch.equal(branch, alone(name, *said))
            assert torch.equal(answer, branch[:4])
            said += [answer]
            assert cache.get_seq_length() == sum(map(len, said))


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "phi3"))
def test_a_prompt_that_is_read_across_the_switch(name):
    model, parts = model_of(name), [ids(20), ids(30), ids(5)]
    with kvhf.attach(model, **REGIONS) as cache:
        for part in parts[:2]:
            kvhf.read(model, Words(), part, cache=cache, used="continue", chunk=8)
        assert cache.get_seq_length() == 50
        assert torch.equal(ask(model, parts[2], cache=cache, used="continue"), alone(name, *parts))


def test_the_end_of_an_answer_is_read_across_the_switch():
    """No step of the answer reads its last token, which is the first above the switch."""
    model, first = model_of("phi3"), ids(SWITCH + 1 - NEW)
    with kvhf.attach(model, **REGIONS) as cache:
        answer = ask(model, first, cache=cache)
        assert cache.get_seq_length() == SWITCH + 1
        second = ask(model, ids(9), cache=cache, used="continue")
    assert torch.equal(second, alone("phi3", first, answer, ids(9)))


def test_a_saved_cache_is_read_again(tmp_path):
    model = model_of("phi3")
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), ids(20), cache=cache)
        cache.save(tmp_path / "saved")
    with kvhf.attach(model, **REGIONS) as cache:
        cache.load(tmp_path / "saved")
        answer = ask(model, ids(30), cache=cache, used="continue")
    assert torch.equal(answer, alone("phi3", ids(20), ids(30)))


@pytest.mark.parametrize("last", mostly_slow([3, 4, 5, 9], 4, 9))
def test_an_answer_that_was_computed_ahead_across_the_switch(monkeypatch, last):
    """The tokens that are removed begin before the switch, at it, or after it."""
    text, answer = ids(28), alone("phi3", ids(28))
    end = int(answer[last])
    assert end not in answer[:last]
    monkeypatch.setattr(run_ahead, "RUNS_AHEAD", {"cpu"})
    model = model_of("phi3")
    with kvhf.attach(model, **REGIONS) as cache:
        mine = ask(model, text, cache=cache, eos_token_id=end)
        assert torch.equal(mine, answer[: last + 1])
        assert cache.get_seq_length() == 28 + len(mine)
        second = ask(model, ids(9), cache=cache, used="continue")
    assert torch.equal(second, alone("phi3", text, mine, ids(9)))


@pytest.mark.parametrize("used", ["continue", "branch"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(used):
    model = model_of("phi3")
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), ids(20), cache=cache)
        layers = cache.layers
        with pytest.raises(KeyboardInterrupt):
            ask(model, ids(30), cache=cache, used=used, streamer=Stops())
        assert cache.layers is layers
        assert cache.lengths() == [20] * 4
        answer = ask(model, ids(9), cache=cache, used="branch", max_new_tokens=2)
    assert torch.equal(answer, alone("phi3", ids(20), ids(9))[:2])


@plain_is_right
def test_a_step_that_fails_while_it_reads_all_again_is_undone(monkeypatch):
    model = model_of("phi3")
    inputs = prompt(1, SWITCH)
    expected = full(model, inputs)

    def fail(*_):
        raise KeyboardInterrupt

    with kvhf.attach(model, **REGIONS) as cache:
        first = model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        longer = dict(input_ids=first, past_key_values=cache, do_sample=False)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**longer, max_new_tokens=NEW - 1)
        handle.remove()
        assert cache.lengths() == [SWITCH] * 4
        assert torch.equal(model.generate(**longer, max_new_tokens=NEW - 1), expected)


def test_a_step_by_step_call_keeps_the_cache():
    """Only `generate` drops the cache. A direct call of the model behaves as in transformers."""
    model, inputs = model_of("phi3"), ids(40)[None]
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = [model(part, past_key_values=past).logits for part in inputs.split([30, 10], 1)]
        with kvhf.attach(model, **REGIONS) as cache:
            mine = [model(part, past_key_values=cache).logits for part in inputs.split([30, 10], 1)]
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


def test_tokens_that_are_not_known_cannot_be_read_again():
    model = model_of("phi3")
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=ids(20)[None], past_key_values=cache)
        refused = r"cache: got a cache of 20 tokens with unknown ids, .* above 32 tokens in"
        with pytest.raises(kvhf.UnsupportedError, match=refused):
            kvhf.read(model, Words(), ids(30), cache=cache, used="continue")
        with pytest.raises(kvhf.UnsupportedError, match=refused):
            ask(model, ids(4), cache=cache, used="continue")
        new = dict(input_ids=ids(33)[None], attention_mask=torch.ones(1, 53))
        with pytest.raises(kvhf.UnsupportedError, match="input_ids: got 33 new ids with a cache"):
            model.generate(**new, past_key_values=cache, max_new_tokens=2)
        assert cache.lengths() == [20] * 4
        assert len(ask(model, ids(4), cache=cache, used="continue", max_new_tokens=8)) == 8


@plain_is_right
def test_a_model_without_two_sets_of_frequencies_is_read_again_as_well():
    """Phi-3 drops the cache whatever its rope type."""
    model = model_of("phi3", rope_parameters=dict(rope_type="default", rope_theta=1e4))
    for length in (28, 60):
        mine, theirs, _ = generated(model, prompt(1, length))
        assert torch.equal(mine, theirs)
    with kvhf.attach(model, **{**REGIONS, "index": "triattention"}) as cache:  # needs frequencies
        full(model, prompt(1, 60), past_key_values=cache)


@plain_is_right
def test_a_copy_of_an_attached_model_is_a_plain_model():
    model = model_of("phi3")
    with kvhf.attach(model, **REGIONS):
        other, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    for one in (other, loaded):
        assert type(one) is type(model)
        assert type(one.model) is type(model.model)
        assert torch.equal(ids_of_answer(one), alone("phi3", ids(28)))


def ids_of_answer(model):
    return full(model, prompt(1, 28))[0, 28:]


def test_progress_and_streamed_tokens_of_a_prompt_that_is_read_again():
    model, calls, streamer = model_of("phi3"), [], Collect()
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), ids(20), cache=cache)
        options = dict(on_progress=lambda *call: calls.append(call), streamer=streamer)
        answer = ask(model, ids(30), cache=cache, used="continue", **options)
    assert calls[0] == ("prefill", 8, 50)
    assert streamer.tokens[-NEW:] == answer.tolist()


@pytest.mark.slow
def test_no_other_family_of_transformers_drops_a_cache():
    dropping = set()
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        source = inspect.getsource(model.prepare_inputs_for_generation)
        if f" {CACHE} = None" in source:
            dropping.add(config.model_type)
    assert dropping == set(FAMILIES)
