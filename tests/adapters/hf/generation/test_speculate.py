"""Tokens of `kvhf.generate` with drafts are those of one token at a time, or of full attention."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from transformers import WatermarkingConfig

import kvindex_adapters.hf as kvhf
from kvindex_adapters.common.speculation import DraftLength, PromptLookup
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder import Chat, Decoder
from kvindex_adapters.hf.generation import speculate
from tests.adapters.decoder.families import FULL, padded, perturbed
from tests.adapters.decoder.test_speculative_sampling import DRAWS, assert_distributed, joint
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, byte_pairs, padded_byte_pairs, prompt
from tests.support.helpers import mostly_slow

SIZES = dict(sink=4, local_window=8, update_every=8, dense_below=0)
ALL = dict(index="exact", k=500, attach_options=SIZES)
FEW = dict(index="exact", k=3, attach_options=SIZES)
DENSE = dict(index=None)
WARM = dict(do_sample=True, temperature=0.8, top_k=20, repetition_penalty=1.2)
COUNT = 16


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


def ids_of(length, seed=0):
    return prompt(1, length + seed)["input_ids"][0, seed:]


class Counted(Words):
    """A tokenizer that has `count` tokens."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count


def generated(model, ids, seed=0, count=COUNT, tokenizer=None, **options):
    torch.manual_seed(seed)
    tokenizer = Words() if tokenizer is None else tokenizer
    return kvhf.generate(model, tokenizer, ids, max_new_tokens=count, chunk=16, **options)


def tokens(model, ids, **options):
    return generated(model, ids, **options).answer_ids.tolist()


def knowing(patch, ids, answer, wrong=None):
    """Let prompt lookup draft the known answer, with a wrong token at place `wrong`."""
    known = [*ids.tolist(), *answer]

    def draft(lookup, count):
        made = known[len(lookup) : len(lookup) + count]
        if wrong is not None and wrong < len(made):
            made[wrong] = (made[wrong] + 1) % 100
        return made

    patch.setattr(PromptLookup, "draft", draft)


@pytest.mark.parametrize("wrong", mostly_slow([None, 0, 1, 2], None, 1))
@pytest.mark.parametrize(
    ("options", "how"),
    mostly_slow(
        [(options, how) for options in (ALL, DENSE) for how in ({}, WARM)], (ALL, WARM), (DENSE, {})
    ),
)
def test_tokens_are_those_of_one_at_a_time(model, monkeypatch, options, how, wrong):
    """Sampled tokens, too: each step uses the same random numbers, and penalties count drafts."""
    ids = ids_of(60)
    want = tokens(model, ids, **options, **how)
    with monkeypatch.context() as patch:
        knowing(patch, ids, want, wrong)
        made = generated(model, ids, speculative_tokens=3, **options, **how)
    assert made.answer_ids.tolist() == want
    assert made.acceptance.accepted == COUNT - 1 - made.acceptance.steps
    assert made.acceptance.steps == {None: 4, 0: 15, 1: 8, 2: 5}[wrong]
    if options is not DENSE:
        assert made.report.acceptance == made.acceptance
        assert made.report.tokens == 60 + COUNT - 1


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3_moe", "olmo2", "gpt_oss"], "llama"))
@pytest.mark.parametrize("count", mostly_slow([1, 5, "auto"], 5))
def test_full_attention_verifies(family, count, monkeypatch):
    monkeypatch.setattr(speculate, "draft_cost", lambda *_: 0.05)  # so that "auto" drafts
    more = dict(layer_types=["full_attention"] * 4) if family == "gpt_oss" else {}
    model = build(family, eos_token_id=None, **more)
    ids, penalty = ids_of(60), dict(repetition_penalty=1.3)
    want = tokens(model, ids, **DENSE, **penalty)
    assert tokens(model, ids, **FEW, **penalty) != want
    made = generated(model, ids, speculative_tokens=count, verify="full", **FEW, **penalty)
    assert made.answer_ids.tolist() == want
    assert made.acceptance.drafted > 0


