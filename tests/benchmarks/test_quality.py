"""Quality: each part of the script on a tiny model, and a wrong search for comparison."""

import math

import pytest
import torch

from benchmarks import quality, ranks_quality, report
from benchmarks.comparing import fidelity, lists, missed
from benchmarks.comparing.layers import Layer
from benchmarks.comparing.measure import measure, truths
from benchmarks.comparing.truth import Setting
from kvindex.indexes.exact import Exact
from kvindex.ops import priority
from kvindex.pariskv import row_budget
from tests.benchmarks.running import MACHINE, ran


def test_recall_is_measured(tiny, monkeypatch):
    texts, model = tiny
    given = ["recall", *texts, "--tokens", 200, "--written", 4, "-k", 5]
    given += ["--beta", 1, "--presets", "precise", "paper", "scan", *model]
    result = ran(quality.main, given, monkeypatch)
    assert [cell["recall"] > 0.5 for cell in result["cells"]] == [True] * 6


def test_scales_of_keys_are_measured(tiny, monkeypatch):
    texts, model = tiny
    given = ["scales", *texts, "--tokens", 192, "--written", 4, *model]
    cells = ran(quality.main, given, monkeypatch)["cells"]
    assert [cell["bits"] for cell in cells] == 2 * [*[4] * 4, *[2] * 4]
    assert all(
        0 < few["error"] < fewer["error"] for few, fewer in zip(cells, cells[4:8], strict=False)
    )


@pytest.mark.slow
def test_what_row_codecs_cost_grows_as_bits_go(tiny, monkeypatch):
    texts, model = tiny
    given = ["rows", *texts, "--tokens", 640, "--steps", 10, "-k", 8, *model]
    result = ran(quality.main, given, monkeypatch)
    for part in ("both", "keys", "values"):
        means = [result["errors"][name][part]["mean"] for name in ("plain", "int8", "int4", "int2")]
        assert 0 < means[0] < means[1] < means[2] < means[3]
    whole = [cell for cell in result["cells"] if cell["read"] == "all" and cell["text"] == "a"]
    kls = {cell["rows"]: cell["kl_mean"] for cell in whole}
    assert 0 <= kls["plain"] < kls["int8"] < kls["int4"] < kls["int2"]


def test_kl_of_exact_is_its_own_and_that_of_fewer_candidates_is_larger(tiny, monkeypatch):
    texts, model = tiny
    index = "pariskv:preset=scan", "streaming:budget=8", "exact:group=union"
    given = ["kl", *texts, "--tokens", 640, "--steps", 100, "-k", 8, "--index", *index, *model]
    found = ran(quality.main, given, monkeypatch)["indexes"]
    assert found["exact"]["ratio"] == found["exact:group=union"]["ratio"] == 1
    assert found["streaming:budget=8"]["ratio_95"][0] > 1
    assert "streaming" in report.TABLES["divergence"](
        {"indexes": found, "steps": 100, "k": 8, "machine": MACHINE}
    )


def test_fidelity_is_measured(tiny, monkeypatch):
    for name, value in dict(PROMPT=2200, CONTINUATION=3, K=2200).items():
        monkeypatch.setattr(fidelity, name, value)
    found = ran(quality.main, ["fidelity", "--index", "exact", *tiny[1]], monkeypatch)
    assert found["indexes"]["exact"]["kl_mean"] < 1e-6


def test_one_list_of_all_rows_is_full_attention(tiny, monkeypatch):
    texts, model = tiny
    given = ["lists", *texts, "--tokens", 500, "--steps", 3, "-k", 2000, *model]
    found = ran(quality.main, given, monkeypatch)
    assert [cell["lists"] for cell in found["cells"]] == [*lists.WAYS] * 2
    assert all(cell["kl_mean"] < 1e-6 for cell in found["cells"] if cell["k"] == 2000)


