"""A chat over several calls: the cache stores the template's ids of the whole conversation."""

import copy
import itertools

import pytest
import torch
from jinja2 import TemplateError

import kvindex_adapters.hf as kvhf
from kvindex_adapters.decoder import Decoder
from tests.adapters.decoder.families import model_of
from tests.adapters.hf.cache.test_copies import LINEAR
from tests.adapters.hf.generation.test_generation import NEW, REGIONS, Words, full
from tests.adapters.tiny import build
from tests.support.helpers import mostly_slow, sampled

SYSTEM, USER, ASSISTANT, END = 3, 4, 5, 6
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}
ONE, OTHER, MERGED = 20, 21, 22
"""The tokenizer merges ONE and OTHER to one token if they are neighbors."""

DEFAULT = {"role": "system", "content": "9 9"}


class Chat(Words):
    """A tokenizer whose words are numbers; ONE and OTHER merge. Its template adds a system message.

    With `thinks`, the template drops the first five words of every answer but the last.
    """

    def __init__(self, thinks=False):
        self.thinks = thinks

    def __call__(self, text, **options):
        words, ids = [int(word) for word in text.split()], []
        for word in words:
            if word == OTHER and ids and ids[-1] == ONE:
                ids[-1] = MERGED
            else:
                ids.append(word)
        return {"input_ids": ids}

    def decode(self, ids, *, skip_special_tokens=False):
        text = {MERGED: f"{ONE} {OTHER}"}
        ids = [i for i in map(int, ids) if i != END or not skip_special_tokens]
        return " ".join(text.get(i, str(i)) for i in ids)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        if messages[0]["role"] != "system":
            messages = [DEFAULT, *messages]
        parts = []
        for number, message in enumerate(messages):
            content = message["content"]
            if message["role"] not in ROLES:
                raise TemplateError(f"Unknown role {message['role']}")
            if self.thinks and message["role"] == "assistant" and number < len(messages) - 1:
                content = " ".join(content.split()[5:])
            parts.append(f"{ROLES[message['role']]} {content} {END}")
        return " ".join(parts + [str(ASSISTANT)] * add_generation_prompt)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def words(length, seed=0):
    chosen = torch.Generator().manual_seed(seed)
    return " ".join(map(str, torch.randint(30, 99, (length,), generator=chosen).tolist()))


def rendered(tokenizer, messages, cue=True):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue)
    return tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def plain():
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model():
    return model_of("llama", num_hidden_layers=2)


class Cache:
    """A cache of `attach`, with the same methods as `Session`."""

    def __init__(self, model, tokenizer, cache):
        self.model, self.tokenizer, self.cache = model, tokenizer, cache

    def ask(self, prompt, **options):
        options = {"used": "continue" if len(self.ids) else "refuse", "chunk": 16} | options
        options = {"max_new_tokens": NEW} | options
        return kvhf.generate(self.model, self.tokenizer, prompt, cache=self.cache, **options)

    def read(self, prompt):
        used = "continue" if len(self.ids) else "refuse"
        kvhf.read(self.model, self.tokenizer, prompt, cache=self.cache, used=used, chunk=16)

    def fork(self):
        return Cache(self.model, self.tokenizer, self.cache.fork())

    @property
    def ids(self):
        return [] if self.cache.ids is None else self.cache.ids.tolist()

    @property
    def lengths(self):
        return {self.cache.get_seq_length(), *self.cache.lengths()}


class Session:
    """A session of the decoder."""

    def __init__(self, decoder, session):
        self.decoder, self.session = decoder, session

    def ask(self, prompt, eos_token_id=None, **options):
        stop = None if eos_token_id is None else [eos_token_id]
        options = {"max_new_tokens": NEW, "chunk": 16} | options
        return self.decoder.generate(prompt, session=self.session, stop=stop, **options)

    def read(self, prompt):
        self.decoder.read(prompt, self.session, chunk=16)

    def fork(self):
        return Session(self.decoder, self.session.fork())

    @property
    def ids(self):
        return self.session.ids.tolist()

    @property
    def lengths(self):
        return {self.session.length}


