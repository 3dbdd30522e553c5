"""A decode step of a transformers model as one graph gives the same tokens as without.

On a CPU, graphs are recorded functions (`tests/cuda/graphs.py`). A few tests emulate kernels; the
others use an index in plain torch.
"""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaModel

import kvindex_adapters.hf as kvhf
from kvindex.core import graphs as capturing
from kvindex.layer import AttentionLayer
from kvindex.layer.updates import Updates
from kvindex_adapters.hf.model.cache_argument import CACHE
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.hf.model.test_rotary_length import LONGROPE
from tests.adapters.tiny import build, prompt
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.helpers import mostly_slow, slow

SIZES = dict(sink=4, local_window=8, update_every=24, dense_below=0)
REGIONS = dict(index=Captured, k=500, **SIZES)
ASKED = dict(token_graph=True)
FULL = dict(layer_types=["full_attention"] * 2)
EAGER = 3
"""Number of steps without a replay: one ends the prompt, and two are traced and compared."""


@pytest.fixture
def graphs():
    """Count graphs and replays."""
    with recorded(WholeGraph) as counting:
        yield counting


def model_of(family="llama", **options):
    sizes = {} if family.startswith("inkling") else {"num_hidden_layers": 2}
    return build(family, **{**sizes, "eos_token_id": None, **options})


def generated(model, inputs, count, *, attach=None, **options):
    """Return tokens int64 `[B, count]` and the report."""
    options = {"do_sample": False, "max_new_tokens": count, **options}
    with kvhf.attach(model, **{**REGIONS, **(attach or {})}) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        return out[:, inputs["input_ids"].shape[1] :], cache.report()


def both(model, inputs, count, *, attach=None, **options):
    """Return tokens and reports by default, with graphs, and without."""
    return [
        generated(model, inputs, count, attach={**(attach or {}), "token_graph": on}, **options)
        for on in (None, False)
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        slow("qwen2", FULL),
        ("qwen3", FULL),
        slow("mistral", {}),
        slow("phi3", {}),
        slow("olmo2", {}),
        slow("granite", {}),
        slow("glm4", {}),
        slow("gpt_neox", {}),
        ("falcon_h1", {}),
        slow("mixtral", {}),
        slow("qwen3_moe", {}),
        ("deepseek_v3", {}),
    ],
)
def test_tokens_are_those_without_graphs(graphs, family, options):
    model = model_of(family, **options)
    (mine, report), (theirs, plain) = both(model, prompt(1, 60), 20)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert (graphs.made, graphs.replays) == (1, 19 - EAGER)


def test_a_replay_crosses_the_length_at_which_frequencies_change(graphs):
    """With `longrope`, the device chooses between two sets of frequencies, also in a graph."""
    rope = dict(LONGROPE, original_max_position_embeddings=70)
    model = model_of(rope_parameters=rope)
    (mine, report), (theirs, plain) = both(model, prompt(1, 60), 20)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert (graphs.made, graphs.replays) == (1, 19 - EAGER)
    rope["long_factor"] = rope["short_factor"]
    assert not torch.equal(mine, generated(model_of(rope_parameters=rope), prompt(1, 60), 20)[0])


def test_tokens_that_are_all_read_again_make_another_graph(graphs):
    rope = dict(LONGROPE, original_max_position_embeddings=70)
    model = model_of("phi3", rope_parameters=rope, original_max_position_embeddings=70)
    (mine, report), (theirs, plain) = both(model, prompt(1, 60), 24)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert graphs.made == 2
    assert graphs.replays == 10 - EAGER + 12 - EAGER


def test_updates_of_the_window_make_another_graph(graphs):
    """This holds for an index in plain torch; with kernels one graph suffices.

    `test_token_graph_kernels.py` tests that.
    """
    often = dict(update_every=12)
    (mine, report), (theirs, plain) = both(model_of(), prompt(1, 60), 46, attach=often)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert graphs.made == 4
    assert report.graph == f"{graphs.replays} of 45 tokens were replays"


