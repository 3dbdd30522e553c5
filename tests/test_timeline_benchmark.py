"""The timeline of a step, but for the device: its points, and what is made of their times."""

import json
import re
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import stamps, timeline
from benchmarks.beside.worker import Bench
from benchmarks.decode import workload
from benchmarks.decode.setting import Setting
from benchmarks.stamps import BLOCKS, Launched, Point, Stamped, launched, stamped
from benchmarks.timeline import figures, tick
from kvindex.core.geometry import Geometry
from kvindex_cuda.runtime import launch as launching
from tests.cuda import emulator
from tests.cuda.test_compile import DEFINES
from tests.cuda.test_nvrtc import compiled, needs_nvrtc
from tests.test_decode_step_benchmark import TOKENS, Mapped, Once

STEP = ("ask", "scan", "rerank", "agree", "attend")
OTHERS = dict(turn="turn", count="count", heads="choose", weigh="weigh")
"""Kernels of other presets' steps, and their files."""

SOURCE = """
__device__ int help(int x) {  // { is no brace in a comment
    x += 1;  // MARK
    return x;
}
extern "C" __global__ void __launch_bounds__(256, 8 > 4 ? 2 : (1))
one(int* told, int n, int (&given)[2]) {
    if (n)
        await(told, f(n));
    else
        after_previous();
    auto done = [&]() {
        if (threadIdx.x == 0) tell(told + (n + 1) * 2);  // no more
    };
    let_next_begin();
    if (!n) return after_previous();
    for (int i = 0; i < n; i++) {  // MARK
        __syncthreads();
    }
    // MARK
    __syncthreads();  // MARK
    // after_previous();
}
extern "C" __global__ void other() {
    __syncthreads();
}
"""


# Stamps


def test_points_are_starts_ends_waits_barriers_tells_and_marks():
    text, points = stamped(SOURCE, ["one"], file="a.cu", first=5)
    assert [*points] == [*range(5, 5 + len(points))]
    assert {point.kernel for point in points.values()} == {"one"}
    lines = text.split("\n")
    assert len(lines) == len(SOURCE.split("\n"))
    for number, point in points.items():
        if point.what not in ("start", "end"):
            assert f"timeline::stamp({number});" in lines[point.line - 1]
    found = sorted((point.line, point.what) for point in points.values())
    assert found == [
        (3, "x += 1;"),
        (7, "start"),
        (9, "await(told, f(n));"),
        (11, "after_previous();"),
        (13, "if (threadIdx.x == 0) tell(told + (n + 1) * 2);  // no more"),
        (15, "let_next_begin();"),
        (17, "for (int i = 0; i < n; i++) {"),
        (18, "__syncthreads();"),
        (20, "MARK"),
        (21, "__syncthreads();  // MARK"),
        (23, "end"),
    ]
    assert "if (!n) return after_previous();" in text
    assert re.search(
        r"\n    else\n        \{ after_previous\(\); timeline::stamp\(\d+\); \}\n", text
    )
    assert text.endswith(SOURCE[SOURCE.index('extern "C" __global__ void other') :])


def test_several_kernels_of_a_file_have_points_of_their_own():
    _, points = stamped(SOURCE, ["one", "other"], file="a.cu")
    mine = [(at.line, at.what) for at in points.values() if at.kernel == "other"]
    assert sorted(mine) == [(24, "start"), (25, "__syncthreads();"), (26, "end")]


def test_a_mark_inside_a_statement_is_refused():
    wrong = SOURCE.replace("    if (n)\n", "    if (n)  // MARK\n")
    message = r"a.cu:8: got 'if \(n\)  // MARK', allowed is // MARK after a whole statement"
    with pytest.raises(ValueError, match=message):
        stamped(wrong, ["one"], file="a.cu")
    with pytest.raises(ValueError, match=r"a\.cu: has no kernel 'third'"):
        stamped(SOURCE, ["third"], file="a.cu")


