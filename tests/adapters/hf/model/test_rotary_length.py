"""Rotary frequencies that depend on the length: chunks of a prompt use those of the whole
prompt."""

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.graph import run_ahead
from kvindex_adapters.hf.model.rotary import depends_on_length, keeps_longest, length_dependent
from tests.adapters.hf.generation.test_generation import NEW, REGIONS, Words, full
from tests.adapters.tiny import build, prompt
from tests.support.helpers import mostly_slow, sampled

SWITCH = 32
"""Number of tokens up to which the frequencies are those of a short sequence."""

DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
FACTORS = dict(short_factor=[1.0] * 8, long_factor=[1, 1.1, 1.3, 2, 4, 8, 16, 32])
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=SWITCH, **FACTORS
)
MSCALE = dict(short_mscale=1.0, long_mscale=1.5)
BY_LAYER = dict(full_attention=LONGROPE, sliding_attention=DYNAMIC)

MODELS = {
    "dynamic": ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=SWITCH)),
    "longrope": ("llama", dict(rope_parameters=LONGROPE)),
    "by layer": ("gemma3_text", dict(rope_parameters=BY_LAYER, max_position_embeddings=SWITCH)),
    "phi3": ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH)),
    "phi4_multimodal": (
        "phi4_multimodal",
        {
            **dict(rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH),
            "vision_config": dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2),
            "audio_config": dict(
                **dict(hidden_size=32, intermediate_size=32, num_blocks=2, num_attention_heads=2),
                **dict(nemo_conv_channels=32, ext_pw_out_channel=32),
            ),
        },
    ),
    "phimoe": ("phimoe", dict(rope_parameters={**LONGROPE, **MSCALE}, num_local_experts=4)),
}
"""Rope type -> one family, and its options."""

KEEP = ("dynamic", "longrope", "by layer")
"""Models that keep their cache where frequencies change, as transformers' own cache does."""


def model_of(name, **more):
    family, options = MODELS[name]
    return build(family, **{**options, **more}, eos_token_id=None)


def ids(length):
    return prompt(1, length)["input_ids"][0]


def alone(name, *parts):
    """Return the answer of the model without `attach` to all parts as one prompt."""
    whole = torch.cat(parts)[None]
    length, model = whole.shape[1], model_of(name).to(whole.device)
    # if an answer crosses the switch, transformers' `generate` drops the cache and then reads only
    # the last id: phi4_multimodal in every version, the other models in 5.17
    by_token = name not in KEEP and length <= SWITCH
    for _ in range(NEW if by_token else 1):
        mask = torch.ones_like(whole)
        inputs = {"input_ids": whole, "attention_mask": mask}
        whole = full(model, inputs, **({"max_new_tokens": 1} if by_token else {}))
    return whole[0, length:]


def ask(model, question, **options):
    return kvhf.generate(
        model, Words(), question, **{"max_new_tokens": NEW, "chunk": 8, **options}
    ).answer_ids


@pytest.mark.parametrize("name", mostly_slow(MODELS, *KEEP))
def test_keys_of_a_prompt_in_chunks_are_those_of_one_piece(name):
    text, caches = ids(70), []
    for chunk in (70, 16):
        model = model_of(name)
        caches.append(DynamicCache(config=model.config))
        with torch.no_grad():
            prefill(model, text, caches[-1], stop=70, chunk=chunk)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("length", "name"), sampled([28, 33, 39, 70], MODELS))
def test_a_prompt_in_chunks_is_answered_as_by_the_plain_model(name, length):
    """With a length just below the switch, the answer crosses it; just above, a chunk crosses
    it."""
    text = ids(length)
    expected = alone(name, text)
    if name in KEEP or length > SWITCH:  # see `alone`
        assert torch.equal(ask(model_of(name), text, index=None), expected)
    model = model_of(name)
    with kvhf.attach(model, **REGIONS) as cache:
        assert torch.equal(ask(model, text, cache=cache), expected)
        assert cache.get_seq_length() == length + NEW
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())


@pytest.mark.parametrize("name", mostly_slow(MODELS, "dynamic", "phi3"))
def test_a_prompt_that_is_read_first_is_answered_as_by_the_plain_model(name):
    model, document, question = model_of(name), ids(70), ids(9)
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), document, cache=cache, chunk=16)
        answer = ask(model, question, cache=cache, used="continue")
    plain = model_of(name)
    past = DynamicCache(config=plain.config)
    whole = torch.cat([document, question])[None]
    with torch.no_grad():
        plain(input_ids=document[None], past_key_values=past)
    expected = full(plain, {"input_ids": whole}, past_key_values=past)[0, 79:]
    assert torch.equal(answer, expected)


