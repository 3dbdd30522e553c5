"""With `exact` and k as long as the sequence, every family computes full attention."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.cache.layer import IndexedLayer
from tests.adapters.tiny import FAMILIES, build, dense_steps, prompt, steps
from tests.support.helpers import mostly_slow

TOLERANCE = 1e-4
SIZES = [40] + [1] * 14 + [6] + [1] * 4  # prompt, decoding with an update, a second turn
REGIONS = dict(k=500, sink=4, local_window=8, update_every=8, dense_below=0)
FEW = (
    *("llama", "gemma2", "cohere2", "gemma4_text", "zamba2"),
    *("deepseek_v3", "inkling_text", "gpt_oss"),
)
"""Families with groups, a softcap, sliding windows, two head sizes, hybrid layers, latents, a bias,
or learned sinks."""
MORE = ("qwen3_moe", "gpt_neox", "falcon_h1", "zaya")
"""Families with experts, fused projections, or linear attention in the same layer."""


@pytest.mark.parametrize(
    ("family", "batch", "padded"),
    mostly_slow(
        [(family, *how) for how in ((3, True), (1, False)) for family in FAMILIES],
        *[(family, 3, True) for family in (*FEW, *MORE)],
        ("llama", 1, False),
        ("gpt_oss", 1, False),
    ),
    ids=str,
)
def test_logits_equal_full_attention(family, batch, padded):
    model, inputs = build(family), prompt(batch, sum(SIZES), padded=padded)
    expected = dense_steps(model, inputs, SIZES)

    with kvhf.attach(model, index="exact", **REGIONS) as cache:
        logits = steps(model, cache, inputs, SIZES)
        layers = [layer for layer in cache.layers if isinstance(layer, IndexedLayer)]
        searches = [layer.attention.traffic.steps for layer in layers]

    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert worst < TOLERANCE
    # logits are large compared with the tolerance
    assert float(expected[-1].abs().max()) > 100 * TOLERANCE
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    assert len(layers) == kinds.count("full_attention") + kinds.count("hybrid") > 0
    assert searches == [SIZES.count(1)] * len(layers)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llama", *FEW[1::2]))
def test_pariskv_runs_and_is_close_in_every_family(family):
    """With enough rows to retrieve all, differences come only from rounding of retrieved rows."""
    model, inputs = build(family), prompt(2, sum(SIZES), padded=True)
    expected = dense_steps(model, inputs, SIZES)
    with kvhf.attach(model, index="pariskv", **REGIONS) as cache:
        logits = steps(model, cache, inputs, SIZES)
    assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(logits, expected, strict=True))


def test_the_comparison_can_fail():
    model, inputs = build("llama"), prompt(1, sum(SIZES))
    expected = dense_steps(model, inputs, SIZES)
    with kvhf.attach(model, index="exact", **{**REGIONS, "k": 1, "sink": 0}) as cache:
        logits = steps(model, cache, inputs, SIZES)
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert worst > 10 * TOLERANCE
