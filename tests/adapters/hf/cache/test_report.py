"""The report of a cache: why no step has searched, and its memory compared with a plain cache."""

import pytest
import torch
from transformers import DynamicCache

import kvindex_adapters.hf as kvhf
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt, steps

REGIONS = dict(index="exact", k=5, sink=4, local_window=8, update_every=8, dense_below=0)
ELSEWHERE = "no step has searched: the cache contains a prompt, or answers whose steps this report"


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


def test_after_branches_and_after_a_load_it_says_where_the_figures_are(model, tmp_path):
    text = prompt(1, 40)["input_ids"][0]
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), text, cache=cache)
        branch = dict(cache=cache, used="branch", max_new_tokens=8)
        answer = kvhf.generate(model, Words(), text[:3], **branch)
        assert "7 searching steps" in str(answer.report)
        assert ELSEWHERE in str(cache.report())
        cache.save(tmp_path / "saved")
    with kvhf.attach(model, **REGIONS) as cache:
        cache.load(tmp_path / "saved")
        assert ELSEWHERE in str(cache.report())


def test_while_outputs_are_measured_it_says_so(model, tmp_path):
    """A cache that was saved without a limit of the error has no measured outputs."""
    with kvhf.attach(model, **{**REGIONS, "index": "pariskv"}) as cache:
        kvhf.read(model, Words(), prompt(1, 40)["input_ids"][0], cache=cache)
        cache.save(tmp_path / "saved")
    with kvhf.attach(model, **{**REGIONS, "index": "pariskv", "k": "auto"}) as cache:
        cache.load(tmp_path / "saved")
        text = "k='auto' or error= needs the outputs of 32 tokens before a step searches"
        assert text in str(cache.report())
        answer = kvhf.generate(
            model,
            Words(),
            prompt(1, 3)["input_ids"][0],
            cache=cache,
            used="continue",
            max_new_tokens=40,
        )
        assert answer.report.steps > 0
        assert text not in str(cache.report())


def test_while_the_indexes_are_empty_it_says_so(model):
    with kvhf.attach(model, **REGIONS) as cache:
        assert "; no step has searched; memory: none" in str(cache.report())
        steps(model, cache, prompt(1, 8), [7, 1])
        report = cache.report()
        assert (report.tokens, report.steps, report.indexed) == (8, 0, 0)
        assert "all tokens are in sink, local_window or waiting for update_every" in str(report)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", dict(dense_layers=(0,))),
        ("gemma3_text", {}),  # some layers have sliding windows
    ],
)
def test_memory_is_compared_with_that_of_a_plain_cache(family, options):
    model, inputs = build(family, eos_token_id=None), prompt(2, 50)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=past)
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    with kvhf.attach(model, **{**REGIONS, **options}) as cache:
        assert cache.report().plain_nbytes == 0
        steps(model, cache, inputs, [50])
        report = cache.report()
    assert report.plain_nbytes == plain
    assert f" (a plain cache: {plain / 2**20:.1f} MiB)" in str(report)


def test_int8_rows_are_smaller_than_a_plain_cache(model):
    inputs = prompt(1, 600)
    options = {**REGIONS, "index": "pariskv:row_codec=int8"}
    with kvhf.attach(model, **options) as cache:
        steps(model, cache, inputs, [600])
        report = cache.report()
    assert sum(report.nbytes.values()) < report.plain_nbytes


def test_a_cache_prints_one_short_line(model):
    with kvhf.attach(model, **REGIONS) as cache:
        assert repr(cache) == "<IndexCache of 0 tokens in 2 indexed layers>"
        steps(model, cache, prompt(1, 20), [20])
        assert str(cache) == "<IndexCache of 20 tokens in 2 indexed layers>"
    with kvhf.attach(model, **REGIONS, dense_layers=(0,)) as cache:
        assert repr(cache) == "<IndexCache of 0 tokens in 1 indexed and 1 other layers>"
