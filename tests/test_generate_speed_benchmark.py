"""benchmarks/generate_speed.py on a CPU: what it checks, how it takes turns, its table."""

import json
import threading
from collections import Counter

import pytest
import torch

from benchmarks import generate_speed, turns
from benchmarks.tabling.speed import generate_speed as table_of
from kvindex_cuda.pariskv.graph import GRAPHS
from tests.adapters.tiny import build
from tests.cuda import emulator
from tests.cuda.graphs import kept
from tests.cuda.host_memory import FakeAllocator, append, host_store, tokens

MACHINE = {"gpu": "a GPU", "torch": "2", "transformers": "5"}


class Tokenizer:
    """Letters are tokens."""

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}


@pytest.fixture
def options(tmp_path, monkeypatch):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("some words of a text " * 10)
    model = build("llama", eos_token_id=None)
    monkeypatch.setattr(generate_speed, "load", lambda *_, **__: (model, Tokenizer()))
    monkeypatch.setattr(generate_speed, "CHECKED", 4)
    monkeypatch.setattr(generate_speed, "WARM", 2)
    found = ["--text", text, "--tokens", 80, "--written", 9, "--turn", 3, "--layers", 1]
    found += ["--context", 520, "--steps", 6, "--dtype", "float32", "--model", "tiny"]
    return [str(part) for part in [*found, "--json", out]], out


def ran(given, monkeypatch):
    """The result, and what was written while it ran."""
    found, write = [], generate_speed.write

    def also(result, out):
        write(result, out)
        found.append(json.loads(out.read_text()))

    monkeypatch.setattr(generate_speed, "write", also)
    monkeypatch.setattr("sys.argv", ["generate_speed.py", *given])
    generate_speed.main()
    return found[-1], found


def test_it_writes_what_its_table_shows(options, monkeypatch):
    given, out = options
    result, _ = ran(given, monkeypatch)
    assert result == json.loads(out.read_text())
    layers, model = result["layers"], result["model_run"]
    assert model["same_text"]
    assert (layers["rounds"], model["rounds"], model["written"]) == (2, 3, 9)
    assert layers["left_out"] == model["left_out"] == 0
    for plan in ("eager", "graphs"):
        assert 0 < layers[plan]["host_us"] <= layers[plan]["done_us"]
    shown = table_of(result)
    for plan in generate_speed.PLANS:
        found = model[plan]
        assert found["token_ms_low"] <= found["token_ms"] <= found["token_ms_high"]
        assert f"{found['token_ms']:.2f} ({found['token_ms_low']:.2f} to " in shown
        assert f"{1e3 / found['token_ms']:.0f} |" in shown
    ratio = model["ratio"]["dense"]
    assert (
        f"| dense attention over `pariskv`, round by round |  |  | {ratio['token_ms']:.2f} ("
        in (shown)
    )
    assert "(Of 6 steps of the layers with graphs 0 were replays.)" in shown  # on a CPU
    assert "(Of 36 steps of the model with graphs 0 were replays.)" in shown


def test_a_run_that_is_cut_leaves_what_it_has(options, monkeypatch):
    _, written = ran(options[0], monkeypatch)
    rounds = [
        (found["layers"]["rounds"], found.get("model_run", {}).get("rounds")) for found in written
    ]
    assert rounds == [(0, None), (1, None), (2, None), (2, 0), (2, 1), (2, 2), (2, 3)]
    for found in written:
        table_of(found)
    assert "time ended before 1 of 2 rounds of the layers".capitalize() in table_of(written[1])
    assert "Model: not measured." in table_of(written[2])


def test_no_round_is_begun_when_time_is_over(options, monkeypatch):
    result, _ = ran([*options[0], "--seconds", "0"], monkeypatch)
    assert (result["layers"]["left_out"], result["model_run"]["left_out"]) == (2, 3)
    shown = table_of(result)
    assert "(Time ended before 2 of 2 rounds of the layers.)" in shown
    assert "(Time ended before 3 of 3 rounds of the model.)" in shown


def test_steps_that_a_graph_replays_are_counted(options, monkeypatch):
    """On emulated kernels, small ones."""
    if not emulator.available():
        pytest.skip("no g++ to emulate with")
    for name, value in (("H", 2), ("G", 1), ("D", 64), ("LOCAL", 16)):
        monkeypatch.setattr(generate_speed, name, value)
    where = dict(backend="cuda", store="device")
    monkeypatch.setattr(generate_speed, "placed", lambda *_: where)
    given = generate_speed.arguments([*options[0], "--context", "300"])
    with emulator.emulated(), kept() as graphs, torch.no_grad():
        *_, found = generate_speed.measured_layers(given, torch.inf)
    assert found["layer_steps"] == 6
    assert (found["graphs"]["replayed"], found["graphs"]["captured"]) == (6, 0)
    assert (found["eager"]["replayed"], found["eager"]["captured"]) == (0, 0)
    assert graphs.made == 1


