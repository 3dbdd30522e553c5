"""benchmarks/field.py: exact search is right, a failure is a result, what is frozen is worse."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import field, reading, tables
from benchmarks.comparing.layers import Layer, read_and_write
from benchmarks.comparing.measure import Setting, measure, truth
from tests.adapters.tiny import build

ROOT = Path(__file__).parents[1]
SETTING = Setting(tokens=420, sink=4, local=32, generated=128, every=32)
ROWS = [32, 512]


def layer(seed=0, later=0.0, softcap=None):
    """Two KV heads read by two query heads each; what comes in pieces, and asks, is moved."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 440, 16, generator=draw)
    queries = torch.randn(4, 440, 16, generator=draw) * 3
    keys[:, 292:388, 0] += later
    queries[:, 420:, 0] += later
    return Layer(keys, queries, 0.25, softcap, values)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("pieces", [False, True])
def test_exact_search_finds_all_and_with_all_rows_is_full_attention(pieces, softcap):
    one = layer(softcap=softcap)
    known = truth(one, SETTING, ROWS)
    found = measure(one, "exact", SETTING, ROWS, known, pieces=pieces)["rows"]
    assert found[32]["recall"] == found[512]["recall"] == 1
    assert found[512]["error"] < 1e-5
    assert found[32]["error"] > 0.01
    assert found[512]["mass"] == pytest.approx(1)
    assert 0.1 < found[32]["mass"] < 0.999
    assert found[512]["used"] == 384


def test_log_weights_and_summaries_count_as_in_a_layer():
    """Single keys as clusters lose nothing, and what has no weight is not held."""
    one = layer()
    known = truth(one, SETTING, ROWS)
    found = measure(one, "retroinfer:block=64:per_cluster=1", SETTING, ROWS, known)["rows"]
    assert found[512]["error"] < 1e-5
    summed = measure(one, "retroinfer:block=64:per_cluster=8:estimated=.5", SETTING, ROWS, known)[
        "rows"
    ]
    assert summed[32]["mass"] < found[32]["mass"]
    drawn = measure(one, "magicpig:bits=2:tables=8", SETTING, ROWS, known)["rows"]
    assert drawn[512]["mass"] < 1
    assert drawn[512]["error"] > 1e-3


def test_a_frozen_index_loses_what_comes_later_and_a_failure_stops_nobody():
    layers = [layer(seed, later=4.0) for seed in (0, 1)]
    wrong = "pqcache:subspaces=5"
    cells, failed = field.compare(layers, [wrong, "exact", "magicpig:bits=4"], SETTING, ROWS)
    assert list(failed) == [wrong]
    assert "subspaces: got 5" in failed[wrong]
    lines = {(one["index"], one["arrival"]): one for one in field.summary(cells)}
    assert list(lines) == [
        *(("exact", arrival) for arrival in ("whole", "pieces")),
        *(("magicpig:bits=4", arrival) for arrival in ("whole", "pieces", "stale")),
    ]
    errors = {arrival: lines["magicpig:bits=4", arrival] for arrival in ("pieces", "stale")}
    errors = {arrival: line["rows"]["32"]["mass"] for arrival, line in errors.items()}
    assert errors["stale"] < errors["pieces"] / 2


def test_a_budget_is_the_rows_that_are_asked_for():
    one = layer()
    known = truth(one, SETTING, ROWS)
    found = measure(one, "streaming:budget={k}", SETTING, ROWS, known)["rows"]
    assert found[32]["recall"] < 0.5
    assert found[512]["error"] < 1e-5


def test_lines_are_added_in_the_same_setting_only():
    old = dict(rows=[64], indexes=[dict(index="a"), dict(index="b")], failed={"c": "no"})
    new = dict(rows=[64], indexes=[dict(index="b", new=1), dict(index="c")], failed={})
    together = field.joined(old, new)
    assert together["indexes"] == [dict(index="a"), dict(index="b", new=1), dict(index="c")]
    assert together["failed"] == {}
    with pytest.raises(ValueError, match=r"rows = \[100\], allowed is \[64\]"):
        field.joined(old, {**new, "rows": [100]})


def test_all_indexes_are_compared_and_drawn(tmp_path):
    assert {spec.split(":")[0] for spec in field.default_specs()} >= {"exact", "pariskv", "ctkvr"}
    assert field.stale("exact") is None
    assert field.stale("ctkvr:rho=8+recall") == "ctkvr:rho=8:stale=true+recall"
    specs = ["exact", "pariskv", "ctkvr:rho=32"]
    cells, failed = field.compare([layer()], specs, SETTING, ROWS)
    assert not failed
    result = {
        **dict(rows=ROWS, failed={"other": "ValueError: no"}, indexes=field.summary(cells)),
        **dict(texts=["a"], layers=1, written=20, every_layer=1, dtype="float32"),
        **dict(setting=dict(vars(SETTING)), shape=dict(q_heads=4, kv_heads=2), load_average=1.0),
        "machine": dict(cores=1, processor="p", torch="2", transformers="5", threads=1),
    }
    result = json.loads(json.dumps(result))
    table = tables.field(result)
    assert table.count("\n| `") == 4
    assert "ValueError: no" in table
    field.show(result)
    pytest.importorskip("matplotlib")
    field.plot(result, tmp_path / "field.png")
    assert (tmp_path / "field.png").stat().st_size > 10_000


def test_layers_are_those_of_the_recall_benchmark():
    model, tokenizer = build("llama"), lambda *_, **__: {"input_ids": list(range(3, 43))}
    given = (model, tokenizer, "x", 40, 8)
    plain = reading.read_and_write(*given)
    kept = read_and_write(*given, every=1)
    assert len(plain) == len(kept)
    for one, other in zip(plain, kept, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.queries, other.queries[:, -8:])
        assert other.values.shape[:2] == other.keys.shape[:2]
        assert not torch.equal(other.values, other.keys)
        assert other.rope.shape == (other.keys.shape[-1] // 2,)
    assert len(read_and_write(*given, every=len(plain))) == 1
    with pytest.raises(ValueError, match="text: got 40 tokens, allowed is at least 41"):
        reading.continued(model, tokenizer, "x", 41, 8)


def test_figures_in_the_page_are_in_the_results():
    """The table is held to them by test_results.py."""
    page = (ROOT / "docs/field.md").read_text()
    result = json.loads((ROOT / "benchmarks/results/field.json").read_text())
    before, _, after = re.split(r"<!-- field:(?:begin|end) -->\n", page)
    rows = [row for line in result["indexes"] for row in line["rows"].values()]
    figures = {f"{value:.3f}"[1:] for row in rows for value in row.values()}
    named = set(re.findall(r"(?<![\d.])\.\d{3}(?!\d)", before + after))
    assert len(named) > 20
    assert named - {".001"} <= figures
