"""A decode step of a transformers model with the decoder's kernels gives the model's own tokens.

On a CPU, the kernels are reference implementations in torch, and graphs are recorded functions
(`tests/cuda/graphs.py`).
"""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kvindex_adapters.hf as kvhf
from kvindex.pariskv.index import ParisKV
from kvindex_adapters.hf.graph import fused_token
from kvindex_adapters.llama.weights import are_joined, join_in_memory, products
from tests.adapters.decoder.families import FAMILIES
from tests.adapters.decoder.families import model_of as family_of
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt
from tests.cuda import emulator
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.fused import on_a_cpu
from tests.support.helpers import mostly_slow, slow

pytest.importorskip("triton")

SIZES = dict(sink=4, local_window=8, update_every=24, dense_below=0)
REGIONS = dict(index=Captured, k=500, **SIZES)


class Predicts(Captured):
    """An index that chooses the number of rows, but not in a graph."""

    def search_within(self, queries, *, k, limit):
        return self.search(queries, k=k)


FULL = dict(layer_types=["full_attention"] * 2)
EAGER = 2
"""Steps without a replay: the first one ends the prompt, the next one runs without a graph."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Count graphs and replays."""
    on_a_cpu(monkeypatch)
    with recorded(WholeGraph) as counting:
        yield counting


def model_of(name="llama", **options):
    full = FULL if name.startswith("qwen") else {}
    return family_of(name, **{"num_hidden_layers": 2, **full, **options})


def generated(model, inputs, count, *, attach=None, **options):
    """Return tokens int64 `[B, count]` and the report."""
    options = {"do_sample": False, "max_new_tokens": count, **options}
    with kvhf.attach(model, **{**REGIONS, **(attach or {})}) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        return out[:, inputs["input_ids"].shape[1] :], cache.report()


def both(model, inputs, count, **options):
    """Return tokens and reports with kernels, and from the model's own forward without a graph."""
    made = []
    for how in (dict(fused=True), dict(token_graph=False)):
        torch.manual_seed(0)
        made.append(generated(model, inputs, count, attach=how, **options))
    return made


def said(replays, count):
    return f"{replays} of {count} tokens were replays of the fused token"


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *[*FAMILIES][1::2]))
def test_tokens_are_those_of_the_models_own_forward(graphs, name):
    """The answer includes updates of the window; with this index, each needs a new graph."""
    (mine, report), (theirs, plain) = both(model_of(name), prompt(1, 60), 40)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert report.graph == said(39 - EAGER, 39)
    assert graphs.made > 1


@pytest.mark.parametrize("batch", [1, 16])
def test_logits_are_those_of_the_models_own_forward(graphs, batch):
    model, ids, made = model_of("qwen3"), prompt(batch, 80)["input_ids"], []
    for how in (dict(fused=True), dict(token_graph=False)):
        with kvhf.attach(model, **REGIONS, **how) as cache, torch.no_grad():
            model(ids[:, :60], past_key_values=cache)
            logits = []
            for at in range(60, 80):
                step = dict(position_ids=torch.tensor([[at]]), past_key_values=cache)
                out = model(ids[:, at : at + 1], **step)
                assert out.past_key_values is cache
                logits.append(out.logits)
            made.append(torch.cat(logits, 1))
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    assert graphs.replays == 20 - EAGER


@pytest.mark.parametrize("sampled", [False, True])
def test_batches_with_padding_in_which_rows_end(graphs, sampled):
    inputs, model = prompt(3, 60, padded=True), model_of()
    options = dict(do_sample=True, temperature=0.7, top_k=20) if sampled else {}
    torch.manual_seed(0)
    end = int(generated(model, inputs, 20, **options)[0][1, 8])
    (mine, report), (theirs, _) = both(
        model, inputs, 20, **options, eos_token_id=end, pad_token_id=0
    )
    assert torch.equal(mine, theirs)
    assert (mine == end).any()
    count = mine.shape[1] - 1
    assert report.graph == said(count - EAGER, count)


def test_beams(graphs):
    (mine, report), (theirs, _) = both(model_of(), prompt(2, 40, padded=True), 16, num_beams=3)
    assert torch.equal(mine, theirs)
    assert report.graph == said(15 - EAGER, 15)


