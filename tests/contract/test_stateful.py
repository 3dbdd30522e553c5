"""Any interleaving of calls agrees with a fresh index of the same tokens."""

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvindex
from kvindex.indexes.exact import Exact
from tests.support import literal
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    assert_same_snapshot,
    assert_well_formed,
    hits_of,
    join,
    left_padding,
    part,
    rope,
    snapshot,
)

seeds = st.integers(0, 10_000)


class IndexMachine(RuleBasedStateMachine):
    """Beside the index: its tokens."""

    def new_index(self):
        raise NotImplementedError

    @initialize(group=st.sampled_from([1, 3]), store=st.sampled_from(["device", "host"]))
    def start(self, group, store):
        self.case = Case(q_heads=2 * group, kv_heads=2, head_dim=16, value_dim=8)
        self.store = store
        self.index = self.new_index()
        self.forget()

    def forget(self):
        self.batch = None
        self.tokens = self.valid = None
        self.calls = 0

    @property
    def count(self):
        return 0 if self.tokens is None else self.tokens[0].shape[2]

    @precondition(lambda self: self.batch is None)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 14), seed=seeds, pads=st.none() | seeds)
    def first_append(self, batch, count, seed, pads):
        self.batch = batch
        self.tokens = self.case.tokens(count, seed, batch)
        self.valid = torch.ones(batch, count, dtype=torch.bool)
        if pads is not None:
            self.valid = left_padding([(pads >> 3 * b) % (count + 1) for b in range(batch)], count)
        self.index.append(*self.tokens, valid=None if pads is None else self.valid)

    @precondition(lambda self: self.batch is not None)
    @rule(count=st.integers(0, 14), seed=seeds)
    def append(self, count, seed):
        new = self.case.tokens(count, seed, self.batch)
        self.index.append(*new)
        self.tokens = join(self.tokens, new)
        self.valid = torch.cat([self.valid, torch.ones(self.batch, count, dtype=torch.bool)], 1)

    @precondition(lambda self: self.batch is not None)
    @rule(length=st.integers(0, 40))
    def truncate(self, length):
        self.index.truncate(length)
        self.tokens, self.valid = part(self.tokens, 0, length), self.valid[:, :length]

    @precondition(lambda self: self.batch is not None)
    @rule(order=st.lists(seeds, min_size=1, max_size=4))
    def reorder(self, order):
        rows = torch.tensor([seed % self.batch for seed in order])
        self.index.reorder(rows)
        self.batch = len(order)
        self.tokens = self.tokens[0][rows], self.tokens[1][rows]
        self.valid = self.valid[rows]

    @precondition(lambda self: self.calls > 4)  # or it would be every second call
    @rule()
    def reset(self):
        self.index.reset()
        self.forget()
        assert self.index.nbytes() == self.new_index().nbytes()
        assert (self.index.search(self.case.queries(0, 2), k=3).ids == -1).all()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def refused_append(self):
        keys, values = self.case.tokens(3, 0, self.batch)
        keys[0, 0, 1, 2] = float("inf")
        before = snapshot(self.index, self.case.queries(0, self.batch))
        with pytest.raises(ValueError, match="keys"):
            self.index.append(keys, values)
        assert_same_snapshot(snapshot(self.index, self.case.queries(0, self.batch)), before)

    @precondition(lambda self: self.batch is not None)
    @rule(k=st.integers(1, 50), seed=seeds)
    def search(self, k, seed):
        queries = self.case.queries(seed, self.batch)
        hits = self.index.search(queries, k=k)
        assert_well_formed(hits, self.index, self.batch, k)
        for b, rows in enumerate(hits.ids.flatten(1).tolist()):
            assert self.valid[b][[i for i in rows if i >= 0]].all(), "padding is never returned"
        assert_same_hits(hits, self.fresh().search(queries, k=k), close=ROUNDED)
        if isinstance(self.index, Exact) and self.case.q_heads == 2:
            self.compare_with_lists(hits, queries, k)

    @precondition(lambda self: self.batch is not None)
    @rule(seed=seeds)
    def fetch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, max(self.count, 1), (self.batch, 2, 5), generator=generator)
        if not self.count:
            ids[:] = -1
        rows = self.index.fetch(hits_of(ids))
        for got, table in zip((rows.keys, rows.values), self.tokens, strict=True):
            table = torch.nn.functional.pad(table, (0, 0, 0, 1))  # id -1: the last, zeros
            row = (ids % table.shape[2])[..., None].expand(-1, -1, -1, table.shape[-1])
            assert torch.equal(got, table.gather(2, row))

    @invariant()
    def holds_the_tokens(self):
        self.calls += self.batch is not None
        assert len(self.index) == self.count
        row = (self.batch or 0) * 2 * 24 * 4
        assert self.index.nbytes()["rows"] == row * self.count

    def fresh(self):
        """A new index of the same tokens and the same learned parameters."""
        index = self.new_index()
        index._learned = dict(self.index._learned)
        if self.count:
            index.append(*self.tokens, valid=self.valid)
        return index

    def compare_with_lists(self, hits, queries, k):
        for b in range(self.batch):
            real = self.valid[b].nonzero()[:, 0].tolist()
            for h in range(2):
                keys, query = self.tokens[0][b, h].tolist(), queries[b, h].tolist()
                scores = [literal.dot(keys[i], query) for i in real]
                want = [real[i] for i in literal.best(scores, k)]
                assert hits.ids[b, h].tolist() == want + [-1] * (k - len(want))


def machine(kind, **options):
    def new_index(self):
        geometry = dict(q_heads=self.case.q_heads, kv_heads=2, head_dim=16, value_dim=8)
        if kind.needs_rope:
            geometry["rope"] = rope(16)
        return kind(**geometry, store=self.store, **options)

    return type("Machine", (IndexMachine,), {"new_index": new_index})


STEPS = settings(max_examples=12, stateful_step_count=30, deadline=None, derandomize=True)
MANY = settings(STEPS, max_examples=40)
PRESETS = [(name, preset) for name in kvindex.names() for preset in kvindex.get(name).presets]


@pytest.mark.parametrize(
    ("name", "preset"), [*((name, None) for name in kvindex.names()), ("pariskv", "paper")]
)
def test_any_interleaving_of_calls_agrees_with_a_fresh_index(name, preset):
    run_state_machine_as_test(machine(kvindex.get(name), preset=preset), settings=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"), [*((name, None) for name in kvindex.names()), *PRESETS]
)
def test_many_interleavings_of_calls_agree_with_a_fresh_index(name, preset):
    run_state_machine_as_test(machine(kvindex.get(name), preset=preset), settings=MANY)


class ForgetsToReorder(Exact):
    def reorder(self, batch_indices):
        super().reorder(batch_indices.sort().values)


class RemembersPadding(Exact):
    def reset(self):
        kept, self._valid = self._valid, type(self._valid)()
        super().reset()
        self._valid = kept


@pytest.mark.parametrize("kind", [ForgetsToReorder, RemembersPadding])
def test_the_machine_can_fail(kind):
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        run_state_machine_as_test(machine(kind), settings=settings(STEPS, phases=[Phase.generate]))
