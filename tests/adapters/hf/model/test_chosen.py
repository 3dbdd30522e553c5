"""Models whose trained indexer chooses rows (minimax_m3, deepseek_v32), which an index stores."""

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.cache.layer_kinds import ChosenLayer, chosen_ids
from tests.adapters.tiny import EXPERTS, LATENT, SMALL, build, dense_steps, prompt, steps
from tests.support.helpers import slow

SIZES = [40] + [1] * 14 + [6] + [1] * 4
REGIONS = dict(index="exact", k=1, sink=4, local_window=8, update_every=8, dense_below=0)
MINIMAX = {
    **EXPERTS,
    **dict(layer_types=["full_attention", "minimax_m3_sparse"] * 2, index_n_heads=2),
    **dict(index_head_dim=16, index_block_size=4, index_topk_blocks=4, partial_rotary_factor=1.0),
    **dict(dense_intermediate_size=96, shared_intermediate_size=32, swiglu_limit=7.0),
}
LATENTS = {
    **LATENT,
    **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    **dict(index_n_heads=2, index_head_dim=16, index_topk=8, first_k_dense_replace=1),
    **dict(n_group=1, topk_group=1),
}
SHARED = dict(indexer_types=["full", "shared"] * 2)
"""Every other layer reads the rows that the layer before it chose."""


@pytest.fixture(scope="module")
def model():
    if "minimax_m3_vl_text" not in CONFIG_MAPPING:
        pytest.skip("came after transformers 5.17")
    return build("minimax_m3_vl_text", **MINIMAX)


def expected(model, inputs):
    """Return the logits of the model's own attention, which supports blocks only in eager mode."""
    model.set_attn_implementation("eager")
    return dense_steps(model, inputs, SIZES)


def test_logits_are_those_of_the_models_own_attention(model):
    """Prompts have no padding, because the model's indexer would choose padded rows."""
    inputs = prompt(2, sum(SIZES))
    want = expected(model, inputs)
    with kvhf.attach(model, **REGIONS, dense_layers=(0, 2)) as cache:
        assert [type(layer) is ChosenLayer for layer in cache.layers] == [False, True] * 2
        got = steps(model, cache, inputs, SIZES)
        traffic = [layer.traffic for layer in cache.attention_layers()]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [one.steps for one in traffic] == [SIZES.count(1)] * 2
    # the indexer chooses 4 blocks of 4 rows
    assert 0 < float(traffic[0].rows_read) <= 16 * SIZES.count(1)
    options = dict(index_options={"row_codec": "int8"}, dense_layers=(0, 2))
    with kvhf.attach(model, **REGIONS, **options) as cache:  # rows are those of the index
        coarse = steps(model, cache, inputs, SIZES)
    assert max(float((a - b).abs().max()) for a, b in zip(coarse, want, strict=True)) > 1e-3


def test_padding_of_blocks_is_refused(model):
    inputs = prompt(2, 20, padded=True)
    with kvhf.attach(model, **REGIONS, dense_layers=(0, 2)) as cache, torch.no_grad():
        with pytest.raises(kvhf.UnsupportedError, match="attention_mask: got padding in Mini"):
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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        slow("deepseek_v32", {}),
        ("glm_moe_dsa", SHARED),
        slow("hy_v4", SHARED),  # has learned sinks
        # layers differ: two have sliding windows; slow, as the model is large for a tiny one
        slow("dots3_note_text", {}),
    ],
)
def test_rows_of_latents_that_an_indexer_chose(family, options):
    """The first tokens of a prompt, and of a padded sequence, see fewer rows than the indexer
    chooses."""
    if family not in CONFIG_MAPPING:
        pytest.skip("came after transformers 5.17")
    model = build(family, **LATENTS, **options)
    inputs = prompt(3, sum(SIZES), padded=True)
    want = dense_steps(model, inputs, SIZES)
    on_host = dict(index_options={"store": "host"})
    with kvhf.attach(model, **REGIONS, **on_host) as cache:
        assert all(type(cache.layers[i]) is ChosenLayer for i in cache.indexed)
        got = steps(model, cache, inputs, SIZES)
        read = [float(layer.traffic.rows_read) for layer in cache.attention_layers()]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert read == [pytest.approx(8 * SIZES.count(1))] * len(read)
    coarse = dict(index_options={"row_codec": "int8"})
    with kvhf.attach(model, **REGIONS, **coarse) as cache:  # rows are those of the index
        other = steps(model, cache, inputs, SIZES)
    assert max(float((a - b).abs().max()) for a, b in zip(other, want, strict=True)) > 1e-3


