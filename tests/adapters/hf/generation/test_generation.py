"""generate() with an index gives the results of full attention, in every mode.

The file is long, because it has a test for each mode.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import kvindex_adapters.hf as kvhf
from kvindex.pariskv.index import ParisKV
from kvindex_adapters.hf.generation.prefill import default_chunk, prefill
from tests.adapters.tiny import VOCABULARY, build, prompt
from tests.support.helpers import sampled

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
NEW = 16


@pytest.fixture(scope="module")
def model():
    return build("llama", eos_token_id=None)


def full(model, inputs, **options):
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})


def indexed(model, inputs, **options):
    with kvhf.attach(model, **REGIONS) as cache:
        options = {"do_sample": False, **options}
        return model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **options)


def test_greedy(model):
    inputs = prompt(1, 50)
    assert torch.equal(indexed(model, inputs), full(model, inputs))


def test_left_padded_batch(model):
    inputs = prompt(3, 50, padded=True)
    assert torch.equal(indexed(model, inputs), full(model, inputs))


def test_a_batch_equals_its_rows(model):
    """Catches metadata of left-padded batches that is read at the wrong position."""
    inputs = prompt(3, 50, padded=True)
    together = indexed(model, inputs)
    for row in range(3):
        alone = {name: tensor[row : row + 1, 5 * row :] for name, tensor in inputs.items()}
        assert torch.equal(indexed(model, alone)[0], together[row, 5 * row :])


def test_rows_of_a_batch_end_at_different_steps(model):
    """A sequence that has ended gets padding while the others continue."""
    inputs = prompt(3, 50, padded=True)
    tokens = full(model, inputs)[:, 50:]
    end = int(tokens[1, 5])  # the second sequence ends here at the latest
    options = dict(eos_token_id=end, pad_token_id=0)
    expected = full(model, inputs, **options)
    assert (expected[1] == 0).sum() > (prompt(3, 50, padded=True)["input_ids"][1] == 0).sum()
    assert torch.equal(indexed(model, inputs, **options), expected)


def test_positions_are_those_of_full_attention(model):
    """Catches positions that are off by one after the first layer, by rotary angles in the
    logits."""
    seen = []
    inputs = prompt(1, 50)
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()[0]),
        with_kwargs=True,
    )
    indexed(model, inputs)
    handle.remove()
    assert seen[0] == list(range(50))
    assert [step[0] for step in seen[1:]] == list(range(50, 50 + NEW - 1))


def test_beam_search(model):
    inputs = prompt(2, 40, padded=True)
    beams = dict(num_beams=3, num_return_sequences=2)
    assert torch.equal(indexed(model, inputs, **beams), full(model, inputs, **beams))


def test_sampling_with_a_seed(model):
    inputs = prompt(2, 40)

    def sample(generate):
        torch.manual_seed(5)
        return generate(do_sample=True, temperature=0.7, top_k=20, num_return_sequences=2)

    ours = sample(lambda **options: indexed(model, inputs, **options))
    theirs = sample(lambda **options: model.generate(**inputs, max_new_tokens=NEW, **options))
    assert torch.equal(ours, theirs)


def test_assisted_decoding(model):
    """Verification steps have several queries, and rejected tokens are cropped."""
    assistant = build("llama", num_hidden_layers=1, eos_token_id=None)
    inputs = prompt(1, 40)
    with kvhf.attach(model, **REGIONS) as cache:
        out = model.generate(
            **inputs,
            past_key_values=cache,
            assistant_model=assistant,
            max_new_tokens=NEW,
            do_sample=False,
        )
        assert cache.report().tokens == out.shape[1] - 1
    assert torch.equal(out, full(model, inputs))


def test_prompt_lookup_decoding(model):
    ids = prompt(1, 12)["input_ids"].repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(indexed(model, inputs, prompt_lookup_num_tokens=3), full(model, inputs))


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_decoding_whose_steps_search(model, how):
    ids = prompt(1, 12)["input_ids"].repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = dict(prompt_lookup_num_tokens=3)
    if how == "assistant":
        options = dict(assistant_model=build("llama", num_hidden_layers=1, eos_token_id=None))
    made = dict(max_new_tokens=NEW, do_sample=False, **options)
    with kvhf.attach(model, **REGIONS, search_up_to=32) as cache:
        out = model.generate(**inputs, past_key_values=cache, **made)
        report = cache.report()
        assert report.tokens == out.shape[1] - 1
        assert report.steps >= NEW - 2
    assert torch.equal(out, full(model, inputs))


def test_chunked_prefill(model):
    inputs = prompt(1, 50)
    assert torch.equal(indexed(model, inputs, prefill_chunk_size=7), full(model, inputs))


def test_second_turn_reuses_the_cache(model):
    first = prompt(1, 40)
    with kvhf.attach(model, **REGIONS) as cache:
        options = dict(past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        turn = model.generate(**first, **options)
        ids = torch.cat([turn, prompt(1, 9)["input_ids"]], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out = model.generate(**second, **options)
    assert torch.equal(out, full(model, second))


def test_reset_starts_anew(model):
    inputs, other = prompt(1, 40), prompt(2, 30)
    with kvhf.attach(model, **REGIONS) as cache:
        options = dict(past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        model.generate(**inputs, **options)
        cache.reset()
        assert cache.get_seq_length() == 0
        out = model.generate(**other, **options)
    assert torch.equal(out, full(model, other))


@pytest.mark.parametrize(("family", "dense"), [("llama", (0,)), ("qwen3", ()), ("qwen3", (1,))])
def test_reset_empties_layers_without_an_index(family, dense):
    model = build(family, eos_token_id=None)
    with kvhf.attach(model, **REGIONS, dense_layers=dense) as cache:
        options = dict(past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        model.generate(**prompt(1, 40), **options)
        cache.reset()
        assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4
        out = model.generate(**prompt(2, 30), **options)
    assert torch.equal(out, full(model, prompt(2, 30)))


def test_dense_layers_keep_their_own_cache(model):
    inputs = prompt(2, 40, padded=True)
    with kvhf.attach(model, **REGIONS, dense_layers=(0, 3)) as cache:
        assert [type(layer).__name__ for layer in cache.layers] == [
            "DynamicLayer",
            "IndexedLayer",
            "IndexedLayer",
            "DynamicLayer",
        ]
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, full(model, inputs))


def test_below_the_threshold_attention_is_dense_and_the_index_fills(model):
    inputs = prompt(1, 50)
    options = {**REGIONS, "k": 1, "sink": 0, "dense_below": 1000}
    with kvhf.attach(model, **options) as cache:
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        report = cache.report()
        assert all(len(index) > 0 for index in cache.indexes())
    assert torch.equal(out, full(model, inputs))
    assert report.steps == 0
    assert report.rows_read_fraction == 1.0
    assert "65 tokens in 4 indexed layers; shorter than 1000 tokens: attention was dense" in str(
        report
    )


def test_a_report_says_what_was_read_or_why_nothing_was(model):
    inputs = prompt(1, 50)
    with kvhf.attach(model, **REGIONS) as cache:
        assert str(cache.report()).endswith("no step has searched; memory: none")
        prefill(model, inputs["input_ids"][0], cache, stop=50, chunk=60)
        assert "no step has searched: the cache contains" in str(cache.report())
        model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache)
        assert "; 1 searching steps read 51 of 51 rows" in str(cache.report())


def test_half_precision(model):
    half = build("llama", eos_token_id=None).to(torch.bfloat16)
    inputs = prompt(2, 50, padded=True)
    out = indexed(half, inputs)
    assert out.shape == (2, 50 + NEW)


class Words:
    """A stand-in for a tokenizer, with numbers as words."""

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, **options):
        return " ".join(str(int(i)) for i in ids)


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize(("length", "index"), sampled([1, 2, 9, 16, 17, 33, 50], ["exact", None]))
def test_one_call(model, index, length):
    inputs, streamer, calls = prompt(1, length), Collect(), []
    options = {key: value for key, value in REGIONS.items() if key not in ("index", "k")}
    result = kvhf.generate(
        model,
        Words(),
        " ".join(map(str, inputs["input_ids"][0].tolist())),
        index=index,
        k=500,
        max_new_tokens=NEW,
        chunk=8,
        streamer=streamer,
        on_progress=lambda *call: calls.append(call),
        attach_options=options if index else None,
    )
    expected = full(model, inputs)[0]
    assert torch.equal(torch.cat([result.prompt_ids, result.answer_ids]), expected)
    assert streamer.tokens == expected.tolist()
    assert streamer.ended
    assert calls[-1] == ("decode", NEW, NEW)
    assert ("prefill", length, length) in calls
    assert result.token_s > 0
    assert (result.report is None) == (index is None)


def test_progress_ends_where_the_answer_does(model):
    calls, inputs = [], prompt(1, 20)
    end = int(full(model, inputs)[0, 24])
    result = kvhf.generate(
        model,
        Words(),
        inputs["input_ids"][0],
        max_new_tokens=NEW,
        eos_token_id=end,
        on_progress=lambda *call: calls.append(call),
    )
    length = len(result.answer_ids)
    assert length <= 5
    assert calls[-2:] == [("decode", length, NEW), ("decode", length, length)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams: got 2, allowed is 1"),
        ({"num_return_sequences": 3}, "num_return_sequences: got 3, allowed is 1"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: got True"),
        ({"past_key_values": None}, "past_key_values: got a value, but generate"),
        ({"attach_options": {"k": 3}}, "attach_options: got k; pass k as a separate"),
        ({"attach_options": {"index": "exact"}}, "attach_options: got index"),
        ({"chunk": 1}, "chunk: got 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"index": None, "attach_options": {"sink": 4}}, "attach_options: got .* with index=None"),
        ({"index": None, "k": 0}, "k: got 0"),
    ],
    ids=str,
)
def test_one_call_refuses_what_is_more_than_one_answer(model, options, match):
    with pytest.raises(ValueError, match=match):
        kvhf.generate(model, Words(), "3 4 5", **options)


@pytest.mark.parametrize("error", [None, MemoryError])
@pytest.mark.parametrize("index", ["pariskv", "pariskv:preset=fast+sample"])
def test_one_call_makes_room_for_its_answer_where_there_is_memory(model, index, error, monkeypatch):
    asked, ahead = [], []

    def reserve(self, tokens):
        asked.append((len(self) > 0, tokens))
        if error is not None:
            raise error("none left")

    def reserve_ahead(self, tokens, *, batch):
        ahead.append((len(self) < 10, tokens, batch))

    monkeypatch.setattr(ParisKV, "reserve", reserve)
    monkeypatch.setattr(ParisKV, "reserve_ahead", reserve_ahead)
    options = {key: value for key, value in REGIONS.items() if key not in ("index", "k")}
    ids = prompt(1, 50)["input_ids"][0]
    result = kvhf.generate(
        model, Words(), ids, index=index, k=8, max_new_tokens=3, chunk=8, attach_options=options
    )
    assert len(result.answer_ids) == 3
    assert asked == [(True, 53)] * model.config.num_hidden_layers
    assert ahead == [(True, 53, 1)] * model.config.num_hidden_layers


@pytest.mark.parametrize("one_call", [False, True])
def test_memory_for_a_prompt_is_announced_when_its_indexes_exist(model, one_call, monkeypatch):
    """A cache with tokens has them from the start. A prompt that fails withdraws the memory."""
    asked, fails = [], [False]

    def reserve_ahead(self, tokens, *, batch):
        asked.append((len(self) > 30, tokens, batch))

    def stop(phase, done, total):
        if fails[0] and done > 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(ParisKV, "reserve_ahead", reserve_ahead)
    options = dict(
        index="pariskv", k=8, **{k: REGIONS[k] for k in REGIONS if k not in ("index", "k")}
    )
    given, layers = dict(chunk=8, on_progress=stop), model.config.num_hidden_layers
    ids = prompt(1, 50)["input_ids"][0]
    with kvhf.attach(model, **options) as cache:
        kvhf.read(model, Words(), ids, cache=cache, **given)
        assert asked == [(False, 50, 1)] * layers
        asked.clear()
        fails[0] = True
        given |= dict(cache=cache, used="continue", **(dict(max_new_tokens=3) if one_call else {}))
        call, room = (kvhf.generate, 103) if one_call else (kvhf.read, 100)
        with pytest.raises(KeyboardInterrupt):
            call(model, Words(), ids, **given)
        assert asked == [(True, room, 1)] * layers + [(True, 0, 1)] * layers


def test_one_call_overrides_beams_of_the_models_own_configuration(model):
    copied = build("llama", eos_token_id=None)
    copied.generation_config.num_beams = 3
    inputs = prompt(1, 20)
    result = kvhf.generate(copied, Words(), inputs["input_ids"][0], max_new_tokens=NEW)
    assert torch.equal(result.answer_ids, full(model, inputs)[0, 20:])


def test_the_prompt_is_reported_read_before_the_first_word_appears(model):
    order = []

    class Printer(Collect):
        def put(self, value):
            order.append(("put", value.numel()))

    kvhf.generate(
        model,
        Words(),
        prompt(1, 20)["input_ids"][0],
        max_new_tokens=2,
        streamer=Printer(),
        on_progress=lambda phase, done, total: order.append((phase, done)),
    )
    assert order == [
        ("put", 20),
        ("prefill", 20),
        ("put", 1),
        ("decode", 1),
        ("put", 1),
        ("decode", 2),
    ]


def test_prefill_never_leaves_a_chunk_of_one_token(model):
    sizes = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for length in range(2, 20):
        sizes.clear()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            prefill(model, torch.arange(3, 3 + length), cache, stop=length, chunk=4)
        assert sum(sizes) == length
        assert min(sizes) > 1
    handle.remove()
    assert VOCABULARY > 23


def test_a_chunk_is_as_long_on_a_gpu_as_activations_have_room_for():
    """The sizes are those of Qwen3-8B and Llama 3 70B in bfloat16, or a model without sizes."""

    def chunk(device="cuda", **sizes):
        config = SimpleNamespace(to_dict=lambda: sizes)
        config.get_text_config = lambda: config
        return default_chunk(
            SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device(device))
        )

    sizes = dict(hidden_size=4096, intermediate_size=12288)
    assert (chunk(**sizes), chunk("cpu", **sizes)) == (4096, 1024)
    assert chunk(hidden_size=8192, intermediate_size=28672) == 2048
    assert (chunk(hidden_size=4096, intermediate_size=None), chunk()) == (4096, 1024)
