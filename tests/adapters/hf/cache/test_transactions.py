"""A call of the model, or of `generate`, that raises leaves the cache as it was before the call."""

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.graph import run_ahead
from tests.adapters.hf.cache.test_cache import LINEAR
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)
GREEDY = dict(do_sample=False, max_new_tokens=8)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


@pytest.fixture
def graphs():
    """Count graphs and replays."""
    with recorded(WholeGraph) as counting:
        yield counting


def raising(error):
    """Make a function that raises `error` for any arguments."""

    def fail(*_, **__):
        raise error

    return fail


def fails_in_the_head(model, error, *args, **inputs):
    """Make a call of the model that raises after its decoder has returned."""
    handle = model.get_output_embeddings().register_forward_pre_hook(raising(error))
    with pytest.raises(error), torch.no_grad():
        model(*args, **inputs)
    handle.remove()


class FailsAt(LogitsProcessor):
    """Raises when `length` ids have been read."""

    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            raise self.error
        return scores


class StopsAfter(BaseStreamer):
    """Raises at the token after the first `count`."""

    def __init__(self, count, error):
        self.left, self.error = count, error

    def put(self, value):
        self.left -= 1
        if self.left < -1:  # the first call gets the prompt
            raise self.error

    def end(self):
        pass


# The model's call


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("dense_layers", [(), (0,)])
def test_a_head_that_fails_leaves_no_token(model, error, dense_layers):
    inputs = prompt(1, 40)
    expected = dense_steps(model, inputs, [30] + [1] * 10)
    with kvhf.attach(model, dense_layers=dense_layers, **REGIONS) as cache:
        fails_in_the_head(model, error, **prompt(2, 9), past_key_values=cache)
        assert cache.get_seq_length() == 0
        logits = steps(model, cache, {n: t[:, :30] for n, t in inputs.items()}, [30])
        cache.ids = inputs["input_ids"][0, :30]
        before = cache.report()
        ids = inputs["input_ids"][:, 30:31]
        fails_in_the_head(model, error, input_ids=ids, past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [30, 30]
        assert cache.report() == before
        assert torch.equal(cache.ids, inputs["input_ids"][0, :30])
        for step in range(30, 40):
            with torch.no_grad():
                ids = inputs["input_ids"][:, step, None]
                logits.append(model(input_ids=ids, past_key_values=cache).logits)
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)


def test_a_head_that_fails_after_a_replay_leaves_no_token(graphs):
    """This holds also if the window is updated in this step. Each token is computed twice."""
    model, inputs = build("qwen3", eos_token_id=None), prompt(1, 80)
    sizes = dict(k=500, sink=4, local_window=8, update_every=12, dense_below=0)
    expected = dense_steps(model, inputs, [40] + [1] * 40)
    with kvhf.attach(model, index=Captured, **sizes) as cache:
        logits = steps(model, cache, {n: t[:, :40] for n, t in inputs.items()}, [40])
        for place in range(40, 80):
            given = {"input_ids": inputs["input_ids"][:, place, None]}
            given["position_ids"] = torch.tensor([[place]])
            replays, cache.ids = graphs.replays, inputs["input_ids"][0, :place]
            if place % 2:
                fails_in_the_head(model, MemoryError, **given, past_key_values=cache)
                assert {layer.get_seq_length() for layer in cache.layers} == {place}
                assert len(cache.ids) == place
            with torch.no_grad():
                logits.append(model(**given, past_key_values=cache).logits)
            assert cache.ids is None
        assert graphs.replays > replays >= 10
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)