INDEX = {name: REGIONS[name] for name in ("index", "k")}
SIZES = {name: REGIONS[name] for name in REGIONS.keys() - INDEX.keys()}
KINDS = ("cache", "session", "dense session")


@pytest.fixture(params=KINDS)
def opened(request, model):
    """Return a function that opens an empty cache or session with a tokenizer."""
    if request.param != "cache":
        options = dict(**INDEX, attach_options=SIZES)
        options = options if request.param == "session" else dict(index=None)

        def session(tokenizer):
            decoder = Decoder.of(model, tokenizer)
            return Session(decoder, decoder.session(**options))

        yield session
        return
    with kvhf.attach(model, **REGIONS) as cache:
        yield lambda tokenizer: Cache(model, tokenizer, cache)


def expected(plain, ids, **options):
    """Return the answer of full attention to these ids as one prompt."""
    whole = torch.tensor([ids])
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    return full(plain, inputs, **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("how", "thinks", "ends"),
    mostly_slow(
        itertools.product(["new", "whole"], [False, True], [False, True]),
        *[("new", False, True), ("new", True, False), ("whole", True, True)],
    ),
)
def test_a_turn_is_what_the_template_makes_of_all_messages(plain, opened, how, thinks, ends):
    tokenizer = Chat(thinks)
    talk = opened(tokenizer)
    said = [{"role": "system", "content": words(5)}, user(words(40, 1))]
    first = expected(plain, rendered(tokenizer, said))
    options = {"eos_token_id": first[7]} if ends else {}
    for number in range(3):
        answer = talk.ask(said if how == "whole" or not number else said[-1:], **options)
        before = rendered(tokenizer, said)
        assert answer.answer_ids.tolist() == expected(plain, before, **options)
        assert talk.ids == before + answer.answer_ids.tolist()
        assert talk.lengths == {len(talk.ids)}
        said += [assistant(answer.text), user(words(4, number))]


def test_the_messages_of_the_caller_may_change_afterwards(plain, opened):
    talk, said = opened(Chat()), [user(words(30))]
    answer = talk.ask(said)
    said[0]["content"] = "8"
    said.append(assistant("8"))
    talk.ask([user("40 41")])
    whole = [user(words(30)), assistant(answer.text), user("40 41")]
    assert talk.ids[:-NEW] == rendered(Chat(), whole)


def test_what_is_read_is_part_of_the_conversation(plain, opened):
    talk, document = opened(Chat()), words(50)
    talk.read([user(document)])
    assert talk.ids == rendered(Chat(), [user(document)], cue=False)
    fork, other = talk.fork(), talk.fork()
    fork.ask([user("40 41 42")])
    assert fork.ids[:-NEW] == rendered(Chat(), [user(document), user("40 41 42")])
    other.ask([user(f"{document} 40")])  # the same message, but longer
    assert other.ids[:-NEW] == rendered(Chat(), [user(f"{document} 40")])
    talk.ask([user(document)])
    assert talk.ids[:-NEW] == rendered(Chat(), [user(document)])


def test_an_answer_that_is_tokenized_otherwise_is_read_again(plain, opened):
    """In the template's text, two tokens of the answer merge, and its end merges with the next."""
    talk, said = opened(Chat()), [user(words(30))]
    talk.ask(said, max_new_tokens=3)
    edited = [*said, assistant(f"31 {ONE} {OTHER} 32"), user("40")]
    talk.ask(edited)
    assert talk.ids[:-NEW] == rendered(Chat(), edited)
    edited = [*edited[:2], user("41 42"), assistant("50"), user("43")]
    answer = talk.ask(edited)
    assert talk.ids[:-NEW] == rendered(Chat(), edited)
    assert answer.answer_ids.tolist() == expected(plain, rendered(Chat(), edited))


