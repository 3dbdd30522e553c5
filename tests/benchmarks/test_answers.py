"""Tables of answers: of whole comparisons, or only of prompts that all indexes have answered."""

import importlib
import json

import pytest

from benchmarks import answers, report
from benchmarks.reporting import answers as reporting
from benchmarks.reporting import parts
from kvindex_adapters.evaluate.compare.records import ANSWERS, FULL, Key, Records
from kvindex_adapters.evaluate.compare.summary import summarize
from kvindex_adapters.evaluate.output_files import write_json
from tests.benchmarks.running import MACHINE, ran


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """Store a comparison whose instances have depths. There are no other results."""
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


def test_tables_and_pictures_have_every_index_and_the_figures_of_the_comparison(answered, tmp_path):
    assert answered["machine"] == MACHINE
    for name in ("field", "lengths", "rows"):
        page = report.TABLES[f"answers_{name}"](answered)
        lines = {line.split(" | ")[0] for line in page.splitlines()}
        assert {"| full attention", "| `exact`", "| `pariskv`", "| `quest`"} <= lines
        # this comparison has one length and one k
        assert ("| `short`" in lines) == (name == "field")
    assert "Each cell of the picture has 1 to 1" in report.TABLES["answers_depth"](answered)
    for index, cell in ((FULL, 1), ("pariskv", -0.5), ("quest", -1)):
        assert reporting.depth_cells(answered, index) == {(4096, 0.2): cell}
    pictures = importlib.import_module("benchmarks.reporting.pictures")
    first, second = pictures.answers_depth(answered).axes
    assert [text.get_text() for text in (*first.texts, *second.texts)] == ["100", "-50"]
    whole = json.loads((tmp_path / "results.json").read_text())
    (row,) = parts.some(
        whole["differences"], base=FULL, index="quest", k=32, task=None, tokens=None
    )
    (kept,) = parts.some(answered["differences"], base=FULL, index="quest", k=32, tokens=None)
    assert kept["difference"] == pytest.approx(row["difference"], rel=1e-3)
    with pytest.raises(ValueError, match=r"schema: got None, allowed is 'kvindex\.compare/1'"):
        answers.reduced({})


def test_a_run_that_ended_early_is_told_of_the_prompts_that_all_have_answered(answered, tmp_path):
    found = answers.answered_by_all(tmp_path, ["pariskv", "quest"])
    assert {row["index"] for row in found["accuracy"]} == {FULL, "pariskv", "quest"}
    counts = {row["count"] for row in found["accuracy"] if row["task"] is row["tokens"] is None}
    assert len(counts) == 1
    assert "deep" not in found["tasks"]  # no index has answered it at each k
    with pytest.raises(ValueError, match=r"index: got \['nobody'\], which have no answers in"):
        answers.answered_by_all(tmp_path, ["pariskv", "nobody"])
