"""Calls of several threads on one object: of two that conflict the first goes on."""

import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvindex.core import guard
from kvindex.core.guard import Guarded

ROUNDS = 60


class Object(Guarded):
    """Calls what it is told to inside its own calls."""

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
    """Run `call` in another thread, and `visit` in this one before each line of its guard.

    Returns what the call raised, and how often it was stopped.
    """
    stopped, go, errors = threading.Semaphore(0), threading.Semaphore(0), []

    def follow(frame, event, argument):
        if frame.f_code.co_filename != guard.__file__:
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
    assert errors[0].startswith(f"{second}: got a call while another thread's is under way")
    assert len(nested) == len(names) * stops > 5
    getattr(one, second)()  # nobody is inside any more
    with ThreadPoolExecutor(1) as other:
        other.submit(getattr(one, second)).result()


@pytest.mark.parametrize("names", [["append"] * 4, ["search"] * 4, ["search", "append"] * 2])
def test_of_calls_at_the_same_time_the_first_goes_on(names):
    """All begin at once, and none ends before all others were let in or refused."""
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
        with ThreadPoolExecutor(1) as third:  # it reads still
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
    assert "but search of this object is none (it shares buffers or keeps what it found)" in str(
        error
    )
