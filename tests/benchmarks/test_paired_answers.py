"""Answers to the same prompts in several ways: the script on a tiny model, its parts, its table."""

import gc
import json
import re
import zlib
from argparse import ArgumentTypeError
from collections import Counter

import pytest
import torch

from benchmarks import paired_answers, report
from benchmarks.common import paired, reading
from benchmarks.reporting.paired import one
from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import DEFAULT_K
from kvindex.layer.updates import Updates
from kvindex_adapters.decoder import Decoder, recording, session
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.prefill import read_by_layer
from kvindex_adapters.evaluate.tasks.instance import Instance
from tests.adapters.tiny import build, byte_pairs
from tests.benchmarks.running import MACHINE

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32"]
ALL = ["full", "k=100", "auto:0.3", "exact@100", "sparse:k=100"]


@pytest.fixture
def tiny(monkeypatch):
    model = build("llama", vocab_size=2000, num_hidden_layers=2)
    monkeypatch.setattr(reading, "load", lambda *_, **__: (model, byte_pairs()))


@pytest.fixture
def asked(tiny, monkeypatch):
    """Put known scores in place of answers. Return the list of prompts and ways."""
    asked = []
    scores = {"needle": {"full": 1.0, "k=100": 0.0}, "copy": {"full": 1.0, "k=100": 1.0}}

    def answers(decoder, tokenizer, keys, ways, *_):
        for name in map(str, ways):
            asked.extend((*key, name) for key in keys)
            yield [answer(key, name) for key in keys]

    def answer(key, name):
        known = scores[key[0]] | {"auto:0.1": 1.0}
        rows = {name: 100.0} if name == "k=100" else {}
        found = dict(scores={name: known[name]}, rows=rows, ceiling={}, seconds={name: {}})
        return dict(zip(("task", "tokens", "seed"), key, strict=True)) | found

    monkeypatch.setattr(paired_answers, "answers", answers)
    return asked


def run(out, *given):
    length = () if "--tokens" in given else ("--tokens", "400")
    paired_answers.main([*TINY, *length, *given, "--json", str(out)])
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture
def reads(monkeypatch):
    """Return a list with the ids of each prompt that the model reads."""
    reads = []

    def counted(weights, config, ids, *rest):
        reads.append(ids)
        return read_by_layer(weights, config, ids, *rest)

    for module in (recording, session):
        monkeypatch.setattr(module, "read_by_layer", counted)
    return reads


def test_each_prompt_is_read_once_and_answered_in_each_way(tiny, reads, tmp_path):
    some = "--tasks", "needle", "--tries", "1", "--tokens", "2500", "--ways", *ALL
    found = run(tmp_path / "out.json", *some)
    assert len(reads) == 2  # with full attention, and with sparse attention
    [cell] = found["cells"]
    assert [*cell["scores"]] == ["full", "k=100", "auto:0.3", "exact@100", "sparse:k=100"]
    assert all(0 <= score <= 1 for score in cell["scores"].values())
    rows = cell["rows"]
    assert "full" not in rows
    assert [rows[name] for name in ("k=100", "exact@100", "sparse:k=100")] == [100, 100, 100]
    assert 16 <= rows["auto:0.3"] <= 1024
    assert rows["auto:0.3"] != 100
    assert [*cell["ceiling"]] == ["auto:0.3"]
    assert 0 <= cell["ceiling"]["auto:0.3"] < 1
    assert found["machine"]["device"] == "cpu"
    assert "machines" not in found


@pytest.fixture
def made(monkeypatch):
    """Return a dict that gets the session and the ids of the answers of each way."""
    made, answered = {}, paired_answers.answered

    def noted(*given):
        for one_way, own, ids in answered(*given):
            made[str(one_way)] = own.report(), [one.tolist() for one in ids]
            yield one_way, own, ids

    monkeypatch.setattr(paired_answers, "answered", noted)
    return made


def answer(keys, *names):
    decoder, ways = Decoder.of(*reading.load()), [*map(paired.way, names)]
    learning = paired_answers.learning_from_queries(decoder, ways, "pariskv")
    given = decoder, decoder.tokenizer, keys, ways, "pariskv", learning
    return [*paired_answers.answers(*given)]


