"""The decode step's benchmark, but for the clock: what it checks and counts, and its rivals.

Longer than most files: all of it is played on one setting.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.decode import correctness, faiss_rivals, workload
from benchmarks.decode.correctness import CLOSE, SAME, check, judge, sound
from benchmarks.decode.floors import Bytes, ceilings, stage_bytes
from benchmarks.decode.rivals import dense, layers_of_dense
from benchmarks.decode.setting import D, G, H, Setting, synthetic
from benchmarks.decode.stages import measure, public, staged
from benchmarks.decode.timing import (
    Clock,
    Launches,
    OutOfTimeError,
    quartiles,
    read_all,
    read_pieces,
)
from benchmarks.decode.workload import Pool, Workload, row_pools, sequences_of
from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.runtime import launch as launching
from tests.cuda import emulator
from tests.cuda.host_memory import FakeAllocator

emulated = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")

TOKENS = 1500
WHOLE = Geometry.of(q_heads=H, kv_heads=G, head_dim=D, dtype=torch.bfloat16)
RATES = {"read": {"GB_s": 4000.0}, "pinned": {"GB_s": 50.0}}


class Mapped(FakeAllocator):
    """Kernels find memory where the CPU does."""

    shift = 0


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", TOKENS)
    monkeypatch.setattr(workload, "PIECE", 1024)
    monkeypatch.setattr(workload, "SETS", 2)
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    return Setting(geometry, k=20, near=24)


class Once:
    """Runs, and says what the n-th call took."""

    def __init__(self):
        self.calls = []

    def __call__(self, run, layers, before=None, graph=True):
        if before is not None:
            before(0)
        run()
        self.calls.append(layers)
        us = 10.0 * len(self.calls)
        return {"median_us": us, "low_us": us - 1, "high_us": us + 1, "replays": 1}


# What must move


def test_bytes_of_a_step_at_a_million_tokens():
    tokens, setting = 2**20, Setting(WHOLE)
    C = setting.candidates(tokens)
    assert C == 20_972  # ⌈2%⌉
    found = stage_bytes(setting, tokens, 1, 1.5 * C)
    scan = 8 * (tokens * 17 + tokens / 256 * (256 + 16) + 12 * C) + tokens / 8
    assert found["scan"].device == scan
    # 4 sectors per candidate; the list and what the estimates take
    assert found["rerank"].device == 8 * (12 * C + 144 * C + 16 * 4096 + 4 * 2048)
    assert found["attend"].host == 8 * 100 * 512
    there = stage_bytes(setting, tokens, 1, 1.5 * C, "device")["attend"]
    assert there == Bytes(found["attend"].device + found["attend"].host, 0)
    assert there.device > 8 * (100 + 320) * 512
    floor = found["scan"].floor_us(4600, 50)
    assert floor == pytest.approx(scan / 4.6e6)
    assert found["attend"].floor_us(4600, 50) == pytest.approx(8 * 100 * 512 / 50e3)
    total = sum(part.floor_us(4600, 50) for part in found.values())
    assert 40 < total < 60  # specs/measured.md: what must move takes 40 to 60 µs


def test_bytes_of_the_scan_are_what_the_index_says_a_search_reads(setting):
    index = setting.index
    keys = synthetic(setting.geometry, 0, 0, 1024)
    index.append(keys, keys)
    found = stage_bytes(setting, 1024, 1, 0)["scan"].device
    beside = 1024 / 8 + 2 * 4 * (4 * 2)  # valid bits; products of 4 blocks
    assert found - beside == 2 * 1024 * index.bytes_per_key()["scanned"]


def test_a_record_is_what_the_scan_copies_of_one():
    layout = Setting(WHOLE).layout
    assert Setting(WHOLE).record == (256 * (16 + 1) + 2 * 128, 256 * (16 + 1 + 2 + 48) + 2 * 128)
    assert layout.head_bytes == Setting(WHOLE).record[1]
    assert Setting(WHOLE, "pariskv:preset=paper").record is None


def test_bytes_grow_with_the_batch_alone_but_for_the_rotation():
    setting = Setting(WHOLE)
    one, eight = (stage_bytes(setting, 2**17, batch, 4000) for batch in (1, 8))
    for name in one:
        shared = 4 * (128 + 1) if name == "ask" else 0
        assert eight[name].device - shared == 8 * (one[name].device - shared)
        assert eight[name].host == 8 * one[name].host


def test_the_pool_is_never_smaller_than_the_layers_or_8_caches():
    assert sequences_of(140 * 2**20, 16, 60 * 2**20) == 16
    assert sequences_of(4 * 2**20, 16, 60 * 2**20) == 120


def test_times_are_summed_up():
    found = quartiles([float(i) for i in range(1, 52)])
    assert found == {"median_us": 26, "low_us": 13, "high_us": 39, "replays": 51}


def test_a_stage_is_the_difference_of_two_neighbors():
    bytes_ = {"a": Bytes(4e6), "b": Bytes(4e6, 1e6)}
    a, b, c = staged(["a", "b", "c"], [0.0, 2.0, 42.0, 41.0], bytes_, RATES)
    assert (a["us"], a["floor_us"], a["share"], a["GB_s"]) == (2, 1, 0.5, 2000)
    assert (b["us"], b["floor_us"], b["share"]) == (40, 20, 0.5)  # the bus is slower
    assert c == {"name": "c", "us": -1}


# What is measured on


def test_keys_drift_and_are_the_same_in_any_pieces():
    geometry = replace(WHOLE, dtype=torch.float32)
    keys = synthetic(geometry, 3, 0, 40 * 256)
    assert keys.shape == (1, 8, 40 * 256, 128)
    means = keys.unflatten(2, (40, 256)).mean(3)
    # of a wave of amplitude 1, and noise of variance 1/256
    assert means.square().mean() == pytest.approx(0.5, abs=0.1)
    near = (means[:, :, 1:] - means[:, :, :-1]).square().mean()
    far = (means[:, :, 20:] - means[:, :, :-20]).square().mean()
    assert near < far / 4
    later = synthetic(geometry, 3, 30 * 256, 2560)
    shift = (later[0].unflatten(1, (10, 256)).mean(2) - means[0, :, 30:]).abs().max()
    assert shift < 6 * (2 / 256) ** 0.5
    assert not torch.equal(keys, synthetic(geometry, 4, 0, 40 * 256))


def test_heads_of_a_group_ask_alike():
    queries = Setting(WHOLE).queries(50).float()
    assert queries.shape == (50, 32, 128)
    assert queries.var() == pytest.approx(1, abs=0.02)
    alike = (queries[:, 0] * queries[:, 1]).mean(), (queries[:, 3] * queries[:, 4]).mean()
    assert alike[0] == pytest.approx(0.5, abs=0.05)
    assert alike[1] == pytest.approx(0, abs=0.05)


def test_a_pool_holds_the_codes_of_an_index_and_layers_read_different_ones(setting):
    pool = Pool.of(setting, TOKENS, 3, Clock(60))
    assert pool.blocks.shape[:3] == (3, 6, 2)
    index = setting.index
    starts = range(0, TOKENS, 1024)
    parts = [synthetic(setting.geometry, 1, at, min(1024, TOKENS - at)) for at in starts]
    for part in parts:  # in the same pieces: a center is of the first append that it sees
        index.append(part, part)
    codes = {name: index._codes[name] for name in index._codes}
    want = setting.layout.pack(codes, index._learned["centers"])[0]
    got = setting.layout.views(pool.blocks[1])
    for name, part in setting.layout.views(want).items():
        if name in ("signs", "weights", "center"):
            last = 5 if name != "center" else 6
            assert (got[name][:last] == part[:last]).float().mean() > 0.999
    assert torch.equal(pool.references[1], index._learned["weight_scale"][0])
    tables = torch.cat([pool.table(layer, 2) for layer in range(3)])
    first = (tables[:, 0] - pool.blocks.data_ptr()) // pool.blocks[0].nbytes
    assert first.tolist() == [0, 1, 2, 0, 1, 2]
    size = pool.blocks[0, 0].nbytes
    assert ((tables[:, 1:] - tables[:, :-1]) == size).all()
    assert torch.equal(pool.learned(1, 2)["weight_scale"], pool.references[[2, 0]])


def test_a_pool_stops_when_the_time_is_up(setting):
    with pytest.raises(OutOfTimeError, match="0 s are left of 0"):
        Pool.of(setting, TOKENS, 3, Clock(0))


def test_layers_read_the_same_rows_elsewhere(setting):
    pools = row_pools(setting, TOKENS, allocator=Mapped(), slab_bytes=2**16)
    host, here = pools["host"], pools["device"]
    assert host.row_bytes == here.row_bytes == 256
    want = here.alive.view(torch.bfloat16)  # [S, G, 256, 2 D]
    ids = torch.arange(TOKENS).expand(1, 2, -1)
    rows = host.alive.gather(ids)
    flat = want.transpose(0, 1).flatten(1, 2)[None, :, :TOKENS]
    assert torch.equal(rows.keys, flat[..., :64])
    assert torch.equal(rows.values, flat[..., 64:])
    tables = torch.stack([here.table(6, place, 3) for place in range(3)])
    slots = (tables - here.alive.data_ptr()) // here.alive[0].nbytes
    assert slots.tolist() == [[*range(6)], [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3]]
    longer = here.table(8, 0, 3)
    assert torch.equal(longer[6:], longer[:2])  # more tokens than rows: they come again


# Whether it is right, and what it measures


@emulated
@pytest.mark.parametrize("batch", [2, 8])
def test_a_right_step_is_let_through(batch, setting):
    with emulator.emulated():
        found = check(setting, 4, batch=batch, allocator=Mapped(), slab_bytes=2**16)
    assert found["batch"] == batch
    assert found["same_ids"] > SAME
    assert found["error"] < CLOSE
    assert found["found"] == 20


@emulated
@pytest.mark.parametrize("fault", ["rows", "codes"])
def test_a_wrong_step_is_not_timed(fault, setting, monkeypatch):
    if fault == "rows":  # of the tokens after those that were asked for
        gather = HostStore.join

        def roll(store, *parts):
            return gather(store, *(part.roll(1, 2) for part in parts))

        monkeypatch.setattr(HostStore, "join", roll)
    else:
        pack = Layout.pack
        monkeypatch.setattr(Layout, "pack", lambda self, codes, c: pack(self, codes, c).roll(1, 1))
    message = {"rows": "the output is off", "codes": "of the ids are the reference's"}[fault]
    with emulator.emulated(), pytest.raises(SystemExit, match=f"not timed.*{message}"):
        check(setting, 4, allocator=Mapped(), slab_bytes=2**16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(same_ids=0.9), "0.900 of the ids"),
        (dict(same_ids=float("nan")), "nan of the ids"),
        (dict(error=0.1), "off by 1.0e-01"),
        (dict(error=float("nan")), "off by nan"),
        (dict(repeats=False), "two runs"),
        (dict(found=99), "99 rows were found, not 100"),
    ],
)
def test_a_check_can_fail(change, message):
    good = dict(same_ids=1.0, error=1e-3, repeats=True, found=100)
    judge(good, 100)
    with pytest.raises(SystemExit, match=message):
        judge({**good, **change}, 100)


@emulated
def test_a_point_is_measured(setting):
    torch.manual_seed(0)  # which rows the caches forget
    timed, layers, batch = Once(), 2, 2
    rows = row_pools(setting, 1024, allocator=Mapped(), slab_bytes=2**16)
    pool = Pool.of(setting, TOKENS, 3, Clock(60))
    with emulator.emulated():
        work = Workload.of(setting, TOKENS, batch, layers, pool, rows, 4)
        found = measure(setting, work, timed, RATES, tokens=TOKENS, batch=batch)
    assert found["candidates"] == 80
    assert found["listed"] >= 80
    names = [stage["name"] for stage in found["stages"]]
    assert len(names) == found["launches"] <= 8
    assert (names[0], names[-1]) == ("ask", "attend")
    assert set(names) <= set(stage_bytes(setting, TOKENS, batch, 100))
    assert timed.calls == [layers] * (4 + len(names))  # places but host; shorter steps and host
    places = {name.removeprefix("step_") for name in found if name.startswith("step_")}
    assert places == {"host", "int8", "fp8", "device", "cached"}
    assert found["hit_rate"] == pytest.approx(setting.hit_rate, abs=0.05)
    whole = found["step_host"]["median_us"]
    assert sum(stage["us"] for stage in found["stages"]) == pytest.approx(whole)
    json.dumps(found)


@emulated
@pytest.mark.parametrize("place", ["device", "int8", "fp8"])
def test_rows_of_other_tokens_are_seen(place, setting):
    rows = row_pools(setting, 1024, allocator=Mapped(), slab_bytes=2**16)
    pool = Pool.of(setting, 1024, 1, Clock(60))
    with emulator.emulated():
        sound(setting, Workload.of(setting, 1024, 1, 1, pool, rows, 4))
        rows[place] = replace(rows[place], addresses=rows[place].addresses.roll(1))
        work = Workload.of(setting, 1024, 1, 1, pool, rows, 4)
        with pytest.raises(SystemExit, match=f"those of '{place}' give different outputs"):
            sound(setting, work)


@emulated
def test_the_public_call_is_the_bare_steps_launches(setting):
    with emulator.emulated():
        call = public(setting, 2)
        with Launches() as launches:
            output, found = call()
    assert launches.names == ["ask", "scan", "rerank", "agree", "attend"]
    assert output.isfinite().all()
    assert found.tolist() == [[20, 20]] * 2


def test_dense_attention_is_left_out_where_it_does_not_fit():
    options = dict(replays=50, GB_s=4000, left_s=400)
    need = 4 * 8 * 128 * 2**22
    assert layers_of_dense(need, 130 * 2**30, 16, **options) == (6, "")
    assert layers_of_dense(need // 32, 130 * 2**30, 16, **options) == (16, "")
    layers, why = layers_of_dense(8 * need, 130 * 2**30, 16, **options)
    assert (layers, why) == (0, "a layer's keys and values take 128 GiB, 130 are free")
    layers, why = layers_of_dense(need, 130 * 2**30, 16, **{**options, "left_s": 5})
    assert (layers, why) == (0, "it would take 4 s at least, 5 are left")


@emulated
def test_a_shorter_step_runs_the_first_kernels_alone(setting):
    rows = row_pools(setting, 1024, allocator=Mapped(), slab_bytes=2**16)
    pool = Pool.of(setting, TOKENS, 1, Clock(60))
    loaders = dict(launching.LOADERS)
    with emulator.emulated():
        work = Workload.of(setting, TOKENS, 1, 2, pool, rows, 4)
        work.step.output.fill_(7)
        with Launches(2) as launches:
            work.run("host", launches)
        assert launches.names == ["ask", "scan"]
        assert (work.step.output == 7).all()
        with Launches() as launches:
            work.run("host", launches)
        assert not (work.step.output == 7).any()
    assert loaders == launching.LOADERS


@emulated
def test_everything_is_read_once_at_the_ceiling():
    data = torch.randint(-(2**31), 2**31 - 1, (4 * 5000 + 4,), dtype=torch.int32)
    with emulator.emulated():
        for loads in (1, 4):
            total = torch.full((1,), 5, dtype=torch.int32)
            read_all(data, total, 3, loads)
            assert (int(total) - 5 - int(data.sum(dtype=torch.int64))) % 2**32 == 0
            some = torch.full((1,), 5, dtype=torch.int32)
            read_pieces(data, some, 528, 1040, 3)
            first = data[: data.nbytes // 1040 * 260].view(-1, 260)[:, :128]
            assert (int(some) - 5 - int(first.sum(dtype=torch.int64))) % 2**32 == 0
        found = ceilings(Once(), "cpu", shrink=2**16, record=(4608, 17408))
    assert found["read"]["bytes"] == 2**16
    assert found["read"]["GB_s"] == pytest.approx(2**16 / 10e3)  # the first was the fastest
    assert found["copy"]["bytes"] == 2**17
    assert found["pieces"]["bytes"] == 3 * 4608
    assert found["pinned"]["bytes"] == 2**14


@pytest.fixture
def faiss_here(monkeypatch):
    """FAISS's indexes of the CPU under the names of those of the GPU."""
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    monkeypatch.setattr(faiss_rivals, "shared", lambda device: None)
    base = faiss.IndexFlatIP
    return SimpleNamespace(
        **{name: getattr(faiss, name) for name in dir(faiss) if name.startswith("cast_integer")},
        METRIC_INNER_PRODUCT=faiss.METRIC_INNER_PRODUCT,
        GpuIndexFlatConfig=SimpleNamespace,
        GpuIndexFlatIP=lambda resources, d, config: base(d),
        GpuIndexIVFFlat=lambda resources, d, *given: faiss.IndexIVFFlat(base(d), d, *given),
        GpuIndexIVFPQ=lambda resources, d, *given: faiss.IndexIVFPQ(base(d), d, *given),
        index_gpu_to_cpu=faiss.clone_index,
        index_cpu_to_gpu=lambda resources, device, index: faiss.clone_index(index),
    )


