"""The suite `field`: the same queries for every index, one reading per text, every cell stored."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

import kvindex
from kvindex.ops.attention import attend
from kvindex_adapters.evaluate.compare import continuation, outputs, suite
from kvindex_adapters.evaluate.compare.outputs import LayerSteps, measure_outputs
from kvindex_adapters.evaluate.compare.readings import FieldReading, TextReading
from kvindex_adapters.evaluate.compare.records import FAILURE, SKIPPED, TEXT, Key, Records
from kvindex_adapters.evaluate.compare.replay import Taken, indexed, recorded
from kvindex_adapters.evaluate.compare.report import FIELD_SCHEMA, write_report
from kvindex_adapters.evaluate.compare.run import Comparison
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.suite import FieldPlan
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import VOCABULARY, build

REGIONS = dict(sink=4, local_window=8, update_every=8)
SETTINGS = Settings("tiny", "several", steps=8, regions=REGIONS, suite="field")


def ids_of(length, seed=0):
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _budgets(monkeypatch):
    monkeypatch.setattr(suite, "BUDGETS", (3, 8, 200))
    monkeypatch.setattr(suite, "PUBLISHED", {"quest": suite.Published("quest:page=4", 8)})


def plan(*methods, texts=("a",), tokens=(80,), explicit=False):
    return FieldPlan(methods=methods, names=texts, tokens=tokens, explicit=explicit)


def comparison(model, folder, plan, settings=SETTINGS):
    texts = {name: ids_of(160, seed) for seed, name in enumerate(plan.names)}
    options = dict(settings=settings, plan=plan, records=Records(folder))
    return Comparison(model, Words(), texts, **options)


def through(model, index, k, length=80, steps=8, **options):
    """Measure an index on a text as the suite does."""
    reading = FieldReading(model, ids_of(length), steps, REGIONS)
    ids = reading.context.ids
    with indexed(model, ids, index=index, observed=True, **REGIONS, **options) as cache:
        cache.read(reading.context)
        return reading.through(cache, k)


@pytest.mark.parametrize("at_once", [2**24, 1])
def test_the_error_is_that_of_attention_to_the_retrieved_rows(model, at_once, monkeypatch):
    """Compute output, recall and coverage of one layer again, from its queries, keys and values."""
    monkeypatch.setattr(outputs, "AT_ONCE", at_once)
    ids, k = ids_of(80), 3
    prompt, logits, taken, tokens, _ = recorded(model, ids[:72], ids[72:], **REGIONS)
    assert tokens == 64
    with torch.no_grad():
        assert torch.allclose(logits, model(ids[None]).logits[0, 72:], atol=1e-4)
    found = through(model, "exact", k)
    for number, (one,) in enumerate(taken):
        keys, values = (
            torch.cat([prompt.layers[number][name], getattr(one, name)], 2)
            for name in ("keys", "values")
        )
        G, each = keys.shape[1], one.queries.shape[1] // keys.shape[1]
        errors, recalls, coverages = [], [], []
        index = kvindex.create("exact", q_heads=4, kv_heads=2, head_dim=16)
        valid = torch.arange(tokens)[None] >= 4
        index.append(keys[:, :, :tokens], values[:, :, :tokens], valid=valid)
        for t in range(8):
            query = one.queries[:, :, t]
            chosen = index.search(query, k=k).ids[0]  # [G, k]
            near = [*range(4), *range(tokens, 72 + t + 1)]
            rows = torch.cat([chosen, torch.tensor(near).expand(G, -1)], 1)[..., None]
            some = (part[0].gather(1, rows.expand(-1, -1, 16))[None] for part in (keys, values))
            output = attend(query, *some, scale=0.25)
            errors.append((output[0] - one.outputs[0, :, t]).norm(dim=-1))
            errors[-1] = errors[-1] / one.outputs[0, :, t].norm(dim=-1)
            scores = torch.einsum("ghd,gnd->ghn", query[0].unflatten(0, (G, each)), keys[0])
            scores = scores[..., 4:tokens]
            best = scores.topk(k).indices + 4
            recalls.append((best[..., None] == chosen[:, None, None]).any(-1).float().mean())
            weights = (0.25 * scores).softmax(-1)
            ours = (chosen - 4)[:, None].expand(-1, each, -1)
            coverages.append(weights.gather(-1, ours).sum(-1).mean())
        error = float(torch.stack(errors).mean())
        assert found["error_by_layer"][number] == pytest.approx(error, rel=1e-3)
        recall = float(torch.stack(recalls).mean())
        assert found["recall_by_layer"][number] == pytest.approx(recall, abs=1e-4)
        coverage = float(torch.stack(coverages).mean())
        assert found["coverage_by_layer"][number] == pytest.approx(coverage, abs=1e-4)
    assert len(found["error_by_step"]) == 8


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_all_rows_are_full_attention(family):
    """Also in models with sliding windows, a softcap, learned sinks or latents."""
    found = through(build(family), "exact", 500)
    assert max(found["error_by_layer"]) < 1e-5
    assert max(map(abs, found["kl"])) < 1e-5
    assert found["same"] == [1] * 8
    assert found["recall"] == pytest.approx(1)
    assert found["coverage"] == pytest.approx(1, abs=1e-5)
    assert found["rows_read"] == found["rows_full"]


def test_linear_attention_is_named():
    with pytest.raises(ValueError, match="which has linear attention"):
        through(build("falcon_h1"), "exact", 5)


@pytest.mark.parametrize(
    "index", ["exact", "quest:page=4", "h2o:budget=20", "retroinfer", "magicpig", "exact+reuse"]
)
def test_recall_of_the_first_layer_is_that_of_the_whole_model(index):
    """The queries of the first layer do not depend on attention, so both measures agree."""
    model = build("llama", num_hidden_layers=1)
    ids = ids_of(80)
    reading = TextReading(model, ids, 8)
    with indexed(model, ids[:72], index=index, **REGIONS) as cache:
        cache.read(reading.context)
        want = reading.through(cache, 5)
    found = through(model, index, 5)
    for name in ("recall", "coverage"):
        assert found[name] == pytest.approx(want[name], abs=1e-4), name
    assert found["weighted"] == want["weighted"]


@pytest.mark.parametrize("index", ["snapkv:budget=40", "h2o:budget=20", "infllm:page=4", "ctkvr"])
def test_recorded_queries_replace_another_reading(model, index):
    """An index that uses a prompt's queries gives the same results without a second reading."""
    ids = ids_of(80)
    reading = TextReading(model, ids, 8)
    with indexed(model, ids[:72], index=index, **REGIONS) as cache:
        cache.read(reading.context)
        want = reading.through(cache, 5)
    found = through(model, index, 5)
    assert found["kl"] == pytest.approx(want["kl"], rel=1e-3, abs=1e-6)
    for name in ("rows_read", "rows_found"):
        assert found[name] == pytest.approx(want[name]), name