def test_answers_are_those_of_separate_calls(tiny, made):
    """Answers from a recording equal those of a decoder that reads the prompt for each way."""
    answer([("needle", 2500, 0)], *ALL)
    decoder = Decoder.of(*reading.load())
    instance = paired_answers.tasks.make("needle", decoder.tokenizer, tokens=2500, seed=0)
    prompt = torch.cat([instance.context, instance.questions[0].ids])
    most = instance.questions[0].max_new_tokens
    sparse = {"prefill": "sparse"}
    for name, options in {
        "full": dict(index=None),
        "k=100": dict(k=100),
        "auto:0.3": dict(k="auto", attach_options={"error": 0.3}),
        "exact@100": dict(index="exact", k=100),
        "sparse:k=100": dict(k=100, attach_options=sparse),
    }.items():
        want = decoder.generate(prompt, max_new_tokens=most, **options)
        assert made[name][1] == [want.answer_ids.tolist()], name


LATE = ["ctkvr", "louiskv", "h2o", "quest", "pariskv"]
"""Indexes; the first ones compute codes at the end of the prompt."""


def test_an_index_is_built_once_for_all_numbers_of_rows(tiny, made, monkeypatch):
    """The answers and rows are those of an index of its own for each number."""
    ended, end_prompt = Counter(), Updates.end_prompt

    def counted(self):
        ended["prompts"] += 1
        end_prompt(self)

    monkeypatch.setattr(Updates, "end_prompt", counted)
    keys = [("needle", 2500, seed) for seed in range(2)]
    names = [f"{index}@{k}" for index in LATE for k in (16, 64)]
    answer(keys, *names)
    assert ended["prompts"] == 2 * len(LATE)  # the model has two layers
    together = {**made}
    for name in names:
        answer(keys, name)
    assert together == made
    assert len({str(ids) for _, ids in made.values()}) > len(LATE)


def test_answers_of_a_batch_are_those_of_single_prompts(tiny, tmp_path, monkeypatch):
    """`--batch` changes neither the prompts nor, up to rounding, the answers and rows."""
    monkeypatch.setattr(Instance, "score", lambda _, number, text: zlib.crc32(text.encode()))
    ways = ["full", "k=3000", "exact@3000", "k=100", "auto:0.3", "quest@128"]
    some = "--tasks", "needle", "copy", "--tries", "3", "--tokens", "2500", "--ways", *ways
    single = run(tmp_path / "single.json", *some)
    together = run(tmp_path / "together.json", *some, "--batch", "2")
    cells = [{paired.key(cell): cell for cell in found["cells"]} for found in (single, together)]
    assert cells[0].keys() == cells[1].keys()
    assert len(cells[0]) == 6
    for key, cell in cells[0].items():
        other = cells[1][key]
        for name in ways[:3]:  # which attend to all rows
            assert other["scores"][name] == cell["scores"][name] > 0
        assert other["rows"].keys() == cell["rows"].keys()
        for name in ("k=100", "quest@128"):
            assert other["rows"][name] == pytest.approx(cell["rows"][name], rel=0.1)
        assert 16 <= other["rows"]["auto:0.3"] <= 1024
        assert [*other["ceiling"]] == ["auto:0.3"]


