"""A decode step as one graph gives the same tokens as without a graph, for any calls in between.

On a CPU, graphs are recorded functions (`tests/cuda/graphs.py`), and kernels are emulated.
"""

import gc
import weakref
from contextlib import contextmanager
from itertools import cycle, product

import pytest
import torch

from kvindex.core import graphs as capturing
from kvindex.layer import AttentionLayer
from kvindex.layer.updates import Updates
from kvindex_adapters.common.speculation import DraftLength, PromptLookup
from kvindex_adapters.decoder import Decoder, Sampling, dense
from kvindex_adapters.decoder import graph as graph_file
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.decoder.speculation import Speculator
from kvindex_adapters.llama.fused import Fused
from kvindex_cuda.pariskv.executor import ParisKVExecutor
from kvindex_cuda.pariskv.steps import workspace
from tests.adapters.decoder.families import ids_of, model_of, padded, perturbed
from tests.adapters.hf.generation.test_generation import Words
from tests.cuda.pages import reads_pages  # noqa: F401  # a fixture
from tests.support.fused import on_a_cpu
from tests.support.helpers import mostly_slow, slow

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
EAGER = 1 + graph_file.WARM
"""Decode steps after the first token that run without a graph: one ends the prompt, others warm
up."""


def decoder_of(device, name="llama", dtype=torch.float32, layers=1):
    """Make a decoder with head sizes for which other tests compile kernels as well."""
    sizes = dict(num_hidden_layers=layers, head_dim=64)
    if name == "qwen3":
        sizes["layer_types"] = ["full_attention"] * layers
    return Decoder.of(model_of(name, **sizes).to(device, dtype), Words())


def near(device):
    """Make a decoder that often chooses the same tokens as `decoder_of(device, layers=2)`."""
    model = model_of("llama", num_hidden_layers=2, head_dim=64)
    return Decoder.of(perturbed(model).to(device))


def given(device, count=30, **options):
    """Return options of `generate` with an index on kernels."""
    index_options = {"backend": "cuda"} if device == "cpu" else {}
    regions = {**REGIONS, **options.pop("regions", {})}
    attach = dict(index_options={**index_options, **options.pop("index_options", {})}, **regions)
    if options.get("index", "pariskv") is None:
        attach = None
    return dict(k=10, max_new_tokens=count, attach_options=attach, **options)


@contextmanager
def recorded_calls(kind, name):
    """Context manager that yields a list, to which each call of a method appends None."""
    calls, method = [], vars(kind)[name]

    def called(*given, **options):
        calls.append(None)
        return method(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, called)
        yield calls


def both(decoder, prompt, **options):
    """Return an answer with graphs, and one without."""
    return [decoder.generate(prompt, graphs=on, **options) for on in (True, False)]


def test_tokens_and_report_are_those_of_steps(device, graphs):
    """The answer includes updates of both layers, which begin at different tokens."""
    mine, theirs = both(decoder_of(device, layers=2), ids_of(60), **given(device, 20))
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert mine.report == theirs.report
    assert (graphs.made, graphs.replays) == (1, 19 - EAGER)


def test_as_many_rows_as_the_error_asks_for(device, graphs):
    options = given(device, 12, regions=dict(error=0.5)) | dict(k="auto")
    mine, theirs = both(decoder_of(device, layers=2), ids_of(200), **options)
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert mine.report == theirs.report
    found = mine.report.rows_found
    assert 16 <= min(found.by_layer) <= found.mean <= found.p99 < 180
    assert (graphs.made, graphs.replays) == (1, 11 - EAGER)


@pytest.mark.parametrize("verify", mostly_slow(["index", "full"], "index"))
def test_steps_without_a_draft_are_replays(device, graphs, monkeypatch, verify):
    """Steps of several tokens have a graph of their own; that of single tokens stays valid."""
    decoder, prompt = decoder_of(device), ids_of(60)
    regions = dict(update_every=40)  # a window update may come a few tokens later with drafts
    plain = given(device, 20, regions=regions)
    want = decoder.generate(prompt, graphs=False, **plain).answer_ids.tolist()

    def draft(lookup, count):
        start = len(lookup) - 60
        return want[start : start + count] if start in (6, 14) else []

    monkeypatch.setattr(PromptLookup, "draft", draft)
    got = decoder.generate(prompt, speculative_tokens=3, verify=verify, **plain)
    if verify == "index":
        assert got.answer_ids.tolist() == want
        assert (got.acceptance.rounds, got.acceptance.accepted) == (2, 6)
        # The first round compiles the kernels, and the second is the replay of another graph. The
        # window's buffer grows before the first round, so single tokens need a second graph.
        assert (graphs.made, graphs.replays) == (3, 19 - 2 * 4 - EAGER + 1)
    else:
        full = decoder.generate(prompt, index=None, max_new_tokens=20, graphs=False)
        assert torch.equal(got.answer_ids, full.answer_ids)


@pytest.mark.usefixtures("reads_pages")
def test_the_next_draft_is_prepared_while_full_attention_verifies(device, graphs, monkeypatch):
    """Unless tokens have moved into the index, the host then does little before it launches."""
    prepare, at_once = Session.prepare_replay, []

    def counted(self, tokens=1):
        with recorded_calls(AttentionLayer, "prepare_next") as calls:
            reads = prepare(self, tokens)
        if tokens == 1:
            at_once.append(not calls)
        return reads

    monkeypatch.setattr(Session, "prepare_replay", counted)
    decoder, plain = decoder_of(device, layers=2), given(device, 44, regions=dict(update_every=64))
    got = decoder.generate(ids_of(60), speculative_tokens=4, verify="full", **plain)
    assert sum(at_once) >= got.acceptance.rounds - 6  # the first rounds have no graphs yet