def test_ways_to_share_tokens_are_the_same_in_one_process(tiny, monkeypatch):
    texts, model = tiny
    sizes = ["--tokens", 460, "--steps", 20, "-k", 4]
    result = ran(ranks_quality.main, [*texts, *sizes, *model], monkeypatch)
    for ways in result["indexes"].values():
        assert ways["one"]["kl_mean"] > 0
        for found in ways.values():
            assert found["kl_texts"] == pytest.approx(ways["one"]["kl_texts"], rel=1e-3)
    page = report.TABLES["ranks_quality"](result)
    assert "| `exact` | 1 ranks, the best 4 of all ranks (`best`, k = 4) |" in page


SETTING = Setting(tokens=420, sink=4, local_window=32, generated=128, every=32)


def test_exact_search_with_all_rows_is_full_attention_and_a_wrong_one_is_not(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 440, 16, generator=rng)
    queries = torch.randn(4, 440, 16, generator=rng) * 3
    one, rows = Layer(keys, queries, 0.25, None, values), [32, 512]
    known = truths(one, SETTING, rows)
    found = measure(one, "exact", SETTING, rows, known, pieces=True)
    assert found["rows"][32]["recall"] == found["rows"][512]["recall"] == 1
    assert found["rows"][512]["error"] < 1e-5 < 0.01 < found["rows"][32]["error"]
    search = Exact._search
    monkeypatch.setattr(Exact, "_search", lambda self, queries, k: search(self, -queries, k))
    assert measure(one, "exact", SETTING, [32], known)["rows"][32]["recall"] < 0.5


FIELD = ["--written", 4, "--generated", 100, "--layers", 3, "--rows", 16]
FIELD += ["--index", "exact", "streaming:budget={k}", "--tokens"]


def test_the_field_is_written_and_added_to(tiny, monkeypatch):
    texts, model = tiny
    given = ["field", *texts, *FIELD]
    ran(quality.main, [*given, 500, *model], monkeypatch)
    result = ran(quality.main, [*given, 520, "--add", *model], monkeypatch)
    assert [run["measured"] for run in result["runs"]] == [4, 4]
    assert "| `exact` |" in report.TABLES["field"](result)


