"""The decode step's benchmark over the other presets: what it checks, counts and tells of them."""

import json

import pytest
import torch

from benchmarks.decode import correctness, workload
from benchmarks.decode.correctness import CLOSE, SAME, check
from benchmarks.decode.floors import stage_bytes
from benchmarks.decode.setting import Setting, synthetic
from benchmarks.decode.stages import measure, public
from benchmarks.decode.timing import Clock, Launches
from benchmarks.decode.workload import Pool, Workload, row_pools
from benchmarks.tabling import decode as tabling
from kvindex.core.geometry import Geometry
from tests.cuda import emulator
from tests.cuda.test_presets import NAMES
from tests.test_decode_step_benchmark import RATES, TOKENS, WHOLE, Mapped, Once

emulated = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")
each_preset = pytest.mark.parametrize("preset", ["paper"])


@pytest.fixture
def setting(preset, monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", TOKENS)
    monkeypatch.setattr(workload, "PIECE", 1024)
    monkeypatch.setattr(workload, "SETS", 2)
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    return Setting(geometry, f"pariskv:preset={preset}", k=20, near=24)


@emulated
@each_preset
def test_a_right_step_is_let_through_and_measured(setting):
    with emulator.emulated():
        found = check(setting, 4, allocator=Mapped(), slab_bytes=2**16)
    assert found["same_ids"] > SAME
    assert found["error"] < CLOSE
    rows = row_pools(setting, 1024, allocator=Mapped(), slab_bytes=2**16)
    pool, timed = Pool.of(setting, TOKENS, 3, Clock(60)), Once()
    with emulator.emulated():
        work = Workload.of(setting, TOKENS, 2, 2, pool, rows, 4)
        point = measure(setting, work, timed, RATES, tokens=TOKENS, batch=2)
        call = public(setting, 2)
        with Launches() as launches:
            call()
    names = [stage["name"] for stage in point["stages"]]
    assert names == NAMES == launches.names
    assert set(names) <= set(stage_bytes(setting, TOKENS, 2, point["listed"]))
    assert all(stage["bytes"] > 0 for stage in point["stages"])
    assert setting.k <= point["candidates"] <= TOKENS
    assert point["listed"] >= point["candidates"] * 0.99
    json.dumps(point)


@each_preset
def test_a_wrong_step_is_not_timed(setting, monkeypatch):
    pack = type(setting.layout).pack

    def wrong(self, codes, centers):
        return pack(self, codes, centers).roll(1, 1)

    monkeypatch.setattr(type(setting.layout), "pack", wrong)
    if not emulator.available():
        pytest.skip("no g++ to emulate kernels with")
    with emulator.emulated(), pytest.raises(SystemExit, match="of the ids are the reference's"):
        check(setting, 4, allocator=Mapped(), slab_bytes=2**16)


@each_preset
def test_bytes_of_all_keys_are_what_the_index_says_a_search_reads(setting):
    index, tokens = setting.index, 1024
    index.append(*[synthetic(setting.geometry, 0, 0, tokens)] * 2)
    scanned = 2 * tokens * index.bytes_per_key()["scanned"]
    assert scanned == 2 * tokens * setting.scanned_bytes


def test_bytes_of_look_ups_at_a_million_tokens():
    paper = stage_bytes(Setting(WHOLE, "pariskv:preset=paper"), 2**20, 1, 3e5)
    assert paper["count"].device == 8 * (2**20 * 20 + 16 * 1024)


def result(preset, times):
    points = [
        {
            "tokens": tokens,
            "batch": 1,
            "step_host": {"median_us": us},
            "step_device": {"median_us": us - 9},
            "dense": {"median_us": tokens / 1000},
        }
        for tokens, us in times.items()
    ]
    machine = dict(gpu="g", torch="2", transformers="5")
    return dict(index=f"pariskv:preset={preset}", points=points, machine=machine)


def test_lengths_up_to_which_one_stage_is_as_fast():
    fast = result("fast", {4096: 40.0, 32768: 50.0, 131072: 60.0})
    scan = result("scan", {4096: 30.0, 32768: 50.0, 131072: 90.0})
    table = tabling.presets({"fast": fast, "scan": scan})
    assert "| 32,768 | 33 | 50 (1.53) | 50 (1.53) |" in table
    assert "as fast up to 32,768 tokens, slower from 131,072 on" in table
    slow = tabling.presets({"fast": fast, "scan": result("scan", {4096: 41.0, 32768: 51.0})})
    assert "slower from 4,096 on" in slow
    quick = tabling.presets({"fast": fast, "scan": result("scan", {4096: 4.0, 32768: 5.0})})
    assert "as fast up to 32,768 tokens, the longest measured" in quick
    paper = result("paper", {32768: 60.0})
    wide = tabling.presets({"fast": fast, "paper": paper})
    assert "| 4,096 | 4 | 40 (9.77) | – |" in wide
    assert "One stage" not in wide
