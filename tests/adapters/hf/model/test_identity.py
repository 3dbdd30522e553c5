"""A saved cache recognizes its model by its outputs, wherever the weights are stored."""

import copy
from functools import partial

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import Tensor, nn

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.model.info import find_decoder, layer_device
from kvindex_adapters.hf.model.module_state import ModuleState
from kvindex_adapters.hf.model.probe import ROUNDINGS, difference, probe
from tests.adapters.tiny import FAMILIES, build, prompt, steps
from tests.support.helpers import mostly_slow, sampled

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
OTHER = "model: got a cache of a model with other weights, another quantization or another"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama(dtype=torch.float32, seed=0):
    model = build("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * seed * weight.roll(seed)
    return model.to(dtype)


def save(model, folder):
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 20), [20])
        cache.save(folder)
    return folder


def load(model, folder):
    with kvhf.attach(model, **REGIONS) as cache:
        cache.load(folder)
        assert cache.get_seq_length() == 20
        steps(model, cache, prompt(1, 1), [1])


# Where weights are


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


def on_the_host(model, folder):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def in_memory(model, folder):
    return model


@pytest.mark.parametrize("place", [on_disk, on_the_host])
def test_offloaded_weights_are_the_same_model_and_others_are_not(tmp_path, place):
    model = save(llama(), tmp_path / "model")
    offloaded = save(place(llama(), tmp_path / "weights"), tmp_path / "offloaded")
    load(place(llama(), tmp_path / "again"), model)
    load(llama(), offloaded)
    for where in (place, in_memory):
        with pytest.raises(ValueError, match=OTHER):
            load(where(llama(seed=1), tmp_path / where.__name__), offloaded)


def test_a_layer_computes_where_accelerate_brings_its_weights():
    decoder = find_decoder(build("llama").to("meta"))
    assert layer_device(decoder, 0) == torch.device("cpu")
    brings = AlignDevicesHook(execution_device="cuda:1", offload=True)
    for name, module in decoder.named_modules():
        if name.startswith("layers.2."):
            module._hf_hook = SequentialHook(brings) if name.endswith("q_proj") else brings
    assert layer_device(decoder, 2) == torch.device("cuda:1")
    del decoder.layers[2].self_attn.q_proj._hf_hook
    assert layer_device(decoder, 2) == torch.device("cuda:1")


def test_options_are_checked_for_the_device_of_offloaded_layers(tmp_path):
    """The weights are on the meta device, where `backend="cpu"` is not allowed."""
    own, found = dict(index="pariskv", index_options={"backend": "cpu"}), []
    for place in (in_memory, on_the_host):
        model = place(llama(), tmp_path)
        with kvhf.attach(model, **{**REGIONS, **own}) as cache:
            found.append(steps(model, cache, prompt(1, 20), [20]))
            assert cache.indexes()[0].geometry.device == torch.device("cpu")
    torch.testing.assert_close(*found)


