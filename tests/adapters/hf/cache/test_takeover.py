"""A prompt that plain transformers has read continues like one that the attached model has read."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvindex_adapters.hf as kvhf
from kvindex.indexes.exact import Exact
from tests.adapters.hf.cache.test_copies import LINEAR
from tests.adapters.hf.generation.test_generation import NEW, REGIONS, Words
from tests.adapters.hf.model.test_chosen import LATENTS
from tests.adapters.tiny import FAMILIES, build, prompt, steps
from tests.support.helpers import mostly_slow, sampled


def filled(model, inputs, *, config=True):
    """Return a cache of transformers that contains a prompt."""
    past = DynamicCache(config=model.config) if config else DynamicCache()
    steps(model, past, inputs, [inputs["input_ids"].shape[1]])
    return past


def rest(model, cache, inputs, start):
    """Return logits of the tokens from `start` on, one by one."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions, logits = (mask.cumsum(-1) - 1).clamp_min(0), []
    for place in range(start, ids.shape[1]):
        one = slice(place, place + 1)
        with torch.no_grad():
            given = dict(input_ids=ids[:, one], position_ids=positions[:, one])
            given |= dict(attention_mask=mask[:, : place + 1], past_key_values=cache)
            logits.append(model(**given).logits)
    return torch.cat(logits, 1)


def first(inputs, count):
    return {name: tensor[:, :count] for name, tensor in inputs.items()}


LENGTH, START = 62, 44

NEAR = dict(atol=2e-5, rtol=0)
"""Tolerance for logits of up to 6, because plain sdpa and dense layers sum in different orders."""


def both(family, index, padded, config=True, **options):
    """Return logits after a prompt from `from_cache`, and after one that the attached model has
    read."""
    model, text = build(family, **options), prompt(2 if padded else 1, LENGTH, padded=padded)
    past = filled(model, first(text, START), config=config)
    before = copy.deepcopy(past)
    given = {**REGIONS, "index": index, "k": 500 if index == "exact" else 12}
    with kvhf.attach(model, **given) as cache:
        mask = text["attention_mask"][:, :START] if padded else None
        assert cache.from_cache(past, attention_mask=mask) is cache
        assert cache.lengths() == [START] * len(cache.indexed)
        taken = rest(model, cache, text, START)
        report = cache.report()
        cache.reset()
        (_,) = steps(model, cache, first(text, START), [START])
        read = rest(model, cache, text, START)
        assert report.steps == cache.report().steps
    for layer, other in zip(past.layers, before.layers, strict=True):
        if getattr(layer, "keys", None) is not None:
            assert torch.equal(layer.keys, other.keys)  # no memory is shared
    return taken, read


FEW = ("llama", "gemma2", "gemma4_text", "falcon_h1", "zamba2", "deepseek_v3")


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *FEW))
def test_every_family_goes_on_as_it_would_have(family):
    taken, read = both(family, "exact", padded=False)
    assert torch.allclose(taken, read, **NEAR)


@pytest.mark.parametrize(
    ("family", "index"),
    sampled(["llama", "qwen3", "deepseek_v3", "falcon_h1"], ["exact", "pariskv", "quest"]),
)
def test_padded_batches_go_on_as_they_would_have(family, index):
    taken, read = both(family, index, padded=True)
    assert torch.allclose(taken, read, **NEAR)


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3", "gemma3_text"], "qwen3"))
def test_a_cache_without_the_configuration_has_whole_windows(family):
    taken, read = both(family, "exact", padded=False, config=False)
    assert torch.allclose(taken, read, **NEAR)


def test_layers_that_share_keys_go_on_as_they_would_have():
    taken, read = both("gemma4_text", "exact", padded=False, num_kv_shared_layers=2)
    assert torch.allclose(taken, read, **NEAR)


def test_a_trained_indexer_is_refused():
    model, inputs = build("deepseek_v32", **LATENTS), prompt(1, 20)
    past = filled(model, inputs)
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(ValueError, match="layer 0: got a layer with a trained indexer"):
            cache.from_cache(past)
        assert cache.get_seq_length() == 0


def test_a_model_that_changes_rows_after_its_cache_is_refused(monkeypatch):
    model, inputs = build("llama"), prompt(1, 20)
    past = filled(model, inputs)
    with kvhf.attach(model, **REGIONS) as cache:
        update = kvhf.IndexCache.update
        monkeypatch.setattr(
            kvhf.IndexCache, "update", lambda *a, **b: tuple(2 * one for one in update(*a, **b))
        )
        with pytest.raises(ValueError, match="layer 0 attends to other keys or"):
            cache.from_cache(past)


HYBRID = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **LINEAR)


def test_states_of_linear_attention_are_copied():
    taken, read = both("qwen3_next", "exact", padded=False, **HYBRID)
    assert torch.allclose(taken, read, **NEAR)


