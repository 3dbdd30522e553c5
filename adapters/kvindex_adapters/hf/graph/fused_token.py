"""`FusedToken`: one token of an attached model of the Llama family by the decoder's kernels.

The model's own weights are read where they lie, and attention goes through the layers of the
model's cache, so that head, logits processors, sampling and stopping stay transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvindex.core.protocol import CapturesStep, KVIndex
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Wrapper
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.padding import MaskInfo
from kvindex_adapters.hf.graph.token_graph import Forward, TokenGraph
from kvindex_adapters.hf.model.llama_family import check_family, check_modules
from kvindex_adapters.hf.model.module_state import ModuleState
from kvindex_adapters.llama.fused import BATCH, FusedBody, device_refusal
from kvindex_adapters.llama.weights import (
    Norm,
    are_together,
    lay_apart,
    lay_together,
    products,
    read_body,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of weights: those of the kernels' activations."""

READ = ("input_ids", "position_ids", "attention_mask", "past_key_values", "cache_position")
"""Arguments of a decoder that are read, or say what others say."""

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "use_cache": (None, True),
    "return_dict": (None, True),
}
"""Values of other arguments that change nothing; of those not named here None and False."""


class Step(NamedTuple):
    """A layer of the cache, as `FusedBody` attends through it."""

    step: Callable[[Tensor, Tensor, Tensor], Tensor]


class FusedToken:
    """A decoder's token by kernels, for as long as its modules are those that were read.

    It holds no weights before `refusal` has looked at the decoder, nor after `forget`.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._decoder = decoder
        self.forget()

    def forget(self) -> None:
        """Hold no weights."""
        self._state: ModuleState | None = None
        self._body: tuple[FusedBody, Norm, int, list[float]] | None = None
        self._refusal = ""
        self.reading: object = object()
        """Stands for the weights that are read, at their addresses."""

    @contextmanager
    def laid_together(self) -> Iterator[None]:
        """While it lasts, weights of one product lie together; afterwards apart, as they did."""
        apart = [modules for modules in products(self._decoder) if not are_together(*modules)]
        try:
            for modules in apart:
                lay_together(*modules)
            yield
        finally:
            self.forget()
            with suppress(torch.OutOfMemoryError):  # they do where they are
                for modules in apart:
                    lay_apart(*modules)

    def refusal(self) -> str:
        """Why the decoder, as it is now, is not computed by kernels; "" where it is."""
        if self._state is None or not self._state.unchanged:
            self.forget()
            self._refusal = decoder_refusal(self._decoder)
            if not self._refusal:
                self._read()
            self._state = ModuleState(self._decoder)
        return self._refusal

    def _read(self) -> None:
        for modules in products(self._decoder):
            lay_together(*modules)
        weights, layers = read_body(self._decoder), list(self._decoder.layers)
        attentions: list[Any] = [layer.self_attn for layer in layers]
        scales = [float(attention.scaling) for attention in attentions]
        self._body = FusedBody(weights), weights.norm, attentions[0].head_dim, scales

    @in_plain_torch
    @torch.no_grad()
    def forward(
        self, cache: IndexCache, ids: Tensor, positions: Tensor, *, captured: bool
    ) -> BaseModelOutputWithPast:
        """What the decoder gives after ids int64 `[B, 1]` at positions int64 `[B or 1, 1]`.

        captured: for a graph, in which layers count on the device; of real tokens in any case.
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
        return BaseModelOutputWithPast(last_hidden_state=hidden[:, None], past_key_values=cache)


class FusedGraph(TokenGraph):
    """The single tokens of one cache, by kernels: replays of a graph where they can be.

    The first token of a kind is launched op by op, which compiles and allocates. None is compared
    with another: what the graph does is no forward of the model's.
    """

    raises = True
    first, replayed = "it was the first of its kind", "replays of the fused token"

    def __init__(self, fused: FusedToken) -> None:
        self._fused, self._reading = fused, object()
        super().__init__(asked=True)

    def another(self) -> FusedGraph:
        """One for a copy of the cache."""
        return FusedGraph(self._fused)

    @property
    def checks(self) -> bool:
        """Never: a mask says nothing but which tokens are padded."""
        return False

    def run(self, forward: Forward, cache: IndexCache, **given: Any) -> Any:
        """What the decoder gives for the first token of its kind."""
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


def check_fused(
    model: PreTrainedModel,
    *,
    token_graph: bool | None,
    coverage: float | None,
    dense_layers: Collection[int],
) -> None:
    """Raises UnsupportedError for a model or options whose tokens no kernels compute."""
    if token_graph is False:
        raise UnsupportedError("token_graph: got False, allowed with fused=True is True or None")
    if coverage is not None:
        raise UnsupportedError(f"coverage: got {coverage}, allowed with fused=True is None")
    if len(dense_layers):
        raise UnsupportedError(f"dense_layers: got {dense_layers}, allowed with fused=True is ()")
    check_family(model)
    if why := decoder_refusal(model.base_model):
        raise UnsupportedError(f"fused: got True for a model that kernels do not compute; {why}")


def check_fused_indexes(indexes: Iterable[KVIndex]) -> None:
    """Raises UnsupportedError for an index that has no step for a graph."""
    for index in indexes:
        if isinstance(index, Wrapper) or not isinstance(index, CapturesStep):
            raise UnsupportedError(
                f"index: got {type(index).__name__}, whose steps are no kernels that read the "
                "device's counts; allowed with fused=True is one that has them"
            )


def decoder_refusal(decoder: PreTrainedModel) -> str:
    """Why a decoder of a known class, as it is now, is not computed by kernels; "" where it is."""
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
        return f"{compiled}: got a compiled call, which no kernel would make"
    return weights_refusal(decoder) or device_refusal(decoder.device) or ""


def weights_refusal(decoder: PreTrainedModel) -> str:
    """Why a decoder's weights cannot be read where they lie; "" where they can."""
    for name, weight in decoder.named_parameters():
        if type(weight.data) is not Tensor:  # sharded, or quantized
            return f"{name}: got a {type(weight.data).__name__}, allowed is a plain tensor"
        if weight.is_inference():
            return f"{name}: got one that was made under inference_mode, which cannot be moved"
        if not weight.is_contiguous():
            return f"{name}: got strides {weight.stride()}, allowed is a contiguous tensor"
        if weight.dtype not in DTYPES:
            return f"{name}: got {weight.dtype}, allowed is one of {DTYPES}"
    for modules in products(decoder):
        if len({module.bias is None for module in modules}) > 1:
            return "bias: got one of some projections of a product, allowed is all or none"
    return ""


def call_refusal(given: Mapping[str, Any]) -> str:
    """Why kernels do not compute a call of one token; "" where they do."""
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
