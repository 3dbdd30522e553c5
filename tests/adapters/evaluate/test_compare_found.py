"""Recall and coverage of the searches along a text equal those of exact attention."""

from contextlib import suppress

import pytest
import torch

import kvindex
from kvindex.ops.attention import attend
from kvindex_adapters.evaluate.compare import found
from kvindex_adapters.evaluate.compare.continuation import divergence
from kvindex_adapters.evaluate.compare.found import Found, Watching, watched
from kvindex_adapters.evaluate.compare.replay import Chunk, FullAttention, ReplayLayer, indexed
from kvindex_adapters.evaluate.fidelity import teacher_forced
from tests.adapters.tiny import VOCABULARY, build

REGIONS = dict(sink=4, local_window=8, update_every=8)


def filled(name="exact", softcap=None, **options):
    index = kvindex.create(
        name, q_heads=4, kv_heads=2, head_dim=16, softcap=softcap, **{"rope": None, **options}
    )
    generator = torch.Generator().manual_seed(0)
    index.append(*torch.randn(2, 1, 2, 50, 16, generator=generator))
    return index, torch.randn(3, 4, 16, generator=generator)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("at_once", [2**24, 1])
def test_coverage_is_the_weight_that_attention_gives(softcap, at_once, monkeypatch):
    """Values that are 1 for retrieved rows and 0 for others make attention return the coverage."""
    monkeypatch.setattr(found, "AT_ONCE", at_once)
    index, queries = filled("quest:page=4", softcap)
    sums = Found()
    hits = Watching(index, sums).expand_batch(3).search(queries, k=8)
    keys = index.fetch(
        kvindex.Hits(torch.arange(50).expand(1, 2, -1), torch.zeros(1, 2, 50))
    ).keys.expand(3, -1, -1, -1)
    flags = torch.zeros(3, 2, 50, 1).scatter_(2, hits.ids[..., None].clamp_min(0), 1.0)
    scale = index.geometry.scale
    weights = attend(queries, keys, flags, scale=scale, softcap=softcap)
    assert sums.searches == 12
    assert sums.means()["coverage"] == pytest.approx(float(weights.mean()), abs=1e-6)


def test_all_rows_are_everything_and_no_search_is_none():
    index, queries = filled()
    sums = Found()
    assert sums.means() == {"recall": None, "coverage": None}
    Watching(index, sums).search(queries[:1], k=60)
    assert sums.means() == pytest.approx({"recall": 1.0, "coverage": 1.0})


@pytest.mark.parametrize("name", ["exact", "quest:page=4", "h2o", "exact+reuse"])
def test_recall_along_a_text_is_that_of_the_wrapper(name):
    """The wrapper `MeasureRecall` measures the same, one step after another."""
    model = build("llama", num_hidden_layers=2)
    ids = torch.randint(3, VOCABULARY, (70,), generator=torch.Generator().manual_seed(1))
    options = {**REGIONS, "dense_below": 0, "layer": ReplayLayer}
    want = teacher_forced(model, ids[:60], ids[60:], index=name, k=5, attach_options=options)
    full = FullAttention(model)
    context, _ = full.read(ids[:60])
    logits = full.step(ids[60:])
    with indexed(model, ids[:60], index=name, **REGIONS) as cache:
        cache.read(Chunk(context.ids, context.layers))
        before = [layer.index for layer in cache.layers]
        kl, _, sums, rows = divergence(cache, ids[60:], logits, k=5)
        assert rows is None
        assert [layer.index for layer in cache.layers] == before
    assert sums.means()["recall"] == pytest.approx(want.recall_at_k, abs=1e-6)
    assert float(kl.mean()) == pytest.approx(want.kl_mean, abs=1e-6)


def test_an_error_puts_the_index_back():
    class Layer:
        index = "its own"

    layer = Layer()
    with suppress(KeyError), watched([layer]):
        assert isinstance(layer.index, Watching)
        raise KeyError
    assert layer.index == "its own"
