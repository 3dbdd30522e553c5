"""A decode step with Triton kernels gives the logits of plain torch, with joined weights.

On a CPU this runs under Triton's interpreter, in a separate process (`tests/cuda/triton/`).
"""

from types import SimpleNamespace

import pytest
import torch

from tests.support.helpers import sampled

# the imports below need Triton (E402)
triton = pytest.importorskip("triton")

import kvindex_cuda.triton as layers  # noqa: E402
from kvindex_adapters.decoder import Decoder  # noqa: E402
from kvindex_adapters.llama import prompt  # noqa: E402
from kvindex_adapters.llama.fused import Fused, refusal  # noqa: E402
from kvindex_adapters.llama.weights import adjacent, join_in_memory  # noqa: E402
from tests.adapters.decoder.families import ids_of, model_of  # noqa: E402
from tests.cuda.triton import interpreter  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    interpreter.mend()
ON_A_CPU = pytest.mark.skipif(not INTERPRETED, reason="tests/cuda/triton/test_interpreter.py does")
DEVICES = [pytest.param("cpu", marks=ON_A_CPU), pytest.param("cuda", marks=pytest.mark.gpu)]

SMALL = {name: dict(layer_types=["full_attention"] * 2) for name in ("qwen2", "qwen3")}


def together(model):
    """Make a model, and join its weights in memory as `Decoder.of` does on a GPU."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        join_in_memory(attention.q_proj, attention.k_proj, attention.v_proj)
        join_in_memory(mlp.gate_proj, mlp.up_proj)
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["together", "apart", "fp8"])
def test_logits_of_a_prompt_are_those_of_plain_torch(device, weights, monkeypatch):
    model = model_of("qwen3", **SMALL["qwen3"], num_hidden_layers=2).to(device)
    if weights == "together":
        together(model)
    decoder = Decoder.of(model, weights="fp8" if weights == "fp8" else "plain")
    made = []
    for fuses in (False, True):
        monkeypatch.setattr(prompt, "fuses", lambda hidden, fuses=fuses: fuses)
        run = decoder.start([ids_of(30), ids_of(20)], index="exact", fused=False)
        made.append([run.session.read_prompt(run.ids, 8, 40)])
        session = decoder.session(index="exact")
        decoder.read(ids_of(30), session, chunk=8)
        made[-1].append(session.read_prompt(ids_of(21)[None].to(device), 8, 60))
    for plain, fused in zip(*made, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *sampled(("qwen3", "qwen2", "llama, biases, tied"), ("together", "apart")),
        ("qwen2", "fp8"),
    ],
)
def test_logits_are_those_of_the_plain_pass(device, name, weights):
    model = model_of(name, **SMALL.get(name, {}), num_hidden_layers=2).to(device)
    if weights == "together":
        together(model)
    decoder = Decoder.of(model, weights="fp8" if weights == "fp8" else "plain")
    made = []
    for fused in (None, Fused(decoder.weights)):
        run = decoder.start([ids_of(30), ids_of(20)], index=None, fused=False)
        run.session.fused = fused
        logits = [run.session.read_prompt(run.ids, 64, 40)]
        for token in range(2):
            logits.append(run.session.step(torch.tensor([5 + token, 9], device=device)))
        made.append(torch.stack(logits))
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_greedy_run_goes_by_the_kernel_where_its_session_does(device, monkeypatch):
    decoder = Decoder.of(model_of("llama", num_hidden_layers=1).to(device))
    asked, real = [], layers.most_likely

    def recorded(logits, scratch, **how):
        asked.append(scratch)
        return real(logits, scratch, **how)

    monkeypatch.setattr(layers, "most_likely", recorded)
    made = []
    for fused in (None, Fused(decoder.weights)):
        prompts = [ids_of(30), ids_of(20)]
        run = decoder.start(prompts, index=None, fused=False, graphs=False, max_new_tokens=4)
        run.session.fused = fused
        made.append(torch.stack(list(run.tokens())))
        assert len(asked) == (0 if fused is None else 4)
    assert torch.equal(*made)
    assert len({scratch.data_ptr() for scratch in asked}) == 1


@pytest.mark.parametrize("device", [*DEVICES[1:], pytest.param("cpu", marks=ON_A_CPU)])
def test_weights_that_lie_together_are_the_models_own_and_read_in_place(device):
    model = model_of("qwen2").to(device)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        logits = model(ids_of(20).to(device)[None]).logits
    layer = Decoder.of(together(model)).weights.layers[0]
    parts = [layer.query.weight, layer.key.weight, layer.value.weight]
    whole = adjacent(parts)
    assert torch.equal(whole, torch.cat(parts))
    assert whole.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert adjacent(parts[::-1]) is None
    together(model)  # join the weights again, for another decoder
    assert whole.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(ids_of(20).to(device)[None]).logits, logits)


@pytest.mark.parametrize("device", DEVICES)
def test_matrices_in_fp8_are_read_in_place_with_their_scales(device):
    weights = Decoder.of(model_of("qwen2").to(device), weights="fp8").weights
    read, layer = Fused(weights)._layers[0], weights.layers[0]
    for mine, first in ((read.query_key_value, layer.query), (read.gate_up, layer.gate)):
        assert mine.weight.data_ptr() == first.weight.data_ptr()
        assert mine.scale.data_ptr() == first.scale.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_matrix_after_attention_alone_is_asked_for_early(device, batch, monkeypatch):
    model = model_of("llama", num_hidden_layers=2).to(device)
    decoder, asked, real = Decoder.of(model), [], layers.linear_residual

    def recorded(x, matrix, *given, early=False, **more):
        asked.append((matrix.weight.data_ptr(), early))
        return real(x, matrix, *given, early=early, **more)

    monkeypatch.setattr(layers, "linear_residual", recorded)
    run = decoder.start([ids_of(9)] * batch, index=None)
    run.session.read_prompt(run.ids, 64, 10)
    run.session.fused = Fused(decoder.weights)
    run.session.step(torch.tensor([5] * batch, device=device))
    expected = []
    for layer in decoder.weights.layers:
        expected.append((layer.output.weight.data_ptr(), True))
        if batch > 1:
            expected.append((layer.down.weight.data_ptr(), False))
    assert asked == expected


@ON_A_CPU
def test_what_does_not_run_by_them_is_said_in_words():
    weights = Decoder.of(model_of("llama")).weights
    assert refusal(weights, 1) == "device: got cpu, allowed is a GPU"


@ON_A_CPU
def test_a_gpu_that_converts_no_fp8_runs_the_other_weights(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    there = SimpleNamespace(device=torch.device("cuda"))
    said = [refusal(SimpleNamespace(embedding=there, fp8=fp8), 8) for fp8 in (True, False)]
    assert said == [
        "weights: got FP8 on compute capability (8, 6), allowed is from (8, 9) on",
        None,
    ]
