"""Decode steps of a model, a decoder and ranks are timed in turns; different tokens raise an
error."""

import re

import pytest
import torch

from benchmarks import generation, ranks, report
from benchmarks.common import attached, decoder, decoding, prompt, token
from benchmarks.common import ranks as measuring
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session
from tests.benchmarks.running import ran
from tests.cuda.graphs import WholeGraph, recorded
from tests.cuda.pages import let_read_pages
from tests.support.fused import on_a_cpu


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
    with pytest.raises(SystemExit, match="decode step 0 gives other outputs"):
        generation.main()


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


def test_a_prefill_is_timed_with_an_index_and_without(tiny_decoder, monkeypatch):
    given = ["--prefill", 700, "--sparse", "pooled=0.5", "sampled=0.5", *tiny_decoder]
    result = ran(generation.main, given, monkeypatch)
    found = result["prefill"]
    assert (found["rounds"], found["ratio"].keys()) == (
        3,
        {"indexed", "full", "pooled=0.5", "sampled=0.5"},
    )
    assert found["needed_bytes"]["layer"] == 2 * 700 * 64 * 4
    assert found["over_bytes"] == sum(found["needed_bytes"].values()) - 700 * 64 * 4
    assert len([*prompt.shown(found)]) == 5
    monkeypatch.setattr("benchmarks.reporting.prompts.stored_like", lambda name, one: [one])
    page = report.TABLES["prefill_decoder"](result)
    assert f"| 700 | floor |  | {found['floor']['seconds']:.2f} (" in page
    page = report.TABLES["prefill_summary"](result)
    assert ", sparse (`pooled`) |" in page
    assert page.count("), 50% |") == 2
    first = found["first"]["full"]["seconds"][0]
    assert f"| 700 | {found['full']['seconds']:.2f} ({first:.2f}) |" in page


