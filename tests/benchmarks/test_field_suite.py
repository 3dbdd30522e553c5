"""The table of the suite `field` shows every cell, with figures or with a reason."""

import json

import pytest

from benchmarks import field_suite, report
from kvindex_adapters.evaluate.compare.records import FULL, SKIPPED, TEXT, Key, Records
from kvindex_adapters.evaluate.compare.report import write_report
from kvindex_adapters.evaluate.compare.settings import Settings
from tests.benchmarks.running import MACHINE

SETTINGS = Settings("folder/model.gguf", "named in each result", steps=16, suite="field")


def record(method, budget, scale, **more):
    return {
        **{"method": method, "budgets": [budget], "kl": [scale] * 16, "same": [1] * 16},
        **{"error_by_step": [scale] * 16, "error_by_layer": [scale, 2 * scale, 0.0]},
        **{"recall": 0.5, "coverage": 0.75, "weighted": False, "rows_found": 120.0},
        **{"rows_read": 500.0, "rows_full": 4000.0, "key_bytes": 16.0, "nbytes": {"rows": 8}},
        **{"step_bytes": 10.0, "scan_bytes": 20.0, "read_bytes": 50.0, "full_bytes": 100.0},
        **more,
    }


@pytest.fixture
def folder(tmp_path):
    records = Records(tmp_path)
    records.run_on(MACHINE)
    text = "prose.txt (sha256 0)"
    full = record("", "", 0.0, recall=1.0, budgets=[])
    records.add(Key(TEXT, 4096, FULL, text=text), full)
    records.add(Key(TEXT, 4096, "exact", 128, text=text), record("exact", "128", 0.01))
    sampled = record("pariskv", "128", 0.02, weighted=True)
    records.add(Key(TEXT, 4096, "pariskv", 128, text=text), sampled)
    old = record("quest", "published", 0.03, recall=None, read_bytes=None, key_bytes=None)
    records.add(Key(TEXT, 4096, "quest", 1024, text=text), old)
    about = {"method": "faiss-flat", "budgets": ["512"], "failed": True}
    key = Key(SKIPPED, 4096, "faiss-flat", 512, text=text)
    records.add(key, {**about, "words": "faiss is not installed"})
    write_report(tmp_path, SETTINGS, Records(tmp_path))
    return tmp_path


def test_the_table_has_every_cell(folder, capsys):
    field_suite.main([str(folder), "--json", str(folder / "out.json")])
    result = json.loads((folder / "out.json").read_text())
    assert result["machine"] == MACHINE
    page = report.TABLES["field_suite"](result)
    assert page in capsys.readouterr().out
    measured, _, others = page.partition("11 of 14 cells were not measured:")
    lines = {line.split(" | ")[0]: line for line in measured.splitlines()}
    error = "0.010 (0.010 to 0.010) | 0.02 (layer 1) | 0.0100 | 1.00 | 0.750 | 0.500"
    assert lines["| `exact`"] == f"| `exact` | 128 | {error} | 120 | 16 | 50% |"
    assert "| 2.00 |" in lines["| `pariskv`\\*"]
    assert "| published (1,024) | 0.030" in lines["| `quest`"]
    assert lines["| `quest`"].endswith("| 0.750 |  | 120 |  |  |")
    assert "| `faiss-flat` | 512 | 4,096 | faiss is not installed |" in others
    assert "| `quest` | 128 | 4,096 | not measured yet |" in others
    assert "| `pariskv:preset=paper` | published | 4,096 | not measured yet |" in others
    assert "**4,096 tokens** of prose.txt, 16 decode steps, SmolLM2-135M in float32." in page


def test_a_cell_about_fewer_texts_says_so(tmp_path):
    records = Records(tmp_path)
    records.run_on(MACHINE)
    texts = ("prose.txt (sha256 0)", "prose.txt (sha256 1)")
    for text in texts:
        records.add(Key(TEXT, 4096, "exact", 512, text=text), record("exact", "512", 0.01))
    records.add(Key(TEXT, 4096, "quest", 512, text=texts[0]), record("quest", "512", 0.02))
    other = Key(TEXT, 8192, "exact", 512, text="code.txt (sha256 2)")
    records.add(other, record("exact", "512", 0.01))
    write_report(tmp_path, SETTINGS, Records(tmp_path))
    assert (tmp_path / "report.html").read_text().count("1 of 2 texts") == 1
    page = report.TABLES["field_suite"](
        field_suite.reduced(json.loads((tmp_path / "field.json").read_text()))
    )
    assert "**4,096 tokens** of prose.txt, prose.txt," in page
    assert "**8,192 tokens** of code.txt," in page
    assert page.count(" of 2 texts") == 1
    assert "| `exact` | 512 | 0.010" in page
    assert "| `quest` | 512, 1 of 2 texts | 0.020" in page


def test_another_format_is_an_error():
    with pytest.raises(ValueError, match=r"schema: got None, allowed is 'kvindex\.field/1'"):
        field_suite.reduced({})
