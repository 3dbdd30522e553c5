"""Fidelity in a cache that has already answered equals that in a new cache."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.fidelity import followed, full_logits, teacher_forced
from kvindex_adapters.hf.generation.prefill import prefill
from tests.adapters.tiny import build, prompt
from tests.support.helpers import slow

OPTIONS = dict(k=8, sink=4, local_window=16, update_every=16, dense_below=0)


@pytest.mark.parametrize("index", [slow("pariskv"), "exact+reuse"])
def test_a_cache_that_has_answered_is_compared_as_a_new_one(index):
    model, ids = build("llama"), prompt(1, 90)["input_ids"][0]
    sizes = {name: size for name, size in OPTIONS.items() if name != "k"}
    options = dict(index=index, k=8, chunk=16, attach_options=sizes)
    want = teacher_forced(model, ids[:70], ids[70:], **options)
    full = full_logits(model, ids[:70], ids[70:])
    with kvhf.attach(model, index=index, **OPTIONS) as cache, torch.no_grad():
        prefill(model, ids, cache, stop=70, chunk=16)
        got = followed(model, cache, ids[70:], full)
    assert (got.steps, got.agreement) == (20, want.agreement)
    assert got.kl_mean == pytest.approx(want.kl_mean, rel=1e-3, abs=1e-6)
    assert 0 < got.recall_at_k == pytest.approx(want.recall_at_k, abs=0.02)
    assert got.recall_limit == pytest.approx(want.recall_limit, abs=0.02)


def test_nothing_to_follow_is_no_step():
    model, ids = build("llama"), prompt(1, 40)["input_ids"][0]
    with kvhf.attach(model, index="exact", **OPTIONS) as cache, torch.no_grad():
        prefill(model, ids, cache, stop=40, chunk=16)
        got = followed(model, cache, ids[:0], torch.empty(0, 101))
    assert (got.steps, got.kl_mean, got.recall_at_k) == (0, 0, None)