def test_turns_in_one_cache(model):
    """Prompts follow in chunks, also a prompt of one token, and the cache stays that of full
    attention."""
    parts = [ids_of(60), ids_of(1, seed=7), ids_of(20, seed=3)]
    before, options = torch.zeros(0, dtype=torch.int64), dict(speculative_tokens=4, verify="full")
    with kvhf.attach(model, index="exact", k=3, **SIZES) as cache:
        for part in parts:
            got = tokens(model, part, cache=cache, used="continue", **options)
            plain = build("llama", num_hidden_layers=2, eos_token_id=None)
            before = torch.cat([before, part])
            assert got == tokens(plain, before, **DENSE)
            before = torch.cat([before, torch.tensor(got)])
            assert cache.get_seq_length() == len(before)
        lengths = [len(one) for one in cache.indexes()]
        assert tokens(model, ids_of(9), cache=cache, used="branch", **options)
        assert [len(one) for one in cache.indexes()] == lengths


def test_a_stop_token_inside_a_draft(model, monkeypatch):
    ids = ids_of(60)
    want = tokens(model, ids, **ALL)
    stop = want[5]
    end = want.index(stop) + 1
    with monkeypatch.context() as patch:
        knowing(patch, ids, want)
        for verify in ("index", "full"):
            options = dict(ALL, speculative_tokens=4, verify=verify)
            assert tokens(model, ids, eos_token_id=stop, **options) == want[:end]


