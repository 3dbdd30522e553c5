"""Tiny random models of every family that transformers maps to a causal language model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 128
LAYERS = 4

NAMES = [
    (
        LAYERS,
        "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers "
        "encoder_layers num_encoder_layers num_blocks max_window_layers depth num_layers_per_stack",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups "
        "linear_num_key_heads num_experts_per_tok moe_topk zero_expert_num moe_k top_k_experts",
    ),
    (1, "n_group topk_group n_groups mamba_n_groups first_k_dense_replace"),
    (
        16,
        "head_dim swa_head_dim global_head_dim d_head dim_head kv_channels attention_head_size "
        "attention_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim "
        "qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank index_head_dim "
        "mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size "
        "time_step_rank mamba_dt_rank rotary_dim chunk_size mamba_chunk_size "
        "query_pre_attn_scalar o_lora_rank laurel_rank adapter_rank index_topk router_hidden_size "
        "gated_norm_rank",
    ),
    (24, "sliding_window sliding_window_size attention_window_size local_attention window_size"),
    (32, "qk_head_dim hidden_size_per_layer_input"),
    (
        64,
        "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim "
        "attention_hidden_size input_embedding_size output_embedding_size lru_width mamba_d_ssm",
    ),
    (
        96,
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim "
        "decoder_ffn_dim encoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size d_inner dff dim_ff "
        "feed_forward_size shared_intermediate_size shared_experts_intermediate_size "
        "dense_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size",
    ),
    (
        512,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length "
        "max_target_positions original_max_position_embeddings context_length",
    ),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
]
SMALL = {name: size for size, names in NAMES for name in names.split()}
"""What an option of a configuration becomes, where the family has it."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SPREAD = ("initializer_range", "init_std", "initializer_std")

MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
HYBRID = {
    "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2,
    "attention_hidden_size": 128,  # attention reads the embeddings beside the hidden states
    "attention_head_dim": 32,
}
ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": LAYERS,
    "num_kv_shared_layers": LAYERS,
}
INDEXER = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"] * LAYERS,
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"default": {"text_config": ASSISTANT}, "text_config": ASSISTANT},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": LAYERS}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": MIXED,
    "mistral": {"sliding_window": None},  # as its later checkpoints
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID,
    "zamba2": HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside it; `default`: what its configuration cannot do without."""


def small(default: Any) -> dict[str, Any]:
    """Keywords that make a configuration like `default` tiny."""
    options: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in TOKENS:
            options[name] = TOKENS[name]
        elif name in SPREAD:
            options[name] = 0.15  # attention is far from uniform: a wrong row changes the logits
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name in SMALL:
            options[name] = SMALL[name]
        elif name.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
            options[name] = VOCABULARY - 1 - len(options) % 20  # none of the prompt's
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            options[name] = small(part)
    if "head_dim" in vars(default):
        options["head_dim"] = 16
    if "kv_lora_rank" in vars(default):  # latent attention has no groups
        options["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(vars(default).get("layer_types") or ()))
    if kinds:
        options["layer_types"] = (kinds * LAYERS)[:LAYERS]
    return options


def merged(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`options` with `more`, parts of a configuration option by option; None takes one away."""
    result = dict(options)
    for name, value in more.items():
        inner = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if inner else value
    return result


def build(family: str) -> PreTrainedModel:
    """A model of the family with random float32 weights, from a fixed seed."""
    torch.manual_seed(0)
    own = FAMILIES.get(family, {})
    default = CONFIG_MAPPING[family](**own.get("default", {}))
    options = merged(small(default), {name: own[name] for name in own if name != "default"})
    config = AutoConfig.for_model(family, **options)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()
