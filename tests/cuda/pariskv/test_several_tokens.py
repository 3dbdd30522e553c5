"""A step of several tokens in a caller's graph equals as many steps of one token.

On a CPU, the graph is recorded work (`graphs.py`).
"""

from copy import deepcopy

import pytest
import torch

from kvindex.core.graphs import GRAPHS
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv.steps.several_tokens import SeveralTokens
from tests.cuda.pariskv.test_captured_step import SIZES, graphs  # noqa: F401
from tests.support.helpers import Case, Operations, slow
from tests.support.sequences import Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64)
BATCH, PADS = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=3), [0, 21, 4]
PROMPT = 90


class Several:
    """A layer whose steps of several tokens go through a graph."""

    def __init__(self, device, case=CASE, sinks=None, pads=None, **options):
        self.device, self.sequence = device, Sequence.of(case, 400, pads)
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
            valid = None
            if self.length < max(self.sequence.pads):
                valid = self.sequence.valid[:, self.length : self.length + count].to(self.device)
            self.layer.step(*self.parts(count), valid=valid, sink_logits=self.sinks)

    def replay(self, count, kept=None):
        """Return the output of a step of `count` tokens, of which `kept` stay, and that of as many
        steps of one token in a copy of the layer.

        `kept` may be a list with a number for each sequence.
        """
        twin, kept = deepcopy(self.layer), count if kept is None else kept
        parts = self.parts(count)
        reads = self.layer.prepare_next(count) or self.layer.prepare_replay(count)
        assert reads is not None, self.layer.capture_refusal(count)
        mine = self.replayed(reads, parts)
        self.keep(kept, count)
        with twin.speculating(count):
            singles = [[part[:, :, t : t + 1] for part in parts] for t in range(count)]
            theirs = [twin.step(*one, sink_logits=self.sinks) for one in singles]
        return mine, torch.cat(theirs, dim=2)

    def replayed(self, reads, parts):
        """Replay a graph, which is captured first if `reads` is new, and return the output."""
        if reads is not self._reads:
            self._parts = [one.clone() for one in parts]
            where = torch.device(self.device)
            self._graph = GRAPHS[where.type](where, self._capture)
            self._reads, self.captures = reads, self.captures + 1
        for own, given in zip(self._parts, parts, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._output.clone()

    def keep(self, kept, of):
        """Keep the first tokens of the last step. Where a sequence keeps fewer, it has a gap."""
        each = [kept] if isinstance(kept, int) else kept
        most, start = max(each), self.length - of
        if len({*each}) > 1:
            shown = torch.arange(most) < torch.tensor(each)[:, None]
            if self.sequence.holes is None:
                self.sequence.holes = torch.zeros(self.sequence.valid.shape, dtype=torch.bool)
            self.sequence.holes[:, start : start + most] = ~shown
        self.layer.count_replay(kept, of)
        self.length = start + most

    def _capture(self):
        self._output = self.layer.captured_step(*self._parts, sink_logits=self.sinks)


def near(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def ready(device, prompt=PROMPT, **options):
    several = Several(device, **options)
    several.feed(prompt, 1)
    return several


@pytest.mark.parametrize(
    ("count", "case"),
    [(2, CASE), (4, CASE), (3, BATCH), slow(7, CASE), slow(5, BATCH)],
)
def test_the_step_equals_steps_of_one_token(device, count, case):
    several = ready(device, case=case)
    for _ in range(3):
        near(*several.replay(count))
    assert several.captures == 1


@pytest.mark.parametrize("options", [dict(k=8), slow(dict(preset="paper"))])
def test_sequences_of_a_padded_batch(device, options):
    """Each sequence has its own codes, sink, mask and number of valid tokens."""
    several = ready(device, case=BATCH, pads=PADS, **options)
    for kept in (3, 1, 2, 3, 3, 1, 3):
        near(*several.replay(3, kept))
    assert several.captures == 1
    assert len(several.layer.index) > PROMPT


def test_the_buffer_grows_once_however_full_the_window_gets(device):
    """Each new buffer needs another graph."""
    several = ready(device)
    for kept in (1, 1, 1, 7, 1, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1):
        several.replay(7, kept)
    assert several.captures == 1


@pytest.mark.parametrize("case", [CASE, slow(BATCH)])
def test_the_error_limits_the_number_of_rows_of_each_token(device, case):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    several = ready(device, case=case, k="auto", error=0.4, sinks=sinks, prompt=300)
    before = several.layer.traffic.found.clone()
    for kept in (3, 1, 3):
        near(*several.replay(3, kept))
    found = several.layer.traffic.found - before
    assert int(found.sum()) == 9 * case.batch * case.kv_heads
    assert (found > 0).sum() > 1  # the numbers of rows differ
    assert several.captures == 1


def test_another_limit_needs_no_other_graph(device):
    several = ready(device, k="auto", error=0.4, prompt=300)
    near(*several.replay(3))
    tight = several.layer.traffic.found.clone()
    several.layer.error = 1.5
    near(*several.replay(3))
    loose = several.layer.traffic.found - tight
    assert several.captures == 1
    numbers = torch.arange(len(tight), device=tight.device)
    assert (loose * numbers).sum() < (tight * numbers).sum()


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


UNEVEN = [[3, 1, 2], [1, 1, 3], [3, 3, 1], [2, 3, 3], 3, [1, 2, 1], [3, 1, 3]]
"""Tokens that each sequence of a batch keeps of steps of three tokens."""


@pytest.mark.parametrize("pads", [None, slow(PADS)])
def test_sequences_that_keep_different_numbers_of_tokens(device, pads):
    """The others become padding, in the window and later in the index."""
    several = ready(device, case=BATCH, pads=pads)
    for kept in UNEVEN:
        near(*several.replay(3, kept))
    assert several.captures == 1
    layer, holes = several.layer, several.sequence.valid[:, : several.length]
    assert torch.equal(layer.valid.cpu(), holes)
    inside = holes[:, : len(layer.index)]
    assert not inside[:, PROMPT + 1 :].all()
    sink = SIZES["sink"]
    assert layer.index.counts.tolist() == (inside.sum(1) - sink).tolist()


def test_steps_of_one_token_after_a_gap(device):
    several = ready(device, case=BATCH)
    near(*several.replay(3, [1, 3, 2]))
    for _ in range(2):
        near(*several.replay(1))
    several.feed(1)
    near(*several.replay(3, [2, 1, 1]))


def test_a_gap_can_be_undone(device):
    several = ready(device, case=BATCH)
    near(*several.replay(3, [1, 3, 2]))
    length = several.length
    near(*several.replay(3, [2, 1, 3]))
    several.sequence.holes[:, length:] = False
    several.length = length
    assert not several.layer.undo_replays(length)
    several.layer.truncate(length)
    near(*several.replay(3, [1, 1, 2]))
    assert torch.equal(several.layer.valid.cpu(), several.sequence.valid[:, : several.length])


@pytest.mark.parametrize("again", ["prepare", "truncate"])
def test_an_interrupted_count_hides_no_tokens(device, monkeypatch, again):
    several = ready(device, case=BATCH)
    near(*several.replay(3))
    length, hide = several.length, ResidentRows.hide

    def interrupted(self, start, shown):
        hide(self, start, shown)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResidentRows, "hide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            several.replay(3, [1, 3, 2])
    several.sequence.holes, several.length = None, length
    assert len(several.layer) == length
    assert not several.layer.prepare_next(3)
    if again == "truncate":
        assert not several.layer.undo_replays(length)
        several.layer.truncate(length)
    near(*several.replay(3))
    near(*several.replay(3))
    assert several.layer.valid is None or several.layer.valid.all()
    assert several.layer._window._resident.mask.all()


def test_hidden_rows_are_not_counted_as_read(device):
    """The counts are those of a layer that writes rows and mask again before each step."""
    traffic = []
    for rewrites in (False, True):
        several = ready(device, case=BATCH, k=8, update_every=80)
        layer = several.layer
        for kept in ([1, 1, 3], [2, 1, 3], [1, 3, 1]):
            layer._window._moved = rewrites
            reads = layer.prepare_replay(3)
            several.replayed(reads, several.parts(3))
            several.keep(kept, 3)
        padded = float(layer._window.padded)  # before `valid` copies the flags of staged tokens
        assert padded == pytest.approx(float((~layer.valid).sum(1).float().mean()))
        traffic.append(layer.traffic)
    for name in ("rows_read", "rows_full"):
        mine, theirs = (float(getattr(one, name)) for one in traffic)
        assert mine == pytest.approx(theirs)


@pytest.mark.parametrize(("case", "count"), [(CASE, 1), (CASE, 3), slow(BATCH, 3)])
def test_a_step_is_captured_while_sink_and_window_are_empty(device, case, count):
    several = ready(device, case=case, k=1000, local_window=0, sink=0)
    several.length = len(several.layer.index)
    several.layer.truncate(several.length)
    assert not len(several.layer._window)
    for _ in range(2):
        near(*several.replay(count))
    assert several.captures == 1


@pytest.mark.parametrize(
    "kept",
    [
        [2],
        [2, 1, 1, 1],
        [4, 1, 1],
        [0, 0, 0],
        [2, -1, 1],
        [],
        0,
        4,
        [2.0, 1, 1],
        1.0,
        torch.tensor([3, 1, 2]),
    ],
)
def test_wrong_numbers_of_kept_tokens_are_refused(device, kept):
    several = ready(device, case=BATCH)
    several.replay(3)
    before = len(several.layer)
    with pytest.raises(ValueError, match=r"^kept: got "):
        several.layer.count_replay(kept, 3)
    assert len(several.layer) == before
    near(*several.replay(3))


def test_rows_on_the_host_are_cached_for_each_sequence(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(DeviceAllocator, "on_host", True)
    several = ready(device, case=BATCH, k=8)
    for _ in range(3):
        near(*several.replay(2))
    cache = several.layer.index._executor.cache
    groups = BATCH.batch * BATCH.kv_heads
    assert cache.clocks.tolist() == [cache.clocks[0].item()] * groups
    looked_up, found = cache.counts.T.tolist()
    assert min(looked_up) > 0
    assert max(found) > 0


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


@pytest.mark.parametrize("kept", [2, [2, 1, 1]])
def test_a_layer_launches_few_operations_to_count_a_step(device, kept):
    several = ready(device, case=BATCH, update_every=40)
    several.replay(3, [3, 2, 1])  # makes the flags of all tokens
    several.replay(3, kept)
    several.layer.prepare_replay(3)
    with Operations() as launched:
        several.layer.count_replay(kept, 3)
    # the counter of the rows, and their mask
    assert sorted(launched.names) == ["aten.copy_.default", "aten.fill_.Scalar"][kept == 2 :]


def test_uneven_steps_in_inference_mode(device):
    several = ready(device, case=BATCH, update_every=40)
    several.replay(3)
    with torch.inference_mode():
        near(*several.replay(3, [3, 1, 2]))
    near(*several.replay(3))
    near(*several.replay(2))


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
    latents = Several(
        device, Case(q_heads=4, kv_heads=1, head_dim=64, value_dim=48, value_in_key=True)
    )
    latents.feed(PROMPT, 1)
    assert "no decode step of several tokens" in latents.layer.capture_refusal(3)
    assert latents.layer.prepare_replay(3) is None


def test_tokens_that_were_counted_while_held_move_at_the_end(device):
    """The caller says where they begin."""
    several, moved = ready(device), 0
    layer = several.layer
    for _ in range(30):
        start, parts = len(layer), several.parts(3)
        several.replayed(layer.prepare_next(3) or layer.prepare_replay(3), parts)
        due = layer.count_replay(2, 3, held=True)
        several.length = start + 2
        if due:
            indexed = len(layer.index)
            layer.begin_speculating(3, since=start)
            assert layer.end_speculating()
            layer.settle()
            moved += len(layer.index) > indexed
    assert moved > 3
    with pytest.raises(ValueError, match="since: got 9999, allowed is 0 to"):
        layer.begin_speculating(3, since=9999)
