"""The decoder's tokens equal those of transformers, with and without `attach`.

Calls of the decoder leave no state behind.
"""

import dataclasses
import gc
import inspect
import weakref

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.pariskv.index import ParisKV
from kvindex_adapters.common.layer_options import LayerOptions
from kvindex_adapters.decoder import Decoder, layers
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import LAYERS
from tests.support.helpers import mostly_slow

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
INDEXES = ["exact", "pariskv", "quest", "exact+vattention"]
FEW = dict(k=10, attach_options=REGIONS)


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder.of(model, Words())


def attached(model, ids, count, mask=None, **options):
    """Return greedy tokens of `model.generate` inside `attach`, int64 `[B, M]`, and the report."""
    with kvhf.attach(model, **options) as cache:
        given = dict(attention_mask=torch.ones_like(ids) if mask is None else mask)
        given |= dict(max_new_tokens=count, do_sample=False)
        made = model.generate(ids, past_key_values=cache, **given)
        return made[:, ids.shape[1] :], cache.report()


@pytest.mark.parametrize("index", mostly_slow(INDEXES, "pariskv"))
def test_seventy_tokens_are_those_of_attach(model, decoder, index):
    """The answer includes eight updates of each layer.

    The slow test in `test_smollm2.py` compares two hundred tokens.
    """
    ids = ids_of(60)
    tokens, report = attached(model, ids[None], 70, index=index, k=10, **REGIONS)
    answer = decoder.generate(ids, index=index, max_new_tokens=70, **FEW)
    assert torch.equal(answer.answer_ids, tokens[0])
    assert answer.report == report
    assert answer.report.rows_read_fraction < 0.3


def test_memory_is_got_before_the_first_token(decoder, monkeypatch):
    asked = []

    def reserve_ahead(self, tokens, *, batch):
        asked.append((len(self), tokens, batch))

    monkeypatch.setattr(ParisKV, "reserve_ahead", reserve_ahead)
    decoder.generate([ids_of(60), ids_of(50)], max_new_tokens=3, chunk=16, **FEW)
    assert asked == [(0, 63, 2)] * decoder.config.layers


def test_a_prompt_that_fails_needs_no_more_memory(decoder, monkeypatch):
    asked = []

    def reserve_ahead(self, tokens, *, batch):
        asked.append((tokens, batch))

    def stop(phase, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(ParisKV, "reserve_ahead", reserve_ahead)
    prompts = [ids_of(60), ids_of(50)]
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompts, max_new_tokens=3, chunk=16, on_progress=stop, **FEW)
    layers = decoder.config.layers
    assert asked == [(63, 2)] * layers + [(0, 2)] * layers


@pytest.mark.parametrize("family", mostly_slow(["mistral", "qwen2", "qwen3"], "qwen3"))
def test_other_families_search_as_attach_does(family):
    model, ids = model_of(family), ids_of(60)
    tokens, _ = attached(model, ids[None], 40, index="pariskv", k=10, **REGIONS)
    answer = Decoder.of(model).generate(ids, max_new_tokens=40, **FEW)
    assert torch.equal(answer.answer_ids, tokens[0])


def test_without_an_index_tokens_are_those_of_transformers(model, decoder):
    ids = ids_of(50)
    tokens = model.generate(ids[None], max_new_tokens=60, do_sample=False)[0, 50:]
    answer = decoder.generate(ids, index=None, max_new_tokens=60)
    assert torch.equal(answer.answer_ids, tokens)
    assert (answer.report, answer.config, answer.backend) == (None, None, None)


@pytest.mark.parametrize("length", mostly_slow([40, 41, 42, 47], 41))
def test_a_prompt_in_pieces_is_read_as_generate_reads_it(model, decoder, length):
    given = dict(index="pariskv", chunk=8, max_new_tokens=30, **FEW)
    theirs = kvhf.generate(model, Words(), ids_of(length), **given)
    ours = decoder.generate(ids_of(length), **given)
    assert torch.equal(ours.answer_ids, theirs.answer_ids)
    assert torch.equal(ours.prompt_ids, theirs.prompt_ids)
    assert (ours.text, ours.report, ours.config) == (theirs.text, theirs.report, theirs.config)


