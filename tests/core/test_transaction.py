"""Calls of several threads on one object, and threads that a forked child does not have."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch

from kvindex.core import forks, protocol, transaction
from kvindex.core.transaction import Transactional
from kvindex.storage import sharing
from tests.support.helpers import Case, assert_same_hits
from tests.support.processes import HANGS_S
from tests.support.sequences import SIZES, Sequence, layer_of

ROUNDS = 60


class Object(Transactional):
    """Makes further calls inside its own calls."""

    def search(self, inside=lambda: None):
        return inside()

    def attend(self, inside=lambda: None):
        return inside()

    def append(self, inside=lambda: None):
        return inside()


def is_alone(name):
    return name != "search"


CONFLICTS = [
    (first, second)
    for first in ("search", "attend", "append")
    for second in ("search", "attend", "append")
    if is_alone(first) or is_alone(second)
]


def at_each_line(call, visit):
    """Run `call` in another thread, and `visit` in this one before each line of its transaction.

    Return the error of the call, and how often it was stopped.
    """
    stopped, go, errors = threading.Semaphore(0), threading.Semaphore(0), []

    def follow(frame, event, argument):
        if frame.f_code.co_filename != transaction.__file__:
            return None
        if event == "line":
            stopped.release()
            go.acquire()
        return follow

    def run():
        sys.settrace(follow)
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
        finally:
            sys.settrace(None)

    thread, stops = threading.Thread(target=run), 0
    thread.start()
    while thread.is_alive():
        if stopped.acquire(timeout=0.05):
            visit()
            stops += 1
            go.release()
    thread.join()
    return errors, stops


@pytest.mark.parametrize(("first", "second"), CONFLICTS)
def test_a_call_that_is_refused_disturbs_the_first_at_none_of_its_lines(first, second):
    one, nested = Object(), []
    names = ["search", "attend", "append"] if is_alone(first) else ["search"]

    def visit():
        for name in names:
            getattr(one, name)(lambda: nested.append(one.search()))

    def during():
        return at_each_line(getattr(one, second), visit)

    errors, stops = getattr(one, first)(during)
    assert errors[0].startswith(f"{second}: got a call while another thread's call is running")
    assert len(nested) == len(names) * stops > 5
    getattr(one, second)()  # no call is in progress
    with ThreadPoolExecutor(1) as other:
        other.submit(getattr(one, second)).result()


@pytest.mark.parametrize("names", [["append"] * 4, ["search"] * 4, ["search", "append"] * 2])
def test_of_calls_at_the_same_time_the_first_goes_on(names):
    """All calls begin together. None ends before the others have entered or raised an error."""
    one, winners = Object(), Counter()
    begin, decided = threading.Barrier(len(names)), threading.Barrier(len(names))

    def run(name):
        for _ in range(ROUNDS):
            begin.wait(10)
            try:
                getattr(one, name)(lambda: decided.wait(10))
                won.append(name)
            except RuntimeError:
                decided.wait(10)
            if begin.wait(10) == 0:
                winners[tuple(sorted(won))] += 1
                won.clear()

    won = []
    with ThreadPoolExecutor(len(names)) as pool:
        for future in [pool.submit(run, name) for name in names]:
            future.result()
    reads = tuple(name for name in names if name == "search")
    allowed = {("append",)} if "append" in names else set()
    allowed |= {reads} if reads else set()
    assert winners.total() == ROUNDS
    assert set(winners) <= allowed
    assert one._access._readers == {}


def test_a_thread_that_reads_may_be_alone_once_the_others_have_left():
    one, inside, go = Object(), threading.Event(), threading.Event()

    def reads():
        inside.set()
        return go.wait(10)

    def during():
        with pytest.raises(RuntimeError, match="append: got a call while another thread's"):
            one.append()
        go.set()
        assert other.result()
        one.append(one.search)
        with ThreadPoolExecutor(1) as third:  # the second thread is still reading
            assert third.submit(one.search).exception() is None
            assert isinstance(third.submit(one.append).exception(), RuntimeError)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(one.search, reads)
        assert inside.wait(10)
        one.search(during)
    one.append()


def test_an_error_says_which_reads_are_alone():
    class KeepsHits(Object):
        def _undone(self, name):
            return name == "search" or super()._undone(name)

    one = KeepsHits()
    with ThreadPoolExecutor(1) as pool:
        error = one.search(lambda: pool.submit(one.search).exception())
    assert "search of this object uses shared buffers or stores its results" in str(error)


# Forks

CASE = Case(q_heads=4, kv_heads=2, head_dim=16)
K = 9

NAMED = {
    "exact": "torch",
    "exact+reuse": "torch",
    "exact+recall": "torch",
    "pariskv:preset=fast": "torch",
    "pariskv": "cpu",
}

forks_beside_threads = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


class Half:
    """Stops the first call of a method in the middle, until the block ends.

    A fork in between waits for a thread that compiles kernels, which takes minutes on a busy
    machine.
    """

    def __init__(self, holder, name):
        self.holder, self.name, self.method = holder, name, getattr(holder, name)
        self.inside, self.go, self.result = threading.Event(), threading.Event(), None

    def held(self, *given, **options):
        if not self.inside.is_set():
            self.inside.set()
            assert self.go.wait(HANGS_S)
        return self.method(*given, **options)

    @contextmanager
    def of(self, call):
        """Run the block while another thread is in the middle of `call`."""
        setattr(self.holder, self.name, self.held)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            try:
                assert self.inside.wait(HANGS_S)
                yield
            finally:
                self.go.set()
        setattr(self.holder, self.name, self.method)
        self.result = future.result()


def in_a_child(check):
    """Run `check` in a forked process."""
    child = os.fork()
    if not child:
        try:
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(HANGS_S)  # a process that hangs prints its traceback, and ends
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def filled(line, backend="torch"):
    index = CASE.index(line, backend=backend)
    index.append(*CASE.tokens(300))
    return index


@forks_beside_threads
@pytest.mark.parametrize("line", NAMED)
def test_in_a_forked_child_an_index_is_usable_that_another_thread_searched(line):
    if NAMED[line] == "cpu":
        pytest.importorskip("numba")
    index = filled(line, NAMED[line])
    want = index.search(CASE.queries(), k=K).ids

    def check():
        for _ in range(2):
            hits = index.search(CASE.queries(), k=K)
            assert torch.equal(hits.ids, want)
            index.fetch(hits)
        deepcopy(index)
        index.append(*CASE.tokens(7, seed=1))
        assert len(index) == 307
        index.truncate(5)
        index.reset()
        index.append(*CASE.tokens(300))
        assert torch.equal(index.search(CASE.queries(), k=K).ids, want)

    with Half(getattr(index, "inner", index), "_search").of(
        lambda: index.search(CASE.queries(1), k=K)
    ):
        in_a_child(check)


@forks_beside_threads
@pytest.mark.parametrize("where", ["_prepared", "_with_written", "_commit"])
@pytest.mark.parametrize("line", ["exact", "pariskv"])
def test_in_a_forked_child_a_change_of_another_thread_is_undone(line, where):
    index, other = filled(line), filled(line)

    def check():
        assert len(index) == 300
        for each in (index, other):
            each.append(*CASE.tokens(7, seed=1))
        assert_same_hits(*(each.search(CASE.queries(), k=K) for each in (index, other)))

    with Half(index, where).of(lambda: index.append(*CASE.tokens(20, seed=2))):
        in_a_child(check)
    assert len(index) == 320


@forks_beside_threads
def test_in_a_forked_child_a_step_of_another_thread_is_undone():
    """This includes everything that the step has changed in the layer's index so far."""
    layer, alone = (layer_of(CASE, k=5) for _ in range(2))
    sequence, other, appends = Sequence.of(CASE, 40), Sequence.of(CASE, 40, seed=3), 0
    for t in range(30):
        appends = len(alone.index)
        for each in (layer, alone):
            sequence.feed(each, t, t + 1)
        # an update was just done, so the next one is far away
        if t > 12 and len(alone.index) > appends:
            break
    start = len(layer)

    def check():
        assert len(layer) == len(alone)
        for t in range(len(alone), 40):
            assert torch.equal(*(sequence.feed(each, t, t + 1) for each in (layer, alone)))

    for step in range(SIZES["update_every"]):
        half = Half(layer.index, "append" if step == SIZES["update_every"] - 1 else "search")
        with half.of(partial(other.feed, layer, start + step, start + step + 1)):
            in_a_child(check)
        other.feed(alone, start + step, start + step + 1)


