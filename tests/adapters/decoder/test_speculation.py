"""Speculated tokens are those of one token at a time, or of full attention where it verifies."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch

import kvindex_adapters.decoder.session as sessions
from kvindex.layer import AttentionLayer
from kvindex.layer.dense import _all_rows
from kvindex_adapters.common.speculation import Acceptance, PromptLookup
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.decoder.session import Session
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.decoder.test_decoder import Breaks, breaking
from tests.adapters.hf.generation.test_generation import Words
from tests.support.helpers import mostly_slow

SIZES = dict(sink=4, local_window=8, update_every=8, dense_below=0)
ALL = dict(index="exact", k=500, attach_options=SIZES)
FEW = dict(index="exact", k=3, attach_options=SIZES)
PARIS = dict(index="pariskv", k=10, attach_options=SIZES)
AUTO = dict(index="pariskv", k="auto", attach_options=SIZES | dict(error=1.0))
DENSE = dict(index=None)
COUNT = 16
WARM = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("llama", num_hidden_layers=2), Words())


def tokens(decoder, prompt, count=COUNT, **options):
    """Return the ids of the answer, or of each answer in a batch."""
    made = decoder.generate(prompt, max_new_tokens=count, chunk=16, **options)
    if isinstance(made, list):
        return [answer.answer_ids.tolist() for answer in made]
    return made.answer_ids.tolist()


def collect(made, got):
    """Append the tokens of an iterator to a list, also if it raises in between."""
    for token in made:
        got += token.tolist()


def knowing(patch, prompts, answers, wrong=None):
    """Let prompt lookup draft the known answers, with a wrong token at place `wrong`."""
    known = [[*prompt.tolist(), *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def draft(lookup, count):
        start = len(lookup)
        whose = [ids for ids in known if ids[:start] == lookup._ids[:start].tolist()]
        made = whose[0][start : start + count] if whose else []
        if wrong is not None and wrong < len(made):
            made[wrong] = (made[wrong] + 1) % 100
        return made

    patch.setattr(PromptLookup, "draft", draft)


def drafting(patch, prompt, answer, wrong=None):
    """Let the model draft the known answer, with a wrong token at place `wrong` of each round."""
    known, real, begun = [*prompt.tolist(), *answer], Session.draft, []
    keep = Session.keep

    def draft(session, token):
        logits = torch.full_like(real(session, token), -9.0)
        place = len(begun)
        begun.append(1)
        right = known[session.length] if session.length < len(known) else 0
        logits[:, (right + 1) % 100 if place == wrong else right] = 9.0
        return logits

    def kept(session, length):
        begun.clear()
        keep(session, length)

    patch.setattr(Session, "draft", draft)
    patch.setattr(Session, "keep", kept)


def rows_of(layer):
    """Return keys and values of all tokens in a layer, in the order of the tokens."""
    if not isinstance(layer, AttentionLayer):
        return layer.rows
    layer.settle()
    window = layer._window
    return _all_rows(layer.index, window.rows, len(layer.index), window.valid, window.sink)


def assert_rows_of_full_attention(decoder, session, ids):
    """Check that the session has the keys and values that full attention computes for `ids`."""
    other = decoder.session(index=None)
    decoder.read(ids[: session.length], other, chunk=16)
    for mine, theirs in zip(session._attentions, other._attentions, strict=True):
        one, two = rows_of(mine), rows_of(theirs)
        torch.testing.assert_close(one.keys, two.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(one.values, two.values, atol=2e-5, rtol=1e-4)


# Prompt lookup, verified with the index


@pytest.mark.parametrize(
    ("options", "sampling"),
    mostly_slow(
        [(o, s) for o in ("all", "dense", "paris", "auto") for s in ("greedy", "warm")],
        ("all", "warm"),
        ("paris", "greedy"),
        ("auto", "greedy"),
        ("dense", "greedy"),
    ),
)
@pytest.mark.parametrize("count", mostly_slow([1, 4, "auto"], 4))
def test_tokens_are_those_of_one_at_a_time(decoder, options, sampling, count):
    options = dict(all=ALL, dense=DENSE, paris=PARIS, auto=AUTO)[options]
    given = dict(options, sampling=dict(greedy=Sampling(), warm=WARM)[sampling])
    prompt = torch.cat([ids_of(30), ids_of(30)])
    want = tokens(decoder, prompt, **given)
    assert tokens(decoder, prompt, speculative_tokens=count, **given) == want


@pytest.mark.parametrize(
    ("sampling", "wrong"),
    mostly_slow(
        [(sampling, wrong) for sampling in (Sampling(), WARM) for wrong in (None, 0, 1, 2, 3)],
        *[(Sampling(), wrong) for wrong in (None, 1, 3)],
        (WARM, 2),
    ),
)
def test_every_pattern_at_every_phase_of_an_update(decoder, monkeypatch, wrong, sampling):
    for length in range(57, 65):  # windows are updated every 8 tokens
        prompt, given = ids_of(length), dict(ALL, sampling=sampling)
        want = tokens(decoder, prompt, **given)
        session = decoder.session(**ALL)
        with monkeypatch.context() as patch:
            knowing(patch, [prompt], [want], wrong)
            made = decoder.generate(
                prompt,
                session=session,
                speculative_tokens=4,
                sampling=sampling,
                max_new_tokens=COUNT,
                chunk=16,
            )
        assert made.answer_ids.tolist() == want
        seen = made.acceptance
        assert seen.rounds > 0
        if wrong is None:
            assert seen.accepted == seen.drafted == COUNT - 1 - seen.steps
        else:
            assert seen.accepted == COUNT - 1 - seen.steps <= wrong * seen.rounds + 3
        ids = torch.cat([prompt, torch.tensor(want)])
        assert session.ids.tolist() == ids.tolist()
        assert session.length == len(ids)
        assert_rows_of_full_attention(decoder, session, ids)


@pytest.mark.parametrize("options", [ALL, DENSE], ids=["exact", "dense"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_a_batch_advances_by_what_all_accept(decoder, monkeypatch, options, sampling):
    prompts, given = [ids_of(60), ids_of(47), ids_of(52)], dict(options, sampling=sampling)
    want = tokens(decoder, prompts, **given)
    assert tokens(decoder, prompts, speculative_tokens=3, **given) == want
    for wrong in (None, 1):
        with monkeypatch.context() as patch:
            knowing(patch, prompts, want, wrong)
            made = decoder.generate(
                prompts, max_new_tokens=COUNT, chunk=16, speculative_tokens=3, **given
            )
        assert [answer.answer_ids.tolist() for answer in made] == want
        steps = {None: 4, 1: 8}[wrong]
        assert made[0].acceptance.steps == steps


@pytest.mark.parametrize("place", mostly_slow([3, 4, 5, 6, 7], 4, 7))
def test_a_stop_token_inside_a_draft(decoder, monkeypatch, place):
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **ALL)
    stop = want[place]
    end = want.index(stop) + 1
    session = decoder.session(**ALL)
    with monkeypatch.context() as patch:
        knowing(patch, [prompt], [want])
        for verify in ("index", "full"):
            options = dict(ALL, stop=[stop], speculative_tokens=5, verify=verify)
            assert tokens(decoder, prompt, **options) == want[:end]
        options = dict(session=session, stop=[stop], speculative_tokens=5)
        assert tokens(decoder, prompt, **options) == want[:end]
    assert session.length == len(session.ids) == 60 + end
    question = ids_of(20, seed=3)
    longer = torch.cat([session.ids, question])
    assert tokens(decoder, question, session=session) == tokens(decoder, longer, **ALL)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_stop_tokens_at_different_places_of_a_batch(decoder, monkeypatch, sampling):
    prompts, given = [ids_of(60), ids_of(47)], dict(ALL, sampling=sampling)
    free = tokens(decoder, prompts, **given)
    stop = [free[0][6], free[1][13]]
    want = tokens(decoder, prompts, stop=stop, **given)
    assert len(want[0]) != len(want[1])
    with monkeypatch.context() as patch:
        knowing(patch, prompts, free)
        got = tokens(decoder, prompts, stop=stop, speculative_tokens=4, **given)
    assert got == want


def test_the_ids_of_the_session_are_drafts(decoder):
    """Text that was read before the question is copied, also after a fork."""
    session = decoder.session(**ALL)
    want = tokens(decoder, ids_of(60), **ALL)
    decoder.read(torch.cat([ids_of(60), torch.tensor(want)]), session, chunk=16)
    fork, one = session.fork(), session.fork()
    question = ids_of(60)[-8:]
    got = decoder.generate(
        question, session=fork, speculative_tokens=4, max_new_tokens=COUNT, chunk=16
    )
    assert got.answer_ids.tolist() == tokens(decoder, question, session=one)
    assert got.acceptance.drafted > 0
    assert fork.report().acceptance == got.acceptance
    assert session.report().acceptance is None


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("verify", ["index", "full"])
def test_the_limit_of_new_tokens(decoder, monkeypatch, limit, verify):
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **DENSE)
    with monkeypatch.context() as patch:
        knowing(patch, [prompt], [want])
        options = dict(ALL, speculative_tokens=4, verify=verify)
        assert tokens(decoder, prompt, limit, **options) == want[:limit]


# Drafts of the index, verified by full attention


@pytest.mark.parametrize(
    "options",
    mostly_slow([ALL, FEW, PARIS, AUTO], FEW, PARIS, AUTO),
    ids=["all", "few", "pariskv", "auto"],
)
@pytest.mark.parametrize("count", mostly_slow([1, 5, "auto"], 5))
def test_full_attention_verifies(decoder, options, count):
    for prompts in (ids_of(60), [ids_of(60), ids_of(41)]):
        want = tokens(decoder, prompts, **DENSE)
        got = tokens(decoder, prompts, speculative_tokens=count, verify="full", **options)
        assert got == want
    assert tokens(decoder, ids_of(60), **FEW) != tokens(decoder, ids_of(60), **DENSE)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_every_pattern_of_full_attention(decoder, monkeypatch, wrong):
    """No row reaches the index before it is verified, and rows are those of the verification."""
    sizes = dict(sink=2, local_window=0, update_every=4, dense_below=0)
    truncate = AttentionLayer.truncate

    def checking(layer, length):
        assert len(layer.index) <= length
        truncate(layer, length)

    for length in range(57, 61):  # windows are updated every 4 tokens
        prompt = ids_of(length)
        want = tokens(decoder, prompt, **DENSE)
        session = decoder.session(**{**FEW, "attach_options": sizes})
        with monkeypatch.context() as patch:
            drafting(patch, prompt, want, wrong)
            patch.setattr(AttentionLayer, "truncate", checking)
            options = dict(session=session, speculative_tokens=4, verify="full")
            made = decoder.generate(prompt, max_new_tokens=COUNT, chunk=16, **options)
        assert made.answer_ids.tolist() == want
        seen = made.acceptance
        assert seen.accepted == COUNT - 1 - seen.steps
        assert seen.steps == {None: 3, 0: 15, 1: 8, 2: 5, 3: 4}[wrong]
        ids = torch.cat([prompt, torch.tensor(want)])
        assert_rows_of_full_attention(decoder, session, ids)
        for layer in session._attentions:
            assert len(layer) - len(layer.index) < 4 + 1


def test_windows_shorter_than_a_draft(decoder):
    """Rows stay in the window until they are verified, even where none must stay there."""
    sizes = dict(sink=2, local_window=0, update_every=1, dense_below=0)
    options = dict(index="exact", k=3, attach_options=sizes)
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **DENSE)
    assert tokens(decoder, prompt, speculative_tokens=6, verify="full", **options) == want


def test_turns_that_full_attention_verifies(decoder):
    """The last token of an answer, and a prompt of one token, attend fully as well."""
    mine, theirs = decoder.session(**FEW), decoder.session(**DENSE)
    for prompt in (ids_of(60), ids_of(1, seed=7), ids_of(20, seed=3)):
        got = tokens(decoder, prompt, session=mine, speculative_tokens=4, verify="full")
        assert got == tokens(decoder, prompt, session=theirs)
    assert_rows_of_full_attention(decoder, mine, mine.ids)


def test_rows_in_a_lossy_codec_are_refused(decoder):
    options = dict(ALL, attach_options={**SIZES, "index_options": dict(row_codec="int8")})
    session = decoder.session(**options)
    decoder.read(ids_of(30), session, chunk=16)
    with pytest.raises(ValueError, match="verify: got 'full' with rows of"):
        tokens(decoder, ids_of(20), session=session, speculative_tokens=4, verify="full")
    assert session.length == 30
    assert len(tokens(decoder, ids_of(20), session=session, speculative_tokens=4)) == COUNT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(DENSE, speculative_tokens=2, verify="full"), "verify: got 'full' without an index"),
        (dict(ALL, verify="full"), "verify: got 'full' without speculative_tokens"),
        (dict(ALL, speculative_tokens=0), "speculative_tokens: got 0"),
        (dict(ALL, speculative_tokens=2, verify="both"), "verify: got 'both'"),
    ],
)
def test_refusals(decoder, options, message):
    with pytest.raises(ValueError, match=message):
        decoder.start(ids_of(10), **options)


# Exceptions


@pytest.mark.parametrize(
    ("verify", "calls"),
    [*(("index", calls) for calls in range(3)), *(("full", calls) for calls in (0, 3, 7, 8, 9))],
)
def test_an_exception_leaves_the_last_verified_token(decoder, monkeypatch, verify, calls):
    """`calls` runs of a layer's MLP succeed after 6 tokens; then the host is interrupted."""
    prompt = ids_of(60)
    options = {"index": DENSE, "full": FEW}[verify]
    want = tokens(decoder, prompt, **DENSE)
    run = decoder.start(
        prompt, max_new_tokens=COUNT, speculative_tokens=4, verify=verify, **options
    )
    got, session = [], run.session
    with monkeypatch.context() as patch:
        knowing(patch, [prompt], [want])
        made = run.tokens()
        while len(got) < 6:
            got += next(made).tolist()
        patch.setattr(sessions.layers, "gated", breaking(sessions.layers.gated, calls))
        with pytest.raises(KeyboardInterrupt):
            collect(made, got)
    assert got == want[: len(got)]
    assert session.length == 60 + len(got) - 1
    assert all(len(layer) == session.length for layer in session._attentions)
    assert session.token.tolist() == [[got[-1]]]
    while len(got) < COUNT:
        logits = session.step(torch.tensor(got[-1:]), full=verify == "full")
        got.append(int(logits.argmax()))
    assert got == want