@pytest.mark.usefixtures("reads_pages")
@pytest.mark.parametrize("tokens", [4, slow("auto")])
def test_drafts_of_the_index_and_their_verification_are_replays(
    device, graphs, tokens, monkeypatch
):
    monkeypatch.setattr(Session, "draft_cost", lambda self: 0.05)  # so that "auto" drafts
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 44, regions=dict(update_every=20))
    full = decoder.generate(prompt, index=None, max_new_tokens=44, graphs=False)
    with (
        recorded_calls(Session, "draft") as drafted,
        recorded_calls(Session, "score") as scored,
        recorded_calls(Session, "captured_score") as captured,
    ):
        got = decoder.generate(prompt, speculative_tokens=tokens, verify="full", **plain)
    assert torch.equal(got.answer_ids, full.answer_ids)
    rounds = got.acceptance.rounds
    assert len(drafted) < got.acceptance.drafted / 2  # the others are replays
    assert len(scored) <= 2  # before the first decode step
    assert len(captured) < rounds / 2  # the others are replays
    assert graphs.replays > rounds + got.acceptance.drafted / 2


@pytest.mark.usefixtures("reads_pages")
def test_sampled_answers_that_full_attention_verifies(device, graphs):
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 24, regions=dict(update_every=20)) | dict(sampling=Sampling(0.8, seed=3))
    mine, theirs = (
        decoder.generate(prompt, speculative_tokens=3, verify="full", graphs=on, **plain)
        for on in (True, False)
    )
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert mine.acceptance == theirs.acceptance
    assert graphs.replays >= mine.acceptance.rounds - 3


@pytest.mark.usefixtures("reads_pages")
@pytest.mark.parametrize("calls", [1, 3, 9])
def test_an_interrupted_verification_leaves_the_last_verified_token(
    device, graphs, monkeypatch, calls
):
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 24, regions=dict(update_every=20))
    want = decoder.generate(prompt, index=None, max_new_tokens=24, graphs=False).answer_ids
    count, left = Session.count_replay, [calls]

    def interrupted(self, kept=1, of=1, *, full=None):
        if of > 1:
            left[0] -= 1
            if not left[0]:
                count(self, kept, of, full=full)
                raise KeyboardInterrupt
        count(self, kept, of, full=full)

    monkeypatch.setattr(Session, "count_replay", interrupted)
    run = decoder.start(prompt, speculative_tokens=3, verify="full", **plain)
    got = []
    with pytest.raises(KeyboardInterrupt):
        got.extend(int(token) for token in run.tokens())
    assert got == want[: len(got)].tolist()
    session = run.session
    assert session.length == 60 + len(got) - 1
    logits = [session.step(want[place : place + 1], full=True) for place in range(len(got) - 1, 20)]
    assert [int(one.argmax()) for one in logits] == want[len(got) : 21].tolist()


DRAFTS = {"first wrong": 0, "some right": 2, "all right": 3}


@pytest.mark.parametrize("sampling", [None, *mostly_slow([Sampling(0.8, seed=3)])])
@pytest.mark.parametrize("right", DRAFTS.values(), ids=DRAFTS)
def test_drafts_in_a_graph_give_the_tokens_of_single_steps(
    device, graphs, monkeypatch, right, sampling
):
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    more = {} if sampling is None else dict(sampling=sampling)
    plain = given(device, 24, regions=dict(update_every=40)) | more
    want = decoder.generate(prompt, graphs=False, **plain).answer_ids.tolist()

    def draft(lookup, count):
        start = len(lookup) - 60
        guess = want[start : start + count]
        return [token if i < right else token ^ 1 for i, token in enumerate(guess)]

    monkeypatch.setattr(PromptLookup, "draft", draft)
    got = decoder.generate(prompt, speculative_tokens=3, **plain)
    assert got.answer_ids.tolist() == want
    # The first round runs op by op, and each layer makes a graph for its last tokens. The second
    # round compiles the kernels for several tokens.
    assert graphs.made == 2 + 1
    assert graphs.replays >= got.acceptance.rounds - 2
    assert got.acceptance.accepted >= right * (got.acceptance.rounds - 1)


def test_drafts_with_as_many_rows_as_the_error_asks_for(device, graphs, monkeypatch):
    decoder, prompt = decoder_of(device), ids_of(200)
    plain = given(device, 16, regions=dict(error=0.5, update_every=40)) | dict(k="auto")
    want = decoder.generate(prompt, graphs=False, **plain).answer_ids.tolist()
    drafted(monkeypatch, (200, want))
    run = decoder.start(prompt, speculative_tokens=3, **plain)
    assert [int(token) for token in run.tokens()] == want
    assert run.explain().endswith("; a step of several tokens is one graph")
    assert graphs.replays >= run.session.acceptance.rounds - 2
    found = run.session.report().rows_found
    assert 16 <= found.mean <= found.p99 < 180


