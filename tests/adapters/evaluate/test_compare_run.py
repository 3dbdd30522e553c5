"""A comparison continues where it stopped, with the same numbers, and no index ends it."""

import dataclasses
import gc
import json
import weakref

import pytest
import torch

import kvindex
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.lines import panels
from kvindex_adapters.evaluate.compare.readings import InstanceReading
from kvindex_adapters.evaluate.compare.records import ANSWERS, FAILURE, FULL, TEXT, Key, Records
from kvindex_adapters.evaluate.compare.run import Comparison
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.evaluate.compare.summary import COSTS, summarize
from kvindex_adapters.evaluate.compare.tables import tables
from kvindex_adapters.evaluate.tasks import Instance, Question
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import VOCABULARY, build

SETTINGS = Settings("tiny", "random", steps=6, regions=dict(sink=4, local_window=8, update_every=8))
PLAN = Plan(indexes=("exact", "quest:page=4"), ks=(3, 20), tasks=("ask",), tokens=(60,), tries=2)


def ids_of(length, seed):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def asked(name, tokenizer, *, tokens, seed):
    """Make a prompt of random words, two questions, and answers that sometimes contain a 5."""
    if tokens < 50:
        raise ValueError(f"tokens: got {tokens}, allowed is 50 or more")
    ids = ids_of(tokens, seed)
    questions = [Question(ids[start:], ("5",), 6) for start in (tokens - 9, tokens - 5)]
    return Instance(name, seed, ids[: tokens - 9], tuple(questions))


@pytest.fixture(autouse=True)
def _task(monkeypatch):
    monkeypatch.setattr(tasks, "make", asked)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


def comparison(model, folder, plan=PLAN, settings=SETTINGS):
    text = ids_of(120, 9)
    options = dict(settings=settings, plan=plan, records=Records(folder))
    return Comparison(model, Words(), text, **options)


def numbers(folder, plan=None):
    """Return the results without times and memory."""
    found = summarize(SETTINGS, Records(folder))
    for row in found["text"]:
        for name in COSTS:
            row.pop(name)
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "make", asked)
        comparison(model, folder).run()
    return folder


def test_every_index_has_every_record(whole):
    records = Records(whole)
    who = [(FULL, 0), *((index, k) for index in PLAN.indexes for k in PLAN.ks)]
    for index, k in who:
        assert Key(TEXT, 60, index, k) in records
        for seed in range(2):
            assert Key(ANSWERS, 60, index, k, "ask", seed) in records
    assert len([*records.of(TEXT)]) == 5
    assert [*records.of(FAILURE)] == []


def test_no_steps_are_answers_alone(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "make", asked)
    comparison(model, tmp_path, settings=dataclasses.replace(SETTINGS, steps=0)).run()
    records = Records(tmp_path)
    assert [*records.of(TEXT)] == []
    assert len([*records.of(ANSWERS)]) == 10


def test_rows_enough_are_full_attention_and_few_are_not(model, tmp_path, whole):
    plan = Plan(("exact",), (500,), ("ask",), (60,), 1)
    comparison(model, tmp_path, plan).run()
    texts = dict(Records(tmp_path).of(TEXT))
    text, full = texts[Key(TEXT, 60, "exact", 500)], texts[Key(TEXT, 60)]
    assert max(map(abs, text["kl"])) < 1e-6
    assert text["rows_read"] == text["rows_full"]
    assert text["same"] == full["same"] == [1] * 6
    few = dict(Records(whole).of(TEXT))[Key(TEXT, 60, "exact", 3)]
    assert max(few["kl"]) > 1e-4
    assert few["rows_read"] < 30


