"""The scripts in tools/: they return results for correct input, and errors for wrong input."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch):
    """Import a script of tools/ as a module, by name."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_a_family_is_equal_refused_or_without_a_tiny_model(tool, monkeypatch):
    families = tool("families")
    assert families.outcome("gemma2")["outcome"] == families.EQUAL
    refused = families.outcome("bloom")
    assert refused["outcome"] == families.REFUSED
    assert "AttentionInterface" in refused["words"]
    monkeypatch.setattr(families, "build", lambda family: 1 / 0)
    words = "ZeroDivisionError: division by zero"
    assert families.outcome("llama") == {"outcome": families.NONE, "words": words}


def test_a_family_whose_rows_are_missing_is_different(tool, monkeypatch):
    families = tool("families")
    monkeypatch.setattr(families, "EVERY_ROW", 1)
    assert families.outcome("llama")["outcome"] == families.DIFFERENT


def test_a_family_that_hangs_is_an_error(tool, monkeypatch):
    families = tool("families")
    monkeypatch.setattr(families, "LIMIT_S", 0)
    assert families.ask("llama") == {"outcome": families.ERROR, "words": "no answer in 0 s"}


def test_lost_equality_and_differences_are_faults(tool):
    families = tool("families")
    stored = {"a": {"outcome": "equal"}, "b": {"outcome": "refused"}, "c": {"outcome": "equal"}}
    now = {name: {"outcome": "refused", "words": "why"} for name in "ab"}
    now |= {"c": {"outcome": "equal", "words": ""}, "d": {"outcome": "different", "words": "how"}}
    assert list(families.faults(now, stored)) == [
        "a: was equal, is refused: why",
        "d: was None, is different: how",
    ]


def test_the_page_is_what_the_results_say(tool):
    """If this fails, run tools/families.py, which writes both."""
    families = tool("families")
    stored = families.json.loads(families.RESULTS.read_text())
    assert families.page(stored["families"], stored["machine"]) == families.PAGE.read_text()
    assert not list(families.faults(stored["families"], {}))


def test_the_foreign_suite_notices_other_tokens_and_other_scores(tool):
    suite, ids = tool("foreign_suite"), torch.arange(6).view(1, 6)
    suite.compare(ids, ids.clone())
    with pytest.raises(AssertionError, match="tokens"):
        suite.compare(ids, ids + 1)
    one = SimpleNamespace(sequences=ids, scores=(torch.zeros(1, 5),), logits=None)
    other = SimpleNamespace(sequences=ids, scores=(torch.full((1, 5), 1e-3),), logits=None)
    suite.compare(one, one)
    with pytest.raises(AssertionError, match="scores"):
        suite.compare(one, other)


def test_the_foreign_suite_asks_for_a_checkout_with_tests(tmp_path):
    script = [sys.executable, TOOLS / "foreign_suite.py", "--transformers", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 2
    assert "a folder with tests/generation" in done.stderr


def test_a_spec_is_translated_for_a_tree_with_old_names(tool, monkeypatch):
    worker = tool("tree_worker")
    new = "pariskv:preset=sampled:sampling=tempered:beta=.1+sample:share=.5"
    assert worker.spec_of_tree(new) == worker.spec_of_tree(new, back=True) == new
    monkeypatch.setattr(worker, "ParisKVConfig", worker.Bench)  # has no field `sampling`
    old = "pariskv:preset=drawn:draw=tempered:beta=.1+sample:share=.5"
    assert worker.spec_of_tree(new) == old
    assert worker.spec_of_tree(old, back=True) == new


def test_old_names_are_mapped_to_options_of_today(tool):
    worker = tool("tree_worker")
    for part in worker.OLD_NAMES:
        name, value = part.split("=")
        if name == "preset":
            assert value in worker.kvindex.get("pariskv").presets
        else:
            paper = dict(preset="paper") if value == "tiered_votes" else {}
            index = worker.kvindex.get("pariskv")
            made = index(
                q_heads=2, kv_heads=2, head_dim=8, backend="torch", **paper, **{name: value}
            )
            assert getattr(made.config, name) == value


def test_digests_repeat_and_another_result_is_noticed(tool, monkeypatch):
    worker, trees = tool("tree_worker"), tool("compare_trees")
    monkeypatch.setattr(worker, "LAYERS", {"often": worker.LAYERS["often"] | {"prompt": 20}})
    monkeypatch.setattr(worker, "CHUNKS", {False: (70, 60)})

    def digests():
        return worker.Results().digests("streaming", "torch")

    old, same = digests(), digests()
    assert not old["errors"]
    assert {"heads.index.first.hits0.ids", "latents.layer_often.steps"} <= {*old["digests"]}
    assert not trees.differing({"old": old, "new": same})
    monkeypatch.setattr(worker, "FOUND", 15)
    wrong = trees.differing({"old": old, "new": digests()})
    assert all(re.search("hits|rows|attend|truncated|layer", name) for name in wrong)
    assert "heads.index.second.hits1.ids" in wrong


def test_a_result_that_one_tree_lacks_is_different(tool):
    trees = tool("compare_trees")
    old = {"digests": {"a": "1", "b": "2"}, "errors": {"c": "ValueError: one"}}
    new = {"digests": {"a": "1"}, "errors": {"c": "ValueError: other words"}}
    assert trees.differing({"old": old, "new": new}) == {"b": {"old": "2", "new": ""}}
    new["errors"]["c"] = "TypeError: one"
    assert [*trees.differing({"old": old, "new": new})] == ["b", "c"]