def test_forks_answer_with_other_numbers_of_rows(device, graphs):
    """A prompt that was read once is answered with other limits, a number and full attention."""
    decoder, prompt = decoder_of(device, layers=2), ids_of(200)
    plain = given(device, 12, regions=dict(error=0.5)) | dict(k="auto")
    kept = {name: plain[name] for name in ("k", "attach_options")}
    session, count = decoder.session(**kept), dict(max_new_tokens=12)
    decoder.read(prompt[:-2], session)
    for rows in (dict(k="auto", error=0.5), dict(k="auto", error=0.2), dict(k=20)):
        alone = dict(k=rows["k"], attach_options=kept["attach_options"] | {"error": None} | rows)
        alone["attach_options"].pop("k")
        other, before = decoder.session(**alone, graphs=False), graphs.replays
        decoder.read(prompt[:-2], other)
        want = decoder.generate(prompt[-2:], session=other, graphs=False, **count)
        assert graphs.replays == before
        made = decoder.generate(prompt[-2:], session=session.fork(**rows), **count)
        assert made.answer_ids.tolist() == want.answer_ids.tolist()
        assert graphs.replays >= before + 11 - EAGER
    fork = session.fork()
    with fork.fully():
        made = decoder.generate(prompt[-2:], session=fork, **count)
    want = decoder.generate(prompt, index=None, **count)
    assert made.answer_ids.tolist() == want.answer_ids.tolist()
    assert fork.report().steps == 0


PROMPTS = 60, 47, 52
"""Lengths of the prompts of a padded batch."""


@pytest.mark.parametrize("sampling", [None, *mostly_slow([Sampling(0.8, seed=3)])])
@pytest.mark.parametrize("stopped", mostly_slow([False, True], True))
def test_drafts_of_a_batch_in_a_graph(device, graphs, monkeypatch, sampling, stopped):
    """Sequences are padded, accept different numbers of drafts, and may end at different times."""
    decoder, prompts = decoder_of(device, layers=2), [ids_of(count) for count in PROMPTS]
    more = {} if sampling is None else dict(sampling=sampling)
    plain = given(device, 24, regions=dict(update_every=40)) | ALL_ROWS | more
    free = [one.answer_ids.tolist() for one in decoder.generate(prompts, graphs=False, **plain)]
    plain |= dict(stop=[free[0][9], free[2][17]]) if stopped else {}
    want = [one.answer_ids.tolist() for one in decoder.generate(prompts, graphs=False, **plain)]

    def draft(lookup, count):
        ids = lookup._ids[: len(lookup)].tolist()
        for number, (length, answer) in enumerate(zip(PROMPTS, free, strict=True)):
            if ids[:length] == prompts[number].tolist():
                start = len(ids) - length
                guess = answer[start : start + count]
                right = (start + number) % 4  # another number of right tokens for each sequence
                return [token if i < right else (token + 1) % 80 for i, token in enumerate(guess)]
        return []

    monkeypatch.setattr(PromptLookup, "draft", draft)
    with recorded_calls(Session, "score") as scored:
        got = decoder.generate(prompts, speculative_tokens=3, **plain)
    assert [one.answer_ids.tolist() for one in got] == want
    assert got[0].acceptance.accepted
    assert len(scored) <= 1  # before the first decode step
    assert graphs.replays >= got[0].acceptance.rounds - 2
    if sampling is None and not stopped:  # each sequence keeps the drafts that it accepts
        seen = got[0].acceptance
        slow = decoder.generate(prompts, speculative_tokens=3, graphs=False, **plain)
        assert seen.steps < slow[0].acceptance.steps
        assert seen.rate > 1.5 * slow[0].acceptance.rate


@pytest.mark.usefixtures("reads_pages")
@pytest.mark.parametrize("calls", mostly_slow([1, 4, 9], 4))
def test_an_interrupted_step_of_a_batch_leaves_the_last_verified_tokens(
    device, graphs, monkeypatch, calls
):
    """Sequences then have different numbers of tokens, and go on from their own."""
    decoder, prompts = decoder_of(device, layers=2), [ids_of(count) for count in PROMPTS]
    plain = given(device, 24, regions=dict(update_every=20))
    full = decoder.generate(prompts, index=None, max_new_tokens=36, graphs=False)
    count, left = Session.count_replay, [calls]

    def interrupted(self, kept=1, of=1, *, full=None):
        if of > 1:
            left[0] -= 1
            if not left[0]:
                self._attentions[0].count_replay(kept, of, full=full)
                raise KeyboardInterrupt
        count(self, kept, of, full=full)

    monkeypatch.setattr(Session, "count_replay", interrupted)
    run = decoder.start(prompts, speculative_tokens=3, verify="full", **plain)
    with pytest.raises(KeyboardInterrupt):
        list(run.tokens())
    session = run.session
    for _ in range(8):
        places = (session._position[:, 0].cpu() - torch.tensor(PROMPTS)).tolist()
        wants = [one.answer_ids.tolist() for one in full]
        now = [want[place] for want, place in zip(wants, places, strict=True)]
        assert session.token[:, 0].tolist() == now
        session.token.copy_(session.step(session.token[:, 0], full=True).argmax(-1)[:, None])


