"""Serving in vLLM, without the engine: which requests are compared and timed."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import report, serving
from benchmarks.common import shapes
from kvindex_adapters.vllm.options import Options
from tests.benchmarks.running import MACHINE

ANSWER = dict(tokens=[5, 6, 7], gaps=[3.0, 0.01, 2.0])
CLOSE = dict(tokens=[5, 9, 1], gaps=[3.0, 0.01, 2.0])
SLOW = dict(prefill_s=1.0, token_ms=[[8.0, 8.0, 8.0], [9.0, 8.0, 8.0]])
FAST = dict(prefill_s=1.0, token_ms=[[4.0, 4.0, 4.0]])


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Return results of engines by name, which engines that run add to their file."""
    found = {"check stock": [ANSWER], "check kvindex": [CLOSE], "time kvindex 131072x2": FAST}
    found |= {"time stock 131072x2": SLOW, "time stock-fp8 131072x2": SLOW}
    started = []

    def ran(what, plan, to, seconds):
        started.append(f"{what} {plan}")
        results = serving.Results(to, serving.settings_of(serving.arguments()))
        mine = {
            name: one for name, one in found.items() if f"{name} ".startswith(f"{what} {plan} ")
        }
        for name, one in mine.items():
            results.add(name, one)
        return "" if mine else "it failed"

    monkeypatch.setattr(serving, "ran", ran)
    monkeypatch.setattr(serving, "describe", lambda device: MACHINE)
    return SimpleNamespace(found=found, started=started, to=tmp_path / "serving.json")


def run(engines, monkeypatch, *options):
    """Run the command line, and return what it has written."""
    given = ["serving", "--batch", "2", *options, "--json", str(engines.to)]
    monkeypatch.setattr(sys, "argv", given)
    serving.main()
    return json.loads(engines.to.read_text())


def test_serving_is_timed_where_answers_are_the_engines_own(engines, monkeypatch):
    result = run(engines, monkeypatch)
    assert result["serving"]["check"] == dict(equal=1, tokens=3)
    (batch,) = result["serving"]["batches"]
    assert (batch["context"], batch["batch"]) == (131_072, 2)
    ratios = [batch["plans"][plan].get("ratio") for plan in serving.USUAL_PLANS]
    assert ratios == [None, 1, 0.5]
    assert batch["plans"]["stock"]["token_ms_rounds"] == [8, 8]
    page = report.TABLES["serving"](result)
    assert "FlashAttention, keys and values in FP8 |  | device | 8.00" in page
    page = report.TABLES["serving_default"](result)
    assert "| 131,072 | 2 | 2 | 8.00 | 8.00 | 4.00 | 0.50 | 0.50 |" in page
    assert "| 32,768 | 1 | 1 |" not in page  # it was measured with k = 100
    engines.to.unlink()
    engines.found["check kvindex"] = [dict(tokens=[8, 6, 7], gaps=[1.0, 1.0, 1.0])]
    with pytest.raises(SystemExit, match="token 0 is 5 without the plug-in and 8 with it"):
        run(engines, monkeypatch)
    assert not engines.to.exists()


def test_a_later_run_measures_what_is_missing(engines, monkeypatch, tmp_path):
    slow = engines.found.pop("time stock 131072x2")
    options = "--cases", "131072x2", "32768x4", "--resume", str(tmp_path / "results.json")
    for plan in ("stock-fp8", "kvindex"):
        engines.found[f"time {plan} 32768x4"] = FAST
    with pytest.raises(SystemExit, match=r"stock: it failed; .* the same command measures what is"):
        run(engines, monkeypatch, *options)
    assert not engines.to.exists()
    engines.started.clear()
    engines.found |= {"time stock 131072x2": slow, "time stock 32768x4": slow}
    result = run(engines, monkeypatch, *options)
    assert engines.started == ["time stock"]
    first, second = result["serving"]["batches"]
    assert (first["context"], second["context"], second["batch"]) == (131_072, 32_768, 4)
    assert [batch["plans"]["kvindex"]["ratio"] for batch in (first, second)] == [0.5, 0.5]
    with pytest.raises(SystemExit, match=r"^kvindex-fp8: it failed"):
        run(engines, monkeypatch, *options, "--plans", "kvindex-fp8", "--without-check")
    with pytest.raises(SystemExit, match="written: got 64, allowed is 128, with which the results"):
        run(engines, monkeypatch, *options, "--written", "64")


