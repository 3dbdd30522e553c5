"""Answers after dense and sparse prompts: the script on a tiny model, and its parts."""

import json

import pytest

from benchmarks import sparse_answers
from benchmarks.common import reading
from tests.adapters.tiny import build, byte_pairs

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "400"]


@pytest.fixture
def tiny(monkeypatch):
    model = build("llama", vocab_size=2000, num_hidden_layers=2)
    monkeypatch.setattr(reading, "load", lambda *_, **__: (model, byte_pairs()))


def run(out, *given):
    sparse_answers.main([*TINY, *given, "--json", str(out)])
    return json.loads(out.read_text(encoding="utf-8"))


def test_each_prompt_is_answered_twice(tiny, tmp_path):
    found = run(tmp_path / "out.json", "--tasks", "needle", "copy", "--tries", "1")
    assert found["machine"]["device"] == "cpu"
    assert [cell["task"] for cell in found["cells"]] == ["needle", "copy"]
    assert all(0 <= cell[read] <= 1 for cell in found["cells"] for read in ("dense", "sparse"))
    assert [line["prompts"] for line in found["summary"]] == [2, 2]


def test_parts_are_joined_and_not_measured_again(tiny, tmp_path, monkeypatch):
    scores = {"needle": [1.0, 0.0], "copy": [1.0, 1.0]}
    asked = []

    def answers(decoder, tokenizer, key, given):
        asked.append(key)
        return scores[key[0]]

    monkeypatch.setattr(sparse_answers, "answers", answers)
    some = "--tasks", "needle", "copy", "--tries", "2"
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for number, file in enumerate(files):
        run(file, *some, "--part", f"{number}/2")
    assert sorted(asked) == sorted((task, 400, seed) for task in scores for seed in range(2))
    joined = run(tmp_path / "joined.json", *some, "--from", *map(str, files))
    assert len(asked) == 4
    everything = joined["summary"][-1]
    assert (everything["dense"], everything["sparse"], everything["difference"]) == (1, 0.5, -0.5)
    assert everything["low"] < -0.5 < everything["high"]


def test_results_of_other_settings_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_answers, "answers", lambda *_: [1.0, 1.0])
    run(tmp_path / "one.json", "--tasks", "needle", "--tries", "1")
    with pytest.raises(SystemExit, match="k=100, allowed is 50"):
        run(tmp_path / "two.json", "--from", str(tmp_path / "one.json"), "--k", "50")


@pytest.mark.parametrize("text", ["4/4", "-1/2"])
def test_a_part_that_does_not_exist(text):
    with pytest.raises(ValueError, match="allowed is 0/N to N-1/N"):
        sparse_answers.part(text)
