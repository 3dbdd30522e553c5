"""A smaller model writes drafts; the answer is that of the larger model alone."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import kvindex_adapters.decoder.session as sessions
from kvindex_adapters.cli.documents import SessionDocument
from kvindex_adapters.common.speculation import DraftLength, PromptLookup
from kvindex_adapters.decoder import Chat, Decoder, Sampling
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.decoder.speculation import Speculator
from tests.adapters.decoder.families import ids_of, model_of, padded, perturbed
from tests.adapters.decoder.test_decoder import Breaks, breaking
from tests.adapters.decoder.test_speculation import (
    ALL,
    AUTO,
    COUNT,
    DENSE,
    FEW,
    PARIS,
    SIZES,
    WARM,
    collect,
    tokens,
)
from tests.adapters.decoder.test_speculative_sampling import (
    DRAWS,
    SAMPLING,
    assert_distributed,
    of_full_attention,
    tiny,  # noqa: F401  # a fixture
)
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import byte_pairs, padded_byte_pairs
from tests.support.helpers import mostly_slow

WORDS = Words()


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("llama", num_hidden_layers=2), WORDS)


@pytest.fixture(scope="module")
def near(decoder):
    """A decoder with slightly different weights, which often writes the same tokens."""
    return Decoder.of(perturbed(model_of("llama", num_hidden_layers=2)), WORDS)


@pytest.fixture(scope="module")
def far():
    """A decoder with a smaller model, whose tokens are hardly ever the same."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_key_value_heads=1, head_dim=8)
    return Decoder.of(model_of("qwen3", layer_types=["full_attention"], **sizes), WORDS)


def lengths(session):
    """Return the numbers of tokens of a session in all of its layers."""
    return {session.length, *(len(layer) for layer in session._attentions)}


@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
def test_the_model_as_its_own_draft_accepts_all(decoder, options):
    prompt = ids_of(60)
    given = dict(options, speculative_tokens=4, draft_model=decoder)
    made = decoder.generate(prompt, max_new_tokens=COUNT, chunk=16, **given)
    assert made.answer_ids.tolist() == tokens(decoder, prompt, **options)
    assert made.acceptance.steps == 3
    assert made.acceptance.accepted == made.acceptance.drafted == 12


