"""Steps that run in parallel give the same as single steps."""

from itertools import product

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.compare.replay import ReplayLayer
from kvindex_adapters.evaluate.fidelity import divergences, full_logits
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.generation.prefill import prefill
from tests.adapters.tiny import build, prompt, steps
from tests.support.helpers import mostly_slow, slow

REGIONS = dict(k=5, sink=4, local_window=8, update_every=8, dense_below=0)

SMALL = {
    "arkvale": "page=4",
    "clusterkv": "per_cluster=4:block=8:block_clusters=2",
    "ctkvr": "update=false:every=4:rho=6:probes=2",
    "icecache": "page=4:ratio=.2:view=1",
    "infllm": "page=4:span=40:representatives=2",
    "louiskv": "per_cluster=4:longest=3",
    "quest": "page=4",
    "retroinfer": "per_cluster=4:block=8",
    "sentencekv": "query=token:longest=4",
    "shadowkv": "page=4:rank=4:outliers=1",
    "snapkv": "budget=12:window=4:kernel=3",
    "squeezed": "per_cluster=4:block=8:sparsity=.5",
    "streaming": "budget=12:sink=2",
    "triattention": "budget=12",
}
"""Options with which an index can distinguish so few tokens."""

SOME = ("infllm", "quest", "snapkv")
"""Indexes that are not left to the slow tests."""

FOLLOW = ("h2o:budget=12:recent=.1:most=1", "ctkvr:every=4:rho=6:probes=2", "sentencekv:longest=4")


def at_single_steps(model, inputs, index):
    """Return logits of the tokens from 50 on, one step each."""
    with kvhf.attach(model, index=index, **REGIONS) as cache:
        first = {name: tensor[:, :50] for name, tensor in inputs.items()}
        steps(model, cache, first, [16, 16, 16, 2])
        want = []
        for step in range(50, inputs["input_ids"].shape[1]):
            with torch.no_grad():
                here = inputs["input_ids"][:, step, None]
                want.append(model(input_ids=here, past_key_values=cache).logits)
    return torch.cat(want, 1)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


def at_once(model, ids, start, sizes, index, **options):
    logits = []
    with kvhf.attach(model, index=index, layer=ParallelLayer, **{**REGIONS, **options}) as cache:
        prefill(model, ids, cache, stop=start, chunk=16)
        for layer in cache.attention_layers():
            layer.begin()
        for size in sizes:
            with torch.no_grad():
                piece = ids[None, start : start + size]
                logits.append(model(input_ids=piece, past_key_values=cache).logits)
            start += size
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("sizes", "index"),
    mostly_slow(
        product([[30], [1, 7, 8, 9, 5], [16, 14]], ["exact", "pariskv", "pariskv:preset=fast"]),
        ([30], "exact"),
        ([1, 7, 8, 9, 5], "pariskv"),
    ),
    ids=str,
)
def test_steps_at_once_equal_single_steps(model, index, sizes):
    inputs = prompt(1, 80)
    got = at_once(model, inputs["input_ids"][0], 50, sizes, index)
    assert torch.allclose(got, at_single_steps(model, inputs, index), atol=1e-4)


def test_a_replay_moves_tokens_before_the_next_step_and_not_after_the_last(model):
    ids, found = prompt(1, 80)["input_ids"], []
    for layer in (ParallelLayer, ReplayLayer):
        with kvhf.attach(model, index="exact", layer=layer, **REGIONS) as cache:
            prefill(model, ids[0], cache, stop=50, chunk=16)
            for each in cache.attention_layers():
                each.begin()
            lengths = [len(cache.indexes()[0])]
            for step in range(50, 70):
                with torch.no_grad():
                    model(input_ids=ids[:, step, None], past_key_values=cache)
                lengths.append(len(cache.indexes()[0]))
        found.append(lengths)
    usual, replayed = found
    assert replayed == [usual[0], *usual[:-1]]
    assert len(set(usual)) > 2


