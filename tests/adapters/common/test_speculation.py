"""Prompt lookup, the length of drafts, and the counts of accepted tokens."""

import random

import pytest

from kvindex_adapters.common.speculation import (
    LONGEST,
    MOST,
    SHORTEST,
    Acceptance,
    DraftLength,
    PromptLookup,
    Speculation,
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
    assert 1 == never.next() < first < always.next() <= MOST
    for _ in range(40):
        always.saw(always.next(), 0)
    assert always.next() == 1


def test_auto_has_the_most_tokens_per_time():
    length = DraftLength(Speculation("auto", "index"))
    length._accepted, length._tried = 70.0, 100.0

    def gain(count):
        return sum(0.7**place for place in range(count + 1)) / (1 + 0.1 * count)

    assert length.next() == max(range(1, MOST + 1), key=gain)


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


@pytest.mark.parametrize("tokens", [2.5, True])
def test_bad_kinds_of_options(tokens):
    with pytest.raises((TypeError, ValueError), match=f"speculative_tokens: got {tokens}"):
        speculation_of(tokens, "index")


def test_good_options():
    assert speculation_of(None, "index") is None
    assert speculation_of("auto", "full") == Speculation("auto", "full")
    assert "prompt lookup" in str(speculation_of(3, "index"))
    assert "full attention" in str(speculation_of("auto", "full"))
