"""Benchmarks and tools: each runs small from end to end, and refuses a wrong answer."""

import importlib
import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    answers,
    append,
    generation,
    latency,
    quality,
    ranks,
    ranks_quality,
    report,
    serving,
)
from benchmarks.common import (
    attached,
    correctness,
    decoder,
    decoding,
    prompt,
    reading,
    shapes,
    token,
    workload,
)
from benchmarks.common import ranks as measuring
from benchmarks.comparing import fidelity, field, lists
from benchmarks.comparing.layers import Layer
from benchmarks.comparing.measure import measure, truths
from benchmarks.comparing.truth import Setting
from benchmarks.reporting import answers as reporting
from benchmarks.reporting import parts
from kvindex.core.geometry import Geometry
from kvindex.indexes.exact import Exact
from kvindex.indexes.pariskv import ParisKV
from kvindex.layer.updates import LAG
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.evaluate.compare.records import ANSWERS, FULL, Key, Records
from kvindex_adapters.evaluate.compare.summary import summarize
from kvindex_adapters.evaluate.output_files import write_json
from kvindex_adapters.hf import layer_options
from tests.adapters.tiny import build
from tests.cuda import emulator
from tests.cuda.graphs import WholeGraph, kept
from tests.support.fused import on_a_cpu

ROOT = Path(__file__).parents[1]
MACHINE = dict(cores=1, processor="p", torch="2", transformers="5", threads=1)
SMALL = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
SIZES = dict(k=20, window=24)

emulated = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")


def tool(name):
    """A script of tools/ as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def timed(run, layers, before=None):
    """Runs once."""
    if before is not None:
        before(0)
    run()
    return {"median_us": 10.0, "low_us": 9.0, "high_us": 11.0, "replays": 1}


@pytest.fixture
def small(monkeypatch):
    """Sizes that an emulator can do."""
    monkeypatch.setattr(correctness, "CHECKED", 768)
    monkeypatch.setattr(workload, "SETS", 1)
    monkeypatch.setattr(decoding, "LOCAL", 16)
    monkeypatch.setattr(decoding, "default_placement", lambda *_: {"backend": "cuda"})
    with emulator.emulated():
        yield


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny model in the place of the real one; options that name two texts and a result."""
    model = build("llama", eos_token_id=None)

    def tokenizer(text, **_):
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    monkeypatch.setattr(reading, "load", lambda *_, **__: (model, tokenizer))
    for name in "ab":
        (tmp_path / name).write_text(f"{name}: some words of a text " * 100)
    texts = ["--text", str(tmp_path / "a"), str(tmp_path / "b")]
    return texts, ["--model", "tiny", "--json", str(tmp_path / "out.json")]


def ran(main, given, monkeypatch):
    """The result that a script has written."""
    monkeypatch.setattr("sys.argv", ["script", *map(str, given)])
    main()
    return json.loads(Path(given[-1]).read_text())


# The pages


@pytest.mark.parametrize("path", report.pages(), ids=lambda path: path.name)
def test_tables_are_what_the_results_say(path):
    """If not: python -m benchmarks.report."""
    assert report.rewritten(path.read_text()) == path.read_text()