@pytest.mark.usefixtures("reads_pages")
@pytest.mark.parametrize("sampling", [None, *mostly_slow([Sampling(0.8, seed=3)])])
def test_a_batch_that_full_attention_verifies_in_a_graph(device, graphs, sampling):
    decoder, prompts = decoder_of(device, layers=2), [ids_of(count) for count in PROMPTS]
    more = {} if sampling is None else dict(sampling=sampling)
    plain = given(device, 24, regions=dict(update_every=20)) | more
    if sampling is None:
        want = decoder.generate(prompts, index=None, max_new_tokens=24, graphs=False)
    else:
        options = dict(plain, speculative_tokens=3, verify="full", graphs=False)
        want = decoder.generate(prompts, **options)
    with recorded_calls(Session, "score") as scored:
        got = decoder.generate(prompts, speculative_tokens=3, verify="full", **plain)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.answer_ids.tolist() == theirs.answer_ids.tolist()
    assert len(scored) <= 2  # before the first decode step
    assert graphs.replays > got[0].acceptance.rounds - 3


@pytest.mark.usefixtures("reads_pages")
def test_a_run_says_how_steps_of_several_tokens_run(device, graphs):
    decoder, plain = decoder_of(device), given(device, 8)
    said = {}
    for name, more in {
        "few": dict(speculative_tokens=3),
        "full": dict(speculative_tokens=3, verify="full"),
    }.items():
        run = decoder.start(ids_of(60), **plain, **more)
        list(run.tokens())
        said[name] = run.explain().rpartition("\n")[2]
    assert said["few"].endswith("; a step of several tokens is one graph")
    assert "; a step of several tokens is one graph; each verification reads" in said["full"]
    dense = decoder.start(ids_of(60), index=None, max_new_tokens=4, speculative_tokens=3)
    list(dense.tokens())
    assert "(layer 0: layer: got full attention, which runs a step of 4" in dense.explain()


@pytest.mark.usefixtures("reads_pages")
def test_explaining_a_run_changes_nothing(device, graphs, monkeypatch):
    """Another thread may call it while drafts are verified."""
    decoder, plain = decoder_of(device), given(device, 14)
    run = decoder.start(ids_of(60), speculative_tokens=3, verify="full", **plain)
    observe, said = Session.observe, []

    def explaining(self, ids):
        window = self._indexed()[0]._window
        held = len(window._window)
        if held < len(window):  # a graph has appended the newest tokens
            with recorded_calls(AttentionLayer, "attending_fully") as entered:
                said.append(run.explain())
            assert not entered
            assert held == len(window._window)
        observe(self, ids)

    monkeypatch.setattr(Session, "observe", explaining)
    list(run.tokens())
    assert said
    assert all("; a step of several tokens is one graph" in one for one in said)


def test_an_interrupted_draft_leaves_the_session_as_it_was(device, graphs, monkeypatch):
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 16, regions=dict(update_every=40))
    want = decoder.generate(prompt, graphs=False, **plain).answer_ids.tolist()
    monkeypatch.setattr(
        PromptLookup, "draft", lambda lookup, count: want[len(lookup) - 60 :][:count]
    )
    count, fails = Session.count_replay, iter([False, True, *[False] * 20])

    def failing(self, kept=1, of=1, *, full=None):
        if of > 1 and next(fails):
            self._attentions[0].count_replay(kept, of, full=full)
            raise KeyboardInterrupt
        count(self, kept, of, full=full)

    monkeypatch.setattr(Session, "count_replay", failing)
    run, seen = decoder.start(prompt, speculative_tokens=3, **plain), []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(int(token) for token in run.tokens())
    session = run.session
    assert seen == want[: len(seen)]
    assert session.length == 60 + len(seen) - 1
    assert session.token.item() == seen[-1]
    for token in want[len(seen) :]:
        assert int(session.step(session.token[:, 0]).argmax()) == token
        session.token.fill_(token)


@pytest.fixture
def speculators(monkeypatch):
    """List of the `Speculator` objects that are made."""
    made, begin = [], Speculator.__init__

    def kept(self, *given, **options):
        begin(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(Speculator, "__init__", kept)
    return made


@pytest.mark.usefixtures("reads_pages")
def test_rounds_go_on_after_a_failed_update(device, graphs, monkeypatch, speculators):
    """The preparation of the next draft is then outdated, and must be repeated."""
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 60, regions=dict(update_every=20))
    want = decoder.generate(prompt, index=None, max_new_tokens=60, graphs=False).answer_ids
    run = decoder.start(prompt, speculative_tokens=3, verify="full", **plain)
    made, update, fails = run.tokens(), Updates.update, [False]

    def failing(self, decoded=0):
        if fails[0] and self is run.session._attentions[1]._updates:
            raise MemoryError("no memory")
        return update(self, decoded)

    monkeypatch.setattr(Updates, "update", failing)
    for _ in range(26):
        next(made)
    fails[0] = True
    with pytest.raises(MemoryError):
        list(made)
    fails[0] = False
    start = run.session.length - 60
    found = [int(run.session.token)]
    while len(found) < 16:
        found += [int(token) for token in speculators[0].next(30, {0}, set())]
    assert found == want[start : start + len(found)].tolist()


