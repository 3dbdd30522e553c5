"""Which stream waits for which while rows move into an index, with fake streams that record
waits."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvindex.core.protocol import Rows
from kvindex.layer import updates
from kvindex.layer.updates import AsyncAppend
from kvindex.layer.window import Leaving


class Part:
    """Stands for a tensor."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def record_stream(self, stream):
        self.notes.append(f"{self.name} lives until {stream.name} is done")


class Stream:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.notes.append(f"event of {self.name}")
        return f"that of {self.name}"

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event}")


@pytest.fixture
def notes(monkeypatch):
    notes = []
    side, steps = Stream("side", notes), Stream("steps", notes)

    @contextmanager
    def on(stream):
        notes.append(f"on {stream.name}:")
        yield
        notes.append("back")

    monkeypatch.setattr(updates, "side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return notes


def index_of(notes, fails=False):
    def start_append(keys, values, *, valid):
        notes.append("begin")
        if fails:
            raise MemoryError
        return lambda: notes.append("end")

    place = SimpleNamespace(device=torch.device("cuda:0"))
    return SimpleNamespace(geometry=place, start_append=start_append)


def leaving(notes):
    keys, values, valid = (Part(name, notes) for name in ("keys", "values", "valid"))
    return Leaving(Rows(keys, values), valid, None)


BEGUN = [
    "side waits for steps",
    "keys lives until side is done",
    "values lives until side is done",
    "valid lives until side is done",
    "on side:",
    "begin",
]


def test_the_side_stream_begins_after_the_step_and_the_end_comes_after_it(notes):
    move = AsyncAppend(index := index_of(notes), leaving(notes), asynchronous=index)
    assert notes == [*BEGUN, "back", "event of side"]
    notes.clear()
    move.end()
    del move
    assert notes == ["steps waits for that of side", "end"]


def test_what_is_given_up_is_waited_for(notes):
    move = AsyncAppend(index := index_of(notes), leaving(notes), asynchronous=index)
    notes.clear()
    move.wait()
    assert notes == ["steps waits for that of side"]


def test_what_is_let_go_of_is_waited_for(notes):
    """A stream must finish before memory that it writes to is freed, as others may reuse the
    memory."""
    gc.collect()  # free what other tests have left, so that it is not counted here
    move = AsyncAppend(index := index_of(notes), leaving(notes), asynchronous=index)
    notes.clear()
    del move
    gc.collect()
    assert notes == ["steps waits for that of side"]


def test_what_fails_to_begin_is_waited_for(notes):
    with pytest.raises(MemoryError):
        AsyncAppend(index := index_of(notes, fails=True), leaving(notes), asynchronous=index)
    assert notes == [*BEGUN, "steps waits for side"]


def test_an_append_that_is_not_beside_knows_no_streams(notes):
    index = index_of(notes)
    index.append = lambda keys, values, *, valid: notes.append("append")
    move = AsyncAppend(index, leaving(notes), asynchronous=None)
    assert notes == []
    move.end()
    assert notes == ["append"]
