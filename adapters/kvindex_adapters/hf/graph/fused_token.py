"""`FusedToken`: runs the decode steps of an attached Llama-family model with fused kernels.

The kernels are those of the minimal decoder. They use the model's weights without copying them, and
the attention layers of the cache. transformers still runs the language-model head, logits
processors, sampling and stopping criteria.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvindex.core.capability import capability
from kvindex.core.protocol import CapturesStep, KVIndex, LimitsSteps
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Wrapper
from kvindex_adapters.common.layer_options import LayerOptions
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.padding import MaskInfo
from kvindex_adapters.hf.graph.token_graph import Forward, TokenGraph
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.llama_family import check_family, check_modules
from kvindex_adapters.hf.model.module_state import ModuleState
from kvindex_adapters.llama.fused import BATCH, FusedBody, device_refusal
from kvindex_adapters.llama.weights import (
    Norm,
    are_joined,
    join_in_memory,
    products,
    read_body,
    separate_in_memory,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Allowed dtypes of weights. The kernels compute activations in the same dtype."""

READ = ("input_ids", "position_ids", "attention_mask", CACHE, "cache_position")
"""Arguments of the decoder's forward call that the kernels use, or that repeat information in other
arguments."""

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "use_cache": (None, True),
    "return_dict": (None, True),
}
"""Maps further arguments to the values with which they have no effect. For unlisted arguments these
values are None and False."""


class Step(NamedTuple):
    """The attention of one layer, in the form that `FusedBody` needs: an object with `step`."""

    step: Callable[[Tensor, Tensor, Tensor], Tensor]


