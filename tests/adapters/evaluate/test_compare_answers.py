"""Answers of `compare` equal those of `kvhf.generate`; only full attention reads prompts there."""

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex_adapters.evaluate.compare.answers import Limit, checked, continued, expected
from kvindex_adapters.evaluate.compare.continuation import dense_logits, divergence
from kvindex_adapters.evaluate.compare.replay import FullAttention, ReplayLayer, indexed
from kvindex_adapters.evaluate.fidelity import divergences, full_logits
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt
from tests.support.helpers import mostly_slow

K, NEW, CONTEXT = 3, 16, 60
REGIONS = dict(sink=4, local_window=8, update_every=8)
INDEXES = (
    *("exact", "pariskv:preset=fast+sample"),
    "snapkv:budget=12:window=4:kernel=3",  # learns from the prompt's queries
    "sentencekv:longest=4",  # reads the text, and follows the steps
)


@pytest.fixture(scope="module", params=mostly_slow(["llama", "gemma2"], "gemma2"))
def model(request):
    return build(request.param)  # gemma2 has sliding windows, too


@pytest.fixture(scope="module")
def read(model):
    """Make a prompt's ids, full attention's context, and two questions with their answers."""
    ids, full = prompt(1, CONTEXT + 30)["input_ids"][0], FullAttention(model)
    context, _ = full.read(ids[:CONTEXT])
    before, asked = full.checkpoint(), []
    for question in ids[CONTEXT:].split([21, 9]):
        piece, logits = full.read(question)
        asked.append((piece, continued(full, [int(logits.argmax())], Limit.of(model, NEW))))
        full.rollback(before)
    return ids, context, asked


def generated(model, ids, questions, index, **options):
    with kvhf.attach(model, index=index, k=K, dense_below=0, **REGIONS) as cache:
        kvhf.read(model, Words(), ids[:CONTEXT], cache=cache)
        options = dict(max_new_tokens=NEW, cache=cache, used="branch")
        answers = [kvhf.generate(model, Words(), question, **options) for question in questions]
    return [answer.answer_ids.tolist() for answer in answers]


@pytest.mark.parametrize("index", mostly_slow(INDEXES, *INDEXES[2:]))
def test_answers_are_those_of_generate(model, read, index):
    ids, context, asked = read
    with indexed(model, ids, index=index, **REGIONS) as cache:
        cache.read(context)
        answers = []
        for k in (K, 1):
            for piece, draft in asked:
                with cache.branch(k):
                    cache.read(piece)
                    answers.append(checked(cache, draft[0], draft, Limit.of(model, NEW)))
    assert answers[:2] == generated(model, ids, [piece.ids for piece, _ in asked], index)
    assert any(answer != draft for answer, (_, draft) in zip(answers[:2], asked, strict=True))


def test_full_attentions_answers_are_those_of_generate(model, read):
    ids, _, asked = read
    for piece, draft in asked:
        whole = torch.cat([ids[:CONTEXT], piece.ids])
        want = kvhf.generate(model, Words(), whole, index=None, max_new_tokens=NEW)
        assert draft == want.answer_ids.tolist()


def test_guesses_change_no_answer_and_save_passes(model, read):
    ids, _, asked = read
    full, passes = FullAttention(model), []
    full.read(ids[:CONTEXT])
    before, plain = full.checkpoint(), full.step
    full.step = lambda ids: passes.append(len(ids)) or plain(ids)
    for piece, draft in asked:
        wrong = [*draft[2:5], draft[5] ^ 1, *draft[6:]]
        for guesses in ([draft], [draft[3:]], [wrong, draft[7:9]], [[1, 2, 3]]):
            full.read(piece.ids)
            passes.clear()
            assert continued(full, draft[:1], Limit.of(model, NEW), guesses) == draft
            assert (len(passes) == 1) == (guesses == [draft])
            full.rollback(before)


def test_what_is_expected_follows_the_longest_beginning():
    guesses = [[1, 2, 3, 4], [2, 3, 9], [7, 7, 7]]
    assert expected([5, 1, 2], guesses) == [3, 4]
    assert expected([5, 2], guesses) == [3, 9]
    assert expected([1, 2, 3, 4], guesses) == []  # no token is left to guess
    assert expected([7], guesses) == [7, 7]
    assert expected([5], guesses) == []


def test_with_rows_enough_the_draft_is_the_answer(model, read):
    ids, context, asked = read
    with indexed(model, ids, index="exact", **REGIONS) as cache:
        cache.read(context)
        for piece, draft in asked:
            with cache.branch(500):
                cache.read(piece)
                assert checked(cache, draft[0], draft, Limit.of(model, NEW)) == draft


@pytest.mark.parametrize("index", ["exact", "snapkv:budget=12:window=4:kernel=3"])
def test_divergences_are_those_of_a_model_that_reads_the_text(model, read, index):
    ids, context, _ = read
    full = FullAttention(model)
    full.read(ids[:CONTEXT])
    logits = dense_logits(full, ids[CONTEXT:])
    assert torch.allclose(logits, full_logits(model, ids[:CONTEXT], ids[CONTEXT:]), atol=1e-4)
    options = dict(index=index, k=K, attach_options=REGIONS)
    want = divergences(model, ids[:CONTEXT], ids[CONTEXT:], logits, **options)
    with indexed(model, ids, index=index, **REGIONS) as cache:
        cache.read(context)
        for _ in range(2):  # the first run changes nothing
            got, *_ = divergence(cache, ids[CONTEXT:], logits, k=K)
            assert torch.allclose(got, want, rtol=1e-3, atol=1e-6)


def test_all_indexes_are_searched_beside_the_same_rows():
    kept = []
    for name in ("exact", "pariskv"):
        index = kvindex.create(name, q_heads=1, kv_heads=1, head_dim=8)
        layer = ReplayLayer(index, update_phase=0.5)  # half of a block of 256 tokens
        for length in (700, 1, 250):
            rows = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(length))
            layer.fill(rows, rows, torch.arange(length))
            kept.append(len(index))
    assert kept[:3] == kept[3:] == [256, 256, 512]


@pytest.mark.parametrize(
    ("options", "said"),
    [(dict(prefill="sparse"), "sparse prompts"), (dict(k="auto"), "k='auto'")],
)
def test_a_question_of_one_token(options, said):
    """As a decode step, it would search, but full attention reads questions."""
    model, ids = build("llama"), prompt(1, 41)["input_ids"][0]
    full = FullAttention(model)
    context, _ = full.read(ids[:40])
    before = full.checkpoint()
    long, _ = full.read(ids[37:40])
    full.rollback(before)
    one, _ = full.read(ids[40:])
    with indexed(model, ids, index="pariskv", **REGIONS, **options) as cache:
        cache.read(context)
        before = cache.checkpoint()
        with pytest.raises(ValueError, match=f"question: got one token, allowed with {said} are"):
            cache.read(one)
        cache.rollback(before)
        cache.read(long)
    with indexed(model, ids, index="pariskv", **REGIONS) as cache:
        cache.read(context)
        cache.read(one)
