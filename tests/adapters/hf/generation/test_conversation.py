"""Several prompts in one cache: each answer equals that to a single prompt with all ids."""

import copy
import functools
from itertools import product

import pytest
import torch
from transformers import DynamicCache

import kvindex_adapters.hf as kvhf
from kvindex_adapters.common.prompt import encode_prompt
from kvindex_adapters.hf.generation.conversation import past_ids
from tests.adapters.hf.cache.test_copies import LINEAR
from tests.adapters.hf.generation.test_generation import NEW, REGIONS, Collect, Words, full
from tests.adapters.tiny import build, prompt
from tests.support.helpers import mostly_slow


@pytest.fixture(scope="module")
def model():
    return build("llama", eos_token_id=None)


def ids(length):
    return prompt(1, length)["input_ids"][0]


@functools.cache
def reference(family):
    """Return the same model without `attach`."""
    return build(family, eos_token_id=None)


def alone(*parts, family="llama", **options):
    """Return the answer of full attention to all parts as one prompt."""
    whole = torch.cat(parts)[None]
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    return full(reference(family), inputs, **options)[0, whole.shape[1] :]


def ask(model, cache, question, used="branch", **options):
    options = {"max_new_tokens": NEW, "chunk": 8, **options}
    return kvhf.generate(model, Words(), question, cache=cache, used=used, **options)


def read(model, cache, document, **options):
    kvhf.read(model, Words(), document, cache=cache, chunk=16, **options)


@pytest.mark.parametrize(
    ("family", "known"),
    mostly_slow(
        product(["llama", "qwen3", "gemma2"], [True, False]), ("llama", True), ("qwen3", False)
    ),
)
def test_questions_about_one_document_are_answered_as_in_one_prompt(family, known):
    model = build(family, eos_token_id=None)
    document, questions = ids(60), [ids(9), ids(1), ids(20), ids(9)]
    with kvhf.attach(model, **REGIONS) as cache:
        if known:
            read(model, cache, document)
        else:
            with torch.no_grad():
                model(input_ids=document[None], past_key_values=cache)
        before = cache.report()
        for question in questions:
            result = ask(model, cache, question)
            assert torch.equal(result.answer_ids, alone(document, question, family=family))
            assert torch.equal(result.prompt_ids, question)
            assert cache.lengths() == [60] * len(cache.indexed)
            assert cache.report().steps == before.steps


def test_a_conversation_keeps_prompts_and_answers(model):
    turns, said = [ids(40), ids(7), ids(12)], []
    with kvhf.attach(model, **REGIONS) as cache:
        for turn, used in zip(turns, ("refuse", "continue", "continue"), strict=True):
            result = ask(model, cache, turn, used)
            said += [turn]
            assert torch.equal(result.answer_ids, alone(*said))
            said += [result.answer_ids]
            assert cache.get_seq_length() == sum(map(len, said))
            assert torch.equal(past_ids(cache), torch.cat(said))
            assert result.report.tokens == cache.get_seq_length()


def test_an_answer_that_ends_early_is_kept_whole(model):
    end = int(alone(ids(40))[4])
    with kvhf.attach(model, **REGIONS) as cache:
        answer = ask(model, cache, ids(40), "refuse", eos_token_id=end).answer_ids
        assert len(answer) <= 5
        assert cache.get_seq_length() == 40 + len(answer)
        second = ask(model, cache, ids(9), "continue").answer_ids
    assert torch.equal(second, alone(ids(40), answer, ids(9)))


def test_a_prompt_is_read_in_parts(model):
    with kvhf.attach(model, **REGIONS) as cache:
        calls = []
        read(model, cache, ids(40), on_progress=lambda *call: calls.append(call))
        assert calls[-1] == ("prefill", 40, 40)
        read(model, cache, ids(9), used="continue")
        result = ask(model, cache, ids(3), "continue")
    assert torch.equal(result.answer_ids, alone(ids(40), ids(9), ids(3)))


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"min_length": 75}]
)
def test_options_that_look_at_the_past_see_it_or_are_refused(model, options):
    document, question = ids(60), ids(9)
    # min_length, which includes the prompt, prevents an earlier end token
    ends = dict(eos_token_id=int(alone(document, question)[0])) | options
    expected = alone(document, question, **ends)
    assert not torch.equal(expected, alone(document, question))
    with kvhf.attach(model, **REGIONS) as cache:
        read(model, cache, document)
        assert torch.equal(ask(model, cache, question, **ends).answer_ids, expected)
        with torch.no_grad():
            model(input_ids=ids(5)[None], past_key_values=cache)
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: got .* needs the ids of all tokens"):
            ask(model, cache, question, **options)
        assert cache.get_seq_length() == 65


def test_assisted_decoding_reads_no_token_twice(model):
    """transformers passes all ids in its first step, whatever the cache contains."""
    document, options = ids(12).repeat(4), dict(prompt_lookup_num_tokens=3)
    with kvhf.attach(model, **REGIONS) as cache:
        first = ask(model, cache, document, "refuse", **options)
        assert torch.equal(first.answer_ids, alone(document))
        assert cache.get_seq_length() == 48 + NEW
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens: got a value with a cache"):
            ask(model, cache, ids(5), **options)
    full = kvhf.generate(
        model, Words(), document, index=None, chunk=8, max_new_tokens=NEW, **options
    )
    assert torch.equal(full.answer_ids, alone(document))


