"""The decode step's benchmark as its user sees it: tables, the plot, what it refuses."""

import json

import pytest
import torch
from rich.console import Console

from benchmarks import decode_step
from benchmarks.decode.floors import stage_bytes
from benchmarks.decode.setting import Setting
from benchmarks.decode.show import plot, show, stages_table, summary
from benchmarks.decode.stages import staged
from benchmarks.tabling import decode, hits

WHOLE = decode_step.geometry("cpu")
RATES = {"read": {"GB_s": 4000.0}, "pinned": {"GB_s": 50.0}}


def made_up():
    """A result as a run writes it: two lengths, one of them unfinished."""

    def times(us):
        return {"median_us": us, "low_us": 0.9 * us, "high_us": 1.2 * us, "replays": 50}

    names = ["ask", "sample", "scan", "rerank", "agree", "attend", "unheard_of"]
    setting, points = Setting(WHOLE), []
    for tokens, full in ((131_072, 130.0), (1_048_576, 930.0)):
        reached = [0.0, 2.0, 1.5, 35.5, 50.0, 53.0, 80.0, 81.0]
        bytes_ = stage_bytes(setting, tokens, 1, 1.5 * setting.candidates(tokens))
        points.append(
            {
                "tokens": tokens,
                "batch": 1,
                "launches": 8,
                "attend_nodes": 9,
                "step_host": times(81.0),
                "step_device": times(70.0),
                "dense": times(full),
                "topk": times(0.9 * full),
                "stages": staged(names, reached, bytes_, RATES),
            }
        )
    points.append({"tokens": 4_194_304, "batch": 1, "dense": times(3700.0)})
    return {
        "ceilings": RATES,
        "points": points,
        "faiss": [
            {
                **{"tokens": 131_072, "flat": times(336.0), "flat_recall": 1.0},
                "ivfpq_error": "no memory",
            }
        ],
        **dict(
            index="pariskv", shape=dict(k=100), machine=dict(gpu="g", torch="2", transformers="5")
        ),
        "notes": ["stopped: 0 s are left of 480"],
    }


