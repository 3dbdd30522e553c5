"""`Reading`: a model's weights as a decoder has read them, and whether the model is still the same.

Plain weights are views of the model's parameters, so that a change in place is the decoder's, too.
Copies (FP8, a rank's share of the heads) do not follow the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from kvindex_adapters.decoder.config import DecoderConfig, check_share
from kvindex_adapters.decoder.quantized import PLAIN, quantize
from kvindex_adapters.hf.layer_options import Ropes
from kvindex_adapters.hf.llama_family import check_modules
from kvindex_adapters.hf.module_state import ModuleState
from kvindex_adapters.hf.rotary import rotary_frequencies
from kvindex_adapters.llama.fused import Fused
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.shares import share
from kvindex_adapters.llama.weights import Weights, read_weights

_version = attrgetter("_version")
"""How often a tensor was written to; torch has no public name for it."""


class Reading:
    """The weights, sizes and rotary frequencies of a model that `check_model` has checked.

    weights, ranks: as of `Decoder.of`. A model whose weights are copied is not kept alive.
    """

    def __init__(
        self, model: PreTrainedModel, *, weights: str = PLAIN, ranks: HeadRanks | None = None
    ) -> None:
        read, config, ropes = read_weights(model), DecoderConfig.of(model), _ropes(model)
        self._copied = "" if weights == PLAIN else f"weights={weights!r}"
        if ranks is not None:
            self._copied = "ranks"
        self.model = None if self._copied else model
        """The model, or None where weights are copies."""
        self._source, self._facts = ref(model), _facts(read, config, ropes)
        # weak: it refers to the model's tensors
        self._states = WeakKeyDictionary({model: (ModuleState(model), self._versions(model))})
        made = read if weights == PLAIN else quantize(read)
        if ranks is not None:
            inner = [len(layer.gate.weight) for layer in made.layers]
            own = {"inner": inner, "hidden": read.embedding.shape[1], "dtype": str(model.dtype)}
            ranks.check_same("heads", {**vars(config), **own, "weights": weights})
            check_share(config, inner, ranks.count)
            made, config = share(made, ranks), config.share(ranks.count)
            ropes = {n: None if r is None else r.to(ranks.device) for n, r in ropes.items()}
        self.weights, self.config, self.ropes = made, config, ropes

    @cached_property
    def kernels(self) -> Fused:
        """What runs single tokens on a GPU."""
        return Fused(self.weights)

    @property
    def current(self) -> bool:
        """Whether it would be read from the model as it is now; so it is where that is gone.

        Raises UnsupportedError for a model that the decoder does not run any more.
        """
        model = self._source()
        if model is None:
            return True
        state, versions = self._states[model]
        same = self._versions(model) == versions
        if same and state.unchanged:
            return True
        check_modules(model)
        now = _facts(read_weights(model), DecoderConfig.of(model), _ropes(model))
        if not same or now != self._facts:
            return False
        self._states[model] = ModuleState(model), versions
        return True

    def again(self) -> Reading:
        """What is read from the model as it is now. Raises ValueError where weights are copies."""
        if self.model is None:
            raise ValueError(
                "model: got one that has changed since the decoder copied its weights "
                f"({self._copied}); make another decoder of it by Decoder.of(model, …), or delete "
                "the model to go on with the copies"
            )
        return Reading(self.model)

    def check(self) -> None:
        """Raise ValueError where the model has changed since, and what `current` raises."""
        if not self.current:
            raise ValueError(
                "model: got one whose weights or settings were replaced since this session was "
                "opened, or this run started; allowed is a new one, which reads its text again"
            )

    def _versions(self, model: PreTrainedModel) -> list[int]:
        """Of copied weights how often the model's were written to; those of views do not matter."""
        if not self._copied:
            return []
        return [_version(one) for one in model.parameters() if not one.is_inference()]


def _ropes(model: Any) -> Ropes:
    layers = range(len(model.model.layers))
    return {number: rotary_frequencies(model.model, number) for number in layers}


def _facts(
    weights: Weights, config: DecoderConfig, ropes: Mapping[int, Tensor | None]
) -> list[Any]:
    """What a reading depends on: where tensors are, and numbers. It keeps no tensor alive."""
    frequencies = [weights.rotary.frequencies, *ropes.values()]
    body = {**vars(weights), "layers": None, "rotary": weights.rotary.factor}
    leaves = tree_leaves([body, *map(vars, weights.layers)])
    return [
        config,
        *(None if one is None else one.tolist() for one in frequencies),
        *(_place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
    ]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
