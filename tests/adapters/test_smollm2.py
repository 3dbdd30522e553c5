"""The real model: it finds the needle, and stays near full attention.

The limits are 1.5 times what was first measured (`smollm2_fidelity.json`, written by
`python benchmarks/fidelity.py --json tests/adapters/smollm2_fidelity.json`).
"""

import json
from pathlib import Path

import pytest
import torch

import kvindex
from benchmarks.fidelity import CONTINUATION, PROMPT, SEED, K, measure
from kvindex.protocol import UNUSED, Hits
from kvindex.wrappers import Wrapper
from kvindex_adapters.evaluate.needle import hide
from kvindex_adapters.evaluate.text import python_reference
from kvindex_adapters.hf.generation import generate

FIRST = json.loads(Path(__file__).with_name("smollm2_fidelity.json").read_text())
MARGIN = 1.5

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def needle(smollm2_model):
    _, tokenizer = smollm2_model
    return hide(tokenizer, python_reference(), tokens=4000, seed=0)


@pytest.mark.parametrize("index", ["exact", "pariskv", "pariskv:preset=paper"])
def test_the_needle_is_found_at_4000_tokens(smollm2_model, needle, index):
    assert 3800 <= len(needle.ids) <= 4000
    answer = generate(*smollm2_model, needle.ids, index=index, k=100, max_new_tokens=32)
    assert needle.found(answer.text), answer.text
    assert answer.report is not None
    assert answer.report.rows_read_fraction < 0.15


class Nothing(Wrapper):
    """An index that finds nothing."""

    def search(self, queries, *, k, mass=None):
        ids = torch.full((len(queries), self.geometry.kv_heads, k), UNUSED)
        return Hits(ids, torch.full(ids.shape, float("-inf")))


def test_without_retrieval_the_needle_is_lost(smollm2_model, needle):
    """The needle test can fail: sink and local alone do not hold the answer."""

    def nothing(**geometry):
        return Nothing(kvindex.create("exact", **geometry))

    answer = generate(*smollm2_model, needle.ids, index=nothing, k=1, max_new_tokens=32)
    assert not needle.found(answer.text)


def test_fidelity_stays_near_what_was_first_measured(smollm2_model):
    assert (FIRST["prompt_tokens"], FIRST["steps"], FIRST["k"]) == (PROMPT, CONTINUATION, K)
    assert FIRST["seed"] == SEED
    first = FIRST["indexes"]["pariskv"]  # then the paper's preset
    now = measure(*smollm2_model, "pariskv")
    assert now.kl_mean <= MARGIN * first["kl_mean"]
    assert 1 - now.agreement <= MARGIN * (1 - first["agreement"])
