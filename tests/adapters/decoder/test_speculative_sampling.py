"""Rejection sampling of drafts gives the verifier's distribution, joint over several tokens."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from kvindex_adapters.common.speculation import Speculation, rejection_sample
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.speculation import Speculator
from tests.adapters.decoder.families import model_of

FAILURE = 1e-4
"""Probability that a correct sampler fails one of these tests with another seed."""

DRAWS = 20_000
SAMPLING = Sampling(temperature=0.7, top_p=0.95, seed=1)


def assert_distributed(counts, probabilities):
    """Chi-square test: outcomes occur with their probabilities, and impossible ones never do.

    Outcomes that are expected fewer than 5 times are counted together.
    """
    total = sum(counts.values())
    assert not {outcome for outcome in counts if probabilities.get(outcome, 0) == 0}
    expected = {outcome: one * total for outcome, one in probabilities.items() if one > 0}
    rare = [outcome for outcome, one in expected.items() if one < 5]
    pairs = [(counts[outcome], one) for outcome, one in expected.items() if outcome not in rare]
    if sum(expected[outcome] for outcome in rare) >= 5:
        pairs.append((sum(counts[o] for o in rare), sum(expected[o] for o in rare)))
    statistic = sum((seen - one) ** 2 / one for seen, one in pairs)
    half = torch.tensor([len(pairs) - 1, statistic], dtype=torch.float64) / 2
    assert torch.special.gammaincc(*half) > FAILURE, (statistic, len(pairs))


def joint(following, first, count):
    """Return the probability of each sequence of `count` tokens after the tokens `first`.

    `following` maps a tuple of tokens to the probabilities of the next one.
    """
    found = {(): 1.0}
    for _ in range(count):
        found = {
            (*past, token): mass * float(one)
            for past, mass in found.items()
            if mass > 0
            for token, one in enumerate(following((*first, *past)))
        }
    return found


class Table:
    """A session whose logits depend on the last token, in one way for drafts and in another one for
    their verification."""

    def __init__(self, drafts, logits, first):
        self._drafts, self._logits = drafts, logits
        self.token, self.length = torch.tensor([[first]]), 0

    def exclusive(self):
        return nullcontext()

    def speculating(self, tokens):
        return nullcontext()

    def agreed(self, tokens):
        return tokens

    def draft(self, tokens):
        return self._drafts[tokens]

    def score(self, ids, *, full):
        assert full
        return self._logits[ids]

    def keep(self, length):
        pass

    def observe(self, ids):
        pass

    def count_drafts(self, drafted, accepted):
        self.seen = accepted


@pytest.mark.parametrize("scale", [0.0, 0.7, 3.0])
def test_joint_over_a_round_and_more(scale):
    """Drafts are equal to the verifier's distribution (`scale` 0), near it, or far from it."""
    generator = torch.Generator().manual_seed(int(10 * scale))
    logits = torch.randn(4, 4, generator=generator)
    drafts = logits + scale * torch.randn(4, 4, generator=generator)
    sampler = Sampler(SAMPLING, torch.device("cpu"))
    counts, patterns = Counter(), Counter()
    for _ in range(DRAWS if scale == 0.7 else DRAWS // 10):
        session, made = Table(drafts, logits, 1), []
        speculation = Speculation(2, "full")
        more = dict(step=None, read=torch.clone)
        speculator = Speculator(session, sampler, speculation, [[1]], **more)
        while len(made) < 3:
            made += [int(token) for token in speculator.next(9, {0}, ())]
            patterns[session.seen] += 1
        counts[tuple(made[:3])] += 1
    following = sampler.probabilities(logits)
    assert (following == 0).any()  # top_p leaves tokens out
    assert_distributed(counts, joint(lambda past: following[past[-1]], (1,), 3))
    assert set(patterns) == ({2} if scale == 0 else {0, 1, 2})


def test_a_wrong_rule_is_noticed():
    """A sampler that keeps the drafts fails the same test."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
    other = logits + 0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(8))
    sampler = Sampler(SAMPLING, torch.device("cpu"))
    drawn = sampler.draw(sampler.probabilities(other[1:2]).expand(DRAWS, -1))
    wanted = sampler.probabilities(logits[1:2])[0]
    with pytest.raises(AssertionError):
        assert_distributed(Counter(drawn.tolist()), dict(enumerate(wanted.tolist())))


def test_one_token_of_many_sequences():
    generator = torch.Generator().manual_seed(3)
    sampler = Sampler(SAMPLING, torch.device("cpu"))
    wanted, drafted = torch.randn(2, 30, generator=generator).mul(2).softmax(-1)
    both = wanted.expand(DRAWS, -1), drafted.expand(DRAWS, -1)
    tokens = sampler.draw(both[1])
    chance = sampler.uniform(DRAWS, tokens.device)
    made, accepted = rejection_sample(*both, tokens, chance, draw=sampler.draw)
    assert_distributed(Counter(made.tolist()), dict(enumerate(wanted.tolist())))
    assert torch.equal(made[accepted], tokens[accepted])
    overlap = float(torch.minimum(wanted, drafted).sum())
    assert abs(float(accepted.float().mean()) - overlap) < 4 * (0.25 / DRAWS) ** 0.5


@pytest.fixture(scope="module")
def tiny():
    """A decoder with one layer and four tokens of vocabulary, and a prompt."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    model = model_of("llama", vocab_size=4, num_hidden_layers=1, num_key_value_heads=1, **sizes)
    prompt = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(0))
    return Decoder.of(model), prompt


def of_full_attention(decoder, prompt, sampler, count):
    """Return the joint probabilities of the first tokens of answers with full attention."""
    session = decoder.session(index=None)

    def following(past):
        session.truncate(0)
        ids = torch.cat([prompt, torch.tensor(past, dtype=torch.int64)])
        return sampler.probabilities(session.read_prompt(ids[None], 1024, 60))[0]

    return joint(following, (), count)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 500])
def test_answers_of_a_model(tiny, batch):
    """Answers that full attention verifies have its distribution, sequence by sequence.

    The sequences of a batch advance together, by what all of them accept.
    """
    decoder, prompt = tiny
    sizes = dict(sink=1, local_window=2, update_every=4, dense_below=0)
    options = dict(index="exact", k=1, attach_options=sizes, verify="full", speculative_tokens=3)
    counts, answered = Counter(), 0
    for seed in range(DRAWS // batch if batch > 1 else 2000):
        sampling = Sampling(SAMPLING.temperature, top_p=SAMPLING.top_p, seed=seed)
        answers = decoder.generate(
            [prompt] * batch, max_new_tokens=4, sampling=sampling, stop=(), **options
        )
        counts.update(tuple(answer.answer_ids.tolist()) for answer in answers)
        answered += answers[0].acceptance.accepted
    sampler = Sampler(SAMPLING, torch.device("cpu"))
    assert_distributed(counts, of_full_attention(decoder, prompt, sampler, 4))
    assert answered > 0 or batch > 1
