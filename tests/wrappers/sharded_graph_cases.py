"""Decode steps of sharded tokens in a caller's graph, on two ranks (`test_sharded.py`).

On CPUs kernels are emulated, a graph is a list of recorded work, and messages use gloo. On GPUs
messages use NCCL, in a CUDA graph.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from kvindex.core.capability import capability
from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import CapturesStep
from kvindex.layer import AttentionLayer
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.helpers import Case
from tests.support.rank_kernels import device, kernels
from tests.support.sequences import Sequence

CASE = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
SIZES = dict(k=400, sink=4, local_window=8, update_every=8, dense_below=40, graphs=False)
PROMPT, BLOCK = 60, 16
LINE = f"pariskv+sharded:block={BLOCK}:timeout_s=60"


def graphs():
    """Use graphs of the device."""
    return recorded(WholeGraph) if device() == "cpu" else nullcontext()


def layer_of(line):
    store = "device" if device() == "cpu" else "host"
    return AttentionLayer(CASE.index(line, backend="cuda", device=device(), store=store), **SIZES)


class Replayed:
    """A layer whose single-token steps are replayed as a graph where possible."""

    def __init__(self, layer):
        self.layer, self.made, self.replays, self._reads = layer, 0, 0, None

    def step(self, parts):
        reads = self.layer.prepare_replay() if parts[0].shape[2] == 1 else None
        if reads is None:
            return self.layer.step(*parts)
        if reads is not self._reads:
            self._parts = [one.clone() for one in parts]
            where = torch.device(device())
            self._graph = GRAPHS[where.type](where, self._capture)
            self._reads, self.made = reads, self.made + 1
        for own, given in zip(self._parts, parts, strict=True):
            own.copy_(given)
        self._graph.replay()
        self.layer.count_replay()
        self.replays += 1
        return self._output.clone()

    def _capture(self):
        self._output = self.layer.captured_step(*self._parts)


def fed(layers, sequence, counts):
    """Feed layers steps of these lengths, check that outputs agree within rounding, and return
    one."""
    for count in counts:
        length = len(layers[1])
        parts = [one.to(device()) for one in sequence.parts(length, length + count)]
        outputs = [layer.step(parts) for layer in layers[:1]]
        outputs += [layer.step(*parts) for layer in layers[1:]]
        for other in outputs[1:]:
            torch.testing.assert_close(outputs[0], other, rtol=1e-4, atol=1e-4)


def a_graphs_tokens_are_those_of_steps_and_of_one_process():
    """This includes updates with blocks of either rank.

    The rows that all ranks read are counted.
    """
    sequence = Sequence.of(CASE, 400)
    with kernels(), graphs():
        replayed = Replayed(layer_of(LINE))
        layers = [replayed, layer_of(LINE), layer_of("pariskv")]
        fed(layers, sequence, [PROMPT, *[1] * 20])
        assert replayed.replays > 16
        assert replayed.made > 1
        assert len(replayed.layer._tally._state.watched) == 1, "one sum, whatever is captured anew"
        for layer in layers[1:]:
            mine, theirs = replayed.layer.traffic, layer.traffic
            assert mine.steps == theirs.steps
            assert float(mine.rows_read) == float(theirs.rows_read)
        assert len(replayed.layer.index) > 4 * BLOCK


def a_fork_and_a_cut_go_on_by_themselves():
    sequence = Sequence.of(CASE, 400)
    with kernels(), graphs():
        replayed = Replayed(layer_of(LINE))
        layers = [replayed, layer_of(LINE)]
        fed(layers, sequence, [PROMPT, *[1] * 9])
        twins = [Replayed(copy.deepcopy(replayed.layer)), copy.deepcopy(layers[1])]
        fed(twins, sequence, [1] * 5)
        fed(layers, sequence, [1] * 5)
        made = replayed.made
        replayed.layer.truncate(66)
        layers[1].truncate(66)
        fed(layers, sequence, [1] * 4)
        assert twins[0].made
        assert made


def what_no_graph_holds_is_refused():
    """With `rows="best"`, or if a rank has no rows, all ranks run a step op by op, without a
    graph."""
    sequence = Sequence.of(CASE, 400)
    with kernels(), graphs():
        best, few = layer_of(f"{LINE}:rows=best"), layer_of("pariskv+sharded:block=256")
        for layer in (best, few):
            parts = [one.to(device()) for one in sequence.parts(0, PROMPT)]
            layer.step(*parts)
            layer.step(*(one.to(device()) for one in sequence.parts(PROMPT, PROMPT + 1)))
            assert layer.prepare_replay() is None
            assert "has no decode step" in layer.capture_refusal()
            assert capability(layer.index, CapturesStep) is None
        layer = layer_of(LINE)
        layer.step(*parts)
        with pytest.raises(RuntimeError, match=r"graph: got a step before prepare_replay\(\)"):
            layer.captured_step(*(one.to(device()) for one in sequence.parts(PROMPT, PROMPT + 1)))


def cases(ranks, every):
    """Map names to cases."""
    return {
        "tokens": a_graphs_tokens_are_those_of_steps_and_of_one_process,
        "forks": a_fork_and_a_cut_go_on_by_themselves,
        "refused": what_no_graph_holds_is_refused,
    }
