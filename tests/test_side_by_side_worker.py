"""A tree's process in `benchmarks/side_by_side.py`: what it imports, answers and builds."""

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.beside import trees, worker
from benchmarks.beside.trees import Tree, at_once
from benchmarks.beside.worker import Bench, serve
from benchmarks.decode import correctness, workload
from benchmarks.decode.setting import Setting
from benchmarks.side_by_side import PLACES
from kvindex.core.geometry import Geometry
from tests.cuda import emulator
from tests.test_decode_step_benchmark import TOKENS, Mapped, Once

ROOT = Path(__file__).parent.parent


def test_commands_are_answered_in_words():
    class Echo:
        def check(self):
            raise SystemExit("the step is wrong")

        def build(self, tokens):
            return {"tokens": tokens}

    given = [["build", 1], ["start", {"index": "x"}], ["build", 2], ["check"], ["__init__"]]
    out = io.StringIO()
    serve(map(json.dumps, given), out, lambda options: (Echo(), options))
    early, *found, strange = map(json.loads, out.getvalue().splitlines())
    assert early["error"].startswith("ValueError: got 'build', allowed are 'start' and then")
    wrong = {"error": "SystemExit: the step is wrong"}
    assert found == [{"index": "x"}, {"tokens": 2}, wrong]
    assert "got '__init__'" in strange["error"]


def test_a_worker_imports_the_tree_that_it_is_told(tmp_path):
    """Which need not have this benchmark."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").touch()
    (tmp_path / "benchmarks/decode").symlink_to(ROOT / "benchmarks/decode")
    for name in ("kvindex", "kvindex_cuda", "adapters"):
        (tmp_path / name).symlink_to(ROOT / name)
    asks = (
        "import json, runpy, sys; out = runpy.run_path(sys.argv[1]); "
        "print(json.dumps([out[n].__file__ for n in ('kvindex', 'kvindex_cuda', 'benchmarks')]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", asks, str(trees.WORKER)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'adapters'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(tmp_path)) for path in json.loads(done.stdout))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_without_a_gpu_says_so(tmp_path):
    told = []
    one = Tree("here", ROOT, tmp_path / "log", told.append)
    options = dict(index="pariskv", hit_rate=0.9, batch=1, replays=50, trees=1)
    assert at_once([one], 120, "start", options) == {}
    one.end()
    assert one.failed.startswith("start: ")
    assert "Traceback" in (tmp_path / "log").read_text()
    assert told


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")
def test_a_step_is_built_checked_and_timed(monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", TOKENS)
    for name, value in dict(PIECE=1024, SETS=2, NAMES=("plain",)).items():
        monkeypatch.setattr(workload, name, value)
    pools = partial(workload.row_pools, allocator=Mapped(), slab_bytes=2**16)
    monkeypatch.setattr(workload, "row_pools", pools)
    monkeypatch.setattr(worker, "check", lambda setting, processors: dict(same_ids=1.0))
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    bench = Bench(Setting(geometry, k=20, near=24), Once(), 4, 2**16, 2**30, layers=2)
    with emulator.emulated():
        assert bench.check() == {"check": {"same_ids": 1.0}}
        assert bench.pin(TOKENS) == {"rows_tokens": 1280}  # whole blocks
        built = bench.build(TOKENS)
        found = bench.round(["device", "cached", "host"])
        again = bench.build(2 * TOKENS)
    assert built["launches"] == ["ask", "scan", "rerank", "agree", "attend"]
    assert built["sequences"] >= 2
    assert built["listed"] > 20
    assert again["listed"] > built["listed"]
    assert [found[place]["median_us"] for place in PLACES] == [10, 20, 30]
    assert 0.5 < found["hit_rate"] <= 1
    json.dumps([built, found])
    assert bench.dense(TOKENS)["dense"]["median_us"] > 0
    assert bench.free() == {}
    assert bench.work is None
    bench.room_bytes = 1000
    with pytest.raises(MemoryError, match="the codes of 1500 tokens do not fit"):
        bench.build(TOKENS)
