"""`Weights`: the tensors of a model, by what they do: its own, but for matrices in FP8.

On a GPU those that one product takes together are laid one below the other in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex_adapters.decoder.rotary import Rotary


class Linear(NamedTuple):
    """A matrix `[out, in]`, and a bias `[out]` or None.

    scale: float32 `[out]`, of each row of a matrix in FP8 (`quantized.py`), else None.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """Factors `[n]` of RMS normalization, and the number that keeps it from dividing by zero."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention, then a gated perceptron, each after a normalization.

    query_norm, key_norm: of each head before rotation (Qwen3), or None.
    """

    attention_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """A whole model; head may be the embedding `[V, hidden]` itself (tied)."""

    embedding: Tensor
    rotary: Rotary
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear

    @property
    def fp8(self) -> bool:
        """Whether the layers' matrices are FP8."""
        return any(layer.query.scale is not None for layer in self.layers)


def read_weights(model: PreTrainedModel) -> Weights:
    """The weights of a model that `config.check_model` has checked."""
    body = model.model
    rotary = body.rotary_emb
    return Weights(
        embedding=body.embed_tokens.weight.detach(),
        rotary=Rotary(rotary.inv_freq.float(), float(rotary.attention_scaling)),
        layers=tuple(_layer(layer) for layer in body.layers),
        norm=_norm(body.norm),
        head=_linear(model.lm_head),
    )


def lay_together(*modules: nn.Linear) -> None:
    """Weights of one width lie one below the other from here on, as views of one matrix.

    What the modules compute stays as it is; what else was a view of their weights is none any more.
    """
    if adjacent([module.weight for module in modules]) is not None:
        return  # as an earlier decoder has laid them
    joined = torch.cat([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        end = start + module.out_features
        module.weight.data = joined[start:end]
        start = end


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are, one below the other in memory; None where they lie otherwise."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        if not part.is_contiguous():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _layer(layer: Any) -> LayerWeights:
    attention, mlp, parts = layer.self_attn, layer.mlp, dict(layer.self_attn.named_children())
    if mlp.gate_proj.weight.is_cuda:
        lay_together(attention.q_proj, attention.k_proj, attention.v_proj)
        lay_together(mlp.gate_proj, mlp.up_proj)
    return LayerWeights(
        attention_norm=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=_norm(parts["q_norm"]) if "q_norm" in parts else None,
        key_norm=_norm(parts["k_norm"]) if "k_norm" in parts else None,
        output=_linear(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: nn.Linear) -> Linear:
    bias = module.bias
    return Linear(module.weight.detach(), None if bias is None else bias.detach())


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))