@pytest.mark.parametrize("options", [FEW, PARIS, AUTO], ids=["few", "paris", "auto"])
def test_the_answer_depends_on_the_drafts_and_not_on_who_wrote_them(decoder, monkeypatch, options):
    """With few rows, the answer is that of the same steps with drafts of prompt lookup."""
    written, verify = {}, Speculator._verify

    def recording(speculator, drafts, *more):
        written[speculator._session.length + 1] = drafts[0].tolist()
        return verify(speculator, drafts, *more)

    prompt, given = ids_of(60), dict(options, speculative_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(Speculator, "_verify", recording)
        made = decoder.generate(
            prompt, max_new_tokens=COUNT, chunk=16, draft_model=decoder, **given
        )
    assert made.acceptance.accepted > 0
    monkeypatch.setattr(PromptLookup, "draft", lambda lookup, count: written.get(len(lookup), []))
    again = decoder.generate(prompt, max_new_tokens=COUNT, chunk=16, **given)
    assert torch.equal(again.answer_ids, made.answer_ids)
    assert again.acceptance == made.acceptance


@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
@pytest.mark.parametrize("count", mostly_slow([1, 4, "auto"], 4, "auto"))
def test_greedy_tokens_are_those_without_drafts(decoder, near, far, monkeypatch, options, count):
    # with its real cost, a draft model of the same size never pays
    monkeypatch.setattr("kvindex_adapters.decoder.run.model_cost", lambda small, large: 0.2)
    accepted = []
    for draft in (near, far):
        for length in range(57, 65):  # windows are updated every 8 tokens
            prompt = ids_of(length)
            given = dict(options, speculative_tokens=count, draft_model=draft)
            made = decoder.generate(prompt, max_new_tokens=COUNT, chunk=16, **given)
            assert made.answer_ids.tolist() == tokens(decoder, prompt, **options)
            seen = made.acceptance
            assert seen.accepted == COUNT - 1 - seen.steps
            accepted.append(seen.rate)
    assert 0.2 < sum(accepted[:8]) / 8 < 1
    assert sum(accepted[8:]) / 8 < 0.1


def test_auto_leaves_out_a_draft_model_that_does_not_pay(decoder, far, monkeypatch):
    monkeypatch.setattr("kvindex_adapters.decoder.run.model_cost", lambda small, large: 0.3)
    given = dict(DENSE, max_new_tokens=120, chunk=16)
    made = decoder.generate(ids_of(60), speculative_tokens="auto", draft_model=far, **given)
    assert torch.equal(made.answer_ids, decoder.generate(ids_of(60), **given).answer_ids)
    assert 3 <= made.acceptance.rounds <= 25


@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_draft_model_reads_the_tokens_of_rounds_without_it(decoder, monkeypatch, options, batch):
    pauses = itertools.cycle([0, 3, 0, 0, 2, 0, 0, 0, 0, 4])
    monkeypatch.setattr(DraftLength, "next", lambda length: next(pauses))
    prompts, given = [ids_of(60), ids_of(47)][:batch], dict(options, max_new_tokens=50, chunk=16)
    made = decoder.generate(prompts, speculative_tokens="auto", draft_model=decoder, **given)
    plain = decoder.generate(prompts, **given)
    for one, other in zip(made, plain, strict=True):
        assert torch.equal(one.answer_ids, other.answer_ids)
        assert one.acceptance.accepted == one.acceptance.drafted > 20


def test_the_session_of_the_draft_has_the_tokens_of_the_answer(decoder, near):
    """After each round, keys and values are those of the accepted tokens."""
    session, prompt = decoder.session(**ALL), ids_of(60)
    given = dict(session=session, speculative_tokens=4, draft_model=near)
    got = tokens(decoder, prompt, count=30, **given)
    drafter = session.drafter
    own = drafter._session
    assert lengths(own) == {own.length}
    assert 60 + 30 - 5 <= own.length < 60 + 30
    ids = torch.cat([prompt, torch.tensor(got)])
    assert drafter._ids[0].tolist() == ids.tolist()
    other = near.session(**ALL)
    near.read(ids[: own.length], other, chunk=16)
    last = ids[own.length : own.length + 1]
    torch.testing.assert_close(own.step(last), other.step(last), atol=1e-4, rtol=1e-4)


def test_the_next_turn_reads_only_what_is_new(decoder, near, monkeypatch):
    read, real = [], Session._read_prompt

    def counted(session, ids, *more):
        read.append((session, ids.shape[1]))
        return real(session, ids, *more)

    monkeypatch.setattr(Session, "_read_prompt", counted)
    session = decoder.session(**ALL)
    given = dict(speculative_tokens=4, draft_model=near)
    first = tokens(decoder, ids_of(60), session=session, **given)
    decoder.read(ids_of(9, seed=2), session, chunk=16)  # without the draft model
    fork = session.fork()
    question = ids_of(20, seed=3)
    for one in (session, fork):
        read.clear()
        got = tokens(decoder, question, session=one, **given)
        whole = torch.cat([ids_of(60), torch.tensor(first), ids_of(9, seed=2), question])
        assert got == tokens(decoder, whole, **ALL)
        own = [count for who, count in read if who is one.drafter._session]
        assert len(own) == 1
        assert 29 <= own[0] <= 29 + 5
    read.clear()
    session.truncate(30)  # other tokens follow
    other = ids_of(20, seed=4)
    got = tokens(decoder, other, session=session, **given)
    assert got == tokens(decoder, torch.cat([ids_of(60)[:30], other]), **ALL)
    own = [count for who, count in read if who is session.drafter._session]
    assert own == [20]


def test_questions_about_a_text_do_not_copy_the_rows_of_the_draft_model(decoder):
    """`kvindex generate` asks each question in a fork."""
    given = dict(max_new_tokens=30, speculative_tokens=3, draft_model=decoder)
    with SessionDocument.opened(decoder, True, "exact", 500, SIZES) as text:
        text.read(ids_of(600), lambda *more: None)
        places = []
        for number in range(3):
            options = text.options(branch=True)
            decoder.generate(ids_of(40, seed=number), **given, **options)
            indexes = options["session"].drafter._session.indexes()
            places.append({place for index in indexes for place in index.memory()})
        assert places[0] == places[1] == places[2]


def test_another_draft_model_gets_a_session_of_its_own(decoder, near, far):
    session = decoder.session(**ALL)
    want = decoder.session(**ALL)
    for number, draft in enumerate((near, far, near)):
        prompt = ids_of(30, seed=number)
        given = dict(session=session, speculative_tokens=3, draft_model=draft)
        assert tokens(decoder, prompt, **given) == tokens(decoder, prompt, session=want)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_a_batch_advances_by_what_all_accept(decoder, near, sampling):
    prompts = [ids_of(60), ids_of(47), ids_of(52)]
    given = dict(ALL, sampling=sampling)
    for draft in (decoder, near):
        made = decoder.generate(
            prompts,
            max_new_tokens=COUNT,
            chunk=16,
            speculative_tokens=3,
            draft_model=draft,
            **given,
        )
        if not sampling.temperature:
            want = tokens(decoder, prompts, **given)
            assert [answer.answer_ids.tolist() for answer in made] == want
        seen = made[0].acceptance
        assert seen.accepted == COUNT - 1 - seen.steps
        assert seen.accepted == seen.drafted or draft is near


def test_stop_tokens_at_different_places_of_a_batch(decoder, near):
    prompts = [ids_of(60), ids_of(47)]
    free = tokens(decoder, prompts, **ALL)
    stop = [free[0][6], free[1][13]]
    want = tokens(decoder, prompts, stop=stop, **ALL)
    assert len(want[0]) != len(want[1])
    for draft in (decoder, near):
        given = dict(ALL, stop=stop, speculative_tokens=4, draft_model=draft)
        assert tokens(decoder, prompts, **given) == want


@pytest.mark.parametrize("place", [3, 4, 5, 6, 7])
def test_a_stop_token_inside_a_draft(decoder, place):
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **ALL)
    stop = want[place]
    end = want.index(stop) + 1
    session = decoder.session(**ALL)
    given = dict(session=session, speculative_tokens=5, draft_model=decoder)
    assert tokens(decoder, prompt, stop=[stop], **given) == want[:end]
    assert session.length == len(session.ids) == 60 + end
    question = ids_of(20, seed=3)
    longer = torch.cat([session.ids, question])
    assert tokens(decoder, question, **given) == tokens(decoder, longer, **ALL)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_the_limit_of_new_tokens(decoder, limit):
    want = tokens(decoder, ids_of(60), **ALL)
    given = dict(ALL, speculative_tokens=4, draft_model=decoder)
    assert tokens(decoder, ids_of(60), limit, **given) == want[:limit]


