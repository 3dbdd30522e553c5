import pytest
import torch

from benchmarks.comparing.layers import Layer
from benchmarks.row_codecs import CODECS, PARTS, attention, coded, errors, summary
from kvindex.core.protocol import Rows
from kvindex.ops.attention import attend_causal

NEWEST = 7


def layer(seed=0, softcap=None):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 50, 64, generator=generator)
    queries = torch.randn(6, 50, 64, generator=generator)
    return Layer(keys, queries, 0.125, softcap, values)


def test_attention_is_the_layers():
    one = layer()
    got = attention(one, Rows(one.keys, one.values), NEWEST)
    want = attend_causal(one.queries[None], one.keys[None], one.values[None], scale=0.125)
    torch.testing.assert_close(got.flatten(0, 1), want[0, :, -NEWEST:])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_errors_are_small_and_grow_with_the_codes_steps(softcap):
    off = errors(layer(softcap=softcap), NEWEST)
    assert set(off) == {(name, part) for name in CODECS for part in PARTS}
    mean = {key: float(error.mean()) for key, error in off.items()}
    for part in PARTS:
        assert 1e-4 < mean["bfloat16", part] < mean["int8", part] < mean["fp8", part] < 0.1
    for name in CODECS:
        assert max(mean[name, "keys"], mean[name, "values"]) < mean[name, "both"]


def test_a_wrong_row_would_be_seen():
    one = layer()
    rows = coded(one, "int8")
    rows.values[:, 3] = 0
    want = attention(one, Rows(one.keys, one.values), NEWEST)
    off = (attention(one, rows, NEWEST) - want).norm(dim=-1) / want.norm(dim=-1)
    assert off.mean() > 5 * errors(one, NEWEST)["int8", "both"].mean()


def test_a_summary_is_over_all_layers_but_for_the_worst():
    found = summary([torch.zeros(2, 2, 5), torch.ones(2, 2, 5)])
    assert found == {"mean": 0.5, "p90": 1.0, "worst_layer": 1.0}
