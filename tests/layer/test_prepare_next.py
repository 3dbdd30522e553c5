"""`prepare_next` returns what `prepare_replay` returns, or nothing; then `prepare_replay` is
called."""

import pytest
import torch

from kvindex.layer import AttentionLayer
from tests.support.captured import Captured

SIZES = dict(k=9, sink=2, local_window=4, update_every=6, dense_below=0)


def layer_of(**options):
    index = Captured(q_heads=2, kv_heads=1, head_dim=8)
    layer = AttentionLayer(index, **SIZES, **options)
    layer.step(*token(30))
    layer.step(*token(1))
    return layer


def token(count):
    return torch.randn(1, 2, count, 8), torch.randn(1, 1, count, 8), torch.randn(1, 1, count, 8)


@pytest.mark.parametrize("options", [{}, dict(update_phase=0.4)], ids=str)
def test_tokens_are_those_of_a_layer_that_is_asked_for_all(options):
    torch.manual_seed(0)
    layers, skipped = [], 0
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(layer_of(**options))
    for _ in range(40):
        one, outputs = token(1), []
        for number, layer in enumerate(layers):
            reads = layer.prepare_next() if number else None
            skipped += reads is not None
            assert (reads or layer.prepare_replay()) is layer.index.prepare_replay(
                layer._window._resident, k=9
            )
            outputs.append(layer.captured_step(*one))
            if number:
                layer.prepare_replay()  # `captured_step` is a call, which a replay is not
            layer.count_replay()
        assert torch.equal(*outputs)
        assert len(layers[0]) == len(layers[1])
        assert len(layers[0].index) == len(layers[1].index)
    assert skipped > 20
    traffic = [layer.traffic for layer in layers]
    assert traffic[0].steps == traffic[1].steps
    assert float(traffic[0].rows_read) == float(traffic[1].rows_read)


CALLS = {
    "step": lambda layer: layer.step(*token(1)),
    "truncate": lambda layer: layer.truncate(29),
    "reorder": lambda layer: layer.reorder(torch.tensor([0, 0])),
    "settle": lambda layer: layer.settle(),
    "rollback": lambda layer: layer.rollback(layer.checkpoint()),
    "another k": lambda layer: setattr(layer, "k", 5),
}


@pytest.mark.parametrize("call", CALLS)
def test_after_any_other_call_all_is_asked(call):
    layer = layer_of()
    assert layer.prepare_next() is None
    assert layer.prepare_replay() is layer.prepare_next()
    CALLS[call](layer)
    assert layer.prepare_next() is None


def test_an_empty_speculation_changes_nothing_that_replays_depend_on():
    layer = layer_of()
    reads = layer.prepare_replay()
    with layer.speculating(3):
        assert layer.prepare_next() is reads
    assert layer.prepare_next() is reads


def test_a_postponed_update_comes_before_the_next_replay():
    layer = layer_of()
    layer.prepare_replay()
    with pytest.raises(KeyError), layer.speculating(3):
        raise KeyError
    assert layer.prepare_next() is None
    assert "tokens must move" in layer.capture_refusal()
    layer.step(*token(1))
    assert layer.prepare_replay() is not None


def test_updates_are_checked_again_after_tokens_are_removed(monkeypatch):
    layer, asked = layer_of(), []
    is_due = layer._updates.is_due
    monkeypatch.setattr(layer._updates, "is_due", lambda n: asked.append(n) or is_due(n))
    layer.prepare_replay()
    layer.captured_step(*token(1))
    layer.count_replay()
    assert asked == []  # no update can be due before the length that `prepare_replay` noted
    assert layer.undo_replays(len(layer) - 1)
    layer.count_replay()
    assert asked == [1]
