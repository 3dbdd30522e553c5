"""The mask function returns padding for full attention, 4-D masks where needed, otherwise None."""

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sliding_window_causal_mask_function,
)

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.attention import NAME, mask
from tests.adapters.tiny import build

WINDOW = sliding_window_causal_mask_function(24)
PADDED = torch.ones(2, 60, dtype=torch.bool)
PADDED[1, :7] = False


def made(q_length, kv_length=60, **options):
    options = {"mask_function": causal_mask_function, "device": torch.device("cpu"), **options}
    return mask(2, q_length, kv_length, kv_length - q_length, **options)


@pytest.mark.parametrize("q_length", [1, 5, 60])
@pytest.mark.parametrize("padding", [None, torch.ones(2, 60, dtype=torch.bool)])
def test_full_attention_without_padding_has_no_mask(q_length, padding):
    assert made(q_length, attention_mask=padding) is None


@pytest.mark.parametrize("q_length", [1, 5, 60])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_full_attention_gets_the_padding_and_never_more(q_length, dtype):
    """Otherwise the T x N mask of a padded 128K prompt would take 17 GB."""
    assert torch.equal(made(q_length, attention_mask=PADDED.to(dtype)), PADDED)


@pytest.mark.parametrize("options", [{}, dict(mask_function=WINDOW, local_size=24)])
def test_a_mask_that_is_shorter_than_the_keys_is_refused(options):
    with pytest.raises(UnsupportedError, match="attention_mask: got 60 columns, allowed are"):
        made(5, 64, attention_mask=PADDED, **options)


@pytest.mark.parametrize("q_length", [5, 60])
def test_a_sliding_layer_gets_what_sdpa_gets(q_length):
    got = made(q_length, mask_function=WINDOW, attention_mask=PADDED, local_size=24)
    assert got.shape == (2, 1, q_length, 60)
    columns, rows = torch.arange(60), torch.arange(60 - q_length, 60)[:, None]
    seen = (columns <= rows) & (columns > rows - 24) & PADDED[:, None, None]
    real = PADDED[:, None, 60 - q_length :, None].expand_as(seen)
    assert torch.equal(got[real], seen[real])


def test_a_single_query_that_sees_all_there_is_has_no_mask():
    assert made(1, 23, mask_function=WINDOW, local_size=24) is None


def test_what_may_not_be_skipped_gets_its_mask():
    """A caller that requests a mask gets it. A layer with an index rejects four dimensions."""
    got = made(5, allow_is_causal_skip=False)
    assert got.shape == (2, 1, 5, 60)


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_transformers_calls_it(make):
    model = build("qwen3")
    model.config._attn_implementation_internal = NAME
    got = make(
        config=model.config,
        inputs_embeds=torch.zeros(2, 60, 64),
        attention_mask=PADDED,
        past_key_values=DynamicCache(config=model.config),
        position_ids=torch.arange(60)[None],
    )
    assert got.ndim == (2 if make is create_causal_mask else 4)
