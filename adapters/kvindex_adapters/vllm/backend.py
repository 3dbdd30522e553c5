"""`SearchingBackend`: vLLM's CPU attention backend, with an index in full-attention layers.

The module `latents` has the backend for multi-head latent attention.

The plug-in registers it in place of vLLM's own CPU backend. In an engine that does not use kvindex,
it behaves exactly like vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.engine import (
    PluginAttention,
    check_window,
    drafted_tokens,
    geometry_of,
    is_chunked,
    options_of,
)
from kvindex_adapters.vllm.fp8 import NAMES, Scales
from kvindex_adapters.vllm.loaded import as_prompts, last_slots, sharing
from kvindex_adapters.vllm.packed import codes_layer
from kvindex_adapters.vllm.request_hooks import admitted, install_runner, sparse_prompts
from kvindex_adapters.vllm.unsupported import (
    check_causal,
    check_output,
    device_reasons,
    has_connector,
    sparse_reasons,
)


class SearchingBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend, with an index if the engine's backend is "KVINDEX"."""

    @classmethod
    def get_impl_cls(cls) -> type[CPUAttentionBackendImpl]:
        """Return the attention class: vLLM's own for engines without kvindex, or the plug-in's."""
        if options_of(get_current_vllm_config()) is None:
            return CPUAttentionBackendImpl
        return LocalAttention if is_chunked(cls) else SearchingAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class that builds the metadata of a batch."""
        return SearchingBuilder


class SearchingBuilder(CPUAttentionMetadataBuilder):
    """Builds vLLM's metadata of a batch, and adds two lists: `prompts`, whether each sequence is
    still reading its prompt, and `sparse`, the prompts that are read with sparse attention. A list
    is empty if vLLM does not say so."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._loaded = LoadedBlocks(vllm_config, layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Build the metadata of a batch."""
        common = self._loaded.begin(common_attn_metadata)
        metadata = super().build(common_prefix_len, common, fast_build)
        vars(metadata)["prompts"] = prompts_of(common)
        vars(metadata)["sparse"] = sparse_prompts()
        return metadata


def prompts_of(common: CommonAttentionMetadata) -> list[bool]:
    """Return for each sequence of a batch whether it is still reading its prompt. The list is empty
    if vLLM does not say so."""
    reading = vars(common).get("is_prefilling")
    return [] if reading is None else reading.tolist()


AT_ONCE = 8
"""Number of loaded blocks that a layer encodes at a time. More of them would take more memory, and
were not faster."""