class FusedToken:
    """Runs the decoder's forward pass of one token with fused kernels.

    Call `refusal` before `forward`: it reads the weights again if the model has changed. The object
    refers to the weights until `forget` is called.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._decoder = decoder
        self.forget()

    def forget(self) -> None:
        """Delete all references to the weights."""
        self._state: ModuleState | None = None
        self._body: tuple[FusedBody, Norm, int, list[float]] | None = None
        self._refusal = ""
        self.reading: object = object()
        """Identifies the current weights and their addresses: replaced by a new object when the
        weights are read again."""

    @contextmanager
    def laid_together(self) -> Iterator[None]:
        """Context manager that moves weights with the same input (Q, K and V; gate and up) next to
        each other in memory, so that one matrix product can use them."""
        apart = [modules for modules in products(self._decoder) if not are_joined(*modules)]
        try:
            for modules in apart:
                join_in_memory(*modules)
            yield
        finally:
            self.forget()
            with suppress(torch.OutOfMemoryError):  # then the weights simply stay adjacent
                for modules in apart:
                    separate_in_memory(*modules)

    def refusal(self) -> str:
        """Return the reason why the kernels cannot run the decoder in its present state, or "" if
        they can."""
        if self._state is None or not self._state.unchanged:
            self.forget()
            self._refusal = decoder_refusal(self._decoder)
            if not self._refusal:
                self._read()
            self._state = ModuleState(self._decoder)
        return self._refusal

    def _read(self) -> None:
        for modules in products(self._decoder):
            join_in_memory(*modules)
        weights, layers = read_body(self._decoder), list(self._decoder.layers)
        attentions: list[Any] = [layer.self_attn for layer in layers]
        scales = [float(attention.scaling) for attention in attentions]
        self._body = FusedBody(weights), weights.norm, attentions[0].head_dim, scales

    @in_plain_torch
    @torch.no_grad()
    def forward(
        self, cache: IndexCache, ids: Tensor, positions: Tensor, *, captured: bool
    ) -> BaseModelOutputWithPast:
        """Run the decoder on one token of each sequence. No token may be padding.

        Args:
            cache: The KV cache.
            ids: Token ids, int64 `[B, 1]`.
            positions: Positions of the tokens, int64 `[B or 1, 1]`.
            captured: True if the call is captured in a CUDA graph. The layers then count their
                tokens on the device.

        Returns:
            The last hidden states and the cache.
        """
        assert self._body is not None
        body, norm, head_dim, scales = self._body
        steps = []
        for layer, scale in zip(cache.layers, scales, strict=True):
            terms: Any = dict(scale=scale, softcap=None)
            if captured:
                steps.append(Step(partial(layer.attend_captured, **terms)))
            else:
                given = dict(mask=MaskInfo(), tokens=cache.tokens)
                steps.append(Step(partial(layer.attend, **given, **terms)))
        hidden = body.read(ids, positions.expand(len(ids), 1), steps, head_dim)
        hidden = functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)
        return BaseModelOutputWithPast(last_hidden_state=hidden[:, None], **{CACHE: cache})


class FusedGraph(TokenGraph):
    """Runs the decode steps of one cache with fused kernels, as replays of a CUDA graph if
    possible.

    The first step with new weights or shapes launches its kernels one by one, which compiles them
    and allocates memory. Steps need not be traced, because the graph does not contain the model's
    own forward pass.

    Args:
        fused: The fused decode step of the model.
    """

    raises = True
    first, replayed = "it was the first of its kind", "replays of the fused token"

    def __init__(self, fused: FusedToken) -> None:
        self._fused, self._reading = fused, object()
        super().__init__(asked=True)

    def another(self) -> FusedGraph:
        """Return a new `FusedGraph` without a captured graph, for a copy of the cache."""
        return FusedGraph(self._fused)

    @property
    def checks(self) -> bool:
        """False: the output of a graph need not be compared with that of a normal forward pass.

        This comparison is for models that use the padding mask outside of attention. The kernels of
        a fused decode step never use the padding mask outside of attention.
        """
        return False

    def run(self, forward: Forward, cache: IndexCache, /, **given: Any) -> Any:
        """Run a decode step without a CUDA graph.

        This is the first step after the weights or the shapes have changed.
        """
        cache.padding.all_real = True
        output = self._output_of(cache, captured=False)
        self._alike, self._reading = True, self._fused.reading
        return output

    def _refusal(
        self, cache: IndexCache, layers: list[AttentionLayer], given: Mapping[str, Any]
    ) -> str:
        return (
            super()._refusal(cache, layers, given) or self._fused.refusal() or call_refusal(given)
        )

    def _unchanged(self, cache: IndexCache) -> bool:
        return self._fused.reading is self._reading

    def _forward(self, forward: Forward, cache: IndexCache) -> Any:
        return self._output_of(cache, captured=True)

    def _output_of(self, cache: IndexCache, *, captured: bool) -> BaseModelOutputWithPast:
        given = self._inputs.arguments(cache)
        ids, positions = given["input_ids"], given["position_ids"]
        return self._fused.forward(cache, ids, positions, captured=captured)


def check_fused(model: PreTrainedModel, given: LayerOptions, *, token_graph: bool | None) -> None:
    """Raise UnsupportedError if `fused=True` does not support the model or another option of
    `attach`."""
    if token_graph is False:
        raise UnsupportedError("token_graph: got False, allowed with fused=True is True or None")
    if given.coverage is not None:
        raise UnsupportedError(f"coverage: got {given.coverage}, allowed with fused=True is None")
    if len(given.dense_layers):
        raise UnsupportedError(
            f"dense_layers: got {given.dense_layers}, allowed with fused=True is ()"
        )
    check_family(model)
    if why := decoder_refusal(model.base_model):
        raise UnsupportedError(f"fused: got True, but the kernels do not support this model: {why}")


def check_fused_indexes(indexes: Iterable[KVIndex], given: LayerOptions) -> None:
    """Raise UnsupportedError for an index whose search cannot be part of a CUDA graph, or whose
    kernels cannot choose the number of rows if the options `k` and `error` ask for it."""
    limited = f"k: got {given.k!r}" if isinstance(given.k, str) else ""
    if not limited and given.error is not None:
        limited = f"error: got {given.error}"
    for index in indexes:
        if isinstance(index, Wrapper) or not isinstance(index, CapturesStep):
            raise UnsupportedError(
                f"index: got {type(index).__name__}, whose decode steps cannot be captured in a "
                "CUDA graph; fused=True needs an index that supports this, such as pariskv"
            )
        if limited and capability(index, LimitsSteps) is None:
            raise UnsupportedError(
                f"{limited}, allowed with fused=True is a number for k and no error, because the "
                f"kernels for this {type(index).__name__} do not choose the number of rows"
            )


def decoder_refusal(decoder: PreTrainedModel) -> str:
    """Return the reason why the kernels cannot run this Llama-family decoder, or "" if they can."""
    try:
        check_modules(decoder)
    except UnsupportedError as error:
        return str(error)
    config, layers = decoder.config, list(decoder.layers)
    if config.output_hidden_states or config.output_attentions or not config.return_dict:
        return "config: got more outputs than the last hidden states, or a tuple of them"
    if len(layers) != config.num_hidden_layers:
        return f"layers: got {len(layers)}, allowed is {config.num_hidden_layers}, as configured"
    dropout = max((one.self_attn.attention_dropout for one in layers if one.training), default=0)
    if dropout:
        return f"attention_dropout: got {dropout} in training, allowed is 0"
    if (compiled := ModuleState(decoder).compiled) is not None:
        return f"{compiled}: got a compiled call, which the kernels would not run"
    return weights_refusal(decoder) or device_refusal(decoder.device) or ""


def weights_refusal(decoder: PreTrainedModel) -> str:
    """Return the reason why the kernels cannot use a decoder's weights without a copy, or "" if
    they can."""
    for name, weight in decoder.named_parameters():
        if type(weight.data) is not Tensor:  # a sharded or quantized weight
            return f"{name}: got a {type(weight.data).__name__}, allowed is a plain tensor"
        if weight.is_inference():
            return f"{name}: got one that was made under inference_mode, which cannot be moved"
        if not weight.is_contiguous():
            return f"{name}: got strides {weight.stride()}, allowed is a contiguous tensor"
        if weight.dtype not in DTYPES:
            return f"{name}: got {weight.dtype}, allowed is one of {DTYPES}"
    for modules in products(decoder):
        if len({module.bias is None for module in modules}) > 1:
            return "bias: got one in some projections of a product, allowed is in all or none"
    return ""


def call_refusal(given: Mapping[str, Any]) -> str:
    """Return the reason why the kernels cannot run a decode step with these arguments, or "" if
    they can."""
    ids, positions = given.get("input_ids"), given.get("position_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        return "input_ids: got none, allowed is int64 [B, 1]"
    if len(ids) > BATCH:
        return f"batch: got {len(ids)} sequences, allowed is up to {BATCH}"
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        return "position_ids: got none, allowed is int64 [B, 1], as `generate` passes it"
    if positions.shape not in ((1, 1), ids.shape):
        return f"position_ids: got shape {list(positions.shape)}, allowed is [B, 1]"
    for name, value in given.items():
        same = (value is one for one in NO_EFFECT.get(name, (None, False)))
        if name not in READ and not any(same):
            return f"{name}: got a value, which only the model's own forward reads"
    return ""
