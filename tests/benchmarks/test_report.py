"""Tables of pages equal the results, and pages mention every script and result."""

import importlib
import json

import pytest

from benchmarks import report
from tests.benchmarks.running import ROOT


@pytest.mark.parametrize("path", report.pages(), ids=lambda path: path.name)
def test_tables_are_what_the_results_say(path):
    """If this fails, run python -m benchmarks.report."""
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
                # an error before any work; the formatter may break the line
                assert " ".join(told.split()).startswith(", type=output("), path.name
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        assert {"processor", "torch"} <= json.loads(path.read_text())["machine"].keys(), path


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("benchmarks.reporting.pictures")
    pictures.draw(tmp_path, ["decode_step", "prefill_decoder", "recall"])
    assert (tmp_path / "recall.png").stat().st_size > 10_000


def prompt_result(**changes):
    """A result of `generation --prefill` with the fields that the tables of prompts read."""
    times = {"indexed": (3.0, 2.0), "full": (2.0, 1.6), "pooled=0.2": (1.5, 1.2)}
    found = dict(tokens=4096, chunk=1024, first={}, memory={"indexed": 1.25})
    for plan, (first, later) in times.items():
        found["first"][plan] = {"seconds": [first]}
        rounds = [later, later + 0.2, later + 0.1]
        quartiles = dict(seconds_low=later, seconds_high=later + 0.2)
        found[plan] = dict(seconds=later + 0.1, seconds_rounds=rounds, **quartiles)
    found["indexed"]["peak_bytes"] = 5e9
    machine = dict(gpu="NVIDIA H200", torch="2", transformers="5")
    about = dict(index="exact", model="tiny", dtype="bfloat16", machine=machine)
    return about | {"prefill": found | changes}


@pytest.fixture
def alone(monkeypatch):
    """Let tables of prompts read one result, without the files in the repository."""
    monkeypatch.setattr("benchmarks.reporting.prompts.stored_like", lambda name, one: [one])


@pytest.mark.usefixtures("alone")
def test_prompts_are_compared_with_the_floor():
    floor = dict(seconds=1.0, seconds_low=1.0, seconds_high=1.0, seconds_rounds=[1.0, 1.0, 1.1])
    page = report.TABLES["prefill_decoder"](prompt_result(floor=floor))
    line = "| 4,096 | `exact` | 3.00 | 2.10 (2.00 to 2.20) | 2.000 | 1.235 | 5.00 | 1.250 |"
    assert line in page  # 2.1 / 1.7 is the median of the ratios to full attention
    assert "| 4,096 | `exact`, sparse (`pooled`), 20% of the blocks | 1.50 | 1.30 (" in page
    assert "| 4,096 | floor |  | 1.00 (1.00 to 1.00) |" in page
    assert "random blocks" in page


def test_the_readme_has_the_fastest_prompt():
    line = report.TABLES["prompt_summary"](prompt_result())
    assert "takes 1.7 s with full attention, 2.1 s with `exact`, and 1.3 s with `exact` if" in line
    assert "reads 20% of the blocks of the prompt (H200, shape of tiny; [more]" in line


@pytest.mark.usefixtures("alone")
def test_prompts_without_a_floor_or_later_runs_have_empty_cells():
    result = prompt_result()
    del result["prefill"]["pooled=0.2"], result["prefill"]["memory"]
    page = report.TABLES["prefill_decoder"](result)
    assert "| 4,096 | full attention | 2.00 | 1.70 (1.60 to 1.80) |  |  |  |  |" in page
    assert "| 4,096 | `exact`, sparse (`pooled`), 20% of the blocks | 1.50 |  |  |  |  |  |" in page
    assert "*floor*" not in page
    page = report.TABLES["prefill_summary"](result)
    head = "| tokens | full attention | `exact` | `exact`, sparse (`pooled`) |"
    assert head in page
    assert "| 4,096 | 1.70 (2.00) | 2.10 (3.00) | (1.50), 20% |" in page


