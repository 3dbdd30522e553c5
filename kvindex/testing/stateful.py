"""Check that an index gives the same results as a new index with the same tokens, after any
sequence of calls.

The check needs Hypothesis, which tries random sequences of calls.
"""

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
        "stateful: got a Python without Hypothesis; run pip install hypothesis, or in a checkout "
        'pip install -e ".[test]"'
    ) from error

STEPS = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)

seeds = st.integers(0, 10_000)


class IndexMachine(RuleBasedStateMachine):
    """A Hypothesis state machine that makes random calls to an index.

    It records the tokens that the index should contain, and compares the results with a new index.
    """

    make: Make
    index: BaseIndex
    batch: int | None
    tokens: Tokens | None
    valid: Tensor

    def compare(self, hits: Hits, queries: Tensor, k: int) -> None:
        """Do nothing. A subclass may override this method to check search results additionally.

        Args:
            hits: Result of a search, which has already been compared with that of a new index.
            queries: Queries of the search.
            k: Number of rows of the search.
        """

    def new_index(self) -> BaseIndex:
        """Create an empty index with the shape and the store that this test run has chosen."""
        shape = {**self.case.geometry(), "rope": rope(self.case.head_dim)}
        return type(self).make(**shape, store=self.store)

    @initialize(group=st.sampled_from([1, 3]), store=st.sampled_from(["device", "host"]))
    def start(self, group: int, store: str) -> None:
        """Create an empty index."""
        self.case = Case(q_heads=2 * group, kv_heads=2, head_dim=16, value_dim=8)
        self.store = store
        self.index = self.new_index()
        self.forget()

    def forget(self) -> None:
        """Record that the index should be empty."""
        self.batch = self.tokens = None
        self.calls = 0

    @property
    def expected(self) -> Tokens:
        """The tokens that the index should contain."""
        return self.case.tokens(0, batch=self.rows) if self.tokens is None else self.tokens

    @property
    def rows(self) -> int:
        """Number of sequences in the batch, 0 before the first append."""
        return self.batch or 0

    @property
    def count(self) -> int:
        """Number of tokens that the index should contain."""
        return self.expected[0].shape[2]

    @precondition(lambda self: self.batch is None)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 14), seed=seeds, pads=st.none() | seeds)
    def first_append(self, batch: int, count: int, seed: int, pads: int | None) -> None:
        """Append the first tokens, possibly with padding. This sets the batch size."""
        self.batch = batch
        self.tokens = self.case.tokens(count, seed, batch)
        self.valid = torch.ones(batch, count, dtype=torch.bool)
        if pads is not None:
            self.valid = left_padding([(pads >> 3 * b) % (count + 1) for b in range(batch)], count)
        self.index.append(*self.tokens, valid=None if pads is None else self.valid)

    @precondition(lambda self: self.batch is not None)
    @rule(count=st.integers(0, 14), seed=seeds)
    def append(self, count: int, seed: int) -> None:
        """Append more tokens without padding."""
        new = self.case.tokens(count, seed, self.batch)
        self.index.append(*new)
        self.tokens = join(self.expected, new)
        self.valid = torch.cat([self.valid, torch.ones(self.rows, count, dtype=torch.bool)], 1)

    @precondition(lambda self: self.batch is not None)
    @rule(length=st.integers(0, 40))
    def truncate(self, length: int) -> None:
        """Truncate to a length, which may be larger than the number of tokens."""
        self.index.truncate(length)
        self.tokens, self.valid = part(self.expected, 0, length), self.valid[:, :length]

    @precondition(lambda self: self.batch is not None)
    @rule(order=st.lists(seeds, min_size=1, max_size=4))
    def reorder(self, order: list[int]) -> None:
        """Reorder the batch: sequences move, are repeated or are removed."""
        rows = torch.tensor([seed % self.rows for seed in order])
        self.index.reorder(rows)
        self.batch = len(order)
        self.tokens = self.expected[0][rows], self.expected[1][rows]
        self.valid = self.valid[rows]

    @precondition(lambda self: self.calls > 4)  # otherwise too many sequences would be short
    @rule()
    def reset(self) -> None:
        """Reset the index, and check that it is empty."""
        self.index.reset()
        self.forget()
        assert self.index.nbytes() == self.new_index().nbytes(), "as many bytes as a new index"
        assert (self.index.search(self.case.queries(0, 2), k=3).ids == -1).all(), "nothing is found"

    @precondition(lambda self: self.batch is not None)
    @rule()
    def refused_append(self) -> None:
        """Append an infinite key, and check that this raises ValueError and changes nothing."""
        keys, values = self.case.tokens(3, 0, self.batch)
        keys[0, 0, 1, 2] = float("inf")
        before = snapshot(self.index, self.case.queries(0, self.batch))
        with raises(ValueError, says=("keys",)):
            self.index.append(keys, values)
        assert_same_snapshot(snapshot(self.index, self.case.queries(0, self.batch)), before)

    @precondition(lambda self: self.batch is not None)
    @rule(k=st.integers(1, 50), seed=seeds)
    def search(self, k: int, seed: int) -> None:
        """Search, and compare the result with that of a new index with the same tokens."""
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
        """Fetch rows with random ids, and compare them with the appended keys and values."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, max(self.count, 1), (self.rows, 2, 5), generator=generator)
        if not self.count:
            ids[:] = -1
        rows = self.index.fetch(hits_of(ids))
        for got, table in zip((rows.keys, rows.values), self.expected, strict=True):
            table = torch.nn.functional.pad(table, (0, 0, 0, 1))  # id -1 is the last row, zeros
            row = (ids % table.shape[2])[..., None].expand(-1, -1, -1, table.shape[-1])
            assert torch.equal(got, table.gather(2, row)), "rows are those appended"

    @invariant()
    def holds_the_tokens(self) -> None:
        """Check the number of tokens in the index, and the memory that it reports for rows."""
        self.calls += self.batch is not None
        assert len(self.index) == self.count, "len(index)"
        assert self.index.nbytes()["rows"] == self.rows * 2 * 24 * 4 * self.count, (
            "nbytes()['rows']"
        )

    def fresh(self) -> BaseIndex:
        """Create an index with the tokens and the learned parameters of the tested index."""
        index, state = self.new_index(), self.index.state_dict()
        if isinstance(index, ClusteredIndex):  # clusters refer to the ids of these tokens
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
    """Check that an index after any sequence of calls equals a new index with the same tokens.

    Hypothesis generates random sequences, which are the same in every run. If some of them fail,
    the check raises the error of the shortest one. The state machine (`machine`) chooses the shapes
    of indexes, so `case` is not used.
    """
    run_state_machine_as_test(
        type("Machine", (machine,), {"make": staticmethod(make)}), settings=steps
    )