def test_a_replay_that_is_rolled_back_and_repeated_gives_the_same(model):
    ids, found = prompt(1, 80)["input_ids"], []
    want = at_single_steps(model, prompt(1, 80), "exact")
    with kvhf.attach(model, index="exact", layer=ReplayLayer, **REGIONS) as cache:
        prefill(model, ids[0], cache, stop=50, chunk=16)
        for each in cache.attention_layers():
            each.begin()
        for sizes in ([8, 8, 14], [30], [1, 7, 22]):
            before, start, logits = cache.checkpoint(), 50, []
            for size in sizes:
                with torch.no_grad():
                    piece = ids[:, start : start + size]
                    logits.append(model(input_ids=piece, past_key_values=cache).logits)
                start += size
            found.append(torch.cat(logits, 1))
            cache.rollback(before)
    assert all(torch.allclose(one, want, atol=1e-4) for one in found)


def test_steps_at_once_with_learned_sinks():
    kinds = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    model, inputs = build("gpt_oss", **kinds), prompt(1, 80)
    got = at_once(model, inputs["input_ids"][0], 50, [1, 7, 22], "exact")
    assert torch.allclose(got, at_single_steps(model, inputs, "exact"), atol=1e-4)


@pytest.mark.parametrize("name", mostly_slow(kvindex.names(), *SOME))
def test_each_index_that_can_be_searched_at_once_finds_the_same(model, name):
    if name.startswith("faiss"):
        pytest.importorskip("faiss")
    index, inputs = f"{name}:{SMALL[name]}" if name in SMALL else name, prompt(1, 80)
    if kvindex.create(
        index, q_heads=2, kv_heads=1, head_dim=8, rope=torch.ones(4)
    ).depends_on_queries:
        pytest.skip("follows the steps: refused, as the next test says")
    want = at_single_steps(model, inputs, index)
    got = at_once(model, inputs["input_ids"][0], 50, [13, 17], index)
    assert torch.allclose(got, want, atol=1e-3), float((got - want).abs().max())


@pytest.mark.parametrize("index", mostly_slow(FOLLOW, FOLLOW[-1]))
def test_an_index_that_follows_the_steps_is_refused_and_would_find_something_else(
    model, index, monkeypatch
):
    with pytest.raises(ValueError, match=r"index: got .*, whose searches depend on earlier steps"):
        at_once(model, prompt(1, 80)["input_ids"][0], 50, [30], index)
    inputs = prompt(1, 80)
    want = at_single_steps(model, inputs, index)
    name = index.partition(":")[0]
    monkeypatch.setattr(kvindex.get(name), "depends_on_queries", False)
    got = at_once(model, inputs["input_ids"][0], 50, [30], index)
    assert not torch.allclose(got, want, atol=1e-2)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("exact+reuse", "got Reuse, whose searches depend on earlier steps"),
        ("h2o+sample", "got Sample, whose searches depend on earlier steps"),
        ("exact+recall", "got MeasureRecall, .* or serve one step at a time"),
    ],
)
def test_a_wrapper_that_cannot_be_searched_at_once_is_refused(model, index, match):
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=match):
        at_once(model, prompt(1, 80)["input_ids"][0], 50, [30], index)
    assert model.config._attn_implementation == before


def test_a_prompt_that_is_all_in_the_window_is_read_densely_until_some_of_it_leaves(model):
    ids, sizes = prompt(1, 60)["input_ids"][0], dict(local_window=20, update_every=30)
    one = at_once(model, ids, 20, [1] * 40, "exact", **sizes)
    assert torch.allclose(at_once(model, ids, 20, [40], "exact", **sizes), one, atol=1e-4)


@pytest.mark.parametrize(
    "sizes", [dict(sink=0), dict(local_window=0), slow(dict(update_every=3))], ids=str
)
def test_regions_of_other_sizes(model, sizes):
    ids = prompt(1, 70)["input_ids"][0]
    one = at_once(model, ids, 50, [1] * 20, "exact", **sizes)
    assert torch.allclose(at_once(model, ids, 50, [20], "exact", **sizes), one, atol=1e-4)


def test_a_divergence_per_token_is_0_where_all_is_read_and_not_where_it_is_not(model):
    ids = prompt(1, 90)["input_ids"][0]
    regions = {name: size for name, size in REGIONS.items() if name not in ("k", "dense_below")}
    full = full_logits(model, ids[:60], ids[60:])
    options = dict(index="exact", attach_options=regions, chunk=16)
    everything = divergences(model, ids[:60], ids[60:], full, k=500, **options)
    little = divergences(model, ids[:60], ids[60:], full, k=1, **options)
    assert everything.shape == little.shape == (30,)
    assert everything.abs().max() < 1e-6
    assert little.min() > -1e-6
    assert little.mean() > 1e-3
