"""`Chat` with transformers and with the decoder: answers are those to the whole conversation."""

import copy
import itertools
import pickle
import warnings
from ast import literal_eval

import pytest
import torch
from jinja2 import TemplateError

import kvindex_adapters.decoder as kvdecoder
import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.generation import prefill as prefills
from tests.adapters.decoder.families import model_of
from tests.adapters.hf.generation.test_generation import NEW, REGIONS
from tests.adapters.hf.generation.test_turns import (
    ASSISTANT,
    END,
    INDEX,
    SIZES,
    SYSTEM,
    USER,
    Chat,
    assistant,
    expected,
    rendered,
    user,
    words,
)
from tests.adapters.tiny import build
from tests.support.helpers import slow

OPTIONS = dict(max_new_tokens=NEW, chunk=16)
OPENED = dict(**INDEX, attach_options=SIZES)


class Tokenizer(Chat):
    """`Chat` with a template that takes options and leaves a begun answer open."""

    chat_template = "numbers"

    def apply_chat_template(
        self, messages, *, tokenize, add_generation_prompt, continue_final_message=False, tools=()
    ):
        text = super().apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )
        text = text.removesuffix(f" {END}") if continue_final_message else text
        return " ".join([*map(str, tools), text])


@pytest.fixture(scope="module")
def model():
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain():
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture(params=["transformers", "decoder"])
def chat_of(request, model):
    """Function that opens a chat with either engine, and closes it after the test."""
    chats = []

    def opened(tokenizer, **options):
        options = {**OPENED, **OPTIONS, **options}
        if request.param == "decoder":
            return kvdecoder.Chat(kvdecoder.Decoder.of(model, tokenizer), **options)
        chats.append(kvhf.Chat(model, tokenizer, **options))
        return chats[-1]

    yield opened
    for chat in chats:
        chat.close()


@pytest.fixture(params=["transformers", "decoder"])
def full_chat(request, model):
    """Function that opens a chat with full attention, with either engine."""

    def opened(tokenizer, **options):
        options = {"index": None, **OPTIONS, **options}
        if request.param == "decoder":
            return kvdecoder.Chat(kvdecoder.Decoder.of(model, tokenizer), **options)
        return kvhf.Chat(model, tokenizer, **options)

    return opened


def stored_ids(chat):
    return (chat.cache if isinstance(chat, kvhf.Chat) else chat.session).ids.tolist()


def check_answer(plain, tokenizer, messages, generation, tools=()):
    """The answer is that of full attention to the whole conversation."""
    ids = [*tools, *rendered(tokenizer, messages)]
    assert generation.answer_ids.tolist() == expected(plain, ids)


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "drops thoughts"])
def test_turns_answer_the_whole_conversation_and_read_what_is_new(plain, chat_of, thinks):
    tokenizer = Tokenizer(thinks)
    chat = chat_of(tokenizer, system=words(30))
    assert chat.messages == [{"role": "system", "content": words(30)}]
    for turn in range(3):
        question = words(8, seed=turn)
        generation = chat.send(question)
        asked, answer = chat.messages[:-1], chat.messages[-1]
        assert (asked[-1], answer) == (user(question), assistant(generation.text))
        check_answer(plain, tokenizer, asked, generation)
        whole = rendered(tokenizer, asked)
        assert chat.reused + len(generation.prompt_ids) == len(whole)
        assert stored_ids(chat) == [*whole, *generation.answer_ids.tolist()]
        assert (chat.reused > 30) is (turn > 0)
    assert chat.tokens == len(stored_ids(chat))
    assert chat.report().tokens == chat.tokens


def test_history_may_be_edited(plain, chat_of):
    tokenizer = Tokenizer()
    chat = chat_of(tokenizer)
    chat.send(words(20))
    chat.send(words(20, seed=1))
    edited = [*chat.messages[:2], user(words(9, seed=2))]
    generation = chat.send(edited)  # the whole conversation, with another second question
    assert chat.messages[:-1] == edited
    check_answer(plain, tokenizer, edited, generation)
    chat.messages[1] = assistant(words(3, seed=3))
    generation = chat.send([user(words(5, seed=4))])  # new messages
    assert len(chat.messages) == 6
    check_answer(plain, tokenizer, chat.messages[:-1], generation)


def test_the_model_continues_an_answer_that_the_caller_has_begun(plain, chat_of):
    tokenizer = Tokenizer()
    chat = chat_of(tokenizer)
    generation = chat.send([user(words(20)), assistant("40 41")])
    begun = [*rendered(tokenizer, [user(words(20))]), 40, 41]
    assert stored_ids(chat)[: len(begun)] == begun
    assert generation.answer_ids.tolist() == expected(plain, begun)
    assert chat.messages == [user(words(20)), assistant("40 41" + generation.text)]