class Int8(nn.Module):
    """A linear layer that stores its weights in buffers, like `bitsandbytes` and others."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, rows):
        return nn.functional.linear(rows, self.codes.to(rows.dtype) * self.scale)


def replace_linears(model, made, names=("_proj",)):
    for parent in list(find_decoder(model).modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name.endswith(names):
                setattr(parent, name, made(child))
    return model


@pytest.mark.parametrize("made", [Int8, lambda linear: packed(linear)], ids=["buffers", "packed"])
def test_layers_with_quantized_weights_answer_as_without_an_index(made):
    model = replace_linears(llama(), made)
    inputs = prompt(1, 50)
    options = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(**inputs, **options)
    with kvhf.attach(model, **REGIONS) as cache:
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **options), expected)
        assert cache.report().steps == 11


def test_weights_in_buffers_are_compared(tmp_path):
    folder = save(replace_linears(llama(), Int8), tmp_path / "saved")
    load(replace_linears(llama(), Int8), folder)
    with pytest.raises(ValueError, match=OTHER):
        load(replace_linears(llama(seed=1), Int8), folder)
    with pytest.raises(ValueError, match=OTHER):
        load(llama(), folder)


class Packed(nn.Parameter):
    """A weight that only supports matrix products, no views or conversions, as in `torchao`."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name not in ("linear", "__get__", "dim", "detach", "__repr__"):
            raise NotImplementedError(f"unimplemented operator {name}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def packed(linear):
    linear.weight = Packed(linear.weight.detach(), requires_grad=False)
    return linear


def test_weights_that_only_products_read_are_saved_and_loaded(tmp_path):
    folder = save(replace_linears(llama(), packed), tmp_path / "saved")
    load(replace_linears(llama(), packed), folder)
    load(llama(), folder)
    with pytest.raises(ValueError, match=OTHER):
        load(replace_linears(llama(seed=1), packed), folder)


# Adapters


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter of 5% of its norm, wrapped as in `peft`."""

    def __init__(self, linear, on=True, scale=1.0):
        super().__init__()
        self.linear, self.on, self.scale = linear, on, scale
        rows, columns = linear.weight.shape
        generator = torch.Generator().manual_seed(rows + columns)
        self.A = nn.Parameter(torch.randn(4, columns, generator=generator))
        B = torch.randn(rows, 4, generator=generator)
        B *= 0.05 * linear.weight.detach().float().norm() / (B @ self.A.detach()).norm()
        self.B = nn.Parameter(B)
        self.to(linear.weight.dtype)

    def forward(self, rows):
        addition = (rows @ self.A.T) @ self.B.T * self.scale
        return self.linear(rows) + (addition if self.on else 0)


def adapted(dtype, names=("q_proj", "v_proj"), **how):
    return replace_linears(llama(dtype), partial(Adapted, **how), names)


CHANGES = {
    "off": dict(on=False),
    "halved": dict(scale=0.5),
    "doubled": dict(scale=2.0),
    "negated": dict(scale=-1.0),
}


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.bfloat16))
def test_an_adapter_is_noticed_off_on_and_rescaled(tmp_path, dtype):
    on, off = (save(adapted(dtype, on=on), tmp_path / str(on)) for on in (True, False))
    load(adapted(dtype), on)
    load(llama(dtype), off)
    with pytest.raises(ValueError, match=OTHER):
        load(adapted(dtype), off)
    for how in CHANGES.values():
        with pytest.raises(ValueError, match=OTHER):
            load(adapted(dtype, **how), on)


@pytest.mark.parametrize(("change", "dtype"), sampled(CHANGES, DTYPES))
def test_a_change_of_an_adapter_is_clear_of_the_tolerance(dtype, change):
    """The change exceeds the tolerance 1.5 times in bfloat16, and 10 times in float16 and
    float32."""
    one, other = (
        probe(find_decoder(model), model.config)
        for model in (adapted(dtype), adapted(dtype, **CHANGES[change]))
    )
    found = difference(one.parts, other.parts, one.eps)
    assert found.size > (1.5 if dtype is torch.bfloat16 else 10) * found.tolerance, found


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
def test_an_adapter_of_one_projection_is_noticed(name):
    """In float32, a change is noticed even if the adapter is scaled by a tenth."""
    one, other = (adapted(torch.float32, (name,), scale=scale) for scale in (1.0, 0.9))
    made = [probe(find_decoder(model), model.config) for model in (one, other)]
    found = difference(*(each.parts for each in made), made[0].eps)
    assert found.size > 20 * found.tolerance, found


# Rounding


def exact_linear(rows, weight, bias=None):
    exact = rows.double() @ weight.double().T
    return (exact if bias is None else exact + bias.double()).to(rows.dtype)


@pytest.mark.parametrize(
    ("family", "dtype"),
    sampled(["llama", "qwen3_moe", "gemma2", "granite", "falcon_h1"], DTYPES),
)
def test_rounding_is_no_other_model(family, dtype, monkeypatch):
    """Two devices with different rounding differ by up to √2 times the rounding error of one."""
    model = build(family).to(dtype)
    here = probe(find_decoder(model), model.config)
    monkeypatch.setattr(nn.functional, "linear", exact_linear)
    exact = probe(find_decoder(model.float()), model.config)
    found = difference(here.parts, exact.parts, here.eps)
    assert 0 < found.size < found.tolerance / 2**0.5, found


def test_products_in_tf32_are_float32(monkeypatch):
    model = build("llama")
    config = model.config
    exact = probe(find_decoder(model), config)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert probe(find_decoder(model), config).eps == 2**-10 > exact.eps

    def tf32(tensor):
        return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.weight.data = tf32(linear.weight.data)
            linear.register_forward_pre_hook(lambda _, rows: (tf32(rows[0]),))
    found = difference(probe(find_decoder(model), config).parts, exact.parts, 2**-10)
    assert 0 < found.size < found.tolerance / 2, found


def test_what_is_not_finite_counts_as_nothing():
    one = {"0.keys": torch.tensor([1.0, 2.0, torch.nan, torch.inf])}
    assert difference(one, copy.deepcopy(one), 1e-3).size == 0
    other = {"0.keys": torch.tensor([1.1, 2.2, 3.0, torch.inf])}
    assert 0 < difference(one, other, 1e-3).size < 0.1
    assert difference(one, {"0.keys": torch.ones(3)}, 1e-3).size == torch.inf
    zeros, ones = {"0.keys": torch.zeros(4)}, {"0.keys": torch.ones(4)}
    assert difference(ones, zeros, 1e-3).size == torch.inf
    assert difference(zeros, zeros, 1e-3).size == 0
    later = difference({"9.keys": torch.ones(4)}, {"9.keys": torch.ones(4)}, 1e-3)
    assert later.tolerance == ROUNDINGS * 3.5e-3


# The probe does not change anything


@pytest.mark.parametrize(
    "family",
    mostly_slow(
        [
            *("llama", "gemma2", "gemma4_text", "modernbert-decoder", "gpt_neox", "falcon_h1"),
            *("zamba2", "deepseek_v3", "inkling_text", "gpt_oss", "qwen3_moe"),
        ],
        *("llama", "gemma4_text", "zamba2", "deepseek_v3", "gpt_oss"),
    ),
)
def test_an_attached_model_computes_the_same_and_stays_as_it_was(family):
    assert family in FAMILIES
    model = build(family)
    text = prompt(1, 43)
    parts = {name: part[:, :40] for name, part in text.items()}
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, parts, [38, 1, 1])
        state, random, report = ModuleState(model), torch.get_rng_state(), cache.report()
        inside = probe(cache.decoder, model.config)
        assert state.unchanged
        assert torch.equal(torch.get_rng_state(), random)
        assert cache.report() == report
        assert cache.get_seq_length() == 40
        steps(model, cache, prompt(1, 1), [1])
    outside = probe(find_decoder(model), model.config)
    assert inside.parts.keys() == outside.parts.keys() != set()
    assert all(torch.equal(inside.parts[name], outside.parts[name]) for name in inside.parts)


def test_dropout_and_gradients_play_no_part(tmp_path):
    model = build("phi", resid_pdrop=0.5, embd_pdrop=0.5)
    folder = save(model, tmp_path / "saved")
    model.model.layers[1].train()
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    with kvhf.attach(model, **REGIONS) as cache:
        cache.load(folder)
        cache.save(tmp_path / "again")
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(weight.grad is None for weight in model.parameters())


def test_frequencies_that_a_long_text_has_changed_stay(tmp_path):
    dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    model = build("llama", max_position_embeddings=16, rope_parameters=dynamic)
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 40), [40])
        rotary = model.model.rotary_emb
        before, longest = rotary.inv_freq, rotary.max_seq_len_cached
        cache.save(tmp_path / "saved")
        assert rotary.inv_freq is before
        assert rotary.max_seq_len_cached == longest == 40


def test_hooks_are_part_of_what_a_model_computes(tmp_path):
    model = llama()
    folder = save(model, tmp_path / "saved")
    steered = model.model.layers[1].register_forward_hook(lambda *given: given[2] + 0.1)
    with pytest.raises(ValueError, match=OTHER):
        load(model, folder)
    steered.remove()
    load(model, folder)


def test_a_model_that_fails_is_an_error_in_words_and_writes_nothing(tmp_path):
    def fails(*given):
        raise OverflowError("no room")

    model = llama()
    said = r"^model: got LlamaModel, which failed on 8 sequences of 8 tokens .* \(OverflowError: no"
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 20), [20])
        hook = model.model.layers[2].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match=said):
            cache.save(tmp_path / "saved")
        assert list(tmp_path.iterdir()) == []
        hook.remove()
        steps(model, cache, prompt(1, 1), [1])
        cache.save(tmp_path / "saved")
        other = cache.fork()
        other.reset()
        model.model.layers[2].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match=said):
            other.load(tmp_path / "saved")
        assert other.get_seq_length() == 0


def test_the_probe_is_small(tmp_path):
    folder = save(llama(), tmp_path / "saved")
    assert (folder / "probe.safetensors").stat().st_size < 9 * 2200 + 1000


def test_tensors_of_the_probe_are_float32_on_the_cpu():
    made = probe(find_decoder(model := llama(torch.bfloat16)), model.config)
    assert made.dtype is torch.bfloat16
    for part in made.parts.values():
        assert isinstance(part, Tensor)
        assert (part.dtype, part.device.type) == (torch.float32, "cpu")