@pytest.mark.parametrize("name", STEP)
def test_every_wait_of_the_steps_kernels_is_a_point(name):
    source = launching.source(f"{name}.cu")
    text, points = stamped(source, [name], file=f"{name}.cu")
    kernel = 1 + source.count("\n", 0, source.index("__global__"))
    calls = r"^(?!\s*//).*\b(?:after_previous|let_next_begin|__syncthreads|await|tell)\(.*\);"
    want = {
        number
        for number, line in enumerate(source.split("\n"), 1)
        if number > kernel and re.match(calls, line) and " return " not in line
    }
    assert len(want) >= 3
    found = [at.line for at in points.values() if at.what not in ("start", "end")]
    assert sorted(found) == sorted(want)
    assert text.count("timeline::stamp(") == len(points) - 1  # the end is `Leaving`
    assert text.count("timeline::Leaving<") == 1


@needs_nvrtc
@pytest.mark.parametrize("name", [*STEP, *OTHERS])
def test_stamped_kernels_compile(name, tmp_path, monkeypatch):
    file = f"{OTHERS.get(name, name)}.cu"
    before = launching.SOURCES
    (tmp_path / "kernels").mkdir()
    for path in before.iterdir():
        text = path.read_text()
        if path.name == file:  # one in a function before the kernel, one in it
            text = "__device__ inline void helper(int& x) {\n    x++;  // MARK\n}\n" + text
            text = text.replace("let_next_begin();\n", "let_next_begin();\n    // MARK\n")
        (tmp_path / "kernels" / path.name).write_text(text)
    monkeypatch.setattr(launching, "SOURCES", tmp_path / "kernels")
    plain = compiled(file, DEFINES[file][0])
    with Stamped({name: Launched(file)}, "cpu") as found:
        assert "globaltimer" in launching.source(file)
        assert compiled(file, DEFINES[file][0] | dict(found.defines)) == plain
    assert tmp_path / "kernels" == launching.SOURCES
    assert Point(name, 2, "x++;") in found.points.values()
    assert "MARK" in {point.what for point in found.points.values()}
    assert found.marks.shape == (len(found.points), BLOCKS)


# What is made of them


def marks(**at):
    """Of two points and blocks by number."""
    found = torch.zeros((3, BLOCKS), dtype=torch.int64)
    for name, times in at.items():
        for block, time in enumerate(times):
            found["abc".index(name), block] = time
    return found


POINTS = {
    0: Point("ask", 9, "start"),
    1: Point("scan", 5, "x++;"),
    2: Point("ask", 7, "// never"),
}
KERNELS = {"ask": Launched("step/prepare_query.cu", (2, 3)), "scan": Launched("step/scan.cu", (4,))}


def test_times_are_since_the_first_block_began():
    taken = [
        marks(a=[1000, 3000, 2000], b=[0, 5000, 900, 9000]),  # 900: of a layer before
        marks(a=[11_000, 12_000, 12_500], b=[0, 16_000, 17_000, 20_000]),
        marks(a=[21_000, 22_000, 21_000], b=[0, 24_000, 0, 26_000]),
    ]
    start, later = figures(POINTS, KERNELS, taken)
    assert (start["kernel"], start["what"], start["line"]) == ("ask", "start", 9)
    assert [start[name] for name in ("first_us", "median_us", "last_us")] == [0, 1, 1.5]
    assert start["blocks"] == [0, 1, 1]
    assert [later[name] for name in ("first_us", "median_us", "last_us")] == [4, 6, 8]
    assert later["blocks"] == [None, 4, None, 8]
    assert tick(taken[0]) == 100
    assert tick(marks(a=[5])) == 0


