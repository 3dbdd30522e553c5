"""If anything fails anywhere, an index and a layer keep their state."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch

import kvindex
from kvindex.core.transaction import Transactional
from kvindex.indexes.exact import Exact
from kvindex.layer import AttentionLayer
from kvindex.layer.updates import LAG
from kvindex.testing import fail_at, interrupt_at, lines_of, operations_of
from kvindex.testing.contract.faults import (
    check_memory_that_runs_out_anywhere_changes_nothing,
    points,
)
from kvindex.wrappers import MeasureRecall, Wrapper
from tests.contract.test_contract import SPECS
from tests.support.beside import Beside
from tests.support.helpers import Case, left_padding, mostly_slow, sampled
from tests.support.sequences import SIZES, Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)
WRAPPED = [
    "exact+recall",
    "pariskv:preset=fast+sample",
    "exact+vattention",
    "quest+reuse:tau=0.5",
    "sentencekv+reuse",
]
INDEXES = [*kvindex.names(), "pariskv:preset=paper", *WRAPPED]


def make(spec):
    return lambda **options: CASE.index(spec, **options)


@pytest.mark.parametrize("spec", mostly_slow(INDEXES, "exact", "pariskv", *INDEXES[2::4]))
def test_memory_that_runs_out_anywhere_changes_no_index(spec):
    check_memory_that_runs_out_anywhere_changes_nothing(make(spec), CASE)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("spec", [*SPECS, *WRAPPED])
def test_memory_that_runs_out_at_each_operation_changes_no_index(spec):
    check_memory_that_runs_out_anywhere_changes_nothing(make(spec), CASE, most=10_000)


class WritesWhereOneLooks(Exact):
    def _prepared(self, keys, valid):
        if len(self):
            self._store._columns["rows"].add_(1)
        return super()._prepared(keys, valid)


class CommitsTooEarly(Exact):
    def _undone(self, name):
        return False


@pytest.mark.parametrize("broken", [WritesWhereOneLooks, CommitsTooEarly])
def test_the_check_of_indexes_can_fail(broken):
    def make_broken(**options):
        return broken(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, **options)

    with pytest.raises(AssertionError):
        check_memory_that_runs_out_anywhere_changes_nothing(make_broken, CASE)


# A layer

LAYERS = {
    **{spec: spec for spec in ("exact", "pariskv", "pariskv:preset=paper", "h2o", "infllm")},
    **{spec: spec for spec in ("sentencekv", "retroinfer", "ctkvr", "quest+reuse", "exact+recall")},
    "an update that begins beside": None,
    "an update that ends beside": None,
}
BESIDE = [name for name in LAYERS if "beside" in name]
FEW = ["exact", "quest+reuse", *BESIDE]
"""Layers for which faults are tried in each call. For other layers, only updates are tried."""
EVERY = SIZES["update_every"]


def begun(name):
    """Make a layer before a step in which rows move to the index, and its sequence."""
    sequence, spec = Sequence.of(CASE, 60), LAYERS[name]
    if spec is None:
        index = Beside(q_heads=4, kv_heads=2, head_dim=16, value_dim=8)
    else:
        index = CASE.index(spec)
    layer = AttentionLayer(index, k=6, **SIZES)
    sequence.feed(layer, 0, 22)
    while layer._window.buffer < EVERY - 1:
        update(layer, sequence)()
    if "ends" in name:
        update(layer, sequence)()
        while layer._window.buffer < LAG - 1:
            update(layer, sequence)()
        assert layer._updates.pending is not None
    return sequence, layer


def goes_on(layer, sequence):
    """Return everything observable of a layer as it continues, on a copy."""
    seen = [len(layer), layer.nbytes(), len(layer.index), float(layer.traffic.rows_read)]
    seen.append(layer._updates.pending is None)
    layer, start = copy.deepcopy(layer), len(layer)
    steps = range(start, start + EVERY + 1)  # past the next update
    return seen, [sequence.feed(layer, token, token + 1) for token in steps]


def assert_same(got, want):
    assert got[0] == want[0]
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert torch.equal(mine, theirs)


def hold_to(call_of, count_of, fault, spec, most):
    """Check that each fault in a call of a layer leaves its state unchanged."""
    sequence, layer = begun(spec)
    want = goes_on(layer, sequence)
    count, faults = count_of(call_of(begun(spec)[1], sequence)), 0
    for point in points(count, most):
        # a copy has no update under way
        broken = begun(spec)[1] if spec in BESIDE else copy.deepcopy(layer)
        if fault(call_of(broken, sequence), point):
            faults += 1
            assert_same(goes_on(broken, sequence), want)
    assert faults >= min(count, most) / 2


def update(layer, sequence):
    return lambda: sequence.feed(layer, len(layer), len(layer) + 1)


CALLS = {
    "update": update,
    "reorder": lambda layer, sequence: lambda: layer.reorder(torch.tensor([1, 1, 0])),
    "truncate": lambda layer, sequence: lambda: layer.truncate(9),
    "reset": lambda layer, sequence: layer.reset,
}


@pytest.mark.parametrize(
    ("name", "spec"),
    mostly_slow(
        [(name, spec) for name in CALLS for spec in (LAYERS if name == "update" else FEW)],
        *(("update", spec) for spec in ("exact", "pariskv", "h2o", *BESIDE)),
        *((name, "exact") for name in ("reorder", "truncate", "reset")),
    ),
)
def test_memory_that_runs_out_changes_no_layer(name, spec):
    hold_to(CALLS[name], operations_of, fail_at, spec, 12)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("spec", LAYERS)
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_runs_out_at_each_operation_changes_no_layer(name, spec):
    hold_to(CALLS[name], operations_of, fail_at, spec, 10_000)


@pytest.mark.parametrize(("name", "spec"), sampled(CALLS, FEW))
def test_an_interrupt_changes_no_layer(name, spec):
    hold_to(CALLS[name], lines_of, interrupt_at, spec, 30 if name == "update" else 15)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("spec", LAYERS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_each_line_changes_no_layer(name, spec):
    hold_to(CALLS[name], lines_of, interrupt_at, spec, 100_000)


def test_an_interrupt_leaves_no_lock_held():
    """Python's own locks are included: no signal is handled just before `__exit__`."""
    lock, here = threading.Lock(), Path(__file__).parent

    def work():
        with lock:
            number = 1
        with lock:
            return number + 1

    for line in range(lines_of(work, here)):
        assert interrupt_at(work, line, here)
        assert not lock.locked()