def test_options_of_the_template(plain, chat_of):
    tokenizer = Tokenizer()
    chat = chat_of(tokenizer, template_options={"tools": [7, 8]})
    generation = chat.send(words(20))
    check_answer(plain, tokenizer, chat.messages[:-1], generation, tools=[7, 8])
    generation = chat.send(words(5), template_options={"tools": [9]})
    check_answer(plain, tokenizer, chat.messages[:-1], generation, tools=[9])
    assert chat.reused == 0  # the first token differs


def test_documents_are_read_once_and_precede_the_first_question(plain, chat_of):
    tokenizer, document = Tokenizer(), words(60, seed=5)
    chat = chat_of(tokenizer)
    chat.read(document)
    stored = chat.tokens
    assert stored >= 60
    for seed in range(2):
        generation = chat.send(words(6, seed=seed))
        assert chat.reused == stored
        whole = [user(f"{document}\n\n{words(6, seed=seed)}")]
        check_answer(plain, tokenizer, whole, generation)
        assert chat.messages[0] == user(words(6, seed=seed))
        assert chat.undo() == [user(words(6, seed=seed)), assistant(generation.text)]
        assert chat.messages == []
    with pytest.raises(ValueError, match="no answer"):
        chat.undo()
    with pytest.raises(ValueError, match="document: got"):
        chat.read(" ")


@pytest.mark.parametrize("fork", [lambda chat: chat.fork(), copy.deepcopy], ids=["fork", "copy"])
def test_a_fork_continues_with_documents_and_leaves_the_chat_alone(plain, chat_of, fork):
    tokenizer, document = Tokenizer(), words(60, seed=5)
    chat = chat_of(tokenizer, system="9", template_options={"tools": [7]})
    chat.read(document)
    chat.send(words(6))
    messages, stored = copy.deepcopy(chat.messages), stored_ids(chat)
    others = fork(chat), fork(chat)
    for seed, other in enumerate(others):
        assert (other.messages, other.documents) == (messages, [document])
        generation = other.send(words(8, seed=seed))
        asked = [messages[0], user(f"{document}\n\n{words(6)}"), *other.messages[2:-1]]
        check_answer(plain, tokenizer, asked, generation, tools=[7])
        assert other.reused > 60
        other.messages[1]["content"] = "33"
        other.documents.clear()
        other.options["max_new_tokens"] = 1
        other.template_options.clear()
    assert (chat.messages, stored_ids(chat), chat.documents) == (messages, stored, [document])
    assert (chat.options["max_new_tokens"], chat.template_options) == (NEW, {"tools": [7]})
    generation = chat.send(words(8, seed=1))
    assert generation.text == others[1].messages[-1]["content"]


def test_a_fork_ends_with_the_attach_context_and_does_not_end_it(model):
    with kvhf.Chat(model, Tokenizer(), **OPENED, **OPTIONS) as chat:
        chat.read(words(30))
        with chat.fork() as other:
            other.send(words(5))
        chat.send(words(5))
        last = chat.fork()
    with pytest.raises(RuntimeError, match="attach"):
        last.send(words(5))
    with pytest.raises(RuntimeError, match="attach"):
        chat.fork()


def test_a_chat_with_a_cache_of_its_caller_forks(plain, model):
    tokenizer, document = Tokenizer(), words(60)
    with kvhf.attach(model, **REGIONS) as cache:
        chat = kvhf.Chat(model, tokenizer, cache=cache, **OPTIONS)
        chat.read(document)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(2):
                other = chat.fork()
                other.close()  # the caller's context goes on
                generation = other.send(words(6, seed=seed))
                whole = [user(f"{document}\n\n{words(6, seed=seed)}")]
                check_answer(plain, tokenizer, whole, generation)
                assert other.reused >= 60
        assert (chat.cache, chat.messages) == (cache, [])


def test_a_chat_cannot_be_pickled(chat_of):
    chat = chat_of(Tokenizer())
    for call in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"use chat\.fork\(\) for an independent chat, or chat"):
            call(chat)


