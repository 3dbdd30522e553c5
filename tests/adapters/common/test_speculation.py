"""Prompt lookup, the length of drafts, and the counts of accepted tokens."""

import random
from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.protocol import Placement
from kvindex.layer import AttentionLayer
from kvindex_adapters.common import speculation
from kvindex_adapters.common.speculation import (
    LONGEST,
    MOST,
    PAUSE,
    SHORTEST,
    Acceptance,
    DraftLength,
    PromptLookup,
    Speculation,
    draft_cost,
    model_cost,
    speculation_of,
)


def looked_up(ids, count):
    """Find the newest occurrence of the longest n-gram by comparing slices."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if len(ids) > size and ids[end - size : end] == ids[-size:]:
                longer = list(ids)
                for place in range(count):
                    longer.append(longer[end + place])
                return longer[len(ids) :]
    return []


@pytest.mark.parametrize("kinds", [2, 3, 6, 20])
def test_lookup_is_that_of_a_plain_search(kinds):
    draw = random.Random(kinds)
    for _ in range(60):
        ids = [draw.randrange(kinds) for _ in range(draw.randrange(1, 40))]
        lookup = PromptLookup(ids[:1])
        for token in ids[1:]:
            lookup.append(token)
        assert len(lookup) == len(ids)
        assert lookup.draft(5) == looked_up(ids, 5) == PromptLookup(ids).draft(5)


def test_a_repeated_phrase_is_drafted_at_any_length():
    assert PromptLookup([9, 1, 2, 3, 1, 2]).draft(5) == [3, 1, 2, 3, 1]


def test_nothing_matches():
    assert PromptLookup([]).draft(3) == []
    assert PromptLookup([1, 1]).draft(3) == []
    assert PromptLookup([1, 2, 3, 1]).draft(3) == []  # a single token is too short


def test_auto_drafts_more_where_more_is_accepted():
    always, never = (DraftLength(Speculation("auto", "index")) for _ in range(2))
    first = always.next()
    for _ in range(40):
        always.saw(always.next(), always.next())
        never.saw(never.next(), 0)
    assert 1 == never.next() < first < always.next() <= MOST["index"]
    for _ in range(40):
        always.saw(always.next(), 0)
    assert always.next() == 1


@pytest.mark.parametrize("cost", [0.15, 0.3, 1.1])
def test_auto_leaves_out_a_draft_model_that_does_not_pay(cost):
    """Where no draft is accepted, few rounds have one; where all are accepted again, most do."""
    length, drafted = DraftLength(Speculation("auto", "index", draft_model=True), cost), []
    for accepted in [False] * 200 + [True] * 200:
        drafted.append(length.next())
        length.saw(drafted[-1], drafted[-1] if accepted else 0)
    late = drafted[40:200]
    assert sum(late) == 160 // (PAUSE + 1)
    pays = cost < 1  # a token of a model of the same size costs as much as it saves
    assert (min(drafted[-40:]) >= 1) == pays


def test_auto_has_the_most_tokens_per_time():
    length = DraftLength(Speculation("auto", "index"))
    length._accepted, length._tried = 70.0, 100.0

    def gain(count):
        return sum(0.7**place for place in range(count + 1)) / (1 + 0.1 * count)

    assert length.next() == max(range(1, MOST["index"] + 1), key=gain)


@pytest.mark.parametrize(("cost", "least", "most"), [(0.01, 16, 31), (0.3, 3, 8), (1.0, 0, 0)])
def test_with_full_attention_auto_depends_on_the_cost_of_a_draft(cost, least, most):
    length = DraftLength(Speculation("auto", "full"), cost)
    length._accepted, length._tried = 90.0, 100.0
    assert least <= length.next() <= most


def layers_of(store, tokens=600):
    index = kvindex.create("pariskv", q_heads=2, kv_heads=1, head_dim=64, store=store)
    layer = AttentionLayer(index, k=10, sink=4, local_window=16, update_every=256)
    layer.step(*(torch.randn(1, heads, tokens, 64) for heads in (2, 1, 1)))
    return [layer]


def test_a_draft_costs_less_the_more_rows_there_are():
    few, many = layers_of("device"), layers_of("device", 3000)
    weights = 100_000
    costs = [draft_cost(layers, weights) for layers in (few, many, 2 * many)]
    assert 1 > costs[0] > costs[1] > costs[2] > 0
    assert draft_cost(few, 10**12) == pytest.approx(1, abs=1e-3)
    rows = len(many[0].index)
    read = rows * 2 * 64 * 4
    assert costs[1] == pytest.approx((weights + read / 16) / (weights + read))
    assert draft_cost([], 0) == 0


class Placed:
    """Rows in host memory."""

    def placement(self):
        return Placement("plain", row_bytes=512, device=0, host=2996)


def test_rows_behind_a_bus_make_drafts_cheap(monkeypatch):
    layers = layers_of("device", 3000)
    on_cpu = draft_cost(layers, 10_000)
    monkeypatch.setattr(speculation, "capability", lambda index, wanted: Placed())
    assert draft_cost(layers, 10_000) == pytest.approx(on_cpu, rel=0.1)
    gpu = replace(layers[0].index.geometry, device=torch.device("cuda"))
    monkeypatch.setattr(layers[0].index, "geometry", gpu)
    assert draft_cost(layers, 10_000) < on_cpu / 10


def test_a_number_stays():
    length = DraftLength(Speculation(3, "full"))
    length.saw(3, 0)
    assert length.next() == 3


def test_counts():
    first = Acceptance().counted(4, 3).counted(0, 0)
    both = first.counted(4, 1)
    assert both == Acceptance(steps=3, rounds=2, drafted=8, accepted=4)
    assert both.since(first) == Acceptance(steps=1, rounds=1, drafted=4, accepted=1)
    assert (both.rate, both.tokens_per_step) == (0.5, 1 + 4 / 3)
    assert (Acceptance().rate, Acceptance().tokens_per_step) == (0.0, 1.0)
    assert str(both) == (
        "2 of 3 steps verified drafts: 4 of 8 drafted tokens accepted (50%), 2.33 tokens per step"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, "index"), "speculative_tokens: got 0, allowed"),
        ((-2, "full"), "speculative_tokens: got -2, allowed"),
        (("many", "index"), "speculative_tokens: got 'many', allowed"),
        ((4, "half"), "verify: got 'half', allowed"),
        ((None, "full"), "verify: got 'full' without speculative_tokens"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(ValueError, match=message):
        speculation_of(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, "full"), "draft_model: got a model together with verify='full'"),
        ((None, "index"), "draft_model: got a model without speculative_tokens"),
    ],
)
def test_bad_options_with_a_draft_model(given, message):
    with pytest.raises(ValueError, match=message):
        speculation_of(*given, draft_model=True)


@pytest.mark.parametrize("tokens", [2.5, True])
def test_bad_kinds_of_options(tokens):
    with pytest.raises((TypeError, ValueError), match=f"speculative_tokens: got {tokens}"):
        speculation_of(tokens, "index")


def test_good_options():
    assert speculation_of(None, "index") is None
    assert speculation_of("auto", "full") == Speculation("auto", "full")
    assert "prompt lookup" in str(speculation_of(3, "index"))
    assert "full attention" in str(speculation_of("auto", "full"))
    assert "the draft model" in str(speculation_of("auto", "index", draft_model=True))


def test_a_larger_draft_model_drafts_fewer_tokens():
    counts = []
    for small in (0, 100, 300, 1000):
        length = DraftLength(Speculation("auto", "index", True), model_cost(small, 1000))
        length._accepted, length._tried = 80.0, 100.0
        counts.append(length.next())
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[3] == 0
