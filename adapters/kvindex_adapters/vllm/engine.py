"""`CodesLayer`: pages for an index's codes (compressed keys), which vLLM manages like a KV cache.

The pages of codes have the same block table as the pages of keys and values. This module handles
differences between versions of vLLM: version 0.26 asks the backend for the shape of a cache,
version 0.32 for the order of its dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvindex.core.geometry import Geometry
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm.costs import LEAST, Limit
from kvindex_adapters.vllm.metrics import Counters, Steps
from kvindex_adapters.vllm.options import CODES, Options
from kvindex_adapters.vllm.row_budget import RowBudget
from kvindex_adapters.vllm.unsupported import (
    fp8_reasons,
    has_two_graphs,
    layer_reasons,
    refuse,
    sliding_reasons,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only loggers whose names begin with "vllm"


def options_of(config: VllmConfig) -> Options | None:
    """Read an engine's options of the plug-in.

    Args:
        config: The engine's configuration.

    Returns:
        The options, or None for an engine that does not use kvindex.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    return Options.of_engine(config)


def geometry_of(
    config: VllmConfig,
    device: torch.device,
    more: Callable[[Geometry | None], list[str]],
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    alibi_slopes: list[float] | None = None,
    sliding_window: int | None = None,
    kv_cache_dtype: str = "auto",
    logits_soft_cap: float | None = None,
    attn_type: str = "decoder",
    kv_sharing_target_layer_name: str | None = None,
    kv_lora_rank: int | None = None,
    **others: Any,
) -> Geometry | None:
    """Return the geometry of a full-attention layer, or None for a sliding-window layer.

    All sizes are those of the layer. With tensor parallelism, these are the heads of one process.

    The arguments after `more` are those that vLLM passes to its `AttentionImpl`.

    Args:
        config: The engine's configuration.
        device: Device of the layer.
        more: Returns further reasons why a layer of this geometry is not supported.
        kv_sharing_target_layer_name: Ignored.
        kv_lora_rank: Number of coordinates of a latent, in multi-head latent attention. The key of
            the only KV head then begins with the latent, which is also the value.
        **others: Arguments that only some versions of vLLM pass. They are ignored.

    Raises:
        ValueError: The layer is not supported. The message reports all reasons.
    """
    if sliding_window is not None:
        check_window(config, *more(None))
        return None
    dtype = config.model_config.dtype
    reasons = layer_reasons(
        attn_type=attn_type,
        alibi_slopes=alibi_slopes,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
    )
    geometry = Geometry.of(
        q_heads=num_heads,
        kv_heads=num_kv_heads,
        head_dim=head_size,
        value_dim=kv_lora_rank,
        value_in_key=kv_lora_rank is not None,
        scale=scale,
        softcap=logits_soft_cap,
        dtype=dtype,
        device=device,
    )
    options = options_of(config)
    assert options is not None  # an engine with an index has options
    refuse(*reasons, *fp8_reasons(config, options, kv_cache_dtype), *more(geometry))
    return geometry


def check_window(config: VllmConfig, *more: str) -> None:
    """Check a layer without an index, in which tokens attend only to others nearby.

    Args:
        config: The engine's configuration.
        *more: Further reasons why such a layer is not supported.

    Raises:
        ValueError: The layer is not supported. The message reports all reasons.
    """
    options = options_of(config)
    assert options is not None  # an engine with an index has options
    refuse(*sliding_reasons(config, options), *more)


def is_chunked(backend: Any) -> bool:
    """Return True for a backend class that vLLM has derived from another one, for layers in which
    tokens attend only to tokens of the same chunk."""
    return str(backend.__name__).startswith("ChunkedLocalAttention_")


def drafted_tokens(config: VllmConfig) -> int:
    """Return the largest number of drafted tokens that a step verifies. Without speculative
    decoding it is 0.

    Args:
        config: The engine's configuration.
    """
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def first_layer(config: VllmConfig) -> int:
    """Return the number of the first layer in this process. Without pipeline parallelism it is 0.

    Args:
        config: The engine's configuration.
    """
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size == 1:
        return 0
    start: int = config.model_config.get_layers_start_end_indices(parallel)[0]
    return start


def first_codes(config: VllmConfig) -> CodesLayer:
    """Return the first `CodesLayer` of an engine with an index in at least one layer."""
    layers = config.compilation_config.static_forward_context.values()
    return next(layer for layer in layers if isinstance(layer, CodesLayer))