@pytest.mark.usefixtures("reads_pages")
def test_a_layer_that_is_due_twice_moves_once(device, graphs, speculators):
    decoder, plain = decoder_of(device, layers=2), given(device, 60)
    run = decoder.start(ids_of(60), speculative_tokens=3, verify="full", **plain)
    made = run.tokens()
    for _ in range(26):
        next(made)
    indexed = [len(layer.index) for layer in run.session._attentions]
    with run.session.speculating(4):
        for _ in range(12):
            speculators[0]._draft()
    for layer, before in zip(run.session._attentions, indexed, strict=True):
        layer.settle()
        assert len(layer.index) > before


def test_a_fork_inside_a_block_moves_tokens(device, graphs):
    decoder, plain = decoder_of(device, layers=2), given(device, 20)
    session = decoder.session(k=10, attach_options=plain["attach_options"])
    decoder.read(ids_of(60), session)
    with session.speculating(4):
        other = session.fork()
    decoder.generate(ids_of(3), session=other, max_new_tokens=60)
    assert all(len(layer.index) > 90 for layer in other._attentions)


@pytest.mark.usefixtures("reads_pages")
def test_drafts_inside_fully_are_no_searches(device, graphs, monkeypatch):
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 24, regions=dict(update_every=40))
    want = decoder.generate(prompt, index=None, max_new_tokens=24, graphs=False).answer_ids.tolist()
    drafted(monkeypatch, (60, want))
    session = decoder.session(k=10, attach_options=plain["attach_options"])
    with session.fully():
        made = decoder.generate(prompt, session=session, max_new_tokens=24, speculative_tokens=3)
    assert made.answer_ids.tolist() == want
    assert made.acceptance.accepted > 10
    assert session.report().steps == 0


def drafted(monkeypatch, *answers, right=True):
    """Draft the given answers `(prompt length, tokens)`, or other tokens."""

    def draft(lookup, count):
        ids = lookup._ids[: len(lookup)].tolist()
        for start, tokens in answers:
            some = ids[start:]
            if len(some) and some == tokens[: len(some)]:
                guess = tokens[len(some) :][:count]
                return guess if right else [(token + 1) % 80 for token in guess]
        return []

    monkeypatch.setattr(PromptLookup, "draft", draft)


class Interrupts:
    """A streamer that runs a function after a number of calls."""

    def __init__(self, after, work):
        self._left, self._work = after, work

    def put(self, ids):
        self._left -= 1
        if not self._left:
            self._work()

    def end(self):
        pass


def _stop():
    raise KeyboardInterrupt


ALL_ROWS = dict(k=300)
"""So many rows that the time of a window update does not change an answer."""


def opened(device):
    """Return a decoder, a function that opens a session, and options of an answer."""
    decoder = decoder_of(device, layers=2)
    plain = given(device, 24, regions=dict(update_every=40)) | ALL_ROWS
    own = {name: plain.pop(name) for name in ("k", "attach_options")}
    return decoder, lambda: decoder.session(**own), plain


def test_an_answer_after_an_interrupted_one(device, graphs, monkeypatch):
    """The interrupt comes while the next step of several tokens is already prepared."""
    decoder, open_session, plain = opened(device)
    prompts = [ids_of(60), ids_of(61)]
    wants = [
        decoder.generate(one, session=open_session(), graphs=False, **plain).answer_ids.tolist()
        for one in prompts
    ]
    drafted(monkeypatch, *((len(one), want) for one, want in zip(prompts, wants, strict=True)))
    session, fast = open_session(), dict(speculative_tokens=3, **plain)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompts[0], session=session, streamer=Interrupts(16, _stop), **fast)
    assert graphs.replays
    assert session.length == 0
    assert decoder.generate(prompts[1], session=session, **fast).answer_ids.tolist() == wants[1]


@pytest.mark.parametrize("call", mostly_slow(["fork", "save"], "fork"))
def test_a_fork_and_a_saved_folder_during_an_answer(device, graphs, monkeypatch, tmp_path, call):
    """Both finish a pending append, after which a prepared step is no longer valid."""
    decoder, open_session, plain = opened(device)
    session, prompt = open_session(), ids_of(60)
    plain = dict(plain, max_new_tokens=60)
    want = decoder.generate(prompt, session=open_session(), graphs=False, **plain).answer_ids
    drafted(monkeypatch, (60, want.tolist()), right=False)  # a step keeps one token
    work = session.fork if call == "fork" else lambda: session.save(tmp_path / "saved")

    class Pending:
        def put(self, ids):
            for number, layer in enumerate(session._attentions):
                prepared = [ready[number] for ready in session._ready.values()]
                if layer._updates.pending and any(prepared) and not done:
                    done.append(work())

        def end(self):
            pass

    done = []
    fast = dict(speculative_tokens=3, streamer=Pending(), **plain)
    got = decoder.generate(prompt, session=session, **fast)
    assert done
    assert got.answer_ids.tolist() == want.tolist()


@pytest.mark.parametrize("tokens", [15, 16])
def test_steps_with_more_tokens_than_the_kernels_take_use_products_of_torch(
    device, graphs, monkeypatch, tokens
):
    if device == "cpu":
        on_a_cpu(monkeypatch)
        monkeypatch.setattr(Decoder, "_fused_for", lambda self, *_: Fused(self.weights))
    decoder, prompt = decoder_of(device, layers=2), ids_of(60)
    plain = given(device, 70, regions=dict(update_every=40)) | ALL_ROWS
    want = decoder.generate(prompt, graphs=False, **plain).answer_ids.tolist()
    drafted(monkeypatch, (60, want))
    batches, forward = [], Fused.forward

    def counted(self, ids, *given):
        batches.append(len(ids))
        return forward(self, ids, *given)

    monkeypatch.setattr(Fused, "forward", counted)
    run = decoder.start(prompt, speculative_tokens=tokens, **plain)
    assert [int(token) for token in run.tokens()] == want
    assert "a step of several tokens is one graph" in run.explain()
    assert (max(batches) == 16) == (tokens == 15)


