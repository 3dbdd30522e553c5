"""When a search pays: the model of times against all stored measurements, and the decisions."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.vllm import costs
from kvindex_adapters.vllm.costs import LEAST, Limit, limit_of

ROOT = Path(__file__).parents[2]

WITHIN = 0.05
"""Largest relative error of the model for a time of a layer. If two measured times are closer to
each other, either decision is right."""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("vllm_costs")


def layer(q_heads=32, kv_heads=8, head_dim=128, **more):
    return Geometry.of(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, **more
    )


def on(gpu, given="auto", batches=True, k=100, **shape):
    return limit_of(given, layer(**shape), f"NVIDIA {gpu} 80GB HBM3", batches=batches, k=k)


def test_the_table_is_what_the_script_computes(tool):
    assert json.loads(tool.WRITTEN.read_text()) == tool.table()


def test_each_measured_layer(tool):
    """Where the index was measured slower, full attention is used."""
    decided = []
    for point in tool.points():
        names = {name: point.shape[name] for name in ("q_heads", "kv_heads", "head_dim")}
        limit, lengths = on(point.gpu, **names), [point.tokens] * point.batch
        assert limit.costs.full(lengths) == pytest.approx(point.full, rel=WITHIN)
        assert limit.costs.search(lengths) == pytest.approx(point.search, rel=WITHIN)
        if abs(point.search / point.full - 1) > WITHIN:
            assert limit.searches(lengths) is (point.search < point.full)
            decided.append(limit.searches(lengths))
    assert len(decided) >= 14
    assert not all(decided)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks/results").glob("serving*.json")))
def test_each_measured_token_of_vllm(file):
    """The ratios also contain the rest of the model, so they are nearer to 1 than those of a layer.
    If the quartiles of both times overlap, either decision is right."""
    found = json.loads(file.read_text())
    given = found["serving"]["settings"]
    gpu, gpus = found["machine"]["gpu"].split()[1], given.get("gpus", 1)
    limit = on(gpu, k=given["k"], q_heads=32 // gpus, kv_heads=8 // gpus, head_dim=128)
    for one in found["serving"]["batches"]:
        stock, mine = (one["plans"][plan] for plan in ("stock", "kvindex"))
        searches = limit.searches([one.get("context", given["context"])] * one["batch"])
        if searches:
            assert mine["token_ms_low"] < stock["token_ms_high"]
        else:
            assert mine["token_ms_high"] > stock["token_ms_low"]


@pytest.mark.parametrize("file", ["decoder_tokens_glm", "decoder_tokens_glm_1m"])
def test_few_kv_heads(file):
    """The index searched 2 KV heads with 16 query heads each, and was slower at 131,072 tokens."""
    found = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
    token, shape = found["decoder"], found["decoder"]["shape"]
    names = {name: shape[name] for name in ("q_heads", "kv_heads", "head_dim")}
    limit = on(found["machine"]["gpu"].split()[1], **names)
    faster = token["cached"]["token_ms"] < token["dense"]["token_ms"]
    assert limit.searches([token["context"]]) is faster


def test_decisions_follow_length_batch_and_shape():
    assert not on("H200").searches([8192])
    assert on("H200").searches([8192] * 16)
    assert on("H200").searches([8192] * 3 + [131_072])
    assert on("H100").searches([24_576])  # its memory is slower
    assert not on("H200").searches([24_576])
    assert not on("H200", kv_heads=2).searches([8192] * 16)
    assert on("H200", kv_heads=32).searches([16_384])
    wide = Geometry.of(q_heads=32, kv_heads=8, head_dim=128, dtype=torch.float32)
    assert limit_of("auto", wide, "NVIDIA H200", batches=True).searches([24_576])


def test_more_rows_take_more_time():
    assert on("H200").searches([32_768])
    assert not on("H200", k=256).searches([32_768])
    assert on("H200", k=256).searches([36_000])
    assert on("H200", k=256).dense_below > on("H200", k=100).dense_below


def test_further_rows_take_as_long_in_each_measured_batch(tool):
    """Single sequences differ most: their steps take nearly the same time with more rows."""
    added = [*tool.further_rows()]
    assert len(added) == 5
    per_row = [us / heads for heads, us in added]
    for (heads, _), found in zip(added, per_row, strict=True):
        single = heads == min(heads for heads, _ in added)
        assert 0.7 < found / tool.row_us() < (1.8 if single else 1.3)
    assert costs.kind_of("NVIDIA H200").row_us == pytest.approx(tool.row_us(), rel=0.01)


def test_full_attention_in_fp8_reads_half_of_the_bytes():
    geometry = Geometry.of(q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    fp8 = limit_of("auto", geometry, "NVIDIA H200", batches=True, fp8=True)
    plain = on("H200")
    assert fp8.dense_below == plain.dense_below
    assert plain.searches([40_000])
    assert not fp8.searches([40_000])
    assert fp8.searches([131_072])


def test_several_tokens_of_a_sequence_read_its_rows_once():
    limit = on("H200")
    assert limit.searches([16_384] * 3, [16_384] * 3)
    tokens = [16_384 - place for place in range(8)] * 3
    assert limit.costs.search(tokens) > 2 * limit.costs.search([16_384] * 3)
    assert limit.searches([131_072] * 3, [131_072 - place for place in range(8)] * 3)
    assert not limit.searches([65_536] * 3, [65_536 - place for place in range(8)] * 3)


def test_which_sequences_of_a_batch_search():
    """Longer ones than for whole batches, because all sequences share the launches."""
    for gpu in ("H100", "H200"):
        assert on(gpu).dense_below == LEAST
        few = on(gpu, kv_heads=2)
        assert 2 * LEAST < few.dense_below < 10_000
        # full attention in a step saves what the search adds
        rows = few.dense_below * few.costs.row_bytes / few.costs.pages_bytes
        assert rows == pytest.approx(
            few.costs.search([few.dense_below]) - few.costs.search([]), rel=0.01
        )
    tiny = on("H100", q_heads=256, kv_heads=1, head_dim=8)
    assert tiny.dense_below == 2**31 - 1
    assert not tiny.searches([10**8])


def test_what_is_set_and_what_is_not():
    assert on("H200", 5000) == Limit(5000)
    assert on("H200", 0).searches([1])
    assert limit_of("auto", layer(), None, batches=True) == Limit(2048)
    assert on("H200", batches=False) == Limit(on("H200").dense_below)
    assert on("A100") == on("H100")  # a GPU that is not in the table
    assert "2048 tokens, unless FlashAttention" in on("H200").explain()
    assert Limit(7).explain() == "sequences of at least 7 tokens"


@pytest.mark.parametrize("given", ["automatic", -1, 1.5, None, True])
def test_other_values_are_refused(given):
    said = f"dense_below: got {given!r}, allowed is an integer of at least 0, or 'auto'"
    with pytest.raises(ValueError, match=said):
        costs.checked(given)


TABLE = r"^\| (?:(\d+), (\d+), (\d+) .*?)?\| (H\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$"


def test_the_table_of_the_page():
    """A search takes less time than full attention from these lengths on."""
    rows = re.findall(TABLE, (ROOT / "docs/adapters/vllm.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    shape = {}
    for *sizes, gpu, one, four, sixteen in rows:
        if sizes[0]:
            shape = dict(zip(("q_heads", "kv_heads", "head_dim"), map(int, sizes), strict=True))
        limit = on(gpu, k=DEFAULT_K, **shape)
        for batch, shown in ((1, one), (4, four), (16, sixteen)):
            length = int(shown.replace(",", ""))
            assert limit.searches([round(length * 1.02)] * batch)
            assert not limit.searches([round(length * 0.95)] * batch)


def test_the_lengths_of_the_page_that_search_in_a_graph():
    page = (ROOT / "docs/adapters/vllm.md").read_text(encoding="utf-8")
    lengths = [
        on("H200", k=DEFAULT_K, q_heads=q_heads, kv_heads=kv_heads).dense_below
        for q_heads, kv_heads in ((32, 8), (64, 8), (32, 2))
    ]
    first, second, third = (f"{length:,}" for length in lengths)
    assert f"fewer than {first} tokens in the shape of Qwen3-8B, {second} in that of" in page
    assert f"and {third} in that of GLM-4-9B" in page