def spec_of_rows(spec: FullAttentionSpec, geometry: Geometry, *, fp8: bool) -> FullAttentionSpec:
    """Return vLLM's specification for pages that contain a layer's keys and values, in FP8 if
    `fp8` is true."""
    g = geometry
    dtype = torch.uint8 if fp8 else g.dtype
    sizes = dict(head_size=g.head_dim, head_size_v=g.value_dim, dtype=dtype)
    return replace(spec, num_kv_heads=g.kv_heads, **sizes)


def keep_no_rows(layer: Any) -> None:
    """Reduce a layer's pages to two bytes per token, because keys and values are in host memory.

    The layer still needs pages, because otherwise vLLM would not pass it a block table.
    """

    def get_kv_cache_spec(vllm_config: VllmConfig) -> FullAttentionSpec:
        block_size = vllm_config.cache_config.block_size
        return FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, head_size_v=1, dtype=torch.uint8
        )

    layer.get_kv_cache_spec = get_kv_cache_spec


class CodesLayer(AttentionLayerBase):
    """The pages with the codes (compressed keys) of one attention layer, as an additional layer of
    vLLM.

    For each KV head and each segment of 256 tokens, a block contains one record of codes. vLLM
    treats this layer as a full-attention layer, and puts it into the same KV cache group as the
    attention layer. So both layers have the same block table, and codes are shared, copied and
    freed together with keys and values.
    """

    def __init__(self, config: VllmConfig, kv_heads: int, record_bytes: int) -> None:
        layers = config.compilation_config.static_forward_context
        number = sum(isinstance(layer, CodesLayer) for layer in layers.values())
        self.counted_with = self.name(first_layer(config) + number)
        """Name of the layer whose metadata builder counts decode steps (see `StepCounter`)."""
        layers[self.counted_with] = self
        self.kv_heads, self.record_bytes = kv_heads, record_bytes
        self.token_bytes = -(-record_bytes // BLOCK)
        self.kv_cache: Tensor | None = torch.empty(0)
        self.mixed = False  # whether steps also search in batches that contain prompts
        self.host: Any = None  # the `HostRows` of all layers, if keys and values are in host memory
        self.limit = Limit(LEAST)  # the sequences that search
        self.errors: Any = None  # on a GPU: the `PageLimits`, if the error determines the rows

    @staticmethod
    def name(number: int) -> str:
        """Return the name that vLLM uses for a `CodesLayer`.

        vLLM requires exactly one integer in a layer name. All processes with the same layers must
        use the same names, and processes with other layers must use other names.

        Args:
            number: Number of the `CodesLayer` in the engine. It differs from the numbers of layers
                in other stages of pipeline parallelism.
        """
        return f"{CODES}{number}"

    @property
    def records(self) -> Tensor:
        """A view of the pages, uint8 `[blocks, G, tokens / 256, bytes]`.

        Each record of `bytes` bytes has the codes of 256 tokens of one KV head.
        """
        assert self.kv_cache is not None  # true for pages of codes alone
        blocks, heads, _, token_bytes = self.kv_cache.shape
        records = self.kv_cache.view(blocks, heads, -1, BLOCK * token_bytes)
        return records[..., : self.record_bytes]

    def rows(self, kv_cache: Tensor) -> Tensor:
        """Return the part of an attention layer's pages that contains keys and values, `[blocks,
        G, tokens, 2 D]`.

        Args:
            kv_cache: The pages of the attention layer.
        """
        return kv_cache

    def join(self, impl: Any, context: dict[str, Any]) -> None:
        """Tell vLLM how the pages of the attention layer with implementation `impl` look.

        vLLM calls this through `process_weights_after_loading`, before it asks for their size.

        Args:
            impl: The attention implementation whose codes this object stores.
            context: vLLM's layers of this engine, by name.
        """

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the class of the backend for this layer. vLLM calls this method."""
        return CodesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec | None:
        """Return vLLM's specification of the pages. Codes are declared as uint8 keys, with values
        of size 0."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.token_bytes,
            head_size_v=0,
            dtype=torch.uint8,
        )


class PluginAttention:
    """Base class of the plug-in's attention implementations for CPUs and GPUs.

    Constructors raise ValueError for a layer that is not supported. vLLM caches the class of the
    attention implementation, and may use it for all engines of a process. So the subclasses also
    work in an engine that does not use kvindex, and then behave like vLLM's own classes.
    """

    codes: CodesLayer | None = None
    """The pages with the layer's codes. None in a layer without an index."""

    def explain(self) -> str:
        """Return a description of the layer: its index, and the sequences that use the index."""
        raise NotImplementedError


