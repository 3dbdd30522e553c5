"""Selectors of blocks: the script on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import sparse_selectors
from kvindex.ops.block_sparse import attend_chosen
from kvindex.selectors import PooledSelector
from tests.adapters.tiny import build
from tests.support.selecting import prompt


def ran(*given):
    with torch.no_grad():
        sparse_selectors.main([str(part) for part in given])
    return json.loads(Path(given[-1]).read_text())


def test_a_selector_that_keeps_everything_equals_full_attention(tiny):
    texts, model = tiny
    selectors = "pooled:mass=1", "pooled:mass=0.2"
    given = [*texts, "--tokens", 700, "--last", 200, "--selector", *selectors, *model]
    cells = ran(*given)["cells"]
    assert [cell["selector"] for cell in cells] == 2 * ["dense", *selectors]
    dense, everything, few = cells[:3]
    assert dense["kept"] == everything["kept"] == everything["agreement"] == 1
    assert everything["kl_mean"] < 1e-6
    assert 0.4 < few["kept"] < 1
    assert few["kl_mean"] > 1e-4


def test_queries_of_the_last_tokens_use_full_attention(monkeypatch):
    monkeypatch.setattr(sparse_selectors, "CHUNK", 256)
    queries, keys, values = prompt(640)
    function = sparse_selectors.SparseAttention(PooledSelector(0.2), 100)
    got = function(None, queries, keys, values, None, scaling=0.25)[0].transpose(1, 2)
    full = sparse_selectors.SparseAttention(None, 0)
    want = full(None, queries, keys, values, None, scaling=0.25)[0].transpose(1, 2)
    torch.testing.assert_close(got[:, :, 512:], want[:, :, 512:])
    assert (got[:, :, 384:512] - want[:, :, 384:512]).abs().max() > 1e-3
    chosen = PooledSelector(0.2).choose(queries, PooledSelector(0.2).summarize(keys), 0, scale=0.25)
    assert function.fraction == float(chosen.sum()) / (2 * 4 * 15)
    sparse = attend_chosen(queries, keys, values, chosen, scale=0.25)
    torch.testing.assert_close(got[:, :, :512], sparse[:, :, :512], rtol=1e-4, atol=1e-5)


def test_no_selector_is_started_after_the_time_limit(tiny):
    texts, model = tiny
    cells = ran(*texts, "--tokens", 300, "--last", 10, "--seconds", 0, *model)["cells"]
    assert [cell["selector"] for cell in cells] == ["dense"]


@pytest.mark.parametrize("given", [{"sliding_window": 128}, {"softcap": 30.0}, {"s_aux": 0.0}])
def test_layers_without_full_causal_attention_raise(given):
    queries, keys, values = prompt(256)
    function = sparse_selectors.SparseAttention(PooledSelector(), 0)
    with pytest.raises(ValueError, match="model: got layers with a mask"):
        function(None, queries, keys, values, None, scaling=0.25, **given)


def test_a_model_attends_as_before_after_an_error():
    model = build("llama")
    before = model.config._attn_implementation
    function = sparse_selectors.SparseAttention(PooledSelector(), 0)
    ids = torch.tensor([[-1]])
    with pytest.raises(IndexError), sparse_selectors.attending(model, function):
        model(ids)
    assert model.config._attn_implementation == before
    assert sparse_selectors.NAME not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    "given", [["--selector", "pooledd"], ["--last", "0"], ["--dense-last", "-1"]]
)
def test_wrong_options_exit_before_the_model_is_loaded(given):
    with pytest.raises(SystemExit):
        sparse_selectors.arguments(["--text", "a", *given])


def test_attention_with_a_mask_equals_the_reference():
    queries, keys, values = prompt(700)
    queries = queries[:, :, 256:]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(2, 4, 4, 6, generator=generator) < 0.5
    chosen[:, :, range(4), range(2, 6)] = True
    got = sparse_selectors.attend_masked(queries, keys, values, chosen, scale=0.25)
    want = attend_chosen(queries, keys, values, chosen, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
