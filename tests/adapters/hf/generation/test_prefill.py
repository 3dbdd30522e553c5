"""Indexes observe the text: sentences end at its punctuation."""

from itertools import product

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.info import reads_chunks, text_positions
from tests.adapters.hf.generation.test_generation import Words, full
from tests.adapters.tiny import build, prompt
from tests.support.helpers import mostly_slow, slow

STOPS = tuple(range(5, 101, 9))
SIZES = dict(k=20, sink=0, local_window=4, update_every=4, dense_below=0)
SIZES_ALL = {name: size for name, size in SIZES.items() if name != "k"}
OPTIONS = dict(index_options={"punctuation": STOPS}, **SIZES)


def inmost(index):
    return inmost(index.inner) if hasattr(index, "inner") else index


def lengths(cache):
    """Return the sizes of the sentences of each layer and sequence, and their number of tokens."""
    found = []
    for index in map(inmost, cache.indexes()):
        sizes = index._codes["sizes"][:, 0].tolist()
        found.append(([[size for size in row if size] for row in sizes], len(index)))
    return found


def in_words(tokens, longest=64):
    """Return the sizes of the sentences of tokens `[n]`."""
    sizes = [0]
    for token in tokens:
        sizes[-1] += 1
        if token in STOPS or sizes[-1] == longest:
            sizes.append(0)
    return [size for size in sizes if size]


def assert_as_in_words(cache, sequences, pads=(0, 0, 0)):
    for rows, count in lengths(cache):
        for sizes, tokens, pad in zip(rows, sequences.tolist(), pads, strict=False):
            assert sizes == in_words(tokens[pad:count])
            assert len(sizes) > 2, "the text has sentences"


@pytest.mark.parametrize(
    ("index", "batch"),
    mostly_slow(
        product(["sentencekv", "sentencekv+recall", "sentencekv+sample"], [1, 3]),
        ("sentencekv", 3),
        ("sentencekv+recall", 1),
    ),
)
def test_sentences_are_those_of_the_text_and_of_what_is_written(index, batch):
    model, inputs = build("llama", eos_token_id=None), prompt(batch, 60, padded=True)
    with kvhf.attach(model, index=index, **OPTIONS) as cache, torch.inference_mode():
        options = dict(max_new_tokens=30, do_sample=False)
        out = model.generate(**inputs, past_key_values=cache, **options)
        assert len(cache.indexes()[0]) > 70
        assert_as_in_words(cache, out, pads=[0, 5, 10])


def test_a_prompt_in_pieces_a_cut_and_another_text_after_it():
    model, (one, other) = build("llama"), prompt(2, 60)["input_ids"]
    with kvhf.attach(model, index="sentencekv", **OPTIONS) as cache, torch.inference_mode():
        prefill(model, one, cache, stop=60, chunk=16)
        assert_as_in_words(cache, one[None])
        cache.crop(-30)
        model(input_ids=other[None, 30:], past_key_values=cache)
        assert_as_in_words(cache, torch.cat([one[:30], other[30:]])[None])


def test_beams_read_on_where_they_came_from():
    model, inputs = build("llama"), prompt(1, 60)
    with kvhf.attach(model, index="sentencekv", **OPTIONS) as cache, torch.inference_mode():
        options = dict(max_new_tokens=25, num_beams=3, num_return_sequences=3, do_sample=False)
        out = model.generate(**inputs, past_key_values=cache, **options)
        prompts = {tuple(in_words(tokens[:60])[:3]) for tokens in out.tolist()}
        assert all(tuple(sizes[:3]) in prompts for rows, _ in lengths(cache) for sizes in rows)


def test_steps_at_once_read_too():
    model, ids = build("llama"), prompt(1, 80)["input_ids"][0]
    options = dict(index="sentencekv:query=token", layer=ParallelLayer, **OPTIONS)
    with kvhf.attach(model, **options) as cache, torch.inference_mode():
        prefill(model, ids, cache, stop=50, chunk=16)
        model(input_ids=ids[None, 50:], past_key_values=cache)
        assert_as_in_words(cache, ids[None])


def test_reuse_marks_its_boundaries_besides():
    model, inputs = build("llama", eos_token_id=None), prompt(1, 60)
    options = dict(max_new_tokens=30, do_sample=False)
    with kvhf.attach(model, index="sentencekv+reuse:tau=2", **OPTIONS) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        for rows, count in lengths(cache):
            assert rows == [in_words(out[0, :60].tolist()) + [1] * (count - 60)]
    with kvhf.attach(model, index="sentencekv+reuse:tau=-2", **OPTIONS) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        assert_as_in_words(cache, out)