@pytest.mark.parametrize("verify", ["index", "full"])
def test_a_call_that_fails_leaves_the_cache(model, monkeypatch, verify):
    ids, options = ids_of(60), dict(speculative_tokens=3, verify=verify)
    with kvhf.attach(model, index="exact", k=500, **SIZES) as cache:
        kvhf.read(model, Words(), ids, cache=cache, chunk=16)
        want = tokens(model, ids_of(9), cache=cache, used="branch")
        report = cache.report()
        real, calls = speculate.forward, []

        def failing(*given, **more):
            calls.append(1)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return real(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(speculate, "forward", failing)
            with pytest.raises(KeyboardInterrupt):
                tokens(model, ids_of(9), cache=cache, used="continue", **options)
        assert cache.get_seq_length() == 60
        assert cache.report() == report
        assert tokens(model, ids_of(9), cache=cache, used="branch", **options) == want


def test_chats_that_full_attention_verifies():
    """Both kinds of chats give the answers of full attention, turn by turn."""
    model, tokenizer = build("llama", eos_token_id=None, vocab_size=2000), byte_pairs()
    questions = ["Hello there, how are you doing today my friend?", "And now what?"]
    few = dict(max_new_tokens=12, speculative_tokens=3, verify="full", **FEW)
    plain = Chat(Decoder.of(model, tokenizer), index=None, max_new_tokens=12)
    want = [plain.send(question).text for question in questions]
    ours = Chat(Decoder.of(model, tokenizer), **few)
    assert [ours.send(question).text for question in questions] == want
    assert ours.report().acceptance.steps > 10
    with kvhf.Chat(model, tokenizer, **few) as theirs:
        assert [theirs.send(question).text for question in questions] == want


# Drafts of a smaller model


@pytest.fixture(scope="module")
def near():
    """A model with slightly different weights, which often writes the same tokens."""
    return perturbed(build("llama", num_hidden_layers=2, eos_token_id=None))


@pytest.fixture(scope="module")
def twin():
    """A second model with the same weights."""
    return build("llama", num_hidden_layers=2, eos_token_id=None)


@pytest.fixture(scope="module")
def far():
    """A model of another family and size."""
    return build("qwen2", hidden_size=32, eos_token_id=None, **FULL)


@pytest.mark.parametrize("count", mostly_slow([1, 4, "auto"], 4))
@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
def test_greedy_tokens_are_those_without_a_draft_model(
    model, near, twin, far, monkeypatch, options, count
):
    # with its real cost, a draft model of the same size never pays
    monkeypatch.setattr(speculate, "model_cost", lambda small, large: 0.2)
    how, rates = dict(repetition_penalty=1.2), {}
    for name, draft in {"near": near, "twin": twin, "far": far}.items():
        for length in (2, 57, 60, 63):  # windows are updated every 8 tokens
            ids, more = ids_of(length), dict(speculative_tokens=count, draft_model=draft)
            made = generated(model, ids, **more, **options, **how)
            assert made.answer_ids.tolist() == tokens(model, ids, **options, **how)
            assert made.acceptance.accepted == COUNT - 1 - made.acceptance.steps
            rates[name] = made.acceptance.rate
    assert rates["far"] < rates["near"] < rates["twin"] == 1


FEWER, MORE = 80, 202
"""Numbers of tokens below and above those of the model, which is 101."""


@pytest.mark.parametrize("size", [FEWER, MORE])
@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
@pytest.mark.parametrize("how", [{}, WARM], ids=["greedy", "warm"])
def test_a_draft_model_with_fewer_or_more_tokens(model, options, size, how):
    """Logits processors get as many logits as the model has tokens."""
    sizes, seen = set(), Counter()

    def processor(ids, scores):
        sizes.add(scores.shape[-1])
        return scores

    given = dict(tokenizer=Counted(FEWER), count=30, **options, **how)
    more = dict(logits_processor=[processor], suppress_tokens=[7, 90])
    draft = dict(speculative_tokens=3, draft_model=padded(model, size))
    for length in (2, 40, 60):
        ids = ids_of(length)
        want = generated(model, ids, **given, **more).answer_ids.tolist()
        made = generated(model, ids, **given, **more, **draft)
        if not how:
            assert made.answer_ids.tolist() == want
        assert not {7, 90} & {*made.answer_ids.tolist()}
        seen.update(vars(made.acceptance), high=int((made.answer_ids >= FEWER).sum()))
    assert sizes == {101}
    assert 0 < seen["accepted"] <= seen["drafted"]
    assert (seen["accepted"] == seen["drafted"]) == (size == MORE)
    assert seen["high"] > 3


@pytest.mark.parametrize("how", [{}, WARM], ids=["greedy", "warm"])
def test_processors_that_allow_only_tokens_that_the_draft_model_does_not_have(model, how):
    def processor(ids, scores):
        others = torch.ones_like(scores, dtype=torch.bool)
        others[:, FEWER + 3 : FEWER + 6] = False
        return scores.masked_fill(others, float("-inf"))

    given = dict(tokenizer=Counted(FEWER), logits_processor=[processor], **ALL, **how)
    draft = dict(speculative_tokens=3, draft_model=padded(model, FEWER))
    made = tokens(model, ids_of(60), **draft, **given)
    assert {*made} <= {FEWER + 3, FEWER + 4, FEWER + 5}
    if not how:
        assert made == tokens(model, ids_of(60), **given)


def test_a_draft_model_reads_the_tokens_of_rounds_without_it(model, twin, monkeypatch):
    for options in (ALL, DENSE):
        pauses = itertools.cycle([0, 3, 0, 0, 2, 0, 0, 0, 0, 4])
        with monkeypatch.context() as patch:
            patch.setattr(DraftLength, "next", lambda length, pauses=pauses: next(pauses))
            given = dict(speculative_tokens="auto", draft_model=twin, count=50)
            made = generated(model, ids_of(60), **given, **options)
        assert made.answer_ids.tolist() == tokens(model, ids_of(60), count=50, **options)
        assert made.acceptance.accepted == made.acceptance.drafted > 20


def test_the_model_itself_drafts_with_full_attention(model):
    more = dict(speculative_tokens=4, draft_model=model)
    made = generated(model, ids_of(60), **more, **DENSE)
    assert made.acceptance.accepted == made.acceptance.drafted == 12
    with (
        kvhf.attach(model, index="exact", k=500, **SIZES) as cache,
        pytest.raises(ValueError, match="draft_model: got the model itself"),
    ):
        generated(model, ids_of(60), cache=cache, **more)
    with pytest.raises(ValueError, match="draft_model: got the model itself"):
        generated(model, ids_of(60), **more, **ALL)


def test_a_draft_model_with_a_cache(model, near, monkeypatch):
    """The draft model reads all tokens in each call; a call that fails changes nothing."""
    more = dict(speculative_tokens=3, draft_model=near)
    with kvhf.attach(model, index="exact", k=500, **SIZES) as cache:
        first = tokens(model, ids_of(60), cache=cache, used="continue", **more)
        question = ids_of(9, seed=3)
        want = tokens(model, question, cache=cache, used="branch")
        report, real = cache.report(), near.forward
        for calls in (0, 2, 4):
            left = iter(range(calls))

            def failing(*given, left=left, **options):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return real(*given, **options)

            with monkeypatch.context() as patch:
                patch.setattr(near, "forward", failing)
                with pytest.raises(KeyboardInterrupt):
                    tokens(model, question, cache=cache, used="continue", **more)
            assert cache.get_seq_length() == 60 + len(first)
            assert cache.report() == report
        assert tokens(model, question, cache=cache, used="continue", **more) == want


def test_a_stop_token_inside_a_draft_of_a_model(model, twin):
    want = tokens(model, ids_of(60), **ALL)
    end = want.index(want[5]) + 1
    more = dict(speculative_tokens=4, draft_model=twin, eos_token_id=want[5])
    assert tokens(model, ids_of(60), **more, **ALL) == want[:end]


def test_chats_with_a_draft_model():
    sizes, tokenizer = dict(eos_token_id=None, vocab_size=2000), byte_pairs()
    model, small = build("llama", **sizes), build("llama", num_hidden_layers=1, **sizes)
    given = dict(max_new_tokens=12, **ALL)
    questions = ["Hello there, how are you doing today my friend?", "And now what?"]
    with kvhf.Chat(model, tokenizer, **given) as plain:
        want = [plain.send(question).text for question in questions]
    with kvhf.Chat(model, tokenizer, speculative_tokens=3, draft_model=small, **given) as ours:
        answers = [ours.send(question) for question in questions]
        assert [answer.text for answer in answers] == want
        assert all(answer.acceptance.drafted > 0 for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [4, 3, 6])
def test_sampled_answers_with_a_draft_model_have_the_distribution_of_the_model(vocabulary):
    """Joint over three tokens, with a penalty that depends on the tokens before."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    sizes |= dict(vocab_size=4, num_hidden_layers=1, num_key_value_heads=1, eos_token_id=None)
    model = build("llama", **sizes)
    small = build("llama", **{**sizes, "head_dim": 16, "vocab_size": vocabulary})
    ids = torch.randint(0, 4, (30,), generator=torch.Generator().manual_seed(0))
    how = dict(do_sample=True, temperature=0.7, top_p=0.95, top_k=0, repetition_penalty=1.5)
    counts, seen = Counter(), Counter()
    given = dict(index=None, speculative_tokens=2, draft_model=small, count=3)
    given["tokenizer"] = Counted(3)
    for seed in range(DRAWS // 20):
        made = generated(model, ids, seed=seed, **given, **how)
        counts[tuple(made.answer_ids.tolist())] += 1
        seen.update(vars(made.acceptance))
    assert 0 < seen["accepted"] < seen["drafted"]
    assert_distributed(counts, joint(lambda past: _scores(model, ids, past, how), (), 3))


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (lambda: build("llama", vocab_size=90), ValueError, "of 90 tokens for a model with 101"),
        (lambda: build("gemma3_text"), UnsupportedError, "draft_model: got a .* with sliding"),
        (lambda: "gpt2", TypeError, "draft_model: got str, allowed is a trans"),
    ],
)
def test_refused_draft_models(model, draft, error, message):
    with pytest.raises(error, match=message):
        generated(model, ids_of(20), speculative_tokens=2, draft_model=draft(), **DENSE)


@pytest.mark.parametrize(
    ("family", "tokenizer", "message"),
    [
        ("llama", Words(), r"\(got 'llama' for 'llama'\), .* \(got an unknown number\), and they"),
        (
            "llama",
            Counted(91),
            r"\(got 'llama' for 'llama'\), neither .* \(got 91\), and .* less than 1,024 tokens",
        ),
        ("mistral", Counted(90), r"model_type \(got 'mistral' for 'llama'\), .* \(got 90\), and"),
    ],
)
def test_draft_models_of_other_sizes_that_are_refused(model, family, tokenizer, message):
    small = build(family, vocab_size=90, eos_token_id=None)
    given = dict(speculative_tokens=2, draft_model=small, tokenizer=tokenizer, **DENSE)
    with pytest.raises(ValueError, match=message):
        generated(model, ids_of(20), **given)


def test_a_tokenizer_that_contains_the_padding_of_the_model(model):
    """In a GGUF file, the tokenizer has as many tokens as the model."""
    count = len(byte_pairs())
    large, small = padded(model, count + 80), padded(model, count + 16)
    given = dict(tokenizer=padded_byte_pairs(count + 80), **DENSE)
    made = tokens(large, ids_of(20), speculative_tokens=2, draft_model=small, **given)
    assert made == tokens(large, ids_of(20), **given)
    given["tokenizer"].add_tokens([f"<{number}>" for number in range(17)])
    with pytest.raises(
        ValueError, match=r"neither has fewer tokens than the tokenizer \(got 2,017"
    ):
        tokens(large, ids_of(20), speculative_tokens=2, draft_model=small, **given)


def test_a_draft_model_whose_size_differs_by_more_than_padding_is_refused(model):
    small = build("llama", vocab_size=101 + 1024, eos_token_id=None)
    given = dict(speculative_tokens=2, draft_model=small, tokenizer=Counted(101), **DENSE)
    with pytest.raises(ValueError, match=r"vocabulary of 1,125 tokens for a model with 101; .* by"):
        generated(model, ids_of(20), **given)


def test_a_draft_model_that_takes_no_index_is_refused(model):
    small = build("gptj", rotary_dim=8, eos_token_id=None)
    given = dict(speculative_tokens=2, draft_model=small)
    message = r"draft_model: got a model that .* \(model: got GPTJForCausalLM, whose attention"
    with pytest.raises(UnsupportedError, match=message):
        generated(model, ids_of(20), **given, **ALL)
    assert tokens(model, ids_of(20), **given, **DENSE) == tokens(model, ids_of(20), **DENSE)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_can(model, family):
    most = dict(n_positions=64) if family == "gpt2" else {}
    small = build(family, max_position_embeddings=64, eos_token_id=None, **most)
    for length, steps in ((40, range(5, 16)), (60, range(12, 16)), (64, (15,)), (70, (15,))):
        for options in (ALL, DENSE):
            given = dict(speculative_tokens=3, draft_model=small, **options)
            made = generated(model, ids_of(length), **given)
            assert made.answer_ids.tolist() == tokens(model, ids_of(length), **options)
            assert made.acceptance.steps in steps
            assert (made.acceptance.drafted > 0) == (length < 64)


def _scores(model, ids, past, how):
    """Return the probabilities of the token after `ids` and `past`, in transformers' own loop."""
    whole = torch.cat([ids, torch.tensor(past, dtype=torch.int64)])[None]
    out = model.generate(
        whole,
        attention_mask=torch.ones_like(whole),
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )
    return out.scores[0][0].softmax(-1)


class Puts:
    """A streamer that records the number of ids of each call."""

    def __init__(self):
        self.sizes = []

    def put(self, value):
        self.sizes.append(value.numel())

    def end(self):
        self.sizes.append(0)


def test_tokens_are_streamed_one_by_one(model, monkeypatch):
    ids, streamer = ids_of(60), Puts()
    want = tokens(model, ids, **ALL)
    knowing(monkeypatch, ids, want)
    assert tokens(model, ids, streamer=streamer, speculative_tokens=4, **ALL) == want
    assert streamer.sizes == [60, *[1] * COUNT, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(DENSE, verify="full"), "verify: got 'full' without an index"),
        (dict(ALL, penalty_alpha=0.6), "got a value together with penalty_alpha=0.6"),
        (dict(ALL, prompt_lookup_num_tokens=2), "together with prompt_lookup_num_tokens=2"),
        (dict(ALL, use_cache=False), "together with use_cache=False"),
        (dict(DENSE, guidance_scale=1.5), "together with guidance_scale=1.5"),
        (
            dict(DENSE, watermarking_config=WatermarkingConfig()),
            "together with watermarking_config=",
        ),
        (dict(ALL, verify="half"), "verify: got 'half'"),
        (
            dict(
                ALL, verify="full", attach_options={**SIZES, "index_options": {"row_codec": "int8"}}
            ),
            "verify: got 'full' with rows of",
        ),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises(ValueError, match=message):
        generated(model, ids_of(20), speculative_tokens=2, **options)
    with pytest.raises(ValueError, match="verify: got 'full' without speculative_tokens"):
        generated(model, ids_of(20), verify="full", **ALL)


@pytest.mark.parametrize(
    ("family", "message"), [("gemma3_text", "sliding-window layers"), ("falcon_h1", "linear")]
)
def test_caches_that_cannot_remove_tokens(family, message):
    with pytest.raises(UnsupportedError, match=f"speculative_tokens: got a .* with .*{message}"):
        generated(build(family), ids_of(20), speculative_tokens=2, **ALL)


@pytest.mark.parametrize(
    ("family", "message"),
    [("rwkv", "a state outside of the KV cache"), ("electra", "attention to later tokens")],
)
def test_models_whose_steps_cannot_be_joined(family, message):
    with pytest.raises(UnsupportedError, match=f"speculative_tokens: got a .* with {message}"):
        generated(build(family), ids_of(20), index=None, speculative_tokens=2)


def test_full_attention_does_not_verify_compressed_latents():
    options = {**FEW, "attach_options": {**SIZES, "index_options": {"row_codec": "int8"}}}
    with pytest.raises(ValueError, match=r"verify: got 'full' with rows of \d+ bytes instead of"):
        generated(build("deepseek_v3"), ids_of(20), speculative_tokens=2, verify="full", **options)


@pytest.mark.slow
def test_sampled_answers_have_the_distribution_of_full_attention():
    """Joint over three tokens, with a penalty that depends on the tokens before."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    sizes |= dict(vocab_size=4, num_hidden_layers=1, num_key_value_heads=1)
    model = build("llama", eos_token_id=None, **sizes)
    ids = torch.randint(0, 4, (30,), generator=torch.Generator().manual_seed(0))
    how = dict(do_sample=True, temperature=0.7, top_p=0.95, top_k=0, repetition_penalty=1.5)
    regions = dict(sink=1, local_window=2, update_every=4, dense_below=0)
    counts, options = Counter(), dict(speculative_tokens=2, verify="full")
    with kvhf.attach(model, index="exact", k=1, **regions) as cache:
        kvhf.read(model, Words(), ids[:-4], cache=cache)
        for seed in range(DRAWS // 20):
            given = dict(cache=cache, used="branch", seed=seed, count=3)
            counts[tuple(tokens(model, ids[-4:], **given, **how, **options))] += 1
    assert_distributed(counts, joint(lambda past: _scores(model, ids, past, how), (), 3))
