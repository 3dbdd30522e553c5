"""A step of several tokens in a caller's graph equals as many steps of one token.

On a CPU, the graph is recorded work (`graphs.py`).
"""

from copy import deepcopy

import pytest
import torch

from kvindex.core.graphs import GRAPHS
from kvindex.layer import AttentionLayer
from kvindex_cuda.pariskv.steps.several_tokens import SeveralTokens
from tests.cuda.pariskv.test_captured_step import SIZES, graphs  # noqa: F401
from tests.support.helpers import Case, slow
from tests.support.sequences import Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64)
PROMPT = 90


class Several:
    """A layer whose steps of several tokens go through a graph."""

    def __init__(self, device, case=CASE, sinks=None, **options):
        self.device, self.sequence = device, Sequence.of(case, 400)
        made = dict(backend="cuda", device=device, store="host" if device == "cuda" else "device")
        own = SIZES | {name: options.pop(name) for name in tuple(options) if name in SIZES}
        own["error"] = options.pop("error", None)
        self.layer = AttentionLayer(case.index("pariskv", **made | options), **own)
        self.sinks = None if sinks is None else sinks.to(device)
        self.length = self.captures = 0
        self._reads = self._graph = None

    def parts(self, count):
        start, self.length = self.length, self.length + count
        return [one.to(self.device) for one in self.sequence.parts(start, self.length)]

    def feed(self, *counts):
        for count in counts:
            self.layer.step(*self.parts(count), sink_logits=self.sinks)

    def replay(self, count, kept=None):
        """Return the output of a step of `count` tokens, of which `kept` stay, and that of as many
        steps of one token in a copy of the layer."""
        twin, kept = deepcopy(self.layer), count if kept is None else kept
        parts = self.parts(count)
        self.length += kept - count
        reads = self.layer.prepare_next(count) or self.layer.prepare_replay(count)
        assert reads is not None, self.layer.capture_refusal(count)
        if reads is not self._reads:
            self._parts = [one.clone() for one in parts]
            where = torch.device(self.device)
            self._graph = GRAPHS[where.type](where, self._capture)
            self._reads, self.captures = reads, self.captures + 1
        for own, given in zip(self._parts, parts, strict=True):
            own.copy_(given)
        self._graph.replay()
        mine = self._output.clone()
        self.layer.count_replay(kept, count)
        with twin.speculating(count):
            singles = [[part[:, :, t : t + 1] for part in parts] for t in range(count)]
            theirs = [twin.step(*one, sink_logits=self.sinks) for one in singles]
        return mine, torch.cat(theirs, dim=2)

    def _capture(self):
        self._output = self.layer.captured_step(*self._parts, sink_logits=self.sinks)


def near(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def ready(device, **options):
    several = Several(device, **options)
    several.feed(PROMPT, 1)
    return several


@pytest.mark.parametrize("count", [2, 4, slow(7)])
def test_the_step_equals_steps_of_one_token(device, count):
    several = ready(device)
    for _ in range(3):
        near(*several.replay(count))
    assert several.captures == 1


def test_the_buffer_grows_once_however_full_the_window_gets(device):
    """Each new buffer needs another graph."""
    several = ready(device)
    for kept in (1, 1, 1, 7, 1, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1):
        several.replay(7, kept)
    assert several.captures == 1


def test_rejected_tokens_leave_no_trace(device):
    """Each number of accepted tokens, while tokens move into the index."""
    several, kept = ready(device), [1, 4, 2, 3, 1, 4, 4, 2]
    for count in kept:
        near(*several.replay(4, count))
    assert len(several.layer) == several.length == PROMPT + 1 + sum(kept)
    assert several.captures == 1
    rows, (_, *parts) = several.layer._window.rows, several.sequence.parts(0, several.length)
    window = len(several.layer) - len(several.layer.index)
    for own, one in zip((rows.keys, rows.values), parts, strict=True):
        assert torch.equal(own.cpu(), one[:, :, -window:])


def test_steps_of_one_and_of_several_tokens_take_turns(device):
    several = ready(device)
    for _ in range(2):
        near(*several.replay(3, 2))
        several.feed(1)
        near(*several.replay(1) if several.layer.prepare_replay(1) else (torch.ones(1),) * 2)


def test_learned_sinks_and_sampled_rows(device):
    several = ready(device, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), k=8)
    for kept in (4, 2):
        near(*several.replay(4, kept))


def test_rows_that_are_read_are_counted_as_in_steps_of_one_token(device):
    several = ready(device)
    twin, before = deepcopy(several.layer), several.layer.traffic
    for count, kept in ((4, 4), (4, 2), (2, 2)):
        parts = [one.to(device) for one in several.sequence.parts(len(twin), len(twin) + count)]
        length = len(twin) + kept
        several.replay(count, kept)
        with twin.speculating(count):
            twin.step(*parts)
            twin.truncate(length)
    mine, theirs = several.layer.traffic, twin.traffic
    assert mine.steps == theirs.steps == before.steps + 10
    for name in ("rows_read", "rows_full", "bytes_fetched"):
        assert float(getattr(mine, name)) == float(getattr(theirs, name))


@pytest.mark.parametrize("kept", [0, 4])
def test_more_tokens_than_were_appended_cannot_stay(device, kept):
    several = ready(device)
    several.replay(3)
    before = len(several.layer)
    with pytest.raises(ValueError, match=rf"^kept: got {kept}, allowed is 1 to 3"):
        several.layer.count_replay(kept, 3)
    assert len(several.layer) == before
    near(*several.replay(3))


def test_an_interrupted_preparation_is_made_again(device, monkeypatch):
    several = ready(device)

    def interrupted(self, state, resident):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SeveralTokens, "_new_reads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            several.layer.prepare_replay(3)
    near(*several.replay(3))


def test_what_has_no_step_of_several_tokens_says_so(device):
    several = ready(device, error=0.2)
    assert "error: got 0.2" in several.layer.capture_refusal(3)
    pair = Several(device, Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=2))
    pair.feed(PROMPT, 1)
    assert "with 2 sequences" in pair.layer.capture_refusal(3)
    assert pair.layer.prepare_replay(3) is None
    assert pair.layer.capture_refusal(1) is None
