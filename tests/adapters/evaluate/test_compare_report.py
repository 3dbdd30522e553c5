"""The report works offline and contains every index; pictures label few lines; tables are right."""

import csv
import itertools
import json
import random
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from kvindex_adapters.evaluate.compare.lines import NAMED, named, panels
from kvindex_adapters.evaluate.compare.pictures import (
    DARK,
    GAP,
    LIGHT,
    NARROW,
    _apart,
    narrow_pictures,
    picture,
)
from kvindex_adapters.evaluate.compare.records import ANSWERS, FAILURE, FULL, TEXT, Key, Records
from kvindex_adapters.evaluate.compare.report import write_report
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.summary import summarize
from kvindex_adapters.evaluate.compare.tables import KEEPS, tables

SETTINGS = Settings("folder/<model>", "a text (sha256 0)", regions=dict(sink=64))
INDEXES = ["pariskv", "exact", *(f"index-{i}:rate={i / 7:.3f}+sample" for i in range(28))]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

INTERACT = """<script>{
const heads = document.querySelectorAll("#overview ~ .scroll thead button");
heads[2].click(); heads[2].click();
const filter = document.getElementById("filter");
filter.value = "index-3"; filter.dispatchEvent(new Event("input"));
const about = document.querySelector("#overview ~ .hidden-columns").textContent;
console.log("sorted and filtered;", about);
}</script>"""


def steps(rng, scale, seed_rows):
    kl = [scale * rng.random() for _ in range(64)]
    about = dict(kl=kl, same=[int(value < 0.5) for value in kl], step_s=0.01, rows_read=seed_rows)
    sizes = dict(nbytes={"codes": 5, "rows": 2**20}, peak_bytes={"host": 2**30})
    about |= dict(rows_found=100.0, recall=0.5, coverage=0.8, weighted=False)
    return {**about, "rows_full": 4096.0, "step_bytes": 2.0**20, **sizes}