def test_options_of_attach_mean_what_they_mean_there(model, decoder):
    options = dict(
        **REGIONS,
        dense_layers=(1,),
        coverage=0.8,
        index_options=dict(preset="fast"),
        layer_options={2: dict(beta=0.5)},
    )
    tokens, report = attached(model, ids_of(60)[None], 40, index="pariskv", k=10, **options)
    given = dict(index="pariskv", k=10, attach_options=options)
    answer = decoder.generate(ids_of(60), max_new_tokens=40, **given)
    assert torch.equal(answer.answer_ids, tokens[0])
    assert answer.report.nbytes == report.nbytes
    assert answer.report.rows_read == report.rows_read
    assert answer.report.coverage == pytest.approx(report.coverage, abs=1e-4)


def test_defaults_are_those_of_attach():
    attach = inspect.signature(kvhf.attach).parameters
    fields = {field.name: field.default for field in dataclasses.fields(LayerOptions)}
    others = ("model", "token_graph", "fused")  # the decoder's tokens are graphs by themselves
    assert fields == {name: attach[name].default for name in attach if name not in others}


def test_a_padded_batch_is_that_of_attach(model, decoder):
    prompts = [ids_of(60), ids_of(33), ids_of(59)]
    batch = decoder.start(prompts).ids
    mask = torch.tensor([[0] * (60 - len(row)) + [1] * len(row) for row in prompts])
    tokens, _ = attached(model, batch, 40, mask, index="pariskv", k=10, **REGIONS)
    answers = decoder.generate(prompts, max_new_tokens=40, **FEW)
    assert [answer.answer_ids.tolist() for answer in answers] == tokens.tolist()


@pytest.mark.parametrize("index", mostly_slow([None, "exact"], None))
def test_a_batch_equals_its_rows(decoder, index):
    prompts, given = [ids_of(60), ids_of(1), ids_of(33)], dict(index=index, k=500)
    given |= dict(max_new_tokens=30, attach_options=index and REGIONS)
    together = decoder.generate(prompts, **given)
    for ids, answer in zip(prompts, together, strict=True):
        alone = decoder.generate(ids, **given)
        assert torch.equal(answer.answer_ids, alone.answer_ids)
        assert torch.equal(answer.prompt_ids, ids)
        assert answer.text == alone.text


def test_a_list_of_one_prompt_gives_a_list(decoder):
    assert len(decoder.generate([ids_of(5)], max_new_tokens=2)) == 1
    assert len(decoder.generate(["10 11 12", "13 14"], max_new_tokens=2)) == 2


def test_a_second_prompt_and_two_decoders_in_turn(model, decoder):
    other = Decoder.of(model_of("qwen3"), Words())
    first, second = (one.generate(ids_of(60), max_new_tokens=20, **FEW) for one in (decoder, other))
    runs = [one.stream(ids_of(60), max_new_tokens=20, **FEW) for one in (decoder, other, decoder)]
    decoder.generate(ids_of(45), max_new_tokens=20, **FEW)
    made = [torch.cat(tokens) for tokens in zip(*zip(*runs, strict=True), strict=True)]
    for tokens, answer in zip(made, (first, second, first), strict=True):
        assert torch.equal(tokens, answer.answer_ids)


class Breaks:
    """A streamer that raises at its fifth token."""

    def __init__(self):
        self.left = 6

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def end(self):
        raise AssertionError


def breaking(function, calls):
    """Wrap a function so that it raises at one of its calls."""
    left = iter(range(calls))

    def call(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args)

    return call


@pytest.mark.parametrize("where", mostly_slow(["between tokens", "in a layer"], "in a layer"))
def test_after_an_exception_the_next_prompt_is_as_ever(decoder, monkeypatch, where):
    given = dict(max_new_tokens=30, **FEW)
    before = decoder.generate(ids_of(60), **given)
    broken, streamer = breaking(layers.gated, 4 * LAYERS + 2), None
    if where == "between tokens":
        broken, streamer = layers.gated, Breaks()
    with monkeypatch.context() as patch:
        patch.setattr(layers, "gated", broken)
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(ids_of(60), streamer=streamer, **given)
    again = decoder.generate(ids_of(60), **given)
    assert torch.equal(again.answer_ids, before.answer_ids)
    assert again.report == before.report