def test_a_new_chat_warns_before_it_removes_the_tokens_of_a_cache(model):
    tokenizer = Tokenizer()
    with kvhf.attach(model, **REGIONS) as cache:
        chat = kvhf.Chat(model, tokenizer, cache=cache, **OPTIONS)
        chat.read(words(60))
        stored = stored_ids(chat)
        other = kvhf.Chat(model, tokenizer, cache=cache.fork(), **OPTIONS)
        message = (
            rf"got a cache of {len(stored)} tokens, of which this turn removes 60,.*chat\.fork"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning that became an error changes nothing
            with pytest.raises(UserWarning, match=message):
                other.send(words(5, seed=1))
            with pytest.raises(UserWarning, match=message):
                other.read(words(5, seed=1))
        assert (stored_ids(other), other.messages, other.documents) == (stored, [], [])
        with pytest.warns(UserWarning, match=message) as caught:
            other.send([user(words(5, seed=1))])
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.messages[0] = user(words(40))  # later turns may edit
            other.send(words(5))
            chat.send(words(5))
            kvhf.Chat(model, tokenizer, cache=chat.cache.fork()).fork().cache.reset()
        model(cache.ids.new_tensor([[33] * 20]), past_key_values=cache)  # now ids are unknown
        unknown = kvhf.Chat(model, tokenizer, cache=cache, **OPTIONS)
        with pytest.warns(
            UserWarning, match=r"of which this turn removes \d+, because calls other"
        ):
            unknown.send(words(5))


def test_chats_that_share_a_prefix_do_not_warn(model):
    tokenizer, document = Tokenizer(), words(60)
    with kvhf.attach(model, **REGIONS) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        kvhf.read(model, tokenizer, [user(document)], cache=cache)
        for seed in range(2):
            chat = kvhf.Chat(model, tokenizer, cache=cache.fork(), **OPTIONS)
            chat.send(f"{document} {words(5, seed=seed)}")
            assert chat.reused > 60
        again = kvhf.Chat(model, tokenizer, cache=chat.cache.fork(), **OPTIONS)
        again.send([*chat.messages, user(words(5))])


def test_two_follow_up_questions_from_one_state(plain, model):
    """The recipes of the page about chats: `fork`, `undo`, and `generate` with a branch."""
    tokenizer, document, questions = Tokenizer(), words(60), [words(5, seed=1), words(7, seed=2)]
    with kvhf.Chat(model, tokenizer, **OPENED, **OPTIONS) as chat:
        chat.read(document)
        with pytest.raises(ValueError, match="do not come from messages"):  # and not without it
            kvhf.generate(model, tokenizer, [user("33")], cache=chat.cache, used="branch")
        first = chat.send(words(6)).text
        asked = [user(f"{document}\n\n{words(6)}"), assistant(first)]
        given = dict(cache=chat.cache, used="branch", **OPTIONS)
        for question in questions:
            whole = expected(plain, rendered(tokenizer, [*asked, user(question)]))
            branch = kvhf.generate(model, tokenizer, [user(question)], **given)
            assert branch.answer_ids.tolist() == whole
            assert chat.fork().send(question).answer_ids.tolist() == whole
        for question in questions:
            answer = chat.send(question)
            check_answer(plain, tokenizer, [*asked, user(question)], answer)
            chat.undo()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("used", "branch", r"chat\.fork\(\)"),
        ("cache", None, r"pass cache to kvhf\.Chat"),
        ("session", None, r"chat\.fork\(\)"),
        ("prompt", "33", "first argument"),
        ("model", "gpt", "another chat"),
        ("tokenizer", "gpt", "leave tokenizer out"),
        ("index", "quest", "pass index to Chat"),
        ("k", 100, "pass k to Chat"),
        ("attach_options", {}, "pass attach_options to Chat"),
        ("system", "9", r"first into chat\.messages"),
    ],
)
def test_options_that_a_chat_sets_are_refused(chat_of, name, value, remedy):
    chat = chat_of(Tokenizer())
    with pytest.raises(ValueError, match=f"^{name}: got .*{remedy}"):
        chat.send("33", **{name: value})
    chat.options[name] = value
    with pytest.raises(ValueError, match=f"^{name}: got .*{remedy}"):
        chat.send("33")
    assert (chat.messages, chat.tokens) == ([], 0)


def test_options_that_a_chat_sets_are_refused_at_its_beginning(chat_of):
    for name in ("used", "session", "prompt"):
        with pytest.raises(ValueError, match=f"^{name}: got 'branch', but"):
            chat_of(Tokenizer(), **{name: "branch"})


def test_options_of_the_decoder_are_checked_before_anything_is_read(model):
    decoder = kvdecoder.Decoder.of(model, Tokenizer())
    with pytest.raises(TypeError, match="did you mean 'max_new_tokens'"):
        kvdecoder.Chat(decoder, max_new_token=5)
    chat = kvdecoder.Chat(decoder, fused=False, **OPENED, **OPTIONS)
    assert chat.session.fused is None
    with pytest.raises(ValueError, match=r"fused: got False, .*; pass fused to Chat"):
        chat.send("33", fused=False)
    with pytest.raises(TypeError, match="did you mean 'sampling'"):
        chat.send("33", samplin=None)
    assert chat.tokens == 0


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_blank_message_is_refused(chat_of, text):
    chat = chat_of(Tokenizer())
    with pytest.raises(ValueError, match=r"message: got .* allowed is a text that is not blank"):
        chat.send(text)
    assert (chat.messages, chat.tokens) == ([], 0)


