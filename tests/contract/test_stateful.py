"""Any order of calls gives the results of a fresh index of the same tokens."""

from functools import partial

import pytest
from hypothesis import Phase, settings

import kvindex
from kvindex.indexes.exact import Exact
from kvindex.testing.stateful import STEPS, IndexMachine, check_any_interleaving
from tests.contract.test_contract import SPECS
from tests.support import literal
from tests.support.helpers import Case


class LiteralMachine(IndexMachine):
    """Compares hits with an implementation in Python's numbers and lists."""

    def compare(self, hits, queries, k):
        if self.case.q_heads > 2:
            return
        for b in range(self.batch):
            real = self.valid[b].nonzero()[:, 0].tolist()
            for h in range(2):
                keys, query = self.tokens[0][b, h].tolist(), queries[b, h].tolist()
                scores = [literal.dot(keys[i], query) for i in real]
                want = [real[i] for i in literal.best(scores, k)]
                assert hits.ids[b, h].tolist() == want + [-1] * (k - len(want))


def hold(name, examples):
    machine = LiteralMachine if name == "exact" else IndexMachine
    make = partial(kvindex.create, name)
    steps = settings(STEPS, max_examples=examples)
    check_any_interleaving(make, Case(), machine=machine, steps=steps)


MORE = ["pariskv:preset=paper", "pariskv:backend=torch", "quest:backend=torch"]
"""Further indexes, in addition to the defaults of every index (compiled on a CPU with Numba)."""


@pytest.mark.parametrize("name", [*kvindex.names(), *MORE])
def test_any_interleaving_of_calls_agrees_with_a_fresh_index(name):
    hold(name, 8)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("name", SPECS)
def test_many_interleavings_of_calls_agree_with_a_fresh_index(name):
    hold(name, 40)


class ForgetsToReorder(Exact):
    def reorder(self, batch_indices):
        super().reorder(batch_indices.sort().values)


class RemembersPadding(Exact):
    def reset(self):
        kept, self._valid = self._valid, type(self._valid)()
        super().reset()
        self._valid = kept


class LastFirst(Exact):
    def _search(self, queries, k):
        return super()._search(-queries, k)


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        (ForgetsToReorder, IndexMachine),
        (RemembersPadding, IndexMachine),
        (LastFirst, LiteralMachine),
    ],
)
def test_the_machine_can_fail(kind, machine):
    steps = settings(STEPS, phases=[Phase.generate])
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_any_interleaving(kind, Case(), machine=machine, steps=steps)
