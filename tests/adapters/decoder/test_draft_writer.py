"""Which drafts search, and which reuse the rows of a search."""

import pytest

from kvindex_adapters.decoder import graph
from kvindex_adapters.decoder.graph import CHEAP, SEARCH_EVERY, DraftWriter, search_every


class Steps:
    """A `TokenGraph` that notes its steps."""

    def __init__(self, letter, done, replays=True):
        self._letter, self._done, self.replays = letter, done, replays

    def step(self, *, drafts):
        assert drafts
        self._done.append(self._letter)
        return self.replays


class Session:
    can_repeat = True


@pytest.fixture
def written(monkeypatch):
    """A writer of drafts, the letters of its steps, and its searching steps."""
    done = []
    monkeypatch.setattr(graph, "TokenGraph", lambda *_, **__: Steps("R", done))
    searching = Steps("S", done)
    return DraftWriter(Session(), None, searching), done, searching


def test_one_draft_of_several_searches(written):
    writer, done, _ = written
    for count in (SEARCH_EVERY + 2, 3):
        for place in range(count):
            writer.step(place)
    assert "".join(done) == "S" + "R" * (SEARCH_EVERY - 1) + "SR" + "SRR"


def test_rows_of_a_step_without_a_graph_are_not_reused(written):
    writer, done, searching = written
    searching.replays = False
    for place in range(3):
        writer.step(place)
    searching.replays = True
    for place in range(3, 6):
        writer.step(place)
    assert "".join(done) == "SSSSRR"


@pytest.mark.parametrize(("graphs", "can_repeat"), [(False, True), (True, False)])
def test_without_graphs_each_draft_searches(monkeypatch, graphs, can_repeat):
    monkeypatch.setattr(Session, "can_repeat", can_repeat)
    done = []
    writer = DraftWriter(Session(), None, Steps("S", done), graphs=graphs)
    for place in range(3):
        writer.step(place)
    assert "".join(done) == "SSS"


def test_every_draft_searches_where_verification_takes_most_of_the_time():
    assert search_every(None) == search_every(CHEAP / 2) == 1
    assert search_every(2 * CHEAP) == SEARCH_EVERY
