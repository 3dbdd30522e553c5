"""Sessions that continue, are forked, saved and loaded give the tokens of one long prompt."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.layer import AttentionLayer
from kvindex_adapters.decoder import Decoder, layers
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.decoder.test_decoder import breaking
from tests.adapters.hf.generation.test_generation import Words

SIZES = dict(sink=4, local_window=8, update_every=8, dense_below=0)
FEW = dict(index="pariskv", k=10, attach_options=SIZES)
EVERYTHING = dict(index="exact", k=500, attach_options=SIZES)
SMALL = dict(num_hidden_layers=2)


@pytest.fixture(scope="module")
def model():
    return model_of("llama", **SMALL)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder.of(model, Words())


def asked(decoder, session, ids, count=12, **more):
    answer = decoder.generate(ids, session=session, max_new_tokens=count, chunk=16, **more)
    return answer.answer_ids.tolist()


@pytest.mark.parametrize("options", [EVERYTHING, dict(index=None)], ids=["exact", "dense"])
@pytest.mark.parametrize("length", [2, 17, 40])
def test_a_prompt_that_follows_is_as_one_long_prompt(decoder, options, length):
    document, question = ids_of(60), ids_of(length, seed=3)
    session = decoder.session(**options)
    decoder.read(document, session, chunk=16)
    first = asked(decoder, session, question)
    long = torch.cat([document, question])
    assert first == decoder.generate(long, max_new_tokens=12, **options).answer_ids.tolist()
    assert session.ids.tolist() == [*long.tolist(), *first]
    assert session.length == len(long) + 12
    second = asked(decoder, session, question)
    longer = torch.cat([long, torch.tensor(first), question])
    assert second == decoder.generate(longer, max_new_tokens=12, **options).answer_ids.tolist()


def test_tokens_are_those_of_a_cache_of_attach(model, decoder):
    session, given = decoder.session(**FEW), dict(chunk=16, max_new_tokens=12)
    with kvhf.attach(model, index="pariskv", k=10, **SIZES) as cache:
        kvhf.read(model, Words(), ids_of(60), cache=cache, chunk=16)
        decoder.read(ids_of(60), session, chunk=16)
        for seed in (3, 4):
            question = ids_of(20, seed)
            theirs = kvhf.generate(model, Words(), question, cache=cache, used="continue", **given)
            assert asked(decoder, session, question) == theirs.answer_ids.tolist()


@pytest.mark.parametrize("options", [FEW, dict(index=None)], ids=["pariskv", "dense"])
def test_forks_answer_as_if_each_were_alone(decoder, options):
    def read():
        session = decoder.session(**options)
        decoder.read(ids_of(60), session, chunk=16)
        return session

    document, questions = read(), [ids_of(20, seed) for seed in (3, 4)]
    want = [asked(decoder, read(), question) for question in questions]
    forks = [document.fork() for _ in questions]
    pairs = list(zip(forks, questions, strict=True))
    assert [asked(decoder, fork, question) for fork, question in pairs] == want
    assert [asked(decoder, document.fork(), question) for question in questions] == want
    assert (document.length, len(document.ids)) == (60, 60)
    turns = [asked(decoder, fork, question) for fork, question in pairs]  # side by side
    alone = read()
    for _ in range(2):
        last = asked(decoder, alone, questions[0])
    assert last == turns[0]


def test_forks_retrieve_other_numbers_of_rows(decoder):
    """The session and earlier forks keep their numbers; "auto" reports how many rows it finds."""
    session = decoder.session(**{**FEW, "k": "auto"})
    decoder.read(ids_of(200), session)
    forks = [session.fork(**one) for one in (dict(k=5), dict(k=20), dict(error=0.9), {})]
    for fork in forks:
        asked(decoder, fork, ids_of(20, seed=3))
    assert [fork.report().k for fork in forks] == [5, 20, 1024, 1024]
    few, more, loose, strict = (fork.report() for fork in forks)
    assert few.rows_read + 15 == pytest.approx(more.rows_read)
    assert few.rows_found is more.rows_found is None
    assert forks[0].fork(k=7).report().steps == 0
    assert loose.rows_found.mean < strict.rows_found.mean
    session = decoder.session(**FEW)
    decoder.read(ids_of(200), session)
    fork = session.fork(k="auto", error=0.9)
    asked(decoder, fork, ids_of(20, seed=3), count=60)  # the first steps measure outputs
    assert 0 < fork.report().steps < 60
    assert fork.report().rows_found.mean >= 16


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (dict(k=0), "k: got 0"),
        (dict(k="all"), "k: got 'all', allowed is a number"),
        (dict(error=-1.0), "error: got -1.0"),
    ],
)
def test_a_fork_with_a_wrong_number_of_rows_raises(decoder, rows, words):
    session = decoder.session(**FEW)
    decoder.read(ids_of(60), session, chunk=16)
    with pytest.raises(ValueError, match=words):
        session.fork(**rows)
    assert asked(decoder, session.fork(), ids_of(20, seed=3), count=3)
    session = decoder.session(**EVERYTHING)
    with pytest.raises(ValueError, match="k: got 'auto', but"):
        session.fork(k="auto")
    with pytest.raises(ValueError, match="without an index"):
        decoder.session(index=None).fork(**rows)


def test_a_stop_token_ends_what_a_session_holds(decoder):
    whole = asked(decoder, decoder.session(**FEW), ids_of(60))
    session = decoder.session(**FEW)
    cut = asked(decoder, session, ids_of(60), stop=[whole[5]])
    assert session.length == 60 + len(cut)
    assert session.ids.tolist() == [*ids_of(60).tolist(), *cut]


@pytest.mark.parametrize("options", [FEW, dict(index=None)], ids=["pariskv", "dense"])
def test_a_call_that_fails_leaves_the_session_as_it_was(decoder, monkeypatch, options):
    question, more = ids_of(20, seed=3), ids_of(30, seed=5)
    session = decoder.session(**options)
    decoder.read(ids_of(60), session, chunk=16)
    want = asked(decoder, session.fork(), question)

    class Breaks:
        left = 5

        def put(self, *_):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(decoder, session, question, streamer=Breaks())
    with monkeypatch.context() as patch:
        patch.setattr(layers, "gated", breaking(layers.gated, 5))
        with pytest.raises(KeyboardInterrupt):
            decoder.read(more, session, chunk=4)
    assert (session.length, len(session.ids)) == (60, 60)
    assert asked(decoder, session, question) == want


@pytest.mark.parametrize(
    "options",
    [FEW, dict(index=None), {**FEW, "attach_options": {**SIZES, "dense_layers": (1,)}}],
    ids=["pariskv", "dense", "both"],
)
def test_a_saved_session_goes_on_as_it_would_have(decoder, tmp_path, options):
    session, other = decoder.session(**options), decoder.session(**options)
    decoder.read(ids_of(60), session, chunk=16)
    first = asked(decoder, session, ids_of(20, seed=3))
    session.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert torch.equal(other.ids, session.ids)
    assert other.length == session.length == 80 + len(first)
    second = ids_of(20, seed=4)
    assert asked(decoder, other, second) == asked(decoder, session, second)


def test_a_session_and_a_cache_read_what_the_other_saved(model, decoder, tmp_path):
    options = {**SIZES, "dense_layers": (1,)}
    session = decoder.session(index="pariskv", k=10, attach_options=options)
    question, given = ids_of(20, seed=3), dict(chunk=16, max_new_tokens=12)
    with kvhf.attach(model, index="pariskv", k=10, **options) as cache:
        kvhf.read(model, Words(), ids_of(60), cache=cache, chunk=16)
        cache.save(tmp_path / "cache")
        session.load(tmp_path / "cache")
        mine = asked(decoder, session, question)
        session.save(tmp_path / "session")
        theirs = kvhf.generate(model, Words(), question, cache=cache, used="continue", **given)
        assert mine == theirs.answer_ids.tolist()
        cache.reset()
        cache.load(tmp_path / "session")
        assert torch.equal(cache.ids, session.ids)
        theirs = kvhf.generate(model, Words(), question, cache=cache, used="branch", **given)
        assert asked(decoder, session, question) == theirs.answer_ids.tolist()


def test_folders_of_others_are_refused_and_the_session_stays_empty(decoder, tmp_path):
    session, folder = decoder.session(**FEW), tmp_path / "saved"
    with pytest.raises(ValueError, match=r"session\.length: got 0, allowed is"):
        session.save(folder)
    decoder.read(ids_of(60), session)
    session.save(folder)
    with pytest.raises(OSError, match="which already exists"):
        session.save(folder)
    with pytest.raises(ValueError, match="session: got a session with 60 tokens; load needs"):
        session.load(folder)
    others = {
        "model: got a cache of a model with": Decoder.of(
            model_of("llama, no groups", **SMALL)
        ).session(**FEW),
        "sink: got 5, but the folder was saved with 4": decoder.session(
            **{**FEW, "attach_options": {**SIZES, "sink": 5}}
        ),
        "got a saved IndexedLayer": decoder.session(index=None),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            other.load(folder)
        assert other.length == 0
    (folder / "layer-001.safetensors").write_bytes(b"")
    empty = decoder.session(**FEW)
    with pytest.raises(ValueError, match="got a file of 0 bytes"):
        empty.load(folder)
    want = decoder.generate(ids_of(60), max_new_tokens=12, chunk=16, **FEW).answer_ids.tolist()
    assert asked(decoder, empty, ids_of(60)) == want


@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_cannot_be_read_leaves_none_filled(decoder, tmp_path, monkeypatch, place):
    session, empty = (decoder.session(**FEW) for _ in range(2))
    decoder.read(ids_of(60), session)
    session.save(tmp_path / "saved")
    load, calls = AttentionLayer.load_state_dict, []

    def fails(layer, state):
        calls.append(layer)
        if len(calls) > place:
            raise ValueError("no")
        load(layer, state)

    with monkeypatch.context() as patch:
        patch.setattr(AttentionLayer, "load_state_dict", fails)
        with pytest.raises(ValueError, match="cannot be loaded: no"):
            empty.load(tmp_path / "saved")
    empty.load(tmp_path / "saved")
    question = ids_of(20, seed=3)
    assert asked(decoder, empty, question) == asked(decoder, session, question)


def test_a_cache_of_several_sequences_is_refused(model, decoder, tmp_path):
    with kvhf.attach(model, index="pariskv", k=10, **SIZES) as cache:
        model.generate(ids_of(60).expand(2, -1), past_key_values=cache, max_new_tokens=2)
        cache.save(tmp_path / "saved")
    session = decoder.session(**FEW)
    with pytest.raises(ValueError, match="which contains 2 sequences"):
        session.load(tmp_path / "saved")
    assert (session.length, session.ids.tolist()) == (0, [])
    decoder.read(ids_of(60), session)


def test_full_attention_takes_no_options_of_an_index(decoder):
    calls = decoder.session, lambda **given: decoder.generate(ids_of(9), **given)
    for call in calls:
        with pytest.raises(ValueError, match=r"attach_options: got \{'sink': 4\} with index=None"):
            call(index=None, attach_options={"sink": 4})
        with pytest.raises(ValueError, match="k: got 0, allowed"):
            call(index=None, k=0)


def test_what_does_not_go_with_a_session_is_said_in_words(decoder):
    session, other = decoder.session(**FEW), Decoder.of(model_of("qwen3"), Words())
    for name, value in dict(index="exact", k=5, attach_options={}, fused=False).items():
        with pytest.raises(ValueError, match=f"{name}: got a value together with session"):
            decoder.generate(ids_of(9), session=session, **{name: value})
    with pytest.raises(ValueError, match="session: got a session for 2 prompts"):
        decoder.generate([ids_of(9), ids_of(9)], session=session)
    for call in (other.read, lambda ids, one: other.generate(ids, session=one)):
        with pytest.raises(ValueError, match="session: got a session of another decoder"):
            call(ids_of(9), session)
    with pytest.raises(ValueError, match="length: got -1, allowed is"):
        session.truncate(-1)
    assert session.length == 0
