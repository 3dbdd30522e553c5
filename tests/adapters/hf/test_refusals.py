"""Unsupported models and calls raise an error that names the cause, and change nothing."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)

import kvindex_adapters.hf as kvhf
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.attention import NAME
from kvindex_adapters.hf.model.attention import attention as attention_function
from kvindex_adapters.hf.model.cache_argument import CACHE, NEW, OLD
from kvindex_adapters.hf.model.info import find_decoder
from kvindex_adapters.hf.unsupported import UNKNOWN_TERMS, check_attention
from tests.adapters.tiny import SMALL, build, prompt

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


def copy_of(model):
    """Return a model with another head around the same decoder."""
    other = build("llama", num_hidden_layers=2)
    other.model = model.model
    return other


def refused(model, match, **options):
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=match), kvhf.attach(model, **{**REGIONS, **options}):
        pass
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        ("bloom", {"hidden_size": 64, "n_head": 4, "n_layer": 2}, "AttentionInterface"),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "AttentionInterface"),
        ("mistral", {"sliding_window": 16}, "no full-attention layer"),
        ("mamba", {"state_size": 4}, "no full-attention layer|AttentionInterface"),
        ("diffllama", {}, "attend twice for each update of the cache"),
    ],
)
def test_models_that_are_not_served(family, options, match):
    refused(build(family, **options), match)


def test_latents_of_a_projection_that_is_no_matrix():
    """After the error nothing is appended, and the model works with its own cache."""
    model, inputs = build("minicpm3", num_hidden_layers=2), prompt(1, 12)
    module = model.model.layers[1].self_attn
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    match = "kv_b_proj: got a Sequential, allowed is an nn.Linear"
    with kvhf.attach(model, **REGIONS) as cache, pytest.raises(UnsupportedError, match=match):
        model(**inputs, past_key_values=cache)
    assert cache.lengths() == [0, 0]


def test_encoder_decoders_are_refused():
    config = AutoConfig.for_model("t5", d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    refused(AutoModelForSeq2SeqLM.from_config(config), "encoder-decoder")


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model: got Linear, allowed is a transformers model"):
        kvhf.attach(torch.nn.Linear(2, 2)).__enter__()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"index": "parisvk"}, "index: got 'parisvk'.*did you mean 'pariskv'"),
        ({"index": "pariskv:bta=.1"}, "option: got 'bta'.*did you mean 'beta'"),
        ({"index": "pariskv", "index_options": {"beta": 2}}, "beta: got 2"),
        ({"k": 0}, "k: got 0, allowed is an integer of at least 1"),
        ({"coverage": 0}, "coverage: got 0, allowed is a number"),
        ({"sink": -1}, "sink: got -1"),
        ({"local_window": -1}, "local_window: got -1"),
        ({"update_every": 0}, "update_every: got 0"),
        ({"dense_below": -1}, "dense_below: got -1"),
        ({"dense_layers": (7,)}, "dense_layers: got 7, allowed are layers 0 to 1"),
        ({"dense_layers": 1}, "dense_layers: got 1, allowed is a tuple"),
        ({"dense_layers": (True,)}, "dense_layers: got True, allowed are layers 0 to 1"),
        (
            {"dense_layers": (0, 1)},
            r"dense_layers: got \[0, 1\], which leaves no layer with an index",
        ),
        ({"index": None}, "index: got None, allowed is the name"),
        ({"index": "exact:scale=2"}, "index_options: got scale, but the model determines"),
        ({"index_options": {"kv_heads": 1, "dtype": 2}}, "got dtype, kv_heads, but the model"),
        ({"index_options": ["beta"]}, r"index_options: got \['beta'\], allowed is a mapping"),
        ({"layer_options": [1]}, r"layer_options: got \[1\], allowed is a mapping"),
        ({"layer_options": {0: 1}}, r"layer_options\[0\]: got 1, allowed is a mapping"),
        (
            {"index": "quest", "coverage": 0.9},
            "coverage: got 0.9, allowed is None: Quest does not estimate",
        ),
        (
            {"index": "quest+reuse", "coverage": 0.9},
            "coverage: got 0.9, allowed is None: Quest does",
        ),
        (
            {"index": "exact+sample", "coverage": 0.9},
            "coverage: got 0.9, allowed is None, because rows are",
        ),
        ({"index": "retroinfer+sample"}, "got RetroInfer, whose rows have weights already"),
        ({"index": "retroinfer+sample+reuse"}, "got RetroInfer, whose rows have weights already"),
    ],
)
def test_bad_arguments(model, options, match):
    refused(model, match, **options)


def test_head_dimension_not_divisible_by_8():
    refused(build("llama", head_dim=12), "head_dim: got 12, allowed is a multiple of 8")


def test_attaching_twice(model):
    with kvhf.attach(model, **REGIONS):
        with (
            pytest.raises(ValueError, match="attached already"),
            kvhf.attach(model, **REGIONS),
        ):
            pass
        assert model.config._attn_implementation == NAME  # the first attachment is still in place


def test_output_attentions(model):
    inputs = prompt(1, 20)
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(ValueError, match="output_attentions"):
            model(**inputs, past_key_values=cache, output_attentions=True)
        options = dict(output_attentions=True, return_dict_in_generate=True)
        with pytest.raises(ValueError, match="output_attentions"):
            model.generate(**inputs, past_key_values=cache, max_new_tokens=2, **options)
        assert cache.get_seq_length() == 0


def test_generate_without_our_cache(model):
    with kvhf.attach(model, **REGIONS):
        with pytest.raises(ValueError, match=f"{CACHE}: got DynamicCache"):
            model.generate(**prompt(1, 20), max_new_tokens=2)
        with pytest.raises(ValueError, match=f"{CACHE}: got NoneType"):
            model(**prompt(1, 20))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale: got 1.5, allowed inside attach"),
        ({"generation_config": GenerationConfig(guidance_scale=2.0)}, "guidance_scale: got 2.0"),
        ({"assistant_early_exit": 1}, "assistant_early_exit: got 1, allowed inside attach"),
        ({"assistant_model": lambda model: model}, "assistant_model: got an attached model"),
        ({"assistant_model": copy_of}, "assistant_model: got an attached model"),
    ],
    ids=["guidance", "guidance-config", "early-exit", "itself", "parts"],
)
def test_ways_to_generate_that_run_the_model_with_another_cache(model, options, match):
    options = {name: of(model) if callable(of) else of for name, of in options.items()}
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(UnsupportedError, match=match):
            model.generate(**prompt(1, 20), past_key_values=cache, max_new_tokens=2, **options)
        assert cache.get_seq_length() == 0  # no layer has run
        model.generate(**prompt(1, 20), past_key_values=cache, max_new_tokens=2, guidance_scale=1)


def test_two_calls_of_attention_for_one_update(model):
    """A class attends twice to the same rows, so the second call of attention has no new tokens."""
    attention = type(model.model.layers[0].self_attn)

    class Twice(attention):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            states = torch.zeros(1, 4, 1, 16)
            attention_function(self, states, states, states, None)
            return output

    twice = build("llama", num_hidden_layers=2)
    for layer in twice.model.layers:
        layer.self_attn.__class__ = Twice
    with (
        kvhf.attach(twice, **REGIONS) as cache,
        pytest.raises(UnsupportedError, match="without a preceding update"),
    ):
        twice(**prompt(1, 20), past_key_values=cache)


@pytest.mark.parametrize("kind", [StaticCache, DynamicCache])
def test_other_caches(model, kind):
    options = {"max_cache_len": 64} if kind is StaticCache else {}
    other = kind(config=model.config, **options)
    with (
        kvhf.attach(model, **REGIONS),
        pytest.raises(ValueError, match=f"{CACHE}: got {kind.__name__}"),
    ):
        model.generate(**prompt(1, 20), past_key_values=other, max_new_tokens=2)


def test_static_cache_implementation(model):
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(ValueError, match="cache_implementation"),
    ):
        model.generate(**prompt(1, 20), past_key_values=cache, cache_implementation="static")


def test_use_after_the_context_has_closed(model):
    with kvhf.attach(model, **REGIONS) as cache:
        model.generate(**prompt(1, 20), past_key_values=cache, max_new_tokens=2)
    assert cache.report().tokens == 21
    with pytest.raises(RuntimeError, match="context has ended"):
        model.generate(**prompt(1, 20), past_key_values=cache, max_new_tokens=2)


def test_the_cache_of_another_model(model):
    other = build("llama", num_hidden_layers=2)
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(
            UnsupportedError, match="another model than the one that this cache is attached to"
        ),
    ):
        other(**prompt(1, 20), past_key_values=cache)


@pytest.mark.parametrize("columns", [4, 20])
def test_a_mask_that_leaves_out_tokens(model, columns):
    """The mask covers only the new tokens, or only the earlier ones."""
    inputs = prompt(1, 24)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :20], past_key_values=cache)
        mask = torch.ones(1, columns, dtype=torch.long)
        mask[0, 0] = 0
        match = f"attention_mask: got {columns} columns, allowed are 24"
        with pytest.raises(UnsupportedError, match=match):
            model(inputs["input_ids"][:, 20:], attention_mask=mask, past_key_values=cache)
        assert cache.lengths() == [20, 20]


def test_a_mask_that_changes_the_past(model):
    inputs = prompt(1, 20)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        mask = torch.ones(1, 21, dtype=torch.long)
        mask[0, :3] = 0
        with pytest.raises(UnsupportedError, match="attention_mask: got a mask that hides"):
            model(input_ids=inputs["input_ids"][:, :1], attention_mask=mask, past_key_values=cache)
        assert cache.lengths() == [20, 20]


def test_a_mask_that_is_dropped_over_a_padded_past(model):
    inputs = prompt(2, 20, padded=True)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        for mask in (None, torch.ones(2, 21, dtype=torch.long)):
            ids = inputs["input_ids"][:, -1:]
            with pytest.raises(UnsupportedError, match="attention_mask: got a mask that hides"):
                model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        assert cache.lengths() == [20, 20]


def test_another_scale_at_a_later_step(model):
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(**prompt(1, 20), past_key_values=cache)
        attention = model.model.layers[1].self_attn
        scaling, attention.scaling = attention.scaling, 0.5
        with pytest.raises(
            UnsupportedError, match=r"scaling, softcap: got 0.5, None, but the layer"
        ):
            model(**prompt(1, 1), past_key_values=cache)
        attention.scaling = scaling
        assert cache.lengths() == [20, 20]


@pytest.mark.parametrize("name", UNKNOWN_TERMS)
def test_what_a_class_hands_to_attention_beside_the_rows(model, name):
    with pytest.raises(UnsupportedError, match=f"LlamaAttention: got {name} in the attention call"):
        check_attention("LlamaAttention", model, 1, 0.0, {name: torch.ones(1)})


def test_learned_sinks_that_a_class_does_not_hand_to_attention(model):
    """A llama gets a parameter named `sinks`, and it is not known how its class uses it."""
    attention = model.model.layers[1].self_attn
    attention.sinks = torch.nn.Parameter(torch.zeros(4))
    try:
        with (
            kvhf.attach(model, **REGIONS) as cache,
            pytest.raises(UnsupportedError, match="LlamaAttention: got learned sinks that the"),
        ):
            model(**prompt(1, 20), past_key_values=cache)
        assert cache.get_seq_length() == 0
    finally:
        del attention.sinks


def hidden_from_the_newest():
    """Return masks of two packed sequences, and of a sliding window."""
    packed = torch.ones(20, 20, dtype=torch.bool).tril()
    packed[8:, :8] = False
    return packed, torch.ones(20, 20, dtype=torch.bool).tril().triu(-7)


@pytest.mark.parametrize("mask", hidden_from_the_newest(), ids=["packed", "window"])
def test_masks_by_which_later_tokens_cannot_search(model, mask):
    ids, for_each_head = prompt(1, 20)["input_ids"], mask.expand(1, 4, -1, -1)
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(
            UnsupportedError, match=r"attention_mask: got .* the newest token cannot"
        ):
            model(input_ids=ids, attention_mask=mask[None, None], past_key_values=cache)
        with pytest.raises(
            UnsupportedError, match=r"attention_mask: got .* the same for all heads"
        ):
            model(input_ids=ids, attention_mask=for_each_head, past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_a_mask_of_all_queries_that_is_causal(model):
    """A causal mask is accepted. One with other values than 0 and the lowest one is a bias."""
    inputs = prompt(2, 20, padded=True)
    own, positions = inputs["attention_mask"].bool(), torch.arange(20).expand(2, -1)
    seen = torch.ones(20, 20, dtype=torch.bool).tril() & own[:, None, None]
    outputs = []
    for mask in (inputs["attention_mask"], seen, (~seen) * torch.finfo(torch.float32).min):
        given = dict(inputs, attention_mask=mask, position_ids=positions)
        with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
            outputs.append(model(**given, past_key_values=cache).logits[own])
            assert torch.equal(cache.attention_layers()[0].valid, own)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    refused = UnsupportedError, r"attention_mask: got a mask of shape \[2, 1, 20, 20\]"
    for bias in (~seen * -0.5, (~seen).float() * -3 + (~own[:, None, None]) * -2):
        given = dict(inputs, attention_mask=bias, position_ids=positions)
        with (
            kvhf.attach(model, **REGIONS) as cache,
            pytest.raises(refused[0], match=refused[1]),
        ):
            model(**given, past_key_values=cache)


def test_training_is_refused(model):
    inputs = prompt(1, 20)
    with kvhf.attach(model, **REGIONS) as cache:
        loss = model(**inputs, past_key_values=cache).logits.sum()
        with pytest.raises(ValueError, match="inference"):
            loss.backward()
    training = build("llama", attention_dropout=0.1).train()
    with (
        kvhf.attach(training, **REGIONS) as cache,
        pytest.raises(ValueError, match=r"dropout: got 0.1"),
    ):
        training(**inputs, past_key_values=cache)


def test_iterating_and_offloading_are_refused(model):
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(ValueError, match="iteration"):
            list(cache)
        with pytest.raises(ValueError, match="offloading"):
            cache.offload(0)


def test_a_class_around_the_interface_is_noticed():
    """A class claims to use transformers' attention interface but does not: the first call
    raises."""
    model = build("llama", num_hidden_layers=2)
    attention = type(model.model.layers[0].self_attn)

    class Private(attention):
        def forward(self, hidden_states, **kwargs):
            states = self.k_proj(hidden_states)
            states = states.view(*states.shape[:2], 2, 16).transpose(1, 2)
            kwargs[CACHE].update(states, states, self.layer_idx)
            return hidden_states, None

    for layer in model.model.layers:
        layer.self_attn.__class__ = Private
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(UnsupportedError, match="AttentionInterface"),
    ):
        model(**prompt(1, 20), past_key_values=cache)


def test_empty_configuration_values_do_not_hide_a_refusal():
    config = AutoConfig.for_model("llama", **{**SMALL, "num_hidden_layers": 1})
    config.output_attentions = False
    model = AutoModelForCausalLM.from_config(config)
    with kvhf.attach(model, **REGIONS):
        pass


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": "llama"}])
def test_assisted_decoding_with_a_used_cache(model, how):
    """The first step of assisted decoding reads all ids again, whatever the cache contains."""
    inputs, how = prompt(1, 20), dict(how)
    if "assistant_model" in how:
        how["assistant_model"] = build(how["assistant_model"], num_hidden_layers=1)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :12], past_key_values=cache)
        with pytest.raises(UnsupportedError, match=f"{CACHE}: got a cache of 12 tokens"):
            model.generate(**inputs, past_key_values=cache, max_new_tokens=4, **how)
        assert cache.get_seq_length() == 12


def test_a_forward_with_the_cache_under_the_other_name_says_which_version_it_needs(monkeypatch):
    """Code that was written for another transformers, for example with `trust_remote_code`."""
    model = build("llama")
    names = {OLD: "transformers<5.24", NEW: "transformers>=5.24"}
    other, version = next(item for item in names.items() if item[0] != CACHE)
    forward = {"forward": eval(f"lambda self, input_ids=None, {other}=None: None")}
    for module in (model, model.model):
        monkeypatch.setattr(module, "__class__", type("Other", (type(module),), forward))
    match = f"got Other, whose forward calls its KV cache {other}.*pip install '{version}'"
    with pytest.raises(UnsupportedError, match=match):
        find_decoder(model)


def test_xlm_has_an_argument_of_the_new_name_that_is_no_kv_cache():
    sizes = dict(vocab_size=101, emb_dim=32, n_layers=1, n_heads=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlm", **sizes))
    said = "no argument past_key_values" if CACHE == OLD else "AttentionInterface"
    with pytest.raises(UnsupportedError, match=said), kvhf.attach(model, **REGIONS) as cache:
        model(**prompt(1, 20), **{CACHE: cache})


@pytest.mark.skipif(CACHE == OLD, reason="transformers 5.23 and older have one name")
@pytest.mark.filterwarnings("error::FutureWarning")
def test_both_names_of_the_cache_give_the_same_without_a_warning(model):
    inputs, logits, answers = prompt(1, 30), [], []
    for name in (OLD, NEW):
        for called in (model, model.model):
            with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
                logits.append(called(input_ids=inputs["input_ids"], **{name: cache})[0])
                assert cache.get_seq_length() == 30
        with kvhf.attach(model, **REGIONS) as cache:
            how = dict(max_new_tokens=8, do_sample=False)
            answers.append(model.generate(**inputs, **{name: cache}, **how))
            assert cache.get_seq_length() == 37
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert torch.equal(*answers)
