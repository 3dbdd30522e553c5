"""Padding at any position gives the results of plain attention; a mask is read once per step."""

import pytest
import torch
from transformers import DynamicCache

import kvindex_adapters.hf as kvhf
from kvindex.layer import attention_layer
from kvindex_adapters.hf.cache import padding
from kvindex_adapters.hf.cache.padding import Padding
from tests.adapters.hf.model.test_families import FEW
from tests.adapters.tiny import FAMILIES, build, dense_steps, prompt, steps
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.helpers import Case, left_padding, mostly_slow
from tests.support.sequences import layer_of

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


def counted(monkeypatch, owner, name):
    calls, what = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(1) or what(*given))
    return calls


def test_a_padded_batch_asks_once_for_each_step(monkeypatch):
    model, inputs = build("llama"), prompt(3, 60, padded=True)
    expected = dense_steps(model, inputs, [40] + [1] * 20)
    past = counted(monkeypatch, padding, "_check_past")
    new = counted(monkeypatch, attention_layer, "check_valid")
    with kvhf.attach(model, **REGIONS) as cache:
        logits = steps(model, cache, inputs, [40] + [1] * 20)
        layers = len(cache.indexed)
    assert (len(past), len(new)) == (21, layers)  # only the prompt has padded tokens
    got, want = torch.cat(logits, 1), torch.cat(expected, 1)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(got[real], want[real], atol=1e-4)


def test_the_same_mask_is_looked_at_again_in_another_step():
    case = Case(batch=2)
    layer, asked = layer_of(case), Padding()
    mask = left_padding([0, 3], 10)
    first = asked.of_new(layer, mask, 8)
    assert torch.equal(first, mask[:, -8:])
    assert asked.of_new(layer, mask, 8) is first
    layer.step(case.tensor(1, 2, 2, 8, 16), *case.tokens(8), valid=left_padding([0, 3], 8))
    assert asked.of_new(layer, mask, 2) is None
    layer.reorder(torch.tensor([1, 0]))
    asked.forget()
    with pytest.raises(ValueError, match="attention_mask: got a mask that hides"):
        asked.of_new(layer, mask, 2)


# Padding between tokens

SIZES = [24, 9, *[1] * 8, 7, *[1] * 5]
"""Tokens per call: a document, questions, answers, a second turn with answers."""
TOLERANCE = 1e-4


def with_holes():
    """Padding on the left and right of a question, in a second turn, and as single tokens."""
    ids = prompt(3, sum(SIZES))["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 24:28] = mask[0, 43:45] = 0
    mask[1, :5] = mask[1, 30:33] = mask[1, 46:48] = 0
    mask[2, 24:33] = mask[2, 35] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llama", *FEW[1::2], "zamba"))
def test_padding_anywhere_is_what_it_is_with_plain_attention(family):
    model, inputs = build(family), with_holes()
    expected = dense_steps(model, inputs, SIZES)
    with kvhf.attach(model, **REGIONS) as cache:
        logits = steps(model, cache, inputs, SIZES)
        assert all(layer.traffic.steps == 13 for layer in cache.attention_layers())
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert worst < TOLERANCE < 0.01 * float(expected[-1].abs().max())


@pytest.mark.parametrize("backend", mostly_slow(["torch", "cpu"], "cpu"))
def test_pariskv_attends_to_all_but_it(backend):
    model, inputs = build("llama"), with_holes()
    how = {**REGIONS, "index": "pariskv", "index_options": {"backend": backend}}
    with kvhf.attach(model, **how) as cache:
        logits = steps(model, cache, inputs, SIZES)
        (index, *_), found = cache.indexes(), []
        assert "cpu" not in backend or index.backend == "cpu"
        for seed in range(3):
            queries = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(seed))
            found += [index.search(queries, k=k).ids for k in (5, 500)]
    expected = dense_steps(model, inputs, SIZES)
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert worst < TOLERANCE
    for row, real in enumerate(inputs["attention_mask"]):
        for ids in found:
            assert real[ids[row][ids[row] >= 0]].all()


@pytest.fixture
def graphs():
    with recorded(WholeGraph) as counting:
        yield counting


