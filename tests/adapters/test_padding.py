"""A mask is looked at once for all layers of a step."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.layer.regions import Regions
from kvindex_adapters.hf import padding
from kvindex_adapters.hf.padding import Padding
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.support.helpers import Case, left_padding
from tests.support.sequences import layer_of

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


def counted(monkeypatch, owner, name):
    calls, what = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(1) or what(*given))
    return calls


def test_a_padded_batch_asks_once_for_each_step(monkeypatch):
    model, inputs = build("llama"), prompt(3, 60, padded=True)
    expected = dense_steps(model, inputs, [40] + [1] * 20)
    past = counted(monkeypatch, padding, "_check_past")
    new = counted(monkeypatch, Regions, "padding")
    with kvhf.attach(model, **REGIONS) as cache:
        logits = steps(model, cache, inputs, [40] + [1] * 20)
        layers = len(cache.indexed)
    assert (len(past), len(new)) == (21, layers)  # only the prompt has padded tokens
    got, want = torch.cat(logits, 1), torch.cat(expected, 1)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(got[real], want[real], atol=1e-4)


def test_the_same_mask_is_looked_at_again_in_another_step():
    case = Case(batch=2)
    layer, asked = layer_of(case), Padding()
    mask = left_padding([0, 3], 10)
    first = asked.of_new(layer, mask, 8)
    assert torch.equal(first, mask[:, -8:])
    assert asked.of_new(layer, mask, 8) is first
    layer.step(case.tensor(1, 2, 2, 8, 16), *case.tokens(8), valid=left_padding([0, 3], 8))
    assert asked.of_new(layer, mask, 2) is None
    layer.reorder(torch.tensor([1, 0]))
    asked.forget()
    with pytest.raises(ValueError, match="attention_mask: got one that hides tokens"):
        asked.of_new(layer, mask, 2)
