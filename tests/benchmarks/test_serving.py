"""Serving in vLLM, without the engine: which requests are compared and timed."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import serving
from benchmarks.common import shapes
from tests.benchmarks.running import MACHINE


def test_serving_is_timed_where_answers_are_the_engines_own(monkeypatch, tmp_path, capsys):
    answer = dict(tokens=[5, 6, 7], gaps=[3.0, 0.01, 2.0])
    close = dict(tokens=[5, 9, 1], gaps=[3.0, 0.01, 2.0])
    row = dict(batch=2, prefill_s=1.0, token_ms=[[8.0, 8.0, 8.0], [9.0, 8.0, 8.0]])
    found = {
        ("check", "stock"): [answer],
        ("check", "kvindex"): [close],
        ("time", "stock"): [row],
        ("time", "kvindex"): [{**row, "token_ms": [[4.0, 4.0, 4.0]]}],
    }
    monkeypatch.setattr(serving, "ran", lambda *which: found[which])
    monkeypatch.setattr(serving, "describe", lambda device: MACHINE)
    to = tmp_path / "serving.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--batch", "2", "--json", str(to)])
    serving.main()
    told = json.loads(to.read_text())
    assert told["serving"]["check"] == dict(equal=1, tokens=3)
    plans = told["serving"]["batches"][0]["plans"]
    assert plans["kvindex"]["ratio"] == 0.5
    assert plans["stock"]["token_ms_rounds"] == [8, 8]
    to.unlink()
    found["check", "kvindex"] = [dict(tokens=[8, 6, 7], gaps=[1.0, 1.0, 1.0])]
    with pytest.raises(SystemExit, match="token 0 is 5 without the plug-in and 8 with it"):
        serving.main()
    assert not to.exists()


def test_a_served_models_configuration_is_the_shapes():
    shape = shapes.SHAPES["qwen3-8b"]
    config = serving.configuration(shape, 4, 4096)
    made = importlib.import_module("transformers").Qwen3Config(**config)
    assert (made.num_hidden_layers, made.head_dim, made.hidden_size) == (4, 128, 4096)
    given = serving.arguments(["--context", "1024", "--shared", "--json", "x"])
    first, second = serving.prompts(given, 2)
    assert first[:768] == second[:768]
    assert first != second


def test_requests_that_arrive_wait_for_tokens(monkeypatch):
    class Core:
        """Writes a token of each request per step."""

        def __init__(self):
            self.lengths, self.count = {}, 3

        def add_request(self, name, given, params):
            assert params["max_tokens"] == self.count
            self.lengths[name] = 0

        def has_unfinished_requests(self):
            return any(length < self.count for length in self.lengths.values())

        def step(self):
            going = [name for name, length in self.lengths.items() if length < self.count]
            for name in going:
                self.lengths[name] += 1
            answers = [SimpleNamespace(token_ids=[1] * self.lengths[name]) for name in going]
            return [
                SimpleNamespace(request_id=f"{name}-x", outputs=[answer])
                for name, answer in zip(going, answers, strict=True)
            ]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    found = serving.arriving(Core(), [(0.0, [1]), (0.02, [2])], 3)
    assert [len(times) for times in found.values()] == [2, 4]
    shown = serving.waits(found)
    assert set(shown) == {"first_ms", "first_ms_99", "between_ms", "between_ms_99"}
    assert 0 <= shown["first_ms"] <= shown["first_ms_99"]


def test_options_of_the_plug_in(monkeypatch):
    opened = []
    monkeypatch.setattr(serving, "opened", lambda *given, **options: opened.append(options))
    options = ["--json", "out", "--k", "50", "--dense-below", "8192"]
    for more in ([], ["--dense-graphs", "--dense-below", "auto"]):
        serving.large(serving.arguments(options + more), "kvindex", "folder")
    asked = dict(index="pariskv:sign_decoder=mean", k=50)
    sizes = dict(layers=None, tokens=131_072 + 128 + 256, rows=1)
    assert opened == [
        asked | sizes | dict(dense_below=8192, dense_graphs=False),
        asked | sizes | dict(dense_below="auto", dense_graphs=True),
    ]