@pytest.mark.parametrize("sampled", [slow(False), True])
def test_batches_with_padding(graphs, sampled):
    """Sequences that have ended get padding tokens, which the cache treats as real tokens."""
    inputs, options = prompt(3, 60, padded=True), {}
    model = model_of()
    if sampled:
        options = dict(do_sample=True, temperature=0.7, top_k=20)
    torch.manual_seed(0)
    end = int(generated(model, inputs, 20, **options)[0][1, 8])
    answers = []
    for token_graph in (None, False):
        torch.manual_seed(0)
        how = {**options, "eos_token_id": end, "pad_token_id": 0}
        answers.append(generated(model, inputs, 20, attach={"token_graph": token_graph}, **how)[0])
    assert torch.equal(*answers)
    assert (answers[0] == end).any()
    assert graphs.replays > 8


def test_a_mask_that_is_not_of_the_tokens_before_is_refused_as_ever(graphs):
    model, inputs = model_of(), prompt(2, 60, padded=True)
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=10, do_sample=False)
        token, mask = out[:, -1:], torch.ones_like(out)
        positions = torch.full((2, 1), 69)
        length = cache.get_seq_length()
        assert graphs.replays
        for wrong in (mask, None):
            with pytest.raises(kvhf.UnsupportedError, match="attention_mask"):
                model(token, attention_mask=wrong, position_ids=positions, past_key_values=cache)
        assert cache.get_seq_length() == length
        mask[:, :60] = inputs["attention_mask"]
        model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
        assert cache.get_seq_length() == length + 1


