"""Models and arguments that the decoder does not support raise an error before any work."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM

import kvindex_adapters.hf as kvhf
from kvindex.core.ranks import Ranks
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder import Decoder, supports
from kvindex_adapters.hf.model.load_model import load
from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters.decoder.families import FAMILIES, ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build


class Other(LlamaForCausalLM):
    """A subclass may compute anything."""


def changed(change):
    """Make a llama, and change it."""
    model = model_of("llama")
    change(model)
    return model


def other_class(model):
    model.__class__ = Other


def other_projection(model):
    class Quantized(nn.Linear):
        pass

    model.model.layers[2].self_attn.q_proj = Quantized(64, 64)


def adapted(model):
    """Make a layer whose class has the same name as one of `peft`."""
    model.model.layers[2].self_attn.q_proj = type("Linear", (nn.Linear,), {})(64, 64)


def same_name(model):
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {})


def other_mlp(model):
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(64, 64))
    model.model.layers[1].mlp.__class__ = type("Experts", (nn.Module,), {})


def other_norm(model):
    model.model.norm = nn.LayerNorm(64)


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *args: None)


def own_forward(model):
    model.model.norm.forward = lambda hidden: hidden


def parametrized(model):
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def two_dtypes(model):
    model.lm_head.to(torch.float64)


def rotation(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, factor=2.0, **more))


FACTORS = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=64)

REFUSED = {
    "subclass": (lambda: changed(other_class), "model: got Other, allowed are the classes Llama"),
    "family": (lambda: build("gemma3_text"), "model: got Gemma3ForCausalLM, allowed are"),
    "projection": (
        lambda: changed(other_projection),
        r"layers.2.self_attn.q_proj: got tests.adapters.*Quantized, allowed is torch.nn.Linear; ",
    ),
    "adapter": (
        lambda: changed(adapted),
        r"q_proj: got tests\.adapters\S*test_refusals\.Linear, .* \(peft: merge_and_unload\(\)\)",
    ),
    "same name": (
        lambda: changed(same_name),
        r"model: got tests\.adapters\S*LlamaForCausalLM, allowed are the classes Llama",
    ),
    "perceptron": (
        lambda: changed(other_mlp),
        "layers.1.mlp: got .*Experts, allowed are classes from",
    ),
    "norm": (lambda: changed(other_norm), "norm: got torch.*LayerNorm, allowed are classes from"),
    "parametrized": (
        lambda: changed(parametrized),
        "up_proj: got .*Parametrized.*, allowed is torch.nn.Lin",
    ),
    "hook": (lambda: changed(hooked), "layers.0: got a replaced forward method or a hook"),
    "forward": (lambda: changed(own_forward), "norm: got a replaced forward method or a hook"),
    "sliding layers": (lambda: build("qwen3"), "layer_types: got sliding_attention, allowed is"),
    "sliding window": (
        lambda: build("mistral", sliding_window=24),
        "sliding_window: got 24, allowed is None",
    ),
    "activation": (lambda: build("llama", hidden_act="gelu"), "hidden_act: got 'gelu', allowed"),
    "dynamic": (lambda: build("llama", **rotation("dynamic")), "rope_type: got 'dynamic'"),
    "longrope": (
        lambda: build("llama", **rotation("longrope", **FACTORS)),
        "rope_type: got 'longrope', whose frequencies depend on the sequence length",
    ),
    "two dtypes": (lambda: changed(two_dtypes), "got weights of torch.float32, torch.float64"),
    "no numbers": (lambda: model_of("llama").to("meta"), "got weights on meta, allowed is one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused(name):
    make, said = REFUSED[name]
    model = make()
    with pytest.raises(UnsupportedError, match=said):
        Decoder.of(model)
    assert supports(model) is not None


def test_what_is_no_model_or_is_attached_is_refused():
    with pytest.raises(TypeError, match="model: got int, allowed is a transformers model"):
        Decoder.of(3)
    model = model_of("llama")
    with kvhf.attach(model), pytest.raises(UnsupportedError, match="got a model with an attached"):
        Decoder.of(model)
    Decoder.of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_runs_says_so(name):
    assert supports(model_of(name)) is None


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("llama"), Words())


@pytest.mark.parametrize(
    ("prompt", "given", "said"),
    [
        ([], {}, "prompts: got none, allowed is at least one"),
        ("", {}, "prompt: got no tokens"),
        ([ids_of(3), ids_of(3)[:0]], {}, "prompt: got no tokens"),
        (torch.tensor([3, 101]), {}, "prompt: got id 101, allowed is 0 to 100"),
        (torch.tensor([-1]), {}, "prompt: got id -1"),
        (torch.tensor([0.5]), {}, "prompt: got dtype"),
        (torch.ones(2, 3, dtype=torch.int64), {}, "prompt: got shape"),
        (ids_of(9), dict(chunk=1), "chunk: got 1, allowed is an integer of at least 2"),
        (ids_of(9), dict(max_new_tokens=0), "max_new_tokens: got 0"),
        (ids_of(9), dict(k=0), "k: got 0"),
        (ids_of(9), dict(index="nothing"), "nothing"),
        (ids_of(9), dict(index=3), "index: got 3, allowed is the name"),
        (ids_of(9), dict(attach_options=dict(sink=-1)), "sink: got -1"),
        (ids_of(9), dict(attach_options=dict(dense_layers=(9,))), "dense_layers: got 9"),
        (ids_of(9), dict(attach_options=dict(k=3)), "attach_options: got k; pass k"),
        (
            ids_of(9),
            dict(attach_options=dict(layer_options={7: {}})),
            r"layer_options: got layers \[7\]",
        ),
        (
            ids_of(9),
            dict(attach_options=dict(index_options=dict(q_heads=3))),
            "index_options: got q_heads, but the model determines",
        ),
        ([ids_of(9), ids_of(8)], dict(streamer=object()), "streamer: got a streamer for 2 prompts"),
    ],
)
def test_arguments_are_refused(decoder, prompt, given, said):
    with pytest.raises(ValueError, match=said):
        decoder.generate(prompt, **given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (dict(temperature=1.0), "unexpected keyword argument"),
        (dict(attach_options=dict(windows=3)), "attach_options: argument: got 'windows', allowed"),
        (dict(attach_options=dict(preset="fast")), 'pass index="pariskv:preset=fast" or'),
    ],
)
def test_options_that_do_not_exist_are_refused(decoder, given, match):
    with pytest.raises(TypeError, match=match):
        decoder.generate(ids_of(9), **given)


def test_without_a_tokenizer_prompts_are_ids():
    decoder = Decoder.of(model_of("llama"))
    assert decoder.generate(ids_of(9), max_new_tokens=2).text == ""
    with pytest.raises(ValueError, match="prompt: got str, but the decoder has no tokenizer"):
        decoder.generate("10 11")


def test_another_device_than_that_of_the_ranks_is_refused_before_anything_is_loaded():
    ranks = HeadRanks.of("cpu")
    with pytest.raises(
        ValueError,
        match=r"^device: got 'cuda', allowed is the device of the argument ranks, 'cpu'$",
    ):
        Decoder.from_pretrained("nowhere", device="cuda", ranks=ranks)
    assert ranks.on(torch.device("cpu"))
    cards = HeadRanks(Ranks.of(), torch.device("cuda:1"))
    said = [cards.on(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:0", "cpu")]
    assert said == [True, True, False, False]


def test_from_a_folder(tmp_path, monkeypatch):
    model = model_of("qwen3")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.AutoTokenizer.from_pretrained",
        lambda *a, **o: Words(),
    )
    decoder = Decoder.from_pretrained(tmp_path)
    answer = decoder.generate("10 11 12", index=None, max_new_tokens=9)
    expected = Decoder.of(load(tmp_path)[0]).generate(
        answer.prompt_ids, index=None, max_new_tokens=9
    )
    assert torch.equal(answer.answer_ids, expected.answer_ids)
    assert decoder.generate([ids_of(9)], max_new_tokens=2)[0].text
    half = Decoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.weights.embedding.dtype is torch.bfloat16
    assert len(half.generate("10 11 12", max_new_tokens=9).answer_ids) == 9
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        Decoder.from_pretrained(tmp_path / "none")
