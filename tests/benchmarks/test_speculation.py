"""Acceptance of drafts: the script on a tiny model."""

import json
from pydoc_data.topics import topics

import pytest

from benchmarks import speculation
from benchmarks.common import reading
from tests.adapters.tiny import build, byte_pairs


def test_ways_are_compared(tmp_path, monkeypatch):
    model = build("llama", eos_token_id=None, vocab_size=2000, num_hidden_layers=2)
    monkeypatch.setattr(reading, "load", lambda *_, **__: (model, byte_pairs()))
    monkeypatch.setattr(speculation, "QUESTIONS", speculation.QUESTIONS[:1])
    out = tmp_path / "out.json"
    given = ["--topic", "assert", "--tokens", "200", "--new", "8", "--lookup", "2", "--full", "2"]
    more = ["--index", "exact", "--k", "400", "--device", "cpu", "--model", "tiny"]
    speculation.main([*given, *more, "--json", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["machine"]["device"] == "cpu"
    ways = ["index", "full", "lookup 2", "verified 2"]
    assert [cell["way"] for cell in found["cells"]] == 2 * ways
    greedy, sampled = found["cells"][:4], found["cells"][4:]
    assert [cell.get("same") for cell in greedy] == [None, None, 8, 8]
    assert [cell.get("same") for cell in sampled] == [None, None, 8, None]
    assert greedy[3]["accepted"] + greedy[3]["steps"] == 7
    assert greedy[3]["accepted"] == greedy[3]["drafted"]  # the index retrieves all rows


def test_a_text_that_is_too_short(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "load", lambda *_, **__: (build("llama"), byte_pairs()))
    monkeypatch.setattr(speculation, "topics", {name: topics[name] for name in ("pass", "assert")})
    with pytest.raises(SystemExit, match="--tokens: got 5000, but all topics have"):
        speculation.main(["--topic", "pass", "--tokens", "5000", "--model", "tiny"])
