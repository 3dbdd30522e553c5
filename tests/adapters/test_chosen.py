"""Models whose trained indexer chooses rows (minimax_m3, qwen4_exp): an index keeps them."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.layer_kinds import ChosenLayer, chosen_ids
from tests.adapters.tiny import EXPERTS, build, dense_steps, prompt, steps

SIZES = [40] + [1] * 14 + [6] + [1] * 4
REGIONS = dict(index="exact", k=1, sink=4, local_window=8, update_every=8, dense_below=0)
MINIMAX = {
    **EXPERTS,
    **dict(layer_types=["full_attention", "minimax_m3_sparse"] * 2, index_n_heads=2),
    **dict(index_head_dim=16, index_block_size=4, index_topk_blocks=4, partial_rotary_factor=1.0),
    **dict(dense_intermediate_size=96, shared_intermediate_size=32, swiglu_limit=7.0),
}


@pytest.fixture(scope="module")
def model():
    if "minimax_m3_vl_text" not in CONFIG_MAPPING:
        pytest.skip("came after transformers 5.17")
    return build("minimax_m3_vl_text", **MINIMAX)


def expected(model, inputs):
    """Of the model's own attention, which knows the blocks as eager alone."""
    model.set_attn_implementation("eager")
    return dense_steps(model, inputs, SIZES)


def test_logits_are_those_of_the_models_own_attention(model):
    """Without padding, before which its indexer chooses rows that are padded."""
    inputs = prompt(2, sum(SIZES))
    want = expected(model, inputs)
    with kvhf.attach(model, **REGIONS, dense_layers=(0, 2)) as cache:
        assert [type(layer) is ChosenLayer for layer in cache.layers] == [False, True] * 2
        got = steps(model, cache, inputs, SIZES)
        traffic = [layer.traffic for layer in cache.attention_layers()]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [one.steps for one in traffic] == [SIZES.count(1)] * 2
    assert 0 < float(traffic[0].rows_read) <= 16 * SIZES.count(1)  # 4 blocks of 4 rows
    options = dict(index_options={"row_codec": "int8"}, dense_layers=(0, 2))
    with kvhf.attach(model, **REGIONS, **options) as cache:  # rows are those of the index
        coarse = steps(model, cache, inputs, SIZES)
    assert max(float((a - b).abs().max()) for a, b in zip(coarse, want, strict=True)) > 1e-3


def test_padding_of_blocks_is_refused(model):
    inputs = prompt(2, 20, padded=True)
    with kvhf.attach(model, **REGIONS, dense_layers=(0, 2)) as cache, torch.no_grad():
        with pytest.raises(kvhf.UnsupportedError, match="attention_mask: got padding of Mini"):
            model(**inputs, past_key_values=cache)
        assert cache.lengths() == [0, 0]


def test_cuts_orders_copies_and_failures(model):
    inputs = prompt(2, 50)
    ids, options = inputs["input_ids"], dict(dense_layers=(0, 2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(input_ids=ids).logits[:, -1:]
    with kvhf.attach(model, **REGIONS, **options) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        cache.crop(-6)
        model(input_ids=ids[:, 44:49], past_key_values=cache)
        last = model.model.layers[3].self_attn
        scaling, last.scaling = last.scaling, 0.5
        with pytest.raises(kvhf.UnsupportedError, match=r"scaling, softcap: got 0.5"):
            model(input_ids=ids[:, 49:], past_key_values=cache)
        last.scaling = scaling
        other = cache.fork()
        other.batch_select_indices(torch.tensor([1, 0, 1]))
        cache.reorder_cache(torch.tensor([1, 0]))
        for one, order in ((cache, [1, 0]), (other, [1, 0, 1])):
            got = model(input_ids=ids[order, 49:], past_key_values=one).logits
            torch.testing.assert_close(got, want[order], rtol=1e-4, atol=1e-4)
        with pytest.raises(kvhf.UnsupportedError, match="chooser is a MiniMaxM3VLSparseCacheLayer"):
            cache.save("nowhere")


def test_ids_of_a_mask():
    mask = torch.tensor([[[[1, 0, 0], [0, 1, 0], [1, 0, 1]]]], dtype=torch.bool)
    ids = chosen_ids(torch.nn.Identity(), 2, 0, mask, None)
    assert ids.tolist() == [[[[0, -1], [1, -1], [0, 2]]] * 2]


@pytest.mark.parametrize("mask", [None, torch.ones(1, 3), torch.zeros(1, 1, 3, 3)])
def test_a_choice_that_is_not_told_is_refused(mask):
    with pytest.raises(kvhf.UnsupportedError, match="Identity: got a trained indexer without"):
        chosen_ids(torch.nn.Identity(), 2, 0, mask, None)