@pytest.mark.parametrize("calls", range(3))
def test_an_exception_without_a_draft_leaves_the_last_token(decoder, monkeypatch, calls):
    prompt = ids_of(60)
    want = tokens(decoder, prompt, **DENSE)
    run = decoder.start(prompt, max_new_tokens=COUNT, speculative_tokens=4, graphs=False, **DENSE)
    got, session = [], run.session
    with monkeypatch.context() as patch:
        patch.setattr(PromptLookup, "draft", lambda lookup, count: [])
        made = run.tokens()
        while len(got) < 6:
            got += next(made).tolist()
        patch.setattr(sessions.layers, "gated", breaking(sessions.layers.gated, calls))
        with pytest.raises(KeyboardInterrupt):
            collect(made, got)
    assert all(len(layer) == session.length for layer in session._attentions)
    assert session.length == 60 + len(got) - 1
    assert session.token.tolist() == [[got[-1]]]
    while len(got) < COUNT:
        got.append(int(session.step(torch.tensor(got[-1:])).argmax()))
    assert got == want


def test_a_failed_update_leaves_the_verified_tokens(decoder, monkeypatch):
    """The rows of verified tokens stay in the window, and move when the next step runs."""
    prompt, fails = ids_of(60), [False]
    want = tokens(decoder, prompt, **DENSE)
    run = decoder.start(prompt, max_new_tokens=COUNT, speculative_tokens=4, verify="full", **ALL)
    session, got = run.session, []
    made = run.tokens()
    got += next(made).tolist()
    append = type(session._attentions[1].index).append

    def failing(index, *args, **options):
        if fails[0] and index is session._attentions[1].index:
            raise MemoryError("no memory")
        return append(index, *args, **options)

    monkeypatch.setattr(type(session._attentions[1].index), "append", failing)
    fails[0] = True
    with pytest.raises(MemoryError):
        collect(made, got)
    fails[0] = False
    start = session.length
    assert all(len(layer) == start for layer in session._attentions)
    ids = torch.cat([prompt, torch.tensor(want)])
    for place in range(start - 60, COUNT - 1):
        logits = session.step(ids[60 + place : 61 + place], full=True)
        assert int(logits.argmax()) == want[place + 1]
    with session.speculating(2):  # no layer is still speculating
        pass