@pytest.mark.parametrize(("used", "thinks"), sampled(["continue", "branch"], [True, False]))
def test_a_call_that_fails_or_branches_leaves_the_conversation_as_it_was(
    plain, model, used, thinks
):
    """If the template changes earlier turns, the call removes tokens and overwrites them."""
    tokenizer = Chat(thinks)

    class Breaks:
        def __init__(self, left):
            self.left = left

        def put(self, *_):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def end(self):
            pass

    said = [user(words(60))]
    with kvhf.attach(model, **REGIONS) as cache:
        talk = Cache(model, tokenizer, cache)
        answer = talk.ask(said, max_new_tokens=40)
        said += [assistant(answer.text), user(words(30, 1))]
        before, steps = talk.ids, cache.report().steps
        want = expected(plain, rendered(tokenizer, said))
        for left in (1, 2, 5):
            with pytest.raises(KeyboardInterrupt):
                talk.ask(said[-1:], used=used, streamer=Breaks(left))
            assert talk.ids == before
            assert talk.lengths == {len(before)}
        for _ in range(2):
            assert talk.ask(said[-1:], used="branch").answer_ids.tolist() == want
            assert cache.report().steps == steps
        # text follows exactly the tokens that were there before
        text = talk.ask("40 41 42", used="branch").answer_ids.tolist()
        assert text == expected(plain, [*before, 40, 41, 42])
        assert talk.ask(said[-1:]).answer_ids.tolist() == want


@pytest.mark.parametrize("kind", ["session", "dense session"])
def test_a_session_is_as_it_was_after_a_failure(plain, model, kind):
    tokenizer, options = Chat(thinks=True), dict(**INDEX, attach_options=SIZES)
    decoder = Decoder.of(model, tokenizer)
    session = decoder.session(**(options if kind == "session" else dict(index=None)))
    talk, said = Session(decoder, session), [user(words(60))]
    said.append(assistant(talk.ask(said, max_new_tokens=40).text))
    said.append(user(words(30, 1)))
    before, calls = talk.ids, itertools.count()

    def breaks(phase, done, total):
        if phase == "decode" and next(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask(said[-1:], on_progress=breaks)
    assert talk.ids == before
    assert talk.lengths == {len(before)}
    text = talk.fork().ask("40 41 42").answer_ids.tolist()
    assert text == expected(plain, [*before, 40, 41, 42])
    want = expected(plain, rendered(tokenizer, said))
    assert talk.ask(said[-1:]).answer_ids.tolist() == want


def test_text_is_appended_and_then_only_a_whole_conversation_goes_on(plain, opened):
    talk, said = opened(Chat()), [user(words(30))]
    answer = talk.ask(said)
    before = talk.ids
    typed = f"{END} {USER} 40 41 {END} {ASSISTANT}"
    second = talk.ask(typed)
    assert talk.ids[:-NEW] == before + Chat()(typed)["input_ids"]
    before = talk.ids
    with pytest.raises(ValueError, match=r"prompt: got messages, but the .* tokens in the cache"):
        talk.ask([user("43")])
    assert talk.ids == before
    said += [assistant(answer.text), user("40 41"), assistant(second.text), user("43")]
    talk.ask(said)
    assert talk.ids[:-NEW] == rendered(Chat(), said)


def test_messages_after_a_text_are_refused(opened):
    talk = opened(Chat())
    talk.read(words(30))
    for prompt in ([user("43")], [user("43"), assistant("44"), user("45")]):
        with pytest.raises(ValueError, match="but the 30 tokens in the cache do not come"):
            talk.ask(prompt)
    assert talk.lengths == {30}


def test_another_conversation_is_refused(opened):
    talk = opened(Chat())
    talk.ask([{"role": "system", "content": "70 71"}, user(words(30))])
    before = talk.ids
    other = [{"role": "system", "content": "72"}, user(words(30)), assistant("73"), user("74")]
    with pytest.raises(ValueError, match=r"a whole conversation .* begins with system: '72', but"):
        talk.ask(other)
    with pytest.raises(ValueError, match="in the cache begins with system: '70 71'; pass"):
        talk.ask(other[1:])
    with pytest.raises(ValueError, match="roles system, user, assistant, critic, but the tok"):
        talk.ask([{"role": "critic", "content": "74"}])
    assert talk.ids == before


def test_messages_after_tokens_of_others_are_refused(model):
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        model(input_ids=torch.tensor([[30, 31, 32]]), past_key_values=cache)
        with pytest.raises(ValueError, match="other than read and generate have added"):
            Cache(model, Chat(), cache).ask([user("43")], used="continue")
        assert cache.get_seq_length() == 3
        with pytest.raises(ValueError, match="prompt: got no messages, allowed is at least one"):
            Cache(model, Chat(), cache).ask([], used="continue")
        with pytest.raises(TypeError, match="prompt: got list of int, allowed is a text"):
            Cache(model, Chat(), cache).ask([3], used="continue")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: cache.fork()])