def test_a_stale_table_fails_the_check(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    (tmp_path / "docs").mkdir()
    page.write_text((ROOT / "README.md").read_text().replace(", ms |", ", µs |"))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.main(["--check"]) == 1
    assert "stale: README.md" in capsys.readouterr().out
    assert report.main([]) == 0
    assert page.read_text() == (ROOT / "README.md").read_text()
    with pytest.raises(KeyError, match="strange"):
        report.rewritten("<!-- strange:begin -->\n<!-- strange:end -->")


def test_every_script_is_listed_and_every_result_names_its_machine():
    for folder in ("benchmarks", "tools"):
        for path in (ROOT / folder).glob("*.py"):
            if "__main__" in (text := path.read_text()):
                assert f"`{path.name}`" in (ROOT / "benchmarks/README.md").read_text(), path.name
            for told in text.split('"--json"')[1:]:
                assert told.startswith(", type=output("), path.name  # refused before the work
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        assert {"processor", "torch"} <= json.loads(path.read_text())["machine"].keys(), path


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("benchmarks.reporting.pictures")
    pictures.draw(tmp_path, ["decode_step", "recall"])
    assert (tmp_path / "recall.png").stat().st_size > 10_000


# Answers


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """What is kept of a comparison whose instances have depths; no other result is there."""
    of_report = pytest.importorskip(
        "tests.adapters.evaluate.test_compare_report", exc_type=ImportError
    )
    records = Records(tmp_path)
    of_report.fill(records, ["pariskv", "exact", "quest"])
    records.run_on(MACHINE)
    for index, k, right in ((FULL, 0, 1.0), ("pariskv", 100, 0.5), ("quest", 100, 0.0)):
        score = {"scores": [right], "depth": 0.25}
        records.add(Key(ANSWERS, 4096, index, k, "deep", 0), score)
    records.add(Key(ANSWERS, 2048, "short", 100, "a", 0), {"scores": [1.0]})
    of_report.SETTINGS.claim(tmp_path)
    write_json(tmp_path / "results.json", summarize(of_report.SETTINGS, records))
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    return ran(answers.main, [tmp_path, "--json", tmp_path / "out.json"], monkeypatch)


def test_every_table_and_picture_of_answers_has_every_index(answered):
    assert answered["machine"] == MACHINE
    for name in ("field", "lengths", "rows"):
        page = report.TABLES[f"answers_{name}"](answered)
        lines = {line.split(" | ")[0] for line in page.splitlines()}
        assert {"| full attention", "| `exact`", "| `pariskv`", "| `quest`"} <= lines
        assert ("| `short`" in lines) == (name == "field")  # it has one length and one k
    assert "1 to 1 in a cell" in report.TABLES["answers_depth"](answered)
    for index, cell in ((FULL, 1), ("pariskv", -0.5), ("quest", -1)):
        assert reporting.depth_cells(answered, index) == {(4096, 0.2): cell}
    pictures = importlib.import_module("benchmarks.reporting.pictures")
    first, second = pictures.answers_depth(answered).axes
    assert [text.get_text() for text in (*first.texts, *second.texts)] == ["100", "-50"]


def test_figures_of_answers_are_those_of_the_comparison(answered, tmp_path):
    whole = json.loads((tmp_path / "results.json").read_text())
    (row,) = parts.some(
        whole["differences"], base=FULL, index="quest", k=32, task=None, tokens=None
    )
    (kept,) = parts.some(answered["differences"], base=FULL, index="quest", k=32, tokens=None)
    assert kept["difference"] == pytest.approx(row["difference"], rel=1e-3)
    assert len(json.dumps(answered)) < len(json.dumps(whole))
    with pytest.raises(ValueError, match=r"schema: got None, allowed is 'kvindex\.compare/1'"):
        answers.reduced({})


def test_a_run_that_ended_early_is_told_of_the_prompts_that_all_have_answered(answered, tmp_path):
    found = answers.answered_by_all(tmp_path, ["pariskv", "quest"])
    assert {row["index"] for row in found["accuracy"]} == {FULL, "pariskv", "quest"}
    counts = {row["count"] for row in found["accuracy"] if row["task"] is row["tokens"] is None}
    assert len(counts) == 1
    assert "deep" not in found["tasks"]  # which nobody has answered at each k
    with pytest.raises(
        ValueError, match=r"index: got \['nobody'\], allowed are those with answers"
    ):
        answers.answered_by_all(tmp_path, ["pariskv", "nobody"])
    assert "| prompts |" in report.TABLES["answers_field"](answered)
    settings = {name: value for name, value in found.items() if name != "machines"}
    even = {**settings, "machine": MACHINE}
    assert "| prompts |" not in report.TABLES["answers_field"](even)


def test_results_of_other_models_stand_beside(answered, tmp_path):
    settings = answered["settings"] | {"model": "folder/other.gguf"}
    write_json(tmp_path / "answers_rows_other.json", answered | {"settings": settings})
    page = report.TABLES["answers_rows"](answered)
    assert page.count("| `quest`") == 2
    assert "other, float32" in page


# On a GPU


@emulated
@pytest.mark.parametrize("preset", ["fast", "paper"])
def test_a_right_step_is_let_through(preset, small):
    found = correctness.check(SMALL, f"pariskv:preset={preset}", **SIZES)
    assert (found["found"], found["repeats"]) == (20, True)


@emulated
@pytest.mark.parametrize(
    ("method", "message"), [("append", "of the ids are"), ("attend", "the output is off")]
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
    assert "Caches" not in page  # a CPU has none
    for plan, share in (("cached", 0.9), ("split_cached", 0.87)):
        result["points"][0]["caches"][f"step_{plan}"] |= dict(cache_rows=4096, hit_rate=share)
    page = report.TABLES["decode_step_h100"]({**result, "shape": {"k": 20}})
    assert "Caches have room for 4,096 rows per KV head, kept as `plain`." in page
    assert "rows on the host: 90.0%. Found of the host's rows, rows in both places: 87.0%." in page
    json.dumps(result)
    with pytest.raises(SystemExit, match="on the host and on the device differ"):
        latency.agree({"host": torch.zeros(3), "device": torch.ones(3)})


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
def test_queries_are_asked_again_or_fresh_and_too_few_rows_are_refused(small):
    work = workload.Layers(SMALL, "pariskv", "host", tokens=300, **SIZES)
    first = work.queries.clone()
    work.ask(0, 0.0)
    assert (work.queries != first).any(-1).all()
    work.ask(0, 1.0)
    assert torch.equal(work.queries, first)
    work.indexes[0].truncate(5)
    with pytest.raises(SystemExit, match="not timed: 5 rows, not 20"):
        work.answers()


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
    part = {"tokens": 280, "layers": 2, "beside": found}
    assert "| 20.0% |" in report.TABLES["append_layers"]({"layers": [part]})


@pytest.mark.parametrize("script", [latency, append])
def test_what_cannot_be_measured_is_said(script, capsys):
    for given, message in (
        (["--tokens", "5"], "tokens: got 5, allowed is at least 4096"),
        (["--index", "exact"], "allowed is one whose steps are kernels"),
        (["--hit-rate", "2"], "hit-rate: got 2.0"),
        (["--json", "/nowhere/a.json"], "allowed is a file in a folder that exists"),
    ):
        with pytest.raises(SystemExit):
            script.arguments(given)
        assert message in capsys.readouterr().err


def test_tokens_are_timed_in_turns_and_what_differs_is_not(tiny, monkeypatch):
    texts, model = tiny
    monkeypatch.setattr(generation, "WARM", 2)
    monkeypatch.setattr(generation, "CHECKED", 2)
    given = [*texts[:2], "--tokens", 80, "--written", 6, "--turn", 3, "--layers", 1]
    given += ["--context", 520, "--steps", 3, "--dtype", "float32", *model]
    result = ran(generation.main, given, monkeypatch)
    assert result["model_run"]["same_text"]
    assert (result["layers"]["rounds"], result["model_run"]["rounds"]) == (1, 2)
    page = report.TABLES["generate_speed"](result)
    assert f"| {1e3 / result['model_run']['dense']['token_ms']:.0f} |" in page
    step = decoding.Decoding.step
    wrong = property(lambda self: lambda: [out + torch.rand(1) for out in step(self)])
    monkeypatch.setattr(decoding.Decoding, "step", wrong)
    with pytest.raises(SystemExit, match="step 0 is not the same"):
        generation.main()


def test_ways_to_share_tokens_are_the_same_in_one_process(tiny, monkeypatch):
    texts, model = tiny
    sizes = ["--tokens", 460, "--steps", 20, "-k", 4]
    result = ran(ranks_quality.main, [*texts, *sizes, *model], monkeypatch)
    for ways in result["indexes"].values():
        assert ways["one"]["kl_mean"] > 0
        for found in ways.values():
            assert found["kl_texts"] == pytest.approx(ways["one"]["kl_texts"], rel=1e-3)
    page = report.TABLES["ranks_quality"](result)
    assert "| `exact` | 1 ranks, the 4 of all (`best`, k = 4) |" in page


@pytest.fixture
def tiny_decoder(small, tmp_path, monkeypatch):
    """Arguments of a shape of one layer, whose steps are captured as on a GPU."""
    monkeypatch.setattr(ParisKV, "_defers", True)  # as on a GPU, whose host must not ask
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    for module in (token, layer_options):
        monkeypatch.setattr(module, "default_placement", lambda *_: {"backend": "cuda"})
    monkeypatch.setattr(token, "sharpen_for", partial(token.sharpen_for, count=1))
    for name, value in dict(WARM=3, SINK=4, LOCAL=16, UPDATE=8).items():
        monkeypatch.setattr(token, name, value)
    shape = shapes.Shape(1, 64, 96, 2, 1, 64, 101, normed=True)
    monkeypatch.setitem(shapes.SHAPES, "tiny", shape)
    given = ["--decoder", "tiny", "--context", 520, "--written", 16, "--turn", 8]
    return [*given, "--dtype", "float32", "--json", tmp_path / "out.json"]


@pytest.mark.slow
def test_tokens_of_transformers_are_timed_beside_the_decoders(tiny_decoder, monkeypatch):
    given = ["--through", "transformers", *tiny_decoder]
    given[given.index("--turn") + 1] = 16
    pytest.importorskip("triton")
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(attached, "device_refusal", lambda device: None)
    with kept(WholeGraph) as graphs:
        found = ran(generation.main, given, monkeypatch)["transformers"]
    assert found["rounds"] == 1
    assert found["ratio"].keys() == {"fused", "token_graph", "layer_graphs"}
    for told in found["replays"].values():
        replays, tokens = map(int, re.findall(r"\d+", told)[:2])
        assert replays > tokens // 2
        assert graphs.replays > 2 * replays  # the decoder's too
    assert len([*attached.shown(found)]) == 6


def test_a_prefill_is_timed_with_an_index_and_without(tiny_decoder, monkeypatch):
    found = ran(generation.main, ["--prefill", 700, *tiny_decoder], monkeypatch)["prefill"]
    assert (found["rounds"], found["ratio"].keys()) == (3, {"indexed"})
    assert found["needed_bytes"]["layer"] == 2 * 700 * 64 * 4
    assert found["over_bytes"] == sum(found["needed_bytes"].values()) - 700 * 64 * 4
    assert len([*prompt.shown(found)]) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prefill", "9"], "through, prefill: got one without --decoder"),
        (["--decoder", "qwen3-8b", "--prefill", "9", "--batch", "2"], "batch: got 2, allowed is 1"),
        (["--decoder", "qwen3-8b", "--batch", "0"], "batch: got 0, allowed is at least 1"),
        (
            ["--decoder", "qwen3-8b", "--through", "transformers", "--weights", "fp8"],
            "weights: got fp8, allowed is plain",
        ),
    ],
)
def test_parts_of_a_decoder_that_do_not_fit_are_refused(given, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        generation.arguments([*given, "--json", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err


def test_a_plans_tokens_are_one_graph_over_updates_of_all_layers(tiny_decoder):
    """Each layer has had its turn three times; the first two tokens alone are not replayed."""
    shape = shapes.SHAPES["tiny"]._replace(layers=2)
    g = shape.geometry(torch.float32, "cpu")
    with emulator.emulated(), kept(WholeGraph) as graphs:
        layers = token.indexed(g, "pariskv", 520, shape.layers, 60)
        held = [len(layer.index) for layer in layers]
        plan = token.Plan(shape, g, shapes.weights_of(shape, g), layers)
        plan.turn(2 + 3 * token.UPDATE + LAG)
    assert (graphs.made, graphs.replays) == (1, 3 * token.UPDATE + LAG)
    grown = [len(layer.index) - had for layer, had in zip(layers, held, strict=True)]
    assert min(grown) > 2 * token.UPDATE  # by three updates, of which the first is a part


@pytest.mark.slow
def test_a_decoders_tokens_are_timed_in_turns_and_wrong_ones_are_not(tiny_decoder, monkeypatch):
    pytest.importorskip("triton")  # rounds to FP8
    given = ["--weights", "fp8", "--batch", 2, *tiny_decoder]
    with kept(WholeGraph) as graphs:
        result = ran(generation.main, given, monkeypatch)
    found = result["decoder"]
    monkeypatch.setattr("benchmarks.reporting.tokens.stored_beside", lambda name, one: [one])
    page = report.TABLES["decoder_tokens"](result)
    name = "tiny, weights in FP8, 520, 2 sequences"
    assert f"| {name} | none | no attention | {found['weights']['device_ms']:.2f} (" in page
    assert graphs.replays > 110  # more than all tokens that search nothing
    assert (found["rounds"], found["over"]) == (2, "dense")
    assert found["ratio"].keys() == {"weights", "growing", "cached", "uncached"}
    per_s = found["tokens_per_s"]["dense"]
    assert per_s == pytest.approx(1e3 * 2 / found["dense"]["token_ms"])
    assert len([*decoder.shown(found)]) == 6
    choose = Sampler.choose
    monkeypatch.setattr(Sampler, "choose", lambda self, logits: choose(self, torch.rand(2, 101)))
    with kept(WholeGraph), pytest.raises(SystemExit, match="tokens by graphs are"):
        generation.main()


@pytest.mark.slow
def test_ranks_are_timed_beside_one_and_wrong_ones_are_not(tiny_decoder, monkeypatch):
    for name, value in dict(CHECKED=280, TRIED=5).items():
        monkeypatch.setattr(measuring, name, value)
    given = [*tiny_decoder]
    given[given.index("--written") + 1] = 8
    given = [*given[:-2], "--device", "cpu", "--index", "pariskv", "--block", 16, *given[-2:]]
    with kept(WholeGraph) as graphs:
        result = ran(ranks.main, given, monkeypatch)
    assert graphs.replays > 50
    found, result["machine"]["gpus"] = result["ranks"], 2
    page = report.TABLES["ranks"](result)
    assert f"| one GPU, 520 tokens | {found['one']['device_ms']:.2f} (" in page
    assert "| the same, without sums (nonsense) | " in page
    assert found["ratio"].keys() == {"tokens", "heads", "silent"}
    assert found["check"].keys() == {"heads", "tokens"}
    assert max(found["check"].values()) < 1e-3
    assert len(ranks.shown(found)) == 6
    monkeypatch.setattr(measuring, "CLOSE", 1e-9)
    with (
        kept(WholeGraph),
        pytest.raises(SystemExit, match=r"heads: logits are .* nothing is timed"),
    ):
        ranks.main()


# On a CPU


def test_steps_on_a_cpu_are_measured_in_turns_and_a_wrong_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", 1024)
    given = ["--device", "cpu", "--tokens", 1024, "--replays", 10, "--layers", 1, "--beside"]
    result = ran(latency.main, [*given, "--json", tmp_path / "out.json"], monkeypatch)
    point = result["points"][0]
    assert point["dense"]["of_dense"] == 1
    assert point["pariskv"]["ms"] > 0
    assert f"| 1,024 | 1 | {point['dense']['ms']:.2f} |" in report.TABLES["cpu_steps"](result)
    stages = pytest.importorskip("kvindex.cpu.stages", exc_type=ImportError)
    prepare = stages.prepare
    monkeypatch.setattr(stages, "prepare", lambda queries, *more: prepare(-queries, *more))
    with pytest.raises(SystemExit, match="not timed"):
        ran(latency.main, [*given, "--json", tmp_path / "out.json"], monkeypatch)


def test_steps_by_row_codec_are_beside_those_of_plain_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "CHECKED", 1024)
    given = ["--device", "cpu", "--tokens", 1024, "--replays", 10, "--layers", 1]
    given += ["--beside", "pariskv:row_codec=int2", "exact", "exact:row_codec=int2"]
    result = ran(latency.main, [*given, "--json", tmp_path / "out.json"], monkeypatch)
    (point,), told = result["points"], report.TABLES["cpu_row_codecs"](result)
    steps = [point[f"{name}:row_codec=int2"] for name in ("pariskv", "exact")]
    assert all(step["of_plain_low"] <= step["of_plain"] <= step["of_plain_high"] for step in steps)
    assert "of_plain" not in point["exact"]
    assert (
        f"| `plain` | {point['pariskv']['ms']:.2f} | 1 | {point['exact']['ms']:.2f} | 1 |" in told
    )
    assert re.search(rf"\| `int2` \| {steps[0]['ms']:.2f} \| .* \| {steps[1]['ms']:.2f} \| ", told)


def test_a_model_on_a_cpu_is_timed_without_graphs(tiny, monkeypatch):
    texts, model = tiny
    monkeypatch.setattr(generation, "WARM", 2)
    given = [*texts[:2], "--tokens", 80, "--written", 6, "--turn", 3, "--without-graphs"]
    result = ran(generation.main, [*given, "--dtype", "float32", *model], monkeypatch)
    assert result["model_run"]["prefill_s"].keys() == {"dense", "graphs"}
    assert "layers" not in result
    cell = f"| {result['model_run']['dense']['token_ms']:.0f} |"
    monkeypatch.setattr("benchmarks.reporting.cpu.stored", lambda name: result)
    assert cell in report.TABLES["cpu_tokens"](result)


# Quality


def test_recall_is_measured(tiny, monkeypatch):
    texts, model = tiny
    given = ["recall", *texts, "--tokens", 200, "--written", 4, "-k", 5]
    given += ["--beta", 1, "--presets", "precise", "paper", "scan", *model]
    result = ran(quality.main, given, monkeypatch)
    assert [cell["recall"] > 0.5 for cell in result["cells"]] == [True] * 6
    with pytest.raises(ValueError, match=r"text: got \d+ tokens, allowed is at least 9000"):
        ran(quality.main, [*given[:5], 9000, *given[6:]], monkeypatch)


def test_scales_of_keys_are_measured(tiny, monkeypatch):
    texts, model = tiny
    given = ["scales", *texts, "--tokens", 192, "--written", 4, *model]
    cells = ran(quality.main, given, monkeypatch)["cells"]
    assert [cell["bits"] for cell in cells] == 2 * [*[4] * 4, *[2] * 4]
    assert all(
        0 < few["error"] < fewer["error"] for few, fewer in zip(cells, cells[4:8], strict=False)
    )
    with pytest.raises(ValueError, match="tokens: got 200, allowed is a multiple of 32"):
        ran(quality.main, [*given[:5], 200, *given[6:]], monkeypatch)


def test_what_row_codecs_cost_grows_as_bits_go(tiny, monkeypatch):
    texts, model = tiny
    given = ["rows", *texts, "--tokens", 640, "--steps", 10, "-k", 8, *model]
    result = ran(quality.main, given, monkeypatch)
    for part in ("both", "keys", "values"):
        means = [result["errors"][name][part]["mean"] for name in ("plain", "int8", "int4", "int2")]
        assert 0 < means[0] < means[1] < means[2] < means[3]
    whole = [cell for cell in result["cells"] if cell["read"] == "all" and cell["text"] == "a"]
    kls = {cell["rows"]: cell["kl_mean"] for cell in whole}
    assert 0 <= kls["plain"] < kls["int8"] < kls["int4"] < kls["int2"]
    beside = {**result, "model": "other.gguf", "cells": []}
    monkeypatch.setattr(
        "benchmarks.reporting.quality.stored_beside", lambda _, first: [first, beside]
    )
    told = report.TABLES["row_codecs"](result)
    assert (told.count("| `plain` | 512 | "), told.count("KL, all rows")) == (2, 1)


def test_kl_of_exact_is_its_own_and_that_of_fewer_candidates_is_larger(tiny, monkeypatch):
    texts, model = tiny
    index = "pariskv:preset=scan", "streaming:budget=8", "exact:group=union"
    given = ["kl", *texts, "--tokens", 640, "--steps", 100, "-k", 8, "--index", *index, *model]
    found = ran(quality.main, given, monkeypatch)["indexes"]
    assert found["exact"]["ratio"] == found["exact:group=union"]["ratio"] == 1
    assert found["streaming:budget=8"]["ratio_95"][0] > 1
    assert "streaming" in report.TABLES["divergence"](
        {"indexes": found, "steps": 100, "k": 8, "machine": MACHINE}
    )


def test_fidelity_is_measured(tiny, monkeypatch):
    for name, value in dict(PROMPT=2200, CONTINUATION=3, K=2200).items():
        monkeypatch.setattr(fidelity, name, value)
    found = ran(quality.main, ["fidelity", "--index", "exact", *tiny[1]], monkeypatch)
    assert found["indexes"]["exact"]["kl_mean"] < 1e-6


def test_one_list_of_all_rows_is_full_attention(tiny, monkeypatch):
    texts, model = tiny
    given = ["lists", *texts, "--tokens", 500, "--steps", 3, "-k", 2000, *model]
    found = ran(quality.main, given, monkeypatch)
    assert [cell["lists"] for cell in found["cells"]] == [*lists.WAYS] * 2
    assert all(cell["kl_mean"] < 1e-6 for cell in found["cells"] if cell["k"] == 2000)


SETTING = Setting(tokens=420, sink=4, local_window=32, generated=128, every=32)


def layer(later=0.0):
    """Two KV heads read by two query heads each; what comes in pieces, and asks, is moved."""
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 440, 16, generator=draw)
    queries = torch.randn(4, 440, 16, generator=draw) * 3
    keys[:, 292:388, 0] += later
    queries[:, 420:, 0] += later
    return Layer(keys, queries, 0.25, None, values)


def test_exact_search_with_all_rows_is_full_attention_and_a_wrong_one_is_not(monkeypatch):
    one, rows = layer(), [32, 512]
    known = truths(one, SETTING, rows)
    for pieces in (False, True):
        found = measure(one, "exact", SETTING, rows, known, pieces=pieces)
        assert found["rows"][32]["recall"] == found["rows"][512]["recall"] == 1
        assert found["rows"][512]["error"] < 1e-5 < 0.01 < found["rows"][32]["error"]
    assert list(found["along"]) == [0, 32, 64, 128]
    search = Exact._search
    monkeypatch.setattr(Exact, "_search", lambda self, queries, k: search(self, -queries, k))
    assert measure(one, "exact", SETTING, [32], known)["rows"][32]["recall"] < 0.5


def test_a_frozen_index_loses_what_comes_later_and_a_failure_stops_nobody():
    compared = field.Comparison(SETTING, [32, 512], [layer(later=4.0)])
    for spec in ("pqcache:subspaces=5", "exact", "magicpig:bits=4"):
        compared.measure(spec, 0)
    assert "subspaces: got 5" in compared.failed["pqcache:subspaces=5"]
    lines = {(one["index"], one["arrival"]): one for one in compared.lines()}
    late, frozen = (lines["magicpig:bits=4", way]["along"] for way in ("pieces", "stale"))
    assert late["0"]["coverage"] == frozen["0"]["coverage"]
    assert frozen["128"]["coverage"] < late["128"]["coverage"] / 2


def test_the_field_is_written_and_added_to(tiny, monkeypatch):
    texts, model = tiny
    given = ["field", *texts, "--written", 4, "--generated", 100, "--layers", 3, "--rows", 16]
    given += ["--index", "exact", "streaming:budget={k}", "--tokens"]
    ran(quality.main, [*given, 500, *model], monkeypatch)
    result = ran(quality.main, [*given, 520, "--add", *model], monkeypatch)
    assert [run["measured"] for run in result["runs"]] == [4, 4]
    assert "| `exact` |" in report.TABLES["field"](result)
    own = ran(quality.main, [*given, 500, "--sampled", *model], monkeypatch)
    assert "| `exact` | 1.000 (1.00) |" in report.TABLES["answers_along"](own)


# Tools


def counters(profile, **values):
    """A table as `ncu` writes it."""
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
    with pytest.raises(ValueError, match="ncu: got no table: no permission"):
        profile.parsed("no permission\n")


@emulated
@pytest.mark.slow
def test_a_step_is_stamped_where_it_runs(small, tmp_path, monkeypatch):
    timeline = tool("timeline")
    work = workload.Layers(SMALL, "pariskv", "device", tokens=600, layers=2, **SIZES)
    want = work.answers()
    monkeypatch.setattr(emulator, "_folder", lambda: tmp_path)  # of use once
    capture = partial(SimpleNamespace)
    found = timeline.measure(work, work.ask, 2, timed, lambda run: capture(replay=run))
    assert torch.equal(want, work.answers())
    first, *_, last = found["points"]
    assert (first["what"], first["first_us"], last["what"]) == ("start", 0, "end")
    assert all(p["first_us"] <= p["median_us"] <= p["last_us"] for p in found["points"])
    assert "with stamps" in timeline.shown(found)


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
    assert early["error"].startswith("ValueError: got 'round', allowed are 'start'")
    assert {place: times[place]["median_us"] for place in places} == dict.fromkeys(places, 10.0)
    assert wrong["error"].startswith("TypeError")


def test_serving_is_timed_where_answers_are_the_engines_own(monkeypatch, tmp_path, capsys):
    answer = dict(tokens=[5, 6, 7], gaps=[3.0, 0.01, 2.0])
    close = dict(tokens=[5, 9, 1], gaps=[3.0, 0.01, 2.0])
    row = dict(batch=2, prefill_s=1.0, token_ms=[[8.0, 8.0, 8.0], [9.0, 8.0, 8.0]])
    found = {
        ("check", "stock"): [answer],
        ("check", "kvindex"): [close],
        ("time", "stock"): [row],
        ("time", "kvindex"): [{**row, "token_ms": [[4.0, 4.0, 4.0]]}],
    }
    monkeypatch.setattr(serving, "ran", lambda *which: found[which])
    monkeypatch.setattr(serving, "describe", lambda device: MACHINE)
    to = tmp_path / "serving.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--batch", "2", "--json", str(to)])
    serving.main()
    told = json.loads(to.read_text())
    assert told["serving"]["check"] == dict(equal=1, tokens=3)
    plans = told["serving"]["batches"][0]["plans"]
    assert plans["kvindex"]["ratio"] == 0.5
    assert plans["stock"]["token_ms_rounds"] == [8, 8]
    to.unlink()
    found["check", "kvindex"] = [dict(tokens=[8, 6, 7], gaps=[1.0, 1.0, 1.0])]
    with pytest.raises(SystemExit, match="token 0 is 8, not 5, which led by 3"):
        serving.main()
    assert not to.exists()