def test_prompts_of_one_token(decoder, near):
    for length in (1, 2, 3):
        want = tokens(decoder, ids_of(length), **ALL)
        given = dict(ALL, speculative_tokens=3, draft_model=near)
        assert tokens(decoder, ids_of(length), **given) == want


def test_options_of_single_layers_are_those_of_the_large_model(decoder, far):
    some = dict(SIZES, dense_layers=[1], layer_options={0: dict(backend="torch")})
    options = dict(index="exact", k=500, attach_options=some)
    given = dict(options, speculative_tokens=3, draft_model=far)
    assert tokens(decoder, ids_of(60), **given) == tokens(decoder, ids_of(60), **options)


# Vocabularies of other sizes


FEWER, MORE = 80, 202
"""Sizes of vocabularies below and above that of the model, which is 101."""


@pytest.fixture(scope="module", params=[FEWER, MORE])
def other(request):
    """A decoder with the weights of the model, for fewer or more tokens."""
    return Decoder.of(padded(model_of("llama", num_hidden_layers=2), request.param), WORDS)


@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_draft_model_with_fewer_or_more_tokens(decoder, other, options, batch):
    prompts = [ids_of(60), ids_of(47)][:batch]
    given = dict(options, max_new_tokens=30, chunk=16)
    want = decoder.generate(prompts, **given)
    assert max(int(one.answer_ids.max()) for one in want) >= FEWER
    made = decoder.generate(prompts, speculative_tokens=3, draft_model=other, **given)
    for one, plain in zip(made, want, strict=True):
        assert torch.equal(one.answer_ids, plain.answer_ids)
    seen = made[0].acceptance
    more = other.config.vocabulary == MORE  # then no token of the answer is unknown
    assert (seen.accepted == seen.drafted > 0) == more
    assert seen.accepted > 0 or batch == 2  # a sequence rejects what the other one accepts