def test_the_error_may_determine_the_number_of_rows(model, tmp_path):
    """Each step then counts the rows that its searches have found. A fixed number beside it gives
    the results that it gives alone."""
    plan = Plan(("pariskv",), (20, "auto", "auto:2"), ("ask",), (110,), 2)
    for name, ks in (("both", plan.ks), ("fixed", (20,))):
        (tmp_path / name).mkdir()
        comparison(model, tmp_path / name, dataclasses.replace(plan, ks=ks)).run()
    both, fixed = Records(tmp_path / "both"), Records(tmp_path / "fixed")
    assert [*both.of(FAILURE)] == []
    texts = dict(both.of(TEXT))
    auto, few = texts[Key(TEXT, 110, "pariskv", "auto")], texts[Key(TEXT, 110, "pariskv", 20)]
    assert few["kl"] == dict(fixed.of(TEXT))[Key(TEXT, 110, "pariskv", 20)]["kl"]
    assert few["rows_found"] == 20 < auto["rows_found"] <= 98
    assert auto["kl"] != few["kl"]
    assert texts[Key(TEXT, 110, "pariskv", "auto:2")]["rows_found"] < auto["rows_found"]
    answers = {key.k: one for key, one in both.of(ANSWERS) if key.seed == 0}
    assert len([key for key, _ in both.of(ANSWERS) if key.k == "auto"]) == 2
    assert "rows_found" not in answers[20]
    assert 16 <= answers["auto:2"]["rows_found"] < answers["auto"]["rows_found"] <= 98
    summary = json.loads(json.dumps(summarize(SETTINGS, both)))
    assert [row["k"] for row in summary["text"]] == [None, 20, "auto", "auto:2"]
    assert {row["k"] for row in summary["accuracy"]} == {None, 20, "auto", "auto:2"}
    assert next(row["ks"] for row in summary["rows_needed"] if row["task"] is None) == [20]
    assert [panel.along for panel in panels(summary)] == ["tokens"] * 2
    assert "pariskv, k = auto" in panels(summary)[0].lines
    made = tables(summary)
    assert any(cell.text == "auto" for row in made[0].rows for cell in row)
    (row,) = [
        r for r in summary["accuracy"] if (r["k"], r["task"], r["tokens"]) == ("auto", None, None)
    ]
    both_rows = [one["rows_found"] for key, one in both.of(ANSWERS) if key.k == "auto"]
    assert row["rows_found"] == pytest.approx(sum(both_rows) / 2)
    notes = [cell.note for row in made[0].rows for cell in row]
    assert sum(note.endswith(f", {row['rows_found']:.0f} rows") for note in notes) >= 1


def test_exact_as_a_baseline_is_measured_with_numbers_alone(model, tmp_path):
    plan = Plan(("pariskv", "exact"), (8, 40, "auto:0.5"), ("ask",), (110,), 1)
    comparison(model, tmp_path, plan).run()
    records = Records(tmp_path)
    assert [*records.of(FAILURE)] == []
    assert {key.k for key, _ in records.of(TEXT) if key.index == "exact"} == {8, 40}
    rows = {(row["index"], row["k"]): row for row in summarize(SETTINGS, records)["text"]}
    auto = rows["pariskv", "auto:0.5"]
    fixed = rows["pariskv", 8]
    resident = fixed["rows_read"] - fixed["rows_found"]
    assert auto["rows_read"] - auto["rows_found"] == pytest.approx(resident)
    assert 8 < auto["rows_found"] < 40
    few, many = (auto["kl"] / rows["exact", k]["kl"] for k in (8, 40))
    assert few < auto["over_exact"] < many
    assert Plan(("exact",), (8, "auto"), (), (110,), 1).ks_of("exact") == (8, "auto")
    assert Plan(("exact", "pariskv"), ("auto",), (), (110,), 1).ks_of("exact") == ("auto",)


def test_an_index_that_cannot_predict_errors_is_a_failure(model, tmp_path):
    comparison(model, tmp_path, Plan(("exact",), ("auto",), ("ask",), (60,), 1)).run()
    ((_, record),) = Records(tmp_path).of(FAILURE)
    assert "k: got 'auto', but" in record["words"]


@pytest.mark.parametrize("ks", [("auto", 20), (20, "auto")])
def test_a_failure_of_auto_does_not_discard_results_with_numbers(model, tmp_path, ks):
    plan = Plan(("exact",), ks, ("ask",), (60,), 2)
    comparison(model, tmp_path, plan).run()
    records = Records(tmp_path)
    assert {key for key, _ in records.of(FAILURE)} == {
        Key(FAILURE, 60, "exact", "auto"),
    }
    assert Key(TEXT, 60, "exact", 20) in records
    assert {key for key, _ in records.of(ANSWERS) if key.k == 20} == {
        Key(ANSWERS, 60, "exact", 20, "ask", seed) for seed in range(2)
    }
    (failed,) = [table for table in tables(summarize(SETTINGS, records)) if "fail" in table.about]
    assert [row[0].text for row in failed.rows] == ["exact, k=auto"]
    # an older folder, whose error does not tell whether `k` is a number
    records.forget(Key(FAILURE, 60, "exact", "auto"))
    records.add(Key(FAILURE, 60, "exact"), {"words": "k: got 'auto', but"})
    comparison(model, tmp_path, plan).run()
    assert [key.k for key, _ in Records(tmp_path).of(FAILURE)] == ["auto"]