@forks_beside_threads
def test_in_a_forked_child_a_change_that_cannot_be_undone_asks_for_reset():
    index = filled("exact")

    def fails(checkpoint):
        raise MemoryError("no more")

    def check():
        with pytest.raises(RuntimeError, match="whose append failed and could not be undone"):
            index.search(CASE.queries(), k=K)
        index.reset()
        index.append(*CASE.tokens(9))
        assert index.search(CASE.queries(), k=K).ids.min() == 0

    with Half(index, "_commit").of(lambda: index.append(*CASE.tokens(20, seed=2))):
        index.rollback, rollback = fails, index.rollback
        in_a_child(check)
        index.rollback = rollback


@forks_beside_threads
def test_in_a_forked_child_faiss_indexes_that_another_thread_filled_are_made_anew():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    index = filled("faiss-flat")
    want = index.search(CASE.queries(), k=K)
    index = deepcopy(index)  # a copy builds its FAISS indexes in its first search
    add, place = index._add, SimpleNamespace(middle=lambda: None)
    half = Half(place, "middle")

    def added(faiss_index, keys):
        if not half.inside.is_set():
            add(faiss_index, torch.zeros_like(keys))  # an incomplete change by another thread
            place.middle()
            faiss_index.reset()
        add(faiss_index, keys)

    def check():
        assert_same_hits(index.search(CASE.queries(), k=K), want)

    index._add = added
    with half.of(lambda: index.search(CASE.queries(), k=K)):
        in_a_child(check)