def test_a_call_that_fails_leaves_the_session(decoder):
    session = decoder.session(**FEW)
    decoder.read(ids_of(60), session, chunk=16)
    before, question = session.report(), ids_of(20, seed=3)
    given = dict(session=session, speculative_tokens=3, verify="full")
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(question, streamer=Breaks(), chunk=16, **given)
    assert session.report() == before
    longer = torch.cat([ids_of(60), question])
    assert tokens(decoder, question, **given) == tokens(decoder, longer, **DENSE)


# Streaming, reports, and the description


def test_tokens_are_streamed_one_by_one(decoder, monkeypatch):
    prompt, progress = ids_of(60), []
    want = tokens(decoder, prompt, **ALL)
    with monkeypatch.context() as patch:
        knowing(patch, [prompt], [want])
        options = dict(ALL, speculative_tokens=4, max_new_tokens=COUNT)
        got = [token.tolist() for token in decoder.stream(prompt, **options)]
        decoder.generate(prompt, on_progress=lambda *one: progress.append(one), **options)
    assert got == [[token] for token in want]
    assert [one for one in progress if one[0] == "decode"] == [
        ("decode", count, COUNT) for count in range(1, COUNT + 1)
    ]


def test_the_report_and_the_description(decoder):
    options = dict(ALL, speculative_tokens=4, max_new_tokens=COUNT)
    prompt = torch.cat([ids_of(30), ids_of(30)])
    made = decoder.generate(prompt, **options)
    assert made.report.acceptance == made.acceptance
    assert isinstance(made.acceptance, Acceptance)
    assert made.acceptance.steps + made.acceptance.accepted == COUNT - 1
    assert f"; {made.acceptance}" in str(made.report)
    dense = decoder.generate(prompt, **{**options, **DENSE, "attach_options": None})
    assert dense.report is None
    with redirect_stdout(io.StringIO()) as printed:
        print(dense)
    assert f"Full attention; {dense.acceptance}." in printed.getvalue()
    text = decoder.explain(speculative_tokens="auto", verify="full")
    assert "speculation: a number by the acceptance seen tokens drafted with the index" in text
    assert decoder.generate(prompt, max_new_tokens=2, **ALL).acceptance is None


def test_the_bytes_of_a_verification_are_known_before_it_starts(decoder):
    """They are those that all rows of the prompt have in the indexes of both layers."""
    prompts = [ids_of(600), ids_of(500)]
    run = decoder.start(prompts, speculative_tokens=4, verify="full", **ALL)
    told = run.explain()
    session, made = run.session, run.tokens()
    assert session.length == 0
    next(made)
    made.close()
    rows = [rows_of(layer) for layer in session._attentions]
    stored = sum(part.nbytes for row in rows for part in (row.keys, row.values))
    each = stored / session.length / 2
    assert f"of all tokens: {each / 2**10:,.1f} KiB for a token, " in told
    assert told.endswith(f"{1200 * each / 2**30:.2f} GiB for 2 × 600")
    assert "each verification" not in decoder.explain(speculative_tokens=4)
