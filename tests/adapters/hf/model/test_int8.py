"""Linear layers with weights in int8: close to float32, the same for each token, and one device."""

import copy
import pickle

import pytest
import torch
from torch import nn

from kvindex_adapters.decoder import Decoder
from kvindex_adapters.hf.model import int8
from kvindex_adapters.hf.model.load_model import load
from tests.adapters.tiny import build, byte_pairs

pytestmark = pytest.mark.skipif(not int8.supported(), reason="torch without oneDNN")


def inputs_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def linear_of(inner, outer, bias=False):
    torch.manual_seed(0)
    return nn.Linear(inner, outer, bias=bias)


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("inner", "outer", "bias"), [(64, 48, False), (100, 33, True)])
def test_only_the_weights_are_rounded(inner, outer, bias):
    linear, x = linear_of(inner, outer, bias), inputs_of(2, 7, inner)
    layer = int8.Int8Linear(linear)
    weight = linear.weight.detach()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = nn.functional.linear(x, (weight / scale).round() * scale, linear.bias)
    found = layer(x)
    assert found.shape == (2, 7, outer)
    assert found.dtype is torch.float32
    assert relative(found, rounded) < 2e-4
    assert relative(found, linear(x)) < 0.01


def test_a_token_is_computed_as_alone():
    layer, x = int8.Int8Linear(linear_of(64, 32)), inputs_of(5, 64)
    x[2] *= 1e6  # an outlier has its own scale
    x[3] = 0
    found = layer(x)
    assert all(torch.equal(found[i : i + 1], layer(x[i : i + 1])) for i in range(5))
    assert torch.equal(found[3], torch.zeros(32))


def test_sums_do_not_overflow_where_pairs_of_products_have_16_bits():
    linear = nn.Linear(512, 8, bias=False)
    nn.init.constant_(linear.weight, 1.0)
    x = torch.ones(1, 512)
    assert torch.allclose(int8.Int8Linear(linear)(x), linear(x), rtol=1e-5)


def test_logits_of_a_model_and_of_its_copies_are_close_to_those_in_float32():
    model, ids = build("llama"), torch.arange(30)[None]
    quantized = copy.deepcopy(model)
    int8.quantize(quantized)
    assert not [m for m in quantized.modules() if type(m) is nn.Linear]
    with torch.no_grad():
        wanted, found = (m(input_ids=ids).logits for m in (model, quantized))
        copies = copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))
        again = [m(input_ids=ids).logits for m in copies]
    assert relative(found, wanted) < 0.06
    assert all(torch.equal(one, found) for one in again)


def test_the_decoder_says_that_it_needs_other_weights():
    model = build("llama")
    int8.quantize(model)
    with pytest.raises(ValueError, match=r"_proj: got .*Int8Linear, allowed is torch\.nn\.Linear"):
        Decoder.of(model, byte_pairs())


@pytest.mark.parametrize("options", [dict(device="cpu", heads=True), dict(device="cuda")])
def test_other_places_are_refused(options, monkeypatch):
    monkeypatch.setattr("kvindex_adapters.hf.model.load_model.check_device", lambda device: None)
    with pytest.raises(ValueError, match=r"dtype: got int8 with .*use float32"):
        load("smollm2", dtype=torch.int8, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(model="smollm2", dtype="int4"), "dtype: got 'int4', allowed is one of"),
        (dict(model="smollm2_long"), "model: got 'smollm2_long', .*did you mean 'smollm2-long'"),
        (dict(model="SmolLM2"), "model: got 'SmolLM2', .*did you mean 'smollm2'"),
    ],
)
def test_mistakes_in_names_are_found_without_a_network(options, match):
    with pytest.raises(ValueError, match=match):
        load(**options)


def test_a_build_of_torch_without_one_dnn_is_refused(monkeypatch):
    monkeypatch.setattr(int8, "supported", lambda: False)
    with pytest.raises(ValueError, match="dtype: got int8, but this build of torch has no oneDNN"):
        load("smollm2", dtype=torch.int8)