class LoadedBlocks:
    """Encodes the blocks of requests that may have been loaded by a KV connector (see `loaded`).

    Args:
        config: The engine's configuration.
        layer_names: Names of the layers of a metadata builder, in one KV cache group.
    """

    def __init__(self, config: VllmConfig, layer_names: list[str]) -> None:
        self._layers: list[Any] = []
        self._slots: Tensor | None = None  # of the last tokens of blocks, from the last step
        if options_of(config) is None or not has_connector(config):
            return
        context = config.compilation_config.static_forward_context
        found = [context[name] for name in layer_names]
        # a layer that reads the keys and values of an earlier layer has the same codes
        own = {
            layer.impl.codes: layer
            for layer in reversed(found)
            if isinstance(layer.impl, TorchAttention) and layer.impl.codes is not None
        }
        self._layers = list(own.values())

    def begin(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Encode the blocks of the requests that the last step admitted.

        Args:
            common: vLLM's metadata of the next step.

        Returns:
            The metadata, in which the requests that this step admits read their prompts, and those
            that share blocks with them.
        """
        counts = admitted() if self._layers else []
        if self._slots is not None:
            for layer in self._layers:
                for some in torch.split(self._slots, AT_ONCE):
                    layer.impl.encode(layer, some)
            self._slots = None
        if not counts:
            return common
        first, tables = self._layers[0], common.block_table_tensor[: common.num_reqs]
        count, _, page_tokens, _ = first.impl.codes.rows(first.kv_cache).shape
        slots = last_slots(tables, counts, page_tokens)
        self._slots = torch.unique(slots)  # requests may share blocks
        reading = as_prompts(common.is_prefilling, counts, common.num_reqs)
        reading |= sharing(tables, self._slots, count, page_tokens)
        return replace(common, is_prefilling=reading)


class LocalAttention(PluginAttention, CPUAttentionBackendImpl):
    """vLLM's own attention, for layers in which tokens attend only to tokens of the same chunk."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = get_current_vllm_config()
        if (options := options_of(config)) is not None:
            check_window(config, *device_reasons(options.rows))


class TorchAttention(PluginAttention):
    """Base class of attention layers that search in plain torch."""

    paged: PagedAttention

    def add_index(self, target: str | None, *given: Any, **named: Any) -> None:
        """Add an index to the layer, if the engine uses kvindex and the layer has full attention.

        Args:
            target: Name of the layer whose keys and values this layer reads, or None.
            *given: Positional arguments that vLLM passes to the constructor.
            **named: Keyword arguments that vLLM passes to the constructor.

        Raises:
            ValueError: The layer is not supported. The message reports all reasons.
        """
        config = get_current_vllm_config()
        options = options_of(config)
        if options is None:
            return

        def more(geometry: Geometry | None) -> list[str]:
            reasons = device_reasons(options.rows)
            if geometry is not None and options.reading.sparse:
                reasons += sparse_reasons(geometry, named.get("sinks"))
            return reasons

        geometry = geometry_of(config, torch.device("cpu"), more, *given, **named)
        if geometry is None:
            return
        self.paged = PagedAttention.of(options, geometry, drafted_tokens(config))
        self.codes = codes_layer(config, geometry, self.paged.layout.head_bytes, target)
        self.codes.mixed = True
        self.codes.limit = self.paged.limit
        self.context = config.compilation_config.static_forward_context
        if options.reading.sparse or has_connector(config):
            install_runner(config)

    def explain(self) -> str:
        """Return a description of the layer: its index, and the sequences that use the index."""
        return self.paged.explain()

    def set_backend(self) -> None:
        """Set the backend of the layer, before vLLM asks it for the size of a page."""
        if self.codes is not None:
            self.codes.join(self, self.context)

    def write(
        self,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        keys: Tensor,
        values: Tensor | None,
        scales: Scales | None = None,
    ) -> None:
        """Write keys and values `[T, G, D]` to the pages, and encode each segment of 256 tokens
        that they complete. `values` is None if each value is a part of its key. `scales` are the
        layer's scales if its keys and values are in FP8."""
        assert self.codes is not None  # layers without an index use vLLM's own method
        slots, rows = slot_mapping.long(), self.codes.rows(kv_cache)
        count = len(slots)
        some = keys[:count], None if values is None else values[:count]
        pages.write_rows(rows, slots, *some, scales)
        self.paged.encode(rows, self.codes.records, slots, scales)

    def scales_of(self, layer: Any) -> Scales | None:
        """Return the scales of a layer whose keys and values are in FP8, otherwise None."""
        return None

    def encode(self, layer: Any, slots: Tensor) -> None:
        """Encode the segments of 256 tokens of which the last slot is in `slots`, int64 `[T]`, from
        the keys in the pages of `layer`."""
        assert self.codes is not None  # layers without an index have nothing to encode
        rows = self.codes.rows(layer.kv_cache)
        self.paged.encode(rows, self.codes.records, slots, self.scales_of(layer))

    def sequences(
        self, kv_cache: Tensor, tables: Tensor, lengths: Tensor, scales: Scales | None = None
    ) -> Iterator[Sequence]:
        """Yield the sequences of a batch.

        Args:
            kv_cache: The pages of the layer.
            tables: Block tables, `[R, blocks]`.
            lengths: Numbers of tokens, `[R]`.
            scales: Scales of the layer, if its keys and values are in FP8.
        """
        assert self.codes is not None  # layers without an index use vLLM's own method
        rows, records = self.codes.rows(kv_cache), self.codes.records
        for number, length in enumerate(lengths.tolist()):
            yield Sequence(rows, records, tables[number], length, scales)


class SearchingAttention(TorchAttention, CPUAttentionBackendImpl):
    """One attention layer on a CPU.

    Sliding-window layers use vLLM's own attention. Other layers use an index in plain torch.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.add_index(self.kv_sharing_target_layer_name, *given, **named)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the backend of the layer, before vLLM asks it for the size of a page."""
        super().process_weights_after_loading(act_dtype)
        self.set_backend()

    def scales_of(self, layer: Any) -> Scales | None:
        """Return the scales of a layer whose keys and values are in FP8, otherwise None."""
        fp8 = self.kv_cache_dtype in NAMES
        return Scales.of(layer, self.paged.geometry.dtype) if fp8 else None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values `[T, G, D]` to the pages, and encode each segment of 256 tokens
        that they complete."""
        if self.codes is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        self.write(kv_cache, slot_mapping, key, value, self.scales_of(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of queries `[T, H, D]` of all sequences into `output`, one sequence
        at a time."""
        if attn_metadata is None or self.codes is None:
            given = layer, query, key, value, kv_cache, attn_metadata, output
            return super().forward(*given, output_scale, output_block_scale)
        check_output(output_scale, output_block_scale)
        check_causal(attn_metadata.causal)
        self.paged.attend_batch(
            query,
            output,
            self.sequences(
                kv_cache,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                self.scales_of(layer),
            ),
            attn_metadata.query_start_loc.tolist(),
            prompts=vars(attn_metadata).get("prompts", []),
            sparse=vars(attn_metadata).get("sparse", []),
            sinks=self.sinks,
        )
        return output
