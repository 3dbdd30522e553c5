"""The tool that tests a tiny model of each family, and says which families are no longer equal."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import vllm_families

    yield vllm_families
    sys.modules.pop("vllm_families")


def test_a_family_that_was_equal_must_stay_so(tool):
    before = {name: {"outcome": tool.EQUAL, "words": ""} for name in "abcde"}
    before["e"] = before["f"] = {"outcome": tool.REFUSED, "words": "slopes"}
    outcomes = dict(zip("abcdef", [*tool.MEANING, tool.REFUSED], strict=True))
    now = {name: {"outcome": one, "words": "why"} for name, one in outcomes.items()}
    found = list(tool.faults(now, before))
    assert [line[0] for line in found] == ["b", "c", "d"]
    assert found[1] == "c: was equal, is refused: why"
    assert list(tool.faults({"x": now["a"]}, {})) == []


def test_distances(tool):
    one = [([1, 2], [{1: -0.5, 3: -1.0}, {2: -0.25}])]
    assert tool.distance(one, one) == 0
    other = [([1, 2], [{1: -0.5, 4: -3.0}, {2: -0.5}])]
    assert tool.distance(one, other) == 0.25
    assert tool.distance(one, [([1, 3], one[0][1])]) == float("inf")


def test_a_family_is_equal_or_refused_with_the_reason(tool):
    # in gemma3n, the last two layers read the keys and values of the first two
    found = dict(tool.ask(["qwen3", "gemma3n_text", "bloom"]))
    assert found["gemma3n_text"] == {"outcome": tool.EQUAL, "words": "2 of 4 layers search"}
    assert found["qwen3"] == {"outcome": tool.EQUAL, "words": "4 of 4 layers search"}
    assert found["bloom"]["outcome"] == tool.REFUSED
    assert found["bloom"]["words"].startswith("alibi_slopes: got slopes")
    text = tool.page(found, {"vllm": "1", "transformers": "2"})
    assert "| equal | 2 |" in text
    assert "| qwen3 | equal | 4 of 4 layers search |" in text