def test_tokens_that_differ_are_checked_again_and_nothing_is_timed(engines, monkeypatch, tmp_path):
    options = "--resume", str(tmp_path / "results.json")
    right = engines.found["check kvindex"]
    engines.found["check kvindex"] = [dict(tokens=[8, 6, 7], gaps=[1.0, 1.0, 1.0])]
    with pytest.raises(SystemExit, match="different tokens"):
        run(engines, monkeypatch, *options)
    assert engines.started == ["check stock", "check kvindex"]
    del engines.found["check kvindex"]
    with pytest.raises(SystemExit, match="kvindex: it failed"):
        run(engines, monkeypatch, *options)
    assert engines.started[2:] == ["check stock", "check kvindex"]
    engines.found["check kvindex"] = right
    assert run(engines, monkeypatch, *options)["serving"]["check"]["equal"] == 1


def test_an_engine_is_checked_against_that_of_its_dtype(engines, monkeypatch):
    engines.found |= {"check stock-fp8": [ANSWER], "check kvindex-fp8": [ANSWER]}
    engines.found["time kvindex-fp8 131072x2"] = FAST
    result = run(engines, monkeypatch, "--plans", "stock-fp8", "kvindex-fp8")
    assert engines.started[:2] == ["check stock-fp8", "check kvindex-fp8"]
    assert result["serving"]["check"] == dict(equal=3, tokens=3)


def test_results_of_another_machine_or_file_are_refused(engines, monkeypatch, tmp_path):
    file = tmp_path / "results.json"
    run(engines, monkeypatch, "--resume", str(file))
    monkeypatch.setattr(serving, "find_version", lambda package: "0.1")
    with pytest.raises(SystemExit, match=r"vllm: got '0.1', allowed is "):
        run(engines, monkeypatch, "--resume", str(file))
    file.write_text("{}")
    with pytest.raises(SystemExit, match="got a file that no earlier run"):
        run(engines, monkeypatch, "--resume", str(file))


def test_no_prompt_begins_with_one_of_another_case():
    given = serving.arguments(["--cases", "1024x3", "2048x2", "2048x4", "--json", "x"])
    made = [one for case in given.cases for one in serving.prompts(given, case)]
    assert len({tuple(one[:256]) for one in made}) == len(made) == 9


def test_pages_are_those_of_the_largest_case(monkeypatch):
    monkeypatch.setattr(serving, "opened", lambda *given, **options: options)
    given = serving.arguments(["--cases", "131072x1", "1024x16", "--json", "x"])
    assert serving.large(given, "kvindex", "")["pages"] < 600


def test_without_a_file_of_results_the_first_failure_ends_the_run(engines, monkeypatch):
    del engines.found["time stock 131072x2"]
    with pytest.raises(SystemExit, match=r"stock: it failed; nothing is written$"):
        run(engines, monkeypatch, "--without-check")
    assert engines.started == ["time stock"]


def test_no_engine_starts_after_the_given_time(engines, monkeypatch, tmp_path):
    options = "--seconds", "1e-9", "--resume", str(tmp_path / "results.json")
    with pytest.raises(SystemExit, match="stock: the time was over before the process for 'check'"):
        run(engines, monkeypatch, *options)
    assert not engines.started


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--cases", "400x1"], "context: got 400, allowed is at least 512"),
        (["--cases", "1024x0"], "batch: got 0, allowed is at least 1"),
        (["--seconds", "5"], "seconds: got no --resume"),
        (["--resume", "x.json"], "resume: got x.json, which is the file of --json, too"),
        (["--cases", "1024x1", "--arrivals", "1"], "cases: allowed is --context and --batch"),
        (["--cases", "1024"], "argument --cases: invalid"),
        (["--prefill-mass", "1.5"], "prefill_mass: got 1.5, allowed is more than 0, at most 1"),
        (["--arrivals", "nan"], "arrivals: got nan, allowed is more than 0"),
    ],
)
def test_wrong_options(options, reason, capsys):
    with pytest.raises(SystemExit):
        serving.arguments([*options, "--json", "x.json"])
    assert reason in capsys.readouterr().err


