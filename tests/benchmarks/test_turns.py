"""Turns: a token counts in the turn that computes it, and no time is below its lower bound."""

import time
from functools import partial

import pytest
import torch

from benchmarks.common import attached, token
from benchmarks.common.timing import check_floor, in_turns, of_tokens

TOKEN_S, COUNT, AHEAD = 0.004, 20, 4


class Device:
    """A device that takes `TOKEN_S` for each launched token, one by one, concurrently with the
    host."""

    def __init__(self):
        self.free = 0.0

    def launch(self):
        """Return the time when the token will be done."""
        self.free = max(self.free, time.perf_counter()) + TOKEN_S
        return self.free

    def wait(self, until=None):
        """Wait for a token, or for all."""
        left = (self.free if until is None else until) - time.perf_counter()
        time.sleep(max(left, 0))


class Ring:
    """A `TokenRing` of this device."""

    device, last = None, None

    def __init__(self, *_):
        self.coming = []

    def __len__(self):
        return len(self.coming)

    def put(self, _):
        self.coming.append(Ring.last)

    def take(self):
        Ring.device.wait(self.coming.pop(0))

    def wait(self):
        while self.coming:
            self.take()


class Graph:
    """A `TokenGraph` whose host is late once in a turn."""

    ahead = AHEAD

    def __init__(self, late_at):
        self.late_at, self.count = late_at, 0

    def step(self):
        Ring.last = Ring.device.launch()
        self.count += 1
        if self.count % COUNT == self.late_at:
            time.sleep(8 * TOKEN_S)


@pytest.fixture
def plan(monkeypatch):
    """Return a plan whose host is late after this token of a turn."""
    Ring.device = Device()
    monkeypatch.setattr(token, "TokenRing", Ring)
    monkeypatch.setattr(token, "drained", Ring.device.wait)

    def made(late_at):
        plan = object.__new__(token.Plan)
        plan._session = type("Session", (), {"token": torch.zeros(1, 1, dtype=torch.int64)})()
        plan._graph, plan._ids, plan._written = Graph(late_at), torch.arange(50), 0
        return plan

    return made


@pytest.mark.parametrize("late_at", [1, 4, 5, 12, COUNT - 1])
def test_no_token_of_a_turn_is_free_wherever_the_host_is_late(plan, late_at):
    found = plan(late_at).turn(COUNT)
    assert len(found["between_ms"]) == COUNT
    assert found["token_ms"][0] >= 1e3 * TOKEN_S
    assert sum(found["between_ms"]) >= 1e3 * COUNT * TOKEN_S


def test_what_another_plan_has_launched_is_in_no_turn(plan):
    """Tokens of another plan count neither as tokens of a turn nor as time that this plan waits."""
    one, device = plan(None), Ring.device
    for _ in range(10):
        device.launch()  # a token of another plan
    start = time.perf_counter()
    found = one.turn(COUNT)
    took, counted = time.perf_counter() - start, sum(found["between_ms"]) / 1e3
    assert COUNT * TOKEN_S <= counted <= took - 9 * TOKEN_S


def test_marks_begin_with_nothing_under_way(monkeypatch):
    device, marks = Device(), attached.Marks()
    monkeypatch.setattr(attached, "drained", device.wait)
    marks.put(None)  # the prompt
    ends = [device.launch() for _ in range(6)]  # the first token is read immediately
    marks.put(None)
    assert time.perf_counter() >= ends[-1]
    for _ in range(3):
        device.wait(device.launch())
        marks.put(None)
    assert marks.figures()["token_ms"][0] >= 1e3 * TOKEN_S


def test_a_host_that_is_late_reads_several_at_once_and_their_mean_is_right():
    found = of_tokens([0.0, 0.020, 0.020, 0.020, 0.020])
    assert found == {"token_ms": [5.0], "between_ms": [20.0, 0.0, 0.0, 0.0]}


def test_a_figure_below_the_floor_is_refused_and_not_written():
    figures = {"one": {"token_ms": [4.0], "device_ms": [3.9]}, "two": {"token_ms": [2.88]}}
    turns = {name: partial(dict, one) for name, one in figures.items()}
    for found in in_turns(turns, 2, float("inf"), "one"):
        check_floor(found, ["one"], 3.5)
        if found["rounds"]:
            match = r"two: got 2.880 ms for a token \(token_ms\), allowed is at least 3.500 ms"
            with pytest.raises(SystemExit, match=match):
                check_floor(found, turns, 3.5)
            with pytest.raises(SystemExit, match=r"one: got 3.900 ms for a token \(device_ms\)"):
                check_floor(found, ["one"], 3.95)
        else:
            check_floor(found, turns, 3.5)
