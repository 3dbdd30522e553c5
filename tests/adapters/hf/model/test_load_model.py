"""Files that a model is made from: a wrong file raises an error, and the model stays unchanged."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from kvindex_adapters.hf.model import load_model
from kvindex_adapters.hf.model.load_model import check_device, load, merge_lora
from tests.adapters.tiny import build

NAME = "model.layers.0.self_attn.q_proj"


def halves(rank=2, out=64, wide=64, name=NAME):
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(rank, wide, generator=generator), torch.randn(out, rank, generator=generator)
    return {f"{name}.A": A, f"{name}.B": B}


def changed(half, value):
    parts = halves()
    parts[f"{NAME}.{half}"][0, 0] = value
    return parts


@pytest.fixture
def model():
    return build("llama")


def test_an_addition_is_merged(model, tmp_path):
    before, parts = model.model.layers[0].self_attn.q_proj.weight.clone(), halves()
    save_file(parts, tmp_path / "a.safetensors")
    merge_lora(model, tmp_path / "a.safetensors", rotary_base=5e5)
    expected = before + 2 * parts[f"{NAME}.B"] @ parts[f"{NAME}.A"]
    assert torch.allclose(model.model.layers[0].self_attn.q_proj.weight, expected)
    assert model.config.rope_parameters["rope_theta"] == 5e5
    assert model.model.rotary_emb.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({}, "which contains no tensors"),
        (changed("A", float("nan")), "contains NaN or infinity"),
        (changed("B", float("inf")), "contains NaN or infinity"),
        (changed("A", 3e38), "contains NaN or infinity"),
        ({f"{NAME}.A": torch.ones(2, 64)}, r"shapes \[\[2, 64\], None\]; both must"),
        ({f"{NAME}.B": torch.ones(64, 2)}, r"shapes \[None, \[64, 2\]\]; both must"),
        ({f"{NAME}.C": torch.ones(1)}, "q_proj.C, allowed are names that end in"),
        ({**halves(), f"{NAME}.C": torch.ones(1)}, "q_proj.C, allowed are names that end in"),
        ({"weight": torch.ones(1)}, "got a tensor weight, allowed are names that end in"),
        (halves(name="model.nothing"), "model.nothing, which is not a linear layer"),
        (halves(name="model.norm"), "model.norm, which is not a linear layer"),
        (halves(wide=63), r"allowed for this model are \[r, 64\] and \[64, r\]"),
        (
            {f"{NAME}.A": torch.ones(2, 64), f"{NAME}.B": torch.ones(64, 3)},
            "allowed for this model",
        ),
        ({f"{NAME}.A": torch.ones(64), f"{NAME}.B": torch.ones(64)}, "allowed for this model"),
        # a part that fits, before one that does not
        ({**halves(), **halves(name="model.nothing")}, "model.nothing, which is not a linear"),
    ],
)
def test_other_files_are_refused_and_the_model_is_as_it_was(model, tmp_path, parts, match):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    save_file(parts, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=match):
        merge_lora(model, tmp_path / "a.safetensors")
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert model.config.to_dict() == config


@pytest.mark.parametrize("content", [b"", b"words", b"\x00" * 100])
def test_what_is_no_safetensors_is_refused(model, tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=r"lora: got '.*', allowed is a safetensors file"):
        merge_lora(model, tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="lora: got"):
        merge_lora(model, tmp_path)


def test_a_model_without_a_rotary_base_is_refused_before_it_is_changed(tmp_path):
    model = build("gpt2", n_embd=64, n_head=4)
    save_file(halves(out=101, name="lm_head"), tmp_path / "a.safetensors")
    before = model.lm_head.weight.clone()
    with pytest.raises(ValueError, match="GPT2LMHeadModel, allowed is a model with a rotary base"):
        merge_lora(model, tmp_path / "a.safetensors")
    assert torch.equal(model.lm_head.weight, before)


def test_a_device_without_numbers_is_refused(tmp_path):
    for refuse in (check_device, lambda device: load(tmp_path, device=device)):
        with pytest.raises(ValueError, match="device: got 'meta', which holds no numbers"):
            refuse("meta")


def test_two_threads_leave_the_package_gguf_unchanged(monkeypatch, tmp_path):
    """The second thread begins while the first one loads a file, and ends after it."""
    gguf = pytest.importorskip("gguf")
    before, first_began, first_ended = gguf.GGUFReader, threading.Event(), threading.Event()

    class Tokenizer:
        @staticmethod
        def from_pretrained(folder, *, gguf_file):
            if gguf_file == "first.gguf":
                first_began.set()
                first_ended.wait(0.2)  # in the meantime the second thread begins
            else:
                first_ended.wait(5)
            raise OSError("no tokenizer")

    monkeypatch.setattr(load_model, "AutoTokenizer", Tokenizer)

    def fail(name):
        (tmp_path / name).touch()
        with pytest.raises(FileNotFoundError, match="no tokenizer"):
            load(tmp_path, gguf_file=name)

    def first():
        fail("first.gguf")
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_began.wait(5)
    fail("second.gguf")
    thread.join()
    assert gguf.GGUFReader is before
