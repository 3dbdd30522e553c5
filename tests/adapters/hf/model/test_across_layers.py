"""Modules that attend across layers, with transformers' attention interface but without a cache."""

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvindex_adapters.hf as kvhf
from tests.adapters.hf.test_attach import REGIONS
from tests.adapters.tiny import build, dense_steps, prompt, steps


class Across(nn.Module):
    """An MLP whose result is attention of each token to its own states before and after it."""

    def __init__(self, mlp, config, *, causal):
        super().__init__()
        self.mlp, self.config, self.is_causal = mlp, config, causal

    def forward(self, states):
        both = torch.stack([states, self.mlp(states)], dim=2)  # [B, N, 2, D]: N in place of heads
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = attend(self, both.mean(2, keepdim=True), both, both, None, scaling=0.5)
        return output[:, 0]


def model_of(*, causal):
    model = build("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp = Across(layer.mlp, model.config, causal=causal)
    return model


def test_logits_are_those_of_the_models_own_attention():
    model, inputs, sizes = model_of(causal=False), prompt(1, 60), [40, *[1] * 20]
    expected = dense_steps(model, inputs, sizes)
    with kvhf.attach(model, **REGIONS) as cache:
        found = steps(model, cache, inputs, sizes)
        assert cache.report().steps == 20
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_causal_attention_without_a_cache_is_not_supported():
    model = model_of(causal=True)
    with (
        kvhf.attach(model, **REGIONS) as cache,
        pytest.raises(kvhf.UnsupportedError, match="without a preceding update"),
    ):
        steps(model, cache, prompt(1, 10), [10])