@forks_beside_threads
def test_in_a_forked_child_the_default_dtype_is_the_callers():
    """During a call in plain torch, the default dtype is changed for the whole process."""
    index = filled("exact")

    def check():
        assert torch.get_default_dtype() == torch.float64
        index.search(CASE.queries(), k=K)
        assert torch.get_default_dtype() == torch.float64

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Half(index, "_search").of(lambda: index.search(CASE.queries(), k=K)):
            in_a_child(check)
        check()
    finally:
        torch.set_default_dtype(before)


@forks_beside_threads
def test_in_a_forked_child_no_lock_is_held_by_another_thread():
    index, inside = filled("exact"), threading.Event()
    inside.lock = forks.lock(inside, "lock")

    def held():
        with sharing._lock, transaction._float32._lock, index._access._lock, inside.lock:
            inside.set()

    def check():
        assert inside.lock.acquire(blocking=False)
        deepcopy(index)
        torch.set_default_dtype(torch.float64)
        index.search(CASE.queries(), k=K)

    with Half(inside, "set").of(held):
        in_a_child(check)


@forks_beside_threads
def test_in_a_forked_child_a_lock_of_the_thread_that_forked_is_released():
    def check():
        with owner.lock:
            in_a_child(lambda: None)

    owner = threading.Event()
    owner.lock = forks.lock(owner, "lock")
    with owner.lock:
        in_a_child(check)
    check()


COUNTERS = {
    *("nbytes", "memory", "placement", "explain", "recipe"),
    *("check_coverage", "check_state"),  # they read options or their argument only
    *("reserve_ahead", "new_batch"),  # they begin work on objects of their own
}
"""Methods of an index that any thread may call at any time."""


def test_all_methods_of_the_protocols_have_a_place_in_the_lists():
    listed = transaction.READS | transaction.ALONE | transaction.CHANGES | COUNTERS
    kinds = [getattr(protocol, name) for name in protocol.__all__ if name != "Executor"]
    kinds = [kind for kind in kinds if getattr(kind, "_is_protocol", False)]
    methods = {name for kind in kinds for name, part in vars(kind).items() if isfunction(part)}
    assert {name for name in methods if not name.startswith("_")} <= listed