@pytest.mark.slow
def test_a_run_says_whether_its_next_token_is_a_graph(device, graphs):
    run = decoder_of(device, layers=2).start(ids_of(60), **given(device, 8))
    assert "\ndecode step: op by op (layer 0: tokens: got 0, too few for a step" in run.explain()
    list(run.tokens())
    assert graphs.replays
    assert (
        "\ndecode step: one graph\nattention: full in 0 layers, with an index in 2\n"
        in run.explain()
    )
    assert run.explain().endswith(run.session.indexes()[0].explain())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama, biases, tied"])
def test_half_precision_and_other_families(device, graphs, name):
    decoder = decoder_of(device, name, torch.bfloat16)
    mine, theirs = both(decoder, ids_of(60), **given(device, 10))
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert graphs.replays == 9 - EAGER


def test_full_attention_past_the_places_that_it_reads(device, graphs, monkeypatch):
    """Another graph is captured, unless kernels read the number of tokens on the device."""
    monkeypatch.setattr(dense, "STEP", 32)
    decoder = decoder_of(device)
    mine, theirs = both(decoder, ids_of(60), index=None, max_new_tokens=12)
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert (graphs.made, graphs.replays) == (2 if device == "cpu" else 1, 11 - graph_file.WARM)


@pytest.mark.slow
def test_layers_without_an_index_beside_those_with_one(device, graphs):
    options = given(device, 14, regions=dict(dense_layers=(1,)))
    mine, theirs = both(decoder_of(device, layers=2), ids_of(60), **options)
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert mine.report == theirs.report
    assert graphs.made == 1


@pytest.mark.parametrize("index", [None, slow("pariskv")])
def test_prompts_of_unequal_lengths(device, graphs, index):
    prompts, options = [ids_of(60), ids_of(33)], given(device, 14, index=index)
    pairs = zip(*both(decoder_of(device), prompts, **options), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert graphs.made == 1


@pytest.mark.parametrize(
    ("index", "sampling"),
    mostly_slow(product([None, "pariskv"], [dict(top_k=20, top_p=0.9), {}]), (None, {})),
    ids=str,
)
def test_a_seed_gives_the_tokens_that_it_gives_without_graphs(device, graphs, index, sampling):
    decoder, drawn = decoder_of(device), []
    for seed, captured in ((3, True), (3, False), (3, True), (4, True)):
        how = Sampling(temperature=0.8, seed=seed, **sampling)
        options = given(device, 10, index=index, sampling=how)
        answer = decoder.generate(ids_of(60), graphs=captured, **options)
        drawn.append(answer.answer_ids.tolist())
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    assert graphs.made == 3


def test_a_stop_token_is_seen_late_and_what_comes_after_is_cut(device, graphs):
    decoder, options = decoder_of(device), given(device, 13)
    whole = decoder.generate(ids_of(60), **options).answer_ids.tolist()
    end = whole[9]
    cut = decoder.generate(ids_of(60), stop={end}, **options)
    assert cut.answer_ids.tolist() == whole[: whole.index(end) + 1]
    assert len(list(decoder.stream(ids_of(60), stop={end}, **options))) == len(cut.answer_ids)
    computed = cut.report.steps - len(cut.answer_ids) + 1
    assert 0 < computed <= graph_file.AHEAD


@pytest.mark.slow
def test_a_session_goes_on_without_tokens_that_were_launched_ahead(device, graphs):
    decoder, options, made = decoder_of(device), given(device, 13), []
    kept = {name: options[name] for name in ("k", "attach_options")}
    end = decoder.generate(ids_of(60), **options).answer_ids.tolist()[9]
    for captured in (True, False):
        session = decoder.session(**kept)
        more = dict(graphs=captured, stop={end}, max_new_tokens=13)
        first = decoder.generate(ids_of(60), session=session, **more)
        assert session.length == 60 + len(first.answer_ids) == len(session.ids)
        forks = [session.fork(), session]
        second = [decoder.generate(ids_of(20, seed=3), session=one, **more) for one in forks]
        made.append([one.answer_ids.tolist() for one in (first, *second)])
    assert made[0] == made[1]
    assert made[0][1] == made[0][2]


@pytest.mark.slow
def test_a_second_prompt_and_two_models_in_turn(device, graphs):
    decoders, options = [decoder_of(device), decoder_of(device, "qwen3")], given(device, 10)
    want = [one.generate(ids_of(60), graphs=False, **options).answer_ids.cpu() for one in decoders]
    runs = [one.stream(ids_of(60), **options) for one in (*decoders, decoders[0])]
    made = [torch.cat(tokens) for tokens in zip(*zip(*runs, strict=True), strict=True)]
    for tokens, answer in zip(made, (*want, want[0]), strict=True):
        assert torch.equal(tokens, answer)
    other = [one.answer_ids for one in both(decoders[0], ids_of(45), **options)]
    assert torch.equal(*other)


FAILS = {"an update": (Updates, "update_if_due"), "a replay": (Session, "count_replay")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["a replay", "an update", "the consumer"],
)
def test_after_an_exception_the_next_prompt_is_as_ever(device, graphs, monkeypatch, where):
    decoder, options = decoder_of(device, layers=2), given(device, 16)
    want = decoder.generate(ids_of(60), graphs=False, **options)

    def fail(*_):
        raise KeyboardInterrupt

    def consume(patch):
        for number, _ in enumerate(decoder.stream(ids_of(60), **options)):
            if number == 5:
                patch.setattr(*FAILS[where], fail) if where in FAILS else fail()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        consume(patch)
    again = decoder.generate(ids_of(60), **options)
    assert torch.equal(again.answer_ids, want.answer_ids)
    assert again.report == want.report


@pytest.mark.slow
@pytest.mark.parametrize("reserved", [True, False])
def test_candidates_that_outgrow_their_buffers_are_another_graph(
    device, graphs, monkeypatch, reserved
):
    """While an answer fits in its reserved memory, candidates do not outgrow their buffers."""
    monkeypatch.setattr(workspace, "HEADROOM", 2)
    if not reserved:
        monkeypatch.setattr(ParisKVExecutor, "reserve", lambda *_: None)
    options = given(device, 30, index_options=dict(beta=0.5))
    mine, theirs = both(decoder_of(device), ids_of(60), **options)
    assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert (graphs.made == 1) == reserved


class OfItsOwn(AttentionLayer):
    def step(self, *parts, **options):
        return super().step(*parts, **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        slow(dict(index="exact"), "layer 0: index: got Exact, which has no decode step"),
        slow(
            dict(index="pariskv:preset=fast+sample"),
            "layer 0: index: got Sample, which has no decode step",
        ),
        slow(dict(regions=dict(coverage=0.9)), "layer 0: coverage: got 0.9, allowed is None"),
        slow(
            dict(regions=dict(layer=OfItsOwn, graphs=False)),
            "layer 0: layer: got OfItsOwn, which overrides AttentionLayer.step",
        ),
        (dict(regions=dict(dense_below=90)), "layer 0: tokens: got 69, too few"),
    ],
    ids=str,
)
def test_what_has_no_step_for_a_graph_runs_as_ever_and_says_so(device, graphs, options, why):
    options = given(device, 10, **options)
    run = decoder_of(device).start(ids_of(60), **options)
    tokens = torch.cat(list(run.tokens()))
    assert run.session.capture_refusal().startswith(why)
    want = decoder_of(device).generate(ids_of(60), graphs=False, **options).answer_ids
    assert torch.equal(tokens, want.cpu())
    assert graphs.made == 0