def test_samples_of_a_draft_model_with_more_tokens(decoder):
    """Without the tokens that the model does not have, its probabilities are those of the model."""
    more = Decoder.of(padded(model_of("llama", num_hidden_layers=2), MORE), WORDS)
    given = dict(ALL, speculative_tokens=4, draft_model=more, sampling=WARM)
    made = decoder.generate(ids_of(60), max_new_tokens=COUNT, chunk=16, **given)
    assert made.acceptance.accepted == made.acceptance.drafted == 12


def test_turns_with_a_draft_model_that_has_fewer_or_more_tokens(decoder, other):
    session, past = decoder.session(**ALL), torch.zeros(0, dtype=torch.int64)
    given = dict(session=session, speculative_tokens=3, draft_model=other)
    for number in range(3):
        past = torch.cat([past, ids_of(20, seed=number)])
        got = tokens(decoder, ids_of(20, seed=number), **given)
        assert got == tokens(decoder, past, **ALL)
        past = torch.cat([past, torch.tensor(got)])
    assert session.drafter._ids[0].tolist() == past.tolist()


# Sampled answers


def test_the_model_as_its_own_draft_accepts_all_samples(decoder):
    given = dict(ALL, speculative_tokens=4, draft_model=decoder, sampling=WARM)
    made = decoder.generate(ids_of(60), max_new_tokens=COUNT, chunk=16, **given)
    assert made.acceptance.accepted == made.acceptance.drafted == 12
    again = decoder.generate(ids_of(60), max_new_tokens=COUNT, chunk=16, **given)
    assert torch.equal(made.answer_ids, again.answer_ids)


@pytest.mark.parametrize(
    ("batch", "vocabulary"),
    [pytest.param(1, 4, marks=pytest.mark.slow), (500, 4), (500, 3), (500, 6)],
)
def test_sampled_answers_have_the_distribution_of_the_model(
    tiny,  # noqa: F811  # the fixture that is imported above
    monkeypatch,
    batch,
    vocabulary,
):
    decoder, prompt = tiny
    monkeypatch.setattr(decoder, "tokenizer", WORDS)
    sizes = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, head_dim=8)
    sizes |= dict(num_hidden_layers=1, num_key_value_heads=2)
    small = Decoder.of(model_of("llama", vocab_size=vocabulary, **sizes), WORDS)
    options = dict(index=None, speculative_tokens=3, draft_model=small)
    counts, accepted, drafted = Counter(), 0, 0
    for seed in range(DRAWS // batch if batch > 1 else 2000):
        sampling = Sampling(SAMPLING.temperature, top_p=SAMPLING.top_p, seed=seed)
        answers = decoder.generate(
            [prompt] * batch, max_new_tokens=4, sampling=sampling, stop=(), **options
        )
        counts.update(tuple(answer.answer_ids.tolist()) for answer in answers)
        accepted += answers[0].acceptance.accepted
        drafted += answers[0].acceptance.drafted
    sampler = Sampler(SAMPLING, torch.device("cpu"))
    assert_distributed(counts, of_full_attention(decoder, prompt, sampler, 4))
    assert batch > 1 or 0 < accepted < drafted


# Exceptions


@pytest.mark.parametrize("calls", range(13))
def test_an_exception_leaves_the_last_verified_token(decoder, near, monkeypatch, calls):
    """`calls` runs of a layer's MLP succeed after 6 tokens; then the host is interrupted.

    In a round, 2 layers run for each of 4 drafts, and then for the verification.
    """
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **ALL)
    run = decoder.start(prompt, max_new_tokens=COUNT, speculative_tokens=4, draft_model=near, **ALL)
    got, session, own = [], run.session, run.drafter._session
    with monkeypatch.context() as patch:
        made = run.tokens()
        while len(got) < 6:
            got += next(made).tolist()
        patch.setattr(sessions.layers, "gated", breaking(sessions.layers.gated, calls))
        with pytest.raises(KeyboardInterrupt):
            collect(made, got)
    assert got == want[: len(got)]
    assert lengths(session) == {60 + len(got) - 1}
    assert session.token.tolist() == [[got[-1]]]
    assert lengths(own) == {own.length}
    assert own.length <= session.length
    while len(got) < COUNT:
        got.append(int(session.step(torch.tensor(got[-1:])).argmax()))
    assert got == want