def test_a_copy_knows_the_conversation(model, copied):
    with kvhf.attach(model, **REGIONS) as cache:
        talk = Cache(model, Chat(), cache)
        said = [user(words(30))]
        answer = talk.ask(said)
        other = Cache(model, Chat(), copied(cache))
        other.ask([user("40")])
        whole = [*said, assistant(answer.text), user("40")]
        assert other.ids[:-NEW] == rendered(Chat(), whole)
        cache.crop(-1)  # the remaining tokens are no longer those of the conversation
        with pytest.raises(ValueError, match="other than read and generate have added"):
            talk.ask([user("40")], used="continue")


HYBRID = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **LINEAR)


@pytest.mark.parametrize(("family", "options"), [("qwen2", {}), ("qwen3_next", HYBRID)])
def test_what_cannot_forget_tokens_says_so(family, options):
    """Sliding windows and linear attention need a template that never changes earlier turns."""
    model = build(family, eos_token_id=None, **options)
    with kvhf.attach(model, **REGIONS) as cache:
        talk, said = Cache(model, Chat(), cache), [user(words(50))]
        said += [assistant(talk.ask(said).text), user("40 41")]
        talk.ask(said[-1:])
        assert talk.ids[:-NEW] == rendered(Chat(), said)
        before = talk.ids
        talk.tokenizer = Chat(thinks=True)
        with pytest.raises(
            ValueError, match=r"Tokens cannot be removed from this cache .* cache\.reset\(\)"
        ):
            talk.ask([user("42")])
        assert talk.ids == before
        assert talk.lengths == {len(before)}
        talk.tokenizer = Chat()
        talk.ask([user("42")])
        assert talk.lengths == {len(talk.ids)}


def test_a_saved_conversation_goes_on_in_a_cache_and_in_a_session(model, tmp_path):
    decoder, said = Decoder.of(model, Chat()), [user(words(30))]
    with kvhf.attach(model, **REGIONS) as cache:
        talk = Cache(model, Chat(), cache)
        said += [assistant(talk.ask(said).text), user("40")]
        cache.save(tmp_path / "cache")
        cache.reset()
        cache.load(tmp_path / "cache")
        assert cache.conversation.messages == said[:2]
        want = talk.fork().ask(said[2:])
        session = Session(decoder, decoder.session(**INDEX, attach_options=SIZES))
        session.session.load(tmp_path / "cache")
        got = session.ask(said[2:])
        assert session.ids[:-NEW] == rendered(Chat(), said)
        assert got.answer_ids.tolist() == want.answer_ids.tolist()
        session.session.save(tmp_path / "session")
        cache.reset()
        cache.load(tmp_path / "session")
        said += [assistant(got.text), user("41")]
        talk.ask(said[-1:])
        assert talk.ids[:-NEW] == rendered(Chat(), said)


def test_messages_that_are_no_json_are_not_saved(model, tmp_path):
    said = [{**user(words(30)), "image": object()}]
    with kvhf.attach(model, **REGIONS) as cache:
        talk = Cache(model, Chat(), cache)
        said.append(assistant(talk.ask(said).text))
        cache.save(tmp_path / "saved")
        cache.reset()
        cache.load(tmp_path / "saved")
        with pytest.raises(ValueError, match="do not come from messages"):
            talk.ask([user("40")])
        said.append(user("40"))
        talk.ask(said)
        assert talk.ids[:-NEW] == rendered(Chat(), said)
