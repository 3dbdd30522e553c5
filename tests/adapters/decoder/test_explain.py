"""A decoder reports how a decode step runs, and why."""

import pytest
import torch

import kvindex
from kvindex_adapters.decoder import Decoder
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import LAYERS

TORCH = "matrix products: torch (device: got cpu, allowed is a GPU)"
OP_BY_OP = "decode step: op by op (device: got cpu, allowed is one of ['cuda'])"


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("llama"), Words())


def test_full_attention_on_a_cpu(decoder):
    full = f"attention: full in {LAYERS} layers, with an index in 0"
    assert decoder.explain(index=None).splitlines() == ["weights: float32", TORCH, OP_BY_OP, full]
    said = decoder.explain(index=None, graphs=False)
    assert "decode step: op by op (graphs: got False)" in said


def test_an_index_explains_itself(decoder):
    index = kvindex.create("exact", q_heads=4, kv_heads=2, head_dim=16)
    given = dict(index="exact", attach_options=dict(dense_layers=(1,)))
    said = decoder.explain(**given)
    assert said.endswith(f"full in 1 layers, with an index in {LAYERS - 1}\n{index.explain()}")
    assert decoder.explain(batch=3, **given) == said


def test_weights_in_fp8_and_half_precision():
    pytest.importorskip("triton")
    decoder = Decoder.of(model_of("llama").to(torch.bfloat16), weights="fp8")
    assert decoder.explain(index=None).startswith(
        "weights: FP8 in the layers, otherwise bfloat16\n"
    )


def test_bad_options_are_refused(decoder):
    with pytest.raises(ValueError, match=r"^batch: got 0, allowed is an integer of at least 1"):
        decoder.explain(batch=0)
    with pytest.raises(ValueError, match=r"^k: got 0"):
        decoder.explain(k=0)


@pytest.mark.gpu
def test_on_a_gpu_kernels_and_a_graph():
    decoder = Decoder.of(model_of("llama").to("cuda", torch.bfloat16), Words())
    run = decoder.start(ids_of(60), index=None, max_new_tokens=8)
    assert "decode step: op by op (layer 0: tokens: got 0" in run.explain()
    assert len(list(run.tokens())) == 8
    assert "matrix products: Triton kernels\ndecode step: one graph\n" in run.explain()
    said = decoder.explain(index=None, batch=17)
    assert "matrix products: torch (batch: got 17 sequences, allowed is up to 16)" in said
    assert "matrix products: torch (fused: got False)" in decoder.explain(index=None, fused=False)
