"""Steps and appends, with kernels and on a CPU: correct ones are timed, wrong ones raise an
error."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import append, latency, report
from benchmarks.common import correctness, decoding, workload
from kvindex.core.geometry import Geometry
from tests.benchmarks.running import MACHINE, SIZES, SMALL, emulated, ran, timed
from tests.support.helpers import slow


@emulated
def test_a_right_step_is_let_through(small):
    found = correctness.check(SMALL, "pariskv:preset=fast", **SIZES)
    assert (found["found"], found["repeats"]) == (20, True)


@emulated
@pytest.mark.parametrize(
    ("method", "message"),
    [slow("append", "of the ids equal"), ("attend", "the output has an error")],
)
def test_a_wrong_step_is_not_timed(method, message, small, monkeypatch):
    created = workload.created

    def wrong(*given, **options):
        index = created(*given, **options)
        real = getattr(index, method)
        changed = {"append": lambda k, v: real(k.roll(1, 2), v)}
        changed["attend"] = lambda q, rows, k: replace(
            done := real(q, rows, k=k), output=-done.output
        )
        if "backend" not in options:
            setattr(index, method, changed[method])
        return index

    monkeypatch.setattr(correctness, "created", wrong)
    with pytest.raises(SystemExit, match=f"not timed.*{message}"):
        correctness.check(SMALL, "pariskv", **SIZES)


@pytest.mark.slow
@emulated
def test_a_point_of_latency_is_measured(small):
    point = latency.steps(SMALL, "pariskv", 600, 1, 1, timed, hit_rate=0.5, on_device=0.7, **SIZES)
    use = point["caches"]["step_split_cached"]
    assert (use["device"] + use["host"], use["row_codec"]) == (2 * 600, "plain")
    point |= latency.rivals(SMALL, 600, 2, 2, timed, k=20)
    result = dict(points=[dict(tokens=600, batch=2, **point)], machine=MACHINE, index="pariskv")
    page = report.TABLES["decode_step_h100"]({**result, "shape": {"k": 20}})
    assert (
        "| 600 | 2 | 10 | 10 | 10 (1.00) | 10 (1.00) | 10 (1.00) | 10 (1.00) | 10 (1.00) |" in page
    )
    with pytest.raises(SystemExit, match="on the host and on the device differ"):
        latency.agree({"host": torch.zeros(3), "device": torch.ones(3)})


@pytest.mark.slow
@emulated
def test_a_point_of_latents_is_measured(small):
    sizes = dict(q_heads=20, kv_heads=1, head_dim=64, value_dim=48, value_in_key=True)
    latents = Geometry.of(**sizes, dtype=torch.bfloat16)
    assert correctness.check(latents, "pariskv:preset=fast", **SIZES)["found"] == 20
    point = latency.steps(latents, "pariskv:preset=fast", 600, 1, 1, timed, hit_rate=0.5, **SIZES)
    point |= latency.latent_rivals(latents, 600, 1, 2, timed, k=20)
    assert {"dense", "topk", "read", "step_host", "step_device"} <= point.keys()
    assert workload.geometry("cpu", 128).options()["value_dim"] == 512


@emulated
def test_an_append_is_measured_and_updates_are_told_apart(small):
    found = append.prompt(SMALL, "pariskv", 300, "device", 2)
    assert found["bytes"] == 300 * 2 * 128 * 2
    layers = decoding.Decoding(SMALL, "pariskv", 280, 1, update_every=4, local_window=16)
    _, kinds = append.steps(layers, 8)
    assert [len(layer) for layer in layers.layers] == [288]
    assert set(kinds) == set(append.KINDS)
    found = append.delays([10.0, 13.0, 10.0, 11.0], ["plain", "updated"] * 2)
    assert found["updated"]["delay_median"] == pytest.approx(0.2)
    part = {"tokens": 280, "layers": 2, "concurrent": found}
    assert "| 20.0% |" in report.TABLES["append_layers"]({"layers": [part]})


@pytest.mark.parametrize("script", [latency, append])
def test_what_cannot_be_measured_is_said(script, capsys):
    for given, message in (
        (["--tokens", "5"], "tokens: got 5, allowed is at least 4096"),
        (["--index", "exact"], "which has no fused step"),
        (["--hit-rate", "2"], "hit-rate: got 2.0"),
        (["--json", "/nowhere/a.json"], "pass a file in a folder that exists"),
    ):
        with pytest.raises(SystemExit):
            script.arguments(given)
        assert message in capsys.readouterr().err


def test_steps_on_a_cpu_are_measured_in_turns_and_a_wrong_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", 1024)
    given = ["--device", "cpu", "--tokens", 1024, "--replays", 10, "--layers", 1, "--json"]
    given.append(tmp_path / "out.json")
    codecs = ["--others", "pariskv:row_codec=int2", "exact", "exact:row_codec=int2"]
    result = ran(latency.main, [*codecs, *given], monkeypatch)
    (point,) = result["points"]
    assert point["dense"]["of_dense"] == 1
    assert f"| 1,024 | 1 | {point['dense']['ms']:.2f} |" in report.TABLES["cpu_steps"](result)
    steps = [point[f"{name}:row_codec=int2"] for name in ("pariskv", "exact")]
    assert all(step["of_plain_low"] <= step["of_plain"] <= step["of_plain_high"] for step in steps)
    told = report.TABLES["cpu_row_codecs"](result)
    assert re.search(rf"\| `int2` \| {steps[0]['ms']:.2f} \| .* \| {steps[1]['ms']:.2f} \| ", told)
    stages = pytest.importorskip("kvindex.cpu.pariskv.sign_votes", exc_type=ImportError)
    prepare = stages.prepare
    monkeypatch.setattr(stages, "prepare", lambda queries, *more: prepare(-queries, *more))
    with pytest.raises(SystemExit, match="not timed"):
        ran(latency.main, given, monkeypatch)
