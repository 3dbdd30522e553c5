"""Read the sizes of a model, and check that the decoder supports it."""

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
        scale: Factor of the attention logits.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    scale: float

    def shard(self, ranks: int) -> DecoderConfig:
        """Return the sizes of one rank's shard of the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=self.kv_heads // ranks)

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderConfig:
        """Return the sizes of a loaded model that `check_model` has checked."""
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
    """Raise UnsupportedError if the ranks cannot divide the model evenly.

    Args:
        config: Sizes of the whole model.
        inner: Number of rows of each layer's gate matrix.
        ranks: Number of ranks.
    """
    sizes = [("KV heads", config.kv_heads), *(("rows of the perceptron", rows) for rows in inner)]
    for name, size in sizes:
        if size % ranks:
            raise UnsupportedError(
                f"heads: got {ranks} ranks for {size} {name}, allowed are numbers of ranks that "
                "divide them, or an index that distributes tokens, for example pariskv+sharded"
            )


def check_model(model: Any) -> None:
    """Raise TypeError if this is no transformers model, UnsupportedError if the decoder cannot run
    it."""
    if not isinstance(model, PreTrainedModel):
        raise no_model(model)
    if model in attached:
        raise UnsupportedError("model: got one that is attached, allowed is one outside attach()")
    check_family(model)


def supports(model: Any) -> str | None:
    """Return why the decoder does not support a model, or None if it does.

    Args:
        model: A loaded transformers model.

    Returns:
        One sentence, or None.
    """
    try:
        check_model(model)
    except (TypeError, UnsupportedError) as error:
        return str(error)
    return None
