"""Matrices in FP8: their rounding, their products, and which memory is used and freed."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from kvindex_adapters.decoder import Decoder, quantized
from kvindex_cuda.triton import Matrix, operands, to_fp8
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


def dequantized(matrix, dtype=torch.float32):
    return matrix.weight.to(dtype) * matrix.scale[:, None].to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_is_rounded_by_a_sixteenth_or_half_a_step(dtype, device, monkeypatch):
    monkeypatch.setattr(operands, "PIECE", 7)
    torch.manual_seed(0)
    rows = torch.exp2(torch.linspace(-12, 12, 30))[:, None]
    weight = (torch.randn(30, 50) * rows).to(device, dtype)
    weight[3], weight[4], weight[5, 7] = 0, 448, 449 * 2.0**-5
    made, exact = to_fp8(Matrix(weight)), weight.float()
    error = (dequantized(made) - exact).abs()
    assert bool((error <= torch.maximum(exact.abs() / 16, made.scale[:, None] / 2**10)).all())
    assert bool((torch.frexp(made.scale)[0] == 0.5).all())  # powers of two
    largest = exact.abs().amax(1) / made.scale
    assert bool(((largest <= 448) & ((largest > 224) | (exact.abs().amax(1) == 0))).all())


def test_a_product_of_scales_and_numbers_is_exact_in_bfloat16():
    torch.manual_seed(0)
    made = to_fp8(Matrix(torch.randn(20, 200) * torch.rand(20, 1)))
    assert torch.equal(dequantized(made, torch.bfloat16).float(), dequantized(made))


@pytest.mark.parametrize("tiny", [1e-38, 1e-44, 0.0])
def test_the_smallest_numbers_become_no_infinity(tiny):
    assert bool(dequantized(to_fp8(Matrix(torch.full((2, 16), tiny)))).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama, biases, tied"])
def test_logits_are_those_of_a_model_with_the_rounded_matrices(name, dtype):
    model, rounded = (model_of(name).to(dtype) for _ in range(2))
    with torch.no_grad():
        for part, weight in rounded.model.layers.named_parameters():
            if part.endswith("_proj.weight"):
                weight.copy_(dequantized(to_fp8(Matrix(weight.detach()))))
    made = []
    for decoder in (Decoder.of(model, weights="fp8"), Decoder.of(rounded)):
        run = decoder.start(ids_of(30), index=None)
        logits = [run.session.read_prompt(run.ids, 16, 40)]
        logits += [run.session.step(torch.tensor([token])) for token in (5, 6, 7)]
        made.append(torch.stack(logits))
    assert torch.equal(*made)


def test_the_model_stays_and_half_of_its_matrices_bytes_go():
    model = model_of("qwen3").to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    plain, fp8 = (Decoder.of(model, weights=kind).weights for kind in ("plain", "fp8"))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert (plain.fp8, fp8.fp8) == (False, True)
    assert fp8.head.weight.data_ptr() == fp8.embedding.data_ptr() == plain.embedding.data_ptr()
    for mine, theirs in zip(fp8.layers, plain.layers, strict=True):
        for name in PROJECTIONS:
            ours, whole = getattr(mine, name), getattr(theirs, name)
            assert 2 * ours.weight.nbytes == whole.weight.nbytes
            assert ours.bias is whole.bias or torch.equal(ours.bias, whole.bias)


def test_an_answer_is_the_same_twice_and_through_an_index():
    decoder = Decoder.of(model_of("llama"), Words(), weights="fp8")
    regions = dict(sink=4, local_window=8, update_every=8, dense_below=0)
    given = dict(index="exact", k=500, attach_options=regions, max_new_tokens=20)
    made = [decoder.generate(ids_of(60), **given).text for _ in range(2)]
    assert made[0] == made[1]
    assert made[0] == decoder.generate(ids_of(60), index=None, max_new_tokens=20).text


def test_from_a_folder_the_models_matrices_are_freed(monkeypatch):
    held = []

    def load(*given, **options):
        model = model_of("qwen3")
        held.extend(weakref.ref(layer.mlp.up_proj.weight) for layer in model.model.layers)
        return model, Words()

    monkeypatch.setattr("kvindex_adapters.decoder.decoder.load", load)
    decoder = Decoder.from_pretrained("somewhere", weights="fp8")
    gc.collect()
    assert [weight() for weight in held] == [None] * len(decoder.weights.layers)
    assert decoder.generate("10 11 12", index=None, max_new_tokens=3).text


def test_other_weights_are_refused_before_anything_is_loaded(monkeypatch):
    said = r"^weights: got 'int4', allowed is one of \['fp8', 'plain'\]"
    with pytest.raises(ValueError, match=said):
        Decoder.from_pretrained("nowhere", weights="int4")
    with pytest.raises(ValueError, match=said):
        Decoder.of(model_of("llama"), weights="int4")
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^weights: got 'fp8', but Triton is not installed"):
        Decoder.from_pretrained("nowhere", weights="fp8")


def test_a_session_of_copies_is_not_saved(tmp_path):
    decoder = Decoder.of(model_of("llama"), weights="fp8")
    session = decoder.session(index="exact")
    decoder.read(ids_of(9), session)
    for work in (session.save, decoder.session(index="exact").load):
        with pytest.raises(ValueError, match="weights: got 'fp8', allowed is 'plain' to save or"):
            work(tmp_path / "folder")
    assert session.length == 9
    assert not any(tmp_path.iterdir())