def test_graphs_that_change_a_result_are_not_timed(options, monkeypatch):
    step = generate_speed.Layers.step

    def wrong(self):
        return [one + self._layers[0].graphs for one in step(self)]

    monkeypatch.setattr(generate_speed.Layers, "step", wrong)
    given = generate_speed.arguments(options[0])
    with pytest.raises(SystemExit, match="layers: step 0 is not the same with graphs"):
        next(generate_speed.measured_layers(given, torch.inf))


def test_what_cannot_be_done_is_said(options, capsys):
    given = options[0]
    for change, message in (
        (["--layers", "0"], "layers: got 0, allowed is at least 1"),
        (["--steps", "2"], "steps: got 2, allowed is at least 3"),
        (["--text", "nowhere"], "text: got nowhere, allowed is a file that exists"),
    ):
        with pytest.raises(SystemExit):
            generate_speed.arguments([*given, *change])
        assert message in capsys.readouterr().err
    short = generate_speed.arguments([*given, "--tokens", "9999"])
    with pytest.raises(ValueError, match="text: got 210 tokens, allowed are at least 9999"):
        next(generate_speed.measured_model(short, torch.inf))


def test_turns(monkeypatch):
    """Another plan is first in each round; ratios are of the same round; all memory is pinned."""
    order, counts = [], Counter()
    monkeypatch.setattr(turns, "settled", lambda: order.append("settled") or 1.5)

    def turn(plan, factor):
        order.append(plan)
        counts["replayed"] += plan == "graphs"
        slow = order.count(plan)  # as a host that gets slower
        return {"us": [factor * slow, 2 * factor * slow, 9 * factor * slow]}

    plans = {"eager": lambda: turn("eager", 3), "graphs": lambda: turn("graphs", 1)}
    *_, found = turns.in_turns(plans, 3, 5, torch.inf, counts)
    assert [plan for plan in order if plan != "settled"] == [
        *("graphs", "eager"),
        *("eager", "graphs"),
        *("graphs", "eager"),
    ]
    assert (found["rounds"], found["settled_s"], found["layer_steps"]) == (3, 7 * 1.5, 15)
    assert found["ratio"] == {"eager": {"us": 3, "us_low": 3, "us_high": 3}}
    assert found["graphs"] == {
        **{"replayed": 3, "captured": 0},
        **{"us": 4, "us_low": 2, "us_high": 9, "us_rounds": [2, 4, 6]},
    }
    assert (found["eager"]["replayed"], found["eager"]["us_rounds"]) == (0, [6, 12, 18])


def test_settled_waits_for_memory_that_is_being_pinned():
    allocator = FakeAllocator()
    store = append(host_store(allocator), tokens(10))
    turns.settled()
    pinned = store.pinned_bytes
    allocator.gate.clear()
    append(store, tokens(600, 1))
    threading.Timer(0.2, allocator.gate.set).start()
    assert turns.settled() > 0.1
    assert store.pinned_bytes > pinned
    assert turns.settled() < 0.1


def test_graphs_are_counted_while_it_is_asked(monkeypatch):
    class Graph:
        def __init__(self, device, work):
            self.work = work

        def replay(self):
            self.work()

    done = []
    monkeypatch.setitem(GRAPHS, "cpu", Graph)
    with turns.counted("cpu") as counts:
        graph = GRAPHS["cpu"](torch.device("cpu"), lambda: done.append(1))
        graph.replay()
        graph.replay()
    assert (counts["captured"], counts["replayed"], len(done)) == (1, 2, 2)
    assert GRAPHS["cpu"] is Graph
    with turns.counted("neither") as counts:
        assert "neither" not in GRAPHS


def test_the_table_of_a_result_without_turns():
    layers = {"layers": 16, "context": 32768, "eager": {"host_us": 373.5, "done_us": 376.3}}
    model = {"tokens": 7000, "written": 256, "dense": {"token_ms": 41.09}}
    result = dict(model="m", dtype="bfloat16", layers=layers, model_run=model, machine=MACHINE)
    shown = table_of(result)
    assert "| `pariskv`, `graphs=False` | 374 | 376 |  |  |" in shown
    assert "| transformers, dense attention |  |  | 41.09 | 24 |" in shown
    assert "medians. Model: m after 7,000 tokens, 256 written." in shown
