"""`DecoderConfig` contains the sizes of a model. `check_model` checks that kvindex's minimal
decoder supports the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.llama_family import check_family
from kvindex_adapters.hf.model.wrapped import no_model


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a model.

    Args:
        layers: Number of layers.
        q_heads: Query heads, `H`.
        kv_heads: KV heads, `G`.
        head_dim: Dimension of a head, `D`.
        vocabulary: Size of the vocabulary, `V`.
        scale: Factor by which `q·k` is multiplied before the softmax.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    scale: float

    def shard(self, ranks: int) -> DecoderConfig:
        """Return the sizes of one rank's shard, which has `1 / ranks` of the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=self.kv_heads // ranks)

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderConfig:
        """Return the sizes of a loaded transformers model. Call `check_model` first."""
        attention = model.model.layers[0].self_attn
        head_dim = attention.head_dim
        return cls(
            layers=len(model.model.layers),
            q_heads=attention.q_proj.out_features // head_dim,
            kv_heads=attention.k_proj.out_features // head_dim,
            head_dim=head_dim,
            vocabulary=model.lm_head.out_features,
            scale=attention.scaling,
        )


def check_shards(config: DecoderConfig, inner: Sequence[int], ranks: int) -> None:
    """Raise UnsupportedError if KV heads or MLP rows cannot be divided evenly among the ranks.

    Args:
        config: Sizes of the whole model.
        inner: Number of rows of the MLP's gate matrix in each layer.
        ranks: Number of ranks.
    """
    sizes = [("KV heads", config.kv_heads), *(("rows of the MLP", rows) for rows in inner)]
    for name, size in sizes:
        if size % ranks:
            raise UnsupportedError(
                f"heads: got {ranks} ranks, but the model has {size} {name}; use a number of ranks "
                f"that divides {size}, or shard tokens instead, for example with pariskv+sharded"
            )


def check_model(model: Any) -> None:
    """Raise TypeError if `model` is not a transformers model, and UnsupportedError if the decoder
    cannot run it."""
    if not isinstance(model, PreTrainedModel):
        raise no_model(model)
    if model in attached:
        raise UnsupportedError(
            "model: got a model with an attached index; call this outside of kvhf.attach()"
        )
    check_family(model)


def supports(model: Any) -> str | None:
    """Return the reason why the decoder cannot run a model, or None if the decoder can run it.

    Args:
        model: A loaded transformers model.

    Returns:
        The reason as one sentence, or None.
    """
    try:
        check_model(model)
    except (TypeError, UnsupportedError) as error:
        return str(error)
    return None
