"""Tools for kernel developers: counters, stamps, comparison of checkouts."""

import importlib
import io
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import report
from benchmarks.common import shapes, workload
from tests.benchmarks.running import MACHINE, ROOT, SIZES, SMALL, emulated, timed
from tests.cuda import emulator


def tool(name):
    """Import a script of tools/ as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def counters(profile, **values):
    """Return a table in the format of `ncu`."""
    head = ["ID", "Kernel Name", "Grid Size", *profile.COUNTERS.values()]
    row = [0, "scan", "(8, 1, 1)", *(values.get(name, 0.5) for name in profile.COUNTERS)]
    lines = [head, [""] * len(head), row]
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n"


def test_counters_are_read_and_what_is_no_table_is_said():
    profile = tool("profile_kernels")
    (scan,) = profile.parsed(counters(profile, us=12500.0, memory=71.0))
    assert (scan["us"], scan["limit"]) == (12.5, "memory, 71%")
    (wait,) = profile.parsed(counters(profile, long_scoreboard=9))
    assert wait["limit"] == "latency: long scoreboard"
    works = dict(works={"a": [scan, wait]}, tokens=1, keys=1, machine=MACHINE)
    assert "latency: long scoreboard 58%" in report.TABLES["limits"](works)
    with pytest.raises(ValueError, match="ncu: got no table of launches"):
        profile.parsed("no permission\n")


@emulated
@pytest.mark.slow
def test_a_step_is_stamped_where_it_runs(small, tmp_path, monkeypatch):
    timeline = tool("timeline")
    work = workload.Layers(SMALL, "pariskv", "device", tokens=600, layers=2, **SIZES)
    want = work.answers()
    monkeypatch.setattr(emulator, "_folder", lambda: tmp_path)  # a folder for this test alone
    capture = partial(SimpleNamespace)
    found = timeline.measure(work, work.ask, 2, timed, lambda run: capture(replay=run))
    assert torch.equal(want, work.answers())
    first, *_, last = found["points"]
    assert (first["what"], first["first_us"], last["what"]) == ("start", 0, "end")
    assert all(p["first_us"] <= p["median_us"] <= p["last_us"] for p in found["points"])
    assert "with stamps" in timeline.shown(found)


@emulated
@pytest.mark.slow
def test_a_step_is_stamped_inside_a_token(tiny_decoder, tmp_path, monkeypatch):
    timeline, shape = tool("timeline"), shapes.SHAPES["tiny"]
    monkeypatch.setattr(emulator, "_folder", lambda: tmp_path)  # a folder for this test alone
    of = shape, shape.geometry(torch.float32, "cpu"), "pariskv", 520, 0.9, 2
    found = timeline.measure_token(*of) | {"decoder": "tiny"}
    kernels = dict.fromkeys(point["kernel"] for point in found["points"])
    assert [*kernels][-3:] == ["rerank", "select_rows", "attend"]
    assert found["points"][0]["first_us"] == 0
    assert "A token takes" in timeline.shown(found)


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (["--q-heads", "32", "--kv-heads", "5"], "got 32, allowed is a multiple of kv-heads = 5"),
        (["--kv-heads", "0"], "got 32, allowed is a multiple of kv-heads = 0, both at least 1"),
    ],
)
def test_heads_that_no_layer_has_are_refused(heads, says, tmp_path, capsys):
    for given in (["timeline"], ["compare_trees", f"one={ROOT}"]):
        with pytest.raises(SystemExit):
            tool(given[0]).arguments([*given[1:], *heads, "--json", str(tmp_path / "x.json")])
        assert says in capsys.readouterr().err


def test_a_mark_inside_a_statement_is_refused():
    stamps = tool("stamps")
    source = "__global__ void one(int n) {\n    if (n)  // MARK\n        n++;  // MARK\n}\n"
    with pytest.raises(ValueError, match=r"a.cu:2: got 'if \(n\)  // MARK', allowed is"):
        stamps.stamped(source, ["one"], file="a.cu")


WORKER = """
import json, sys
for line in sys.stdin:
    name, *given = json.loads(line)
    found = {"device": {"median_us": SPEED}}
    print(json.dumps({"error": "wrong"} if name == "check" and SPEED > 9 else found), flush=True)
"""


def test_trees_are_timed_in_turns_and_a_wrong_one_is_named(tmp_path, monkeypatch):
    trees, made = tool("compare_trees"), []
    for name, speed in dict(old=2.0, new=3.0, bad=10.0).items():
        (tmp_path / f"{name}.py").write_text(WORKER.replace("SPEED", str(speed)))
        folders = ROOT, tmp_path / f"{name}.log", tmp_path / f"{name}.py"
        made.append(trees.Tree(name, *folders))
    started = {"machine": MACHINE, "modules": []}
    real = trees.at_once
    monkeypatch.setattr(
        trees,
        "at_once",
        lambda t, *c: dict.fromkeys("on", started) if c[0] == "start" else real(t, *c),
    )
    given = SimpleNamespace(index="pariskv", hit_rate=0.9, batch=1, replays=50)
    given.__dict__.update(q_heads=32, kv_heads=2)
    given.__dict__.update(tokens=[4096], rounds=2, times=["device"])
    given.json = tmp_path / "out.json"
    result = trees.compare(made, given)
    assert "| 2.00 (2.00 … 2.00) | 3.00 (3.00 … 3.00) | 1.500 | – | – |" in trees.compared(result)
    assert result["failed"] == {"bad": "check: wrong"}
    for tree in made:
        tree.end()


@emulated
def test_a_tree_answers_commands_and_says_what_is_wrong(small):
    worker = tool("tree_worker")
    bench = worker.Bench(timed, SMALL, layers=1, sizes=SIZES)
    places = ["device", "cached", "host"]
    commands = [["round"], ["start"], ["build", 300, places], ["round", places], ["check", 1]]
    out = io.StringIO()
    worker.serve(map(json.dumps, commands), out, lambda: (bench, {}))
    early, _, _, times, wrong = map(json.loads, out.getvalue().splitlines())
    assert early["error"].startswith("ValueError: command: got 'round', allowed is 'start'")
    assert {place: times[place]["median_us"] for place in places} == dict.fromkeys(places, 10.0)
    assert wrong["error"].startswith("TypeError")


@emulated
@pytest.mark.slow
def test_a_decode_step_of_a_tree_is_timed(tiny_decoder, monkeypatch):
    worker, shape = tool("tree_worker"), shapes.SHAPES["tiny"]
    monkeypatch.setitem(worker.SHAPES, "qwen3-8b", shape)
    monkeypatch.setattr(worker.token, "MOST_SHARPENED", 8)
    bench = worker.Bench(timed, shape.geometry(torch.float32, "cpu"), layers=1, sizes=SIZES)
    assert bench.build(520, ["token"])["sharpness"] > 0
    assert bench.round(["token"])["token"]["replays"] == 64