@pytest.mark.slow
def test_the_field_is_measured_along_answers(tiny, monkeypatch):
    texts, model = tiny
    own = ran(quality.main, ["field", *texts, *FIELD, 500, "--sampled", *model], monkeypatch)
    assert "| `exact` | 1.000 (1.00) |" in report.TABLES["answers_along"](own)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["kl", "--index", "exakt"], "did you mean 'exact'"),
        (["kl", "--steps", "49"], "steps: got 49, allowed is an integer of at least 50"),
        (["recall", "--presets", "sign-dot"], "preset: got 'sign-dot', allowed is one of"),
        (["field", "--index", "h2o:budget={k}", "h2o:budget=-1"], "budget: got -1"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_model_is_loaded(given, said, capsys):
    with pytest.raises(SystemExit):
        quality.main([*given, "--text", "nothing.txt"])
    assert said in " ".join(capsys.readouterr().err.split())


def test_rules_for_missed_keys_are_compared(tiny, monkeypatch):
    texts, model = tiny
    sizes = ["--tokens", 1200, "--steps", 2, "--layers", 1, "--seeds", 2, "--error", 0.1]
    monkeypatch.setattr(missed, "AUTO_ROWS", 64)
    monkeypatch.setattr(row_budget, "candidates", lambda config, counts, k: counts // 4)
    result = ran(quality.main, ["missed", *texts, *sizes, *model], monkeypatch)
    first, votes, inflated, larger, mass, tempered = result["cells"][:6]
    assert [cell["rule"] for cell in result["cells"][:6]] == list(missed.RULES)
    assert votes["rows"] <= inflated["rows"] <= larger["rows"]
    assert first["rows"] <= min(larger["rows"], mass["rows"])
    assert tempered["rows"] <= first["rows"]
    assert len(first["deciles"]) == 10
    assert [way["factor"] for way in first["stricter"]] == missed.FACTORS
    assert first["stricter"][0]["rows"] <= first["stricter"][-1]["rows"] <= 64
    assert "| the same, inflated |" in report.TABLES["missed"](result)
    other = dict(result, cells=[dict(cell, text="c") for cell in result["cells"][:6]])
    monkeypatch.setattr("benchmarks.reporting.quality.stored_like", lambda _, one: [one, other])
    page = report.TABLES["bound"](result)
    assert page.count("| 1,200 | ") == 3
    few, many = (first["rows"], first["stricter"][missed.FACTORS.index(0.7)]["rows"])
    assert f"| 1,200 | a | {few:.0f} to {many:.0f} | {first['over']:.1%}, " in page
    assert "| 1,200 | c (not used to choose 0.7) | " in page


def test_weights_of_votes_are_those_of_exact_sums():
    """With an error of votes, a key's expected squared weight is larger."""
    logs = torch.tensor([[-3.0, -2.0, -math.inf]])
    chances, thresholds = torch.tensor([[-1.0, -0.5, 0.0]]), torch.tensor([[5.0, -1.5]])
    found = missed.missed(2 * logs, logs, chances, thresholds, 0.0)
    for at, threshold in enumerate(thresholds[0].tolist()):
        share = [math.exp(min(x - threshold, c)) for x, c in ((-3.0, -1.0), (-2.0, -0.5))]
        want = [math.exp(2 * x) * (1 / p - 1) for x, p in zip((-3.0, -2.0), share, strict=True)]
        assert found[0, at].item() == pytest.approx(sum(want), rel=1e-5)
    inflated = missed.missed(2 * logs, logs, chances, thresholds, 1.0)
    torch.testing.assert_close(inflated, found * math.exp(2))


def test_the_error_of_tempered_weights_is_that_of_samples():
    """Tokens are sampled independently, and weights are divided by the expected sum."""
    torch.manual_seed(0)
    weights = (torch.randn(1, 2, 40) - 1).log_softmax(-1) + math.log(0.7)
    chances = torch.linspace(0.05, 1.0, 40)
    resident = torch.tensor([0.2, 0.1]).log().expand(1, 2, 2)
    counts = [9, 10**12]  # the second power is 1: nearly no bias
    every = torch.zeros(1, 40)
    totals = chances.log().expand(1, 2, 40)
    found = missed.tempered(weights, every, totals, counts, resident)[0]
    for count, want in zip(counts, found, strict=True):
        tempering = chances.pow(-priority.temper(count))
        seen = (torch.rand(40_000, 1, 40) < chances) * tempering * weights[0].exp()
        total = (chances * tempering * weights[0].exp()).sum(-1) + 0.3
        errors = (seen / total[:, None] - weights[0].exp()).square().sum(-1)
        errors += (0.2**2 + 0.1**2) * (1 / total - 1) ** 2
        assert errors.sum(-1).mean().item() == pytest.approx(want.item(), rel=0.03)
    exact = ((2 * weights[0]).exp() * (1 / chances - 1)).sum()
    assert found[1].item() == pytest.approx(exact.item(), rel=1e-3)
    # a candidate that was sampled with probability 1/2 represents two tokens
    twice = [torch.cat([part, part], -1) for part in (weights - math.log(2), every, totals)]
    both = missed.tempered(*twice, counts, resident)
    one = missed.tempered(weights - math.log(2), every - math.log(2), totals, counts, resident)
    torch.testing.assert_close(one, both)


def test_a_smaller_allowed_error_finds_more_rows(tiny, monkeypatch):
    texts, model = tiny
    sizes = ["--tokens", 900, "--steps", 3, "--layers", 1]
    given = ["budget", *texts, *sizes, "--error", 0.5, 0.02, "--fixed", 16, *model]
    cells = ran(quality.main, given, monkeypatch)["cells"]
    loose, tight, fixed = cells[:3]
    assert loose["rows"] < tight["rows"]
    assert tight["median"] < loose["median"]
    assert 0 <= tight["within"] <= 1
    assert (fixed["error"], fixed["rows"]) == (None, 16)