def test_linear_attention_is_undone_where_the_cache_was_empty():
    model = build("qwen3_next", **LINEAR)
    inputs = prompt(1, 30)
    with kvhf.attach(model, **REGIONS) as cache:
        expected = steps(model, cache, inputs, [20] + [1] * 10)
        cache.reset()
        fails_in_the_head(model, MemoryError, **inputs, past_key_values=cache)
        again = steps(model, cache, inputs, [20] + [1] * 10)
        assert torch.allclose(torch.cat(again, 1), torch.cat(expected, 1), atol=1e-5)
        fails_in_the_head(
            model, MemoryError, input_ids=inputs["input_ids"][:, :1], past_key_values=cache
        )
        with pytest.raises(RuntimeError, match="`crop` was called"):
            cache.crop(-1)  # has no effect, so the cache stays unusable
        with pytest.raises(RuntimeError, match="could not be undone; call reset"):
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache)


def test_linear_attention_goes_on_after_a_call_that_raised_before_its_first_step():
    model, ids = build("qwen3_next", **LINEAR), prompt(1, 30)["input_ids"]
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        expected = model(input_ids=ids, past_key_values=cache).logits[:, 20:]
        cache.reset()
        model(input_ids=ids[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="misspelled"):
            model.generate(ids, past_key_values=cache, misspelled=1)
        options = dict(cache=cache, used="continue", misspelled=1, chunk=20)
        with pytest.raises(ValueError, match="misspelled"):
            kvhf.generate(model, Words(), ids[0, 20:], **options)
        logits = model(input_ids=ids[:, 20:], past_key_values=cache).logits
    assert torch.allclose(logits, expected, atol=1e-4)


# generate


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("dense_layers", [(), (0,)])
@pytest.mark.parametrize("past", [0, 20])
def test_generate_that_fails_can_be_called_again(model, error, dense_layers, past):
    """The error comes from a logits processor, at the first or a later token, or the streamer."""
    inputs = prompt(1, 40)
    expected = model.generate(**inputs, **GREEDY)
    first = {name: tensor[:, :past] for name, tensor in inputs.items()}
    failing = [
        {"logits_processor": [FailsAt(40, error)]},
        {"logits_processor": [FailsAt(44, error)]},
        {"streamer": StopsAfter(5, error)},
    ]
    with kvhf.attach(model, dense_layers=dense_layers, **REGIONS) as cache:
        if past:
            steps(model, cache, first, [past])
        before = cache.report()
        for options in failing:
            with pytest.raises(error):
                model.generate(**inputs, past_key_values=cache, **GREEDY, **options)
            assert {layer.get_seq_length() for layer in cache.layers} == {past}
            assert cache.report() == before
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), expected)


def test_beams_that_fail_can_be_called_again(model):
    inputs, beams = prompt(2, 40, padded=True), dict(**GREEDY, num_beams=3)
    expected = model.generate(**inputs, **beams)
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(ZeroDivisionError):
            model.generate(
                **inputs,
                past_key_values=cache,
                logits_processor=[FailsAt(45, ZeroDivisionError)],
                **beams,
            )
        assert cache.get_seq_length() == 0
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **beams), expected)


def test_answers_ahead_of_the_host_that_fail_can_be_called_again(graphs, monkeypatch):
    """The streamer raises an error when graphs of later steps are already launched."""
    monkeypatch.setattr(run_ahead, "RUNS_AHEAD", {"cpu"})
    model, ids = build("llama", num_hidden_layers=2, eos_token_id=None), prompt(1, 40)["input_ids"]
    sizes = dict(index=Captured, k=500, sink=4, local_window=8, update_every=12, dense_below=0)
    options = dict(max_new_tokens=24)
    with kvhf.attach(model, **sizes) as cache:
        expected = kvhf.generate(model, Words(), ids[0], cache=cache, **options).answer_ids
        cache.reset()
        kvhf.read(model, Words(), ids[0, :20], cache=cache)
        failing = StopsAfter(12, ZeroDivisionError)
        rest = dict(cache=cache, used="continue", **options)
        with pytest.raises(ZeroDivisionError):
            kvhf.generate(model, Words(), ids[0, 20:], streamer=failing, **rest)
        assert (cache.get_seq_length(), len(cache.ids)) == (20, 20)
        again = kvhf.generate(model, Words(), ids[0, 20:], **rest).answer_ids
    assert torch.equal(again, expected)
    assert graphs.replays