@pytest.mark.slow
def test_transformers_reads_a_prompt_beside_the_decoder(tiny_decoder, monkeypatch):
    given = ["--prefill", 700, "--through", "transformers", *tiny_decoder]
    result = ran(generation.main, given, monkeypatch)
    found = result["prefill"]
    assert found["ratio"].keys() == {"full", "transformers", "stock", "floor"}
    lines = [*prompt.shown(found)]
    assert "times the decoder with the index" in lines[2]
    assert " through transformers, " in report.TABLES["prefill_through"](result)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prefill", "9"], "through, prefill: got one without --decoder"),
        (
            ["--decoder", "qwen3-8b", "--prefill", "9", "--batch", "2"],
            "batch: got 2, but several sequences need --decoder",
        ),
        (["--decoder", "qwen3-8b", "--batch", "0"], "batch: got 0, allowed is at least 1"),
        (
            ["--decoder", "qwen3-8b", "--through", "transformers", "--weights", "fp8"],
            "weights: got fp8 with --through transformers, allowed is plain",
        ),
        (["--decoder", "qwen3-8b", "--rows", "50", "8"], "rows: got [50, 8], allowed are 16 to"),
        (
            ["--decoder", "qwen3-8b", "--prefill", "9", "--rows", "50"],
            "rows: got [50], allowed with --decoder, without --through and --prefill",
        ),
        (["--decoder", "qwen3-8b", "--verified", "3=5"], "got '3=5', allowed is N=K with 1 <= K"),
        (["--verified", "3=4"], "verified: got [(3, 4)], allowed with --decoder"),
        (["--decoder", "qwen3-8b", "--drafts", "0"], "drafts: got [0], allowed are numbers from 1"),
    ],
)
def test_parts_of_a_decoder_that_do_not_fit_are_refused(given, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        generation.arguments([*given, "--json", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_of_transformers_are_timed_beside_the_decoders(tiny_decoder, monkeypatch):
    given = ["--through", "transformers", *tiny_decoder]
    given[given.index("--turn") + 1] = 16
    pytest.importorskip("triton")
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(attached, "device_refusal", lambda device: None)
    with recorded(WholeGraph) as graphs:
        found = ran(generation.main, given, monkeypatch)["transformers"]
    assert found["rounds"] == 1
    assert found["ratio"].keys() == {"fused", "token_graph", "layer_graphs"}
    for told in found["replays"].values():
        replays, tokens = map(int, re.findall(r"\d+", told)[:2])
        assert replays > tokens // 2
        assert graphs.replays > 2 * replays  # the decoder's too
    assert len([*attached.shown(found)]) == 7
    assert min(found[plan]["token_ms"] for plan in found["hit_rates"]) > found["floor_ms"]


@pytest.mark.slow
def test_a_decoders_tokens_are_timed_in_turns_and_wrong_ones_are_not(tiny_decoder, monkeypatch):
    pytest.importorskip("triton")  # rounds to FP8
    given = ["--weights", "fp8", "--batch", 2, *tiny_decoder]
    with recorded(WholeGraph) as graphs:
        result = ran(generation.main, given, monkeypatch)
    found = result["decoder"]
    monkeypatch.setattr("benchmarks.reporting.tokens.stored_like", lambda name, one: [one])
    page = report.TABLES["decoder_tokens"](result)
    name = "tiny, weights in FP8, 520, 2 sequences"
    assert f"| {name} | none | no attention | {found['weights']['device_ms']:.2f} (" in page
    assert graphs.replays > 110  # more steps than those without a search
    assert (found["rounds"], found["over"]) == (2, "dense")
    assert found["ratio"].keys() == {"weights", "growing", "cached", "uncached"}
    per_s = found["tokens_per_s"]["dense"]
    assert per_s == pytest.approx(1e3 * 2 / found["dense"]["token_ms"])
    assert len([*decoder.shown(found)]) == 6
    choose = Sampler.choose
    monkeypatch.setattr(Sampler, "choose", lambda self, logits: choose(self, torch.rand(2, 101)))
    with (
        recorded(WholeGraph),
        pytest.raises(SystemExit, match="a small model generates different tokens"),
    ):
        generation.main()


@pytest.mark.slow
def test_tokens_are_timed_at_given_numbers_of_rows(tiny_decoder, monkeypatch):
    """The graph of a plan is captured anew in each turn, and not for another limit."""
    with recorded(WholeGraph) as graphs:
        found = ran(generation.main, ["--rows", 40, *tiny_decoder], monkeypatch)["decoder"]
    assert found["over"] == "cached"
    assert found["ratio"].keys() == {"weights", "dense", "growing", "uncached", "auto"}
    assert len(found["rows"]) == found["rounds"] == 2
    (error,) = found["errors"]
    for rows in found["rows"]:
        assert 30 < rows["mean"] < 50
        assert rows["by_layer"] == [rows["mean"]]
        assert 16 <= rows["p99"] <= 260
    assert 1e-4 < error < 10
    lines = [*decoder.shown(found)]
    assert len(lines) == 7
    assert f"{found['rows'][-1]['mean']:.0f} rows (99th percentile" in lines[-1]
    assert graphs.made < 20


def test_sequences_keep_different_numbers_of_tokens():
    assert token.uneven(3, 7, 4) == [2, 4, 2, 4]
    assert token.uneven(3, 7, 3) == [2, 4, 3]
    for kept, most, batch in ((1, 7, 4), (7, 7, 4), (3, 7, 1)):
        assert token.uneven(kept, most, batch) == kept


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_steps_of_several_tokens_are_timed_and_wrong_ones_are_not(tiny_decoder, monkeypatch, batch):
    monkeypatch.setattr(token, "UPDATE", 64)  # no tokens leave the window between checked steps
    given = ["--drafts", 3, "--batch", batch, *tiny_decoder]
    with recorded(WholeGraph):
        found = ran(generation.main, given, monkeypatch)["decoder"]
    assert found["over"] == "cached"
    assert {"weights+3", "cached+3"} < found["ratio"].keys()
    assert len(found["hit_rates"]["cached+3"]) == found["rounds"] == 2
    lines = [*decoder.shown(found)]
    assert f"{found['ratio']['cached+3']['token_ms']:.3f} of cached" in lines[-1]
    score = Session.captured_score
    wrong = property(lambda self: lambda ids: score(self, ids) * 1.5)
    monkeypatch.setattr(Session, "captured_score", wrong)
    with recorded(WholeGraph), pytest.raises(SystemExit, match="drafts: step 0 of 4 tokens"):
        generation.main()


@pytest.mark.slow
def test_rounds_that_full_attention_verifies_are_timed(tiny_decoder, monkeypatch):
    pytest.importorskip("triton")
    let_read_pages(monkeypatch)
    given = ["--verified", "0=1", "3=2", "--batch", 4, *tiny_decoder]  # keeps 1 and 3 tokens
    with recorded(WholeGraph) as graphs:
        result = ran(generation.main, given, monkeypatch)
    found = result["decoder"]
    assert graphs.made > 4  # those of verifications, too
    assert found["over"] == "dense"
    assert {"verified+0", "verified+3"} < found["ratio"].keys()
    assert found["kept"] == {"0": 1, "3": 2}
    page = report.TABLES["verified_host"](result)
    assert page.count("\n| 3 | ") == 1


@pytest.mark.slow
def test_ranks_are_timed_beside_one_and_wrong_ones_are_not(tiny_decoder, monkeypatch):
    for name, value in dict(CHECKED=280, TRIED=5).items():
        monkeypatch.setattr(measuring, name, value)
    given = [*tiny_decoder]
    given[given.index("--written") + 1] = 8
    given = [*given[:-2], "--device", "cpu", "--index", "pariskv", "--block", 16, *given[-2:]]
    with recorded(WholeGraph) as graphs:
        result = ran(ranks.main, given, monkeypatch)
    assert graphs.replays > 50
    found, result["machine"]["gpus"] = result["ranks"], 2
    page = report.TABLES["ranks"](result)
    assert f"| one GPU, 520 tokens | {found['one']['device_ms']:.2f} (" in page
    assert "| the same, without sums (wrong results) | " in page
    assert found["ratio"].keys() == {"tokens", "heads", "silent"}
    assert found["check"].keys() == {"heads", "tokens"}
    assert max(found["check"].values()) < 1e-3
    assert len(ranks.shown(found)) == 6
    monkeypatch.setattr(measuring, "CLOSE", 1e-9)
    with (
        recorded(WholeGraph),
        pytest.raises(SystemExit, match=r"heads: the check failed; nothing is timed"),
    ):
        ranks.main()


def test_layers_of_the_benchmark_take_the_arguments_of_a_session():
    layer = token.Nothing()
    assert layer.count_replay([2, 1], 3, full=True, held=True) is False
    assert layer.prepare_next(4, 2) is layer.prepare_replay(4)
