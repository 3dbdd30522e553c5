"""Tiny models that the decoder supports, with biases and norms that are not zeros and ones."""

import copy

import torch

from tests.adapters.tiny import LAYERS, build, prompt

FULL = dict(layer_types=["full_attention"] * LAYERS, use_sliding_window=False, sliding_window=None)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)

FAMILIES = {
    "llama": ("llama", {}),
    "llama, biases, tied": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama, llama3's rotation": ("llama", dict(rope_parameters=LLAMA3)),
    "llama, yarn": ("llama", dict(rope_parameters=YARN)),
    "llama, slower rotation": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    ),
    "llama, no groups": ("llama", dict(num_key_value_heads=4)),
    "mistral": ("mistral", dict(num_key_value_heads=1)),
    "qwen2": ("qwen2", FULL),
    "qwen3": ("qwen3", {**FULL, "attention_bias": True, "tie_word_embeddings": True}),
}
"""Name -> family of `tiny.build`, and further options."""


def model_of(name, **options):
    """Make a model that generates no end token, unless the options change this."""
    family, more = FAMILIES[name]
    model = build(family, **{"eos_token_id": None, **more, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def ids_of(length, seed=0):
    """Return random ids of a prompt, int64 `[N]`."""
    return prompt(1, length + seed)["input_ids"][0, seed:]


def padded(model, size):
    """Return a copy of a model of the Llama family with another number of tokens.

    Further tokens have the weights of the first ones, but their logits are twice as large. So the
    copy often chooses them.
    """
    made, count = copy.deepcopy(model), model.lm_head.out_features
    made.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for weight, factor in ((made.model.embed_tokens.weight, 1), (made.lm_head.weight, 2)):
            weight[count:] = factor * weight[: max(size - count, 0)]
    return made


def perturbed(model):
    """Change the weights of a model by 5%, so that it often chooses the same token, and return
    it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator).to(weight))
    return model