def test_the_model_reads_a_text_once(model, tmp_path):
    read = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        comparison(model, tmp_path, plan("exact", "snapkv:budget={k}", "quest:page=4")).run()
    finally:
        hook.remove()
    assert read.count(72) == 1  # the prompt
    assert max(count for count in read if count != 72) <= 8


def test_every_cell_has_figures_or_a_reason(model, tmp_path):
    """Also a method that cannot be created, and a budget that is larger than the index."""
    given = plan("exact", "quest", "h2o:budget={k}", "exact:backend=cuda", texts=("a", "b"))
    comparison(model, tmp_path, given).run()
    records = Records(tmp_path)
    assert [*records.of(FAILURE)] == []
    skipped = dict(records.of(SKIPPED))
    for text in "ab":
        assert "contains 60 rows" in skipped[Key(SKIPPED, 80, "exact", 200, text=text)]["words"]
        failed = skipped[Key(SKIPPED, 80, "exact:backend=cuda", 3, text=text)]
        assert failed["failed"]
        assert failed["words"]
        for key in (("h2o:budget=3", 3), ("h2o:budget=8", 8), ("quest:page=4", 8)):
            assert Key(TEXT, 80, *key, text=text) in records
    summary = write_report(tmp_path, SETTINGS, records)
    table = json.loads((tmp_path / "field.json").read_text())
    assert table["schema"] == FIELD_SCHEMA
    assert table["cells"] == json.loads(json.dumps(summary["field"]))
    cells = {(row["method"], row["budget"]): row for row in table["cells"]}
    names = ("exact", "h2o:budget={k}", "exact:backend=cuda")
    wanted = {(name, budget) for name in names for budget in ("3", "8", "200")}
    assert cells.keys() == wanted | {("quest", b) for b in ("3", "8", "200", "published")}
    for (method, budget), row in cells.items():
        measured = budget != "200" and method != "exact:backend=cuda"
        assert (row["reason"] is None) == measured
        assert ("error" in row) == measured
    row = cells["quest", "published"]
    assert row["index"] == "quest:page=4"
    assert row["texts"] == ["a", "b"]
    assert row["steps"] == 16
    assert row["error_low"] - 1e-5 <= row["error"] <= row["error_high"] + 1e-5
    assert row["error"] <= row["error_worst"]
    assert row["read_fraction"] > 0
    assert row["over_exact"] > 0
    page = (tmp_path / "report.html").read_text()
    assert "The field, 80 tokens" in page
    assert "Cells that are not measured" in page