def explain(config: VllmConfig) -> str:
    """Describe which layers of an engine have an index, and which index.

    Args:
        config: The configuration of an engine with an index in at least one layer.
    """
    layers = attention_layers(config.compilation_config.static_forward_context)
    impls = {name: layer.impl for name, layer in layers.items()}
    own = {name: impl for name, impl in impls.items() if isinstance(impl, PluginAttention)}
    searching = [name for name, impl in own.items() if impl.codes is not None]
    sliding = [name for name, impl in own.items() if impl.codes is None]
    text = f"{len(searching)} of {len(own)} attention layers search: {', '.join(searching)}"
    if sliding:
        text += f" (not those with a sliding window or with chunks: {', '.join(sliding)})"
    return f"{text}. {own[searching[0]].explain()}"


def attention_layers(context: dict[str, Any]) -> dict[str, Any]:
    """Return the layers that attend to keys and values or to latents, by name.

    Args:
        context: vLLM's layers of an engine, by name.
    """
    # these cannot be imported while vLLM loads plug-ins
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    kinds = Attention, MLAAttention
    return {name: layer for name, layer in context.items() if isinstance(layer, kinds)}


class CodesBackend(AttentionBackend):
    """vLLM backend for the pages of codes. It describes their layout, and computes no attention."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend."""
        return "KVINDEX_CODES"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported block sizes: all multiples of 256 tokens."""
        return [MultipleOf(BLOCK)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the order of dimensions for vLLM 0.32: the bytes of each head of a block are
        contiguous."""
        return (kv_cache_interface.KVCacheLayout.LBHNC,)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of the pages for vLLM 0.26."""
        return num_blocks, num_kv_heads, block_size, head_size

    @staticmethod
    def get_impl_cls() -> Any:
        """Raise NotImplementedError, because this layer only stores codes and computes no
        attention."""
        raise NotImplementedError(
            "kvindex: got a call of get_impl_cls for a layer that only stores codes (compressed "
            "keys); such a layer computes no attention"
        )

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the class that builds the metadata of a batch and counts its steps."""
        return counting(CodesBuilder)


class CodesBuilder(AttentionMetadataBuilder[Any]):
    """Metadata builder for a layer that only stores codes (compressed keys) in pages of the cache.

    vLLM needs a builder for each such layer, but the results are not used: the attention layer has
    the same block table.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        """Return vLLM's metadata unchanged."""
        return common_attn_metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        """Return vLLM's metadata unchanged."""
        return common_attn_metadata


@cache
def counting(builder: Any) -> type[AttentionMetadataBuilder[Any]]:
    """Return a subclass of a metadata builder that also counts decode steps."""

    class Counting(builder):
        """A metadata builder that counts the decode steps of each batch."""

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self._counter = StepCounter.of(vllm_config, layer_names)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            """Count the steps of a batch, and build its metadata."""
            if self._counter is not None:
                self._counter.count(common_attn_metadata)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            """Build the metadata of a batch for a capture, which is no step to count."""
            counter, self._counter = self._counter, None
            try:
                return super().build_for_cudagraph_capture(common_attn_metadata)
            finally:
                self._counter = counter

    return Counting


def reads(common: CommonAttentionMetadata) -> bool:
    """Return True if a sequence of a batch is still reading its prompt."""
    return common.is_prefilling is not None and bool(common.is_prefilling[: common.num_reqs].any())


def batch_searches(config: VllmConfig, common: CommonAttentionMetadata, limit: Limit) -> bool:
    """Return False for a batch of decode steps that FlashAttention computes faster on a GPU.

    Unless there are two graphs for each batch size (`two_graphs`), a full CUDA graph searches in
    any case. vLLM decides before this call whether it replays one. It can only do so if all
    sequences have the same number of new tokens. Two graphs contain all layers, so the limit of the
    first layer with an index then decides for all.

    Args:
        config: The configuration of an engine with an index in at least one layer.
        common: vLLM's metadata of the batch. The lengths of its sequences may be upper bounds.
        limit: The sequences that search in the layers of the batch. It differs between layers with
            and without FP8.
    """
    mode, known = config.compilation_config.cudagraph_mode, common.seq_lens_cpu_upper_bound
    options = options_of(config)
    graphs = mode is None or mode.has_full_cudagraphs()
    if graphs and options is not None and has_two_graphs(config, options):
        graphs, limit = False, first_codes(config).limit
    if limit.costs is None or known is None:
        return True
    new = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
    if graphs and len(np.unique(new[new > 0])) < 2:  # without new tokens: padding
        return True
    lengths = known[: common.num_reqs].numpy()
    steps = [lengths[new > place] - place for place in range(common.max_query_len)]
    return limit.searches(lengths[new > 0], np.concatenate(steps))


