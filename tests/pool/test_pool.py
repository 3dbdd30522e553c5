"""For any order of calls a pool of sequences equals separate indexes; errors change nothing."""

import time

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvindex
from kvindex.core.protocol import Attended
from kvindex.layer import AttentionLayer
from kvindex.ops import attention
from tests.pool.machine import PoolMachine
from tests.support.helpers import Case, mostly_slow, slow

SPECS = ["exact", "pariskv", "pariskv:preset=paper", "quest", "exact+reuse"]


def hold(spec, examples, steps):
    kind = type("Machine", (PoolMachine,), {"spec": spec})
    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True
    )
    run_state_machine_as_test(kind, settings=how)


@pytest.mark.parametrize("spec", mostly_slow(SPECS, "exact", "pariskv"))
def test_any_interleaving_equals_separate_indexes(spec):
    hold(spec, 4, 25)


@pytest.mark.slow
@pytest.mark.longest
def test_ten_thousand_operations_equal_separate_indexes():
    hold("pariskv", 100, 100)


class ForksAreOne(kvindex.Pool):
    def fork(self, sequence):
        return self._added(self[sequence])


class LeavesPartsOfAnAppend(kvindex.Pool):
    def append(self, sequences, keys, values):
        for i, sequence in enumerate(sequences):
            self[sequence].append(keys[i : i + 1], values[i : i + 1])


class TakesTheFirstQuery(kvindex.Pool):
    def search(self, sequences, queries, *, k, coverage=None):
        return super().search(sequences, queries[:1].expand_as(queries), k=k)


@pytest.mark.parametrize(
    "kind", [slow(ForksAreOne), slow(LeavesPartsOfAnAppend), TakesTheFirstQuery]
)
def test_the_machine_can_fail(kind):
    class Broken(PoolMachine):
        def __init__(self):
            super().__init__()
            self.pool = kind(self.made())

    how = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Broken, settings=settings(how, phases=[Phase.generate]))


CASE = Case(q_heads=4)


def filled(spec="pariskv", count=300, **options):
    """Make a pool of two sequences, and return their numbers."""
    pool = kvindex.Pool(spec, **CASE.geometry(), **options)
    both = [pool.open(), pool.open()]
    pool.append(both, *CASE.tokens(count, batch=2))
    return pool, both


def test_what_is_wrong_is_refused_in_words_and_changes_nothing():
    pool, (one, other) = filled()
    queries, (keys, values) = CASE.queries(batch=2), CASE.tokens(3, batch=2)
    before = pool.report()
    refused = [
        (lambda: pool.append([], keys, values), r"sequences: got \[\], allowed is at least one"),
        (lambda: pool.append([one, one], keys, values), "allowed is at least one, without"),
        (
            lambda: pool.append([one, 7], keys, values),
            "sequence: got 7, allowed is the number",
        ),
        (lambda: pool.append([one], keys, values), r"keys: got shape \[2, 2, 3, 16\], allowed is"),
        (lambda: pool.append([one, other], keys, values[:1]), "values: got shape"),
        (lambda: pool.append([one, other], keys.half(), values), "keys: got dtype"),
        (lambda: pool.append([one, other], keys, values, valid=keys[:, 0] > 0), "valid: got sh"),
        (lambda: pool.search([one], queries, k=5), "queries: got shape"),
        (lambda: pool.search([one, other], queries, k=0), "k: got 0"),
        (lambda: pool.attend([one, other], queries, k=0), "k: got 0"),
        (lambda: pool.fetch([one], pool.search([one, other], queries, k=5)), "hits.ids: got sh"),
        (lambda: pool.truncate(one, -1), "length: got -1"),
        (lambda: pool.fork(9), "sequence: got 9"),
        (lambda: kvindex.Pool(pool[one]), "index: got an index with 300 tokens, allowed is"),
        (lambda: kvindex.Pool(object()), "index: got object, allowed is an index or layer"),
    ]
    for call, says in refused:
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(
        TypeError, match=rf"sequences: got {one}, allowed is a list such as \[{one}"
    ):
        pool.append(one, keys[:1], values[:1])
    assert pool.report() == before


def test_tokens_that_are_not_valid_are_never_found():
    pool, both = filled("exact", 0)
    valid = torch.arange(20) >= torch.tensor([[4], [7]])
    pool.append(both, *CASE.tokens(20, batch=2), valid=valid)
    ids = pool.search(both, CASE.queries(batch=2), k=20).ids
    assert [sorted(row[row >= 0].tolist()) for row in ids[:, 0]] == [
        [*range(4, 20)],
        [*range(7, 20)],
    ]


def test_the_index_that_a_pool_was_made_of_stays_its_owners():
    index = CASE.index("exact")
    pool = kvindex.Pool(index)
    index.append(*CASE.tokens(5))
    assert len(pool[pool.open()]) == 0


def test_a_pool_says_how_it_steps_a_list():
    index = CASE.index("exact")
    told = f"\n{index.explain()}"
    assert kvindex.Pool(index).explain() == f"sequences: one after the other{told}"
    layers = kvindex.LayerPool(AttentionLayer(index))
    assert layers.explain().startswith("sequences: one after the other, each by")
    assert layers.explain().endswith(told)


def test_a_fork_shares_all_blocks_and_what_comes_after_is_its_own():
    pool, (one, other) = filled()
    pool.close(other)
    alone = pool.report()
    forks = [pool.fork(one) for _ in range(3)]
    report = pool.report()
    assert report.blocks == report.shared == alone.blocks
    assert report.stored_bytes == alone.stored_bytes == report.separate_bytes / 4
    for sequence in [one, *forks[:2]]:
        pool.close(sequence)
    assert pool.report() == alone


def test_attention_of_a_pool_and_of_a_window_are_merged_exactly():
    pool, (one, other) = filled("exact", count=20)
    queries, (keys, values) = CASE.queries(batch=2), CASE.tokens(4, 9, batch=2)
    found = pool.attend([one, other], queries, k=20)
    output, lse = attention.attend(queries, keys, values, scale=0.25, return_lse=True)
    merged = attention.merge([found, Attended(output, lse, found.found)])
    pool.append([one, other], keys, values)
    want = pool.attend([one, other], queries, k=24)
    torch.testing.assert_close(merged.output, want.output)
    torch.testing.assert_close(merged.lse, want.lse)


def test_a_fork_of_128k_tokens_takes_no_time():
    """A fork takes about 1 ms. The test allows 50 ms, for busy machines."""
    case = Case(q_heads=8, head_dim=64, value_dim=64, dtype=torch.bfloat16)
    pool = kvindex.Pool("pariskv", **case.geometry(), check=False)
    sequence = pool.open()
    for seed in range(4):
        pool.append([sequence], *case.tokens(2**15, seed))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        pool.fork(sequence)
        times.append((time.perf_counter() - start) * 1e3)
    assert min(times) <= 50, times