def test_a_used_cache_is_refused_and_the_reasons_are_in_words(model):
    def refused(words, question=None, **options):
        with pytest.raises(ValueError, match=words):
            ask(model, cache, ids(5) if question is None else question, **options)
        assert cache.get_seq_length() == stored

    with kvhf.attach(model, **REGIONS) as cache:
        stored = 0
        refused("used: got 'often'", used="often")
        refused("prompt: got no tokens", ids(5)[:0])
        refused("prompt: got id -1, allowed is 0 to 100", torch.tensor([3, -1]))
        refused("prompt: got id 101, allowed is 0 to 100", torch.tensor([101, 3]))
        for wrong, kind in ((None, "NoneType"), (["a", "b"], "list of str"), ([3], "list of int")):
            with pytest.raises(TypeError, match=f"prompt: got {kind}, allowed is a text, a list"):
                kvhf.generate(model, Words(), wrong, cache=cache)
        refused("index: got a value together with cache=", index="exact")
        refused("index: got a value together with cache=", index=None)
        refused("k: got a value together with cache=", k=3)
        refused("attach_options: got a value", attach_options={"sink": 4})
        read(model, cache, ids(40))
        stored = 40
        refused('cache: got a cache with 40 tokens; .* pass used="continue"', used="refuse")
        with pytest.raises(ValueError, match="cache: got a cache with 40 tokens"):
            read(model, cache, ids(5))
        with pytest.raises(ValueError, match="used: got 'branch', allowed is one of"):
            read(model, cache, ids(5), used="branch")
        with pytest.raises(ValueError, match="chunk: got 1"):
            kvhf.read(model, Words(), ids(5), cache=cache, used="continue", chunk=1)
        cache.batch_repeat_interleave(2)
        refused("cache: got a cache of 2 sequences")
    with pytest.raises(RuntimeError, match="context has ended"):
        ask(model, cache, ids(5))
    with pytest.raises(ValueError, match="cache: got DynamicCache, allowed is a cache of attach"):
        ask(model, DynamicCache(config=model.config), ids(5))
    with pytest.raises(ValueError, match="used: got 'branch' without cache=, but used says"):
        ask(model, None, ids(5))


class Stops(Collect):
    """Fails at the third token."""

    def put(self, value):
        super().put(value)
        if len(self.tokens) > 12:
            raise KeyboardInterrupt


@pytest.mark.parametrize("used", ["continue", "branch"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(model, used):
    document, question = ids(60), ids(9)
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(KeyboardInterrupt):
            ask(model, cache, question, used, streamer=Stops())
        assert cache.get_seq_length() == 0
        read(model, cache, document)
        with pytest.raises(KeyboardInterrupt):
            ask(model, cache, question, used, streamer=Stops())
        assert cache.lengths() == [60] * 4
        answer = ask(model, cache, question, used).answer_ids
    assert torch.equal(answer, alone(document, question))


def test_linear_attention_cannot_branch():
    kinds = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    hybrid = build("qwen3_next", **kinds, **LINEAR)
    with kvhf.attach(hybrid, **REGIONS) as cache:
        read(hybrid, cache, ids(30))
        with pytest.raises(ValueError, match='"branch" for a model with linear attention'):
            ask(hybrid, cache, ids(5))
        ask(hybrid, copy.deepcopy(cache), ids(5), "continue")
        assert cache.get_seq_length() == 30
        ask(hybrid, cache, ids(5), "continue")
        assert cache.get_seq_length() == 35 + NEW


class Begins(Words):
    """A tokenizer that begins sequences with 1 and chats with 7 (turn) and 8 (cue)."""

    def __call__(self, text, *, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + super().__call__(text)["input_ids"]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        turns = [f"7 {message['content']}" for message in messages]
        return " ".join(turns + ["8"] * add_generation_prompt)


def test_only_what_comes_first_begins_a_sequence(model):
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Begins(), "20 21 22", cache=cache)
        assert past_ids(cache).tolist() == [1, 20, 21, 22]
        options = dict(cache=cache, used="branch", max_new_tokens=2)
        found = kvhf.generate(model, Begins(), "30 31", **options)
        assert found.prompt_ids.tolist() == [30, 31]
    message = [{"role": "user", "content": "5 6"}]
    assert encode_prompt(Begins(), message).tolist() == [7, 5, 6, 8]
    assert encode_prompt(Begins(), message, cue=False).tolist() == [7, 5, 6]


def test_a_streamer_gets_the_prompt_and_the_answer_not_the_document(model):
    streamer = Collect()
    with kvhf.attach(model, **REGIONS) as cache:
        read(model, cache, ids(40))
        result = ask(model, cache, ids(9), streamer=streamer)
    assert streamer.tokens == [*ids(9).tolist(), *result.answer_ids.tolist()]


@pytest.mark.parametrize(
    "index", mostly_slow(["exact", "pariskv", "snapkv", "louiskv+reuse"], "pariskv", "snapkv")
)
def test_no_branch_leaves_a_trace(model, index):
    """Few rows are retrieved, and answers are long enough to move tokens into the index."""
    with kvhf.attach(model, **{**REGIONS, "index": index, "k": 6}) as cache:
        read(model, cache, ids(60))
        answers = [ask(model, cache, ids(length)).answer_ids for length in (9, 9, 30, 9)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[3])


def test_ids_of_the_past_follow_a_copy_and_are_forgotten_where_others_change_it(model):
    options = dict(repetition_penalty=1.5)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        kvhf.read(model, Words(), ids(20), cache=cache)
        other = copy.deepcopy(cache)
        assert torch.equal(past_ids(other), ids(20))
        ask(model, other, ids(3), **options)
        other.crop(-3)
        model(input_ids=ids(3)[None], past_key_values=other)
        assert past_ids(other) is None
        with pytest.raises(ValueError, match=r"repetition_penalty: got 1\.5"):
            ask(model, other, ids(3), **options)
        assert torch.equal(past_ids(cache), ids(20))
