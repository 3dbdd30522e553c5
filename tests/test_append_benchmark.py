"""The benchmark of appends, but for the clock: what it checks, counts, plans and refuses."""

import gc
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from benchmarks import append
from benchmarks.appending import encode, layers, small, update
from benchmarks.decode.timing import Launches
from benchmarks.tabling import append as tabling
from kvindex.core.geometry import Geometry
from kvindex_cuda.pariskv.append import Writer
from tests.cuda import emulator

emulated = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")

SMALL = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
WHOLE = Geometry.of(q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def test_bytes_of_a_million_keys():
    found = encode.bytes_of(WHOLE, 2**20)
    keys, centers = 2**23 * 256, 4096 * 8 * 256
    assert found["learn"] == 4096 * 8 * 256  # what a reference is of
    assert encode.bytes_of(WHOLE, 5000)["learn"] == (4096 + 5000 % 256 + 256) * 8 * 256
    assert found["encode"] == keys + 2 * centers + 2**23 * 67  # signs, 3 planes, weight twice


@emulated
def test_right_appends_pass_and_wrong_ones_stop(monkeypatch):
    monkeypatch.setattr(encode, "CHECKED", (300, 400, 56))
    with emulator.emulated():
        assert encode.check(SMALL)["learned"] == "equal"
        codes = Writer.codes
        monkeypatch.setattr(
            Writer, "codes", lambda self, keys, *a, **k: codes(self, -keys, *a, **k)
        )
        with pytest.raises(SystemExit, match=r"append is wrong: learned \[\] differ, \d+"):
            encode.check(SMALL)


@emulated
def test_kernels_are_timed_alone_together_and_in_pieces():
    def timed(run, layers):
        run()
        return {"median_us": 2.0, "low_us": 1.0, "high_us": 3.0, "replays": 1}

    with emulator.emulated():
        found = encode.measure(SMALL, 600, 256, timed, 100.0)
    for name in ("learn", "encode", "in_one_go", "in_pieces"):
        assert found[name]["of_reading"] == pytest.approx(found[name]["bytes"] / 2e3 / 100)
    assert found["in_pieces"]["bytes"] == found["encode"]["bytes"]


@emulated
def test_small_kernels_run_alone(monkeypatch):
    monkeypatch.setattr(update, "APART", 100)
    seen = []

    def timed(run, layers):
        with Launches() as launches:
            run()
        seen.append(set(launches.names))
        return {"median_us": 2.0}

    rates = {"read": {"GB_s": 4000.0}, "pinned": {"GB_s": 50.0}}
    with emulator.emulated():
        found = small.measure(SMALL, 700, 2, timed, rates, k=8)
    assert seen == [{name} for name in small.bytes_of(SMALL)]
    assert found["keep"]["host_bytes"] == 256 * 2 * 128 * 2
    page = tabling.small({"small": found, "machine": dict(gpu="g", torch="2", transformers="5")})
    assert "| `keep` | the same | 131 | 131 | 2.6 | 2.0 |" in page
    assert tabling.small({}) == "Not measured in this run."


@pytest.mark.parametrize("plan", update.PLANS)
@pytest.mark.parametrize("layers", [1, 16, 30])
def test_every_layer_is_updated_once_in_a_period(plan, layers):
    steps = [update.due(plan, step, layers) for step in range(update.UPDATE)]
    assert sorted(layer for step in steps for layer in step) == list(range(layers))
    most = layers if plan.startswith("together") else 1
    assert max(map(len, steps)) == most
    assert update.due(plan, update.UPDATE + 5, layers) == steps[5]


def test_delays_are_of_the_steps_that_an_update_falls_on():
    found = [100.0, 130.0, 100.0, 110.0, 100.0, 100.0, 100.0, 104.0]
    result = update.delays(found, [20.0, 40.0], [1, 3])
    assert result["delay_worst"] == pytest.approx(0.3)
    assert result["worst_of_worst"] == pytest.approx(1.25)
    assert result["delay_median"] == pytest.approx(0.2)
    assert result["amortised"] == pytest.approx(844 / 8 / (604 / 6) - 1)
    assert (result["updates"], result["host_us_per_layer"]) == (2, 30.0)
    assert result["host_worst_us_per_layer"] == 40.0
    assert [result[name] for name in ("struck", "over", "others", "others_over")] == [2, 1, 6, 0]


def test_an_update_falls_on_the_step_beside_it_and_on_those_where_it_begins_and_ends():
    fallen = {
        plan: [step for step in range(300) if update.falls(plan, step, 64)] for plan in update.PLANS
    }
    assert fallen["staggered"][:3] == [0, 4, 8]
    assert fallen["beside"][:8] == [0, 1, 3, 4, 5, 7, 8, 9]
    assert fallen["together"] == [128]
    assert fallen["together_beside"] == [127, 128, 129]


@pytest.mark.parametrize(
    ("plan", "want"),
    [
        ("staggered", ["append 0", "append 1"]),
        ("beside", ["wait ready", "begin 0", "wait side", "end 0", "wait ready", "begin 1"]),
    ],
)
def test_an_update_beside_the_steps_ends_after_the_next_one(plan, want, monkeypatch):
    done = []

    def layer(i):
        def begin(*_):
            done.append(f"begin {i}")
            return lambda: done.append(f"end {i}")

        append = partial(done.append, f"append {i}")
        return SimpleNamespace(geometry=SMALL, append=lambda *_: append(), start_append=begin)

    side = SimpleNamespace(wait_event=lambda event: done.append(f"wait {event}"))
    current = SimpleNamespace(wait_stream=lambda stream: done.append("wait side"))
    monkeypatch.setattr(update, "side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    decode = SimpleNamespace(layers=2, indexes=[layer(0), layer(1)], tokens_of=lambda i: ())
    updates = update.Updates(decode, plan)
    assert [updates(step, "ready") for step in (0, 1, 128)] == [1, 0, 1]
    assert done == want
    updates.finish()
    assert done[len(want) :] == (["wait side", "end 1"] if plan == "beside" else [])


def test_the_collector_is_off_or_its_pauses_are_told():
    with update.collector(on=False) as pauses:
        assert not gc.isenabled()
    assert gc.isenabled()
    assert pauses == []
    with update.collector(on=True) as pauses:
        gc.collect()
    gc.collect()
    assert len(pauses) == 1
    assert pauses[0] > 0


@emulated
def test_layers_decode_and_go_back(monkeypatch):
    monkeypatch.setattr(update, "APART", 100)
    with emulator.emulated():
        decode = update.Decode(SMALL, 700, 2, captured=False, k=8)
        decode.step()
        before = [output.clone() for output in decode.outputs]
        for layer, index in enumerate(decode.indexes):
            assert len(index) == 600
            held = index._store.pinned_bytes
            index.append(*decode.tokens_of(layer))
            assert len(index) == 856
            assert index._store.pinned_bytes == held
        decode.back()
        decode.step()
        assert all(map(torch.equal, decode.outputs, before))


@emulated
@pytest.mark.parametrize(("plan", "at_a_step"), [("at_once", 2), ("beside", 1), ("room", 1)])
def test_layers_update_their_windows_by_themselves(plan, at_a_step, monkeypatch):
    monkeypatch.setattr(layers, "LOCAL", 16)
    with emulator.emulated():
        decoding = layers.Decoding(SMALL, 280, 2, plan, update=6)
        assert [len(layer) for layer in decoding.layers] == [280, 280]
        kinds, held = [], []
        for _ in range(19):
            kinds.append(decoding.step())
            held.append([len(layer.index) for layer in decoding.layers])
    ended = [sum(map(int.__lt__, *pair)) for pair in pairwise(held)]
    assert max(ended[7:]) == at_a_step
    # of 2 layers 2 updates, at one step or each begun and ended
    assert kinds[7:].count("updated") == (2 if plan == "at_once" else 8)
    assert set(kinds) == {"plain", "updated"}


def test_delays_are_over_the_plain_steps_of_the_run():
    kinds = ["plain", "updated", "plain", "updated", "pinning"]
    found = layers.delays([10.0, 13.0, 10.0, 11.0, 20.0], kinds)
    assert found["updated"]["delay_median"] == pytest.approx(0.2)
    assert found["updated"]["delay_worst"] == pytest.approx(0.3)
    assert found["pinning"]["delay_worst"] == pytest.approx(1.0)
    assert found["amortised"] == pytest.approx(0.28)
    assert [found[kind]["steps"] for kind in layers.KINDS] == [2, 2, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "5"], "tokens: got 5, allowed is at least 4096"),
        (["--context", "5000", "9"], "context: got 9"),
        (["--layers", "300"], "layers: got 300, allowed is up to 64"),
        (["--seconds", "0"], "seconds: got 0.0"),
        (["--json", "/nowhere/a.json"], "allowed is a file in a folder that exists"),
    ],
)
def test_what_cannot_be_done_is_said(given, message, capsys):
    with pytest.raises(SystemExit):
        append.arguments(given)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    with pytest.raises(SystemExit):
        append.arguments([])
    assert "this measures a CUDA device" in capsys.readouterr().err


def a_run(**parts):
    machine = dict(gpu="one", torch="2", processor="some", cores=16, python="3")
    return dict(shape={}, index="pariskv", machine=machine, notes=[], seconds=1.0) | parts


def test_parts_of_another_run_are_taken_and_named():
    other = a_run(update=[3], encode={"new": 1}, seconds=2.0)
    found = append.joined(a_run(update=[1], encode={"old": 1}), other, ["update"])
    assert (found["update"], found["encode"], found["seconds"]) == ([3], {"old": 1}, 1.0)
    assert found["joined"]["update"]["seconds"] == 2.0
    assert list(append.joined(found, other, ["encode"])["joined"]) == ["update", "encode"]
    with pytest.raises(ValueError, match=r"join: got a run without \['layers'\]"):
        append.joined(found, other, ["layers"])
    other["machine"] = other["machine"] | dict(gpu="another")
    with pytest.raises(ValueError, match=r"join: got a run of .*'another'.*allowed is one of"):
        append.joined(found, other, ["update"])
