"""benchmarks/generate_speed.py on a CPU: what it checks, what it writes, its table."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import generate_speed
from benchmarks.tabling.speed import generate_speed as table_of
from tests.adapters.tiny import build


class Tokenizer:
    """Letters are tokens."""

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def decode(self, ids, **options):
        return " ".join(map(str, ids.tolist()))


@pytest.fixture
def options(tmp_path, monkeypatch):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("some words of a text " * 10)
    model = build("llama", eos_token_id=None)
    monkeypatch.setattr(generate_speed, "load", lambda *_, **__: (model, Tokenizer()))
    monkeypatch.setattr(generate_speed, "CHECKED", 2)
    found = ["--text", text, "--tokens", 80, "--written", 4, "--runs", 1, "--layers", 1]
    found += ["--context", 520, "--steps", 2, "--dtype", "float32", "--model", "tiny"]
    return [str(part) for part in [*found, "--json", out]], out


def test_it_writes_what_its_table_shows(options, monkeypatch):
    given, out = options
    monkeypatch.setattr("sys.argv", ["generate_speed.py", *given])
    generate_speed.main()
    result = json.loads(out.read_text())
    assert result["model_run"]["same_text"]
    for plan in ("eager", "graphs"):
        assert 0 < result["layers"][plan]["host_us"] <= result["layers"][plan]["done_us"]
    shown = table_of(result)
    for plan in generate_speed.PLANS:
        assert f"{1e3 / result['model_run'][plan]['token_ms']:.0f}" in shown


def test_graphs_that_change_a_result_are_not_timed(options, monkeypatch):
    step = generate_speed.Layers.step

    def wrong(self):
        return [one + self._layers[0].graphs for one in step(self)]

    monkeypatch.setattr(generate_speed.Layers, "step", wrong)
    with pytest.raises(SystemExit, match="layers: step 0 is not the same with graphs"):
        generate_speed.measured_layers(generate_speed.arguments(options[0]))


def test_what_cannot_be_done_is_said(options, capsys):
    given = options[0]
    for change, message in (
        (["--layers", "0"], "layers: got 0, allowed is at least 1"),
        (["--text", "nowhere"], "text: got nowhere, allowed is a file that exists"),
    ):
        with pytest.raises(SystemExit):
            generate_speed.arguments([*given, *change])
        assert message in capsys.readouterr().err
    short = SimpleNamespace(**vars(generate_speed.arguments([*given, "--tokens", "9999"])))
    with pytest.raises(ValueError, match="text: got 210 tokens, allowed are at least 9999"):
        generate_speed.measured_model(short, torch.inf, None)