def life(model, token_graph):
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
    with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache, torch.no_grad():
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
    for mine, theirs in zip(life(model, None), life(model, False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert graphs.replays > 50


def test_beams(graphs):
    inputs, how = prompt(2, 40, padded=True), dict(num_beams=3)
    (mine, report), (theirs, _) = both(model_of(), inputs, 16, **how)
    assert torch.equal(mine, theirs)
    assert report.graph == f"{15 - EAGER} of 15 tokens were replays"


class Moving(Captured):
    def prepare_replay(self, resident, *, k):
        self._reads = None
        return super().prepare_replay(resident, k=k)


def test_what_moves_with_each_token_is_not_captured_for_ever(graphs):
    (mine, report), (theirs, _) = both(model_of(), prompt(1, 60), 16, attach={"index": Moving})
    assert torch.equal(mine, theirs)
    assert "memory that it reads moved 3 times within 8 tokens" in report.graph
    assert graphs.made == 3


def test_answers_that_follow_or_branch_in_one_call(graphs):
    model, prompts = model_of(), [prompt(1, length)["input_ids"][0] for length in (60, 9, 8)]
    answers = []
    for token_graph in (None, False):
        with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache:
            for ids, used in zip(prompts, ("refuse", "branch", "continue"), strict=True):
                how = dict(cache=cache, used=used, max_new_tokens=12)
                answers.append(kvhf.generate(model, Words(), ids, **how))
            assert len(cache.ids) == 60 + 8 + 2 * 12
    for mine, theirs in zip(answers[:3], answers[3:], strict=True):
        assert torch.equal(mine.answer_ids, theirs.answer_ids)
    assert graphs.replays > 20
    alone = kvhf.generate(
        *(model, Words(), prompts[0]),
        **dict(index=Captured, k=500, max_new_tokens=12),
        attach_options=SIZES,
    )
    assert alone.report.graph == f"{11 - EAGER} of 11 tokens were replays"


def test_two_models_in_turn(graphs):
    models, want = [model_of(), model_of("qwen3", **FULL)], []
    want = [generated(one, prompt(1, 60), 16)[0] for one in models]
    made = [[], []]
    with (
        kvhf.attach(models[0], **REGIONS) as first,
        kvhf.attach(models[1], **REGIONS) as second,
        torch.no_grad(),
    ):
        ids = [prompt(1, 60)["input_ids"]] * 2
        for step in range(16):
            for number, cache in enumerate((first, second)):
                positions = torch.arange(60)[None] if step == 0 else torch.tensor([[59 + step]])
                how = dict(past_key_values=cache, position_ids=positions)
                ids[number] = models[number](ids[number], **how).logits[:, -1:].argmax(-1)
                made[number].append(ids[number])
    for tokens, answer in zip(made, want, strict=True):
        assert torch.equal(torch.cat(tokens, 1), answer)


@pytest.mark.parametrize("where", mostly_slow(["a replay", "a count", "an update"], "a replay"))
def test_an_exception_between_tokens_is_undone(graphs, monkeypatch, where):
    model = model_of()
    want = generated(model, prompt(1, 60), 60, attach={"token_graph": False})[0]

    def fail(*_):
        raise KeyboardInterrupt

    class Layers(AttentionLayer):
        counted = 0

        def count_replay(self):
            Layers.counted += 1
            super().count_replay()
            if where == "a count" and Layers.counted == 13:
                fail()

    with kvhf.attach(model, **REGIONS, layer=Layers) as cache, torch.no_grad():
        ids, made, failed = prompt(1, 60)["input_ids"], [], 0
        positions = torch.arange(60)[None]
        while len(made) < 60:
            with monkeypatch.context() as patch:
                if not failed and where == "a replay" and graphs.replays == 6:
                    patch.setattr(graphs, "replay", fail)
                if not failed and where == "an update" and graphs.replays == 6:
                    patch.setattr(Updates, "update_if_due", fail)
                try:
                    out = model(ids, past_key_values=cache, position_ids=positions)
                except KeyboardInterrupt:
                    failed += 1
                    assert cache.lengths() == [60 + len(made) - 1] * 2
                    continue
            ids, positions = out.logits[:, -1:].argmax(-1), torch.tensor([[60 + len(made)]])
            made.append(ids)
    assert failed == (where != "an update" or graphs.replays <= 6)
    assert torch.equal(torch.cat(made, 1), want)


CHANGES = {
    "weights that move": lambda model: model.load_state_dict(
        {name: weight + 0.01 for name, weight in model.state_dict().items()}, assign=True
    ),
    "a dtype and back": lambda model: model.double().float(),
    "a module": lambda model: setattr(
        model.model.layers[0], "mlp", torch.nn.Sequential(model.model.layers[0].mlp)
    ),
    "a number": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 1),
}


@pytest.mark.parametrize("change", mostly_slow(CHANGES, "weights that move", "a number"))
def test_a_model_that_changes_is_captured_anew(graphs, change):
    answers = []
    for token_graph in (None, False):
        model, inputs = model_of(), prompt(1, 60)
        with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache:
            how = dict(past_key_values=cache, do_sample=False)
            some = model.generate(**inputs, max_new_tokens=9, **how)
            CHANGES[change](model)
            answers.append(model.generate(some, max_new_tokens=9, **how))
    assert torch.equal(*answers)
    assert graphs.made == 2


def test_a_hook_is_called_for_each_token(graphs):
    model, seen = model_of(), []
    with kvhf.attach(model, **REGIONS) as cache:
        how = dict(past_key_values=cache, do_sample=False)
        some = model.generate(**prompt(1, 60), max_new_tokens=9, **how)
        model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        model.generate(some, max_new_tokens=9, **how)
        assert "LlamaDecoderLayer: got a hook" in cache.report().graph
    assert len(seen) == 9


def test_hidden_states_are_not_overwritten(graphs):
    model, inputs = model_of(), prompt(1, 60)
    how = dict(output_hidden_states=True, return_dict_in_generate=True, do_sample=False)
    states = []
    for token_graph in (None, False):
        with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache:
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, **how)
            assert out.past_key_values is cache
            states.append([part for token in out.hidden_states for part in token])
    for mine, theirs in zip(*states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_stop_token_ends_the_answer(graphs):
    model = model_of()
    whole = generated(model, prompt(1, 60), 20)[0][0].tolist()
    end = whole[9]
    cut, report = generated(model, prompt(1, 60), 20, eos_token_id=end)
    assert cut[0].tolist() == whole[: whole.index(end) + 1]
    assert report.tokens == 60 + len(cut[0]) - 1


ROPE = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)