def test_a_printed_answer_is_a_few_lines(chat_of):
    generation = chat_of(Tokenizer()).send(words(20))
    text, times, report = str(generation).splitlines()
    assert text == generation.text
    assert times.startswith(f"({len(generation.prompt_ids)} tokens of the prompt in ")
    assert report == str(generation.report)
    assert "tensor" not in repr(generation)
    assert "config" not in repr(generation)


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "drops thoughts"])
def test_full_attention_reads_only_what_is_new(plain, full_chat, chat_of, tmp_path, thinks):
    tokenizer, document = Tokenizer(thinks), words(60, seed=5)
    chat = full_chat(tokenizer)
    chat.read(document)
    assert chat.tokens >= 60
    for turn in range(3):
        other = chat.fork()
        generation = chat.send(words(8, seed=turn))
        asked = chat.messages[:-1]
        whole = [user(f"{document}\n\n{words(8)}"), *asked[1:]]
        check_answer(plain, tokenizer, whole, generation)
        assert chat.reused >= 60
        assert other.send(words(8, seed=turn)).text == generation.text
        assert generation.report is generation.config is None
        assert str(generation).endswith("\nFull attention.")
    before = list(chat.messages), stored_ids(chat)
    with pytest.raises(RuntimeError, match="stop"):
        chat.send(words(9), on_progress=stop)
    assert (chat.messages, stored_ids(chat)) == before
    report = chat.report()
    assert report.plain_nbytes == chat.tokens * 2 * 2 * model_row(chat)
    text = f"{chat.tokens} tokens; full attention: each step reads all rows; memory: "
    assert str(report).startswith(text)
    chat.save(tmp_path / "saved")
    expected = chat.send(words(7, seed=9)).text
    chat.undo()
    chat.load(tmp_path / "saved")
    assert (chat.messages, chat.documents) == (before[0], [document])
    assert chat.send(words(7, seed=9)).text == expected
    indexed = chat_of(tokenizer)
    with pytest.raises(ValueError, match=r"saved with full attention, .*; pass index=None \(--ind"):
        indexed.load(tmp_path / "saved")
    indexed.send(words(7))
    indexed.save(tmp_path / "indexed")
    with pytest.raises(
        ValueError, match=r"saved with an index, but .*; pass index='exact' \(--index exact\)$"
    ):
        chat.load(tmp_path / "indexed")


def stop(phase, done, total):
    if phase == "decode" and done == 2:
        raise RuntimeError("stop")


def model_row(chat):
    """Bytes of the key of one token in one layer."""
    engine = chat._model if isinstance(chat, kvhf.Chat) else chat._decoder
    config = engine.config
    heads = getattr(config, "num_key_value_heads", None) or config.kv_heads
    return heads * config.head_dim * 4


@pytest.mark.parametrize(
    ("name", "kind", "thinks"),
    [
        ("gemma3_text", "sliding_attention", False),
        ("gemma3_text", "sliding_attention", True),
        ("qwen3_next", "linear_attention", False),
        slow("qwen3_next", "linear_attention", True),
    ],
)
def test_full_attention_with_layers_that_cannot_remove_tokens(name, kind, thinks):
    model, tokenizer = build(name, layer_types=[kind, "full_attention"] * 2), Tokenizer(thinks)
    chat = kvhf.Chat(model, tokenizer, index=None, **OPTIONS)
    for turn in range(3):
        other, before = chat.fork(), stored_ids(chat) if turn else []
        if not thinks:
            with pytest.raises(RuntimeError, match="stop"):
                chat.send(words(30, seed=turn), on_progress=stop)
            assert (stored_ids(chat) if turn else []) == before
        generation = chat.send(words(30, seed=turn))
        assert other.send(words(30, seed=turn)).text == generation.text
        asked = rendered(tokenizer, chat.messages[:-1])
        assert stored_ids(chat) == [*asked, *generation.answer_ids.tolist()]
        assert generation.answer_ids.tolist() == expected(model, asked)
        assert (chat.reused > 0) == (turn > 0 and not thinks)


def test_an_option_of_the_index_is_told_with_a_call_that_works(model):
    tokenizer = Tokenizer()
    line = r'pass index="exact:row_codec=int8" or attach_options='
    with pytest.raises(TypeError, match=line) as raised:
        kvhf.Chat(model, tokenizer, index="exact", row_codec="int8")
    given = literal_eval(str(raised.value).partition("attach_options=")[2])
    assert given == {"index_options": {"row_codec": "int8"}}
    with kvhf.Chat(model, tokenizer, index="exact", attach_options=given):
        pass


