"""Trees that are timed in turns, but for the clock: processes that answer, hang, die, are wrong."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import side_by_side
from benchmarks.beside import show
from benchmarks.beside.trees import Tree, at_once, in_turn

ROOT = Path(__file__).parent.parent

STAND_IN = """
import json, os, sys, time
name = os.path.basename(os.getcwd())
us, fault, on = open("plays").read().split()
print("printed while modules are imported", flush=True)
print("first words", file=sys.stderr, flush=True)
for line in sys.stdin:
    command, *given = json.loads(line)
    with open("../heard", "a") as heard:
        heard.write(f"{name} {command}\\n")
    if command == on:
        print("last words", file=sys.stderr, flush=True)
        if fault == "hangs":
            time.sleep(600)
        if fault == "dies":
            os._exit(3)
    found = {}
    if command == "start":
        module = "/elsewhere/kvindex.py" if fault == "strays" else os.getcwd() + "/kvindex.py"
        found = {"machine": {"gpu": "none"}, "modules": [module]}
    if command == "check":
        found = {"check": "fine"}
    if command == "dense":
        found = {"dense": {"median_us": 100.0}}
    if command == "round":
        found = {place: {"median_us": float(us), "graph": place != "host"} for place in given[0]}
    if command == on and fault == "errs":
        found = {"error": "SystemExit: the step is wrong"}
    with open("../heard", "a") as heard:
        heard.write(f"{name} done\\n")
    print(json.dumps(found), flush=True)
"""
"""What a tree's process does, but for the work: `plays` in its folder says its µs and its fault."""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A folder to play trees in, whose process is the stand-in; commands go to `heard`."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(side_by_side, "Tree", partial(Tree, worker=script))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return tmp_path


def tree(folder, name, us, fault="-", on="-"):
    """NAME=FOLDER of a tree that takes so many µs, with a fault when it hears a command."""
    for part in side_by_side.NEEDED:
        (folder / name / part).mkdir(parents=True)
    (folder / name / "plays").write_text(f"{us} {fault} {on}")
    return f"{name}={folder / name / '..' / name}"


def run(folder, *given, status=0):
    out = folder / "out.json"
    command = [*given, "--json", str(out)]
    if status:
        with pytest.raises(SystemExit) as ended:
            side_by_side.main(command)
        assert ended.value.code == status
    else:
        side_by_side.main(command)
    return json.loads(out.read_text())


# Turns


def test_trees_are_timed_one_after_the_other(played, capsys):
    pairs = [tree(played, "a", 40), tree(played, "b", 50)]
    lengths = ["--tokens", "4096", "8192", "--rounds", "3"]
    result = run(played, *pairs, *lengths, "--rows", "host", "device", "--dense")
    heard = (played / "heard").read_text().splitlines()
    rounds = [line for line in heard if line.endswith("round")]
    assert rounds == ["a round", "b round"] * 6
    for at, line in enumerate(heard):  # nobody else works while one is timed
        if line.endswith("round"):
            assert heard[at + 1] == f"{line[0]} done"
    assert [line for line in heard if line.endswith("dense")] == ["a dense"] * 2
    assert [point["tokens"] for point in result["points"]] == [4096, 8192]
    assert [len(point["rounds"]) for point in result["points"]] == [3, 3]
    assert result["failed"] == {}
    assert result["machine"] == {"gpu": "none"}
    head, rows = show.table(result)
    assert head == ("tokens", "rows", "a", "b", "to a")
    assert rows[0][:2] == ("4,096", "host")
    assert rows[1] == (
        "4,096",
        "device",
        *["40.00 (40.00 … 40.00)", "50.00 (50.00 … 50.00)"],
        "1.250",
    )
    assert rows[0][2].endswith(", no graph")
    assert show.dense(result)[0].endswith(
        "100.00 µs; to it a host 0.400, a device 0.400, b host 0.500, b device 0.500"
    )
    shown = capsys.readouterr().out
    assert "round 3: a host 40.00 device 40.00; b host 50.00 device 50.00" in shown
    assert "1.250" in shown


@pytest.mark.parametrize(
    ("fault", "on", "why"),
    [
        ("dies", "round", "round: its process ended"),
        ("dies", "start", "start: its process ended"),
        ("errs", "check", "check: SystemExit: the step is wrong"),
        ("errs", "build", "build: SystemExit: the step is wrong"),
        ("strays", "start", "start: got /elsewhere/kvindex.py, allowed is a module in"),
        ("hangs", "round", "round: no answer in 3 s"),
    ],
)
def test_a_tree_that_fails_leaves_the_others(fault, on, why, played, capsys):
    pairs = [tree(played, "bad", 40, fault, on), tree(played, "good", 50), tree(played, "last", 60)]
    result = run(played, *pairs, "--tokens", "4096", "--rounds", "2", "--seconds", "3", status=1)
    assert list(result["failed"]) == ["bad"]
    assert result["failed"]["bad"].startswith(why)
    (point,) = result["points"]
    assert [list(one) for one in point["rounds"]] == [["good", "last"]] * 2
    heard = (played / "heard").read_text().splitlines()
    assert heard.count("bad round") == (on == "round")  # asked no more, and timed only if right
    _, rows = show.table(result)
    assert rows[0][2:] == ("–", "50.00 (50.00 … 50.00)", "–", "60.00 (60.00 … 60.00)", "–")
    shown = capsys.readouterr().out
    assert f"bad failed: {why}" in shown
    assert "words" in shown  # of its log
    assert (played / "out.bad.log").read_text().startswith("first words")


