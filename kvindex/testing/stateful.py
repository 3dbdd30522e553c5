"""Any interleaving of calls agrees with a fresh index of the same tokens (needs Hypothesis)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.bases.clusters import ClusteredIndex
from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import Hits
from kvindex.storage.state import above, below, extended
from kvindex.testing.cases import Case, Tokens, join, left_padding, part, rope
from kvindex.testing.compare import (
    ROUNDED,
    assert_same_hits,
    assert_same_snapshot,
    assert_well_formed,
    hits_of,
    raises,
    snapshot,
)
from kvindex.testing.contract.common import Make

try:
    from hypothesis import settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        invariant,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ImportError as error:
    raise ImportError(
        "stateful: got no Hypothesis; allowed is with it: pip install hypothesis "
        "(the extra kvindex-torch[test] has it)"
    ) from error

STEPS = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)

seeds = st.integers(0, 10_000)


class IndexMachine(RuleBasedStateMachine):
    """An index, and beside it the tokens that it should hold."""

    make: Make
    index: BaseIndex
    batch: int | None
    tokens: Tokens | None
    valid: Tensor

    def compare(self, hits: Hits, queries: Tensor, k: int) -> None:
        """What else hits are held to, where a machine says so."""

    def new_index(self) -> BaseIndex:
        """An index of the case."""
        shape = {**self.case.geometry(), "rope": rope(self.case.head_dim)}
        return type(self).make(**shape, store=self.store)

    @initialize(group=st.sampled_from([1, 3]), store=st.sampled_from(["device", "host"]))
    def start(self, group: int, store: str) -> None:
        """A new index, empty."""
        self.case = Case(q_heads=2 * group, kv_heads=2, head_dim=16, value_dim=8)
        self.store = store
        self.index = self.new_index()
        self.forget()

    def forget(self) -> None:
        """No tokens."""
        self.batch = self.tokens = None
        self.calls = 0

    @property
    def expected(self) -> Tokens:
        """The tokens, none where nothing was appended."""
        return self.case.tokens(0, batch=self.rows) if self.tokens is None else self.tokens

    @property
    def rows(self) -> int:
        """Rows of the batch, 0 where nothing was appended."""
        return self.batch or 0

    @property
    def count(self) -> int:
        """Tokens that the index should hold."""
        return self.expected[0].shape[2]

    @precondition(lambda self: self.batch is None)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 14), seed=seeds, pads=st.none() | seeds)
    def first_append(self, batch: int, count: int, seed: int, pads: int | None) -> None:
        """The append that fixes the batch, perhaps of padded tokens."""
        self.batch = batch
        self.tokens = self.case.tokens(count, seed, batch)
        self.valid = torch.ones(batch, count, dtype=torch.bool)
        if pads is not None:
            self.valid = left_padding([(pads >> 3 * b) % (count + 1) for b in range(batch)], count)
        self.index.append(*self.tokens, valid=None if pads is None else self.valid)

    @precondition(lambda self: self.batch is not None)
    @rule(count=st.integers(0, 14), seed=seeds)
    def append(self, count: int, seed: int) -> None:
        """More tokens, all of them real."""
        new = self.case.tokens(count, seed, self.batch)
        self.index.append(*new)
        self.tokens = join(self.expected, new)
        self.valid = torch.cat([self.valid, torch.ones(self.rows, count, dtype=torch.bool)], 1)

    @precondition(lambda self: self.batch is not None)
    @rule(length=st.integers(0, 40))
    def truncate(self, length: int) -> None:
        """Perhaps beyond what is there."""
        self.index.truncate(length)
        self.tokens, self.valid = part(self.expected, 0, length), self.valid[:, :length]

    @precondition(lambda self: self.batch is not None)
    @rule(order=st.lists(seeds, min_size=1, max_size=4))
    def reorder(self, order: list[int]) -> None:
        """Rows move, are repeated and left out."""
        rows = torch.tensor([seed % self.rows for seed in order])
        self.index.reorder(rows)
        self.batch = len(order)
        self.tokens = self.expected[0][rows], self.expected[1][rows]
        self.valid = self.valid[rows]

    @precondition(lambda self: self.calls > 4)  # or it would be every second call
    @rule()
    def reset(self) -> None:
        """As new."""
        self.index.reset()
        self.forget()
        assert self.index.nbytes() == self.new_index().nbytes(), "as many bytes as a new index"
        assert (self.index.search(self.case.queries(0, 2), k=3).ids == -1).all(), "nothing is found"

    @precondition(lambda self: self.batch is not None)
    @rule()
    def refused_append(self) -> None:
        """Infinity in a key, which changes nothing."""
        keys, values = self.case.tokens(3, 0, self.batch)
        keys[0, 0, 1, 2] = float("inf")
        before = snapshot(self.index, self.case.queries(0, self.batch))
        with raises(ValueError, says=("keys",)):
            self.index.append(keys, values)
        assert_same_snapshot(snapshot(self.index, self.case.queries(0, self.batch)), before)

    @precondition(lambda self: self.batch is not None)
    @rule(k=st.integers(1, 50), seed=seeds)
    def search(self, k: int, seed: int) -> None:
        """As a fresh index of the same tokens finds."""
        queries = self.case.queries(seed, self.batch)
        hits = self.index.search(queries, k=k)
        assert_well_formed(hits, self.index, self.rows, k)
        for b, rows in enumerate(hits.ids.flatten(1).tolist()):
            assert self.valid[b][[i for i in rows if i >= 0]].all(), "padding is never returned"
        assert_same_hits(hits, self.fresh().search(queries, k=k), close=ROUNDED)
        self.compare(hits, queries, k)

    @precondition(lambda self: self.batch is not None)
    @rule(seed=seeds)
    def fetch(self, seed: int) -> None:
        """Rows of any ids, as they were appended."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, max(self.count, 1), (self.rows, 2, 5), generator=generator)
        if not self.count:
            ids[:] = -1
        rows = self.index.fetch(hits_of(ids))
        for got, table in zip((rows.keys, rows.values), self.expected, strict=True):
            table = torch.nn.functional.pad(table, (0, 0, 0, 1))  # id -1: the last, zeros
            row = (ids % table.shape[2])[..., None].expand(-1, -1, -1, table.shape[-1])
            assert torch.equal(got, table.gather(2, row)), "rows are those appended"

    @invariant()
    def holds_the_tokens(self) -> None:
        """Its length and its rows' bytes say so."""
        self.calls += self.batch is not None
        assert len(self.index) == self.count, "len(index)"
        assert self.index.nbytes()["rows"] == self.rows * 2 * 24 * 4 * self.count, (
            "nbytes()['rows']"
        )

    def fresh(self) -> BaseIndex:
        """A new index of the same tokens and the same learned parameters."""
        index, state = self.new_index(), self.index.state_dict()
        if isinstance(index, ClusteredIndex):  # its clusters name tokens, so they need their tokens
            index.load_state_dict(state)
            return index
        learned = above("learned", below("learned", state))
        index.load_state_dict(extended(index.state_dict(), learned))
        if self.count:
            index.append(*self.expected, valid=self.valid)
        return index


def check_any_interleaving(
    make: Make,
    case: Case,
    *,
    machine: type[IndexMachine] = IndexMachine,
    steps: settings = STEPS,
) -> None:
    """Any interleaving of calls agrees with a fresh index of the same tokens.

    Interleavings are random, and the same on every run. Raises what the smallest one that fails
    raises. The machine's cases are its own.
    """
    run_state_machine_as_test(
        type("Machine", (machine,), {"make": staticmethod(make)}), settings=steps
    )