@pytest.mark.slow
def test_a_driver_that_refuses_is_said_once_and_tokens_go_on(device, graphs, monkeypatch):
    decoder, options = decoder_of(device), given(device, 14)
    want = decoder.generate(ids_of(60), graphs=False, **options).answer_ids

    def refuse(*_):
        raise RuntimeError("out of graphs")

    regions = options["attach_options"]
    regions["graphs"] = False  # otherwise the layers would capture graphs, too
    with monkeypatch.context() as patch:
        patch.setitem(capturing.GRAPHS, device, refuse)
        refused = r"refuses to capture a decode step \(out of graphs\)"
        with pytest.warns(UserWarning, match=refused) as said:
            got = decoder.generate(ids_of(60), **options).answer_ids
    assert torch.equal(got, want)
    assert len(said) == 1


@pytest.mark.slow
def test_a_sequence_that_nobody_holds_is_gone_at_once(device, graphs):
    gc.disable()
    try:
        run = decoder_of(device, layers=2).start(ids_of(60), **given(device, 14))
        tokens = run.tokens()
        made = [token for token, _ in zip(tokens, range(8), strict=False)]
        held = [weakref.ref(index) for index in run.session.indexes()]
        del run, tokens
        assert len(made) == 8
        assert [index() for index in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.gpu
def test_prompts_leave_no_memory_behind():
    decoder, options, held = decoder_of("cuda", dtype=torch.bfloat16), given("cuda", 20), []
    for _ in range(8):
        decoder.generate(ids_of(60), **options)
        torch.cuda.empty_cache()  # other memory is in use, or belongs to a graph
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[-1] <= held[2]


@pytest.mark.usefixtures("reads_pages")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("at", [4, *mostly_slow([3, 5])])
def test_an_interruption_after_the_count_leaves_verified_tokens(
    device, graphs, monkeypatch, batch, at
):
    decoder, lengths = decoder_of(device, layers=2), PROMPTS[:batch]
    prompts = [ids_of(length) for length in lengths]
    want = decoder.generate(prompts, index=None, max_new_tokens=36, graphs=False)
    left, observe = [at], Session.observe

    def interrupted(self, ids):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        observe(self, ids)

    monkeypatch.setattr(Session, "observe", interrupted)
    plain = given(device, 24, regions=dict(update_every=20))
    run = decoder.start(prompts, speculative_tokens=3, verify="full", **plain)
    with pytest.raises(KeyboardInterrupt):
        list(run.tokens())
    session = run.session
    places = (session._position[:, 0].cpu() - torch.tensor(lengths)).tolist()
    right = [int(one.answer_ids[place]) for one, place in zip(want, places, strict=True)]
    assert session.token[:, 0].tolist() == right


def test_drafts_of_one_sequence_are_verified_in_a_batch(device, graphs, monkeypatch):
    """The others have no match, and do not count as having rejected a draft."""
    decoder, prompts = decoder_of(device, layers=2), [ids_of(length) for length in PROMPTS]
    plain = given(device, 24, regions=dict(update_every=40))
    want = decoder.generate(prompts, graphs=False, **plain)
    first = want[0].answer_ids.tolist()

    def draft(lookup, count):
        ids = lookup._ids[: len(lookup)].tolist()
        if ids[: PROMPTS[0]] != prompts[0].tolist():
            return []
        start = len(lookup) - PROMPTS[0]
        return first[start : start + count]

    monkeypatch.setattr(PromptLookup, "draft", draft)
    got = decoder.generate(prompts, speculative_tokens=3, **plain)
    assert got[0].answer_ids.tolist() == first
    acceptance = got[0].acceptance
    assert acceptance.rounds > 3
    assert acceptance.accepted >= 0.8 * acceptance.drafted


@pytest.mark.parametrize("sampling", [None, *mostly_slow([Sampling(0.8, seed=3)])])
@pytest.mark.parametrize("draft", mostly_slow(["own", "near", "far"], "far"))
def test_a_draft_model_in_graphs(device, graphs, sampling, draft):
    """Drafts are replays, too, and tokens of both sessions go on moving into the indexes."""
    decoder = decoder_of(device, layers=2)
    small = {"own": decoder, "near": near(device), "far": decoder_of(device)}[draft]
    small.tokenizer = decoder.tokenizer
    more = {} if sampling is None else dict(sampling=sampling)
    plain = given(device, 32, regions=dict(update_every=8)) | ALL_ROWS | more
    more = dict(speculative_tokens=3, draft_model=small)
    session = decoder.session(**{name: plain.pop(name) for name in ("k", "attach_options")})
    with recorded_calls(Session, "draft") as drafted:
        got = decoder.generate(ids_of(60), session=session, **more, **plain)
    seen = got.acceptance
    if sampling is None:
        other = decoder.session(**session.options)
        want = decoder.generate(ids_of(60), session=other, graphs=False, **plain)
        assert got.answer_ids.tolist() == want.answer_ids.tolist()
        assert len(drafted) < seen.drafted / 2  # the others are replays
    assert (seen.accepted == seen.drafted) == (draft == "own")
    assert seen.accepted > 0 or draft == "far"
    for one in (session, session.drafter._session):
        for layer in one._attentions:
            assert len(layer) - len(layer.index) < 8 + 2 * 8 + 4 + 3


@pytest.mark.parametrize(
    ("vocabulary", "prompts"), mostly_slow([*product([70, 202], [[60], [60, 47]])], (202, [60]))
)
def test_a_draft_model_with_fewer_or_more_tokens_in_graphs(device, graphs, vocabulary, prompts):
    """The model has 101 tokens. The graph of the draft model chooses none beyond these."""
    decoder, sizes = decoder_of(device, layers=2), dict(num_hidden_layers=2, head_dim=64)
    model = padded(model_of("llama", **sizes), vocabulary)
    small = Decoder.of(model.to(device), decoder.tokenizer)
    ids = [ids_of(count) for count in prompts]
    plain = given(device, 20, regions=dict(update_every=40)) | ALL_ROWS
    want = decoder.generate(ids, graphs=False, **plain)
    with recorded_calls(Session, "draft") as drafted:
        got = decoder.generate(ids, speculative_tokens=3, draft_model=small, **plain)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.answer_ids.tolist() == theirs.answer_ids.tolist()
    assert max(int(one.answer_ids.max()) for one in want) >= 70
    seen = got[0].acceptance
    assert len(drafted) < seen.drafted / 2  # the others are replays
    assert (seen.accepted == seen.drafted) == (vocabulary == 202)


def test_a_draft_model_of_a_batch_in_graphs(device, graphs):
    """All sequences keep as many drafts as each of them accepts."""
    decoder, prompts = decoder_of(device, layers=2), [ids_of(count) for count in PROMPTS]
    plain = given(device, 24, regions=dict(update_every=40)) | ALL_ROWS
    want = decoder.generate(prompts, graphs=False, **plain)
    for small in (decoder, near(device)):
        got = decoder.generate(prompts, speculative_tokens=3, draft_model=small, **plain)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.answer_ids.tolist() == theirs.answer_ids.tolist()
        seen = got[0].acceptance
        assert seen.accepted == 23 - seen.steps
        assert (seen.accepted == seen.drafted) == (small is decoder)


def test_a_draft_model_in_graphs_reads_the_tokens_of_rounds_without_it(device, graphs, monkeypatch):
    pauses = cycle([0, 3, 0, 0, 2, 0, 0, 0, 0, 3])
    monkeypatch.setattr(DraftLength, "next", lambda length: next(pauses))
    decoder = decoder_of(device, layers=2)
    plain = given(device, 32, regions=dict(update_every=8)) | ALL_ROWS
    want = decoder.generate(ids_of(60), graphs=False, **plain)
    got = decoder.generate(ids_of(60), speculative_tokens="auto", draft_model=decoder, **plain)
    assert torch.equal(got.answer_ids, want.answer_ids)
    assert got.acceptance.accepted == got.acceptance.drafted > 10