def test_what_full_attention_refuses(model, monkeypatch):
    with pytest.raises(ValueError, match=r"attach_options: got .* with index=None"):
        kvhf.Chat(model, Tokenizer(), index=None, attach_options=SIZES)
    monkeypatch.setattr("kvindex_adapters.hf.chat.reads_chunks", lambda model: False)
    for index in (None, "exact"):
        with pytest.raises(kvhf.UnsupportedError, match="must process a prompt in one call"):
            kvhf.Chat(model, Tokenizer(), index=index)


@pytest.mark.parametrize("read", [False, True], ids=["send", "read"])
def test_a_failed_turn_keeps_a_cache_with_unknown_ids(model, read):
    tokenizer = Tokenizer()
    with kvhf.attach(model, **REGIONS) as cache:
        model(torch.tensor([[33] * 20]), past_key_values=cache)
        chat = kvhf.Chat(model, tokenizer, cache=cache, **OPTIONS)
        options = dict(chunk=0) if read else dict(max_new_tokens=0)
        chat.options |= options
        removes = pytest.warns(UserWarning, match="this turn removes 20")
        with removes, pytest.raises(ValueError, match=f"^{next(iter(options))}: got 0"):
            chat.read("33") if read else chat.send("33")
        assert (cache.get_seq_length(), cache.ids, cache.usable) == (20, None, True)
        assert (chat.messages, chat.documents) == ([], [])
        model(torch.tensor([[34]]), past_key_values=cache)  # the tokens can be continued
        assert cache.get_seq_length() == 21


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("index", [None, "exact"])
def test_a_failed_turn_keeps_a_cache_that_cannot_remove_tokens(name, index):
    kind = "linear_attention" if name == "qwen3_next" else "sliding_attention"
    model, tokenizer = build(name, layer_types=[kind, "full_attention"] * 2), Tokenizer(thinks=True)
    with kvhf.Chat(model, tokenizer, index=index, **OPTIONS) as chat:
        chat.send(words(30))
        stored, other = stored_ids(chat), chat.fork()
        with pytest.raises(RuntimeError, match="stop"):
            chat.send(words(9), on_progress=stop)
        assert (stored_ids(chat), chat.tokens) == (stored, len(stored))
        assert chat.send(words(9)).text == other.send(words(9)).text


def test_a_failed_turn_keeps_a_session_with_unknown_ids(model):
    chat = kvdecoder.Chat(kvdecoder.Decoder.of(model, Tokenizer()), **OPENED, **OPTIONS)
    chat.send(words(20))
    session, session.ids = chat.session, None
    with pytest.raises(ValueError, match="max_new_tokens"):
        chat.send("33", max_new_tokens=0)
    assert chat.session is session


@pytest.mark.parametrize(
    ("documents", "got"), [("33 34", "str"), (("33",), "tuple"), (["33", 34], "a list with int")]
)
def test_documents_are_a_list_of_texts(chat_of, tmp_path, documents, got):
    chat = chat_of(Tokenizer())
    chat.send(words(8))
    messages, stored = list(chat.messages), stored_ids(chat)
    chat.documents = documents
    for call in (
        lambda: chat.send("33"),
        lambda: chat.read("33"),
        lambda: chat.save(tmp_path / "saved"),
        chat.fork,
    ):
        with pytest.raises(TypeError, match=rf"^documents: got {got}, allowed is a list of texts"):
            call()
    assert (chat.messages, chat.documents, stored_ids(chat)) == (messages, documents, stored)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(k=-3), ValueError, "^k: got -3, allowed is an integer of at least 1"),
        (dict(attach_options=SIZES), ValueError, "^attach_options: got .* with index=None"),
        (dict(template_option={}), TypeError, "did you mean 'template_options'"),
        (dict(templat_options={}), TypeError, "did you mean 'template_options'"),
        (dict(attach_option={}), TypeError, "did you mean 'attach_options'"),
    ],
)
def test_options_of_full_attention_are_checked(full_chat, options, error, match):
    with pytest.raises(error, match=match):
        full_chat(Tokenizer(), **options)
    full_chat(Tokenizer(), k=7)


def test_send_names_only_options_that_it_accepts(model, full_chat):
    chat = full_chat(Tokenizer())
    with pytest.raises(TypeError, match="did you mean 'template_options'"):
        chat.send("33", template_option={})
    decoder = kvdecoder.Chat(kvdecoder.Decoder.of(model, Tokenizer()), **OPENED)
    with pytest.raises(TypeError, match=r"got 'zzz', allowed is one of \[") as caught:
        decoder.send("33", zzz=1)
    for name in ("index", "'k'", "attach_options", "fused", "system"):
        assert name not in str(caught.value)


