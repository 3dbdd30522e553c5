"""A pool of layers equals separate layers for each sequence, for any order of calls."""

from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import kvindex
from kvindex.layer import AttentionLayer
from tests.pool.machine import SequencesMachine, seeds
from tests.support.helpers import Case

SIZES = dict(sink=3, local_window=4, update_every=5, dense_below=12, search_up_to=2)
"""Small regions, so that sequences are dense, lack an index or a sink, search, and update in
turn."""

COUNTS = st.sampled_from([1, 1, 1, 1, 2, 9, 30])
"""Tokens of a step: a decoded one, two speculated ones, chunks of a prompt."""

DEEDS = st.sampled_from(["row_of_step", "count_joined", "end_joined"])


def tokens(case, count, seed, batch):
    """Return queries, keys and values of a number of tokens."""
    queries = case.tensor(90 + seed, batch, case.q_heads, count, case.head_dim)
    return queries, *case.tokens(count, seed, batch)


class FailsAt:
    """A method of a layer that raises when it is called for the `last` time of a number of
    calls."""

    def __init__(self, name, last):
        self.method, self.left = getattr(AttentionLayer, name), last

    def __get__(self, layer, kind):
        def call(*given, **options):
            self.left -= 1
            result = self.method(layer, *given, **options)
            if self.left == 0:
                raise MemoryError("no more")
            return result

        return call


class LayersMachine(SequencesMachine):
    """A pool of layers.

    Args:
        spec: Name and options of the indexes.
        case: Shapes.
        options: Further options of the indexes.
        sizes: Sizes of the layers' regions.
        slack: Tolerance of attention, or None for equality.
    """

    spec, case, options, sizes, slack = "exact", Case(q_heads=4), {}, SIZES, None

    def pool_of(self, like):
        return kvindex.LayerPool(like)

    def made(self):
        return AttentionLayer(self.case.index(self.spec, **self.options), k=7, **self.sizes)

    def indexed(self, alone):
        return len(alone.index)

    def feed(self, some, count, seed):
        given = tokens(self.case, count, seed, len(some))
        got = self.pool.step(some, *given)
        for i, sequence in enumerate(some):
            want = self.alone[sequence].step(*(part[i : i + 1] for part in given))
            self.same(got[i : i + 1], want)

    def same(self, got, want):
        if self.slack is None:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=self.slack, atol=self.slack)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), count=COUNTS, seed=seeds)
    def step(self, data, count, seed):
        self.feed(self.some(data), count, seed)

    @precondition(lambda self: len(self.alone) > 1)
    @rule(data=st.data(), count=st.integers(2, 12), seed=seeds)
    def decode(self, data, count, seed):
        """Decode token by token. Updates are due for different sequences at different tokens."""
        some = data.draw(st.permutations([*self.alone]))
        for t in range(count):
            self.feed(some, 1, seed + t)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), count=COUNTS, seed=seeds, deed=DEEDS, last=st.integers(1, 8))
    def step_fails(self, data, count, seed, deed, last):
        """Fail in the middle of a common step: all layers keep their state."""
        some = self.some(data)
        before = [len(self.pool[each]) for each in some]
        given = tokens(self.case, count, seed, len(some))
        with mock.patch.object(AttentionLayer, deed, failing := FailsAt(deed, last)):
            try:
                self.pool.step(some, *given)
            except MemoryError:
                assert [len(self.pool[each]) for each in some] == before
                return
        assert failing.left > 0  # the failing call was not reached
        for i, sequence in enumerate(some):
            self.alone[sequence].step(*(part[i : i + 1] for part in given))

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), seed=seeds)
    def one_goes_by_itself(self, data, seed):
        """Step a single layer, and go back, as a caller with `pool[a]` may do."""
        sequence = self.one(data)
        given, layer = tokens(self.case, 1, seed, 1), self.pool[sequence]
        self.same(layer.step(*given), self.alone[sequence].step(*given))
        before = layer.checkpoint()
        layer.step(*given)
        layer.rollback(before)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def one_comes_twice(self, data):
        twice = [self.one(data)] * 2
        with pytest.raises(ValueError, match="allowed is at least one, without"):
            self.pool.step(twice, *tokens(self.case, 1, 0, 2))

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def states_are_equal(self, data):
        self.compare_state(self.one(data))

    def compare_state(self, sequence):
        """Compare codes, rows, window and sink to the bit."""
        mine, alone = self.pool[sequence], self.alone[sequence]
        if not len(alone):
            return
        found, want = mine.state_dict(), alone.state_dict()
        assert [*found] == [*want]
        for name, part in want.items():
            assert torch.equal(found[name], part), name

    def compare_with(self, some, seed, k):
        """Compare all layers after another token."""
        self.feed(some, 1, seed)
        for sequence in some:
            self.compare_state(sequence)
