"""The adapter finds the rotary embedding by comparing a model's keys at shifted positions."""

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex.core.rope import rotate
from kvindex_adapters.hf.model.rotary import rotary_frequencies
from tests.adapters.tiny import FAMILIES, build, prompt
from tests.support.helpers import all_rows

REGIONS = dict(index="exact", k=10, sink=0, local_window=0, update_every=1, dense_below=10**9)
UNTOLD = {
    "glm4",  # rotates adjacent coordinates
    *("zamba", "zamba2"),  # no rotary embedding; attention behind a layer with its own arguments
    *("zaya", "inkling_text", "inkling2_text"),  # a key is made of several tokens
    *("deepseek_v3", "minicpm3"),  # a latent, then a part that is rotated
}


def keys_at(model, first):
    """Read a text at positions from `first` on; return `rope` and keys `[1, G, 20, D]` of each
    layer."""
    ids = prompt(1, 20)["input_ids"]
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache, position_ids=torch.arange(20)[None] + first)
        return [(index.geometry.rope, all_rows(index, 1).keys) for index in cache.indexes()]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_keys_turn_by_the_frequencies_when_the_text_moves(family):
    model, shift = build(family), 5
    for (rope, here), (_, there) in zip(keys_at(model, 0), keys_at(model, shift), strict=True):
        if family in UNTOLD:
            assert rope is None
            continue
        assert rope.dtype == torch.float32
        want = rotate(here, torch.full((20,), shift), rope)
        torch.testing.assert_close(there, want, rtol=1e-3, atol=1e-3)
        if rope.any():
            assert (there - here).abs().max() > 0.1


def test_a_layer_that_turns_nothing_has_frequencies_of_zero():
    decoder = build("smollm3").get_decoder()  # in no_rope_layers, 1 means a layer with RoPE
    found = rotary_frequencies(decoder, range(4))
    assert [bool(found[i].any()) for i in range(4)] == [True, False, True, False]
    hybrid = build("cohere2").get_decoder()
    assert not rotary_frequencies(hybrid, [1])[1].any()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_rounding_to_bfloat16_hides_no_turn(family):
    decoder = build(family).get_decoder().bfloat16()
    assert rotary_frequencies(decoder, [1])[1].any()
    assert not rotary_frequencies(build("cohere2").get_decoder().bfloat16(), [1])[1].any()


def test_a_scaled_embedding_turns_by_its_own_frequencies():
    yarn = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
    plain, scaled = build("llama"), build("llama", rope_parameters=yarn)
    assert scaled.get_decoder().rotary_emb.attention_scaling != 1
    found = [rotary_frequencies(model.get_decoder(), [0])[0] for model in (plain, scaled)]
    assert found[1].any()
    assert not torch.equal(*found)
    (rope, here), (_, there) = keys_at(scaled, 0)[0], keys_at(scaled, 3)[0]
    want = rotate(here, torch.full((20,), 3), rope)
    torch.testing.assert_close(there, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_not_told(kind):
    decoder = build("llama", num_hidden_layers=1).get_decoder()
    decoder.rotary_emb.rope_type = kind
    assert rotary_frequencies(decoder, [0])[0] is None


def test_a_layer_that_cannot_be_called_alone_is_not_told():
    decoder = build("llama", num_hidden_layers=1).get_decoder()
    decoder.layers[0].self_attn.k_proj = None
    assert rotary_frequencies(decoder, [0])[0] is None


@pytest.mark.parametrize("part", ["config", "dtype"])
def test_a_model_without_what_the_probe_needs_is_not_told(part):
    decoder = build("llama", num_hidden_layers=1).get_decoder()
    plain = torch.nn.Module()
    plain.layers, plain.rotary_emb = decoder.layers, decoder.rotary_emb
    if part == "dtype":
        plain.config = decoder.config
    assert rotary_frequencies(plain, [0]) == {0: None}


def test_single_layers_have_options_of_their_own():
    model = build("llama")
    options = dict(layer_options={1: {"page": 3}}, index_options={"page": 5})
    with kvhf.attach(model, **{**REGIONS, "index": "quest"}, **options) as cache, torch.no_grad():
        model(input_ids=prompt(1, 9)["input_ids"], past_key_values=cache)
        assert [index.config.page for index in cache.indexes()] == [5, 3, 5, 5]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {4: {}},
            r"layer_options: got layers \[4\]; allowed .* with an index, \[0, 1, 2, 3\]",
        ),
        ({0: {"page": 0}}, "page: got 0"),
        ({0: {"rope": None}}, "index_options: got rope, but the model determines"),
    ],
    ids=str,
)
def test_bad_options_of_single_layers_are_refused_before_anything_is_changed(options, match):
    model = build("llama")
    before = model.config._attn_implementation
    with (
        pytest.raises(ValueError, match=match),
        kvhf.attach(model, index="quest", layer_options=options),
    ):
        pass
    assert model.config._attn_implementation == before


def test_an_index_that_needs_it_is_refused_without_it():
    class Needs(kvindex.get("exact")):
        needs_rope = True

    geometry = dict(q_heads=2, kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match=r"rope: got None, but Needs needs the inverse freq"):
        Needs(**geometry)
    assert len(Needs(**geometry, rope=torch.ones(8)).geometry.rope) == 8
    with pytest.raises(ValueError, match="rope: got None"), kvhf.attach(build("glm4"), index=Needs):
        pass