def test_a_served_models_configuration_is_the_shapes():
    shape = shapes.SHAPES["qwen3-8b"]
    config = serving.configuration(shape, 4, 4096)
    made = importlib.import_module("transformers").Qwen3Config(**config)
    assert (made.num_hidden_layers, made.head_dim, made.hidden_size) == (4, 128, 4096)
    given = serving.arguments(["--context", "1024", "--shared", "--json", "x"])
    first, second = serving.prompts(given, serving.Case(1024, 2))
    assert first[:768] == second[:768]
    assert first != second


def test_requests_that_arrive_wait_for_tokens(monkeypatch):
    class Core:
        """Writes a token of each request per step."""

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
    assert [len(found[kind]) for kind in ("first_ms", "between_ms")] == [2, 4]
    assert found["seconds"] >= 0.02
    shown = serving.arrival_figures(found)
    assert 0 <= shown["first_ms"] <= shown["first_ms_99"]
    assert shown["requests_per_s"] * found["seconds"] == pytest.approx(2)
    assert shown["tokens_per_s"] * found["seconds"] == pytest.approx(6)


def test_a_batch_is_generated_before_requests_arrive(monkeypatch):
    """Otherwise steps of several sequences would compile kernels while requests run."""
    calls = []
    monkeypatch.setattr(serving, "large", lambda *_: SimpleNamespace(llm_engine="core"))
    monkeypatch.setattr(serving, "written", lambda *given: calls.append(given[1:]))
    monkeypatch.setattr(serving, "arriving", lambda core, due, count: calls.append((due, count)))
    options = ["--batch", "3", "--arrivals", "inf", "--requests", "6", "--json", "x.json"]
    serving.arrived(serving.arguments(["--context", "20000", *options]), "stock", "")
    (warm, count), (due, _) = calls
    assert [len(ids) for ids in warm] == [20_000, 16_384, 16_384]
    assert count < serving.BLOCK  # fits into the engine's longest sequence
    prompts = [ids for _, ids in due]
    beginnings = {tuple(ids[:16]) for ids in [*warm, *prompts]}
    assert len(beginnings) == 3 + 6  # the prefix cache contains none
    assert {at for at, _ in due} == {0}


def test_the_throughput_of_requests_that_arrive_at_the_beginning(engines, monkeypatch, tmp_path):
    seconds = {"stock": 8.0, "kvindex": 6.0, "kvindex-sparse": 4.0}
    for plan, taken in seconds.items():
        found = dict(first_ms=[1.0, 2.0], between_ms=[3.0] * 14, seconds=taken)
        engines.found[f"arrive {plan}"] = found
    options = ["--arrivals", "inf", "--layers", "9", "--plans", *seconds, "--without-check"]
    result = run(engines, monkeypatch, *options, "--resume", str(tmp_path / "results.json"))
    assert engines.started == [f"arrive {plan}" for plan in seconds]
    assert result["serving"]["settings"]["arrivals"] == "inf"
    ratios = [one.get("throughput_ratio") for one in result["serving"]["arrivals"].values()]
    assert ratios == [None, pytest.approx(8 / 6), 2]
    page = report.TABLES["throughput"](result)
    assert "shape of qwen3-8b with 9 layers, in" in page
    assert "| FlashAttention | full attention | 8.0 | 0.250 | 2 |  |" in page
    assert "| sparse (`sampled`), about 21% of the blocks | 4.0 | 0.500 | 4 | 2.00 |" in page


def test_options_of_the_plug_in(monkeypatch):
    opened = []
    monkeypatch.setattr(serving, "opened", lambda *given, **options: opened.append(options))
    options = ["--json", "out", "--k", "50", "--dense-below", "8192"]
    for more in ([], ["--no-dense-graphs", "--dense-below", "auto"]):
        serving.large(serving.arguments(options + more), "kvindex", "folder")
    asked = dict(index="pariskv:sign_decoder=mean", k=50)
    sizes = dict(layers=None, tokens=131_072 + 128 + 256, rows=1, pages=515)
    assert opened == [
        asked | sizes | dict(dense_below=8192),
        asked | sizes | dict(dense_below="auto", dense_graphs=False),
    ]
    serving.large(serving.arguments([*options, "--prefill-mass", "0.3"]), "kvindex-sparse", "")
    how = dict(prefill="sparse", prefill_selector="sampled", prefill_mass=0.3)
    assert opened[2] == opened[0] | how
    Options.of(asked | how)  # raises an error if the plug-in does not know an option