def test_prompts_of_two_machines_are_told_apart(monkeypatch):
    other = prompt_result(tokens=1024)
    other["machine"] = other["machine"] | {"gpu": "NVIDIA H100 80GB HBM3"}
    path = "benchmarks.reporting.prompts.stored_like"
    monkeypatch.setattr(path, lambda name, one: [one, other])
    page = report.TABLES["prefill_summary"](prompt_result())
    assert page.index("| 1,024, H100 |") < page.index("| 4,096, H200 |")


@pytest.mark.usefixtures("alone")
def test_selectors_that_kvindex_lacks_are_left_out():
    def cell(text, selector, kept, **more):
        return dict(text=text, tokens=256, selector=selector, kept=kept) | more

    change = dict(kl_mean=0.0123, agreement=0.5)
    cells = [cell("prose", "dense", 1.0), cell("prose", "rows:mass=0.9", 0.3, **change)]
    cells += [cell("prose", "oracle:mass=0.9", 0.25, **change)]
    cells += [cell("code", "oracle:mass=0.9", 0.4, **change)]
    cells += [cell("prose", "sampled:mass=0.9", 0.3, **change)]
    cells += [cell("prose", "sampled:mass=0.9:queries=16", 0.5, **change)]
    cells += [cell("prose", "pooled:mass=0.9", 0.2, **change) | {"tokens": 128}]
    machine = dict(gpu="NVIDIA H200", torch="2", transformers="5")
    result = dict(cells=cells, lora="lora", dtype="float32", last=9, dense_last=4, machine=machine)
    page = report.TABLES["selectors_all"](result)
    assert "| 256 | `oracle:mass=0.9` | 25% to 40% | 0.012 (50%) | 0.012 (50%) |" in page
    assert "| 256 | `sampled:mass=0.9:queries=32` | 30% | 0.012 (50%) |  |" in page
    assert "rows" not in page
    assert "dense" not in page
    users = report.TABLES["selectors"](result)
    assert "text of 256 tokens" in users
    assert "| `oracle:mass=0.9` | 25% to 40% | 0.012 (50%) | 0.012 (50%) |" in users
    assert "queries=16" not in users
    assert "pooled" not in users  # measured with a shorter text only


def test_kernels_for_chosen_blocks_are_compared():
    def cell(fraction, **kernels):
        found = {
            name: dict(ms=ms, ms_low=ms - 0.1, ms_high=ms + 0.1, tflops=rate, prepare_ms=0.5)
            for name, (ms, rate) in kernels.items()
        }
        return dict(fraction=fraction, kernels=found, skipped={"flashinfer-fa3": "no GPU"})

    cells = [
        cell(0.25, full=(14.0, 600.0), kvindex=(4.2, 450.0), flex=(5.5, 400.0)),
        cell(0.1, kvindex=(2.1, 390.0)),
    ]
    result = dict(cells=cells, heads=32, kv_heads=8, head_dim=128, tokens=131_072, queries=4096)
    machine = dict(gpu="NVIDIA H200", torch="2", transformers="5")
    result |= dict(dtype="bfloat16", machine=machine, versions={"flashinfer-python": "0.7"})
    page = report.TABLES["block_sparse"](result)
    assert "| kernel | 25% of the blocks: ms, TFLOP/s | 10% of the blocks: ms, TFLOP/s |" in page
    assert "| kvindex, in Triton | 4.20 (4.10 to 4.30), 450 | 2.10 (2.00 to 2.20), 390 |  |" in page
    line = "| FlexAttention of torch, compiled | 5.50 (5.40 to 5.60), 400 |  | 0.50 |"
    assert line in page
    assert "takes 0.30 of the time with 25% of the blocks (0.75 of the rate)." in page
    text = "Not measured: FlashInfer 0.7, `BlockSparseAttentionWrapper`, FA3 (no GPU)."
    assert text in page
    result["versions"] = {"flashinfer-python": "not installed"}
    assert "Not measured: FlashInfer, `Block" in report.TABLES["block_sparse"](result)
