"""`PlainCache`: a cache without an index notices other calls, other models and failed calls."""

import copy
import pickle

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex import registry
from kvindex_adapters.hf.generation.plain_cache import PlainCache
from tests.adapters.decoder.families import model_of
from tests.adapters.hf.generation.test_turns import expected, rendered, user, words
from tests.adapters.hf.test_chat import OPTIONS, Tokenizer, stored_ids
from tests.adapters.tiny import build

FULL = dict(index=None, **OPTIONS)
SLIDING = dict(layer_types=["full_attention", "sliding_attention"] * 2)


@pytest.fixture(scope="module")
def model():
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture
def chat(model):
    chat = kvhf.Chat(model, Tokenizer(), **FULL)
    chat.send(words(30))
    return chat


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


def fail_in(model, monkeypatch, number):
    """Let layer `number` of a model fail."""

    def fail(*given, **options):
        raise RuntimeError("half way")

    monkeypatch.setattr(model.model.layers[number], "forward", fail)


def test_tokens_of_other_calls_are_removed(model, chat):
    model(torch.tensor([words_as_ids(20)]), past_key_values=chat.cache)
    assert chat.cache.ids is None
    generation = chat.send(words(6))
    asked = rendered(Tokenizer(), chat.messages[:-1])
    assert generation.answer_ids.tolist() == expected(model, asked)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
    ):
        other = chat.cache.fork()
        change(other)
        assert other.ids is None


def words_as_ids(count):
    return [int(word) for word in words(count).split()]


