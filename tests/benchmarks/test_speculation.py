"""Acceptance of drafts: the script on a tiny model."""

import argparse
import json
from pydoc_data.topics import topics

import pytest

from benchmarks import speculation
from benchmarks.common import reading
from benchmarks.reporting import parts, tokens
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


def test_answers_of_two_dtypes_are_in_one_table(tmp_path, monkeypatch):
    """Acceptance in bfloat16 is measured in a run of its own, which may have longer answers."""
    machine = dict(gpu="a GPU", torch="2", transformers="5")
    cell = dict(topic="types", question="?", tokens=200, way="verified 2", new=8)
    cell |= dict(drafted=6, accepted=5, rounds=3, same=8, compared=8)
    first = dict(model="tiny", lora="long", index="pariskv", k=9, machine=machine)
    first |= dict(dtype="float32", cells=[cell, {**cell, "way": "index"}])
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    alone = tokens.acceptance(first)
    assert "in float32. It read" in alone
    assert "up to one questions" not in alone
    assert "| 200 | 2 | 5 of 6 | 1.7 | 8 of 8 |" in alone
    other = {**first, "dtype": "bfloat16", "cells": [{**cell, "new": 9, "same": 4}]}
    (tmp_path / "speculation_long_bfloat16.json").write_text(json.dumps(other), encoding="utf-8")
    both = tokens.acceptance(first)
    assert "in float32 and bfloat16. It read" in both
    assert "answers of up to 9 tokens" in both
    assert "| float32 | 200 | 2 | 5 of 6 | 1.7 | 8 of 8 |" in both
    assert "| bfloat16 | 200 | 2 | 5 of 6 | 1.7 | 4 of 8 |" in both


def test_time_per_token_by_prompt_lookup(tmp_path, monkeypatch):
    """The time of a step with drafts is that of a step with as many tokens on a GPU."""
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    steps = {"decoder": {"ratio": {"cached+4": {"token_ms": 2.0}}}}
    (tmp_path / "draft_steps.json").write_text(json.dumps(steps), encoding="utf-8")
    cell = dict(topic="types", question="?", tokens=200, way="lookup 4", new=11)
    cell |= dict(drafted=12, accepted=6, rounds=3, steps=4)
    machine = dict(gpu="a GPU", torch="2", transformers="5")
    first = dict(model="tiny", lora="long", index="pariskv", k=9, machine=machine, dtype="float32")
    first |= dict(cells=[cell, {**cell, "way": "lookup auto"}, {**cell, "way": "verified 2"}])
    page = tokens.lookups(first)
    assert "| float32 | 200 | 1 | 4 | 6 of 12 | 3 of 4 | 2.50 | 0.70 |" in page
    assert page.count("| float32 |") == 1


def test_a_gguf_file_without_a_model_is_named():
    parser = argparse.ArgumentParser()
    reading.add_model(parser)
    with pytest.raises(ValueError, match=r"gguf_file: got 'm.gguf' without --model; pass the"):
        reading.loaded(parser.parse_args(["--gguf-file", "m.gguf"]))