@pytest.mark.parametrize("calls", [0, 1, 5, 11, 14, 25])
def test_a_call_that_fails_leaves_the_session(decoder, near, monkeypatch, calls):
    """Also if the prompt of the draft model is interrupted; the next call is as ever."""
    session = decoder.session(**ALL)
    given = dict(session=session, speculative_tokens=3, draft_model=near)
    first = tokens(decoder, ids_of(60), **given)
    before, length, question = session.report(), session.length, ids_of(20, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(sessions.layers, "gated", breaking(sessions.layers.gated, calls))
        with pytest.raises(KeyboardInterrupt):
            tokens(decoder, question, **given)
    assert session.report() == before
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(question, streamer=Breaks(), chunk=16, **given)
    assert session.report() == before
    assert lengths(session) == {length}
    longer = torch.cat([ids_of(60), torch.tensor(first), question])
    assert tokens(decoder, question, **given) == tokens(decoder, longer, **ALL)


def test_a_draft_prompt_that_was_interrupted_is_read_again(decoder, near, monkeypatch):
    session = decoder.session(**ALL)
    given = dict(session=session, speculative_tokens=3, draft_model=near)
    real = Session._read_prompt

    def failing(one, *more):
        if one is not session:
            real(one, *more)
            raise KeyboardInterrupt
        return real(one, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_read_prompt", failing)
        with pytest.raises(KeyboardInterrupt):
            tokens(decoder, ids_of(60), **given)
    assert session.length == 0
    broken = session.drafter
    assert tokens(decoder, ids_of(60), **given) == tokens(decoder, ids_of(60), **ALL)
    assert session.drafter is not broken


# Reports, chats and refusals


def test_reports_and_descriptions(decoder, near):
    given = dict(ALL, speculative_tokens=4, draft_model=near)
    made = decoder.generate(ids_of(60), max_new_tokens=COUNT, **given)
    assert made.report.acceptance == made.acceptance
    text = decoder.explain(**given)
    assert "speculation: up to 4 tokens drafted by the draft model, verified with the index" in text


def test_chats_keep_the_session_of_the_draft_model():
    tokenizer = byte_pairs()
    sizes = dict(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=4096)
    decoder = Decoder.of(model_of("llama", **sizes), tokenizer)
    small = Decoder.of(model_of("llama", **{**sizes, "num_hidden_layers": 1}), byte_pairs())
    options = dict(max_new_tokens=12, **ALL)
    plain = Chat(decoder, **options)
    drafted = Chat(decoder, speculative_tokens=3, draft_model=small, **options)
    for text in ("Name a color.", "And another one?"):
        assert drafted.send(text).text == plain.send(text).text
    first = drafted.session.drafter
    assert drafted.fork().send("Why?").text == plain.fork().send("Why?").text
    drafted.send("And a third?")
    assert drafted.session.drafter is first


def other_ids():
    """Return a tokenizer in which two tokens have changed places."""
    tokenizer = byte_pairs()
    vocabulary = tokenizer.get_vocab()
    tokenizer.get_vocab = lambda: {**vocabulary, "!": vocabulary["#"], "#": vocabulary["!"]}
    return tokenizer


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(verify="full"), ValueError, "draft_model: got a model together with verify='full'"),
        (dict(speculative_tokens=None), ValueError, "draft_model: got a model without specul"),
        (dict(draft_model="gpt2"), TypeError, "draft_model: got a str, allowed is a Decoder"),
    ],
)
def test_refusals(decoder, options, error, message):
    given = dict(ALL, speculative_tokens=4, draft_model=decoder) | options
    with pytest.raises(error, match=message):
        decoder.start(ids_of(10), **given)