def test_faiss_is_timed_where_it_finds_the_best(faiss_here, setting):
    timed = Once()
    found = faiss_rivals.rivals(faiss_here, setting, 1300, timed, Clock(60))
    assert not [name for name in found if name.endswith("error")]
    assert found["flat_recall"] == 1
    assert found["ivf_recall"] > 0.6
    assert found["flat_recall"] > found["ivfpq_recall"] > 0.3
    assert timed.calls == [1, 1, 1]
    assert [found[name]["median_us"] for name in ("flat", "ivf", "ivfpq")] == [10, 20, 30]


def test_what_faiss_raises_or_finds_wrong_is_not_timed(faiss_here, setting, monkeypatch):
    monkeypatch.setattr(faiss_here, "GpuIndexIVFFlat", lambda *given: 1 / 0)
    monkeypatch.setattr(faiss_rivals._Layer, "recall", lambda self, keys: 0.5)
    found = faiss_rivals.rivals(faiss_here, setting, 1300, Once(), Clock(60))
    assert found["flat_error"] == "0.500 of the keys found are the best, not 0.98"
    assert found["ivf_error"] == "division by zero"
    assert list(found["ivfpq"])
    with pytest.raises(OutOfTimeError):
        faiss_rivals.rivals(faiss_here, setting, 1300, Once(), Clock(-1))


def test_faiss_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "faiss.py").write_text("raise RuntimeError('no libcudart')")
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    with pytest.raises(ImportError, match="no libcudart"):
        faiss_rivals.gpu_library(tmp_path)
    (tmp_path / "faiss.py").write_text("")
    with pytest.raises(ImportError, match="has no GPU part"):
        faiss_rivals.gpu_library(tmp_path)
    monkeypatch.delitem(sys.modules, "faiss", raising=False)


def test_dense_attention_is_timed_both_ways(setting):
    found = dense(setting, 600, 2, 3, Once())
    assert found["dense"] == found["dense_gqa"]
    assert found["dense_bytes"] == 2 * 2 * 2 * 600 * 64 * 2
    assert found["topk"]["median_us"] == 30
    assert not [name for name in found if name.endswith("error")]