def test_the_check_of_layers_can_fail(monkeypatch):
    monkeypatch.setattr(Transactional, "_undo", lambda *_: None)
    with pytest.raises(AssertionError):
        hold_to(update, operations_of, fail_at, "exact", 24)


def test_what_cannot_be_undone_says_that_it_must_be_reset(monkeypatch):
    index = CASE.index("exact")
    index.append(*CASE.tokens(9))

    def fail(checkpoint):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(index, "rollback", fail)
        patch.setattr(index, "_commit", fail)
        with pytest.raises(MemoryError):
            index.append(*CASE.tokens(9))
    for call in (lambda: index.search(CASE.queries(), k=3), lambda: index.append(*CASE.tokens(9))):
        with pytest.raises(RuntimeError, match=r"append failed and could not be undone.*reset\(\)"):
            call()
    index.reset()
    index.append(*CASE.tokens(9))
    assert index.search(CASE.queries(), k=3).ids.min() >= 0


class Foreign:
    """An index of another library, which is no `Restorable` and does not attend."""

    def __init__(self):
        vars(self)["made"] = CASE.index("exact")

    def __getattr__(self, name):
        if name.startswith("__") or name in ("attend", "attend_hits"):
            raise AttributeError(name)
        return getattr(self.made, name)

    def __len__(self):
        return len(self.made)


@pytest.mark.parametrize("around", [lambda index: index, Wrapper])
def test_an_index_that_cannot_go_back_is_truncated(around):
    layer = AttentionLayer(around(Foreign()), k=6, **SIZES)
    sequence = Sequence.of(CASE, 60)
    sequence.feed(layer, 0, 31)
    held = len(layer.index)
    before = layer.checkpoint()
    sequence.feed(layer, 31, 43)
    assert len(layer.index) > held
    layer.rollback(before)
    assert (len(layer), len(layer.index)) == (31, held)
    layer.k = 1000
    clone = copy.deepcopy(layer)
    sequence.feed(clone, 31, 43)
    sequence.assert_equals(sequence.feed(layer, 31, 32), sequence.dense(), 31)


def test_a_wrapper_around_an_index_of_others_is_undone(monkeypatch):
    index = MeasureRecall(Foreign())
    index.append(*CASE.tokens(5))

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(index._exact, "_commit", fail)
    with pytest.raises(MemoryError):
        index.append(*CASE.tokens(3))
    assert (len(index.inner), len(index._exact)) == (5, 5)