def fill(records, indexes, lengths=(2048, 4096), ks=(32, 100), tasks=("a", "b"), tries=3):
    rng = random.Random(0)
    records.run_on({"processor": "a & b"})
    for tokens in lengths:
        for index, k in [(FULL, 0), *((index, k) for index in indexes for k in ks)]:
            scale = 0.0 if index == FULL else rng.random()
            records.add(Key(TEXT, tokens, index, k), steps(rng, scale, 300.0))
            for task in tasks:
                for seed in range(tries):
                    score = {"scores": [1.0, float(rng.random() > scale)]}
                    records.add(Key(ANSWERS, tokens, index, k, task, seed), score)
    records.add(Key(FAILURE, 4096, "h2o"), {"words": "head_dim: got <7>, allowed is a multiple"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    fill(Records(folder), INDEXES)
    write_report(folder, SETTINGS, Records(folder))
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.broken = False  # a line may be broken here, within a word
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "source", "input", "wbr"):
            self.open.append(tag)
        self.broken = tag == "wbr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip() if not self.broken else self.words.pop() + data.strip())


def test_the_page_asks_for_nothing_and_is_well_formed(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset"):
            assert attributes.get(name, "#").startswith(("data:", "#")), (tag, name)


def test_the_page_holds_every_index_and_says_what_failed(folder):
    page = Page((folder / "report.html").read_text())
    assert {FULL, *INDEXES, "h2o"} <= set(page.words)
    assert "head_dim: got <7>, allowed is a multiple" in page.words
    assert "Indexes compared: <model>" in page.words
    assert "processor a & b" in page.words


def test_the_page_is_printed_without_boxes_that_scroll(folder):
    text = (folder / "report.html").read_text()
    assert "size: A4 landscape" in text
    printed = text[text.index("@media print") : text.index("</style>")]
    assert ".scroll { overflow: visible; max-height: none;" in printed


def test_the_page_can_be_used_by_keyboard(folder):
    page = Page((folder / "report.html").read_text())
    tags = [tag for tag, _ in page.tags]
    heads = [attributes for tag, attributes in page.tags if tag == "th" and "scope" in attributes]
    columns = sum(attributes["scope"] == "col" for attributes in heads)
    assert tags.count("button") == columns > 20
    scrolled = [a for _, a in page.tags if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in scrolled)
    assert any(tag == "label" and a["for"] == "filter" for tag, a in page.tags)
    assert all(a["alt"] for tag, a in page.tags if tag == "img")
    assert dict(page.tags)["html"]["lang"] == "en"


@pytest.fixture(scope="module")
def shown(folder):
    """Return the page after a browser has run, sorted and filtered it, and its console messages."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    page = folder / "used.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", INTERACT + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, *options, profile, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_it_opens_in_chromium_without_an_error(shown):
    dom, console = shown
    assert len(console) == 1
    assert "sorted and filtered" in console[0]
    assert "Scroll right for" in console[0]  # the window has 800 pixels
    assert "peak MiB" in console[0]
    assert {FULL, *INDEXES} <= set(Page(dom.split("<script>")[0]).words)


def test_a_click_sorts_and_words_filter(shown):
    dom = shown[0]
    start = dom.index('id="overview"')
    table = dom[start : dom.index("</table>", start)]
    rows = Page(table[table.index("<tbody>") : table.index("</tbody>")])
    numbers = [a["data-number"] for tag, a in rows.tags if tag == "td" and "style" in a]
    shares = [float(number) for number in numbers]
    assert len(shares) == 61
    assert shares == sorted(shares, reverse=True)
    assert 'aria-sort="descending"' in table
    kept = [a for tag, a in rows.tags if tag == "tr" and "hidden" not in a]
    assert len(kept) == 2  # one index at two k
    assert " rows</output>" in dom


def test_json_and_csv_have_the_same_figures(folder):
    found = json.loads((folder / "results.json").read_text())
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert found["schema"] == "kvindex.compare/1"
    assert found["machines"] == [{"processor": "a & b"}]
    for table in ("accuracy", "differences"):
        assert len(found[table]) == sum(row["table"] == table for row in rows)
    first = next(row for row in rows if row["index"] == "exact" and row["measure"] == "accuracy")
    same = next(row for row in found["accuracy"] if row["index"] == "exact")
    needed = [row for row in rows if row["table"] == "rows_needed"]
    assert len(needed) == 2 * len(found["rows_needed"])
    assert float(first["value"]) == same["accuracy"]
    assert first["task"] == first["tokens"] == ""
    assert int(first["count"]) == same["count"] == 12
    assert {row["base"] for row in found["differences"]} == {FULL, "exact", "pariskv"}
    assert all(row["p"] <= row["p_corrected"] <= 1 for row in found["differences"])


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "exact"]
    fill(Records(tmp_path), names, lengths=(2048,), ks=(32,), tasks=("=cmd|' /C calc'!A0", "b"))
    write_report(tmp_path, SETTINGS, Records(tmp_path))
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    told = {cell for row in rows for cell in (row["index"], row["base"], row["task"])}
    assert {f"'{name}" for name in names[:-1]} | {"exact", "'=cmd|' /C calc'!A0"} <= told
    cells = [cell for row in rows for cell in row.values()]
    begin = [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert begin
    assert all(float(cell) < 0 for cell in begin)  # differences may be negative


def test_differences_are_of_pairs(tmp_path):
    records = Records(tmp_path)
    shares = {FULL: [1, 1, 1, 1], "exact": [1, 1, 0, 1], "best": [1, 1, 1]}
    for index, scores in shares.items():
        for seed, score in enumerate(scores):
            key = Key(ANSWERS, 2048, index, 0 if index == FULL else 9, "a", seed)
            records.add(key, {"scores": [score], "depth": (None, 0.0, 0.09, 1.0)[seed]})
    for index in shares:
        key = Key(TEXT, 2048, index, 0 if index == FULL else 9)
        records.add(key, steps(random.Random(1), 0.0 if index == FULL else 0.5, 1.0))
    found = write_report(tmp_path, SETTINGS, records)
    rows = {(row["index"], row["base"]): row for row in found["differences"] if not row["task"]}
    assert rows["exact", FULL]["difference"] == -0.25
    assert rows["best", "exact"]["difference"] == pytest.approx(1 / 3)
    assert rows["best", "exact"]["count"] == 3
    assert rows["best", FULL]["low"] == rows["best", FULL]["high"] == 0
    ratios = [row.get("over_exact") for row in found["text"]]
    assert ratios == [None, 1, 1]
    depths = [[row[name] for name in ("index", "depth", "count")] for row in found["depths"]]
    assert depths[:2] == [[FULL, 0.0, 2], [FULL, 0.9, 1]]
    assert found["depths"][2]["accuracy"] == 0.5


def test_the_divergence_of_exact_is_interpolated_for_as_many_rows(tmp_path):
    """Along a power of the number of rows. Outside of the measured numbers there is no ratio."""
    records = Records(tmp_path)
    every = steps(random.Random(1), 1.0, 1.0)
    for k in (25, 100, 400):  # a power of -1/2
        kl = [one * 10 / k**0.5 for one in every["kl"]]
        records.add(Key(TEXT, 2048, "exact", k), every | {"kl": kl, "rows_found": float(k)})
    for error, rows in {"0.1": 100.0, "0.08": 150.0, "0.05": 400.0, "0.01": 600.0}.items():
        records.add(Key(TEXT, 2048, "pariskv", f"auto:{error}"), every | {"rows_found": rows})
    records.add(Key(TEXT, 4096, "pariskv", "auto"), every | {"rows_found": 100.0})
    found = {
        (row["k"], row["tokens"]): row.get("over_exact")
        for row in summarize(SETTINGS, records)["text"]
        if row["index"] == "pariskv"
    }
    assert found["auto:0.1", 2048] == pytest.approx(1)
    assert found["auto:0.08", 2048] == pytest.approx(1.5**0.5)
    assert found["auto:0.05", 2048] == pytest.approx(2)
    assert found["auto:0.01", 2048] is None
    assert found["auto", 4096] is None


def test_rows_needed_are_the_least_from_which_on_few_answers_are_lost(tmp_path):
    lost = {  # number of lost answers of 50, at k = 8, 16, 32
        **{"exact": (2, 1, 0), "lucky": (0, 9, 1), "never": (9, 9, 2), "alike": (0, 0, 0)},
        "other": (0, 0),
    }
    records = Records(tmp_path)
    for seed in range(50):
        records.add(Key(ANSWERS, 2048, task="a", seed=seed), {"scores": [1.0]})
        for index, counts in lost.items():
            for k, count in zip((8, 16, 32), counts, strict=False):
                key = Key(ANSWERS, 2048, index, k, "a", seed)
                records.add(key, {"scores": [float(seed >= count)]})
    found = summarize(SETTINGS, records)
    rows = {
        row["index"]: row
        for row in found["rows_needed"]
        if (row["task"], row["tokens"]) == ("a", 2048)
    }
    needed = {index: (row["rows"], row["over_exact"]) for index, row in rows.items()}
    assert needed == {
        **{"exact": (16, 1), "lucky": (32, 2), "never": (None, None), "alike": (8, 0.5)},
        "other": (8, None),  # measured at other k than exact
    }
    table = next(table for table in tables(found) if table.title == "Rows needed")
    shown = {row[0].text: (row[-1].text, row[-1].note) for row in table.rows}
    assert shown["never"] == ("> 32", "")
    assert shown["lucky"] == ("32", "2 \N{MULTIPLICATION SIGN}")


def test_a_row_says_whether_answers_are_kept(tmp_path):
    records = Records(tmp_path)
    lost = {FULL: 0, "exact": 1, "poor": 20}
    for seed in range(200):
        for index, count in lost.items():
            key = Key(ANSWERS, 2048, index, 0 if index == FULL else 9, "a", seed)
            records.add(key, {"scores": [float(seed >= count)]})
    key = Key(ANSWERS, 2048, "short", 9, "a", 100)
    records.add(key, {"scores": [1.0]})
    found = summarize(SETTINGS, records)
    rows = [row for row in found["differences"] if row["base"] == FULL]
    kept = {row["index"]: row["not_inferior"] for row in rows}
    assert kept == {"exact": True, "poor": False, "short": True}
    table = next(table for table in tables(found) if table.title == "Differences")
    place = list(table.columns).index(KEEPS)
    shown = {row[0].text: row[place] for row in table.rows if row[2].text == "full"}
    assert {index: (cell.text, cell.note) for index, cell in shown.items()} == {
        **{"exact": ("yes", ""), "poor": ("no", "")},
        "short": ("yes", "few"),
    }


def test_pictures_name_few_lines_by_color_and_mark(folder):
    found = json.loads((folder / "results.json").read_text())
    drawn = panels(found)
    assert named(drawn)[:3] == [FULL, "exact, k = 100", "pariskv, k = 100"]
    assert len(named(drawn)) == NAMED
    assert (folder / "answers.png").read_bytes().startswith(b"\x89PNG")
    for theme in (LIGHT, DARK):
        assert len(set(theme.colors)) == NAMED
        panes = picture(found, theme).axes
        for axes in panes:
            assert len(axes.texts) <= NAMED
            assert {text.get_text() for text in axes.texts} <= set(named(drawn))
        colors = [line.get_color() for line in panes[0].lines]
        assert colors.count(theme.gray) > 40


def test_pictures_for_phones_have_names_below(folder):
    found = json.loads((folder / "results.json").read_text())
    figures = narrow_pictures(found)
    assert len(figures) == len(panels(found)) == 2
    for figure, panel in zip(figures, panels(found), strict=True):
        (legend,) = figure.legends
        names = {text.get_text() for text in legend.get_texts()}
        assert names == {*named(panels(found))} & {*panel.lines}
        assert figure.get_figwidth() <= NARROW[0]
    page = Page((folder / "report.html").read_text())
    assert [tag for tag, _ in page.tags].count("img") == 2


def test_names_stand_apart():
    for heights in ([0.1, 0.11, 0.12, 0.9], [0.99, 0.995, 1.0], [-0.2, 0.5]):
        placed = _apart(heights)
        assert all(b - a > GAP - 1e-9 for a, b in itertools.pairwise(placed))
        assert placed[-1] <= 1 + 1e-9


def test_one_length_and_several_k_are_drawn_along_k(tmp_path):
    fill(Records(tmp_path), ["exact", "quest"], lengths=(2048,), tasks=())
    drawn = panels(write_report(tmp_path, SETTINGS, Records(tmp_path)))
    assert [panel.along for panel in drawn] == ["k"]
    assert [point.x for point in drawn[0].lines["quest"]] == [32, 100]


def test_labels_of_close_ticks_do_not_overlap(tmp_path):
    """Budgets of a suite, to which a few indexes add numbers of rows of their own."""
    for name, ks in {
        "exact": (128, 512, 2048),
        "quest": (100, 128, 512, 2048),
        "x": (103,),
    }.items():
        fill(Records(tmp_path), [name], lengths=(2048,), ks=ks, tasks=())
    found = write_report(tmp_path, SETTINGS, Records(tmp_path))
    for figure in (picture(found), *narrow_pictures(found)):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        assert {"128", "512", "2K"} <= {label.get_text() for label in labels}
        assert len(axes.get_xticks()) > len(labels)
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
