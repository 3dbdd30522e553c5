"""Decode steps that are launched before the host has read the last token give the same answers.

The answers are compared with those of transformers' loop. On a CPU nothing runs concurrently with
the host, but tests add "cpu" to `RUNS_AHEAD`, and graphs are recorded functions.
"""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

import kvindex_adapters.hf as kvhf
from kvindex_adapters.common.token_ring import AHEAD, TokenRing
from kvindex_adapters.hf.graph import run_ahead
from tests.adapters.hf.generation.test_generation import Collect, Words
from tests.adapters.tiny import VOCABULARY, build, prompt
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.helpers import mostly_slow, slow

SIZES = dict(sink=4, local_window=8, update_every=6, dense_below=0)
COUNT = 24
REGIONS = dict(index=Captured, k=500, **SIZES)
SAMPLED = dict(do_sample=True, temperature=1.5, top_k=0)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16)


class Vocabulary(Words):
    """A tokenizer whose words are letters, of which stop strings consist."""

    def __call__(self, text, **options):
        return {"input_ids": [text]}

    def _convert_id_to_token(self, one):
        return one

    def get_vocab(self):
        return {f"w{number}.": number for number in range(VOCABULARY)}

    def decode(self, ids, **options):
        return "".join(f"w{int(i)}." for i in ids)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@pytest.fixture
def graphs():
    """Count graphs and replays."""
    with recorded(WholeGraph) as counting:
        yield counting


