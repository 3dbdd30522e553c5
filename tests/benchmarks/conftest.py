"""Fixtures of the benchmarks' tests: sizes for an emulator, a tiny model, a tiny shape."""

from functools import partial

import pytest

from benchmarks.common import correctness, decoding, reading, shapes, token, workload
from kvindex.pariskv.index import ParisKV
from kvindex_adapters.common import layer_options
from tests.adapters.tiny import build
from tests.cuda import emulator


@pytest.fixture
def small(monkeypatch):
    """Sizes that an emulator can compute."""
    monkeypatch.setattr(correctness, "CHECKED", 768)
    monkeypatch.setattr(workload, "SETS", 1)
    monkeypatch.setattr(decoding, "LOCAL", 16)
    monkeypatch.setattr(decoding, "default_placement", lambda *_: {"backend": "cuda"})
    with emulator.emulated():
        yield


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Put a tiny model in place of the real one. Return options with two texts and a result."""
    model = build("llama", eos_token_id=None)

    def tokenizer(text, **_):
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    monkeypatch.setattr(reading, "load", lambda *_, **__: (model, tokenizer))
    for name in "ab":
        (tmp_path / name).write_text(f"{name}: some words of a text " * 100)
    texts = ["--text", str(tmp_path / "a"), str(tmp_path / "b")]
    return texts, ["--model", "tiny", "--json", str(tmp_path / "out.json")]


@pytest.fixture
def tiny_decoder(small, tmp_path, monkeypatch):
    """Return arguments of a shape of one layer, whose steps are captured as on a GPU."""
    monkeypatch.setattr(ParisKV, "_defers", True)  # as on a GPU, where the host must not read
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    for module in (token, layer_options):
        monkeypatch.setattr(module, "default_placement", lambda *_: {"backend": "cuda"})
    monkeypatch.setattr(token, "sharpen_for", partial(token.sharpen_for, count=1))
    for name, value in dict(WARM=3, REFILLED=3, SINK=4, LOCAL=16, UPDATE=8).items():
        monkeypatch.setattr(token, name, value)
    shape = shapes.Shape(1, 64, 96, 2, 1, 64, 101, normed=True)
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    given = ["--decoder", "tiny", "--context", 520, "--written", 16, "--turn", 8]
    return [*given, "--dtype", "float32", "--json", tmp_path / "out.json"]
