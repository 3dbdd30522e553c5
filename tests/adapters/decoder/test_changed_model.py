"""A model that is changed after `Decoder.of`: the decoder follows it, or raises an error."""

import gc
from importlib.util import find_spec
from weakref import ref

import pytest
import torch
from torch import nn

import kvindex_adapters.hf as kvhf
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.decoder.test_open_session import EVERYTHING, SMALL, asked
from tests.adapters.hf.generation.test_generation import Words
from tests.support.helpers import mostly_slow

PROMPT = ids_of(40)


def layer(model):
    return model.model.layers[1]


@torch.no_grad()
def replaced(model):
    projection = layer(model).self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.flip(0))


def assigned(model):
    layer(model).mlp.up_proj.weight.data = layer(model).mlp.up_proj.weight.data.flip(0)


def loaded(model):
    state = {name: weight.roll(1, 0) for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def other_module(model):
    layer(model).mlp.down_proj = nn.Linear(96, 64, bias=False)


def other_constant(model):
    layer(model).input_layernorm.variance_epsilon = 1.0


def other_scale(model):
    for each in model.model.layers:
        each.self_attn.scaling = 0.01


def other_rotation(model):
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.3, persistent=False)


def fewer_layers(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


REPLACED = [
    *(replaced, assigned, loaded, other_module, other_constant, other_scale, other_rotation),
    fewer_layers,
]


@torch.no_grad()
def in_place(model):
    layer(model).mlp.up_proj.weight.neg_()


def in_place_of_data(model):
    layer(model).mlp.up_proj.weight.data.neg_()


class Adapted(nn.Module):
    """A projection that adds a term to its output, like an adapter."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, rows):
        return self.linear(rows) * 1.5


def adapted(model):
    attention, before = layer(model).self_attn, layer(model).self_attn.q_proj
    attention.q_proj = Adapted(before)
    return lambda: setattr(attention, "q_proj", before)


def hooked(model):
    return layer(model).register_forward_hook(lambda *given: given[2] * 1.5).remove


def before_hooked(model):
    return layer(model).mlp.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,)).remove


def own_forward(model):
    mlp = layer(model).mlp
    mlp.forward = lambda rows: rows
    return lambda: delattr(mlp, "forward")


NOT_RUN = [adapted, hooked, before_hooked, own_forward]


def of_the_model(model):
    with torch.no_grad():
        made = model.generate(PROMPT[None], max_new_tokens=8, do_sample=False)
    return made[0, len(PROMPT) :].tolist()


def of_the_decoder(decoder):
    return decoder.generate(PROMPT, max_new_tokens=8, chunk=16, **EVERYTHING).answer_ids.tolist()


@pytest.fixture
def model():
    return model_of("llama", **SMALL)


@pytest.mark.parametrize("change", [*REPLACED, in_place, in_place_of_data])
def test_the_decoder_is_of_the_model_as_it_is(model, change):
    decoder = Decoder.of(model, Words())
    before = of_the_decoder(decoder)
    assert before == of_the_model(model)
    change(model)
    assert of_the_decoder(decoder) == of_the_model(model) != before


@pytest.mark.parametrize("change", NOT_RUN)
def test_what_it_does_not_run_is_an_error_until_it_is_gone(model, change):
    decoder = Decoder.of(model, Words())
    session = decoder.session(**EVERYTHING)
    decoder.read(PROMPT, session)
    before = of_the_decoder(decoder)
    undo = change(model)
    calls = {
        "generate": lambda: of_the_decoder(decoder),
        "read": lambda: decoder.read(PROMPT, session),
        "session": decoder.session,
        "stream": lambda: decoder.stream(PROMPT),
        "explain": decoder.explain,
        "save": lambda: session.save("nowhere"),
        "load": lambda: decoder.session().load("nowhere"),
    }
    for name, call in calls.items():
        with pytest.raises(UnsupportedError, match=r"kvhf\.attach"):
            pytest.fail(f"{name}: {call()}")
    assert session.length == len(PROMPT)
    undo()
    assert of_the_decoder(decoder) == before == of_the_model(model)
    assert asked(decoder, session, ids_of(5)) == asked(decoder, read(decoder), ids_of(5))


def read(decoder):
    session = decoder.session(**EVERYTHING)
    decoder.read(PROMPT, session)
    return session


@pytest.mark.parametrize("change", mostly_slow(REPLACED, *REPLACED[::2]))
def test_a_session_of_weights_that_were_replaced_is_refused(model, change, tmp_path):
    decoder = Decoder.of(model, Words())
    session, stream = read(decoder), decoder.stream(PROMPT, max_new_tokens=4)
    change(model)
    for one in (session, session.fork()):
        with pytest.raises(ValueError, match="opened before the decoder's model changed; open"):
            asked(decoder, one, ids_of(5))
        with pytest.raises(
            ValueError, match="model: got a model whose weights or settings were replac"
        ):
            one.save(tmp_path / "saved")
        assert one.length == len(PROMPT)
    with pytest.raises(
        ValueError, match="model: got a model whose weights or settings were replaced"
    ):
        next(stream)
    assert not (tmp_path / "saved").exists()
    assert asked(decoder, read(decoder), ids_of(5))


def test_what_changes_nothing_that_is_read_keeps_sessions(model, tmp_path):
    decoder = Decoder.of(model, Words())
    session, weights = read(decoder), decoder.weights
    want = asked(decoder, session.fork(), ids_of(5))

    def same():
        assert asked(decoder, session.fork(), ids_of(5)) == want
        assert decoder.weights is weights

    model.train()
    same()
    model.config.use_cache = False
    same()
    with kvhf.attach(model):
        same()
    same()
    hooked(model)()
    same()
    in_place_twice = layer(model).mlp.up_proj.weight
    with torch.no_grad():
        in_place_twice.neg_().neg_()
    same()
    session.save(tmp_path / "saved")


COPIES = [
    pytest.param(
        dict(weights="fp8"), marks=pytest.mark.skipif(not find_spec("triton"), reason="no Triton")
    ),
    dict(ranks=HeadRanks.of("cpu")),
]


@pytest.mark.parametrize("how", COPIES, ids=["fp8", "ranks"])
@pytest.mark.parametrize("change", mostly_slow([*REPLACED, in_place], *REPLACED[::3], in_place))
def test_copies_of_a_model_that_was_changed_are_refused(model, how, change):
    decoder = Decoder.of(model, Words(), **how)
    session, before = read(decoder), of_the_decoder(decoder)
    model.train()
    assert of_the_decoder(decoder) == before
    change(model)
    said = r"model: got a model that has changed since the decoder copied .* \((weights=|ranks)"
    for call in (lambda: of_the_decoder(decoder), lambda: asked(decoder, session, ids_of(5))):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.parametrize("how", COPIES, ids=["fp8", "ranks"])
def test_copies_go_on_when_the_model_is_gone(how):
    model = model_of("llama", **SMALL)
    decoder, kept = Decoder.of(model, Words(), **how), ref(model)
    session, before = read(decoder), of_the_decoder(decoder)
    want = asked(decoder, session.fork(), ids_of(5))
    hooked(model)
    with pytest.raises(UnsupportedError, match=r"kvhf\.attach"):
        of_the_decoder(decoder)
    del model
    gc.collect()
    assert kept() is None
    assert of_the_decoder(decoder) == before
    assert asked(decoder, session, ids_of(5)) == want
