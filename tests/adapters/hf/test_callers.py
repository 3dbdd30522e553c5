"""Usual ways to use a model and a cache give the results of plain transformers.

The file is long, because it has a test for each situation.
"""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import SMALL, VOCABULARY, build, prompt

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
GREEDY = dict(max_new_tokens=16, do_sample=False)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


@pytest.fixture(scope="module")
def words():
    """A tokenizer with numbers as words; each number is its own id."""
    vocabulary = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", pad_token="0", padding_side="left"
    )


def both(model, inputs, **options):
    """Return the results of `generate` with plain attention, and with an index."""
    options = {**GREEDY, **options}
    with kvhf.attach(model, **REGIONS) as cache:
        mine = model.generate(**inputs, past_key_values=cache, **options)
        assert cache.report().steps > 0
    return model.generate(**inputs, **options), mine


# Models


@pytest.fixture(scope="module")
def vision_language():
    torch.manual_seed(0)
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = dict(depth=1, embed_dim=16, hidden_size=64, num_heads=2, patch_size=2)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))
    model.generation_config.eos_token_id = None
    return model.float().eval()


def test_text_of_a_vision_language_model_padded_and_over_two_turns(vision_language):
    """Each token has three positions, which are counted after the padding of its sequence."""
    model, inputs = vision_language, prompt(3, 40, padded=True)

    def turns(cache):
        ids, mask = model.generate(**inputs, past_key_values=cache, **GREEDY), inputs
        new, seen = prompt(3, 9)["input_ids"], torch.ones(3, 25, dtype=torch.long)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask["attention_mask"], seen], 1)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)

    with kvhf.attach(model, **REGIONS) as cache:
        mine = turns(cache)
        assert all(layer.traffic.steps == 30 for layer in cache.attention_layers())
    assert torch.equal(mine, turns(DynamicCache(config=model.config.get_text_config())))


@pytest.mark.parametrize(("scale", "finite"), [(4e3, True), (4e4, False)])
def test_logits_beyond_half_precision(scale, finite):
    """A product `q·k` above 65504 does not overflow. A key above it raises and changes nothing."""
    model, inputs = build("llama", num_hidden_layers=1, eos_token_id=None), prompt(1, 40)
    layer = model.model.layers[0]
    attention = layer.self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(30)
        attention.k_proj.weight.mul_(scale)
        model = model.half()
        hidden = layer.input_layernorm(embedded(model, inputs))
        queries, keys = (part(hidden)[..., :16] for part in (attention.q_proj, attention.k_proj))
    assert bool(attention.k_proj(hidden).isfinite().all()) == finite
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        if not finite:
            with pytest.raises(ValueError, match="keys: got inf, allowed is a finite number"):
                model(**inputs, past_key_values=cache)
            assert cache.get_seq_length() == 0
            return
        got = model.generate(**inputs, past_key_values=cache, **GREEDY)
    assert float((queries.float() @ keys.float().mT).abs().max()) > 65504
    assert torch.equal(got, model.generate(**inputs, **GREEDY))


def embedded(model, inputs):
    with torch.no_grad():
        return model.get_input_embeddings()(inputs["input_ids"])


def test_weights_that_change_inside_are_those_of_the_next_prompt(model):
    other, inputs = build("llama", num_hidden_layers=2, eos_token_id=None), prompt(1, 40)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with kvhf.attach(model, **REGIONS) as cache:
        first = model.generate(**inputs, past_key_values=cache, **GREEDY)
        model.load_state_dict(other.state_dict())
        cache.reset()
        second = model.generate(**inputs, past_key_values=cache, **GREEDY)
        model.load_state_dict(before)
    assert torch.equal(first, model.generate(**inputs, **GREEDY))
    assert torch.equal(second, other.generate(**inputs, **GREEDY))
    assert not torch.equal(first, second)