def test_tables_of_a_result():
    result = made_up()
    head, rows = summary(result)
    assert [len(row) for row in rows] == [len(head)] * 3
    first = dict(zip(head, rows[0], strict=True))
    assert first["tokens"] == "131,072"
    assert first["rows on host"] == "81.0 (72.9–97.2)"
    assert first["host of dense"] == f"{81 / 130:.3f}"
    assert (first["launches"], first["of attend"]) == ("8", "9")
    assert rows[2][2:4] == ("–", "–")
    head, rows = stages_table(result["points"][1])
    assert rows[1][:2] == ("sample", "-0.5")
    assert rows[6] == ("unheard_of", "1.0", "–", "–", "–")
    moved = stage_bytes(Setting(WHOLE), 2**20, 1, 1.5 * 20_972)["scan"].device
    assert rows[2] == (
        *("scan", "34.0", f"{moved / 1e6:.2f}", f"{moved / 4e6:.1f}"),
        f"{moved / 4e6 / 34:.0%}",
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Where results are written, empty at first; the pages' tables see nothing else."""
    for module in (decode, hits):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def test_the_page_has_a_row_for_each_point(results):
    result = made_up()
    page = decode.decode_step(result)
    assert "Launches of the bare step: 8; of `index.attend`, captured: 9." in page
    head, _, *rows = page.split("\n\n")[1].splitlines()
    assert head.endswith("| and a cache of rows | rows on the device | what must move |")
    assert rows[0].startswith("| 131,072 | 1 | 130 | 117 | 81 (0.62) | – | 70 (0.54) |")
    assert rows[2] == "| 4,194,304 | 1 | 3,700 | – | – | – | – | – |"
    assert "lie in the cache" not in page
    assert "Measured on g" in page.split("\n\n")[2]


def test_the_page_has_the_points_of_a_longer_run(results):
    result = {**made_up(), "points": made_up()["points"][:2]}
    longer = made_up()["points"][1] | dict(tokens=4_194_304)
    del longer["dense"], longer["topk"]
    result["points"][0]["hit_rate"] = 0.9
    written = {**made_up(), "points": [longer]}
    (results / "decode_step_4m.json").write_text(json.dumps(written))
    caches = [dict(rows=rows, hit_rate=rows / 8192) for rows in (1024, 4096)]
    cells = [dict(caches=caches), dict(caches=[dict(rows=4096, hit_rate=0.7)])]
    page = decode.decode_step(result)
    assert "| 4,194,304 | 1 | – | – | 81 | – | 70 |" in page
    assert "4,194,304 tokens: a run of its own. Measured on g" in page
    assert "Of the rows asked for 90.0% lie in the cache. Launches" in page
    (results / "hit_rate.json").write_text(json.dumps(dict(cells=cells)))
    assert "90.0% lie in the cache. Where a model writes, 60% do." in decode.decode_step(result)


def test_the_page_says_where_memory_let_fewer_layers_be(results):
    result = {**made_up(), "points": made_up()["points"][:2]}
    for point, layers, rate in zip(result["points"], (16, 3), (0.937, 0.931), strict=True):
        point |= dict(layers=16, dense_layers=layers, hit_rate=rate)
    page = decode.decode_step(result)
    assert "Of the rows asked for 93.1% to 93.7% lie in the cache." in page
    assert "graphs of fewer layers, for memory: 3 (1,048,576 tokens, batch 1).\n" in page


def test_the_page_has_the_launches_of_presets(results):
    (results / "decode_step_fast.json").write_text(json.dumps(made_up()))
    assert "`ask`" not in decode.preset_stages({})
    (results / "decode_step_scan.json").write_text(json.dumps(made_up()))
    page = decode.preset_stages({})
    assert page.startswith("The longest runs, batch 1")
    assert "| `scan` | `ask` | 1,048,576 |" in page
    assert "131,072" not in page


def test_the_page_has_a_table_of_faiss_where_it_was_measured():
    result = made_up()
    rows = decode.decode_faiss(result).split("\n\n")[1].splitlines()
    assert rows[0].startswith("| tokens | FAISS flat | FAISS IVF | FAISS IVF-PQ | exact scores")
    assert rows[2:] == ["| 131,072 | 336 (100%) | – | – | 117 | 81 | 70 |"]
    assert decode.decode_faiss({**result, "faiss": []}) == "Not measured in this run."


def test_the_page_has_a_table_of_rows_as_codes_where_they_were_measured():
    result = made_up()
    assert decode.decode_rows(result) == "Not measured in this run."
    result["points"][1] |= dict(step_int8=dict(median_us=75.4), step_fp8=dict(median_us=76.0))
    rows = decode.decode_rows(result).split("\n\n")[1].splitlines()
    assert rows[2:] == ["| 1,048,576 | 1 | 81 | 75 | 76 |"]


def test_a_result_is_shown(capsys):
    show(made_up(), Console(width=200))
    out = capsys.readouterr().out
    for part in ("read 4,000", "1,048,576", "unheard_of", "no memory", "336 µs", "0 s are left"):
        assert part in out


def test_a_result_is_drawn_from_its_file(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "decode_step.json", tmp_path / "decode_step.png"
    written.write_text(json.dumps(made_up()))
    before = written.read_text()
    longer = {**made_up(), "points": [dict(made_up()["points"][0], tokens=8_388_608)]}
    (tmp_path / "longer.json").write_text(json.dumps(longer))
    command = ["decode_step.py", "--draw", str(written), str(tmp_path / "longer.json")]
    monkeypatch.setattr("sys.argv", [*command, "--plot", str(drawn)])
    decode_step.main()
    assert "8,388,608" in capsys.readouterr().out
    assert drawn.stat().st_size > 20_000
    assert written.read_text() == before
    few = {**made_up(), "points": made_up()["points"][2:], "faiss": []}
    plot(few, drawn)  # a run that came no further
    assert drawn.stat().st_size > 5_000


# What it refuses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "4096", "0"], "tokens: got 0, allowed is at least 4096"),
        (["--batch", "0"], "batch: got 0, allowed is at least 1"),
        (["--layers", "0"], "layers: got 0, allowed is at least 1"),
        (["--replays", "10"], "replays: got 10, allowed is at least 50"),
        (["--index", "exact"], "index: got 'exact', allowed is one that the fused kernels serve"),
        (["--index", "pariskv:beta=1.5"], "index: beta: got 1.5, allowed is"),
        (
            ["--index", "pariskv:single_stage_below=9"],
            "allowed is one that the fused kernels serve",
        ),
        (["--hit-rate", "2"], "hit-rate: got 2.0, allowed is 0 to 1"),
        (["--seconds", "-1"], "seconds: got -1.0, allowed is above 0"),
        (["--faiss", "/nowhere"], "faiss: got /nowhere, allowed is a folder with the package"),
        (["--json", "/nowhere/a.json"], "json: got '/nowhere/a.json', allowed is a file in"),
        (["--draw", "/nowhere.json"], "draw: got /nowhere.json, allowed is a JSON"),
        ([], "torch sees none; --draw draws a result"),
    ],
)
def test_wrong_arguments_are_refused_in_words(given, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        decode_step.arguments(given)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_right_arguments_are_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = decode_step.arguments(["--tokens", "32768", "131072", "--batch", "1", "8"])
    assert (given.tokens, given.batch, given.layers) == ([32768, 131072], [1, 8], 16)