def test_an_answer_ends_with_its_stop_token(model, decoder):
    given = dict(max_new_tokens=30, **FEW)
    prompts = [ids_of(60), ids_of(33)]
    whole = decoder.generate(prompts, **given)
    end = int(whole[0].answer_ids[7])
    parts = decoder.generate(prompts, stop={end}, **given)
    for all_of_it, part in zip(whole, parts, strict=True):
        tokens = all_of_it.answer_ids.tolist()
        stop = tokens.index(end) + 1 if end in tokens else 30
        assert part.answer_ids.tolist() == tokens[:stop]
    assert len(list(decoder.stream(ids_of(60), stop=[end], **given))) == len(parts[0].answer_ids)


def test_end_tokens_are_those_of_the_generation_configuration(model):
    ids = ids_of(50)
    tokens = Decoder.of(model).generate(ids, index=None, max_new_tokens=20).answer_ids.tolist()
    for end in (tokens[6], [tokens[6], tokens[3]]):
        ended = model_of("llama")
        ended.generation_config.eos_token_id = end
        given = dict(max_new_tokens=20, index=None)
        ours = Decoder.of(ended).generate(ids, **given).answer_ids
        theirs = ended.generate(ids[None], max_new_tokens=20, do_sample=False)[0, 50:]
        assert torch.equal(ours, theirs)
        assert len(Decoder.of(ended).generate(ids, stop=(), **given).answer_ids) == 20


class Told:
    """A streamer that stores the tokens that it gets."""

    def __init__(self):
        self.put_ids, self.ended = [], False

    def put(self, value):
        self.put_ids += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_tokens_and_progress_are_told_as_generate_tells_them(model, decoder):
    told, progress = [Told(), Told()], ([], [])
    given = dict(max_new_tokens=6, chunk=16, **FEW)
    for generate, streamer, calls in zip(
        (decoder.generate, lambda *a, **o: kvhf.generate(model, Words(), *a, **o)),
        told,
        progress,
        strict=True,
    ):
        answer = generate(
            ids_of(50),
            streamer=streamer,
            on_progress=lambda *call, c=calls: c.append(call),
            **given,
        )
    assert told[0].put_ids == told[1].put_ids == [*ids_of(50).tolist(), *answer.answer_ids.tolist()]
    assert told[0].ended
    layers = [("prefill", 50 * done // LAYERS, 50) for done in range(1, LAYERS)]
    assert progress[0] == layers + progress[1][-7:]  # layer by layer, then token by token
    assert progress[1][-7] == ("prefill", 50, 50)


def test_what_a_caller_sets_changes_no_token(decoder):
    given = dict(max_new_tokens=10, **FEW)
    before = decoder.generate(ids_of(50), **given).answer_ids
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decoder.generate(ids_of(50), **given).answer_ids, before)
    assert not torch.is_inference_mode_enabled()


def test_weights_are_the_models_own(model, decoder):
    held = {weight.data_ptr() for weight in model.parameters()}
    assert {layer.down.weight.data_ptr() for layer in decoder.weights.layers} <= held
    assert decoder.weights.embedding.data_ptr() in held


@pytest.mark.parametrize("how", ["to its end", "broken off"])
def test_a_sequence_that_nobody_holds_is_gone_at_once(decoder, how):
    gc.disable()
    try:
        run = decoder.start(ids_of(60), max_new_tokens=20, **FEW)
        tokens = run.tokens()
        made = [
            token for token, _ in zip(tokens, range(5 if how == "broken off" else 99), strict=False)
        ]
        held = [weakref.ref(index) for index in run.session.indexes()]
        del run, tokens
        assert len(made) == (5 if how == "broken off" else 20)
        assert [index() for index in held] == [None] * LAYERS
    finally:
        gc.enable()
