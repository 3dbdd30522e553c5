"""Calls of `attach` that are written wrongly raise errors that name the remedy."""

import copy

import pytest

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build, prompt


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


def test_without_a_with_statement_the_error_shows_one(model):
    match = "get_seq_length: got a context manager .* write `with attach.model, …. as cache:`"
    with pytest.raises(AttributeError, match=match):
        kvhf.attach(model).get_seq_length()
    with pytest.raises(AttributeError, match=r"write `with attach.model, …. as cache:`"):
        model.generate(**prompt(1, 8), past_key_values=kvhf.attach(model), max_new_tokens=2)
    with pytest.raises(AttributeError, match=r"write `with attach.model, …. as cache:`"):
        model(**prompt(1, 8), past_key_values=kvhf.attach(model))
    with pytest.raises(AttributeError, match=r"write `with attach_batch.model, …. as batching:`"):
        kvhf.attach_batch(model).report()


def test_python_may_look_for_its_own_attributes(model):
    context = kvhf.attach(model, index="exact")
    assert not hasattr(copy.copy(context), "__len__")
    with context as cache:
        assert isinstance(cache, kvhf.IndexCache)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"preset": "fast"},
            r"attach: got the argument 'preset', which is an option of the index; pass "
            r"index=\"pariskv:preset=fast\" or index_options=\{'preset': 'fast'\}$",
        ),
        (
            {"index": "exact:group=max_share+reuse", "row_codec": "int8"},
            r'pass index="exact:group=max_share:row_codec=int8\+reuse" or',
        ),
        (
            {"index": "sentencekv", "punctuation": [3]},
            r"pass index_options=\{'punctuation': \[3\]\}$",
        ),
        ({"local_windows": 3}, "attach: argument: got 'local_windows'.*mean 'local_window'"),
        ({"head_dim": 3}, "attach: argument: got 'head_dim', allowed"),
        ({"K": 3}, "attach: got the argument 'K'; did you mean 'k'?"),
    ],
)
def test_unknown_arguments(model, given, match):
    with pytest.raises(TypeError, match=match):
        kvhf.attach(model, **given)


def test_unknown_arguments_with_a_factory_and_with_batches(model):
    with pytest.raises(TypeError, match="attach: argument: got 'preset', allowed"):
        kvhf.attach(model, index=lambda **given: None, preset="fast")
    with pytest.raises(TypeError, match="attach_batch: got the argument 'preset'"):
        kvhf.attach_batch(model, preset="fast")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"preset": "fast"},
            'generate: got the argument .preset.*pass index="pariskv:preset=fast"',
        ),
        (
            {"dense_below": 0},
            r"generate: got the argument .*pass attach_options=\{'dense_below': 0\}",
        ),
        ({"K": 10}, "generate: got the argument 'K'; did you mean 'k'?"),
        ({"Max_New_Tokens": 10}, "did you mean 'max_new_tokens'?"),
        ({"system_prompt": "9"}, "did you mean 'system', an argument of Chat.*role 'system' into"),
    ],
)
def test_options_that_generate_does_not_take(model, given, match):
    with pytest.raises(TypeError, match=match):
        kvhf.generate(model, None, prompt(1, 8)["input_ids"][0], **given)
