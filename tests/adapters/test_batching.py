"""Continuous batching through indexes, held to transformers' own `generate_batch`."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import VOCABULARY, build

REGIONS = dict(sink=2, local_window=4, update_every=8, dense_below=0)
"""Small, so that nearly every decoded token searches."""
EXACT = dict(index="exact", k=500, **REGIONS)
TOKENS = 12


def prompts(*lengths, seed=3, prefix=()):
    """Random token ids, one list a request."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [[*prefix, *ids] for ids in draw]


def batch(model, inputs, *, answers=1, **options):
    """Tokens of `generate_batch`, request by request."""
    sizes = dict(page_size=16, block_size=16, num_blocks=64, max_batch_tokens=64)
    known = ContinuousBatchingConfig.__dataclass_fields__
    new = "page_size" in known
    sizes.pop("block_size" if new else "page_size")
    if not new and "page_size" in options:
        options["block_size"] = options.pop("page_size")
    config = GenerationConfig(
        max_new_tokens=TOKENS, eos_token_id=-1, do_sample=False, num_return_sequences=answers
    )
    found = model.generate_batch(
        inputs,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**{**sizes, **options}),
    )
    assert len(found) == len(inputs) * answers
    assert all(result.error is None for result in found.values())
    return [result.generated_tokens for result in found.values()]


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"allow_block_sharing": False}, {"max_batch_tokens": 24}, {"num_blocks": 12}],
    ids=["shared", "unshared", "chunks", "few blocks"],
)
@pytest.mark.parametrize("index", ["exact", "pariskv"])
def test_tokens_with_all_rows_are_those_of_plain_attention(model, index, options):
    shared = prompts(32, seed=9)[0]
    inputs = prompts(1, 7, 30, 61, 90) + prompts(5, 9, seed=4, prefix=shared)
    expected = batch(model, inputs, **options)
    with kvhf.attach_batch(model, **{**EXACT, "index": index}) as batching:
        assert batch(model, inputs, **options) == expected
        report = batching.report()
        assert report.steps > 5 * TOKENS
        assert report.nbytes == {"indexes": 0}  # all are gone
    assert batch(model, inputs, **options) == expected
