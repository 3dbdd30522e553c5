"""Published systems in a model, with options that make them exact, give the answers of `exact`."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build, prompt
from tests.support.helpers import slow

SIZES = dict(k=10, sink=4, local_window=8, update_every=4, dense_below=0)


def written(index, batch, beams):
    """Return greedy tokens, and how often each layer's wrapper searched."""
    model, inputs = build("llama"), prompt(batch, 80)
    with kvhf.attach(model, index=index, **SIZES) as cache, torch.inference_mode():
        options = dict(max_new_tokens=12, do_sample=False, num_beams=beams)
        out = model.generate(**inputs, past_key_values=cache, **options)
        return out, [layer.rate() for layer in cache.indexes() if hasattr(layer, "rate")]


@pytest.mark.parametrize(("batch", "beams"), [slow(1, 1), (2, 2)])
def test_systems_that_are_exact_write_what_exact_writes(batch, beams):
    """Observed queries, the end of the prompt, appended tokens and beam search all go through the
    model."""
    want, _ = written("exact", batch, beams)
    for index in (
        "ctkvr:probes=500:rho=500:group=mean_share",
        "louiskv:per_cluster=1:longest=1",
        "louiskv:per_cluster=1:longest=1+reuse:tau=2",
    ):
        got, rates = written(index, batch, beams)
        assert torch.equal(got, want), index
        assert set(rates) <= {1.0}
    assert not torch.equal(written("louiskv:per_cluster=30", batch, beams)[0], want)


def test_a_model_that_never_searches_again_still_writes():
    out, rates = written("ctkvr+reuse:tau=-2", 1, 1)
    assert out.shape == (1, 92)
    assert rates == [pytest.approx(1 / 11)] * 4