def test_where_all_fail_nothing_is_measured(played):
    pair = tree(played, "bad", 40, "errs", "check")
    result = run(played, pair, "--tokens", "4096", status=1)
    assert result["points"] == []


def test_what_is_known_is_written_after_each_round(played, monkeypatch):
    written = []
    replace = Path.replace

    def kept(path, target):
        if target.name == "out.json":
            points = json.loads(path.read_text())["points"]
            written.append(sum(len(point["rounds"]) for point in points))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", kept)
    run(played, tree(played, "a", 40), "--tokens", "4096", "--rounds", "3")
    assert written == [0, 1, 2, 3, 3]


def test_a_tree_that_hangs_is_killed(played):
    tree(played, "bad", 40, "hangs", "check")
    told = []
    one = Tree("bad", played / "bad", played / "log", told.append, played / "stand_in.py")
    begun = time.monotonic()
    assert at_once([one], 20, "start", {})["bad"]["machine"]
    assert in_turn([one], 0.5, "check") == {}
    assert at_once([one], 20, "round", ["host"]) == {}  # not asked, not waited for
    assert time.monotonic() - begun < 30
    one.end()
    assert one.process.returncode is not None
    assert told == ["bad failed: check: no answer in 0.5 s\n    first words\n    last words"]


# Tables


def result(*rounds, **more):
    points = [{"tokens": 4096, "rounds": list(rounds), **more}]
    return {"trees": {"a": "/a", "b": "/b"}, "rows": ["host"], "points": points, "failed": {}}


def times(**us):
    return {name: {"host": {"median_us": one}} for name, one in us.items()}


def test_ratios_are_of_the_same_round():
    found = result(times(a=10.0, b=11.0), times(a=20.0, b=18.0), times(b=100.0), times(a=10.0))
    _, ((_, _, first, second, ratio),) = show.table(found)
    assert first == "10.00 (10.00 … 20.00)"
    assert second == "18.00 (11.00 … 100.00)"
    assert ratio == "1.000"  # of 1.1 and .9


def test_dense_attention_that_does_not_fit_is_told():
    found = result(times(a=10.0), dense={"layers": 0, "note": "no memory"})
    assert show.dense(found) == ["4,096 tokens, dense attention: no memory"]
    assert show.dense(result(times(a=10.0))) == []
    show.show(found, Console(width=120))


# What it refuses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], "trees: got 'a', allowed is NAME=FOLDER"),
        (["a b=."], "trees: got 'a b=.', allowed is NAME=FOLDER"),
        (["a=.", "a=."], "trees: got 'a=.', allowed is NAME=FOLDER, each NAME once"),
        (["a=/nowhere"], "trees: got 'a=/nowhere', allowed is a checkout; it lacks ['kvindex'"),
        (["a=.", "--tokens", "4096", "0"], "tokens: got 0, allowed is at least 4096"),
        (["a=.", "--batch", "0"], "batch: got 0, allowed is at least 1"),
        (["a=.", "--rounds", "0"], "rounds: got 0, allowed is at least 1"),
        (["a=.", "--replays", "5"], "replays: got 5, allowed is at least 10"),
        (["a=.", "--rows", "disk"], "invalid choice: 'disk'"),
        (["a=.", "--index", "exact"], "index: got 'exact', allowed is one that the fused"),
        (["a=.", "--hit-rate", "2"], "hit-rate: got 2.0, allowed is 0 to 1"),
        (["a=.", "--seconds", "0"], "seconds: got 0.0, allowed is above 0"),
        (["a=.", "--json", "/nowhere/a.json"], "json: got '/nowhere/a.json', allowed is a file in"),
        (["a=."], "this measures a CUDA device, and torch sees none"),
        (["--json", "a.json"], "the following arguments are required: NAME=FOLDER"),
    ],
)
def test_wrong_arguments_are_refused_in_words(given, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        side_by_side.arguments(given if "--json" in given else [*given, "--json", "out.json"])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_right_arguments_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = side_by_side.arguments(
        ["a=.", "b-1=.", "--tokens", "4096", "8192", "--rows", "host", "--json", "a.json"]
    )
    assert given.trees == {"a": Path("."), "b-1": Path(".")}
    assert (given.tokens, given.rows, given.dense) == ([4096, 8192], ["host"], False)
