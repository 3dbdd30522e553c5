"""Models whose layers move rows into their indexes concurrently with their steps."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from tests.adapters.hf.cache.test_cache import fails_in_the_last_layer
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.support.beside import Beside

REGIONS = dict(k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2, eos_token_id=None)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_beams=3, num_return_sequences=2),
        dict(prompt_lookup_num_tokens=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_is_full_attentions(model, options, padded):
    if padded and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers looks up for one prompt alone")
    inputs = prompt(3 if padded else 1, 50, padded=padded)
    options = dict(max_new_tokens=40, do_sample=False, **options)
    expected = model.generate(**inputs, **options)
    with kvhf.attach(model, index=Beside, **REGIONS) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
    assert torch.equal(out, expected)


def test_steps_that_fail_half_way_are_undone_whatever_is_under_way(model):
    inputs = prompt(1, 70)
    expected = dense_steps(model, inputs, [30] + [1] * 40)
    with kvhf.attach(model, index=Beside, **REGIONS) as cache:
        logits = steps(model, cache, {n: t[:, :30] for n, t in inputs.items()}, [30])
        for step in range(30, 70):
            ids = inputs["input_ids"][:, step, None]
            fails_in_the_last_layer(model, KeyboardInterrupt, past_key_values=cache, input_ids=ids)
            assert cache.lengths() == [step] * 2
            with torch.no_grad():
                logits.append(model(input_ids=ids, past_key_values=cache).logits)
        assert all(len(index) > 50 for index in cache.indexes())
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)


def test_layers_take_turns_and_the_answer_is_full_attentions(model):
    """One layer at a time begins to move rows."""
    begun = []

    def factory(**geometry):
        index, lengths = Beside(**geometry), []
        begin = index.start_append

        def noted(*args, **options):
            lengths.append(cache.get_seq_length())
            return begin(*args, **options)

        begun.append(lengths)
        index.start_append = noted
        return index

    inputs = prompt(1, 80)
    expected = dense_steps(model, inputs, [40] + [1] * 40)
    with kvhf.attach(model, **{**REGIONS, "index": factory}) as cache:
        logits = steps(model, cache, inputs, [40] + [1] * 40)
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)
    layers = begun[-2:]  # earlier layers only check arguments
    first, second = ({length % 8 for length in lengths if length > 48} for lengths in layers)
    assert len(first) == len(second) == 1
    assert abs(first.pop() - second.pop()) == 4
