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
    pictures.draw(tmp_path, ["decode_step", "recall"])
    assert (tmp_path / "recall.png").stat().st_size > 10_000