class StepCounter:
    """Counts the decode steps of the batches of an engine (see `metrics`).

    Use `of` to create it.
    """

    def __init__(self, config: VllmConfig, counters: Counters) -> None:
        self._options, self._counters = options_of(config), counters
        self._drafted = drafted_tokens(config)
        self._layers = config.compilation_config.static_forward_context
        self._rows = 0.0  # fraction of a row that is not counted yet
        layers = self._layers.values()
        self._mixed = any(isinstance(layer, CodesLayer) and layer.mixed for layer in layers)
        first, self._config = first_codes(config), config
        self._limit, self._host = first.limit, first.host
        self._lookups: Any = None

    @staticmethod
    def of(config: VllmConfig, layer_names: list[str]) -> StepCounter | None:
        """Log which layers search, and return the counter of an engine.

        vLLM has a metadata builder for each group of layers, in each worker process. Only one of
        them gets a counter.

        Args:
            config: The configuration of an engine with an index in at least one layer.
            layer_names: Names of the builder's layers.

        Returns:
            The counter, or None if another builder or process counts, or if nothing reads it.
        """
        first = first_codes(config)
        if first.counted_with not in layer_names or get_tensor_model_parallel_rank() != 0:
            return None
        logger.info("kvindex: %s", explain(config))
        if not get_pp_group().is_first_rank:
            return None
        number, cached = config.parallel_config.data_parallel_index, first.host is not None
        counters = Counters.open(number, lookups=cached)
        return None if counters is None else StepCounter(config, counters)

    def count(self, common: CommonAttentionMetadata) -> None:
        """Count the decode steps of a batch. Their lengths may be upper bounds, because the host
        does not wait for the device.

        A step that verifies drafted tokens is counted once for each of its tokens. Lookups in the
        row cache are counted some steps later. If searches choose the number of rows, the rows of a
        batch are counted with the next batch, and on a GPU some steps later.
        """
        if self._host is not None:
            self._lookups = self._lookups or self._host.lookup_counter()
            self._counters.add_lookups(*self._lookups.read())
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is None:
            lengths = common.seq_lens
        if lengths.device.type != "cpu":
            return
        new = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
        known = lengths[: common.num_reqs].numpy()
        short = (new <= 1 + self._drafted) & (known > 0)  # a length of 0 is padding
        reading = common.is_prefilling
        if reading is not None:
            prompts = reading[: common.num_reqs].numpy()
            short[: len(prompts)] &= ~prompts
        places = range(1 + self._drafted)
        steps = np.concatenate([known[short & (new > place)] - place for place in places])
        assert self._options is not None  # an engine with an index has options
        search = self._mixed or common.max_query_len <= 1 + self._drafted
        if not self._mixed:
            search = search and batch_searches(self._config, common, self._limit)
        found = None
        if self._options.allowed_error is not None:
            rows, known = self._found()
            search = search and known
            self._rows += rows
            found = int(self._rows)
            self._rows -= found
        how: Any = dict(search=search, found=found)
        self._counters.add(Steps.of(steps, self._options, self._limit, **how))

    def _found(self) -> tuple[float, bool]:
        """Return how many rows searches have found since the last call, as a mean over layers, and
        whether all layers know the limits of their error."""
        if budgets := self._budgets():
            rows = sum(budget.take_found() for budget in budgets) / len(budgets)
            return rows, all(budget.known for budget in budgets)
        codes = (layer for layer in self._layers.values() if isinstance(layer, CodesLayer))
        # one object for the layers of each metadata builder
        errors = {id(one.errors): one.errors for one in codes if one.errors is not None}.values()
        if not errors:
            return 0.0, False  # there are no pages yet
        layers = sum(one.layers for one in errors)
        rows = sum(one.take_found() * one.layers for one in errors) / layers
        return rows, all(one.searches for one in errors)

    def _budgets(self) -> list[RowBudget]:
        """Return the limits of all layers on a CPU, or an empty list."""
        layers = attention_layers(self._layers).values()
        plain = (vars(layer.impl).get("paged") for layer in layers)
        return [one.budget for one in plain if one is not None and one.budget is not None]