class FailsLate:
    """A mixin in front of an index, whose effects are undone like the index's own."""

    def append(self, keys, values, *, valid=None):
        super().append(keys, values, valid=valid)
        raise MemoryError


def test_a_method_of_a_mixin_is_undone():
    class Mixed(FailsLate, Exact):
        pass

    index = Mixed(q_heads=4, kv_heads=2, head_dim=16, value_dim=8)
    with pytest.raises(MemoryError):
        index.append(*CASE.tokens(3))
    assert len(index) == 0


def test_a_copy_has_flags_of_its_own(monkeypatch):
    """Flags record errors that are raised later, as on a GPU."""
    index = CASE.index("exact")
    index.append(*CASE.tokens(5))
    monkeypatch.setattr(Exact, "_defers", True)
    clone = copy.deepcopy(index)
    clone.append(CASE.tokens(3)[0] * torch.nan, CASE.tokens(3)[1])
    other = copy.deepcopy(clone)
    index.raise_pending()
    for one in (clone, other):
        with pytest.raises(ValueError, match="keys: got"):
            one.raise_pending()


def test_searches_of_two_threads_report_errors_by_one_flag(monkeypatch):
    """The second search begins while the first one makes the flag, and finds an error."""
    index, queries = CASE.index("exact"), torch.zeros(2, CASE.q_heads, CASE.head_dim)
    index.append(*CASE.tokens(5))
    monkeypatch.setattr(Exact, "_defers", True)
    zeros, wrong = torch.zeros, queries * torch.nan

    def slowly(*sizes, **options):
        if len(sizes) == 1 and sizes[0] == ():
            monkeypatch.setattr(torch, "zeros", zeros)
            second = threading.Thread(target=index.search, args=(wrong,), kwargs={"k": 2})
            second.start()
            second.join()
        return zeros(*sizes, **options)

    monkeypatch.setattr(torch, "zeros", slowly)
    index.search(queries, k=2)
    with pytest.raises(ValueError, match="queries: got"):
        index.raise_pending()


def test_rows_that_were_padded_by_a_call_that_failed_are_real_afterwards():
    index, valid = CASE.index("exact"), left_padding([2, 3], 9)
    index.append(*CASE.tokens(30), valid=left_padding([1, 2], 30))
    before = index.checkpoint()
    index.append(*CASE.tokens(9), valid=valid)
    index.rollback(before)
    index.append(*CASE.tokens(9))
    assert index.valid[:, 30:].all()


def test_a_copy_and_its_original_go_their_own_ways():
    for spec in [*kvindex.names(), *WRAPPED]:
        index = CASE.index(spec)
        index.append(*CASE.tokens(20))
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([19]))
        clone = copy.deepcopy(index)
        clone.append(*CASE.tokens(11, seed=3))
        index.append(*CASE.tokens(5, seed=4))
        fresh = CASE.index(spec)
        fresh.append(*CASE.tokens(20))
        fresh.observe_queries(CASE.queries()[:, :, None], torch.tensor([19]))
        fresh.append(*CASE.tokens(5, seed=4))
        mine, want = (one.search(CASE.queries(1), k=9) for one in (index, fresh))
        assert torch.equal(mine.ids, want.ids), spec
        assert (len(index), len(clone)) == (25, 31)


def test_a_copy_goes_back_to_what_it_was_itself():
    """A copy rolls back to its own checkpoint, even if the original has one."""
    layer = AttentionLayer(CASE.index("pariskv"), k=6, **SIZES)
    sequence = Sequence.of(CASE, 60)
    sequence.feed(layer, 0, 30)
    layer.checkpoint()
    clone = copy.deepcopy(layer)
    before = clone.checkpoint()
    sequence.feed(clone, 30, 45)
    clone.rollback(before)
    sequence.feed(clone, 30, 50)
    assert clone.index._codes is not layer.index._codes
    assert (len(layer), len(layer.index)) == (30, 26)
    again = copy.deepcopy(layer)
    assert torch.equal(sequence.feed(again, 30, 31), sequence.feed(layer, 30, 31))


def test_an_index_is_not_pickled():
    for made in (CASE.index("exact"), AttentionLayer(CASE.index("exact"))):
        with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
            pickle.dumps(made)
