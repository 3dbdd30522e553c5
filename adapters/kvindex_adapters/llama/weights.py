"""`Weights`: the tensors of a Llama-family model, named by their purpose.

The tensors are the model's own parameters, except for FP8 matrices, which are copies. On a GPU,
matrices with the same input (query, key and value; gate and up) are adjacent in memory, so that one
matrix product can use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex_adapters.llama.rotary import Rotary

if TYPE_CHECKING:
    from kvindex_adapters.llama.heads import HeadRanks


class Linear(NamedTuple):
    """A linear layer.

    Args:
        weight: The matrix `[out, in]`.
        bias: The bias `[out]`, or None.
        scale: The scale of each matrix row of an FP8 matrix, float32 `[out]`. None for other
            dtypes.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """An RMS normalization: its weight `[n]` and its epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: attention and a gated MLP, each preceded by a norm.

    Args:
        query_norm: The norm of each query head before the rotary embedding (Qwen3), or None.
        key_norm: The norm of each key head before the rotary embedding (Qwen3), or None.
        ranks: The ranks that shard the layer's heads, or None if the layer is not sharded.
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
    ranks: HeadRanks | None = None


@dataclass(frozen=True)
class Body:
    """The weights of a model without its language-model head."""

    embedding: Tensor
    rotary: Rotary
    layers: tuple[LayerWeights, ...]
    norm: Norm

    @property
    def fp8(self) -> bool:
        """True if the layers' matrices are FP8."""
        return any(layer.query.scale is not None for layer in self.layers)

    @property
    def ranks(self) -> HeadRanks | None:
        """The ranks that shard the heads, or None if the model is not sharded."""
        return self.layers[0].ranks


@dataclass(frozen=True)
class Weights(Body):
    """The weights of a whole model.

    Args:
        head: The language-model head `[V, hidden]`. With tied weights it is the embedding. If
            sharded, it has only this rank's rows.
        head_is_sharded: Whether `head` has only this rank's rows.
    """

    head: Linear
    head_is_sharded: bool = False

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all matrices but the embedding."""
        parts: list[Tensor] = [self.head.weight]
        for layer in self.layers:
            matrices = layer.query, layer.key, layer.value, layer.output
            parts += [one.weight for one in (*matrices, layer.gate, layer.up, layer.down)]
        return sum(part.nbytes for part in parts)


def whole(logits: Tensor, weights: Weights) -> Tensor:
    """Return logits `[B, V]` from the output of `head`. If `head` is sharded, gather the logits of
    all ranks."""
    ranks = weights.ranks
    if ranks is None or not weights.head_is_sharded:
        return logits
    return ranks.gather_logits(logits)


def read_body(body: Any) -> Body:
    """Read the weights of a Llama-family decoder of transformers.

    On a GPU, this moves matrices with the same input (query, key and value; gate and up) next to
    each other in memory.
    """
    rotary = body.rotary_emb
    if body.embed_tokens.weight.is_cuda:
        for modules in products(body):
            join_in_memory(*modules)
    return Body(
        embedding=body.embed_tokens.weight.detach(),
        rotary=Rotary(rotary.inv_freq.float(), float(rotary.attention_scaling)),
        layers=tuple(_layer(layer) for layer in body.layers),
        norm=_norm(body.norm),
    )


def read_weights(model: PreTrainedModel) -> Weights:
    """Read the weights of a Llama-family model of transformers, including the language-model
    head."""
    return Weights(**vars(read_body(model.model)), head=_linear(model.lm_head))


def products(body: Any) -> list[tuple[nn.Linear, ...]]:
    """List groups of linear modules that have the same input.

    Each layer has two groups: the projections to queries, keys and values, and the gate and up
    projections of the MLP.
    """
    found: list[tuple[nn.Linear, ...]] = []
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found.append((attention.q_proj, attention.k_proj, attention.v_proj))
        found.append((mlp.gate_proj, mlp.up_proj))
    return found


def join_in_memory(*modules: nn.Linear) -> None:
    """Move the weights of several modules next to each other in memory, as views of one matrix.

    Biases are moved as well, if all modules have one. The modules compute the same results as
    before. Views of the weights that were made earlier no longer share their memory.
    """
    with torch.inference_mode(False):
        for parts in _parameters(modules):
            if adjacent(parts) is None:  # otherwise an earlier decoder has already moved them
                joined = torch.cat([part.detach() for part in parts])
                rows = torch.split(joined, list(map(len, parts)))
                for part, its_own in zip(parts, rows, strict=True):
                    part.data = its_own


def separate_in_memory(*modules: nn.Linear) -> None:
    """Undo `join_in_memory`: move weights and biases to separate tensors."""
    with torch.inference_mode(False):
        for parts in _parameters(modules):
            if adjacent(parts) is not None:
                for part in parts:
                    part.data = part.detach().clone()


def are_joined(*modules: nn.Linear) -> bool:
    """Return True if the weights of the modules are adjacent in memory, and so are their biases."""
    return None not in map(adjacent, _parameters(modules))


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Join tensors along their first dimension without a copy.

    Return None if the tensors are not adjacent in memory.
    """
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        if not part.is_contiguous():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _parameters(modules: Sequence[nn.Linear]) -> list[list[Tensor]]:
    """List the modules' weights, and their biases if all modules have one."""
    weights: list[Tensor] = [module.weight for module in modules]
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    return [weights, biases] if len(biases) == len(weights) else [weights]


def _layer(layer: Any) -> LayerWeights:
    attention, mlp, parts = layer.self_attn, layer.mlp, dict(layer.self_attn.named_children())
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
