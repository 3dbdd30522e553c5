"""For any order of calls, a pool equals separate indexes that share no memory."""

import math
import weakref

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvindex
from tests.support.helpers import Case

seeds = st.integers(0, 10_000)
COUNTS = st.sampled_from([1, 2, 40, 256, 300])


def equal(got, want):
    assert torch.equal(got, want)


def separate(index, make):
    """Return an index of the same state in separate memory."""
    other = make()
    if len(index):
        other.load_state_dict({name: part.clone() for name, part in index.state_dict().items()})
    return other


def attention_over(query, hits, rows, g):
    """Return output `[H, Dv]` and lse `[H]` of a query `[1, H, D]` over these rows, in float64."""
    keys, values = (
        p[0].double().repeat_interleave(g.group_size, 0) for p in (rows.keys, rows.values)
    )
    logits = g.scale * torch.einsum("hd,hkd->hk", query[0].double(), keys)
    unused = (hits.ids[0] == -1).repeat_interleave(g.group_size, 0)
    logits = logits.masked_fill(unused, -math.inf)
    if hits.log_weight is not None:
        logits = logits + hits.log_weight[0]
    return torch.einsum("hk,hkd->hd", logits.softmax(-1).nan_to_num(0), values), logits.logsumexp(
        -1
    )


class SequencesMachine(RuleBasedStateMachine):
    """A pool, and a separate index for each sequence. Sequences are added, forked, cut and removed.

    Args:
        most: Largest number of open sequences.
        begins: Lengths of the first sequences.
    """

    most, begins = 6, ()

    def __init__(self):
        super().__init__()
        self.pool = self.pool_of(self.made())
        self.alone = {}
        for seed, count in enumerate(self.begins):
            self.alone[sequence := self.pool.open()] = self.made()
            self.feed([sequence], count, seed)

    def pool_of(self, like):
        raise NotImplementedError

    def made(self):
        raise NotImplementedError

    def feed(self, some, count, seed):
        """Append a number of tokens to each sequence, in the pool and in the separate indexes."""
        raise NotImplementedError

    def compare_with(self, some, seed, k):
        """Check that each of these sequences equals its separate index."""
        raise NotImplementedError

    def some(self, data):
        """Return one or more of the sequences, in any order; by default all of them."""
        every = data.draw(st.permutations([*self.alone]))
        return every[data.draw(st.integers(0, len(every) - 1)) :]

    def one(self, data):
        return data.draw(st.sampled_from([*self.alone]))

    @precondition(lambda self: len(self.alone) < self.most)
    @rule()
    def open(self):
        sequence = self.pool.open()
        assert sequence not in self.alone
        self.alone[sequence] = self.made()

    @precondition(lambda self: 0 < len(self.alone) < self.most)
    @rule(data=st.data())
    def fork(self, data):
        source = self.one(data)
        sequence = self.pool.fork(source)
        assert sequence not in self.alone
        self.alone[sequence] = separate(self.alone[source], self.made)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data, share):
        sequence = self.one(data)
        length = int(share * len(self.alone[sequence]))
        self.pool.truncate(sequence, length)
        self.alone[sequence].truncate(length)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def close(self, data):
        sequence = self.one(data)
        gone = weakref.ref(self.pool[sequence])
        self.pool.close(sequence)
        del self.alone[sequence]
        assert gone() is None  # freed immediately with its own memory
        with pytest.raises(ValueError, match="allowed is the number of an open sequence"):
            self.pool.close(sequence)

    @invariant()
    def sequences_are_those_that_are_open(self):
        assert [*self.pool] == [*self.alone]
        assert [len(self.pool[each]) for each in self.pool] == [*map(len, self.alone.values())]
        report = self.pool.report()
        assert report.sequences == len(self.alone)
        assert report.tokens == sum(map(self.indexed, self.alone.values()))
        assert report.stored_bytes <= report.separate_bytes

    def indexed(self, alone):
        """Return the number of tokens of a sequence's index."""
        return len(alone)

    def teardown(self):
        if self.alone:
            self.compare_with([*self.alone], 0, 9)
        for sequence in self.pool:
            self.pool.close(sequence)
        report = self.pool.report()
        assert (report.blocks, report.stored_bytes) == (0, 0)
        self.no_leak()

    def no_leak(self):
        """Check memory that only a subclass knows."""


class PoolMachine(SequencesMachine):
    """A pool of indexes.

    Args:
        spec: Name and options of the indexes.
        case: Shapes.
        options: Further options of the indexes.
        compare: Comparison of scores.
        slack: Tolerance of attention, or None for equality.
    """

    spec, case, options, slack = "exact", Case(q_heads=4), {}, 1e-5
    compare = staticmethod(equal)

    def pool_of(self, like):
        return kvindex.Pool(like)

    def made(self):
        return self.case.index(self.spec, **self.options)

    def feed(self, some, count, seed):
        keys, values = self.case.tokens(count, seed, len(some))
        self.pool.append(some, keys, values)
        for i, sequence in enumerate(some):
            self.alone[sequence].append(keys[i : i + 1], values[i : i + 1])

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), count=COUNTS, seed=seeds)
    def append(self, data, count, seed):
        self.feed(self.some(data), count, seed)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), seed=seeds)
    def append_fails_for_the_last_one(self, data, seed):
        some = self.some(data)
        keys, values = self.case.tokens(3, seed, len(some))
        keys[-1, 0, 1, 2] = math.nan
        with pytest.raises(ValueError, match="keys: got"):
            self.pool.append(some, keys, values)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), seed=seeds, k=st.sampled_from([1, 7, 50]))
    def step(self, data, seed, k):
        self.compare_with(self.some(data), seed, k)

    def compare_with(self, some, seed, k):
        """Search, fetch and attend: each sequence gets what its separate index gives."""
        queries = self.case.queries(seed, len(some))
        hits = self.pool.search(some, queries, k=k)
        rows, attended = self.pool.fetch(some, hits), self.pool.attend(some, queries, k=k)
        for i, sequence in enumerate(some):
            self.check(i, self.alone[sequence], queries[i : i + 1], k, hits, rows, attended)

    def check(self, i, alone, query, k, hits, rows, attended):
        want = alone.search(query, k=k)
        assert torch.equal(hits.ids[i], want.ids[0])
        self.compare(hits.scores[i], want.scores[0])
        if want.log_weight is not None:
            self.compare(hits.log_weight[i], want.log_weight[0])
        fetched = alone.fetch(want)
        assert torch.equal(rows.keys[i], fetched.keys[0])
        assert torch.equal(rows.values[i], fetched.values[0])
        assert attended.found[i].tolist() == (want.ids[0] != -1).sum(-1).tolist()
        output, lse = attention_over(query, want, fetched, alone.geometry)
        slack = dict(rtol=self.slack, atol=self.slack)
        torch.testing.assert_close(attended.output[i].double(), output, **slack)
        torch.testing.assert_close(attended.lse[i].double(), lse, **slack)