def questions(*sizes):
    """Return ids and mask `[B, T]` of questions with these lengths, padded on the left."""
    ids = prompt(len(sizes), max(sizes))["input_ids"]
    mask = torch.stack([torch.arange(max(sizes)) >= max(sizes) - size for size in sizes]).long()
    return ids.masked_fill(mask == 0, 0), mask


DOCUMENT = prompt(1, 40)["input_ids"]


def asked(model, cache, turns=1):
    """Ask questions about a document that is read once. Return ids and mask `[B, N]` of all."""
    count, how = 3, dict(max_new_tokens=9, do_sample=False)
    document = DOCUMENT.to(model.device)
    with torch.no_grad():
        model(document, past_key_values=cache)
    cache.batch_repeat_interleave(count)
    ids = document.expand(count, -1)
    mask = torch.ones_like(ids)
    for turn in range(turns):
        new, real = (one.to(model.device) for one in questions(5 + turn, 9, 2))
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, real], 1)
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **how)
        mask = torch.cat([mask, torch.ones_like(ids[:, :9])], 1)
    return ids, mask


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3", "gemma2"], "llama", "qwen3"))
def test_questions_about_one_document(family):
    """Each answer is the same as alone. Padding takes up places in a sliding window, as always."""
    model = build(family, eos_token_id=None)
    with kvhf.attach(model, **REGIONS) as cache:
        ids, mask = asked(model, cache)
    assert torch.equal(ids, asked(model, DynamicCache(config=model.config))[0])
    for row, real in zip(ids, mask.bool(), strict=True) if family == "llama" else ():
        alone = row[real][None]
        own = model.generate(alone[:, :-9], max_new_tokens=9, do_sample=False)
        assert torch.equal(own, alone)


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3"], "llama"))
def test_tokens_after_it_are_graphs(graphs, family):
    """A second turn adds more padding. Its decode steps are replayed as graphs as well."""
    model = build(family, eos_token_id=None)
    answers = []
    for token_graph in (True, False):
        how = {**REGIONS, "index": Captured, "token_graph": token_graph}
        with kvhf.attach(model, **how) as cache:
            answers.append(asked(model, cache, turns=2)[0])
            report = cache.report().graph
    assert torch.equal(*answers)
    assert report is None
    assert torch.equal(answers[0], asked(model, DynamicCache(config=model.config), turns=2)[0])
    assert graphs.replays >= 8


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_that_are_scored_together(family):
    """Answers are padded on the right. The cache continues after them, or is cropped first."""
    model, texts = build(family), [prompt(1, size)["input_ids"][0] for size in (3, 9, 6)]
    scored = []
    for text in texts:
        with torch.no_grad():
            whole = torch.cat([DOCUMENT[0], text])[None]
            scored.append(model(whole).logits[0, 40:])

    def score(cache):
        with torch.no_grad():
            model(DOCUMENT, past_key_values=cache)
            cache.batch_repeat_interleave(3)
            ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            mask = torch.ones(3, 49, dtype=torch.long)
            for row, text in enumerate(texts):
                mask[row, 40 + len(text) :] = 0
            some = [model(ids, attention_mask=mask, past_key_values=cache).logits]
            for token in range(20):  # positions continue after the longest answer
                mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
                new = DOCUMENT[:, token : token + 1].expand(3, -1)
                out = model(new, attention_mask=mask, past_key_values=cache)
                some.append(out.logits)
            return some

    with kvhf.attach(model, **REGIONS) as cache:
        mine = score(cache)
    theirs = score(DynamicCache(config=model.config))
    for row, alone in enumerate(scored):
        torch.testing.assert_close(mine[0][row, : len(alone)], alone, rtol=1e-4, atol=1e-4)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_prompt_that_is_padded_on_the_right():
    model, inputs = build("llama"), prompt(2, 20)
    inputs["attention_mask"][1, 15:] = 0
    with torch.no_grad():
        expected = model(**inputs).logits
    with kvhf.attach(model, **REGIONS) as cache, torch.no_grad():
        logits = model(**inputs, past_key_values=cache).logits
        valid = cache.attention_layers()[0].valid
        assert torch.equal(valid.long(), inputs["attention_mask"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
