"""Learned sinks add a term to the softmax's denominator, in every way in which a step attends."""

import pytest
import torch

from kvindex.core.capability import capability
from kvindex.core.protocol import DecodesStep
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, sampled
from tests.support.sequences import Sequence, layer_of, steps_of

N = 44
CASES = {
    "plain": (Case(), None),
    "padded groups": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "bfloat16": (Case(q_heads=8, dtype=torch.bfloat16, batch=2), [3, 0]),
}
STEPS = steps_of(17, *[1] * 9, 3, *[1] * 9, 6)


def sinks_of(case, count=None):
    """Return logits of sinks that are near those of the keys: `[H]`, or `[B, H, N]`."""
    shape = (case.q_heads,) if count is None else (case.batch, case.q_heads, count)
    return case.tensor(5, *shape).float() * 2


def feed(layer, sequence, sinks, steps=STEPS):
    """Return the outputs of all steps. `sinks` are `[H]`, or `[B, H, N]`."""
    outputs = []
    for start, stop in steps:
        own = sinks if sinks is None or sinks.ndim == 1 else sinks[..., start:stop]
        valid = sequence.valid[:, start:stop] if any(sequence.pads) else None
        outputs.append(layer.step(*sequence.parts(start, stop), valid=valid, sink_logits=own))
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize(("case", "each_token"), sampled(CASES, [False, True]))
def test_every_step_is_dense_attention_with_a_term_more(case, each_token):
    case, pads = CASES[case]
    sequence, sinks = Sequence.of(case, N, pads), sinks_of(case, N if each_token else None)
    want = sequence.dense(sinks=sinks if each_token else sinks[:, None])
    for options in ({}, {"search_up_to": 3}, {"dense_below": 30}):
        layer = AttentionLayer(
            case.index("exact"),
            k=1000,
            **{**dict(sink=3, local_window=4, update_every=5, dense_below=0), **options},
        )
        sequence.assert_equals(feed(layer, sequence, sinks), want, 0)
    with pytest.raises(AssertionError):  # without sinks the outputs differ
        sequence.assert_equals(feed(layer_of(case), sequence, None), want, 0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_steps_of_an_index_that_attends_by_itself(backend):
    case = Case(q_heads=4, batch=2)
    layer = layer_of(case, "pariskv", backend=backend)
    assert (capability(layer.index, DecodesStep) is not None) == (backend == "cpu")
    sequence, sinks = Sequence.of(case, N), sinks_of(case)
    want = sequence.dense(sinks=sinks[:, None])
    sequence.assert_equals(feed(layer, sequence, sinks), want, 0)


def test_coverage_counts_what_the_sink_takes():
    case = Case(batch=2)
    sequence, sinks = Sequence.of(case, N), sinks_of(case)
    covered = []
    for logits in (None, sinks, torch.full_like(sinks, -50), torch.full_like(sinks, 50)):
        layer = AttentionLayer(
            case.index("exact"),
            **dict(k=2, coverage=0.9, sink=0, local_window=0, update_every=21, dense_below=0),
        )
        feed(layer, sequence, logits, steps_of(21, 1))
        assert layer.traffic.steps == 1
        covered.append(float(layer.traffic.coverage))
    # exact coverage: the exponentials of two rows, divided by those of the index plus the sink's
    queries, keys, _ = sequence.parts(0, 22)
    g = layer.index.geometry
    keys = keys[:, :, :21].repeat_interleave(g.group_size, dim=1)
    terms = (g.scale * (queries[:, :, 21, None].double() @ keys.double().mT)).exp()[:, :, 0]
    best = layer.index.search(queries[:, :, 21], k=2).ids.repeat_interleave(g.group_size, dim=1)
    held, own = terms.gather(-1, best).sum(-1), sinks.double().exp()
    want = ((held + own) / (terms.sum(-1) + own)).mean()
    assert covered[1] == pytest.approx(float(want), abs=1e-5)
    assert covered[0] == pytest.approx(covered[2], abs=1e-6)
    assert covered[0] < covered[1] < covered[3] == pytest.approx(1, abs=1e-6)


BAD = {
    "of other heads": (torch.zeros(3), r"sink_logits: got shape \[3\], allowed is"),
    "of another length": (torch.zeros(2, 4, 5), r"sink_logits: got shape \[2, 4, 5\], allowed is"),
    "of integers": (torch.zeros(4, dtype=torch.int64), "sink_logits: got dtype torch.int64"),
    "elsewhere": (torch.zeros(4, device="meta"), "sink_logits: got device meta"),
    "no tensor": ([0.0] * 4, "sink_logits: got list, allowed is a torch.Tensor"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("length", [0, 21])
def test_what_are_no_logits_is_refused_and_changes_nothing(bad, length):
    case, (logits, match) = Case(q_heads=4, batch=2), BAD[bad]
    sequence, layer = Sequence.of(case, N), layer_of(case)
    if length:
        feed(layer, sequence, None, steps_of(20, 1))
    with pytest.raises((ValueError, TypeError), match=match):
        layer.step(*sequence.parts(length, length + 1), sink_logits=logits)
    assert len(layer) == length
    rest = [(length, length + 1), (length + 1, N)]
    sequence.assert_equals(feed(layer, sequence, None, rest), sequence.dense(), length)
