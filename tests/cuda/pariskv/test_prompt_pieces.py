"""Chunks of a prompt in a layer: the host's work for each, and that the host waits for nothing."""

import pytest
import torch

from kvindex.core.protocol import Rows
from kvindex.layer import AttentionLayer
from kvindex.pariskv.index import ParisKV
from tests.cuda.launches import Launches
from tests.support.helpers import Case, Operations

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
PIECE, PIECES = 512, 6

OPERATIONS = 23
"""Operations of torch for a chunk, except attention and views: tokens enter the window and leave
it, rows are joined and copied to their blocks. Some chunks enlarge a column or add a slab, which is
then copied to the GPU.
"""

ASKS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


def pieces(layer, device):
    """Yield functions that make `layer` read the next chunk of a prompt."""
    tokens = PIECE * PIECES
    keys, values = (part.to(device) for part in CASE.tokens(tokens))
    queries = CASE.tensor(1, 1, CASE.q_heads, tokens, CASE.head_dim).to(device, CASE.dtype)
    for start in range(0, tokens, PIECE):
        end = start + PIECE
        yield queries[:, :, start:end], Rows(keys[:, :, :end], values[:, :, :end])


def made(device):
    return AttentionLayer(CASE.index("pariskv", backend="cuda", store="host", device=device))


def test_a_piece_asks_the_device_for_nothing_and_costs_few_operations(device, monkeypatch):
    """The host must stay ahead of the device, which would otherwise have nothing to do."""
    if device == "cpu":  # as a layer on a GPU does
        monkeypatch.setattr(ParisKV, "_defers", True)
        monkeypatch.setattr("kvindex.layer.attention_layer.check_finite", lambda *_: None)
    monkeypatch.setattr(
        "kvindex.layer.attention_layer.attend_densely",
        lambda index, rows, queries, *_, **__: queries,
    )
    layer = made(device)
    for number, piece in enumerate(pieces(layer, device)):
        with Operations() as seen, Launches() as launched:
            layer.read_chunk(*piece)
        assert launched.names in (["encode"], ["encode", "write_rows"])  # few rows go by a kernel
        assert not [name for name in seen.names if name.split(".")[1] in ASKS]
        assert number == 0 or len(seen.names) <= OPERATIONS
    layer.settle()
    assert len(layer.index) == PIECE * PIECES - 256


@pytest.mark.gpu
def test_pieces_and_their_appends_wait_for_no_gpu():
    for layer in (made("cuda"), made("cuda")):  # the first chunk compiles kernels and pins memory
        torch.cuda.synchronize()
        read = [*pieces(layer, "cuda")]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for piece in read:
                layer.read_chunk(*piece)
            layer.settle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(layer.index) == PIECE * PIECES - 256
