"""Sequences of any lengths that a pool of layers steps together equal separate layers."""

import copy
import math

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvindex
from kvindex.layer import AttentionLayer
from kvindex.testing.faults import fail_at, operations_of
from tests.pool.layers import LayersMachine, tokens
from tests.support.helpers import Case, slow
from tests.support.sequences import SIZES

CASE = Case(q_heads=4)


def made(spec="pariskv"):
    return AttentionLayer(CASE.index(spec), k=7, **SIZES)


def hold(machine, examples, steps, **others):
    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True
    )
    run_state_machine_as_test(machine, settings=settings(how, **others))


@pytest.mark.parametrize(
    ("spec", "examples"), [("pariskv", 2), slow("exact", 6), slow("pariskv", 6), slow("quest", 6)]
)
def test_any_interleaving_equals_separate_layers(spec, examples):
    hold(type("Machine", (LayersMachine,), {"spec": spec}), examples, 25)


class LeavesPartsOfAStep(kvindex.LayerPool):
    def step(self, sequences, *given):
        parts = [tuple(part[i : i + 1] for part in given) for i in range(len(sequences))]
        return torch.cat(
            [self[one].step(*p) for one, p in zip(sequences, parts, strict=True)][::-1]
        )


class ForksAreOne(kvindex.LayerPool):
    def fork(self, sequence):
        return self._added(self[sequence])


@pytest.mark.parametrize("kind", [LeavesPartsOfAStep, slow(ForksAreOne)])
def test_the_machine_can_fail(kind):
    class Broken(LayersMachine):
        def pool_of(self, like):
            return kind(like)

    with pytest.raises((AssertionError, ExceptionGroup)):
        hold(Broken, 40, 30, phases=[Phase.generate])


def test_a_step_that_fails_for_one_changes_none():
    pool = kvindex.LayerPool(made())
    some = [pool.open(), pool.open()]
    pool.step(some, *tokens(CASE, 30, 0, 2))
    copies = [copy.deepcopy(pool[each]) for each in some]
    queries, keys, values = tokens(CASE, 1, 1, 2)
    keys[1, 0, 0, 3] = math.nan
    with pytest.raises(ValueError, match="keys: got"):
        pool.step(some, queries, keys, values)
    with pytest.raises(ValueError, match="queries: got shape"):
        pool.step(some, queries[:1], keys, values)
    assert [len(pool[each]) for each in some] == [30, 30]
    given = tokens(CASE, 1, 2, 2)
    got = pool.step(some, *given)
    want = [other.step(*(part[i : i + 1] for part in given)) for i, other in enumerate(copies)]
    assert torch.equal(got, torch.cat(want))


def test_a_step_whose_result_finds_no_memory_changes_none():
    pool = kvindex.LayerPool(made("exact"))
    some = [pool.open(), pool.open()]
    pool.step(some, *tokens(CASE, 30, 0, 2))
    given = tokens(CASE, 1, 1, 2)
    operations = operations_of(lambda: copy.deepcopy(pool).step(some, *given))
    copied = operations_of(lambda: copy.deepcopy(pool))
    assert fail_at(lambda: pool.step(some, *given), operations - copied - 1)
    assert [len(pool[each]) for each in some] == [30, 30]


def test_without_an_executor_sequences_are_stepped_one_after_the_other_and_it_says_so():
    pool = kvindex.LayerPool(made())
    some = [pool.open(), pool.open()]
    for seed, count in enumerate([30, 1]):
        pool.step(some, *tokens(CASE, count, seed, 2))
    report = pool.report()
    assert (report.sequences, report.together, report.alone) == (2, 0, 4)
    assert pool.explain().startswith("sequences: one after the other, each by")