def test_documents_are_read_in_the_chunks_of_the_chat(chat_of, monkeypatch):
    used, read_prompt, prefill = [], kvdecoder.OpenSession.read_prompt, prefills.prefill

    def of_a_session(session, ids, chunk, *given):
        used.append(chunk)
        return read_prompt(session, ids, chunk, *given)

    def of_a_cache(*given, chunk, **options):
        used.append(chunk)
        return prefill(*given, chunk=chunk, **options)

    monkeypatch.setattr(kvdecoder.OpenSession, "read_prompt", of_a_session)
    monkeypatch.setattr(prefills, "prefill", of_a_cache)
    chat_of(Tokenizer(), chunk=20).read(words(60))
    assert used == [20]


def test_undo_keeps_the_system_message_and_earlier_turns(chat_of):
    chat = chat_of(Tokenizer(), system="9")
    first = chat.send(words(8))
    before = list(chat.messages)
    second = chat.send([user("30 31"), {"role": "tool", "content": "32"}])
    assert [one["role"] for one in chat.undo()] == ["user", "tool", "assistant"]
    assert chat.messages == before
    again = chat.send([user("30 31"), {"role": "tool", "content": "32"}])
    assert again.text == second.text
    assert first.text == before[-1]["content"]


def test_saved_chats_continue(chat_of, tmp_path):
    tokenizer = Tokenizer()
    chat = chat_of(tokenizer, system="9")
    chat.read(words(40))
    chat.send(words(8))
    chat.save(tmp_path / "saved")
    expected = chat.send(words(7, seed=1))
    chat.load(tmp_path / "saved")
    assert chat.documents == [words(40)]
    assert len(chat.messages) == 3
    chat.read(words(9))
    chat.load(tmp_path / "saved")  # replaces what the chat contains
    assert chat.documents == [words(40)]
    generation = chat.send(words(7, seed=1))
    assert chat.reused > 40
    assert generation.text == expected.text
    with pytest.raises(OSError, match="saved"):
        chat.save(tmp_path / "saved")


