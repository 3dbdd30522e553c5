"""Tokens are sampled with their probabilities, and repeatedly from the same seed."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from kvindex_adapters.decoder import Decoder, Sampling, sampling_like
from kvindex_adapters.decoder.sampling import Sampler, keep_top_k, keep_top_p
from tests.adapters.decoder.families import ids_of, model_of
from tests.support.helpers import mostly_slow

WARM = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
FEW = dict(
    k=10,
    max_new_tokens=30,
    attach_options=dict(sink=4, local_window=8, update_every=8, dense_below=0),
)


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("llama"))


@pytest.mark.parametrize("index", mostly_slow([None, "pariskv"], None))
def test_a_seed_gives_the_same_tokens(decoder, index):
    ids, few = [ids_of(60), ids_of(40)], FEW if index else {**FEW, "attach_options": None}
    made = [
        [answer.answer_ids.tolist() for answer in decoder.generate(ids, index=index, **given)]
        for given in (
            dict(sampling=WARM, **few),
            dict(sampling=WARM, **few),
            dict(sampling=Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=4), **few),
            few,
        )
    ]
    assert made[0] == made[1]
    assert made[0] not in made[2:]
    alone = decoder.generate(ids[0], index=index, sampling=WARM, **few)
    assert len(alone.answer_ids) == 30


def test_the_callers_generator_is_left_alone(decoder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    decoder.generate(ids_of(30), sampling=WARM, **FEW)
    assert torch.equal(torch.rand(3), expected)


def test_the_likeliest_alone_is_greedy(decoder):
    greedy = decoder.generate(ids_of(60), **FEW)
    for sampling in (Sampling(temperature=2.0, top_k=1), Sampling(temperature=2.0, top_p=1e-6)):
        drawn = decoder.generate(ids_of(60), sampling=sampling, **FEW)
        assert torch.equal(drawn.answer_ids, greedy.answer_ids)


def test_frequencies_are_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, float("-inf")])
    sampler = Sampler(Sampling(temperature=2.0), torch.device("cpu"))
    drawn = sampler.choose(logits.expand(200_000, -1))
    counts = torch.bincount(drawn, minlength=5) / len(drawn)
    torch.testing.assert_close(counts, (logits / 2).softmax(0), atol=5e-3, rtol=0)
    assert counts[4] == 0


@pytest.mark.parametrize("share", [0.01, 0.3, 0.8, 0.95, 1])
def test_tokens_are_kept_as_transformers_keeps_them(share):
    scores = torch.randn(4, 101, generator=torch.Generator().manual_seed(0)) * 3
    ours, theirs = keep_top_p(scores, share), TopPLogitsWarper(float(share))(None, scores)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    for count in (1, 7, 500):
        kept = keep_top_k(scores, count)
        assert torch.equal(kept, TopKLogitsWarper(count)(None, scores))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(temperature=-1.0), "temperature: got -1.0, allowed is a positive"),
        (dict(temperature=float("nan")), "temperature: got nan"),
        (dict(temperature=1.0, top_k=0), "top_k: got 0, allowed is an integer of at least 1"),
        (dict(temperature=1.0, top_p=1.5), r"top_p: got 1.5, allowed is a number in \(0, 1\]"),
        (dict(top_p=0.5), "top_p: got 0.5 at temperature 0"),
        (dict(top_k=5), "top_k: got 5 at temperature 0"),
        (dict(seed=-1), "seed: got -1"),
    ],
)
def test_bad_values_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**given)


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        (dict(), Sampling(seed=5)),
        (dict(temperature=0.6, top_p=0.9), Sampling(seed=5)),
        (dict(do_sample=True), Sampling(temperature=1.0, top_k=50, seed=5)),
        (
            dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=0, repetition_penalty=1.0),
            Sampling(temperature=0.6, top_p=0.9, seed=5),
        ),
        (
            dict(do_sample=True, top_p=1.0, top_k=4),
            Sampling(temperature=1.0, top_k=4, seed=5),
        ),
    ],
)
def test_a_generation_configuration_becomes_a_sampling(given, sampling):
    assert sampling_like(given, seed=5) == sampling
    assert sampling_like(GenerationConfig(**given).to_dict(), seed=5) == sampling


@pytest.mark.parametrize(
    "given",
    [
        dict(repetition_penalty=1.05),
        dict(no_repeat_ngram_size=3),
        dict(min_length=4),
        dict(bad_words_ids=[[3]]),
        dict(num_beams=4),
        dict(do_sample=True, min_p=0.1),
        dict(do_sample=True, typical_p=0.5),
    ],
)
def test_a_configuration_that_asks_for_more_is_refused(given):
    name = list(given)[-1]
    with pytest.raises(ValueError, match=f"{name}: got .*, but the decoder does not"):
        sampling_like(GenerationConfig(**given).to_dict())