def test_other_vocabularies_are_refused():
    sizes = dict(vocab_size=len(byte_pairs()), num_hidden_layers=1)
    large, small = (
        Decoder.of(model_of("llama", **sizes), tokenizer)
        for tokenizer in (byte_pairs(), other_ids())
    )
    given = dict(ALL, speculative_tokens=4)
    none = Decoder.of(model_of("llama", num_hidden_layers=1))
    message = "a vocabulary of 101 tokens for a model with 2,000; different .* have tokenizers .* p"
    with pytest.raises(ValueError, match=message):
        large.start(ids_of(10), draft_model=none, **given)
    with pytest.raises(
        ValueError, match=r"in which the token '[!#]' has the id .* leave out draft"
    ):
        large.start(ids_of(10), draft_model=small, **given)
    ids = ids_of(10)
    small.tokenizer = None  # ids only
    assert tokens(large, ids, draft_model=small, **given) == tokens(large, ids, **ALL)


def test_padding_in_the_tokenizer_of_a_gguf_file_is_not_compared():
    count = len(byte_pairs())
    sizes = dict(num_hidden_layers=1)
    large, small, plain = (
        Decoder.of(model_of("llama", vocab_size=count + more, **sizes), tokenizer)
        for more, tokenizer in (
            (80, padded_byte_pairs(count + 80)),
            (16, padded_byte_pairs(count + 16)),
            (16, byte_pairs()),
        )
    )
    given = dict(ALL, speculative_tokens=4)
    want = tokens(large, ids_of(10), **ALL)
    for one in (small, plain):
        assert tokens(large, ids_of(10), draft_model=one, **given) == want
    plain.tokenizer = byte_pairs()
    plain.tokenizer.add_tokens(["[PAD1]"])  # no padding, which has its id in its name
    with pytest.raises(ValueError, match=r"in which the token '\[PAD1\]' has the id 2000, for"):
        large.start(ids_of(10), draft_model=plain, **given)


def test_vocabularies_are_compared_once(monkeypatch):
    """A comparison of large vocabularies takes longer than the first token."""
    sizes = dict(vocab_size=len(byte_pairs()), num_hidden_layers=1)
    large, small = (Decoder.of(model_of("llama", **sizes), byte_pairs()) for _ in range(2))
    calls, real = [], large.tokenizer.get_vocab
    monkeypatch.setattr(large.tokenizer, "get_vocab", lambda: calls.append(1) or real())
    for _ in range(3):
        large.start(ids_of(10), draft_model=small, speculative_tokens=2, **DENSE)
    assert len(calls) == 1
    small.tokenizer = other_ids()
    with pytest.raises(ValueError, match="in which the token"):
        large.start(ids_of(10), draft_model=small, speculative_tokens=2, **DENSE)


def test_an_index_that_the_draft_model_cannot_have_is_refused(decoder):
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_key_value_heads=4, head_dim=6)
    small = Decoder.of(model_of("llama", **sizes), WORDS)
    given = dict(speculative_tokens=2, draft_model=small)
    message = r"draft_model: got a model that cannot .* \(head_dim: got 6, allowed .* leave out"
    with pytest.raises(ValueError, match=message):
        decoder.start(ids_of(10), **given, **ALL)
    assert tokens(decoder, ids_of(10), **given, **DENSE) == tokens(decoder, ids_of(10), **DENSE)


def test_processes_that_share_heads_are_refused(decoder, monkeypatch):
    monkeypatch.setattr(Session, "ranks", 2)
    with pytest.raises(ValueError, match="draft_model: got a model in several processes"):
        decoder.start(ids_of(10), draft_model=decoder, speculative_tokens=2, **ALL)
