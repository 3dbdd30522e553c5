"""One launch updates what a step reads of the number of tokens and of their weights."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvindex.ops import codes
from kvindex.pariskv.block_layout import BLOCK, Layout, SubspaceLayout, places, words_of
from kvindex_cuda.pariskv.append.update_state import update_state
from kvindex_cuda.pariskv.device_state import State
from tests.cuda import emulator

BATCH, HEADS, ROOM = 2, 3, 5

LAYOUT = Layout(64, 3)


def made(device):
    """A state filled with sevens."""

    def full(*shape, dtype=torch.int32):
        return torch.full(shape, 7, dtype=dtype, device=device)

    unread = ("codes", "rows", "wanted", "resident", "resident_mask", "resident_count")
    return State(
        **dict.fromkeys(unread, full(0)),
        valid=full(BATCH, ROOM, 8),
        length=full(1, dtype=torch.int64),
        counted=full(BATCH),
        largest=full(BATCH, HEADS),
        weight_scale=full(BATCH, HEADS, dtype=torch.float32),
        row_bytes=0,
    )


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 256, 300, 512, 1280])
@pytest.mark.parametrize("first", [0, 1])
def test_all_that_is_given_is_put_and_nothing_else(device, tokens, first):
    state, last = made(device), -(-tokens // 256)
    first = min(first, last)
    wanted = torch.zeros(BATCH, dtype=torch.int32, device=device)
    update_state(state, tokens, first=first, count=tokens - 3, wanted=wanted, candidates=9)
    ones = torch.ones(BATCH, tokens, dtype=torch.bool, device=device)
    assert torch.equal(state.valid[:, first:last], words_of(ones, last)[:, first:])
    assert (state.valid[:, :first] == 7).all()
    assert (state.valid[:, last:] == 7).all()
    assert state.length.tolist() == [tokens]
    assert state.counted.tolist() == [tokens - 3] * BATCH
    assert wanted.tolist() == [9] * BATCH
    assert (state.weight_scale == 7).all()


def test_what_is_not_given_stays(device):
    state = made(device)
    update_state(state, 600)
    assert state.length.tolist() == [600]
    stays = state.valid, state.counted, state.weight_scale, state.largest
    assert all((part == 7).all() for part in stays)


def test_more_words_than_threads(device):
    state = made(device)
    valid = torch.zeros((1, 4096, 8), dtype=torch.int32, device=device)
    one = dict(counted=state.counted[:1], weight_scale=state.weight_scale[:1])
    state = replace(state, valid=valid, **one)
    update_state(state, 4096 * 256 - 1, first=2, count=5)
    assert (valid[:, 2:].flatten()[:-1] == -1).all()
    assert valid[0, -1, -1] == 2**31 - 1
    assert not valid[:, :2].any()


class Weights:
    """A state over blocks whose weights have the upper bytes `[B, G, room · 256]`, in the order of
    ids.
    """

    def __init__(self, device, room=ROOM):
        shape = BATCH, room, HEADS
        self.blocks = torch.full((*shape, LAYOUT.head_bytes), 255, dtype=torch.uint8, device=device)
        size = self.blocks[0, 0].numel()
        table = torch.arange(BATCH * room, device=device) * size + self.blocks.data_ptr()
        valid = torch.zeros((BATCH, room, 8), dtype=torch.int32, device=device)
        self.state = replace(made(device), codes=table.view(BATCH, room), valid=valid)
        self.bytes = torch.randint(1, 200, (BATCH, HEADS, room * BLOCK), generator=seeded())

    def write(self, *largest):
        """Write bytes unchanged.

        Each entry of `largest` is `(id, byte)`, for the second head of sequence 1.
        """
        for at, byte in largest:
            self.bytes[1, 1, at] = byte
        ordered = self.bytes.unflatten(2, (-1, BLOCK))[..., places().argsort()]
        field = LAYOUT.views(self.blocks)["weights"][..., 0]
        field.copy_(ordered.transpose(1, 2))

    def update(self, tokens, codes_from):
        update_state(self.state, tokens, codes_from=codes_from, layout=LAYOUT)

    def holds(self, tokens):
        """Return True if the state fits the codes of that number of tokens."""
        held, full = self.bytes[:, :, :tokens], tokens // BLOCK * BLOCK
        none = torch.zeros((BATCH, HEADS, 1), dtype=self.bytes.dtype)
        of_full, of_all = (torch.cat([none, part], 2).amax(2) for part in (held[..., :full], held))
        assert self.state.largest.tolist() == of_full.tolist()
        assert torch.equal(self.state.weight_scale.cpu(), codes.weight_scale(of_all))
        assert self.state.length.tolist() == [tokens]


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257, 700, 1280])
def test_the_scale_is_of_the_largest_weight_that_is_held(device, tokens):
    weights = Weights(device)
    weights.write()
    weights.update(tokens, 0)
    weights.holds(tokens)


@pytest.mark.parametrize("at", [0, 7, 8, 40, 100, 255])
def test_a_token_alone_sets_the_scale_from_when_on_it_is_held(device, at):
    weights = Weights(device)
    weights.write((512 + at, 250))
    weights.update(512 + at, 0)
    weights.holds(512 + at)
    before = weights.state.weight_scale.clone()
    weights.update(512 + at + 1, 2)
    weights.holds(512 + at + 1)
    assert weights.state.weight_scale[1, 1] > before[1, 1]
    assert (weights.state.weight_scale != before).sum() == 1


def test_the_unfilled_block_is_forgotten_and_full_ones_are_not(device):
    weights = Weights(device)
    weights.write((100, 220), (600, 250))
    weights.update(601, 0)
    weights.holds(601)
    weights.write((600, 3))  # encoded again when it became full
    weights.update(768, 2)
    weights.holds(768)
    assert weights.state.largest[1, 1] == 220
    weights.write((100, 3))  # which nothing reads again
    weights.update(900, 3)
    assert weights.state.largest[1, 1] == 220
    weights.update(300, 0)  # unless all blocks are read again, after a truncation
    weights.holds(300)


@pytest.mark.parametrize("order", [None, "backward", "random"])
def test_many_blocks_by_several_thread_blocks(device, order):
    if order and device != "cpu":
        pytest.skip("a GPU has an order of its own")
    weights = Weights(device, room=200)
    for at, byte in ((0, 240), (100 * BLOCK + 9, 245), (199 * BLOCK - 1, 250)):
        weights.write((at, byte))
        with emulator.emulated(order=order, seed=1) if order else nullcontext():
            weights.update(199 * BLOCK + 5, 0)
            weights.update(199 * BLOCK + 5, 0)
        weights.holds(199 * BLOCK + 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(tokens=1281), "tokens: got 1281, allowed is 0 to 1280"),
        (dict(first=3), "first: got 3, allowed is 0 to 2"),
        (dict(wanted=torch.zeros(2)), "wanted: got torch.float32, allowed is torch.int32"),
        (dict(codes_from=2, layout=LAYOUT), "codes_from: got 2, allowed is 0 to 1"),
        (dict(codes_from=0), "layout, largest: got None"),
        (dict(codes_from=0, layout=SubspaceLayout(64, 3)), "layout, largest: got SubspaceLayout"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(wrong, message):
    state = made("cpu")
    with pytest.raises(ValueError, match=message):
        update_state(state, **dict(tokens=300) | wrong)
    assert state.length.tolist() == [7]