EVERY = ["full", "k=100", "auto:0.3", "h2o:budget={k}@512", "sentencekv@128", "quest@128"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_recorded_prompt_changes_no_answer(tiny, reads, tmp_path, monkeypatch, batch):
    """The answers and numbers of rows are those of ways that each read the prompt themselves."""
    monkeypatch.setattr(Instance, "score", lambda _, number, text: zlib.crc32(text.encode()))
    ways = EVERY if batch > 1 else [*EVERY, "sparse:k=100"]
    some = "--tasks", "copy", "--tries", str(batch), "--tokens", "2500", "--ways", *ways
    some = *some, "--batch", str(batch)
    found = run(tmp_path / "once.json", *some)
    assert len(reads) == 1 + (batch == 1)  # sparse attention reads the prompt itself
    lengths = {int((row != 0).int().argmax()) for row in reads[0]}
    assert len(lengths) == batch  # the questions have different lengths
    monkeypatch.setattr(
        recording.Recording, "read", lambda _, *given: session.read_by_layer(*given)
    )
    monkeypatch.setattr(recording.Recording, "record", lambda *_: None)
    own = run(tmp_path / "own.json", *some)
    assert len(reads) > 5
    for cell, other in zip(own["cells"], found["cells"], strict=True):
        assert all(cell[field] == other[field] for field in ("task", "seed", *paired.NUMBERS))
    assert all(len({*cell["scores"].values()}) > 3 for cell in own["cells"])


def test_ways_that_need_queries_come_first_and_then_queries_are_freed(tiny, monkeypatch):
    kept, read = [], recording.Recording.read

    def noted(self, *given):
        kept.append((self.queries, self.outputs))
        return read(self, *given)

    monkeypatch.setattr(recording.Recording, "read", noted)
    for names, needed in {
        ("exact@100", "sparse:h2o@100", "sparse:auto", "full"): [(False, False)] * 2,
        ("exact@9", "auto", "snapkv@9", "full"): [
            *((True, True), (True, True), (False, True), (False, False))
        ],
    }.items():
        kept.clear()
        answer([("copy", 400, 0)], *names)
        assert kept == needed, names
    groups = paired_answers.grouped([*map(paired.way, names)], "pariskv", {"snapkv"})
    assert [group.index for group in groups] == [None, "snapkv", "pariskv", "exact"]


@pytest.mark.parametrize("batch", [1, 2])
def test_one_recording_and_one_index_are_in_memory(tiny, tmp_path, monkeypatch, batch):
    calls, read = [], recording.Recording.read

    def checked(self, *given):
        kinds = AttentionLayer, DenseAttention, recording.Recording
        alive = [one for one in gc.get_objects() if type(one) in kinds]
        alive = [one for one in alive if type(one) is recording.Recording or len(one)]
        calls.append([one for one in alive if one is not self])
        return read(self, *given)

    monkeypatch.setattr(recording.Recording, "read", checked)
    some = "--tasks", "copy", "--tries", str(2 * batch), "--tokens", "400", "--batch", str(batch)
    gc.disable()
    try:
        run(tmp_path / "out.json", *some, "--ways", "full", "exact@9", "quest@9", "k=9")
    finally:
        gc.enable()
    assert len(calls) > 4
    assert not any(calls)


def test_batches_have_one_task_and_length():
    ways, more = [paired.way("full")], [paired.way("full"), paired.way("k=1")]
    keys = [(task, 400, seed) for seed in range(3) for task in ("needle", "copy")]
    missing = [(key, more if key[2] == 2 else ways) for key in keys]
    found = paired_answers.batches(missing, 2)
    assert [keys for keys, _ in found] == [
        [("needle", 400, 0), ("needle", 400, 1)],
        [("copy", 400, 0), ("copy", 400, 1)],
        [("needle", 400, 2)],
        [("copy", 400, 2)],
    ]
    assert [given for _, given in found] == [ways, ways, more, more]
    for wrong in (["0"], ["2", "--ways", "full", "sparse:k=100"]):
        with pytest.raises(SystemExit):
            paired_answers.arguments(["--batch", *wrong])


def test_rows_of_a_codec_do_not_serve_full_attention():
    full, fixed = paired.way("sparse:full"), paired.way("k=100")
    assert paired_answers.index_of(paired.way("full"), "pariskv") is None
    assert paired_answers.index_of(full, "pariskv") == "pariskv"
    assert paired_answers.index_of(full, "pariskv:row_codec=int8") == "exact"
    assert paired_answers.index_of(fixed, "pariskv:row_codec=int8") == "pariskv:row_codec=int8"
    assert paired_answers.index_of(paired.way("exact@100"), "pariskv") == "exact"


def test_an_index_may_have_options_by_the_number_of_rows():
    policy = paired.way("h2o:budget={k}@512")
    assert paired_answers.index_of(policy, "pariskv") == "h2o:budget=512"
    assert policy.described == "`h2o:budget={k}`, `k=512`"
    lists = paired.way("ctkvr:rho={5k/2}@128")
    assert paired_answers.index_of(lists, "pariskv") == "ctkvr:rho=320"


def test_parts_are_joined_and_each_answer_counts_once(asked, tmp_path):
    some = "--tasks", "needle", "copy", "--tries", "2", "--ways", "full", "k=100"
    one = "--tasks", "needle", "--tries", "1", "--ways", "full", "k=100"
    first = run(tmp_path / "first.json", *one)
    assert len(first["cells"]) == 1
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for number, file in enumerate(files):  # both files contain the cell of the first
        more = "--part", f"{number}/2", "--from", str(tmp_path / "first.json")
        run(file, *some, *more)
    assert len(asked) == 8
    joined = run(tmp_path / "joined.json", *some, "--from", *map(str, files), "--seconds", "0")
    assert len(asked) == 8
    assert len(joined["cells"]) == 4
    base, other = (line for line in joined["summary"] if line["tokens"] is line["task"] is None)
    assert (base["way"], base["score"], base["prompts"]) == ("full", 1, 4)
    assert "difference" not in base
    assert (other["way"], other["score"], other["difference"]) == ("k=100", 0.5, -0.5)
    assert other["low"] < -0.5 < other["high"]
    assert (base["rows"], other["rows"]) == (None, 100)
    tasks = {
        line["task"]: line["difference"] for line in joined["summary"] if line["way"] != "full"
    }
    assert (tasks["copy"], tasks["needle"]) == (0, -1)


@pytest.mark.parametrize("tasks", [1, 2, 3, 6])
@pytest.mark.parametrize("lengths", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4, 13])
def test_each_part_gets_all_tasks_and_lengths(tasks, lengths, count):
    names, each = paired_answers.TASKS[:tasks], tasks * lengths
    given = ["--tasks", *names, "--tokens", *["400", "500"][:lengths], "--tries", "52"]
    parts = [
        paired_answers.prompts(paired_answers.arguments([*given, "--part", f"{number}/{count}"]))
        for number in range(count)
    ]
    assert all(len({key[:2] for key in part}) == each for part in parts)
    assert sum(map(len, parts)) == len({key for part in parts for key in part}) == 52 * each


