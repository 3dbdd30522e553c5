"""The real model: it finds the needle, and stays near full attention.

The limits are 1.5 times what was first measured (`smollm2_fidelity.json`, written by
`python -m benchmarks.quality fidelity --json tests/adapters/smollm2_fidelity.json`).
"""

import copy
import json
from pathlib import Path

import pytest
import torch

import kvindex
from benchmarks.common.reading import SEED
from benchmarks.comparing.fidelity import CONTINUATION, PROMPT, K, text_ids
from kvindex.core.protocol import UNUSED, Hits
from kvindex.wrappers import Wrapper
from kvindex_adapters.evaluate.fidelity import BLOCK, kl
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.evaluate.tasks import hide
from kvindex_adapters.evaluate.texts import python_reference
from kvindex_adapters.hf import attach
from kvindex_adapters.hf.generate import generate
from kvindex_adapters.hf.prefill import prefill

FIRST = json.loads(Path(__file__).with_name("smollm2_fidelity.json").read_text())
MARGIN = 1.5
SEARCHED = dict(dense_below=600)
"""So that a prompt of half the default threshold is searched: it costs half as much to read."""

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def needle(smollm2_model):
    return hidden(smollm2_model, 1200)


def hidden(model, tokens):
    needle = hide(model[1], python_reference(), tokens=tokens, seed=0)
    assert tokens - 200 <= len(needle.ids) <= tokens
    return needle


def assert_found(model, needle, index, share, **options):
    answer = generate(*model, needle.ids, index=index, k=100, max_new_tokens=32, **options)
    assert needle.found(answer.text), answer.text
    assert answer.report is not None
    assert answer.report.rows_read_fraction < share


@pytest.mark.slow
def test_the_needle_is_found_at_4000_tokens(smollm2_model):
    assert_found(smollm2_model, hidden(smollm2_model, 4000), "pariskv", 0.15)


@pytest.mark.parametrize("index", ["exact", "pariskv", "pariskv:preset=paper"])
def test_the_needle_is_found(smollm2_model, needle, index):
    assert_found(smollm2_model, needle, index, 0.5, attach_options=SEARCHED)


class Nothing(Wrapper):
    """An index that finds nothing."""

    def search(self, queries, *, k, coverage=None):
        ids = torch.full((len(queries), self.geometry.kv_heads, k), UNUSED)
        return Hits(ids, torch.full(ids.shape, float("-inf")))


def test_without_retrieval_the_needle_is_lost(smollm2_model, needle):
    """The needle test can fail: sink and local alone do not hold the answer."""

    def nothing(**geometry):
        return Nothing(kvindex.create("exact", **geometry))

    options = dict(index=nothing, k=1, max_new_tokens=32, attach_options=SEARCHED)
    answer = generate(*smollm2_model, needle.ids, **options)
    assert not needle.found(answer.text)


@pytest.mark.slow
def test_fidelity_stays_near_what_was_first_measured(smollm2_model):
    """As there, but the steps run at once (`test_parallel.py`: they give the same), and full
    attention goes on from the same prompt, for a layer reads that densely.
    """
    assert (FIRST["prompt_tokens"], FIRST["steps"], FIRST["k"]) == (PROMPT, CONTINUATION, K)
    assert FIRST["seed"] == SEED
    first = FIRST["indexes"]["pariskv"]  # then the paper's preset
    model, tokenizer = smollm2_model
    ids = text_ids(tokenizer, PROMPT + CONTINUATION, SEED)
    with torch.no_grad(), attach(model, index="pariskv", k=K, layer=ParallelLayer) as cache:
        prefill(model, ids, cache, stop=PROMPT, chunk=1024)
        twin = copy.deepcopy(cache)
        full = model(input_ids=ids[None, PROMPT:], past_key_values=twin).logits[0]
        for layer in cache.attention_layers():
            layer.begin()
        blocks = ids[None, PROMPT:].split(BLOCK, dim=1)
        found = [model(input_ids=some, past_key_values=cache).logits[0] for some in blocks]
    now = torch.cat(found)
    kl_mean = sum(map(kl, full, now)) / CONTINUATION
    agreement = (full.argmax(-1) == now.argmax(-1)).double().mean()
    assert kl_mean <= MARGIN * first["kl_mean"]
    assert 1 - agreement <= MARGIN * (1 - first["agreement"])