# Inputs


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float])
def test_masks_of_all_dtypes(model, dtype):
    inputs = prompt(3, 40, padded=True)
    want = model.generate(**inputs, **GREEDY)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    with kvhf.attach(model, **REGIONS) as cache:
        positions = (prompt(3, 40, padded=True)["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            first = model(**inputs, position_ids=positions, past_key_values=cache).logits[:, -1]
        assert torch.equal(first.argmax(-1), want[:, 40])
        assert torch.equal(cache.attention_layers()[0].valid, inputs["attention_mask"].bool())


@pytest.mark.parametrize("whole", [True, False])
def test_new_tokens_alone_with_the_full_mask(model, whole):
    """For a second turn, the caller passes the new ids, or all ids."""
    inputs = prompt(2, 60, padded=True)
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        positions = (mask[:, :40].cumsum(-1) - 1).clamp_min(0)
        given = dict(attention_mask=mask[:, :40], position_ids=positions, past_key_values=cache)
        model(ids[:, :40], **given)
        new = ids if whole else ids[:, 40:]
        got = model.generate(new, attention_mask=mask, past_key_values=cache, **GREEDY)
    want = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(got[:, -16:], want[:, 60:])


def test_a_history_that_is_edited_is_cut_where_it_differs(model):
    """An example is a chat in which the last question is edited."""
    history, other = prompt(1, 50)["input_ids"], prompt(1, 20)["input_ids"]
    with kvhf.attach(model, **REGIONS) as cache:
        answered = model.generate(history, past_key_values=cache, **GREEDY)
        cache.crop(30 - cache.get_seq_length())
        edited = torch.cat([answered[:, :30], other], dim=1)
        got = model.generate(edited, past_key_values=cache, **GREEDY)
    assert torch.equal(got, model.generate(edited, **GREEDY))


def test_embeddings_in_place_of_ids(model):
    inputs = prompt(2, 40, padded=True)
    given = dict(inputs_embeds=embedded(model, inputs), attention_mask=inputs["attention_mask"])
    want, got = both(model, given)
    assert torch.equal(got, want)


# Ways to generate


@pytest.mark.parametrize("batch", [1, 3])
def test_pipelines(model, words, batch):
    texts = [" ".join(map(str, row.tolist())) for row in prompt(batch, 40)["input_ids"]]
    texts[0] = texts[0][20:]
    write = pipeline("text-generation", model=model, tokenizer=words, device="cpu")
    want = write(texts, batch_size=batch, **GREEDY)
    with kvhf.attach(model, **REGIONS) as cache:
        got = write(texts, batch_size=batch, past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() > 40
    assert got == want


class Heard(BaseStreamer):
    def __init__(self):
        self.ids, self.ended = [], False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers(model):
    inputs, heard = prompt(1, 40), Heard()
    with kvhf.attach(model, **REGIONS) as cache:
        got = model.generate(**inputs, past_key_values=cache, streamer=heard, **GREEDY)
    assert heard.ended
    assert heard.ids == got[0].tolist() == model.generate(**inputs, **GREEDY)[0].tolist()


class Odd(LogitsProcessor):
    """Allows only odd ids, and never the same id twice in a row."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, ::2] = float("-inf")
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class Long(StoppingCriteria):
    """Stops at a total number of tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_processors_criteria_and_scores(model):
    given = dict(
        logits_processor=LogitsProcessorList([Odd()]),
        stopping_criteria=StoppingCriteriaList([Long(49)]),
        **dict(return_dict_in_generate=True, output_scores=True, output_logits=True),
    )
    want, got = both(model, prompt(2, 40, padded=True), **given)
    assert torch.equal(got.sequences, want.sequences)
    assert got.sequences.shape[1] == 49
    assert (got.sequences[:, 40:] % 2 == 1).all()
    for name in ("scores", "logits"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_hidden_states(model):
    given = dict(return_dict_in_generate=True, output_hidden_states=True)
    want, got = both(model, prompt(1, 40), **given)
    torch.testing.assert_close(got.hidden_states, want.hidden_states, rtol=1e-4, atol=1e-4)
