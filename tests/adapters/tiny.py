"""Tiny random models of many families, and their logits with full attention."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvindex_adapters.evaluate.tasks.haystack import paragraphs

VOCABULARY = 101
LAYERS = 4
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    # large weights, so that attention is far from uniform and a wrong row changes the logits
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attention_dropout=0.0,
)
MIXED = dict(layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2), sliding_window=24)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    **dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16),
    **dict(head_dim=8, num_key_value_heads=4),
)
"""Families with multi-head latent attention."""
MAMBA = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, use_mamba_kernels=False)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3": {**MIXED, "use_sliding_window": True},
    "qwen3_moe": {**EXPERTS, "sliding_window": None},
    "mistral": {"sliding_window": None},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 2.0},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere2": MIXED,
    "smollm3": {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": 4},
    # full-attention layers have fewer heads, of another size
    "gemma4_text": {
        **MIXED,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "modernbert-decoder": {
        **{"layer_types": MIXED["layer_types"], "local_attention": 24},
        **{"cls_token_id": 1, "sep_token_id": 2},
    },
    # linear and full attention in one layer
    "falcon_h1": {
        **{**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "mamba_chunk_size": 16,
    },
    "zamba": {
        **{**MAMBA, "n_mamba_heads": 2, "num_key_value_heads": 4},
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2,
    },
    "zamba2": {
        **{**MAMBA, "n_mamba_heads": 4, "num_key_value_heads": 4, "chunk_size": 16},
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
    },
    "zaya": {
        **{"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
        "router_hidden_size": 16,
    },
    # latents in place of keys and values
    "deepseek_v3": {
        **{**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"n_group": 1, "topk_group": 1},
    },
    "minicpm3": LATENT,
    # a bias by distance is added to the logits
    "inkling_text": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"d_rel": 8, "rel_extent": 32, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
    },
    # a learned sink for each head
    "gpt_oss": {**EXPERTS, **MIXED},
}
if "inkling2_text" in CONFIG_MAPPING:  # came after transformers 5.17
    # the same bias, and a sink for each head and token
    FAMILIES["inkling2_text"] = FAMILIES["inkling_text"]


def build(family: str, **options: Any) -> PreTrainedModel:
    """Make a model of the family with random float32 weights from a fixed seed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **options})
    # sdpa has no softcap, so transformers' only correct reference is eager attention
    dense = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=dense)
    return model.float().eval()


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def byte_pairs() -> PreTrainedTokenizerFast:
    """Make a tokenizer of 2,000 byte pairs, learned from the filler text of tasks, with a chat
    template."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(paragraphs()[:300], vocab_size=2000, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, chat_template=TEMPLATE)


def padded_byte_pairs(size: int) -> PreTrainedTokenizerFast:
    """Make the tokenizer of `byte_pairs` as a GGUF file contains it, padded to `size` tokens."""
    made = byte_pairs()
    made.add_tokens([f"[PAD{number}]" for number in range(len(made), size)])
    return made


def prompt(batch: int, length: int, *, padded: bool = False) -> dict[str, Tensor]:
    """Return random ids `[B, N]` and their mask; with padding, sequence `b` starts `5 b` tokens
    later."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch):
            mask[row, : 5 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def steps(
    model: PreTrainedModel, cache: Any, inputs: dict[str, Tensor], sizes: list[int]
) -> list[Tensor]:
    """Return logits `[B, T, V]` of each step if the prompt is read `sizes` tokens at a time."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits, start = [], 0
    with torch.no_grad():
        for size in sizes:
            stop = start + size
            output = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(output.logits.masked_fill(mask[:, start:stop, None] == 0, 0))
            start = stop
    return logits


def dense_steps(
    model: PreTrainedModel, inputs: dict[str, Tensor], sizes: list[int]
) -> list[Tensor]:
    """Return the same logits with full attention and transformers' own cache."""
    return steps(model, DynamicCache(config=model.config), inputs, sizes)