def test_ways_are_finite_and_measured_once():
    given = paired_answers.arguments(["--ways", "k=100", "auto", "auto:0.1", "k=100"])
    assert [*map(str, given.ways)] == ["k=100", "auto:0.1"]
    assert paired.way(str(paired.way("auto:0.12345678"))) == paired.way("auto:0.12345678")
    with pytest.raises(ArgumentTypeError, match="got 'auto:inf'"):
        paired.way("auto:inf")


def test_a_run_continues_its_own_file_and_measures_only_missing_ways(asked, tmp_path):
    some = "--tasks", "needle", "copy", "--tries", "1", "--ways", "full", "k=100"
    run(tmp_path / "out.json", *some)
    asked.clear()
    assert len(run(tmp_path / "out.json", *some)["cells"]) == 2
    assert not asked
    found = run(tmp_path / "out.json", *some, "auto")
    assert asked == [("needle", 400, 0, "auto:0.1"), ("copy", 400, 0, "auto:0.1")]
    assert found["ways"] == ["full", "k=100", "auto:0.1"]
    assert [*found["cells"][0]["scores"]] == ["full", "k=100", "auto:0.1"]


def test_an_interrupted_run_has_written_its_answers(asked, tmp_path, monkeypatch):
    """A later run first completes the prompt that has answers. The summary follows at its end."""
    answers = paired_answers.answers

    def interrupted(decoder, tokenizer, keys, ways, *more):
        for number, cells in enumerate(answers(decoder, tokenizer, keys, ways, *more)):
            if keys[0][0] == "copy" and number:
                raise KeyboardInterrupt
            yield cells

    some = "--tasks", "copy", "needle", "--tries", "2", "--ways", "full", "k=100"
    with monkeypatch.context() as patch:
        patch.setattr(paired_answers, "answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out.json", *some, "--batch", "2")
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [(cell["task"], [*cell["scores"]]) for cell in found["cells"]] == [
        ("copy", ["full"])
    ] * 2
    assert found["summary"] == []
    asked.clear()
    more = "--tasks", "needle", "copy", "--tries", "2", "--ways", "full", "k=100"
    found = run(tmp_path / "out.json", *more, "--batch", "2")
    assert [(task, seed, name) for task, _, seed, name in asked] == [
        *(("copy", 0, "k=100"), ("copy", 1, "k=100")),
        *(("needle", 0, "full"), ("needle", 1, "full")),
        *(("needle", 0, "k=100"), ("needle", 1, "k=100")),
    ]
    assert found["summary"][0]["prompts"] == 4