def model_of(family="llama", **options):
    return build(family, **{"num_hidden_layers": 2, "eos_token_id": None, **options})


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Record, whenever the host reads a token, how many tokens were on their way to it."""
    waiting, take = [], TokenRing.take

    def counted(ring):
        if len(ring):
            waiting.append(len(ring))
        return take(ring)

    monkeypatch.setattr(TokenRing, "take", counted)
    return waiting


def ahead_on_a_cpu(monkeypatch, ahead):
    monkeypatch.setattr(run_ahead, "RUNS_AHEAD", {"cpu"} if ahead else set())


def decoded(monkeypatch, model, *, ahead, turns=1, attach=None, seed=0, used="continue", **options):
    """Return everything observable of several answers in one cache, and of the cache afterwards."""
    ahead_on_a_cpu(monkeypatch, ahead)
    torch.manual_seed(seed)
    seen = []
    with kvhf.attach(model, **{**REGIONS, **(attach or {})}) as cache:
        for turn in range(turns):
            ids, streamer, calls = prompt(1, (60, 20, 9)[turn])["input_ids"][0], Collect(), []
            made = kvhf.generate(
                *(model, Vocabulary(), ids),
                **dict(cache=cache, used=used if turn else "refuse", streamer=streamer),
                **dict(max_new_tokens=options.get("max_new_tokens", COUNT)),
                **dict(on_progress=lambda *call, to=calls: to.append(call)),
                **{name: one for name, one in options.items() if name != "max_new_tokens"},
            )
            seen.append((made.text, made.answer_ids.tolist(), streamer.tokens, streamer.ended))
            seen.append((calls, replace(made.report, graph=None), cache.lengths()))
            seen.append(cache.ids.tolist())
        length = cache.get_seq_length()
        with torch.no_grad():
            after = dict(past_key_values=cache, position_ids=torch.tensor([[length]]))
            logits = model(torch.tensor([[7]]), **after).logits
        seen.append(replace(cache.report(), graph=None))
        seen.append(torch.rand(()).item())
    return seen, logits, made.answer_ids.tolist()


def check_same(monkeypatch, model, **options):
    """Check that everything is the same with and without running ahead; return the last answer."""
    mine, theirs = (decoded(monkeypatch, model, ahead=ahead, **options) for ahead in (True, False))
    assert mine[0] == theirs[0]
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-5)
    return mine[2]


def ending(monkeypatch, model, place, **options):
    """Return a token whose first occurrence in an answer is at this place."""
    whole = decoded(monkeypatch, model, ahead=False, **options)[2]
    firsts = [n for n, token in enumerate(whole) if token not in whole[:n]]
    return whole[next((n for n in firsts if n >= place), firsts[-1])]


@pytest.mark.parametrize("options", [{}, slow(SAMPLED)], ids=["greedy", "sampled"])
def test_turns_of_the_greatest_length(monkeypatch, graphs, launched, model, options):
    answer = check_same(monkeypatch, model, attach=dict(update_every=24), turns=2, **options)
    assert len(answer) == COUNT
    assert graphs.replays
    assert max(launched) == AHEAD + 1


ENDS = [
    *((place, {}, "continue") for place in (0, 1, 6, 15, 17)),
    *((place, SAMPLED, "continue") for place in (1, 15)),
    (6, SAMPLED, "branch"),
]


@pytest.mark.parametrize(("place", "options", "used"), mostly_slow(ENDS, ENDS[1], *ENDS[-2:]))
def test_an_answer_that_ends_before(monkeypatch, launched, model, place, options, used):
    """The answer ends while the window is updated and checkpoints are made."""
    end = ending(monkeypatch, model, place, **options)
    check_same(monkeypatch, model, turns=2, used=used, eos_token_id=end, **options)
    assert launched


def test_an_answer_of_replays_that_ends_before(monkeypatch, graphs, model):
    how = dict(attach=dict(update_every=24))
    end = ending(monkeypatch, model, 17, **how)
    check_same(monkeypatch, model, turns=2, eos_token_id=end, **how)


@pytest.mark.parametrize("count", mostly_slow([1, 2, AHEAD + 2], 1, AHEAD + 2))
def test_answers_of_few_tokens(monkeypatch, model, count):
    assert len(check_same(monkeypatch, model, max_new_tokens=count, turns=2)) == count


PROCESSED = {
    "repetition_penalty": dict(repetition_penalty=1.3),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(min_new_tokens=20),
    "bad_words_ids": dict(bad_words_ids=[[5], [7, 9]]),
    "top_p": dict(SAMPLED, top_p=0.8, top_k=30),
    "max_time": dict(max_time=1e4),
    "prefill_chunk_size": dict(prefill_chunk_size=8),
}


@pytest.mark.parametrize(
    "options",
    mostly_slow(PROCESSED.values(), PROCESSED["repetition_penalty"], PROCESSED["top_p"]),
    ids=PROCESSED,
)
def test_processors_of_transformers(monkeypatch, launched, model, options):
    end = ending(monkeypatch, model, 9, **{**options, "min_new_tokens": None})
    check_same(monkeypatch, model, turns=2, eos_token_id=end, **options)
    assert launched


def test_stop_strings(monkeypatch, launched, model):
    whole = decoded(monkeypatch, model, ahead=False)[2]
    strings = ["".join(f"w{token}." for token in whole[9:11])[1:-1]]
    assert len(check_same(monkeypatch, model, stop_strings=strings)) <= 11
    assert launched


@pytest.mark.parametrize("index", mostly_slow(["exact", "quest", "h2o", "exact+reuse"], "h2o"))
def test_other_indexes(monkeypatch, launched, model, index):
    """This includes indexes that learn from the queries that they get."""
    how = dict(attach=dict(index=index, k=12))
    end = ending(monkeypatch, model, 9, **how)
    check_same(monkeypatch, model, turns=2, eos_token_id=end, **how)
    assert max(launched) > 1


@pytest.mark.parametrize(
    ("family", "options", "attach", "captured"),
    [
        slow("qwen3", dict(SLIDING, use_sliding_window=True), dict(update_every=24), True),
        ("gemma2", SLIDING, {}, False),
        slow("llama", {}, dict(dense_layers=(1,)), False),
    ],
)
def test_other_layers(monkeypatch, launched, family, options, attach, captured):
    model, how = model_of(family, **options), dict(attach=attach)
    with recorded(WholeGraph) if captured else nullcontext():
        end = ending(monkeypatch, model, 15, **how)
        check_same(monkeypatch, model, turns=2, eos_token_id=end, **how)
    assert max(launched) > 1


def test_linear_attention_is_not_run_ahead(monkeypatch, launched):
    """The state of linear attention cannot be rolled back."""
    model, how = model_of("falcon_h1"), dict(max_new_tokens=12)
    end = ending(monkeypatch, model, 9, **how)
    check_same(monkeypatch, model, turns=2, eos_token_id=end, **how)
    assert set(launched) == {1}


class Broken(Collect):
    def put(self, value):
        super().put(value)
        if len(self.tokens) == 60 + 9:
            raise KeyboardInterrupt


def test_an_exception_of_the_streamer_leaves_the_cache_as_it_was(monkeypatch, model):
    ahead_on_a_cpu(monkeypatch, True)
    ids = [prompt(1, length)["input_ids"][0] for length in (50, 60)]
    with kvhf.attach(model, **REGIONS) as cache:
        how = dict(cache=cache, used="continue", max_new_tokens=20)
        kvhf.generate(model, Words(), ids[0], **how)
        before, report = cache.ids.tolist(), replace(cache.report(), graph=None)
        broken = Broken()
        with pytest.raises(KeyboardInterrupt):
            kvhf.generate(model, Words(), ids[1], streamer=broken, **how)
        assert not broken.ended
        assert cache.ids.tolist() == before
        assert cache.lengths() == [len(before)] * 2
        assert replace(cache.report(), graph=None) == report
        mine = kvhf.generate(model, Words(), ids[1], **how)
    ahead_on_a_cpu(monkeypatch, False)
    with kvhf.attach(model, **REGIONS) as cache:
        how["cache"] = cache
        kvhf.generate(model, Words(), ids[0], **how)
        theirs = kvhf.generate(model, Words(), ids[1], **how)
    assert mine.answer_ids.tolist() == theirs.answer_ids.tolist()


def test_without_a_cache_of_the_callers(monkeypatch, launched, model):
    made = []
    for ahead in (True, False):
        ahead_on_a_cpu(monkeypatch, ahead)
        how = dict(attach_options=SIZES, max_new_tokens=20)
        for index in (Captured, None):
            given = dict(index=index, k=500) if index else dict(index=None, max_new_tokens=20)
            given = {**(how if index else {}), **given}
            made.append(kvhf.generate(model, Words(), prompt(1, 60)["input_ids"][0], **given))
    assert {tuple(one.answer_ids.tolist()) for one in made} == {tuple(made[0].answer_ids.tolist())}
    assert len(launched) == 20


class Own(LogitsProcessor, StoppingCriteria):
    calls = 0

    def __call__(self, ids, scores):
        Own.calls += 1
        return torch.zeros(1, dtype=torch.bool) if scores is None else scores


@pytest.mark.parametrize(
    "options",
    [
        slow(dict(logits_processor=[Own()])),
        dict(stopping_criteria=[Own()]),
        slow(dict(prefix_allowed_tokens_fn=lambda *_: Own() and list(range(VOCABULARY)))),
        dict(prompt_lookup_num_tokens=2),
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_transformers_loop_has_it(monkeypatch, launched, model, options):
    check_same(monkeypatch, model, max_new_tokens=12, **options)
    assert not launched


def test_probabilities_that_are_no_numbers_are_an_error(monkeypatch):
    ahead_on_a_cpu(monkeypatch, True)
    model = model_of()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(RuntimeError, match="logits: got NaN or infinity"):
        kvhf.generate(model, Words(), "3 4 5", do_sample=True, max_new_tokens=8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_token_is_drawn_as_torch_draws_it(device):
    for seed in range(50):
        scores = torch.randn(1, 3000, generator=torch.Generator().manual_seed(seed)).to(device)
        scores[:, seed:1000] = float("-inf")
        torch.manual_seed(seed)
        token, wrong = run_ahead._next_token(scores, True).tolist()
        after = torch.rand((), device=device)
        torch.manual_seed(seed)
        expected = torch.multinomial(scores.softmax(-1), num_samples=1)
        assert (token, wrong) == (int(expected), 0)
        assert torch.equal(torch.rand((), device=device), after)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_no_token_waits_for_the_host_on_a_gpu(monkeypatch, options):
    """This holds from the first replay on, with the same tokens as transformers' loop."""
    model, ids = model_of(head_dim=64).to("cuda"), prompt(1, 60)["input_ids"][0]
    sizes = dict(SIZES, update_every=8)
    how = dict(max_new_tokens=60, index="pariskv", k=10, attach_options=sizes, **options)

    class Strict(Collect):
        def put(self, value):
            super().put(value)
            if len(self.tokens) == 60 + 20:
                torch.cuda.set_sync_debug_mode("error")
            if len(self.tokens) == 60 + 50:
                torch.cuda.set_sync_debug_mode("default")

    answers = []
    for streamer in (Strict(), Collect()):
        torch.manual_seed(0)
        try:
            answers.append(kvhf.generate(model, Words(), ids, streamer=streamer, **how))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        monkeypatch.setattr(run_ahead, "RUNS_AHEAD", set())
    assert torch.equal(answers[0].answer_ids, answers[1].answer_ids)
    assert not answers[0].report.graph.startswith("0 of")


@pytest.mark.slow
def test_the_package_can_be_imported_after_vllm_on_a_cpu():
    """An engine of vLLM on a CPU replaces `torch.cuda.Event` by a class without methods."""
    code = (
        "import torch; torch.cuda.Event = type('Placeholder', (), {}); "
        "import kvindex_adapters.hf, kvindex_adapters.decoder"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