def test_dsa_made_of_an_indexers_projections_chooses_its_rows():
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

    model, heads = build("deepseek_v32", **{**LATENTS, "index_n_heads": 16}), 16
    indexer = model.model.layers[1].self_attn.indexer
    states, residue = torch.randn(2, 30, 64), torch.randn(2, 30, 16)
    cos, sin = model.model.rotary_emb(states, torch.arange(30)[None])
    causal = torch.ones(2, 30, 30, dtype=torch.bool).tril()
    with torch.no_grad():
        want = indexer(states, residue, (cos, sin), causal, None)
        queries = indexer.wq_b(residue).unflatten(-1, (heads, 16)).transpose(1, 2)
        keys = indexer.k_norm(indexer.wk(states))[:, None]
        weights = indexer.weights_proj(states).mT
        pair = apply_rotary_pos_emb(queries[..., :8], keys[..., :8], cos, sin)
        queries = torch.cat([pair[0], queries[..., 8:]], dim=-1)
        keys = torch.cat([pair[1], keys[..., 8:]], dim=-1)
        index = kvindex.create("dsa:key_codec=plain", q_heads=heads, kv_heads=1, head_dim=16)
        index.append(keys, keys)
        ids = index.choose(queries, weights, k=8)
    full = slice(8, None)  # earlier tokens see fewer than 8 rows
    assert torch.equal(ids[:, 0, full].sort(-1).values, want[:, full].long().sort(-1).values)
    assert (ids[:, 0, 0] == torch.tensor([0] + [-1] * 7)).all()


def test_generation_goes_on_after_a_cut_and_a_fork():
    model, inputs = build("deepseek_v32", **LATENTS), prompt(2, 40, padded=True)
    options = dict(max_new_tokens=8, do_sample=False)
    want = model.generate(**inputs, **options)
    with kvhf.attach(model, **REGIONS) as cache:
        got = model.generate(**inputs, **options, past_key_values=cache)
        assert torch.equal(got, want)
        cache.crop(-5)
        mask = torch.ones_like(got)
        mask[:, :40] = inputs["attention_mask"]
        for one in (cache.fork(), cache):
            again = {"input_ids": got[:, :-3], "attention_mask": mask[:, :-3]}
            assert torch.equal(model.generate(**again, past_key_values=one, max_new_tokens=3), want)


def test_a_dense_layer_of_rows_that_an_indexer_chose_is_refused():
    model = build("deepseek_v32", **LATENTS)
    with kvhf.attach(model, **REGIONS, dense_layers=(1,)) as cache, torch.no_grad():
        with pytest.raises(kvhf.UnsupportedError, match="got indices in the attention call"):
            model(**prompt(1, 12), past_key_values=cache)
        assert cache.lengths() == [0, 0, 0]


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        (
            "glm5_next_text",
            dict(index_kpool=2, qk_rope_head_dim=0, linear_head_dim=8, linear_num_heads=4),
            "chooses pools of 2 tokens",
        ),
        ("mistral_large4_text", dict(kv_source_layers=[0, 0, 2, 3]), "latents of other layers"),
    ],
)
def test_indexers_that_are_not_served(family, options, match):
    if family not in CONFIG_MAPPING:
        pytest.skip("came after transformers 5.17")
    config = AutoConfig.for_model(family, **{**SMALL, **LATENTS, **options})
    model = AutoModel.from_config(config)
    with pytest.raises(kvhf.UnsupportedError, match=match), kvhf.attach(model, **REGIONS):
        pass


def test_ids_of_a_mask():
    mask = torch.tensor([[[[1, 0, 0], [0, 1, 0], [1, 0, 1]]]], dtype=torch.bool)
    ids = chosen_ids(torch.nn.Identity(), 2, 0, mask, None, None)
    assert ids.tolist() == [[[[0, -1], [1, -1], [0, 2]]] * 2]


def test_ids_of_rows_that_a_mask_hides():
    mask = torch.tensor([[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]], dtype=torch.bool)
    rows = torch.tensor([[[0, 2], [0, 1], [2, 1]]], dtype=torch.int32)
    ids = chosen_ids(torch.nn.Identity(), 1, 0, mask, rows, None)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[[[0, -1], [-1, 1], [2, 1]]]]


@pytest.mark.parametrize("mask", [None, torch.ones(1, 3), torch.zeros(1, 1, 3, 3)])
def test_a_choice_that_is_not_told_is_refused(mask):
    with pytest.raises(kvhf.UnsupportedError, match="Identity: got an attention call without"):
        chosen_ids(torch.nn.Identity(), 2, 0, mask, None, None)
