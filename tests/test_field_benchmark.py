"""benchmarks/field.py: exact search is right, a failure is a result, what is frozen is worse."""

import json
from types import SimpleNamespace

import pytest
import torch

import kvindex
from benchmarks import field, reading
from benchmarks.comparing.layers import Layer, capture
from benchmarks.comparing.measure import built, measure, search_time, truths
from benchmarks.comparing.setting import Setting
from benchmarks.comparing.show import plot, show
from benchmarks.tabling.field import field as table_of
from kvindex.indexes.exact import Exact
from tests.adapters.tiny import build

SETTING = Setting(tokens=420, sink=4, local_window=32, generated=128, every=32)
ROWS = [32, 512]


def layer(seed=0, later=0.0, softcap=None):
    """Two KV heads read by two query heads each; what comes in pieces, and asks, is moved."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 440, 16, generator=draw)
    queries = torch.randn(4, 440, 16, generator=draw) * 3
    keys[:, 292:388, 0] += later
    queries[:, 420:, 0] += later
    return Layer(keys, queries, 0.25, softcap, values)


def run_of(compared, **more):
    """As `field.main` writes it."""
    run = dict(
        **dict(model="m", lora=None, texts=["a"], written=20, sampled=False),
        **dict(every_layer=1, layers=1),
        **dict(shape=dict(q_heads=4, kv_heads=2), setting=dict(vars(SETTING)), rows=ROWS),
        **dict(dtype="float32", notes=compared.notes, seconds=1.0, load_average=1.0),
        machine=dict(cores=1, processor="p", torch="2", transformers="5", threads=1),
        **dict(indexes=compared.lines(), failed=compared.failed, measured=1),
    )
    return json.loads(json.dumps({**run, **more}))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("pieces", [False, True])
def test_exact_search_finds_all_and_with_all_rows_is_full_attention(pieces, softcap):
    one = layer(softcap=softcap)
    known = truths(one, SETTING, ROWS)
    found = measure(one, "exact", SETTING, ROWS, known, pieces=pieces)
    last = found["rows"]
    assert last[32]["recall"] == last[512]["recall"] == 1
    assert last[512]["error"] < 1e-5
    assert last[32]["error"] > 0.01
    assert last[512]["coverage"] == pytest.approx(1)
    assert 0.1 < last[32]["coverage"] < 0.999
    assert last[512]["used"] == 384
    assert list(found["along"]) == ([0, 32, 64, 128] if pieces else [])
    for at in found["along"].values():
        assert (at["recall"], at["used"], at["error_exact"]) == (1, 32, at["error"])
    if pieces:
        assert found["along"][128]["error"] == last[32]["error"]


def test_what_asks_along_a_generation_sees_what_has_come():
    """With all rows it is full attention at every point, so nothing is missing or too early."""
    one = layer()
    known = truths(one, SETTING, [512])
    found = measure(one, "exact", SETTING, [512], known, pieces=True)["along"]
    assert max(at["error"] for at in found.values()) < 1e-5
    assert [at["used"] for at in found.values()] == [256, 288, 320, 384]


@pytest.mark.parametrize("spec", ["exact", "exact+reuse", "exact+sample"])
def test_a_wrapper_that_follows_the_steps_is_searched_at_every_token(spec, monkeypatch):
    one, calls = layer(), []
    known, search = truths(one, SETTING, [32]), Exact.search

    def counted(*given, **k):
        calls.append(1)
        return search(*given, **k)

    monkeypatch.setattr(Exact, "search", counted)
    spec += ":tau=2" if "reuse" in spec else ""
    measure(one, spec, SETTING, [32], known, pieces=True)
    asked = 4 * (20 + 1)  # at each point, and once before the clock runs
    assert len(calls) == asked + (128 if "reuse" in spec else 0)


def test_log_weights_and_summaries_count_as_in_a_layer():
    """Single keys as clusters lose nothing, and what has no weight is not held."""
    one = layer()
    known = truths(one, SETTING, ROWS)
    found = measure(one, "retroinfer:block=64:per_cluster=1", SETTING, ROWS, known)["rows"]
    assert found[512]["error"] < 1e-5
    summed = measure(one, "retroinfer:block=64:per_cluster=8:estimated=.5", SETTING, ROWS, known)[
        "rows"
    ]
    assert summed[32]["coverage"] < found[32]["coverage"]
    drawn = measure(one, "magicpig:bits=2:tables=8", SETTING, ROWS, known)["rows"]
    assert drawn[512]["coverage"] < 1
    assert drawn[512]["error"] > 1e-3


def test_a_frozen_index_loses_what_comes_later_and_a_failure_stops_nobody():
    compared = field.Comparison(SETTING, ROWS, [layer(seed, later=4.0) for seed in (0, 1)])
    wrong = "pqcache:subspaces=5"
    for number in (0, 1):
        for spec in (wrong, "exact", "magicpig:bits=4"):
            compared.measure(spec, number)
    assert list(compared.failed) == [wrong]
    assert "subspaces: got 5" in compared.failed[wrong]
    lines = {(one["index"], one["arrival"]): one for one in compared.lines()}
    assert list(lines) == [
        *(("exact", arrival) for arrival in ("whole", "pieces")),
        *(("magicpig:bits=4", arrival) for arrival in ("whole", "pieces", "stale")),
    ]
    along = {arrival: lines["magicpig:bits=4", arrival]["along"] for arrival in ("pieces", "stale")}
    assert along["stale"]["0"]["coverage"] == along["pieces"]["0"]["coverage"]
    assert along["stale"]["128"]["coverage"] < along["pieces"]["128"]["coverage"] / 2
    assert lines["exact", "whole"]["layers"] == 2


def test_lines_say_where_they_are_of_fewer_layers():
    compared = field.Comparison(SETTING, [32], [layer(), layer(1)], cpu=True)
    assert compared.measure("exact", 0) > 0
    assert [line["layers"] for line in compared.lines()] == [1, 1]
    assert compared.lines()[0]["cpu_search_ms"] > 0
    whole = {"runs": [run_of(compared, rows=[32], layers=2)]}
    assert "2 layers of 4 query and 2 KV heads, 1 of them measured;" in table_of(whole)
    assert "| `exact` |" in table_of(whole)
    later = {"runs": [run_of(compared, rows=[32], layers=2, measured=2)]}
    assert "| `exact` (1 of 2 layers) |" in table_of(later)
    assert search_time(layer(), "exact", SETTING, 32) > 0


def test_the_first_build_is_not_timed(monkeypatch):
    """It compiles kernels and loads libraries."""
    compared, calls = field.Comparison(SETTING, [32], [layer(), layer(1)]), []

    def counted(one, spec, setting, **given):
        calls.append((spec, given.get("k")))
        return built(one, spec, setting, **given)

    monkeypatch.setattr(field, "built", counted)
    for number in (0, 1):
        compared.measure("exact", number)
    assert calls == [("exact", 32)]


def test_first_layers_are_of_different_texts_and_depths():
    assert field.in_turn(["abc", "xyz"]) == [*"aybzcx"]
    assert field.in_turn(["abc"]) == [*"abc"]


def test_a_budget_is_the_rows_that_are_asked_for():
    one = layer()
    known = truths(one, SETTING, ROWS)
    found = measure(one, "streaming:budget={k}", SETTING, ROWS, known)["rows"]
    assert found[32]["recall"] < 0.5
    assert found[512]["error"] < 1e-5


def test_all_indexes_are_compared_and_drawn(tmp_path):
    names = [spec.split(":")[0].split("+")[0] for spec in field.default_specs()]
    assert set(names) == set(kvindex.names())
    assert (names[:3], names[-1][:6]) == (["exact", "exact", "pariskv"], "faiss-")
    assert field.stale("exact") is None
    assert field.stale("ctkvr:rho=8+recall") == "ctkvr:rho=8:stale=true+recall"
    compared = field.Comparison(SETTING, ROWS, [layer()])
    for spec in ("exact", "pariskv", "ctkvr:rho=32"):
        compared.measure(spec, 0)
    assert not compared.failed
    compared.failed["other"] = "ValueError: no"
    run = run_of(compared)
    longer = {**run, "setting": {**run["setting"], "tokens": 900}, "lora": "l.safetensors"}
    result = field.joined(field.joined(None, run), longer)
    run["indexes"][2]["backend"] = "cuda"
    table = table_of(result)
    assert table.count("`pariskv` ran on the kernels of `kvindex_cuda`.") == 2
    assert "FAISS's" not in table
    assert table.count("| of `exact` @32 |") == 2
    assert table.count("\n| `") == 2 * 4 + 3
    assert table.count("ValueError: no") == 2
    assert "900 tokens" in table
    show(result)
    pytest.importorskip("matplotlib")
    plot(result, tmp_path / "field.png")
    assert (tmp_path / "field.png").stat().st_size > 10_000


def test_on_a_gpu_pariskv_runs_on_its_kernels_and_faiss_where_it_can(monkeypatch):
    assert field.faster(torch.device("cpu")) == ({}, [])

    def neither(*_):
        raise ImportError("no")

    with monkeypatch.context() as patch:
        patch.setattr(field.backend, "resolve", neither)
        patch.setattr(field.faiss_library, "library", neither)
        found, notes = field.faster(torch.device("cuda"))
    assert found == {}
    assert notes == ["pariskv ran as plain torch: no", "FAISS ran on the CPU: no"]
    monkeypatch.setattr(field.backend, "resolve", lambda name: SimpleNamespace(ready=id))
    monkeypatch.setattr(field.faiss_library, "library", lambda: None)
    monkeypatch.setattr(field.faiss_library, "check_gpu", lambda faiss, device: None)
    assert field.faster(torch.device("cuda")) == (
        {
            "pariskv": {"backend": "cuda"},
            **{f"faiss-{name}": {"where": "gpu"} for name in ("flat", "ivf", "ivfpq")},
        },
        [],
    )


def test_layers_are_those_of_the_recall_benchmark():
    model, tokenizer = build("llama"), lambda *_, **__: {"input_ids": list(range(3, 43))}
    given = (model, tokenizer, "x", 40, 8)
    plain = reading.read_and_write(*given)
    ids = reading.continued(*given)
    kept = capture(model, ids)
    assert len(plain) == len(kept)
    for one, other in zip(plain, kept, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.queries, other.queries[:, -8:])
        assert other.values.shape[:2] == other.keys.shape[:2]
        assert not torch.equal(other.values, other.keys)
        assert other.rope.shape == (other.keys.shape[-1] // 2,)
    assert len(capture(model, ids, every=len(plain))) == 1
    with pytest.raises(ValueError, match="text: got 40 tokens, allowed is at least 41"):
        reading.continued(model, tokenizer, "x", 41, 8)
