"""benchmarks/field.py: what cells come to, runs of several lengths as one, a run from its start."""

import json

import pytest

from benchmarks import field
from benchmarks.comparing.runs import summary
from benchmarks.comparing.show import title_of
from tests.adapters.tiny import build


def test_a_layer_with_small_errors_counts_as_much_in_the_ratio_and_each_is_kept():
    def cell(name, error, exact, heads):
        at = dict(recall=1.0, coverage=0.5, error=error, used=8, error_exact=exact, heads=heads)
        return {"layer": name, "build_s": 1.0, "rows": {8: {**at, "search_s": 1.0}}, "along": {}}

    cells = [cell("a, layer 0", 1.0, 2.0, [0.5, 1.5]), cell("a, layer 6", 0.08, 0.01, [0.08] * 2)]
    found = summary(cells, 8)
    assert found["rows"]["8"]["error"] == pytest.approx(0.54)
    assert found["rows"]["8"]["of_exact"] == pytest.approx(2.0)  # of a half and eight
    assert found["rows"]["8"]["error_worst_layer"] == 1.0
    assert found["by_layer"] == {
        "a, layer 0": {"error": 1.0, "coverage": 0.5, "heads": [0.5, 1.5]},
        "a, layer 6": {"error": 0.08, "coverage": 0.5, "heads": [0.08, 0.08]},
    }


def test_runs_are_joined_by_length_and_lines_in_the_same_setting_only():
    def run(tokens, indexes, failed=(), **more):
        return {
            **dict(setting={"tokens": tokens}, lora=None, sampled=False, rows=[64]),
            **dict(machine={"at": tokens}),
            **dict(indexes=[dict(index=name, by=tokens) for name in indexes], failed=dict(failed)),
            **more,
        }

    old = field.joined(None, run(7, "ab", {"c": "no"}))
    assert [one["setting"]["tokens"] for one in old["runs"]] == [7]
    longer = field.joined(old, run(32, "a"))
    assert [one["setting"]["tokens"] for one in longer["runs"]] == [7, 32]
    assert longer["machine"] == {"at": 32}
    together = field.joined(longer, run(7, "bc"))
    assert [line["index"] for line in together["runs"][0]["indexes"]] == ["a", "b", "c"]
    assert together["runs"][0]["failed"] == {}
    assert together["runs"][1] == longer["runs"][1]
    with pytest.raises(ValueError, match=r"rows = \[100\], allowed is \[64\]"):
        field.joined(old, run(7, "a", rows=[100]))
    for other in (dict(lora="x"), dict(sampled=True)):
        assert len(field.joined(old, run(7, "a", **other))["runs"]) == 2


def test_a_run_is_written_as_far_as_its_time_goes(tmp_path, monkeypatch):
    def tokenizer(*_, **__):
        return {"input_ids": [i % 50 + 3 for i in range(120)]}

    monkeypatch.setattr(field, "loaded", lambda given: (build("llama"), tokenizer))
    monkeypatch.setattr(
        field, "described", lambda given: dict(model="m", lora=None, machine=dict(at=given.device))
    )
    (tmp_path / "a.txt").write_text("x")
    out = tmp_path / "field.json"
    command = ["field", "--text", str(tmp_path / "a.txt"), "--tokens", "120", "--written", "4"]
    command += ["--generated", "32", "--sink", "4", "--local-window", "16", "--rows", "8", "64"]
    command += ["--layers", "1", "--json", str(out), "--index"]

    def measured(*more):
        monkeypatch.setattr("sys.argv", [*command, *more])
        field.main()
        return json.loads(out.read_text())["runs"][0]

    run = measured("exact", "pqcache:subspaces=5", "streaming:budget={k}", "--add")
    assert run["measured"] == run["layers"] > 1
    assert [line["index"] for line in run["indexes"]] == ["exact"] * 2 + [
        "streaming:budget={k}"
    ] * 2
    assert {line["layers"] for line in run["indexes"]} == {run["layers"]}
    assert list(run["failed"]) == ["pqcache:subspaces=5"]
    by_layer = run["indexes"][0]["by_layer"]
    assert list(by_layer) == [f"a, layer {at}" for at in range(run["layers"])]
    assert {len(at["heads"]) for at in by_layer.values()} == {run["shape"]["q_heads"]}
    again = measured("quest", "--add", "--seconds", "0")
    assert again["failed"]["quest"] == "not begun: 0 s were used up"
    assert len(again["indexes"]) == 4
    some = measured("quest", "--add", "--first", "1")
    assert (some["measured"], some["indexes"][-1]["layers"]) == (1, 1)
    assert measured("quest", "--seconds", "1e-9")["indexes"] == []
    own = measured("exact", "--sampled")
    assert own["sampled"]
    assert own["indexes"][0]["rows"] != run["indexes"][0]["rows"]
    assert "continued by the model" in title_of(own)
