"""A prompt with its own attention mask; later tokens see and search all tokens."""

import pytest
import torch

from kvindex.layer import dense
from tests.support.helpers import Case
from tests.support.sequences import Sequence, layer_of, steps_of

STEPS = steps_of(20, 9, *[1] * 9, 7, *[1] * 8)
CASES = {
    "plain": (Case(q_heads=4, batch=3), None),
    "padded softcap": (Case(q_heads=6, value_dim=24, softcap=2.0, batch=3), [0, 3, 16]),
}


def images(valid):
    """Return a mask bool `[B, N, N]`: causal, but two images are attended to in both directions."""
    count = valid.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool).tril().repeat(len(valid), 1, 1)
    for row, (start, stop) in zip(seen, [(2, 9), (0, 20), (11, 18)], strict=True):
        row[start:stop, start:stop] = True
        row[22:26, 22:26] = True
    return seen & valid[:, None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [6, 1024])
def test_a_prompt_with_images(monkeypatch, case, block):
    monkeypatch.setattr(dense, "BLOCK", block)
    case, pads = CASES[case]
    sequence, layer = Sequence.of(case, 53, pads), layer_of(case)
    seen = images(sequence.valid)
    want = bidirectional(sequence, seen)
    for number, (start, stop) in enumerate(STEPS):
        valid = sequence.valid[:, start:stop] if number == 0 and pads else None
        visible = seen[:, start:stop, :stop] if number < 2 else None
        got = layer.step(*sequence.parts(start, stop), valid=valid, visible=visible)
        sequence.assert_equals(got, want, start)
    assert layer.traffic.steps == 17


def bidirectional(sequence, seen):
    """Compute the attention of each token to the tokens that it sees, in float64."""
    g = sequence.case.index("exact").geometry
    rows = (sequence.keys, sequence.values)
    keys, values = (part.double().repeat_interleave(g.group_size, dim=1) for part in rows)
    logits = g.scale * (sequence.queries.double() @ keys.mT)
    if g.softcap is not None:
        logits = g.softcap * (logits / g.softcap).tanh()
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    return logits.softmax(-1).nan_to_num(0) @ values


def test_a_single_token_with_a_mask_is_no_step():
    case, layer = Case(), layer_of(Case())
    sequence = Sequence.of(case, 30)
    layer.step(*sequence.parts(0, 20))
    layer.step(*sequence.parts(20, 21), visible=torch.ones(1, 1, 21, dtype=torch.bool))
    assert layer.traffic.steps == 0
    sequence.assert_equals(layer.step(*sequence.parts(21, 22)), sequence.dense(), 21)


@pytest.mark.parametrize(
    ("visible", "error", "match"),
    [
        (torch.ones(1, 3, 20, dtype=torch.bool), ValueError, "visible: got shape"),
        (torch.ones(1, 3, 23), TypeError, "visible: got"),
        (1, TypeError, "visible: got int"),
    ],
)
def test_bad_masks(visible, error, match):
    sequence, layer = Sequence.of(Case(), 30), layer_of(Case())
    layer.step(*sequence.parts(0, 20))
    with pytest.raises((error, ValueError), match=match):
        layer.step(*sequence.parts(20, 23), visible=visible)
    ids = torch.zeros(1, 2, 3, 1, dtype=torch.int64)
    mask = torch.ones(1, 3, 23, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="visible: got a tensor, allowed is None, because ids is given"
    ):
        layer.step(*sequence.parts(20, 23), visible=mask, ids=ids)
    assert len(layer) == 20