@pytest.mark.parametrize(
    ("family", "options", "attach", "why"),
    [
        slow("inkling_text", {}, {}, "layer 0: its cache layer makes"),
        ("llama", {}, dict(dense_layers=(1,)), "layer 1: its cache layer makes"),
        ("llama", dict(rope_parameters=ROPE), {}, "_local_scalar_dense.default: the host reads"),
        slow(
            "mixtral",
            dict(experts_implementation="eager"),
            {},
            "the host reads what the device has",
        ),
        ("llama", {}, dict(index="exact"), "layer 0: index: got Exact, which has no decode step"),
        ("llama", {}, dict(dense_below=500), "layer 0: tokens: got 78, too few"),
    ],
)
def test_what_is_no_graph_runs_as_ever_and_says_why(graphs, family, options, attach, why):
    model = model_of(family, **options)
    (mine, report), (theirs, plain) = both(model, prompt(1, 60), 20, attach=attach)
    assert torch.equal(mine, theirs)
    assert report.graph.startswith("0 of 19 tokens were replays; the last was not: ")
    assert why in report.graph
    assert report.graph in str(report)
    assert plain.graph is None
    assert graphs.made == 0


def test_calls_that_are_no_graph_say_why(graphs):
    model, ids = model_of(), torch.tensor([[5]])

    def said(**how):
        model(ids, past_key_values=cache, **how)
        return cache.report().graph

    positions = dict(position_ids=torch.tensor([[60]]))
    with kvhf.attach(model, **REGIONS) as cache:
        with torch.no_grad():
            assert "tokens: got 0, allowed is at least 1" in said()
            model(prompt(1, 60)["input_ids"], past_key_values=cache)
            for _ in range(5):
                assert "0 of" in said()
            assert "got 64, at the next token 65" in said()  # the caller passed other positions
            assert "compared with the next" in said(**positions)
        assert "gradients: got them enabled" in said(**positions)
        with torch.no_grad(), torch.autocast("cpu", enabled=True):
            assert "autocast" in said(**positions)


def test_without_a_device_that_captures_nothing_changes():
    (mine, report), (theirs, _) = both(model_of(), prompt(1, 60), 6)
    asked, asked_report = generated(model_of(), prompt(1, 60), 6, attach=ASKED)
    assert torch.equal(mine, theirs)
    assert torch.equal(asked, theirs)
    assert report.graph is None
    assert asked_report.graph.endswith("device: got cpu, allowed is cuda")


def test_without_graphs_of_layers_it_has_to_be_asked_for(graphs):
    answers = [
        generated(model_of(), prompt(1, 60), 12, attach={"graphs": False, **more})
        for more in ({}, ASKED)
    ]
    assert torch.equal(answers[0][0], answers[1][0])
    assert answers[0][1].graph is None
    assert graphs.made == 1


@pytest.mark.parametrize("error", [RuntimeError, slow(TypeError)])
def test_a_driver_that_refuses_is_said_once_and_tokens_go_on(graphs, monkeypatch, recwarn, error):
    def refuse(*_):
        raise error("out of graphs")

    with monkeypatch.context() as patch:
        patch.setitem(capturing.GRAPHS, "cpu", refuse)
        (mine, report), (theirs, _) = both(model_of(), prompt(1, 60), 12)
        assert not [one for one in recwarn.list if one.category is not FutureWarning]
        if error is RuntimeError:
            with pytest.warns(UserWarning, match=r"capturing it failed \(out of graphs\)") as said:
                asked = generated(model_of(), prompt(1, 60), 12, attach=ASKED)[0]
            assert torch.equal(asked, theirs)
            assert len(said) == 1
    assert torch.equal(mine, theirs)
    assert "out of graphs" in report.graph


def of_class(monkeypatch, change):
    """Make the forward pass of all llamas call `change` on its arguments first."""
    forward = LlamaModel.forward

    def changed(self, *given, **named):
        change(named)
        return forward(self, *given, **named)

    monkeypatch.setattr(LlamaModel, "forward", changed)


def test_a_token_that_fails_while_it_is_compared_runs_as_ever(graphs, monkeypatch):
    def fail(named):
        if named[CACHE].attend_override is not None:
            raise ValueError("got a trace")

    of_class(monkeypatch, fail)
    (mine, report), (theirs, plain) = both(model_of(), prompt(1, 60), 12)
    assert torch.equal(mine, theirs)
    assert "ValueError while it was compared: got a trace" in report.graph
    assert replace(report, graph=None) == plain