def test_an_answer_of_a_resumed_run_is_that_of_a_whole_one(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Instance, "score", lambda _, number, text: zlib.crc32(text.encode()))
    ways = "full", "h2o@64", "exact@9", "exact@64"
    some = "--tasks", "needle", "--tries", "2", "--batch", "2", "--tokens", "2500", "--ways", *ways
    whole = run(tmp_path / "whole.json", *some)
    for count in range(1, 5):
        times = iter([0.0, 1.0, 99.0])
        with monkeypatch.context() as patch:
            patch.setattr(paired_answers.time, "monotonic", lambda times=times: next(times))
            found = run(tmp_path / "parts.json", *some, "--seconds", "9")
        assert all(len(cell["scores"]) == count for cell in found["cells"])
    for cell, other in zip(found["cells"], whole["cells"], strict=True):
        assert all(cell[field] == other[field] for field in paired.NUMBERS)
        assert cell["seconds"].keys() == {*ways}
        assert all(part["answering"] >= 0 for part in cell["seconds"].values())
        assert "building" in cell["seconds"]["exact@64"]  # resumed between two ways of an index
        assert "building" not in other["seconds"]["exact@64"]


def test_time_ends_before_the_next_way(asked, tmp_path, monkeypatch, capsys):
    times = iter([0.0, 1.0, 2.0, 3.0, 99.0])
    monkeypatch.setattr(paired_answers.time, "monotonic", lambda: next(times))
    some = "--tasks", "needle", "copy", "--tries", "1", "--ways", "full", "k=100"
    cells = run(tmp_path / "out.json", *some, "--seconds", "9")["cells"]
    assert [[*cell["scores"]] for cell in cells] == [["full", "k=100"], ["full"]]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("needle, 400 tokens, seeds 0: full: score 1.00")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--index", "pariskv:preset=fast"], "index='pariskv', allowed is 'pariskv:preset=fast'"),
        (["--lora", "other"], "lora=None, allowed is 'other'"),
    ],
)
def test_results_of_other_settings_raise(asked, tmp_path, given, words):
    one = "--tasks", "needle", "--tries", "1", "--ways", "full"
    run(tmp_path / "one.json", *one)
    with pytest.raises(SystemExit, match=words):
        run(tmp_path / "two.json", *one, "--from", str(tmp_path / "one.json"), *given)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("full", "full"),
        ("k=64", "k=64"),
        ("auto", "auto:0.1"),
        ("auto:.05", "auto:0.05"),
        ("exact@16", "exact@16"),
        ("h2o:budget={k}@16", "h2o:budget={k}@16"),
        ("pariskv:store=device@auto", "pariskv:store=device@auto:0.1"),
        ("sparse:exact@16", "sparse:exact@16"),
        ("sparse", "sparse:k=100"),
        ("sparse:auto", "sparse:auto:0.1"),
        ("sparse:full", "sparse:full"),
    ],
)
def test_names_of_ways(text, name):
    made = paired.way(text)
    assert str(made) == name
    assert paired.way(name) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "k=0",
        "k=x",
        "auto:0",
        "auto:x",
        "exact@-1",
        "exact@autos",
        "full@9",
        "k=5@9",
        "@16",
        "exact@",
        "full:2",
        "dense",
        "sparse:",
    ],
)
def test_a_way_that_does_not_exist(text):
    with pytest.raises(ArgumentTypeError, match=f"ways: got '{text}', allowed is full, k=N"):
        paired.way(text)


@pytest.mark.parametrize("text", ["nosuch@5", "sparse:nosuch:a=1@auto", "nosuch+reuse@5"])
def test_a_way_with_an_index_that_does_not_exist(text, capsys):
    with pytest.raises(ArgumentTypeError, match=f"ways: got '{re.escape(text)}', .*got 'nosuch'"):
        paired.way(text)
    with pytest.raises(SystemExit):
        paired_answers.arguments(["--ways", text])
    assert "got 'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4/4", "-1/2", "half"])
def test_a_part_that_does_not_exist(text):
    with pytest.raises(ArgumentTypeError, match="allowed is 0/N to N-1/N"):
        paired.part(text)