def test_texts_are_pooled(model, tmp_path):
    """Figures about two texts are means of those of each text."""
    comparison(model, tmp_path, plan("quest:page=4", texts=("a", "b"))).run()
    records = Records(tmp_path)
    each = [dict(records.of(TEXT))[Key(TEXT, 80, "quest:page=4", 3, text=text)] for text in "ab"]
    row, *_ = write_report(tmp_path, SETTINGS, records)["field"]
    kl = [value for one in each for value in one["kl"]]
    assert row["kl"] == pytest.approx(sum(kl) / len(kl))
    layers = [sum(pair) / 2 for pair in zip(*(one["error_by_layer"] for one in each), strict=True)]
    assert row["error_worst"] == pytest.approx(max(layers))
    assert row["worst_layer"] == layers.index(max(layers))


def stable(folder):
    """Return all results, without the counts that depend on the order of measurements."""
    return dict(Records(folder).of(TEXT)), dict(Records(folder).of(SKIPPED))


def test_a_run_in_pieces_ends_with_the_same_numbers(model, tmp_path):
    given = plan("exact", "quest", "pariskv", texts=("a", "b"))
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    for folder in (whole, pieces):
        SETTINGS.claim(folder)
    assert comparison(model, whole, given).run() == 0
    left = [comparison(model, pieces, given).run(minutes=1e-9) for _ in range(3)]
    assert left[0] > left[1] > left[2] > 0
    while comparison(model, pieces, given).run(minutes=1e-9):
        pass
    (measured, skipped), (again, skipped_again) = stable(whole), stable(pieces)
    assert measured.keys() == again.keys()
    assert skipped == skipped_again
    for key, record in measured.items():
        assert record["kl"] == pytest.approx(again[key]["kl"], abs=1e-6)
        assert record["error_by_layer"] == pytest.approx(again[key]["error_by_layer"], abs=1e-6)


def test_a_failed_cell_is_repeated_only_if_its_index_is_named(model, tmp_path, monkeypatch):
    broken, done = [True], []
    original = FieldReading.through

    def failing(self, cache, k):
        done.append(k)
        if broken[0] and k == 8:
            raise MemoryError("no more")
        return original(self, cache, k)

    monkeypatch.setattr(FieldReading, "through", failing)
    comparison(model, tmp_path, plan("exact")).run()
    key = Key(SKIPPED, 80, "exact", 8, text="a")
    assert dict(Records(tmp_path).of(SKIPPED))[key]["words"] == "MemoryError: no more"
    assert done == [3, 8]
    broken[0] = False
    comparison(model, tmp_path, plan("exact")).run()
    assert done == [3, 8]
    comparison(model, tmp_path, plan("exact", explicit=True)).run()
    assert done == [3, 8, 8]
    assert key not in Records(tmp_path)
    assert dataclasses.replace(key, kind=TEXT) in Records(tmp_path)


def test_results_of_earlier_versions_name_no_text_and_no_suite(tmp_path):
    old = {"kind": "text", "tokens": 60, "index": "exact", "k": 3, "task": None, "seed": None}
    (tmp_path / "results.jsonl").write_text(json.dumps({**old, "kl": [0.5]}) + "\n")
    assert Key(TEXT, 60, "exact", 3) in Records(tmp_path)
    Settings("tiny", "several").claim(tmp_path)
    stored = json.loads((tmp_path / "settings.json").read_text())
    del stored["suite"]
    (tmp_path / "settings.json").write_text(json.dumps(stored))
    Settings("tiny", "several").claim(tmp_path)
    with pytest.raises(ValueError, match="suite: got 'field', but the results in"):
        Settings("tiny", "several", suite="field").claim(tmp_path)