def test_a_served_models_configuration_is_the_shapes():
    shape = shapes.SHAPES["qwen3-8b"]
    config = serving.configuration(shape, 4, 4096)
    made = importlib.import_module("transformers").Qwen3Config(**config)
    assert (made.num_hidden_layers, made.head_dim, made.hidden_size) == (4, 128, 4096)
    given = serving.arguments(["--context", "1024", "--shared", "--json", "x"])
    first, second = serving.prompts(given, 2)
    assert first[:768] == second[:768]
    assert first != second
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64))
    serving.randomize(model)
    assert float(model[0].weight.detach().std()) == pytest.approx(1 / 8, rel=0.1)
    assert (model[1].weight == 1).all()
    assert not model[0].bias.any()


def test_requests_that_arrive_wait_for_tokens(monkeypatch):
    class Core:
        """Writes a token of each request a step."""

        def __init__(self):
            self.lengths, self.count = {}, 3

        def add_request(self, name, given, params):
            assert params["max_tokens"] == self.count
            self.lengths[name] = 0

        def has_unfinished_requests(self):
            return any(length < self.count for length in self.lengths.values())

        def step(self):
            going = [name for name, length in self.lengths.items() if length < self.count]
            for name in going:
                self.lengths[name] += 1
            answers = [SimpleNamespace(token_ids=[1] * self.lengths[name]) for name in going]
            return [
                SimpleNamespace(request_id=f"{name}-x", outputs=[answer])
                for name, answer in zip(going, answers, strict=True)
            ]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    found = serving.arriving(Core(), [(0.0, [1]), (0.02, [2])], 3)
    assert [len(times) for times in found.values()] == [2, 4]
    shown = serving.waits(found)
    assert set(shown) == {"first_ms", "first_ms_99", "between_ms", "between_ms_99"}
    assert 0 <= shown["first_ms"] <= shown["first_ms_99"]
