"""Tables in README and docs say what the results say."""

import json
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_what_the_results_say(name):
    """If not: python -m benchmarks.tables."""
    page = (ROOT / name).read_text()
    assert tables.rewritten(page) == page


def test_a_changed_figure_would_be_noticed():
    page = (ROOT / "README.md").read_text().replace("nats", "bits")
    assert tables.rewritten(page) != page


def test_every_script_is_in_the_list():
    listed = (ROOT / "benchmarks/README.md").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert "__main__" not in path.read_text() or f"`{path.name}`" in listed, path.name


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_names_its_machine(path):
    machine = json.loads(path.read_text())["machine"]
    assert machine["processor"]
    assert machine["torch"]
