"""A token of a transformers model as one graph: the tokens that it gives without, whatever happens.

On a CPU graphs are work that is kept (`tests/cuda/graphs.py`). Kernels are emulated in few tests;
the others are of an index in plain torch.
"""

from dataclasses import replace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build, prompt
from tests.cuda.graphs import WholeGraph, kept
from tests.support.captured import Captured

REGIONS = dict(index=Captured, k=500, sink=4, local_window=8, update_every=24, dense_below=0)
FULL = dict(layer_types=["full_attention"] * 2)
EAGER = 3
"""Tokens that are no replays: the first one ends the prompt, the next two are compared."""


@pytest.fixture
def graphs():
    """Counts graphs and replays."""
    with kept(WholeGraph) as counting:
        yield counting


def model_of(family="llama", **options):
    return build(family, **{"num_hidden_layers": 2, "eos_token_id": None, **options})


def generated(model, inputs, count, *, attach=None, **options):
    """Tokens int64 `[B, count]` and the report."""
    options = {"do_sample": False, "max_new_tokens": count, **options}
    with kvhf.attach(model, **{**REGIONS, "token_graph": True, **(attach or {})}) as cache:
        out = model.generate(**inputs, past_key_values=cache, **options)
        return out[:, inputs["input_ids"].shape[1] :], cache.report()


def both(model, inputs, count, *, attach=None, **options):
    """Tokens and reports with graphs, and without."""
    return [
        generated(model, inputs, count, attach={**(attach or {}), "token_graph": on}, **options)
        for on in (True, False)
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", FULL),
        ("qwen3", FULL),
        ("mistral", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("granite", {}),
        ("glm4", {}),
        ("gpt_neox", {}),
        ("falcon_h1", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
    ],
)
def test_tokens_are_those_without_graphs(graphs, family, options):
    model = model_of(family, **options)
    (mine, report), (theirs, plain) = both(model, prompt(1, 60), 20)
    print(family, report.graph)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert (graphs.made, graphs.replays) == (1, 19 - EAGER)