def test_a_saved_folder_has_its_name_only_when_it_is_complete(chat_of, tmp_path, monkeypatch):
    """So a process that is killed leaves no folder of this name."""
    chat, target, seen = chat_of(Tokenizer()), tmp_path / "saved", []
    chat.send(words(8))
    save = type(chat)._save

    def noted(self, folder):
        seen.append(target.exists())
        save(self, folder)
        seen.append(target.exists())

    monkeypatch.setattr(type(chat), "_save", noted)
    chat.save(target)
    assert seen == [False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_path_of_a_file_is_no_document(chat_of, tmp_path):
    file, chat = tmp_path / "a.txt", chat_of(Tokenizer())
    file.write_text("1 2 3")
    with pytest.raises(ValueError, match=r"which is the path of a file, .*read_text\(\)$"):
        chat.read(str(file))
    assert chat.documents == []


def test_arguments_in_the_wrong_order_say_so(model):
    with pytest.raises(TypeError, match=r"the order is Chat\(model, tokenizer\)"):
        kvhf.Chat(Tokenizer(), model)
    with pytest.raises(TypeError, match="system: got list, allowed is text or None"):
        kvhf.Chat(model, Tokenizer(), system=["9"])


def test_a_saved_chat_lacks_the_turn_that_was_undone(chat_of, tmp_path):
    tokenizer = Tokenizer()
    chat = chat_of(tokenizer, system="9")
    chat.send(words(20))
    first = list(chat.messages)
    chat.save(tmp_path / "first")
    chat.send(words(12, seed=1))
    stored = stored_ids(chat)
    chat.undo()
    chat.save(tmp_path / "undone")
    assert (chat.messages, stored_ids(chat)) == (first, stored)
    expected = chat.send(words(7, seed=2))
    assert len(chat.undo()) == len(chat.undo()) == 2
    assert [one["role"] for one in chat.messages] == ["system"]
    for name, more in [("first", []), ("undone", [END, USER])]:  # of the next question, too
        chat.load(tmp_path / name)
        answer = tokenizer(first[-1]["content"])["input_ids"]
        assert stored_ids(chat) == [*rendered(tokenizer, first[:-1]), *answer, *more]
        assert chat.messages == first
        again = chat.send(words(7, seed=2))
        assert (again.text, chat.messages[:-2]) == (expected.text, first)


def test_a_chat_whose_turns_were_all_undone(chat_of, tmp_path):
    chat = chat_of(Tokenizer())
    chat.send(words(20))
    chat.undo()
    chat.save(tmp_path / "saved")
    chat.load(tmp_path / "saved")
    assert (chat.messages, stored_ids(chat)) == ([], [SYSTEM, 9, 9, END, USER])
    chat.read(words(30))
    document = stored_ids(chat)
    chat.send(words(5))
    chat.undo()
    chat.save(tmp_path / "document")
    chat.load(tmp_path / "document")
    assert stored_ids(chat) == document


class Alternating(Tokenizer):
    """A template that rejects a question directly after a question."""

    def apply_chat_template(self, messages, **options):
        roles = [one["role"] for one in messages]
        if any(one == other == "user" for one, other in itertools.pairwise(roles)):
            raise TemplateError("roles must alternate")
        return super().apply_chat_template(messages, **options)


def test_a_saved_chat_lacks_undone_tokens_if_no_question_may_follow(chat_of, tmp_path):
    tokenizer = Alternating()
    chat = chat_of(tokenizer)
    chat.send(words(20))
    chat.send(words(12, seed=1))
    chat.undo()
    chat.messages.append(user("30 31"))  # the template rejects another question after this one
    messages = list(chat.messages)
    chat.save(tmp_path / "saved")
    chat.load(tmp_path / "saved")
    kept, asked = stored_ids(chat), rendered(tokenizer, messages, cue=False)
    assert kept == asked[: len(kept)]
    assert len(kept) > len(rendered(tokenizer, messages[:1]))
    assert chat.messages == messages


def test_a_chat_is_not_saved_if_its_messages_cannot_be_rendered(chat_of, tmp_path):
    chat = chat_of(Alternating())
    chat.send(words(20))
    chat.messages[-1] = user("30")  # two questions
    stored = stored_ids(chat)
    with pytest.raises(ValueError, match=r"^messages: got messages from which.*must alternate$"):
        chat.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert stored_ids(chat) == stored
    chat.messages = [user([{"type": "text", "text": "30"}])]
    chat.documents = [words(9)]
    with pytest.raises(ValueError, match=r"^messages: got messages from which.*allowed is text"):
        chat.save(tmp_path / "saved")


def test_a_missing_folder_is_named(chat_of, tmp_path):
    chat = chat_of(Tokenizer())
    with pytest.raises(FileNotFoundError, match=r"^folder: got '/no/where', which does not exist"):
        chat.load("/no/where")
    with pytest.raises(FileNotFoundError, match=r"which has no file chat\.json; allowed is a fold"):
        chat.load(tmp_path)


def test_a_document_is_a_text_and_not_a_path(chat_of, tmp_path):
    chat = chat_of(Tokenizer())
    path = tmp_path / "document"
    path.write_text(words(20))
    with pytest.raises(TypeError, match=r"document: got \w*Path, allowed .* path.read_text\(\)$"):
        chat.read(path)
    with pytest.raises(TypeError, match=r"document: got list, allowed is a text \(str\)$"):
        chat.read([words(20)])
    assert (chat.documents, chat.tokens) == ([], 0)


def test_a_streamer_is_an_object_and_not_a_flag(chat_of):
    chat = chat_of(Tokenizer())
    with pytest.raises(TypeError, match=r"streamer: got True, allowed is None or a streamer of tr"):
        chat.send(words(20), streamer=True)
    assert (chat.messages, chat.tokens) == ([], 0)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        slow("[]"),
        '{"messages": 3, "documents": []}',
        '{"messages": [], "documents": [1]}',
        slow('{"messages": {}, "documents": []}'),
        slow('{"messages": [], "documents": "text"}'),
    ],
)
def test_damaged_files_change_nothing(chat_of, tmp_path, damage):
    chat = chat_of(Tokenizer())
    chat.send(words(8))
    chat.save(tmp_path / "saved")
    (tmp_path / "saved" / "chat.json").write_text(damage)
    before = list(chat.messages), stored_ids(chat)
    with pytest.raises(ValueError, match=r"chat\.json"):
        chat.load(tmp_path / "saved")
    with pytest.raises(FileNotFoundError):
        chat.load(tmp_path / "nothing")
    assert (list(chat.messages), stored_ids(chat)) == before


def test_a_failed_turn_changes_nothing(chat_of):
    chat = chat_of(Tokenizer())
    chat.send(words(8))
    before = list(chat.messages), stored_ids(chat)
    for message, error in [
        (3, TypeError),
        ([], ValueError),
        ([{"role": "fool", "content": "3"}], ValueError),
    ]:
        with pytest.raises(error):
            chat.send(message)
    with pytest.raises((TypeError, ValueError)):
        chat.send("33", max_new_tokens=0)
    assert (list(chat.messages), stored_ids(chat)) == before


