"""Random weights in the shape of a known model, for kvindex's decoder or for transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from kvindex.core.geometry import Geometry
from kvindex_adapters.decoder.quantized import PLAIN, quantize
from kvindex_adapters.llama.rotary import Rotary
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, Weights


class Shape(NamedTuple):
    """The sizes of a language model.

    Args:
        layers: Number of layers.
        hidden: Size of the hidden state.
        inner: Size of the MLP's inner layer.
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_dim: Dimension of a query and a key.
        vocabulary: Number of tokens in the vocabulary.
        normed: Whether each head normalizes queries and keys with an RMSNorm, as in Qwen3.
        tied: Whether the output head uses the matrix of the embedding.
    """

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    normed: bool = False
    tied: bool = False

    def geometry(self, dtype: torch.dtype, device: str) -> Geometry:
        """Return the shapes of one attention layer."""
        sizes = dict(q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        return Geometry.of(**sizes, dtype=dtype, device=device)


SHAPES = {
    "qwen3-8b": Shape(36, 4096, 12_288, 32, 8, 128, 151_936, normed=True),
    "llama-3.1-8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
    # rotary embedding for all coordinates of a head; the published model rotates only a part
    "glm-4-9b": Shape(40, 4096, 13_696, 32, 2, 128, 151_552),
}


def weights_of(shape: Shape, g: Geometry, kind: str = PLAIN) -> Weights:
    """Return random weights for a decoder. Each matrix preserves the variance of its input.

    `kind` is "plain", or "fp8" for matrices in FP8.
    """
    draw = torch.Generator(g.device).manual_seed(1)
    size = shape.vocabulary, shape.hidden
    embedding = torch.empty(size, dtype=g.dtype, device=g.device).normal_(generator=draw)

    def linear(outputs: int, inputs: int) -> Linear:
        weight = torch.empty((outputs, inputs), dtype=g.dtype, device=g.device)
        return Linear(weight.normal_(std=inputs**-0.5, generator=draw), None)

    def norm(size: int) -> Norm:
        return Norm(torch.ones(size, dtype=g.dtype, device=g.device), 1e-6)

    def together(*outputs: int) -> list[Linear]:
        whole = linear(sum(outputs), shape.hidden).weight
        return [Linear(part, None) for part in whole.split(outputs)]

    def layer() -> LayerWeights:
        hidden, inner, D = shape.hidden, shape.inner, shape.head_dim
        query, key, value = together(*(n * D for n in (shape.q_heads, *2 * (shape.kv_heads,))))
        gate, up = together(inner, inner)
        return LayerWeights(
            attention_norm=norm(hidden),
            query=query,
            key=key,
            value=value,
            query_norm=norm(D) if shape.normed else None,
            key_norm=norm(D) if shape.normed else None,
            output=linear(hidden, shape.q_heads * D),
            mlp_norm=norm(hidden),
            gate=gate,
            up=up,
            down=linear(hidden, inner),
        )

    made = Weights(
        embedding=embedding,
        rotary=Rotary(torch.zeros(shape.head_dim // 2, device=g.device), 1.0),
        layers=tuple(layer() for _ in range(shape.layers)),
        norm=norm(shape.hidden),
        head=Linear(embedding, None) if shape.tied else linear(shape.vocabulary, shape.hidden),
    )
    return made if kind == PLAIN else quantize(made)


def sharpen(weights: Weights, factor: float) -> None:
    """Change the weights of all layers so that attention logits are multiplied by `factor`."""
    for layer in weights.layers:
        (weight, _, scale), norm = layer.query, layer.query_norm
        if norm is not None:
            weight, scale = norm.weight, None
        (weight if scale is None else scale).mul_(factor)


def model_of(shape: Shape, g: Geometry, positions: int) -> Any:
    """Return a transformers model of this shape with random weights.

    transformers initializes the weights. The model has no end-of-sequence token, so it generates as
    many tokens as requested.

    Args:
        shape: Sizes of the model.
        g: Shapes of a layer, with the dtype and the device of the model.
        positions: Largest number of tokens in a sequence (`max_position_embeddings`).
    """
    kind: type[PreTrainedConfig] = Qwen3Config if shape.normed else LlamaConfig
    config = kind(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with g.device:
        return AutoModelForCausalLM.from_config(config, dtype=g.dtype).eval()