@pytest.mark.parametrize(("turns", "name"), sampled([(20, 30), (20, 2, 30)], KEEP), ids=str)
def test_a_turn_that_crosses_the_switch_is_answered_as_with_transformers_cache(name, turns):
    """Both caches keep the keys of a shorter sequence."""
    model, plain = model_of(name), model_of(name)
    past, said = DynamicCache(config=plain.config), torch.empty(1, 0, dtype=torch.int64)
    with kvhf.attach(model, **REGIONS) as cache:
        for turn in turns:
            answer = ask(model, ids(turn), cache=cache, used="continue")
            said = torch.cat([said, ids(turn)[None]], dim=1)
            inputs = {"input_ids": said, "attention_mask": torch.ones_like(said)}
            expected = full(plain, inputs, past_key_values=past)
            assert torch.equal(answer, expected[0, said.shape[1] :])
            said = expected
            with torch.no_grad():  # the answer's last token, which we read already
                plain(input_ids=said[:, past.get_seq_length() :], past_key_values=past)


def test_transformers_has_no_other_rope_type_that_depends_on_the_length():
    config = build("llama").config
    more = dict(beta_fast=32, beta_slow=1, low_freq_factor=1.0, high_freq_factor=4.0)
    for name, frequencies in ROPE_INIT_FUNCTIONS.items():
        if name == "axial":  # a rope type of images
            continue
        config.rope_parameters = {**LONGROPE, **DYNAMIC, **more, "rope_type": name}
        short, long = (frequencies(config, "cpu", seq_len=n)[0] for n in (8, 4096))
        assert torch.equal(short, long) != depends_on_length(name), name


def test_embeddings_that_depend_on_the_length_are_found():
    assert not length_dependent(build("llama"))
    assert depends_on_length("hunyuan_dynamic")
    assert not depends_on_length(None)
    for name in MODELS:
        model = model_of(name)
        assert length_dependent(model) == [model.model.rotary_emb]
        assert keeps_longest(model) == (name in ("dynamic", "by layer"))


def test_tokens_that_were_computed_ahead_do_not_count(monkeypatch):
    """After an answer that ends early, the embedding must not remember the removed tokens."""
    monkeypatch.setattr(run_ahead, "RUNS_AHEAD", {"cpu"})
    text = ids(40)
    end = int(alone("dynamic", text)[4])
    model, plain = model_of("dynamic"), model_of("dynamic")
    with kvhf.attach(model, **REGIONS) as cache:
        answer = ask(model, text, cache=cache, eos_token_id=end)
        assert cache.get_seq_length() == 40 + len(answer) <= 45
        with torch.no_grad():
            plain(input_ids=torch.cat([text, answer])[None])
    longest = [one.model.rotary_emb.max_seq_len_cached for one in (model, plain)]
    assert longest[0] == longest[1]


@pytest.mark.parametrize("name", ["dynamic", "longrope", "by layer"])
def test_continuous_batching_is_refused(name):
    model = model_of(name)
    model.set_attn_implementation("sdpa")
    with (
        pytest.raises(kvhf.UnsupportedError, match="rotary frequencies that depend on the length"),
        kvhf.attach_batch(model, index="exact"),
    ):
        pass


def test_an_index_that_needs_frequencies_is_refused():
    with (
        pytest.raises(ValueError, match="rope: got None"),
        kvhf.attach(model_of("longrope"), index="triattention"),
    ):
        pass


@pytest.mark.parametrize("name", mostly_slow(["longrope", "dynamic"], "longrope"))
def test_a_saved_cache_goes_on_as_the_plain_model(tmp_path, name):
    document, question, expected = ids(70), ids(9), []
    for _ in range(2):
        model = model_of(name)
        with kvhf.attach(model, **REGIONS) as cache:
            if expected:
                cache.load(tmp_path / name)
            else:
                kvhf.read(model, Words(), document, cache=cache, chunk=16)
                cache.save(tmp_path / name)
            expected.append(ask(model, question, cache=cache, used="continue"))
    assert torch.equal(*expected)


def test_hooks_of_others_see_what_the_model_sees():
    model, text, seen = model_of("longrope"), ids(40), []
    hook = lambda module, args, output: seen.append(output[0].shape[1])  # noqa: E731
    handle = model.model.rotary_emb.register_forward_hook(hook)
    with torch.no_grad():
        prefill(model, text, DynamicCache(config=model.config), stop=40, chunk=16)
    assert seen == [16, 16, 8]
    handle.remove()
