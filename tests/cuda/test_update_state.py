"""What a step reads of how many tokens there are, by one launch."""

from dataclasses import replace

import pytest
import torch

from kvindex.ops.block_layout import words_of
from kvindex_cuda.pariskv.base_step import State
from kvindex_cuda.pariskv.update_state import update_state

BATCH, HEADS, ROOM = 2, 3, 5


def made(device):
    """A state full of sevens."""

    def full(*shape, dtype=torch.int32):
        return torch.full(shape, 7, dtype=dtype, device=device)

    unread = ("codes", "rows", "wanted", "resident", "resident_mask", "resident_count")
    return State(
        **dict.fromkeys(unread, full(0)),
        valid=full(BATCH, ROOM, 8),
        length=full(1, dtype=torch.int64),
        counted=full(BATCH),
        weight_scale=full(BATCH, HEADS, dtype=torch.float32),
        row_bytes=0,
    )


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 256, 300, 512, 1280])
@pytest.mark.parametrize("first", [0, 1])
def test_all_that_is_given_is_put_and_nothing_else(device, tokens, first):
    state, last = made(device), -(-tokens // 256)
    first = min(first, last)
    wanted = torch.zeros(BATCH, dtype=torch.int32, device=device)
    reference = torch.rand(BATCH, HEADS, device=device)
    how = dict(first=first, count=tokens - 3, wanted=wanted, candidates=9, weight_scale=reference)
    update_state(state, tokens, **how)
    ones = torch.ones(BATCH, tokens, dtype=torch.bool, device=device)
    assert torch.equal(state.valid[:, first:last], words_of(ones, last)[:, first:])
    assert (state.valid[:, :first] == 7).all()
    assert (state.valid[:, last:] == 7).all()
    assert state.length.tolist() == [tokens]
    assert state.counted.tolist() == [tokens - 3] * BATCH
    assert wanted.tolist() == [9] * BATCH
    assert torch.equal(state.weight_scale, reference)


def test_what_is_not_given_stays(device):
    state = made(device)
    update_state(state, 600)
    assert state.length.tolist() == [600]
    assert all((part == 7).all() for part in (state.valid, state.counted, state.weight_scale))


def test_a_view_of_one_row_as_several(device):
    state = made(device)
    reference = torch.rand(1, HEADS, device=device).expand(BATCH, -1)
    update_state(state, 600, weight_scale=reference)
    assert torch.equal(state.weight_scale, reference)


def test_more_words_than_threads(device):
    state = made(device)
    valid = torch.zeros((1, 4096, 8), dtype=torch.int32, device=device)
    one = dict(counted=state.counted[:1], weight_scale=state.weight_scale[:1])
    state = replace(state, valid=valid, **one)
    update_state(state, 4096 * 256 - 1, first=2, count=5)
    assert (valid[:, 2:].flatten()[:-1] == -1).all()
    assert valid[0, -1, -1] == 2**31 - 1
    assert not valid[:, :2].any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(tokens=1281), "tokens: got 1281, allowed is 0 to 1280"),
        (dict(first=3), "first: got 3, allowed is 0 to 2"),
        (dict(wanted=torch.zeros(2)), "wanted: got torch.float32, allowed is torch.int32"),
        (
            dict(weight_scale=torch.zeros(2, 4)),
            r"weight_scale: got shape \(2, 4\), allowed is \(2, 3\)",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(wrong, message):
    state = made("cpu")
    with pytest.raises(ValueError, match=message):
        update_state(state, **dict(tokens=300) | wrong)
    assert state.length.tolist() == [7]