def test_prompts_may_be_read_sparsely(tmp_path):
    """If all blocks are read, the result is that of full attention. Otherwise it is not, although
    decode steps attend to all tokens."""
    plan, found = Plan(("exact",), (10_000,), ("ask",), (1024,), 1), {}
    text, model = ids_of(1024, 9), build("llama", max_position_embeddings=1024)
    for mass in (1.0, 0.1):
        regions = {**SETTINGS.regions, "prefill": "sparse", "prefill_mass": mass}
        settings = dataclasses.replace(SETTINGS, regions=regions)
        settings.claim(tmp_path / str(mass))
        records = Records(tmp_path / str(mass))
        Comparison(model, Words(), text, settings=settings, plan=plan, records=records).run()
        assert [*records.of(FAILURE)] == []
        assert Key(ANSWERS, 1024, "exact", 10_000, "ask", 0) in records
        found[mass] = dict(records.of(TEXT))[Key(TEXT, 1024, "exact", 10_000)]
    assert max(map(abs, found[1.0]["kl"])) < 1e-6
    assert max(found[0.1]["kl"]) > 1e-6
    assert found[0.1]["rows_read"] == found[0.1]["rows_full"]


def test_an_interrupted_run_goes_on_to_the_same_numbers(model, tmp_path, whole):
    def interrupt(done, total, what):
        if done > total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison(model, tmp_path).run(interrupt)
    file = tmp_path / "results.jsonl"
    before = file.read_bytes()
    assert 2 < before.count(b"\n") < 12
    file.write_bytes(before + b'{"kind": "text", "tok')  # the machine went down, too
    done = []
    comparison(model, tmp_path).run(lambda *progress: done.append(progress))
    assert file.read_bytes().startswith(before)
    assert numbers(tmp_path) == numbers(whole)
    assert done[0][0] == 0
    assert done[-1][0] == done[-1][1]
    done.clear()
    comparison(model, tmp_path).run(lambda *progress: done.append(progress))
    assert done == []


def test_a_plan_may_grow(model, tmp_path, whole):
    comparison(model, tmp_path, Plan(("exact",), (3,), (), (60,), 1)).run()
    comparison(model, tmp_path).run()
    assert numbers(tmp_path) == numbers(whole)


def test_what_an_index_cannot_do_is_told_in_words_and_tried_again(model, tmp_path, monkeypatch):
    plan, kind = Plan(("quest:page=4", "exact"), (3,), ("ask",), (40, 60), 1), kvindex.get("quest")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_search", lambda *args: 1 / 0)
        comparison(model, tmp_path, plan).run()
    failures = dict(Records(tmp_path).of(FAILURE))
    assert failures == {
        Key(FAILURE, 40, None, task="ask"): {"words": "tokens: got 40, allowed is 50 or more"},
        Key(FAILURE, 40, "quest:page=4"): {"words": "ZeroDivisionError: division by zero"},
        Key(FAILURE, 60, "quest:page=4"): {"words": "ZeroDivisionError: division by zero"},
    }
    assert Key(ANSWERS, 60, "exact", 3, "ask", 0) in Records(tmp_path)
    comparison(model, tmp_path, plan).run()
    assert [key.index for key, _ in Records(tmp_path).of(FAILURE)] == [None]
    assert Key(ANSWERS, 60, "quest:page=4", 3, "ask", 0) in Records(tmp_path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(tokens=(600,)), "tokens: got 600, allowed is at most 512"),
        (dict(tokens=(60, 200)), "text: got 120 tokens, allowed is at least 200"),
        (
            dict(tokens=(10,)),
            "steps: got 6, allowed is at most half of the shortest prompt, which has 10",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused(model, tmp_path, plan, message):
    options = dict(indexes=("exact",), ks=(3,), tasks=(), tries=1)
    with pytest.raises(ValueError, match=message):
        comparison(model, tmp_path, Plan(**options, **plan))


def test_a_folder_is_of_one_kind_of_settings(tmp_path):
    SETTINGS.claim(tmp_path / "new")
    SETTINGS.claim(tmp_path / "new")
    with pytest.raises(
        ValueError, match=r"dtype: got 'float16', but the results in .* were measured with"
    ):
        Settings("tiny", "random", dtype="float16", steps=6, regions=SETTINGS.regions).claim(
            tmp_path / "new"
        )
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="out: got"):
        SETTINGS.claim(tmp_path / "file")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            dict(indexes=("exact", "exact")),
            r"index: got \['exact', 'exact'\], allowed is a list without repeated values",
        ),
        (dict(ks=()), "k: got no value"),
        (dict(tokens=(0,)), "tokens: got 0"),
        (dict(tries=0), "tries: got 0"),
    ],
)
def test_a_plan_is_checked(changed, message):
    plan = dict(indexes=("exact",), ks=(3,), tasks=(), tokens=(60,), tries=1)
    with pytest.raises(ValueError, match=message):
        Plan(**{**plan, **changed})


def test_what_a_prompt_left_is_gone_before_the_next(model):
    gc.disable()
    try:
        reading = InstanceReading(model, Words(), asked("ask", None, tokens=60, seed=1))
        held = weakref.ref(reading)
        del reading
        assert held() is None
    finally:
        gc.enable()
