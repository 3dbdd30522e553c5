"""Test `kvindex compare` as a user types it."""

import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import kvindex
from kvindex_adapters.cli import app, main
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.pictures import narrow_pictures
from kvindex_adapters.evaluate.tasks import Instance, Question
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import VOCABULARY, build

SMALL = ("--model", "tiny", "--tokens", 60, "--tries", 1, "--steps", 6, "--tasks", "needle")
REGIONS = ("--sink", 4, "--local-window", 8, "--update-every", 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--index", "parisvk"), "did you mean 'pariskv'"),
        (
            ("--index", "exact,,quest"),
            "index: got 'exact,,quest', which has an empty part",
        ),
        (
            ("--index", "exact,exact"),
            "index: got ['exact', 'exact'], allowed is a list without repeated values",
        ),
        (("--index", "exact:scale=2"), "got scale, but the model"),
        (("--index", "no_file:Index"), "got 'no_file:Index', which cannot be imported (Module"),
        (("--index", "json:loads"), "json:loads', which is <function loads at"),
        (("-k", "0"), "k: got 0, allowed is"),
        (("-k", "32,x"), "k: got 'x', allowed is a number, for example 4096"),
        (("-k", "32,auto", "--index", "exact"), "k: got 'auto', but Exact with these options"),
        (("-k", "auto:0"), "k: got 'auto:0', allowed after 'auto:' is a positive finite number"),
        (("-k", "autos"), "k: got 'autos', allowed is a number, 'auto', or 'auto:0.05'"),
        (("-k", 2**40), "k: got 1099511627776, allowed is 1 to 16777216"),
        (("--tasks", "needles"), "did you mean 'needle'"),
        (("--tasks", "none", "--steps", "0"), "tasks, steps: got tasks none and steps 0, so there"),
        (("--tokens", "4M"), "tokens: got '4M', allowed is a number"),
        (
            ("--tokens", "4K,4096"),
            "tokens: got [4096, 4096], allowed is a list without repeated values",
        ),
        (("--tries", "0"), "tries: got 0"),
        (("--steps", "-1"), "steps: got -1"),
        (("--jobs", "0"), "jobs: got 0"),
        (("--text", "no-such-file"), "text: got 'no-such-file', allowed is a file that exists"),
        (("--sink", "-1"), "sink: got -1"),
        (("--update-every", "0"), "update_every: got 0"),
        (("--prefill", "some"), "prefill: got 'some', allowed is"),
        (("--prefill", "sparse", "--prefill-mass", "0"), "prefill_mass: got 0"),
        (("--prefill", "sparse", "--prefill-selector", "all"), "prefill_selector: got 'all'"),
        (("--dtype", "int3"), "dtype: got 'int3'"),
        (("--store", "moon"), "store: got 'moon', allowed is"),
        (("--device", "meta"), "device: got 'meta', which holds no numbers"),
        (("--lora", "no-such-file"), "lora: got 'no-such-file', allowed is a file that exists"),
        (("--model", "./nowhere"), "model: got './nowhere'"),
        (("--out", "/dev/null/here"), "out: got '/dev/null/here', allowed is a folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    tmp_path, arguments, message, monkeypatch, capsys
):
    def refuse(*args, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    given = ["--out", tmp_path / "out", "--index", "exact", *arguments]
    if "--model" not in arguments:
        given += ["--model", tmp_path]
    monkeypatch.setattr(sys, "argv", ["kvindex", "compare", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def asked(name, tokenizer, *, tokens, seed):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (tokens,), generator=rng)
    return Instance(name, seed, ids[:-5], (Question(ids[-5:], ("5",), 4),))


@pytest.fixture
def _tiny(monkeypatch):
    """Let commands load a small model with numbers as words."""
    model = build("llama", num_hidden_layers=2)
    loaded = model, Words()
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load", lambda *args, **options: loaded
    )
    monkeypatch.setattr(tasks, "make", asked)


@pytest.fixture
def run(tmp_path, _tiny):
    (tmp_path / "text.txt").write_text(" ".join(str(3 + i % 90) for i in range(100)))

    def invoke(*arguments):
        given = ["--out", tmp_path / "out", *SMALL, *REGIONS, "--text", tmp_path / "text.txt"]
        return CliRunner().invoke(app, ["compare", *map(str, [*given, *arguments])])

    return invoke


def test_it_writes_a_report_and_goes_on_with_the_same_settings(run, tmp_path):
    result = run("--index", "exact", "-k", "5,50")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("settings.json", "results.jsonl", "results.json", "results.csv"),
        *("report.html", "answers.png"),
    }
    assert "out/report.html" in result.stdout
    assert "100%" in result.stderr
    assert "measuring: begins (text, 60 tokens)\n" in result.stderr
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    more = run("--index", "exact,quest:page=4", "-k", "50")
    assert more.exit_code == 0, more.output
    after = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    who = {(row["index"], row["k"]) for row in found["text"]}
    assert who == {("full attention", None), ("exact", 5), ("exact", 50), ("quest:page=4", 50)}
    assert found["settings"]["regions"] == dict(sink=4, local_window=8, update_every=8)
    refused = run("--index", "exact", "--sink", "5")
    assert "regions: got {'sink': 5" in str(refused.exception)
    assert "or another --out" in str(refused.exception)


def test_no_tasks_are_steps_along_a_text(run, tmp_path):
    result = run("--index", "exact", "-k", "5", "--tasks", "none")
    assert result.exit_code == 0, result.output
    assert "measuring full attention and exact with k = 5: 6 steps along a text, at 60" in (
        result.stderr.replace("\n", " ")
    )
    assert "coverage" in result.stdout
    assert "recall" in result.stdout
    assert "accuracy" not in result.stdout
    (row,) = [
        row
        for row in json.loads((tmp_path / "out" / "results.json").read_text())["text"]
        if row["index"] == "exact"
    ]
    assert row["rows_found"] == 5
    assert 0 < row["recall"] <= 1
    assert (
        f"a step reads {row['rows_read']:.0f} of {row['rows_full']:.0f} rows per KV head, 5 from"
        in result.stdout
    )
    assert "weighs rows" not in result.stdout
    (figure,) = narrow_pictures(json.loads((tmp_path / "out" / "results.json").read_text()))
    assert [text.get_text().partition(":")[0] for text in figure.axes[0].texts] == ["exact"]


def test_the_table_has_the_figures_of_the_report(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # room for all columns, even if a step takes seconds
    index = "exact:group=max_share:row_codec=int8+reuse"
    result = run("--index", f"pariskv:preset=fast,{index},exact", "-k", "5", "--tasks", "none")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("───"))
    assert max(map(len, lines[: rule + 6])) <= 120
    found = json.loads((tmp_path / "out" / "results.json").read_text())["text"]
    figures = {row["index"]: row for row in found}
    assert figures["full attention"]["key_bytes"] is None
    assert figures["pariskv:preset=fast"]["key_bytes"] > 1
    assert figures["exact"]["key_bytes"] == 0
    rows = [line.split() for line in lines[rule + 1 : rule + 6]]
    assert [row[0] for row in rows[:1]] == ["full"]
    for name in ("pariskv:preset=fast", "exact"):
        (cells,) = (row for row in rows if row[0] == name)
        row = figures[name]
        assert cells[1:4] == ["5", f"{row['kl']:.4f}", f"{row['over_exact']:.2f}"]
        assert cells[-1] == f"{row['key_bytes']:.1f}"
    assert [row[0] for row in rows[2:4]] == ["exact:group=max_share", ":row_codec=int8+reuse"]
    for columns in (100, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = run("--index", "pariskv:preset=fast", "-k", "5", "--tasks", "none")
        rule = next(line for line in result.stdout.splitlines() if line.startswith("───"))
        assert len(rule) <= columns


def test_results_of_an_earlier_version_lack_the_bytes_of_codes(run, tmp_path):
    assert run("--index", "exact", "-k", "5", "--tasks", "none").exit_code == 0
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(re.sub(r', "key_bytes": [^,}]*', "", path.read_text()))
    assert "key_bytes" not in path.read_text()
    again = run("--index", "exact", "-k", "5", "--tasks", "none")
    assert again.exit_code == 0, again.output
    assert "code" not in again.stdout


def test_sampled_rows_are_not_judged_by_recall(run):
    result = run("--index", "exact,exact+sample", "-k", "5", "--tasks", "none")
    assert result.exit_code == 0, result.output
    assert "\nexact+sample: weighs rows that stand for several" in result.stdout


PLANES = """
from kvindex.indexes.exact import Exact

class Planes(Exact):
    pass
"""


def test_a_class_in_a_file_of_the_current_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_planes.py").write_text(PLANES)
    index = "my_planes:Planes:group=union"
    result = run("--index", f"{index},exact", "-k", "5", "--tasks", "needle")
    sys.modules.pop("my_planes")
    assert result.exit_code == 0, result.output
    assert sys.path[-1] == str(tmp_path)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["index"] for row in found["text"]} == {"full attention", index, "exact"}
    assert found["failures"] == []


def test_rows_lie_where_it_is_said(run, monkeypatch):
    made = []
    create = kvindex.create

    def watched(index, **options):
        made.append((index, options.get("store")))
        return create(index, **options)

    monkeypatch.setattr(kvindex, "create", watched)
    result = run("--index", "exact,quest:page=4:store=host", "-k", "5", "--store", "device")
    assert result.exit_code == 0, result.output
    assert made.count(("exact", "device")) > 2  # a check, and two layers or more
    assert made.count(("quest:page=4:store=host", None)) > 2  # a line has further fields


def test_what_a_task_cannot_do_is_told(run, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("file: got a line that is none")

    monkeypatch.setattr(tasks, "make", refuse)
    result = run("--index", "exact", "-k", "5")
    assert result.exit_code == 0, result.output
    told = "not measured: all at needle, 60 tokens: file: got a line that is none"
    assert told in result.stderr


def test_an_interruption_is_told_in_words(run, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "make", interrupted)
    result = run("--index", "exact")
    assert result.exit_code == 130
    assert "interrupted; run the same command again to continue" in result.stderr


@pytest.fixture
def suite(tmp_path, _tiny, monkeypatch):
    """Run `kvindex compare --suite field` with small budgets."""
    monkeypatch.setattr("kvindex_adapters.evaluate.compare.suite.BUDGETS", (3, 8, 500))
    for name in ("a", "b"):
        words = (str(3 + (i * (i + ord(name))) % 90) for i in range(100))
        (tmp_path / f"{name}.txt").write_text(" ".join(words))

    def invoke(*arguments, regions=REGIONS):
        given = ["--suite", "field", "--out", tmp_path / "out", "--model", "tiny", "--tokens", 80]
        given += ["--steps", 8, *regions]
        return CliRunner().invoke(app, ["compare", *map(str, [*given, *arguments])])

    return invoke


def test_a_suite_writes_a_table_and_goes_on(suite, tmp_path):
    texts = ("--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt")
    few = suite("--index", "exact,quest:page=4", *texts, "--minutes", 1e-9)
    assert few.exit_code == 0, few.output
    assert "stopped after 1e-09 minutes: " in few.stdout
    assert "run the same command again to continue" in few.stdout
    whole = suite("--index", "exact,quest:page=4", *texts)
    assert whole.exit_code == 0, whole.output
    assert "stopped" not in whole.stdout
    assert "on 2 texts of 80 tokens" in whole.stderr.replace("\n", " ")
    assert "not measured: exact at 500 rows, 80 tokens: k: got 500" in whole.stderr
    table = json.loads((tmp_path / "out" / "field.json").read_text())
    assert table["schema"] == "kvindex.field/1"
    assert [row["method"] for row in table["methods"]] == ["exact", "quest:page=4"]
    measured = [row for row in table["cells"] if row["reason"] is None]
    assert [(row["index"], row["k"]) for row in measured] == [
        *(("exact", 3), ("exact", 8), ("quest:page=4", 3), ("quest:page=4", 8))
    ]
    assert all(len(row["texts"]) == 2 for row in measured)
    for column in ("index", "budget", "error", "worst", "recall", "bytes"):
        assert column in whole.stdout
    assert f"{measured[0]['error']:.3f}" in whole.stdout
    more = suite("--index", "h2o:budget={k}", *texts)
    assert more.exit_code == 0, more.output
    table = json.loads((tmp_path / "out" / "field.json").read_text())
    assert len(table["methods"]) == 3
    assert "h2o:budget=3" in more.stdout
    assert (tmp_path / "out" / "report.html").exists()


def test_a_suite_measures_all_indexes_by_default(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(kvindex, "names", lambda: ["exact", "quest", "faiss-flat"])
    result = suite("--text", tmp_path / "a.txt")
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "out" / "field.json").read_text())
    assert [row["method"] for row in table["methods"]] == ["exact", "faiss-flat", "quest"]
    assert table["methods"][2]["published"] == {"index": "quest", "k": 1024, "fraction": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "fields"), "suite: got 'fields', allowed is"),
        (("--suite", "field", "-k", "100"), "k: got '100' with --suite field, which reads each"),
        (("--suite", "field", "--tasks", "needle"), "tasks: got 'needle' with --suite field"),
        (("--suite", "field", "--tries", "2"), "tries: got 2 with --suite field"),
        (("--suite", "field", "--prefill", "sparse"), "prefill: got 'sparse' with --suite field"),
        (("--suite", "field", "--steps", "0"), "steps: got 0, allowed is"),
        (("--suite", "field", "--index", "parisvk"), "did you mean 'pariskv'"),
        (("--minutes", "0"), "minutes: got 0"),
        (("--text", "a.txt", "--text", "b.txt"), "text: got 2 files, allowed is one"),
    ],
)
def test_what_does_not_fit_a_suite_is_named(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--out", tmp_path / "out", "--model", tmp_path, *arguments]
    monkeypatch.setattr(sys, "argv", ["kvindex", "compare", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
