"""docs/field.md: its tables as a text goes on, and the figures in its words."""

import json
import re
from pathlib import Path

from benchmarks.tabling.field import field as table_of
from tests.test_field_benchmark import SETTING, field, layer, run_of

ROOT = Path(__file__).parents[1]
FIGURE = r"\d*\.\d\d\d?(?![\d%])"
NAMED = re.compile(
    rf"`([^`]+)`[ (]+(?:errs by |is at |at )?({FIGURE})(?:(?: and | for )({FIGURE}))?"
)
"""An index, and one or two figures said of it."""

RUNS = {
    "At 7,000 tokens": ["7000"],
    "As a text goes on": ["7000", "own"],
    "At 32,000 tokens": ["32000"],
}
"""Which runs a section of the page is about, where that is not all."""


def known(run, name=None):
    """Figures of a run, or of one of its indexes, as the page writes them."""
    found = set()
    for line in run["indexes"]:
        if name not in (None, line["index"], line["index"].split(":")[0]) and not (
            line["index"].startswith(f"pariskv:preset={name}")
        ):
            continue
        cells = [*line["rows"].values(), *line.get("along", {}).values()]
        layers = line["by_layer"].values()
        fine = [at[part] for at in cells for part in ("recall", "coverage", "error")]
        fine += [at["error_worst_layer"] for at in cells] + [at["error"] for at in layers]
        rough = [at[part] for at in cells for part in ("of_exact", "search_ms") if part in at]
        rough += [line.get("cpu_search_ms", 0.0)]
        found |= {f"{value:.3f}" for value in fine} | {f"{value:.2f}" for value in rough}
    return {figure.removeprefix("0") for figure in found}


def wrong(page, result):
    """Figures in words that are none of the index and of the runs that they are said of."""
    runs = {
        "own" if run["sampled"] else str(run["setting"]["tokens"]): run for run in result["runs"]
    }
    words = page.split("<!-- field:end -->")[1]
    found = []
    for section in words.split("\n## ")[1:]:
        about = [runs[name] for name in RUNS.get(section.splitlines()[0], runs)]
        for name, *figures in NAMED.findall(section):
            all_of = set().union(*(known(run, name) for run in about))
            found += [
                (name, each) for each in figures if each and each.removeprefix("0") not in all_of
            ]
        all_of = set().union(*(known(run) for run in runs.values()))
        found += [
            each for each in re.findall(r"(?<![\d.])\.\d{3}(?!\d)", section) if each not in all_of
        ]
    return found


def test_figures_in_the_page_are_those_of_the_index_that_they_are_said_of():
    """Its tables are held to the results by test_results.py."""
    page = (ROOT / "docs/field.md").read_text()
    result = json.loads((ROOT / "benchmarks/results/field.json").read_text())
    assert wrong(page, result) == []
    assert len(NAMED.findall(page)) > 60
    for said, other in (
        ("`quest` .213", "`quest` .222"),  # shadowkv's
        ("`pqcache` 3.98 and 1.69", "`pqcache` 3.98 and 1.48"),  # louiskv's
        ("`icecache` .354", "`icecache` .134"),  # at another length
    ):
        assert said in page
        assert len(wrong(page.replace(said, other), result)) == 1


def test_what_the_model_wrote_itself_is_in_the_last_table_alone():
    compared = field.Comparison(SETTING, [32], [layer()])
    for spec in ("exact", "magicpig:bits=4"):
        compared.measure(spec, 0)
    run = run_of(compared, rows=[32])
    del run["indexes"][-1]  # the frozen one
    own = run_of(compared, rows=[32], sampled=True)
    text = table_of({"runs": [run, own]})
    assert text.count("| index |") == 2
    whole, last = text.split("**As a text goes on:**")
    assert whole.count("\n| `") == 2
    assert "*0K own* the last 128 of 420 tokens of a, sampled by the model itself, 1 layers" in last
    drawn = last.splitlines()[-1].split(" | ")
    assert len(drawn) == 1 + 2 * 3
    pieces, stale = own["indexes"][3]["along"].values(), own["indexes"][4]["along"].values()
    before, after = ([*pieces][at]["of_exact"] for at in (0, -1))
    assert drawn[2] == drawn[5]
    assert drawn[2].startswith(f"{before:.2f} → {after:.2f} (")
    assert drawn[3].strip() == ""
    assert drawn[6].startswith(f"{[*stale][-1]['of_exact']:.2f} (")