def test_a_mask_that_is_read_beside_attention_is_no_graph(graphs, monkeypatch):
    """The mask is one of padding, and a graph's forward pass gets none."""

    def shift(named):
        if (mask := named.get("attention_mask")) is not None:
            padded = (mask == 0).sum(1, keepdim=True)
            named["position_ids"] = named["position_ids"] * (1 + padded // 5)

    of_class(monkeypatch, shift)
    (mine, report), (theirs, plain) = both(model_of(), prompt(3, 60, padded=True), 12)
    assert torch.equal(mine, theirs)
    assert "attention_mask: got one that the model reads outside of attention" in report.graph
    assert replace(report, graph=None) == plain
    assert graphs.made == 0


def test_padding_beside_linear_attention_has_to_be_asked_for(graphs):
    model, inputs = model_of("falcon_h1"), prompt(2, 60, padded=True)
    (mine, report), (theirs, _) = both(model, inputs, 12)
    assert torch.equal(mine, theirs)
    assert "padding: got some together with linear attention" in report.graph
    assert graphs.made == 0
    assert torch.equal(generated(model, inputs, 12, attach=ASKED)[0], theirs)
    assert graphs.made == 1


@pytest.mark.parametrize(
    "seldom", [slow(lambda n: n % 100 == 99), slow(lambda n: n // 64 > 1), lambda n: n > 70]
)
def test_a_branch_that_most_tokens_take_alike_is_no_graph(graphs, monkeypatch, seldom):
    def branch(named):
        if seldom(named[CACHE].get_seq_length() + 1):
            named["position_ids"] = named["position_ids"] * 0

    of_class(monkeypatch, branch)
    (mine, report), (theirs, _) = both(model_of(), prompt(1, 60), 50)
    assert torch.equal(mine, theirs)
    assert "the host asks for the number of tokens" in report.graph
    assert "(test_token_graph.py:" in report.graph
    assert graphs.made == 0


def test_a_forward_that_was_put_in_is_called_unless_graphs_are_asked_for(graphs):
    model, seen = model_of(), []
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda *given: seen.append(1) or own(*given)
    report = generated(model, prompt(1, 60), 12)[1]
    assert len(seen) == 12
    assert "LlamaMLP: got a forward of its own, which no replay would call" in report.graph
    generated(model, prompt(1, 60), 12, attach=ASKED)
    assert graphs.made == 1


@pytest.mark.slow
def test_a_compiled_module_is_no_graph(graphs):
    model = model_of()
    model.model.layers[0].mlp.compile(backend="eager")
    (mine, report), (theirs, _) = both(model, prompt(1, 60), 12)
    assert torch.equal(mine, theirs)
    assert graphs.made == 0
    assert "compiled" in report.graph or "compared" in report.graph


def test_a_cache_that_nobody_holds_is_gone_at_once(graphs):
    model = model_of()
    gc.disable()
    try:
        with kvhf.attach(model, **REGIONS) as cache:
            how = dict(past_key_values=cache, max_new_tokens=12, do_sample=False)
            model.generate(**prompt(1, 60), **how)
            references = [weakref.ref(made) for made in [cache, *cache.indexes()]]
        del cache, how
        assert graphs.replays
        assert [name() for name in references] == [None] * 3
    finally:
        gc.enable()


def test_a_bad_option_is_refused():
    with (
        pytest.raises(ValueError, match="token_graph: got 1, allowed is True or False"),
        kvhf.attach(model_of(), token_graph=1),
    ):
        pass


def test_replays_go_in_and_out_of_inference_mode(graphs):
    model, inputs = model_of(), prompt(2, 60)

    def logits(modes, token_graph):
        outputs, start, modes = [], 0, itertools.cycle(modes)
        with kvhf.attach(model, **REGIONS, token_graph=token_graph) as cache:
            for size in [40] + [1] * 20:
                with next(modes)():
                    places = torch.arange(start, start + size).expand(2, -1)
                    some = inputs["input_ids"][:, start : start + size]
                    given = dict(input_ids=some, position_ids=places, past_key_values=cache)
                    outputs.append(model(**given).logits.clone())
                start += size
        return torch.cat(outputs, 1)

    inside, outside = torch.inference_mode, torch.no_grad
    want = logits([outside], False)
    for modes in ([inside, outside], [*[outside] * 7, *[inside] * 4]):
        torch.testing.assert_close(logits(modes, None), want, rtol=1e-4, atol=1e-4)
    assert graphs.replays