def test_steps_that_move_tokens_into_the_index_are_compared_with_what_it_contains(model):
    """After 8 of 20 steps, tokens move into the index. Later searches cover more tokens."""
    found = through(model, "exact", 500, length=92, steps=20)
    assert found["recall"] == pytest.approx(1)
    assert max(found["error_by_layer"]) < 1e-5
    few = through(model, "quest:page=4", 4, length=92, steps=20)
    assert 0 < few["recall"] < 1


def test_no_search_has_no_recall():
    """If the index is empty in all steps, outputs are exact, and recall is unknown."""
    model = build("llama", num_hidden_layers=2)
    found = through(model, "exact", 5, length=14, steps=4)
    assert found["recall"] is found["coverage"] is None
    assert max(found["error_by_layer"]) < 1e-5
    assert found["rows_read"] == found["rows_full"] == 12.5


def test_learned_sinks_are_passed_to_the_layer():
    """Sinks per head and per token are split like the steps."""
    g = dict(q_heads=2, kv_heads=1, head_dim=8)
    q, k, v, out = (torch.randn(1, n, 6, 8) for n in (2, 1, 1, 2))
    for sinks in (torch.zeros(2), torch.zeros(1, 2, 6)):
        seen = []

        def step(q, k, v, sink_logits, seen=seen):
            seen.append((q.shape[2], sink_logits.shape))
            return torch.zeros(1, 2, q.shape[2], 8)

        layer = SimpleNamespace(
            index=kvindex.create("exact", **g), parallel=False, step=step, pause=lambda: None
        )
        steps = LayerSteps(k[:, :, :0], [Taken(q, k, v, out, sinks)], 0)
        result = steps.measure(layer, 3)
        assert result.error.tolist() == pytest.approx([1.0] * 6)
        assert len(seen) == 6
        assert {shape for _, shape in seen} == {(2,) if sinks.dim() == 1 else (1, 2, 1)}


def test_traffic_adds_up(model):
    """A step of `exact` reads all keys of the index, the retrieved rows, the sink, the window."""
    found = through(model, "exact", 5)
    row, layers, heads = 2 * 16 * 4, 2, 2  # bytes of a row in float32
    assert found["rows_found"] == 5
    window = 72 + 4.5 - 64  # mean over 8 steps
    assert found["rows_read"] == pytest.approx(4 + window + 5)
    assert found["step_bytes"] == 5 * row * heads * layers
    assert found["scan_bytes"] == pytest.approx(64 * row / 2 * heads * layers)
    others = (4 + window) * row * heads * layers
    assert found["read_bytes"] == pytest.approx(found["scan_bytes"] + found["step_bytes"] + others)
    assert found["full_bytes"] == pytest.approx((72 + 4.5) * row * heads * layers)


def test_measuring_leaves_the_index_unchanged(model):
    reading = FieldReading(model, ids_of(80), 8, REGIONS)
    with indexed(model, ids_of(72), index="quest:page=4", observed=True, **REGIONS) as cache:
        cache.read(reading.context)
        first = reading.through(cache, 5)
        lengths = [len(layer) for layer in cache.layers]
        indexes = [layer.index for layer in cache.layers]
        measure_outputs(cache, reading._layers, k=3)
        assert [len(layer) for layer in cache.layers] == lengths == [72, 72]
        assert [layer.index for layer in cache.layers] == indexes
        assert reading.through(cache, 5) == first


def test_predictions_are_those_of_divergence(model):
    ids = ids_of(80)
    reading = TextReading(model, ids, 8)
    with indexed(model, ids[:72], index="quest:page=4", **REGIONS) as cache:
        cache.read(reading.context)
        kl, same = continuation.predictions(cache, ids[72:], reading._logits, k=5)
        want = continuation.divergence(cache, ids[72:], reading._logits, k=5)
    assert torch.equal(kl, want[0])
    assert torch.equal(same, want[1])
