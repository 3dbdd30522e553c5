"""Latents in an index are stored once, and counted once in bytes."""

import pytest

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build, prompt, steps

REGIONS = dict(k=10, sink=4, local_window=8, update_every=8, dense_below=0)
WIDTH, LATENT = 24, 16
"""Sizes of the tiny model: `kv_lora_rank + qk_rope_head_dim`, and `kv_lora_rank`."""


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("index", ["exact", "pariskv:preset=fast"])
def test_a_latent_is_stored_once(family, index):
    model = build(family)
    with kvhf.attach(model, index=index, **REGIONS) as cache:
        steps(model, cache, prompt(2, 60), [56] + [1] * 4)
        report, indexes = cache.report(), [layer.attention.index for layer in cache.layers]
        fetched = sum(int(layer.attention.traffic.rows_read * 2) for layer in cache.layers)
    assert all(each.geometry.value_in_key for each in indexes)
    assert {each.geometry.value_dim for each in indexes} == {LATENT}
    tokens = sum(len(each) for each in indexes)
    assert report.nbytes["rows"] == 2 * tokens * WIDTH * 4
    assert 0 < report.bytes_fetched <= fetched * WIDTH * 4


def test_a_factory_of_indexes_is_told():
    from kvindex.indexes.exact import Exact

    passed, model = [], build("deepseek_v3", num_hidden_layers=2)

    def make(**geometry):
        passed.append(geometry)
        return Exact(**geometry)

    with kvhf.attach(model, index=make, **REGIONS) as cache:
        steps(model, cache, prompt(1, 20), [20])
    # `make` is called once for the probe, and once for each of two layers
    assert [geometry["value_in_key"] for geometry in passed] == [True] * 3


def test_rows_of_few_bits_serve_latents():
    model, inputs = build("deepseek_v3"), prompt(1, 60)
    found = {}
    for name in ("plain", "int8", "int4"):
        options = dict(REGIONS, k=500, index_options={"row_codec": name})
        with kvhf.attach(model, index="exact", **options) as cache:
            found[name] = steps(model, cache, inputs, [56] + [1] * 4)[-1]
            size = cache.report().nbytes["rows"]
        assert size < 2 * 4 * 60 * WIDTH * 4
    off = [float((found[name] - found["plain"]).abs().max()) for name in ("int8", "int4")]
    assert 0 < off[0] < off[1] < float(found["plain"].abs().max()) / 4
