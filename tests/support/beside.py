"""Layers whose updates run concurrently with their steps, on any device."""

import torch

from kvindex.core.protocol import AppendsAsync
from kvindex.indexes.exact import Exact
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case
from tests.support.sequences import SIZES, Sequence


class Beside(Exact):
    """Exact search whose appends may run concurrently with a layer's steps. Stores its last
    hits."""

    hits = None

    def _offers(self, wanted):
        return wanted is AppendsAsync or super()._offers(wanted)

    def _search(self, queries, k):
        self.hits = super()._search(queries, k)
        return self.hits


CASES = {
    "plain": (Case(), None),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "padded": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
}
GEOMETRY = ("q_heads", "kv_heads", "head_dim", "value_dim", "dtype", "softcap", "device")


def beside(case, k=1000, around=None, **sizes):
    backend = "torch" if case.device == "cpu" else "cuda"  # its rows are in blocks and do not move
    index = Beside(**{name: getattr(case, name) for name in GEOMETRY}, backend=backend)
    index = around(index) if around else index
    return AttentionLayer(index, k=k, **{**SIZES, "update_every": 6, **sizes})


def alone(index):
    """Return the index with appends that begin while nothing else runs.

    This is for a reference implementation that moves its memory as it grows, while a search on
    another stream might still read it.
    """
    begin = index.start_append

    def wait():
        if index.geometry.device.type == "cuda":
            torch.cuda.synchronize()

    def settled(*given, **named):
        wait()
        end = begin(*given, **named)
        wait()
        return end

    index.start_append = settled
    return index


def feed(layer, sequence, steps):
    """Feed a layer, and check that every step is dense attention."""
    want = sequence.dense()
    for start, stop in steps:
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
        assert len(layer) == stop


def singles(start, stop):
    return [(token, token + 1) for token in range(start, stop)]


def leaving(case=None, pads=None, **sizes):
    """Return a layer of 22 tokens, of which 10 are in the index and 6 move to it, and the
    sequence."""
    case = case or Case(batch=2)
    sequence, layer = Sequence.of(case, 80, pads), beside(case, **{"local_window": 4, **sizes})
    feed(layer, sequence, [(0, 14), *singles(14, 22)])
    assert (len(layer.index), layer._window.leaving) == (10, 6)
    return sequence, layer