def test_the_table_compares_ways_with_the_first(monkeypatch):
    monkeypatch.setattr("benchmarks.reporting.paired.stored_like", lambda name, one: [one])
    scores = [{"full": 1.0, "auto:0.1": 1.0}, {"full": 1.0, "auto:0.1": 0.5}, {"full": 0.0}]
    cells = [
        dict(
            **dict(task="chain" if tokens == 400 else "copy", tokens=tokens, seed=0, scores=some),
            **dict(rows={"auto:0.1": 120.0 + tokens}, ceiling={"auto:0.1": tokens / 10_000}),
        )
        for tokens, some in zip((400, 800, 800), scores, strict=True)
    ]
    ways = ["full", "auto:0.1"]
    about = dict(model="a/tiny.gguf", lora="lora", index="pariskv", dtype="float32", ways=ways)
    about |= dict(machine=MACHINE, summary=[*paired.summary(cells, ways)], cells=cells)
    page = report.TABLES["paired_answers"](about)
    assert "tiny with lora, in float32" in page
    columns = "prompts | rows | ceiling | correct | minus full attention |"
    assert f"| tokens | decode steps with | {columns}" in page
    assert "| 400 | full attention | 1 |  |  | 100.0 |  |" in page
    auto = '`k="auto"`, `error=0.1`'
    assert f"| 400 | {auto} | 1 | 520 | 4.0% | 100.0 | +0.0 (+0.0 to +0.0) |" in page
    assert "| 800 | full attention | 2 |  |  | 50.0 |  |" in page
    assert f"| 800 | {auto} | 1 | 920 | 8.0% | 50.0 | -50.0 (-50.0 to -50.0) |" in page
    assert f"| all | {auto} | 2 | 720 | 6.0% | 75.0 | -25.0 (-50.0 to +0.0) |" in page
    assert "| all, answered in every way | full attention | 2 |  |  | 100.0 |  |" in page
    assert "| decode steps with | `chain` | `copy` |" in page
    assert f"| {auto} | +0.0 (+0.0 to +0.0) | -50.0 (-50.0 to -50.0) |" in page
    assert page.endswith("with torch 2 and transformers 5.")


def test_the_readme_compares_the_default_with_full_attention():
    """Over the prompts that were answered in both ways. The others count for full attention only
    in the table."""
    default = f"k={DEFAULT_K}"
    scores = [{"full": 1.0, "k=100": 0.0, default: 1.0}, {"full": 1.0, default: 0.5}]
    scores += [{"full": 0.0, default: 0.0}, {"full": 0.0, "k=100": 1.0}]
    cells = [
        dict(task="copy", tokens=tokens, seed=0, scores=some, rows={}, ceiling={})
        for tokens, some in zip((4096, 4096, 16_384, 16_384), scores, strict=True)
    ]
    lines = [*paired.summary(cells, ["full", "k=100", default])]
    text = report.TABLES["default_answers"](dict(model="a/tiny.gguf", lora=None, summary=lines))
    assert f"With the default, {DEFAULT_K} rows" in text
    assert "tiny answered 50.0% of 3 questions correctly, and with full attention 66.7%." in text
    assert "its 95% interval, is -16.7 (-50.0 to +0.0). By the length" in text
    assert "it is -25.0 (-50.0 to +0.0) at 4,096 tokens, +0.0 (+0.0 to +0.0) at 16,384" in text


def test_intervals_of_several_comparisons_are_wider():
    scores = [{"full": 1.0, "k=100": i % 2, "h2o@9": 1.0} for i in range(40)]
    cells = [
        dict(task="copy", tokens=400, seed=seed, scores=some, rows={}, ceiling={})
        for seed, some in enumerate(scores)
    ]
    ways = ["full", "k=100", "h2o@9"]
    lines = [*paired.summary(cells, ways)]
    found = next(line for line in lines if line["way"] == "k=100")
    assert found["low_all"] < found["low"] < -0.5 < found["high"] < found["high_all"]
    about = dict(model="tiny", lora=None, index="pariskv", dtype="float32", ways=ways)
    page = one(about | dict(machine=MACHINE, summary=lines, cells=cells))
    assert "corrected for 2 comparisons" in page
    assert "minus full attention | corrected interval |" in page
    assert "| `h2o`, `k=9` | 40 |  | 100.0 | +0.0 (+0.0 to +0.0) | +0.0 to +0.0 |" in page
