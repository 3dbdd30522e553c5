"""A decode step of a transformers model with the decoder's Triton kernels, interpreted.

This runs in a separate process (`tests/cuda/triton/test_interpreter.py`).
"""

import pytest
import torch

from tests.support.captured import Captured

# the imports below need Triton (E402)
triton = pytest.importorskip("triton")

import kvindex_adapters.hf as kvhf  # noqa: E402
from kvindex_adapters.hf.graph import fused_token  # noqa: E402
from tests.adapters.decoder.families import model_of  # noqa: E402
from tests.adapters.hf.graph.test_fused_token import EAGER, said  # noqa: E402
from tests.adapters.tiny import prompt  # noqa: E402
from tests.cuda.graphs import recorded  # noqa: E402
from tests.cuda.triton import interpreter  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    interpreter.mend()
pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="tests/cuda/triton/test_interpreter.py does"
)


SLOW = [pytest.mark.slow, pytest.mark.longest]


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("qwen3", prompt(1, 30)),
        ("mistral", prompt(2, 30, padded=True)),
        pytest.param("llama, biases, tied", prompt(1, 30), marks=SLOW),
        pytest.param("qwen2", prompt(3, 30, padded=True), marks=SLOW),
    ],
)
def test_tokens_are_those_of_the_models_own_forward(monkeypatch, name, inputs):
    monkeypatch.setattr(fused_token, "device_refusal", lambda device: None)
    full = dict(layer_types=["full_attention"] * 2) if name.startswith("qwen") else {}
    model, made = model_of(name, num_hidden_layers=2, **full), []
    regions = dict(index=Captured, k=500, sink=4, local_window=8, update_every=8, dense_below=0)
    with recorded(interpreter.InterpretedGraph) as graphs:
        for how in (dict(fused=True), dict(token_graph=False)):
            with kvhf.attach(model, **regions, **how) as cache:
                given = dict(do_sample=False, max_new_tokens=8, past_key_values=cache)
                made.append((model.generate(**inputs, **given), cache.report().graph))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == said(7 - EAGER, 7)
    assert graphs.replays == 7 - EAGER