@pytest.fixture(scope="module")
def model():
    return build("llama", eos_token_id=None)


@pytest.mark.parametrize("used", ["continue", "branch"])
def test_questions_follow_it_and_ids_are_known(model, used):
    document, question = prompt(1, 50), prompt(1, 9)["input_ids"][0]
    ids = document["input_ids"][0]
    past, options = filled(model, document), dict(max_new_tokens=NEW, repetition_penalty=1.5)
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), ids, cache=cache)
        want = kvhf.generate(model, Words(), question, cache=cache, used=used, **options)
        cache.reset()
        cache.from_cache(past, ids=ids)
        assert torch.equal(cache.ids, ids)
        got = kvhf.generate(model, Words(), question, cache=cache, used=used, **options)
        assert got.answer_ids.tolist() == want.answer_ids.tolist()
        cache.reset()
        cache.from_cache(past)
        assert cache.ids is None
        with pytest.raises(ValueError, match="repetition_penalty: got"):
            kvhf.generate(model, Words(), question, cache=cache, used=used, **options)


def test_dense_layers_are_copied(model):
    text = prompt(1, LENGTH)
    past = filled(model, first(text, START))
    with kvhf.attach(model, **REGIONS, dense_layers=(1,)) as cache:
        cache.from_cache(past)
        taken = rest(model, cache, text, START)
    assert torch.allclose(taken, rest(model, past, text, START), **NEAR)


def test_the_index_reads_the_text(model):
    observed = []

    class Observing(Exact):
        def observe_tokens(self, tokens, *, first):
            observed.append((tokens.tolist(), first))

    inputs = prompt(1, 20)
    past = filled(model, inputs)
    with kvhf.attach(model, **{**REGIONS, "index": Observing}) as cache:
        observed.clear()
        cache.from_cache(past, ids=inputs["input_ids"])
    assert observed.count((inputs["input_ids"].tolist(), 0)) == 4


def changed(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)


def test_what_does_not_fit_is_refused_and_changes_nothing(model):
    inputs = prompt(1, 20)

    def refused(words, past=None, change=None, error=ValueError, **options):
        past = filled(plain, inputs) if past is None else past
        if change is not None:
            change(past.layers)
        with pytest.raises(error, match=words):
            cache.from_cache(past, **options)
        assert cache.get_seq_length() == 0
        assert cache.ids is None

    plain, other = build("llama"), build("llama", num_hidden_layers=2)
    wider = build("llama", head_dim=32)
    sliding = build("qwen3")
    with kvhf.attach(model, **REGIONS) as cache:
        refused("past: got tuple, allowed is a DynamicCache", past=((),), error=TypeError)
        static = StaticCache(config=model.config, max_cache_len=30)
        refused("past: got StaticCache", past=static, error=TypeError)
        refused("past: got IndexCache, .* call its method fork", past=cache, error=TypeError)
        empty = DynamicCache(config=model.config)
        refused(r"past\.get_seq_length\(\): got 0, allowed is an integer of", past=empty)
        refused("past: layer 2: got 0 tokens", past=filled(other, inputs))
        refused("past: layer 0: keys: got shape", past=filled(wider, inputs))
        refused("past: layer 0: got a DynamicSlidingWindowLayer", past=filled(sliding, inputs))
        refused(
            "layer 1: keys: got dtype",
            change=lambda layers: changed(
                layers[1], keys=layers[1].keys.double(), values=layers[1].values.double()
            ),
        )
        refused(
            "layer 3: got 19 tokens in the layer, but the cache has 20 tokens",
            change=lambda layers: layers[3].crop(-1),
        )
        refused(
            "layer 2: keys: got nan",
            change=lambda layers: layers[2].keys[0, 0, 3].fill_(float("nan")),
        )
        refused("ids: got shape", ids=inputs["input_ids"][:, 1:])
        refused("attention_mask: got shape", attention_mask=torch.ones(2, 20))
        kvhf.read(model, Words(), inputs["input_ids"][0], cache=cache)
        with pytest.raises(ValueError, match="cache: got a cache with 20 tokens; use an empty"):
            cache.from_cache(filled(plain, inputs))
        assert cache.get_seq_length() == 20
    with pytest.raises(RuntimeError, match="context has ended"):
        cache.from_cache(filled(model, inputs))


@pytest.mark.parametrize("index", ["snapkv", "h2o", "sentencekv", "exact+reuse"])
def test_an_index_that_learns_from_queries_is_refused(model, index):
    past = filled(model, prompt(1, 20))
    with kvhf.attach(model, **{**REGIONS, "index": index}) as cache:
        with pytest.raises(ValueError, match="learns from the queries of a prompt"):
            cache.from_cache(past)
        assert cache.get_seq_length() == 0
