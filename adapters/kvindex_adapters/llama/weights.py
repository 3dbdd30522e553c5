"""`Weights`: the tensors of a model, by what they do: its own, but for matrices in FP8.

On a GPU those that one product takes together are laid one below the other in memory.
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

    query_norm, key_norm: of each head before rotation (Qwen3), or None; ranks: those that have the
    layer's heads together, of which this is one's share, or None.
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
    """A model without its head."""

    embedding: Tensor
    rotary: Rotary
    layers: tuple[LayerWeights, ...]
    norm: Norm

    @property
    def fp8(self) -> bool:
        """Whether the layers' matrices are FP8."""
        return any(layer.query.scale is not None for layer in self.layers)

    @property
    def ranks(self) -> HeadRanks | None:
        """Those that have the heads together, of which this is one's share; None: it is whole."""
        return self.layers[0].ranks


@dataclass(frozen=True)
class Weights(Body):
    """A model; head may be the embedding `[V, hidden]` itself (tied), or a rank's rows of it.

    head_is_shared: whether it has the rows of a rank alone.
    """

    head: Linear
    head_is_shared: bool = False


def whole(logits: Tensor, weights: Weights) -> Tensor:
    """Logits `[B, V]` from what `head` gives: of all ranks, where each has some of its rows."""
    ranks = weights.ranks
    if ranks is None or not weights.head_is_shared:
        return logits
    return ranks.gather_logits(logits)


def read_body(body: Any) -> Body:
    """The weights of a model's decoder, which `hf.llama_family` has checked.

    On a GPU those of one product are laid together.
    """
    rotary = body.rotary_emb
    if body.embed_tokens.weight.is_cuda:
        for modules in products(body):
            lay_together(*modules)
    return Body(
        embedding=body.embed_tokens.weight.detach(),
        rotary=Rotary(rotary.inv_freq.float(), float(rotary.attention_scaling)),
        layers=tuple(_layer(layer) for layer in body.layers),
        norm=_norm(body.norm),
    )


def read_weights(model: PreTrainedModel) -> Weights:
    """The weights of a model that `decoder.config.check_model` has checked, as `read_body`."""
    return Weights(**vars(read_body(model.model)), head=_linear(model.lm_head))


def products(body: Any) -> list[tuple[nn.Linear, ...]]:
    """The modules of a decoder whose weights one product takes together."""
    found: list[tuple[nn.Linear, ...]] = []
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found.append((attention.q_proj, attention.k_proj, attention.v_proj))
        found.append((mlp.gate_proj, mlp.up_proj))
    return found


def lay_together(*modules: nn.Linear) -> None:
    """Weights of one width lie one below the other from here on, as views of one matrix.

    So do biases, where all have one. What the modules compute stays as it is; what else was a view
    of their weights is none any more.
    """
    with torch.inference_mode(False):
        for parts in _parameters(modules):
            if adjacent(parts) is None:  # else as an earlier decoder has laid them
                joined = torch.cat([part.detach() for part in parts])
                rows = torch.split(joined, list(map(len, parts)))
                for part, its_own in zip(parts, rows, strict=True):
                    part.data = its_own


def lay_apart(*modules: nn.Linear) -> None:
    """Weights that lie together have memory of their own from here on, as do biases."""
    with torch.inference_mode(False):
        for parts in _parameters(modules):
            if adjacent(parts) is not None:
                for part in parts:
                    part.data = part.detach().clone()


def are_together(*modules: nn.Linear) -> bool:
    """Whether weights and biases are as `lay_together` leaves them."""
    return None not in map(adjacent, _parameters(modules))


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


def _parameters(modules: Sequence[nn.Linear]) -> list[list[Tensor]]:
    """The weights of some modules, and their biases if all have one."""
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
