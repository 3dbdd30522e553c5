"""benchmarks/field.py tells indexes the text, as a layer does: `sentencekv` has sentences."""

import json

import pytest
import torch

from benchmarks import field
from benchmarks.comparing.layers import Layer, capture
from benchmarks.comparing.measure import measure, truths
from benchmarks.comparing.setting import Setting
from kvindex.indexes.exact import Exact
from kvindex.indexes.sentencekv import SentenceKV
from tests.adapters.tiny import build

SETTING = Setting(tokens=420, sink=4, local_window=32, generated=128, every=32)
STOP = 7


def layer(tokens=None):
    """Sentences of 8 to 15 tokens whose keys are alike; random queries."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 16, (60,), generator=draw)
    ends = lengths.cumsum(0)[lengths.cumsum(0) < 440] - 1
    text = torch.full((440,), 3)
    text[ends] = STOP
    means = torch.randn(2, 60, 16, generator=draw).repeat_interleave(lengths, 1)[:, :440]
    keys, values = torch.randn(2, 2, 440, 16, generator=draw) * 0.3
    queries = torch.randn(4, 440, 16, generator=draw) * 3
    return Layer(keys + means, queries, 0.25, None, values, tokens=text if tokens is None else None)


@pytest.mark.parametrize("pieces", [False, True])
def test_every_token_is_read_once_it_has_come_and_before_the_next(pieces, monkeypatch):
    one, calls = layer(), []
    known = truths(one, SETTING, [32])
    for name, method in [
        (name, getattr(Exact, name)) for name in ("observe_queries", "read", "end_prompt")
    ]:

        def noted(self, *given, name=name, method=method, **options):
            if name == "read":
                calls.append((name, options["first"], given[0].tolist()))
            else:
                calls.append((name, int(given[1][0]) if name == "observe_queries" else None, None))
            return method(self, *given, **options)

        monkeypatch.setattr(Exact, name, noted)
    measure(one, "exact", SETTING, [32], known, pieces=pieces)
    names = [name for name, *_ in calls]
    assert names[:3] == ["observe_queries", "read", "end_prompt"]
    prompt = SETTING.points[0] if pieces else 420
    reads = [(first, tokens) for name, first, tokens in calls if name == "read"]
    assert reads[0] == (0, one.tokens[:prompt].tolist())
    for first, tokens in reads:
        assert tokens == one.tokens[first : first + len(tokens)].tolist()
    told = [at for name, at, _ in calls if name == "observe_queries"]
    assert told == [first for first, _ in reads]  # each step's tokens after its queries
    assert max(told) == 439
    assert (len(reads) > 1 + 4 * 20) == pieces


def test_sentences_are_found_where_there_are_some():
    known = truths(layer(), SETTING, [32])
    options = dict(setting=SETTING, rows=[32], known=known, pieces=True)
    spec = "sentencekv:query=token"
    told = measure(layer(), spec, punctuation=STOP, **options)
    pages = measure(layer(), spec, **options)
    nobody = measure(layer(tokens="unknown"), spec, punctuation=STOP, **options)
    assert told["rows"][32]["coverage"] > 1.2 * pages["rows"][32]["coverage"]
    assert nobody["rows"][32]["coverage"] == pages["rows"][32]["coverage"]
    for at in told["along"]:
        assert told["along"][at]["coverage"] > pages["along"][at]["coverage"]


def test_a_comparison_passes_on_what_a_spec_is_told():
    compared = field.Comparison(SETTING, [32], [layer()], told={"sentencekv": {"punctuation": 7}})
    for spec in ("sentencekv", "sentencekv:longest=64"):
        compared.measure(spec, 0)
    assert not compared.failed
    lines = {(line["index"], line["arrival"]): line for line in compared.lines()}
    told, pages = (lines[spec, "whole"] for spec in ("sentencekv", "sentencekv:longest=64"))
    assert told["bytes"]["kept"] > 3 * pages["bytes"]["kept"]
    assert "punctuation" not in told
    assert told["rows"] != pages["rows"]


def test_a_run_takes_punctuation_from_the_tokenizer(tmp_path, monkeypatch):
    class Tokenizer:
        all_special_ids = ()

        def __call__(self, *_, **__):
            return {"input_ids": [i % 50 + 3 for i in range(120)]}

        def __len__(self):
            return 60

        def batch_decode(self, ids, **_):
            return ["." if i == [STOP] else "a" for i in ids]

    made, begun = [], SentenceKV.__init__
    monkeypatch.setattr(
        SentenceKV, "__init__", lambda self, **given: made.append(given) or begun(self, **given)
    )
    monkeypatch.setattr(field, "loaded", lambda given: (build("llama"), Tokenizer()))
    monkeypatch.setattr(field, "described", lambda given: dict(model="m", lora=None, machine={}))
    (tmp_path / "a.txt").write_text("x")
    out = tmp_path / "field.json"
    command = ["field", "--text", str(tmp_path / "a.txt"), "--tokens", "120", "--written", "4"]
    command += [
        "--generated",
        "32",
        "--sink",
        "4",
        "--local-window",
        "16",
        "--rows",
        "8",
        "--layers",
        "9",
    ]
    command += ["--json", str(out), "--index", "sentencekv", "exact"]
    monkeypatch.setattr("sys.argv", command)
    field.main()
    run = json.loads(out.read_text())["runs"][0]
    assert not run["failed"]
    assert {options["punctuation"] for options in made} == {(STOP,)}


def test_captured_layers_know_their_tokens():
    ids = torch.arange(3, 43)
    assert all(torch.equal(one.tokens, ids) for one in capture(build("llama"), ids))