def test_an_empty_chat_cannot_be_saved(chat_of, tmp_path):
    with pytest.raises(ValueError, match="got an empty conversation, allowed is"):
        chat_of(Tokenizer()).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


NO_TOKENS = "^chat: got a cache that contains no tokens of the conversation; send a message first$"


def test_messages_of_which_the_cache_contains_no_tokens_cannot_be_saved(chat_of, tmp_path):
    chat = chat_of(Tokenizer(), system="9")
    with pytest.raises(ValueError, match=NO_TOKENS):
        chat.save(tmp_path / "saved")
    chat.send(words(20))
    chat.template_options["tools"] = [7]  # now the first token of the conversation is another
    chat.undo()
    with pytest.raises(ValueError, match=NO_TOKENS):
        chat.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_sliding_windows_read_again_what_they_cannot_remove():
    layers = ["sliding_attention", "full_attention"] * 2
    model = build("gemma3_text", layer_types=layers, sliding_window=16)
    tokenizer = Tokenizer(thinks=True)
    with kvhf.Chat(model, tokenizer, **OPTIONS, **OPENED) as chat:
        for turn in range(3):
            generation = chat.send(words(30, seed=turn))
            asked = rendered(tokenizer, chat.messages[:-1])
            assert stored_ids(chat) == [*asked, *generation.answer_ids.tolist()]


def test_a_saved_chat_with_sliding_windows_lacks_the_turn_that_was_undone(tmp_path):
    model = build("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    tokenizer = Tokenizer()
    with kvhf.Chat(model, tokenizer, **OPTIONS, **OPENED) as chat:
        for turn in range(3):
            chat.send(words(30, seed=turn))
        stored = stored_ids(chat)
        chat.undo()
        chat.save(tmp_path / "saved")
        assert stored_ids(chat) == stored
        answer = chat.send(words(7, seed=3)).text
        chat.load(tmp_path / "saved")
        assert len(stored_ids(chat)) < len(stored) - 30
        assert chat.send(words(7, seed=3)).text == answer


def test_several_chats_share_one_model(plain, model):
    tokenizer = Tokenizer()
    with kvhf.attach(model, **REGIONS) as cache:
        chats = [kvhf.Chat(model, tokenizer, cache=one, **OPTIONS) for one in (cache, cache.fork())]
        answers = [chat.send(words(12, seed=seed)) for seed, chat in enumerate(chats)]
        for seed, generation in enumerate(answers):
            check_answer(plain, tokenizer, [user(words(12, seed=seed))], generation)
        with pytest.raises(ValueError, match="index"):
            kvhf.Chat(model, tokenizer, cache=cache.fork(), index="quest")


def test_tokens_of_other_calls_are_removed(plain, model):
    tokenizer = Tokenizer()
    with kvhf.Chat(model, tokenizer, **OPENED, **OPTIONS) as chat:
        chat.send(words(12))
        model.generate(
            chat.cache.ids.new_tensor([[*stored_ids(chat), 33, 34]]),
            past_key_values=chat.cache,
            max_new_tokens=3,
        )
        generation = chat.send(words(6))
        check_answer(plain, tokenizer, chat.messages[:-1], generation)


def test_a_chat_needs_a_template_and_detaches(model):
    with pytest.raises(ValueError, match="chat template"):
        kvhf.Chat(model, Chat())
    with pytest.raises(ValueError, match="attach_options"):
        kvhf.Chat(model, Tokenizer(), attach_options={"k": 3})
    chat = kvhf.Chat(model, Tokenizer(), **OPENED)
    with pytest.raises(ValueError, match="attach"):
        kvhf.Chat(model, Tokenizer(), **OPENED)
    chat.close()
    kvhf.Chat(model, Tokenizer(), **OPENED).close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(max_tokens=5), "got the argument 'max_tokens'; did you mean 'max_new_tokens'"),
        (dict(local_window=8), "'local_window', which is an option of attach"),
        (dict(temprature=0.5), "did you mean 'temperature'"),
        (dict(system_prompt="9"), "got the argument 'system_prompt'; did you mean 'system'"),
    ],
)
def test_wrong_options_are_found_before_anything_is_read(model, options, match):
    with pytest.raises(TypeError, match=match):
        kvhf.Chat(model, Tokenizer(), **options)
    with kvhf.Chat(model, Tokenizer(), **OPENED) as chat, pytest.raises(TypeError, match=match):
        chat.send("33", **options)


def test_messages_of_the_template_are_those_of_the_roles():
    assert rendered(Tokenizer(), [user("40")])[-4:] == [USER, 40, END, ASSISTANT]
