"""`DecoderConfig`: the sizes of a model that the decoder runs, or an error in words."""

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
    """Sizes of a model: layers, `H` query heads, `G` KV heads, head dimension `D`, vocabulary `V`.

    scale: of the logits of attention.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    scale: float

    def share(self, ranks: int) -> DecoderConfig:
        """Sizes of a rank's share of the heads."""
        return replace(self, q_heads=self.q_heads // ranks, kv_heads=self.kv_heads // ranks)

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderConfig:
        """Sizes of a loaded model, which `check_model` has checked."""
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


def check_share(config: DecoderConfig, inner: Sequence[int], ranks: int) -> None:
    """Raises UnsupportedError for a model that so many ranks do not share evenly.

    inner: rows of the perceptron's matrices of each layer.
    """
    sizes = [("KV heads", config.kv_heads), *(("rows of the perceptron", rows) for rows in inner)]
    for name, size in sizes:
        if size % ranks:
            raise UnsupportedError(
                f"heads: got {ranks} ranks for {size} {name}, allowed are numbers of ranks that "
                "divide them, or an index that shares tokens, as pariskv+sharded does"
            )


def check_model(model: Any) -> None:
    """Raises TypeError for what is no transformers model, UnsupportedError for one not served."""
    if not isinstance(model, PreTrainedModel):
        raise no_model(model)
    if model in attached:
        raise UnsupportedError("model: got one that is attached, allowed is one outside attach()")
    check_family(model)


def supports(model: Any) -> str | None:
    """Why the decoder does not run a model, or None where it does."""
    try:
        check_model(model)
    except (TypeError, UnsupportedError) as error:
        return str(error)
    return None
