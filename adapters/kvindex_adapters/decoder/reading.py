"""`Reading`: the weights that a decoder has read from a model, and a check for later changes.

Plain weights are the model's own tensors, so in-place changes of the model take effect in the
decoder. FP8 weights and shards of the heads are copies, which in-place changes do not affect.
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

from kvindex_adapters.common.layer_options import Ropes
from kvindex_adapters.decoder.config import DecoderConfig, check_shards
from kvindex_adapters.decoder.quantized import PLAIN, quantize
from kvindex_adapters.hf.model.llama_family import check_modules
from kvindex_adapters.hf.model.module_state import ModuleState
from kvindex_adapters.hf.model.rotary import rotary_frequencies
from kvindex_adapters.llama.fused import Fused
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.shards import shard
from kvindex_adapters.llama.weights import Weights, read_weights

_version = attrgetter("_version")
"""Function that returns a tensor's version counter, which each in-place write increments.

torch has no public attribute for this counter.
"""


class Reading:
    """The weights, sizes and rotary frequencies of a model that `check_model` has checked.

    If the weights are copies, this object does not keep the model alive.

    Args:
        model: The model to read.
        weights: "plain" to use the model's tensors, or "fp8" to copy its matrices as float8.
        ranks: The processes that shard the heads, or None for one process.
    """

    def __init__(
        self, model: PreTrainedModel, *, weights: str = PLAIN, ranks: HeadRanks | None = None
    ) -> None:
        read, config, ropes = read_weights(model), DecoderConfig.of(model), _ropes(model)
        self._copied = "" if weights == PLAIN else f"weights={weights!r}"
        if ranks is not None:
            self._copied = "ranks"
        self.model = None if self._copied else model
        """The model, or None if the weights are copies."""
        self._source, self._facts = ref(model), _facts(read, config, ropes)
        # A dictionary with one entry, whose key is a weak reference to the model. The value refers
        # to the model's tensors. When nothing else refers to the model, the entry and these tensors
        # are freed.
        self._states = WeakKeyDictionary({model: (ModuleState(model), self._versions(model))})
        made = read if weights == PLAIN else quantize(read)
        if ranks is not None:
            inner = [len(layer.gate.weight) for layer in made.layers]
            own = {"inner": inner, "hidden": read.embedding.shape[1], "dtype": str(model.dtype)}
            ranks.check_same("heads", {**vars(config), **own, "weights": weights})
            check_shards(config, inner, ranks.count)
            made, config = shard(made, ranks), config.shard(ranks.count)
            ropes = {n: None if r is None else r.to(ranks.device) for n, r in ropes.items()}
        self.weights, self.config, self.ropes = made, config, ropes

    @cached_property
    def kernels(self) -> Fused:
        """The fused kernels that run decode steps on a GPU."""
        return Fused(self.weights)

    @property
    def current(self) -> bool:
        """True if the weights that were read are still those of the model.

        Also True if the model has been deleted, because it cannot change any more.

        Raises:
            UnsupportedError: The decoder no longer supports the model, for example because of a
                hook.
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

    def read_again(self) -> Reading:
        """Read the model in its present state.

        Returns:
            A new object with the present weights.

        Raises:
            ValueError: This object has copies of the model's weights, because they are in FP8 or
                sharded.
        """
        if self.model is None:
            raise ValueError(
                "model: got a model that has changed since the decoder copied its weights "
                f"({self._copied}); make another decoder with Decoder.of(model, …), or delete the "
                "model to continue with the copies"
            )
        return Reading(self.model)

    def check_unchanged(self) -> None:
        """Check that the model has not changed since it was read.

        Raises:
            ValueError: The model has changed.
            UnsupportedError: The decoder no longer supports the model.
        """
        if not self.current:
            raise ValueError(
                "model: got a model whose weights or settings were replaced after the session was "
                "opened or the run was started; open a new session or start a new run, and pass "
                "the text again"
            )

    def _versions(self, model: PreTrainedModel) -> list[int]:
        """Return the version counters of the model's parameters, which in-place writes increment.

        The list is empty if the decoder's weights are not copies.
        """
        if not self._copied:
            return []
        return [_version(one) for one in model.parameters() if not one.is_inference()]


def _ropes(model: Any) -> Ropes:
    return rotary_frequencies(model.model, range(len(model.model.layers)))


def _facts(
    weights: Weights, config: DecoderConfig, ropes: Mapping[int, Tensor | None]
) -> list[Any]:
    """List tensor addresses and settings of a model, to notice later changes of the model.

    The list refers to no tensor, so it does not keep memory allocated.
    """
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