def test_a_timeline_is_shown(capsys):
    taken = [marks(a=[1000], b=[4000])]
    result = dict(tokens=4096, rows="host", plain_us=44.0, stamped_us=45.5, tick_ns=32)
    result["points"] = figures(POINTS, KERNELS, taken)
    result["points"][0]["what"] = "x[1] = 2;"
    head, rows = timeline.table(result)
    assert head == ("kernel", "blocks", "first", "median", "last", "line", "point")
    assert rows[1] == ("scan", "1", "3.00", "3.00", "3.00", "5", "x++;")
    timeline.show(result, Console(width=120))
    shown = capsys.readouterr().out
    assert "x[1] = 2;" in shown
    assert "45.50 µs with stamps, 44.00 without; two stamps are 32 ns apart" in shown


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")
def test_a_step_is_stamped_where_it_runs(tmp_path, monkeypatch):
    for name, value in dict(PIECE=1024, SETS=2, NAMES=("plain",)).items():
        monkeypatch.setattr(workload, name, value)
    pools = partial(workload.row_pools, allocator=Mapped(), slab_bytes=2**16)
    monkeypatch.setattr(workload, "row_pools", pools)
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    bench = Bench(Setting(geometry, k=20, near=24), Once(), 4, 2**10, 2**30, layers=2)
    before = launching.SOURCES, dict(launching.LOADERS)
    with emulator.emulated():
        bench.pin(TOKENS)
        bench.build(TOKENS)
        bench.work.run("device")
        output = bench.work.step.output.clone()
        assert output.isfinite().all()
        # what is compiled from here on is of use once
        monkeypatch.setattr(emulator, "_folder", lambda: tmp_path)
        found = timeline.measure(bench, "cached", 3, lambda run: SimpleNamespace(replay=run))
    assert before == (launching.SOURCES, launching.LOADERS)
    assert [*found["grids"]] == [*STEP]
    assert found["plain_us"] != found["stamped_us"]
    assert found["tick_ns"] > 0
    bench.work.ask(0)
    with emulator.emulated():
        bench.work.run("device")
    assert torch.equal(output, bench.work.step.output)
    ends = {}
    for point in found["points"]:
        assert 0 <= point["first_us"] <= point["median_us"] <= point["last_us"]
        if point["what"] in ("start", "end"):
            grid = found["grids"][point["kernel"]]
            assert len(point["blocks"]) == torch.tensor(grid).prod()
            ends[point["kernel"], point["what"]] = point
    assert [*ends] == [(name, what) for name in STEP for what in ("start", "end")]
    for name, following in pairwise(STEP):  # here one after the other
        assert ends[name, "end"]["last_us"] < ends[following, "start"]["first_us"]
    what = {point["what"] for point in found["points"] if point["kernel"] == "rerank"}
    assert "let_next_begin();" in what
    assert any(text.startswith("await(") for text in what)
    assert any("tell(" in text for text in what)
    json.dumps(found)


def test_kernels_that_are_launched_are_noted(monkeypatch):
    ran = []
    monkeypatch.setitem(launching.LOADERS, "cpu", lambda *which: lambda *given: ran.append(given))
    data = torch.zeros(1)
    with launched() as found:
        for name, grid in (("b", (3, 2)), ("a", (1,)), ("b", (5,))):
            launching.launch(f"{name}.cu", name, grid, (32,), data, X=1)
    assert found == {"b": Launched("b.cu", (5,)), "a": Launched("a.cu", (1,))}
    launching.launch("c.cu", "c", (1,), (32,), data)
    assert len(ran) == 4
    assert [*found] == ["b", "a"]


# What it refuses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "0"], "tokens: got 0, allowed is at least 4096"),
        (["--replays", "5"], "replays: got 5, allowed is at least 10"),
        (["--rows", "disk"], "invalid choice: 'disk'"),
        (["--index", "exact"], "index: got 'exact', allowed is one that the fused kernels serve"),
        (["--hit-rate", "-1"], "hit-rate: got -1.0, allowed is 0 to 1"),
        (["--json", "/nowhere/a.json"], "json: got '/nowhere/a.json', allowed is a file in"),
        ([], "this measures a CUDA device, and torch sees none"),
    ],
)
def test_wrong_arguments_are_refused_in_words(given, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        timeline.arguments(given if "--json" in given else [*given, "--json", "out.json"])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_mark_that_cannot_be_stamped_ends_the_run(monkeypatch):
    def refuse(*given):
        raise ValueError("a.cu:8: got this, allowed is that")

    monkeypatch.setattr(stamps, "stamped", refuse)
    monkeypatch.setattr(timeline, "Stamped", refuse)
    bench = SimpleNamespace(
        work=SimpleNamespace(run=lambda place: None),
        setting=SimpleNamespace(geometry=SimpleNamespace(device="cpu")),
        round=lambda places: {"host": {"median_us": 1.0}},
    )
    with pytest.raises(SystemExit, match=r"a\.cu:8: got this"):
        timeline.measure(bench, "host", 10)