def test_several_sequences_are_refused(model, chat):
    cache = PlainCache(model)
    model(torch.tensor([[33, 34], [35, 36]]), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^cache: got a cache of 2 sequences, allowed is 1$"):
        kvhf.generate(model, Tokenizer(), "33", cache=cache, used="continue")


def test_linear_attention_of_other_calls_makes_ids_unknown():
    model = build("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    chat = kvhf.Chat(model, Tokenizer(), **FULL)
    chat.send(words(10))
    layer, ids = chat.cache.layers[0], chat.cache.ids
    states = {"update_conv_state": layer.conv_states, "update_recurrent_state": None}
    states["update_recurrent_state"] = layer.recurrent_states
    for name, state in states.items():
        chat.cache.ids = ids
        getattr(chat.cache, name)(state[0].clone(), 0)
        assert chat.cache.ids is None


def test_the_report_counts_linear_attention_states():
    model = build("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    chat = kvhf.Chat(model, Tokenizer(), **FULL)
    chat.send(words(10))
    linear, full = chat.cache.layers[:2]
    states = linear.conv_states[0].nbytes + linear.recurrent_states[0].nbytes
    rows = full.keys.nbytes + full.values.nbytes
    assert states > 0
    assert chat.report().plain_nbytes == 2 * (states + rows)


@pytest.mark.parametrize("tokens", [0, 30])
def test_a_forward_pass_that_failed_half_way(model, monkeypatch, tokens, tmp_path):
    chat = kvhf.Chat(model, Tokenizer(), **FULL)
    if tokens:
        chat.send(words(tokens))
    with monkeypatch.context() as patch:
        fail_in(model, patch, 1)
        with pytest.raises(RuntimeError, match="half way"):
            model(torch.tensor([[33, 34, 35]]), past_key_values=chat.cache)
    stored = chat.cache.get_seq_length()
    given = dict(cache=chat.cache, used="continue", **OPTIONS)
    calls = [
        lambda: kvhf.generate(model, Tokenizer(), "33", **given),
        lambda: chat.cache.save(tmp_path / "saved"),
        chat.fork,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"failed half way .*{stored} tokens\); call reset"):
            call()
    assert not (tmp_path / "saved").exists()
    generation = chat.send(words(6))  # reads the whole conversation
    asked = rendered(Tokenizer(), chat.messages[:-1])
    assert generation.answer_ids.tolist() == expected(model, asked)


def test_linear_attention_that_failed_half_way(monkeypatch):
    model = build("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    cache = PlainCache(model)
    with monkeypatch.context() as patch:
        fail_in(model, patch, 1)
        with pytest.raises(RuntimeError, match="half way"):
            model(torch.tensor([[33, 34, 35]]), past_key_values=cache)
    with pytest.raises(RuntimeError, match="layers with linear attention have processed tokens"):
        cache.check_usable()
    cache.reset()
    cache.check_usable()


def test_another_model_is_refused(model, chat):
    other = model_of("llama", num_hidden_layers=2)
    stored = stored_ids(chat)
    match = "^model: got a LlamaForCausalLM other than the LlamaForCausalLM that this cache"
    with pytest.raises(kvhf.UnsupportedError, match=match):
        kvhf.Chat(other, Tokenizer(), cache=chat.cache.fork(), **OPTIONS)
    for call in (kvhf.generate, kvhf.read):
        with pytest.raises(kvhf.UnsupportedError, match=match):
            call(other, Tokenizer(), "33", cache=chat.cache, used="continue")
    assert stored_ids(chat) == stored
    kvhf.Chat(model, Tokenizer(), cache=chat.cache.fork(), **OPTIONS).send(chat.messages[:1])


def test_full_attention_may_be_passed_with_its_cache(model, chat):
    given = dict(cache=chat.cache, used="branch", **FULL)
    branch = kvhf.generate(model, Tokenizer(), [user(words(6))], **given)
    assert branch.text == chat.fork().send(words(6)).text
    kvhf.Chat(model, Tokenizer(), cache=chat.cache.fork(), **FULL)
    with pytest.raises(ValueError, match=r"^index: got a value together with cache="):
        kvhf.generate(model, Tokenizer(), "33", **{**given, "index": "quest"})
    with (
        kvhf.attach(model, index="exact") as cache,
        pytest.raises(ValueError, match=r"^index: got a v"),
    ):
        kvhf.generate(model, Tokenizer(), "33", **{**given, "cache": cache})


def test_only_an_empty_cache_loads_and_only_a_consistent_one_is_saved(model, chat, tmp_path):
    cache, ids = chat.cache, chat.cache.ids
    with pytest.raises(ValueError, match=r"len\(cache\): got 0"):
        PlainCache(model).save(tmp_path / "saved")
    cache.ids = ids[:-1]
    with pytest.raises(ValueError, match=rf"^cache\.ids: got {len(ids) - 1} ids, .* {len(ids)} to"):
        cache.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    cache.ids = ids
    cache.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"^cache: got a cache with {len(ids)} tokens; use an em"):
        cache.load(tmp_path / "saved")
    assert cache.ids is ids
    other = PlainCache(model)
    other.load(tmp_path / "saved")
    assert other.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("damage", ["ids", "layer"])
def test_a_folder_with_other_numbers_of_tokens_is_refused(model, chat, tmp_path, damage):
    cache = chat.cache
    if damage == "ids":
        cache.ids = cache.ids[:-1]
        match = "ids"
    else:
        cache.layers[1].crop(-1)
        match = "whose layers have different numbers of tokens"
    with pytest.MonkeyPatch.context() as patch:  # save without the check
        patch.setattr(PlainCache, "check_usable", lambda self: None)
        tokens = len(cache.ids)
        patch.setattr(PlainCache, "get_seq_length", lambda self: tokens)
        cache.save(tmp_path / "saved")
    other = PlainCache(model)
    with pytest.raises(ValueError, match=match):
        other.load(tmp_path / "saved")
    assert (lengths(other), other.ids) == ([0, 0], None)


@pytest.mark.parametrize("index", [None, "exact"])
def test_assisted_decoding_leaves_windows_of_their_usual_size(index):
    model, plain, tokenizer = build("gemma3_text"), build("gemma3_text"), Tokenizer()
    plain.load_state_dict(model.state_dict())
    with kvhf.Chat(model, tokenizer, index=index, **OPTIONS) as chat:
        chat.send(words(30), prompt_lookup_num_tokens=3)
        for layer in chat.cache.layers:
            if layer.is_sliding:
                assert not layer.record_past
                assert layer.keys.shape[2] == layer.values.shape[2] == layer.sliding_window - 1
        chat.send(words(20, seed=1))
        chat.undo()
        chat.messages[0] = user(words(30)[:-8])
        generation = chat.send(words(5, seed=4))
        asked = rendered(tokenizer, chat.messages[:-1])
    assert generation.answer_ids.tolist() == expected(plain, asked)


def test_recorded_convolution_states_get_their_usual_size():
    model = build("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2)
    caches = [PlainCache(model), PlainCache(model)]
    caches[0].activate_past_recording()
    for ids in ([33, 34], [35, 36, 37, 38, 39, 40]):
        with torch.no_grad():
            for cache in caches:
                model(torch.tensor([ids]), past_key_values=cache)
        caches[0].stop_recording()
        for recorded, usual in zip(caches[0].layers[::2], caches[1].layers[::2], strict=True):
            assert not recorded.record_past
            assert torch.equal(recorded.conv_states[0], usual.conv_states[0])


@pytest.mark.parametrize("index", [None, "exact"])
def test_a_crop_that_fails_changes_no_layer(index):
    model = build("gemma3_text", **SLIDING)
    with kvhf.Chat(model, Tokenizer(), index=index, **OPTIONS) as chat:
        chat.send(words(40))
        cache, ids = chat.cache, chat.cache.ids
        before = lengths(cache)
        with pytest.raises(RuntimeError):
            cache.crop(-5)  # the full layer before the sliding window can remove tokens
        assert lengths(cache) == before
        cache.activate_past_recording()
        with pytest.raises(RuntimeError, match="older tokens were discarded already"):
            cache.crop(-5)
        assert lengths(cache) == before
        assert cache.ids is ids


def test_copies_share_the_model_and_the_stored_tokens(model, chat):
    for copied in (chat.cache.fork(), copy.deepcopy(chat.cache)):
        assert copied._model is model
        assert stored_ids(chat) == copied.ids.tolist()
        for one, other in zip(chat.cache.layers, copied.layers, strict=True):
            assert one is not other
            assert one.keys.data_ptr() == other.keys.data_ptr()
            assert one.values.data_ptr() == other.values.data_ptr()
    for call in (copy.copy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"^cache: got pickle or copy\.copy; use copy\.deepcopy"
        ):
            call(chat.cache)


class Unnamed(registry.get("exact")):
    """An index that is not in the registry."""


def test_a_folder_of_the_other_kind_names_the_index_to_pass(model, chat, tmp_path):
    given = dict(attach_options=dict(local_window=8, dense_below=0))
    indexes = {
        "exact:row_codec=int8": r"pass index='exact:row_codec=int8' \(--index exact:row_codec=int8",
        "quest+sample": r"pass index='quest\+sample' \(--index quest\+sample\)$",
        Unnamed: r"pass the same index=… \(--index …\) as for the saved cache$",
    }
    for number, (index, match) in enumerate(indexes.items()):
        with kvhf.Chat(model, Tokenizer(), index=index, **given, **OPTIONS) as indexed:
            indexed.send(words(30))
            indexed.save(tmp_path / str(number))
        before = stored_ids(chat)
        with pytest.raises(ValueError, match=match):
            chat.load(tmp_path / str(number))
        assert stored_ids(chat) == before
