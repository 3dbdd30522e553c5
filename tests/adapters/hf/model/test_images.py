"""Images and prefixes that are attended to in both directions, by the model's own mask."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import MIXED, SMALL
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.helpers import mostly_slow

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
IMAGE = 100
TEXT = {**SMALL, "query_pre_attn_scalar": 16}
VISION = dict(
    **dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
    patch_size=2,
)


def gemma3():
    config = Gemma3Config(
        text_config={**TEXT, **MIXED},
        vision_config={**VISION, "image_size": 8},
        **dict(mm_tokens_per_image=4, image_token_index=IMAGE),
        **dict(boi_token_index=98, eoi_token_index=99),
    )
    return Gemma3ForConditionalGeneration(config), 8


def paligemma():
    config = PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"},
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 4},
        **dict(image_token_index=IMAGE, projection_dim=64, hidden_size=64),
    )
    return PaliGemmaForConditionalGeneration(config), 4


MODELS = {"gemma3": gemma3, "paligemma": paligemma}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Return a model, and a batch of prompts with one image each, one padded on the left."""
    torch.manual_seed(0)
    model, size = MODELS[request.param]()
    model = model.float().eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 98, (2, 40), generator=generator)
    ids[0, 5:9] = ids[1, 29:33] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :3] = ids[1, :3] = 0
    # Gemma 3: 1 for tokens of images; PaliGemma: 0 for the prefix, which sees all of itself
    types = (ids == IMAGE).long() if request.param == "gemma3" else (ids == ids).long()
    if request.param == "paligemma":
        types[:, :34] = 0
    images = torch.randn(2, 3, size, size, generator=generator)
    return model, dict(
        input_ids=ids, attention_mask=mask, token_type_ids=types, pixel_values=images
    )


def life(model, inputs, cache):
    """Return logits of a prompt, of decoded tokens, of a second turn, and of decoded tokens after
    it."""
    some, mask = [], inputs["attention_mask"]
    with torch.no_grad():
        out = model(**inputs, past_key_values=cache, use_cache=True)
        some.append(out.logits * mask[..., None])
        ids = inputs["input_ids"]
        for count in [1] * 12 + [7] + [1] * 12:
            mask = torch.cat([mask, torch.ones(2, count, dtype=torch.long)], 1)
            new, places = (
                ids[:, 10 : 10 + count],
                torch.arange(mask.shape[1] - count, mask.shape[1]),
            )
            given = dict(position_ids=places[None], past_key_values=cache, attention_mask=mask)
            some.append(model(input_ids=new, **given).logits)
    return some


def assert_close(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_plain_attention(case):
    model, inputs = case
    want = life(model, inputs, DynamicCache(config=model.config.get_text_config()))
    with kvhf.attach(model, **REGIONS) as cache:
        got = life(model, inputs, cache)
        assert all(layer.traffic.steps == 24 for layer in cache.attention_layers())
    assert_close(got, want)
    shown = {**inputs, "token_type_ids": torch.ones_like(inputs["token_type_ids"])}
    if isinstance(model, Gemma3ForConditionalGeneration):
        shown["token_type_ids"] *= 0
    causal = life(model, shown, DynamicCache(config=model.config.get_text_config()))
    assert float((causal[1] - want[1]).abs().max()) > 1e-3  # a causal mask gives other results


@pytest.mark.parametrize("index", mostly_slow(["exact", "pariskv"], "exact"))
def test_generated_tokens_are_those_of_the_model(case, index):
    model, inputs = case
    how = dict(max_new_tokens=24, do_sample=False)
    want = model.generate(**inputs, **how)
    with kvhf.attach(model, **{**REGIONS, "index": index}) as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), want)


def test_tokens_after_an_image_are_graphs(case):
    model, inputs = case
    if not isinstance(model, Gemma3ForConditionalGeneration):
        pytest.skip("it makes a mask for each token")
    inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    how = dict(max_new_tokens=24, do_sample=False)
    want = model.generate(**inputs, **how)
    attached = {**REGIONS, "index": Captured, "token_graph": True}
    with recorded(WholeGraph) as graphs, kvhf.attach(model, **attached) as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **how), want)
    assert graphs.replays == 20


def test_a_chunk_that_ends_inside_an_image_sees_what_it_sees_in_the_model(case):
    """If a chunk ends inside an image, the image's first tokens do not see its last ones."""
    model, inputs = case
    if not isinstance(model, Gemma3ForConditionalGeneration):
        pytest.skip("its prefix is read in one piece")
    embeddings = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(2))

    def chunks(cache):
        some, mask = [], inputs["attention_mask"]
        with torch.no_grad():
            for start, stop in ((0, 7), (7, 31), (31, 40)):
                given = dict(attention_mask=mask[:, :stop], past_key_values=cache)
                types = inputs["token_type_ids"][:, :stop]
                out = model(inputs_embeds=embeddings[:, start:stop], token_type_ids=types, **given)
                some.append(out.logits * mask[:, start:stop, None])
        return some

    with kvhf.attach(model, **REGIONS) as cache:
        got = chunks(cache)
    assert_close(got, chunks(DynamicCache(config=model.config.get_text_config())))


def test_a_prefix_without_a_mask_is_refused(case):
    """Without a mask, PaliGemma attends to all tokens in both directions."""
    model, inputs = case
    if isinstance(model, Gemma3ForConditionalGeneration):
        pytest.skip("it is causal")
    ids = inputs["input_ids"][:1]
    match = "GemmaAttention: got attention that is not causal"
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(kvhf.UnsupportedError, match=match),
    ):
        model(input_ids=ids, pixel_values=inputs["pixel_values"][:1], past_key_values=cache)
    assert cache.get_seq_length() == 0