def test_a_model_that_is_given_no_ids_still_runs():
    model, ids = build("llama"), prompt(1, 60)["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    with kvhf.attach(model, index="sentencekv", **OPTIONS) as cache, torch.inference_mode():
        model(inputs_embeds=embeddings, past_key_values=cache)
        assert cache.tokens is None
        assert [rows for rows, _ in lengths(cache)] == [[[56]]] * 4  # one page of 64


@pytest.mark.parametrize(
    ("family", "options"),
    [("roberta", {"is_decoder": True}), slow("llama", {}), ("zamba", {}), slow("zamba2", {})],
)
def test_a_prompt_in_chunks_is_answered_as_by_the_plain_model(family, options):
    """roberta computes its own positions if it gets none, and zamba's states begin again."""
    inputs = prompt(1, 60)
    model = build(family, **options, eos_token_id=None)
    expected = full(model, inputs)[0, 60:]
    ids = inputs["input_ids"][0]
    options = dict(chunk=16, max_new_tokens=len(expected))
    for index in ({"index": None}, {"index": "exact", "k": 500, "attach_options": SIZES_ALL}):
        answer = kvhf.generate(model, Words(), ids, **index, **options).answer_ids
        assert torch.equal(answer, expected)


@pytest.mark.parametrize(("family", "calls"), [("zamba", [60]), ("zamba2", [16, 16, 16, 12])])
def test_states_that_begin_anew_in_each_call_are_read_in_one(family, calls):
    model, ids, seen = build(family), prompt(1, 60)["input_ids"][0], []
    assert reads_chunks(model) == (len(calls) > 1)
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with kvhf.attach(model, index="exact") as cache:
        kvhf.read(model, Words(), ids, cache=cache, chunk=16)
    assert seen == calls


def test_states_that_begin_anew_in_each_call_cannot_be_continued():
    """One token may follow, which continues the state. Several tokens would forget the prompt."""
    model, ids = build("zamba"), prompt(1, 60)["input_ids"]
    refused = pytest.raises(kvhf.UnsupportedError, match="9 tokens follow 60 tokens in the cache")
    with kvhf.attach(model, index="exact", k=500, **SIZES_ALL) as cache:
        kvhf.read(model, Words(), ids[0, :60], cache=cache)
        for call in (
            lambda: kvhf.read(model, Words(), ids[0, :9], cache=cache, used="continue"),
            lambda: kvhf.generate(model, Words(), ids[0, :9], cache=cache, used="continue"),
        ):
            with refused:
                call()
            assert cache.get_seq_length() == 60
        model(ids[:, -1:], past_key_values=cache)
        assert cache.get_seq_length() == 61


def test_positions_are_those_that_generate_passes():
    model, seen = build("llama"), []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["position_ids"].tolist()), with_kwargs=True
    )
    with kvhf.attach(model, index="exact") as cache:
        for used in ("refuse", "continue"):
            kvhf.read(model, Words(), torch.tensor([5, 6, 7, 8]), cache=cache, used=used, chunk=2)
    assert seen == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert text_positions(build("mamba"), 0, 2) is None


class Tokenizer:
    """A tokenizer with one token per word."""

    words = (" the", ".", " end.", ' end."', "?)", "\n\n", " \n  ", "...", "x", ". x", "。", "<s>.")
    all_special_ids = (11,)

    def __len__(self):
        return len(self.words)

    def batch_decode(self, rows, **options):
        return [self.words[i] for (i,) in rows]


def test_sentences_end_with_stops_closing_marks_and_new_lines():
    assert kvhf.sentence_ends(Tokenizer()) == (1, 2, 3, 4, 5, 6, 7, 10)


def test_an_index_that_wants_punctuation_gets_the_tokenizers():
    ends, tokenizer = kvhf.sentence_ends(Tokenizer()), Tokenizer()
    got = punctuated("sentencekv+reuse", tokenizer, {"sink": 3, "index_options": {"longest": 9}})
    assert got == {"sink": 3, "index_options": {"longest": 9, "punctuation": ends}}
    given = {"index_options": {"punctuation": 5}}
    assert punctuated("sentencekv", tokenizer, given) == given
    assert punctuated("sentencekv:punctuation=5", tokenizer) == {}
    assert punctuated("exact", tokenizer) == punctuated(lambda **_: None, tokenizer) == {}