def life(model, **how):
    """Return logits of turns, truncations, reorders, copies and a second prompt."""
    logits = []

    def tokens(cache, count):
        for _ in range(count):
            start = cache.get_seq_length()
            ids = inputs["input_ids"][:, start % 60 : start % 60 + 1]
            positions = torch.full((2, 1), start)
            out = model(ids, position_ids=positions, past_key_values=cache)
            logits.append(out.logits)

    inputs = prompt(2, 60)
    with kvhf.attach(model, **REGIONS, **how) as cache, torch.no_grad():
        for _ in range(2):
            model(inputs["input_ids"], past_key_values=cache)
            tokens(cache, 8)
            model(inputs["input_ids"][:, :7], past_key_values=cache)
            tokens(cache, 6)
            cache.crop(-3)
            tokens(cache, 5)
            cache.reorder_cache(torch.tensor([1, 0]))
            tokens(cache, 5)
            before = cache.checkpoint()
            tokens(cache, 3)
            cache.rollback(before)
            fork = cache.fork()
            tokens(cache, 5)
            tokens(fork, 6)
            tokens(cache, 3)
            cache.batch_select_indices(torch.tensor([1, 1]))
            tokens(cache, 5)
            cache.reset()
    return logits


def test_turns_cuts_orders_copies_and_a_second_prompt(graphs):
    model = model_of()
    for mine, theirs in zip(life(model, fused=True), life(model, token_graph=False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert graphs.replays > 50


def test_one_call_takes_it_as_an_option_of_attach(graphs):
    model, ids = model_of(), prompt(1, 60)["input_ids"][0]
    answers = [
        kvhf.generate(
            *(model, Words(), ids),
            **dict(index=Captured, k=500, max_new_tokens=12, attach_options={**SIZES, **how}),
        )
        for how in (dict(fused=True), dict(token_graph=False))
    ]
    assert torch.equal(answers[0].answer_ids, answers[1].answer_ids)
    assert answers[0].report.graph == said(11 - EAGER, 11)


# Weights

CHANGES = {
    "weights that move": lambda model: model.load_state_dict(
        {name: weight + 0.01 for name, weight in model.state_dict().items()}, assign=True
    ),
    "weights in place": lambda model: [
        part.add_(0.01) for part in model.parameters() if part.ndim > 1
    ],
    "biases in place": lambda model: [
        part.add_(0.5) for name, part in model.named_parameters() if name.endswith("proj.bias")
    ],
    "a dtype and back": lambda model: model.double().float(),
    "a number": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 1),
}


@pytest.mark.parametrize("change", mostly_slow(CHANGES, *[*CHANGES][1:4]))
def test_weights_that_change_are_those_that_are_read(graphs, change):
    answers = []
    for how in (dict(fused=True), dict(token_graph=False)):
        model, inputs = model_of("qwen2"), prompt(1, 60)
        with kvhf.attach(model, **REGIONS, **how) as cache, torch.no_grad():
            how = dict(past_key_values=cache, do_sample=False)
            some = model.generate(**inputs, max_new_tokens=9, **how)
            CHANGES[change](model)
            answers.append(model.generate(some, max_new_tokens=9, **how))
    assert torch.equal(*answers)
    assert graphs.replays > 9


class Adapted(torch.nn.Module):
    """A projection that adds a term to its output, like an adapter."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, rows):
        return self.linear(rows) * 1.5


def adapted(model):
    attention = model.model.layers[1].self_attn
    attention.q_proj, before = Adapted(attention.q_proj), attention.q_proj
    return lambda: setattr(attention, "q_proj", before)


def hooked(model):
    return model.model.layers[1].register_forward_hook(lambda *given: given[2] * 1.5).remove


@pytest.mark.parametrize("change", [adapted, hooked])
def test_adapters_and_hooks_are_called_while_they_are_there(graphs, change):
    answers = []
    for how in (dict(fused=True), dict(token_graph=False)):
        model, inputs = model_of("qwen2"), prompt(1, 60)
        with kvhf.attach(model, **REGIONS, **how) as cache, torch.no_grad():
            how = dict(past_key_values=cache, do_sample=False)
            some = model.generate(**inputs, max_new_tokens=9, **how)
            undo = change(model)
            some = model.generate(some, max_new_tokens=5, **how)
            undo()
            answers.append(model.generate(some, max_new_tokens=9, **how))
    assert torch.equal(*answers)
    assert graphs.replays > 9


def test_matrices_lie_together_inside_and_apart_afterwards(graphs):
    model = model_of("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with kvhf.attach(model, **REGIONS, fused=True) as cache:
        model.generate(**prompt(1, 60), past_key_values=cache, max_new_tokens=6)
        assert all(are_joined(*modules) for modules in products(model.model))
    assert not any(are_joined(*modules) for modules in products(model.model))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    places = [weight.untyped_storage().data_ptr() for weight in model.parameters()]
    assert len(set(places)) == len(places)


def test_what_lay_together_before_stays_so(graphs):
    model = model_of()
    for modules in products(model.model):
        join_in_memory(*modules)
    places = [weight.data_ptr() for weight in model.parameters()]
    generated(model, prompt(1, 60), 6, attach=dict(fused=True))
    assert places == [weight.data_ptr() for weight in model.parameters()]


def test_models_are_saved_inside_and_afterwards(graphs, tmp_path):
    model = model_of("qwen2")
    want = {name: weight.clone() for name, weight in model.state_dict().items()}
    with kvhf.attach(model, **REGIONS, fused=True):
        model.save_pretrained(tmp_path / "inside")
    model.save_pretrained(tmp_path / "after")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    for folder in ("inside", "after"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(again[name], weight) for name, weight in want.items())
    again = load_file(tmp_path / "plain.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in want.items())


def test_caches_that_are_held_hold_no_weights(graphs, monkeypatch):
    model, read = model_of(), []

    class Body(fused_token.FusedBody):
        def __init__(self, *given):
            super().__init__(*given)
            read.append(weakref.ref(self))

    monkeypatch.setattr(fused_token, "FusedBody", Body)
    gc.disable()
    try:
        with kvhf.attach(model, **REGIONS, fused=True) as cache:
            how = dict(max_new_tokens=6, do_sample=False)
            some = model.generate(**prompt(1, 60), past_key_values=cache, **how)
            fork = cache.fork()
            model.generate(some, past_key_values=fork, **how)
            assert len(read) == 1  # one shared object for both
            assert read[0]() is not None
        assert read[0]() is None
    finally:
        gc.enable()


# Errors


def of_two_dtypes():
    model = model_of()
    model.model.norm.double()
    return model


def made_for_inference():
    with torch.inference_mode():
        return model_of()


def with_strides():
    model = model_of()
    down = model.model.layers[0].mlp.down_proj
    down.weight.data = down.weight.detach().T.contiguous().T
    return model


def with_some_biases():
    model = model_of("qwen2")
    model.model.layers[0].self_attn.v_proj.bias = None
    return model


def with_a_hook():
    model = model_of()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


def with_a_forward():
    model = model_of()
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    return model


def with_another_module():
    model = model_of()
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    return model


def compiled():
    model = model_of()
    model.model.layers[0].mlp.compile(backend="eager")
    return model


def in_training():
    model = model_of(attention_dropout=0.1)
    return model.train()


@pytest.mark.parametrize(
    ("make", "attach", "why"),
    [
        (lambda: build("phi3"), {}, "model: got Phi3ForCausalLM, allowed are the classes Llama"),
        (lambda: build("qwen3"), {}, "layer_types: got sliding_attention, allowed is full"),
        (of_two_dtypes, {}, "model: got weights of torch.float32, torch.float64"),
        (lambda: model_of().double(), {}, "embed_tokens.weight: got torch.float64"),
        (made_for_inference, {}, "embed_tokens.weight: got one that was made under inference"),
        (with_strides, {}, r"down_proj.weight: got strides \(1, 64\), allowed is a contiguous"),
        (with_some_biases, {}, "bias: got one in some projections"),
        (with_a_hook, {}, "model.layers.0.mlp: got a replaced forward method or a hook"),
        (with_a_forward, {}, "model.layers.0.mlp: got a replaced forward method or a hook"),
        (with_another_module, {}, "up_proj: got torch.nn.*Sequential, allowed is torch.nn.Lin"),
        slow(compiled, {}, "LlamaMLP: got a compiled call"),
        (in_training, {}, r"attention_dropout: got 0\.1 in training"),
        (model_of, dict(token_graph=False), "token_graph: got False, allowed with fused=True"),
        (model_of, dict(coverage=0.9), r"coverage: got 0\.9, allowed with fused=True is None"),
        (model_of, dict(dense_layers=(1,)), r"dense_layers: got \(1,\), allowed with fused"),
        (model_of, dict(index="exact"), "index: got Exact, whose decode steps cannot"),
        (
            model_of,
            dict(k="auto", index=Predicts),
            "k: got 'auto', allowed with fused=True is a number for k and no error, because the",
        ),
        (
            model_of,
            dict(k=50, error=0.1, index=Predicts),
            r"error: got 0\.1, allowed with fused=True is a number for k and no error",
        ),
        (model_of, dict(fused=1), "fused: got 1, allowed is True or False"),
    ],
)
def test_what_no_kernels_compute_is_refused_before_anything_changes(make, attach, why):
    model = make()
    with (
        pytest.raises(ValueError, match=why),
        kvhf.attach(model, **{**REGIONS, "fused": True, **attach}),
    ):
        pass
    if make is model_of:
        assert not any(are_joined(*modules) for modules in products(model.model))
    with kvhf.attach(model, **REGIONS):  # the model is no longer attached
        pass


@pytest.mark.slow  # emulated kernels
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_as_many_rows_as_the_error_asks_for(monkeypatch):
    """The kernels choose the number of rows in a graph as outside of one."""
    monkeypatch.setattr(ParisKV, "_defers", True)  # checks wait for the next call, as on a GPU
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    options = dict(index="pariskv", index_options=dict(backend="cuda"), k="auto", error=0.5)
    made = []
    with emulator.emulated():
        for how in (dict(fused=True), dict(token_graph=True), dict(token_graph=False)):
            attach = {**SIZES, **options, **how}
            made.append(generated(model_of(head_dim=64), prompt(1, 200), 12, attach=attach))
    (mine, report), (others, traced), (theirs, plain) = made
    assert torch.equal(mine, theirs)
    assert torch.equal(others, theirs)
    assert report.graph == said(11 - EAGER, 11)
    assert re.match(r"[1-9] of 11 tokens were replays", traced.graph)
    assert report.rows_found == traced.rows_found == plain.rows_found
    assert min(report.rows_found.by_layer) >= 16


def test_another_device_is_refused(monkeypatch):
    monkeypatch.undo()
    with (
        pytest.raises(kvhf.UnsupportedError, match="device: got cpu, allowed is a GPU"),
        kvhf.attach(model_of(), **REGIONS, fused=True),
    ):
        pass


def test_calls_that_no_kernels_compute_run_as_ever_and_say_why(graphs):
    model, ids = model_of(), prompt(1, 61)["input_ids"]
    positions = torch.tensor([[60]])

    def last(**how):
        states = cache.checkpoint()
        given = {"input_ids": ids[:, 60:], "position_ids": positions, **how}
        out = model(past_key_values=cache, **given)
        cache.rollback(states)
        return out, cache.report().graph.partition("; the last was not: ")[2]

    with kvhf.attach(model, **REGIONS, fused=True) as cache, torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:], past_key_values=cache, position_ids=positions)
        cache.crop(-1)
        want = last()[0].logits
        embeddings = model.model.embed_tokens(ids[:, 60:])
        for how, why in (
            (dict(position_ids=None), "position_ids: got none"),
            (dict(input_ids=None, inputs_embeds=embeddings), "input_ids: got none"),
            (dict(output_hidden_states=True), "output_hidden_states: got a value"),
        ):
            out, told = last(**how)
            torch.testing.assert_close(out.logits, want, rtol=1e-4, atol=1e-4)
            assert told.startswith(why)
        assert out.hidden_states is not None


def test_under_inference_mode(graphs):
    model = model_of("qwen2")
    with torch.inference_mode():
        (mine, report), (theirs, _) = both(model, prompt(1, 60), 12)
    assert torch.equal(mine, theirs)
    assert report.graph == said(11 - EAGER, 11)
    assert not any(weight.is_inference() for weight in model.parameters())


def test_more_rows_than_kernels_take_run_as_ever(graphs):
    (mine, report), (theirs, _) = both(model_of(), prompt(17, 60), 6)
    assert torch.equal(mine, theirs)
    assert report.graph.endswith("batch: got 17 sequences, allowed is up to 16")
    assert graphs.made == 0


def test_a_module_that_is_put_in_and_taken_out_is_noticed(graphs):
    """A LoRA adapter does this."""

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    answers = []
    for how in (dict(fused=True), dict(token_graph=False)):
        model = model_of()
        mlp = model.model.layers[0].mlp
        own, other = mlp.up_proj, Twice(64, 96, bias=False)
        other.weight = own.weight
        with kvhf.attach(model, **REGIONS, **how) as cache:
            given = dict(past_key_values=cache, do_sample=False, max_new_tokens=8)
            some, told = model.generate(**prompt(1, 60), **given), []
            for module in (other, own):
                mlp.up_proj = module
                some = model.generate(some, **given)
                told.append(cache.report().graph)
            answers.append(some)
    assert torch.equal(*answers)
    assert graphs.made >= 2


@pytest.mark.parametrize("where", ["op by op", "in a graph"])
def test_kernels_that_fail_are_the_callers_error_and_undone(graphs, monkeypatch, where):
    import kvindex_cuda.triton as layers

    model = model_of()
    with kvhf.attach(model, **REGIONS, fused=True) as cache, torch.no_grad():
        how = dict(past_key_values=cache, do_sample=False)
        some = model.generate(
            **prompt(1, 60), max_new_tokens=2 if where == "op by op" else 3, **how
        )
        length = cache.get_seq_length()
        want = generated(model_of(), dict(input_ids=some), 8)[0]
        with monkeypatch.context() as patch:

            def fail(*_, **__):
                raise ValueError("got no shared memory")

            patch.setattr(layers, "swiglu_linear", fail)
            with pytest.raises(ValueError, match="got no shared memory"):
                model.generate(some, max_new_tokens=2, **how)
        assert cache.get_seq_length() == length
        assert torch.equal(model.generate(some, max_new_tokens=8, **how)[:, some.shape[1] :], want)
