"""The plug-in's metadata of a batch on a GPU, and the builder that makes it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from kvindex.core.backend import prompt_kernels
from kvindex.core.geometry import Geometry
from kvindex.core.transaction import in_plain_torch
from kvindex.ops.block_sparse import BLOCK
from kvindex_adapters.vllm import two_graphs
from kvindex_adapters.vllm.engine import (
    CodesLayer,
    batch_searches,
    drafted_tokens,
    logger,
    options_of,
    reads,
    spec_of_rows,
)
from kvindex_adapters.vllm.fp8 import device_scales
from kvindex_adapters.vllm.gpu_layer import SearchingFlashAttention
from kvindex_adapters.vllm.host import Part, single, split
from kvindex_adapters.vllm.loaded import as_prompts, last_slots, sharing
from kvindex_adapters.vllm.pages import read_rows
from kvindex_adapters.vllm.reading import Prompt, Reading, attend_prompt
from kvindex_adapters.vllm.request_hooks import admitted, sparse_prompts
from kvindex_adapters.vllm.unsupported import (
    check_causal,
    has_connector,
    has_two_graphs,
    refuse,
    refuse_memory,
)
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.pariskv.steps.host_rows import HostRows
from kvindex_cuda.pariskv.steps.page_limits import PageLimits
from kvindex_cuda.pariskv.steps.paged import PagedSteps


class Searching:
    """Computes attention for a batch of vLLM in which some sequences search an index.

    The sequences that run a decode step come first in the batch. They search. The sequences whose
    prompts are being read come after them. All layers that use the same metadata builder of vLLM
    share this object.

    Args:
        steps: The fused decode steps of the layers.
        numbers: Maps the `CodesLayer` of each layer to the layer's number in `steps`.
        rows: Number of queries of decode steps: one for each sequence, or several if drafted
            tokens are verified.
        parts: The sequences whose prompts are being read, in groups, and FlashAttention's metadata
            for each group. The keys and values of a group are copied from host memory to the device
            together. Empty if keys and values are on the device anyway.
        common: vLLM's metadata of the whole batch.
    """

    def __init__(
        self,
        steps: PagedSteps,
        numbers: dict[CodesLayer, int],
        rows: int,
        parts: list[tuple[Part, FlashAttentionMetadata]],
        common: CommonAttentionMetadata,
    ) -> None:
        self._steps, self._numbers, self._rows = steps, numbers, rows
        self._parts, self._common = parts, common

    def attend(
        self,
        impl: SearchingFlashAttention,
        layer: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        output: Tensor,
    ) -> None:
        """Compute a layer's attention of queries `[T, H, D]` into `output`. Queries of decode steps
        come first. `rows` is not used."""
        some = slice(0, self._rows)
        if self._rows:
            assert impl.codes is not None  # true for every layer with an index
            number = self._numbers[impl.codes]
            self._steps.attend(number, queries[some], output[some], sinks=impl.sinks)
        for part, metadata in self._parts:
            assert (
                impl.host is not None
            )  # there are parts only if keys and values are in host memory
            read, own, common = part.sequences, part.tokens, self._common
            copy = impl.host.gather(
                impl.number,
                tables=common.block_table_tensor[read, : part.width],
                lengths=common.seq_lens[read],
                starts=common.query_start_loc[read.start : read.stop + 1],
                keys=keys,
                values=values,
            )
            given = queries[own], keys[own], values[own], copy, metadata, output[own]
            impl.attend_whole(layer, *given)


class ReadingSparsely:
    """Computes attention for a batch of vLLM in which some sequences read their prompts with sparse
    attention. FlashAttention computes the other sequences.

    For each sparse sequence, the keys and values of all its tokens are copied from the pages to one
    tensor, which the kernels of kvindex read.

    Args:
        chunks: The chunks of prompts that are read with sparse attention.
        tokens: Places of the tokens of all other sequences among the tokens of the batch, int64
            `[T]`, or None if there are no others.
        metadata: FlashAttention's metadata of these sequences, or None.
        tables: Block tables of the whole batch, `[R, blocks]`.
    """

    def __init__(
        self,
        chunks: list[SparseChunk],
        tokens: Tensor | None,
        metadata: FlashAttentionMetadata | None,
        tables: Tensor,
    ) -> None:
        self._chunks, self._tokens, self._metadata = chunks, tokens, metadata
        self._tables = tables

    def attend(
        self,
        impl: SearchingFlashAttention,
        layer: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        output: Tensor,
    ) -> None:
        """Compute a layer's attention of queries `[T, H, D]` into `output`, with the keys and
        values in the pages `rows`."""
        if (some := self._tokens) is not None:
            found = torch.empty_like(output[: len(some)])
            own = queries[some], keys[some], values[some]
            impl.attend_whole(layer, *own, rows, self._metadata, found)
            output[some] = found
        g = impl.geometry
        assert g is not None  # true for every layer with an index
        for chunk in self._chunks:
            table, scales = self._tables[chunk.number], impl.scales(layer)
            read = read_rows(rows, table, 0, chunk.length, g, scales)
            output[chunk.tokens] = attend_prompt(queries[chunk.tokens], read, chunk.prompt, g)


class Measuring:
    """Measures the values and outputs of prompts in a batch of vLLM, from which the limits of the
    error follow.

    Args:
        limits: The limits of all layers, which have chosen the tokens to measure.
        numbers: Maps the `CodesLayer` of each layer to the layer's number in `limits`.
    """

    def __init__(self, limits: PageLimits, numbers: dict[CodesLayer, int]) -> None:
        self._limits, self._numbers = limits, numbers

    def measure(self, impl: SearchingFlashAttention, values: Tensor, outputs: Tensor) -> None:
        """Measure a layer's values `[T, G, D]` and outputs `[T, H, D]` of the batch."""
        assert impl.codes is not None  # true for every layer with an index
        self._limits.measure(self._numbers[impl.codes], values, outputs)


class SearchingFlashBuilder(FlashAttentionMetadataBuilder):
    """vLLM's FlashAttention metadata builder, which also prepares the fused decode steps of layers
    with an index."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        self._options = options_of(vllm_config)
        self._drafted = drafted_tokens(vllm_config)
        self._layers: list[Any] = []
        self._geometries: set[Geometry | None] = set()
        self._caches: list[Tensor] = []
        self._steps: PagedSteps | None = None
        self._errors: PageLimits | None = None
        self._capturing = False
        self._compiled = False
        self._host: HostRows | None = None
        context = vllm_config.compilation_config.static_forward_context
        if self._options is not None:
            found = [context[name] for name in layer_names]
            self._geometries = {layer.impl.geometry for layer in found if searches(layer.impl)}
            # a layer that reads the keys and values of an earlier layer has the same codes
            own = {layer.impl.codes: layer for layer in reversed(found) if searches(layer.impl)}
            self._layers = list(reversed(own.values()))
        if self._layers:
            impl = self._layers[0].impl
            self._host = impl.host
            if self._host is not None:
                kv_cache_spec = spec_of_rows(kv_cache_spec, impl.geometry, fp8=impl.fp8)
                self._layers.sort(key=lambda layer: layer.impl.number)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self._layers:
            self.supports_update_block_table = (
                False  # the plan of a step cannot be copied to another block table
            )
        if self._host is not None:
            # a threshold of 1 makes vLLM put the decode steps first in each batch, so that they can
            # use the fused search
            self.reorder_batch_threshold = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Return which batches can run as CUDA graphs. With an index, only batches of decode steps
        can, or of steps that all verify as many drafted tokens."""
        if options_of(vllm_config) is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if drafted_tokens(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether to use cascade attention. It is not supported with an index."""
        return False if self._layers else super().use_cascade_attention(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Build the metadata of a batch, and prepare the fused decode steps in it."""
        common, slots, shared = admitting(self._layers, common_attn_metadata)
        rows, starts, whole = 0, [], None
        sparse: list[SparseChunk] = []
        tables, lengths = common.block_table_tensor, common.seq_lens
        full = not self._may_search(common)
        if self._layers:
            two_graphs.choose(full and self._graphs)
        if full and not self._graphs:
            pass  # FlashAttention computes the batch
        elif self._layers and common.max_query_len <= 1 + self._drafted:
            rows, whole = common.num_reqs, short_prompts(common)
            if whole is not None and shared is not None:
                whole |= shared
            if common.max_query_len > 1:
                rows = common.num_actual_tokens
                tables, lengths, owner = one_by_one(common)
                whole = None if whole is None else whole[owner]
        elif self._host is not None:
            starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
            reading = common.is_prefilling
            rows = single(starts, None if reading is None else reading.tolist())
        elif self._layers and (prompts := sparse_prompts()):
            sparse = sparse_chunks(common, prompts)
        if sparse:
            return self._build_sparse(common, sparse)
        alone = bool(rows) or self._host is not None
        # vLLM's schedule for FlashAttention is not needed, unless one of two graphs contains it
        scheduled = self._graphs and (full or self._capturing)
        metadata = super().build(common_prefix_len, common, fast_build or (alone and not scheduled))
        metadata.searching = metadata.measuring = None
        if not self._layers:
            return metadata
        check_causal(common.causal)
        steps = self._opened()
        longest = 0 if full else common.max_seq_len  # a graph with FlashAttention measures nothing
        steps.begin(tables, lengths, slots, rows=rows, whole=whole, longest=longest)
        metadata.measuring = self._measuring(common)
        if alone:
            parts = self._parts(common, starts, rows) if starts else []
            metadata.searching = Searching(steps, self._numbers, rows, parts, common)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Build the metadata of a batch for a capture."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    @property
    def _numbers(self) -> dict[CodesLayer, int]:
        return {layer.impl.codes: i for i, layer in enumerate(self._layers)}

    def _measuring(self, common: CommonAttentionMetadata) -> Measuring | None:
        """Return an object that measures the prompts of a batch, or None if there are none or if
        each search retrieves `k` rows.

        It is None for decode steps, which may be CUDA graphs. The last tokens of a prompt in such a
        batch are measured like drafted tokens.
        """
        errors, limit = self._errors, self._layers[0].impl.codes.limit
        if errors is None or self._capturing or common.max_query_len <= 1 + self._drafted:
            return None
        chosen = prompt_chunks(common, limit.dense_below, 1 + self._drafted)
        if not errors.begin_batch(common.query_start_loc, common.seq_lens, chosen):
            return None
        return Measuring(errors, self._numbers)

    @property
    def _graphs(self) -> bool:
        """True if there are two full CUDA graphs for each batch size."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if self._options is None or not has_two_graphs(self.vllm_config, self._options):
            return False
        return mode is None or mode.has_full_cudagraphs()

    def _may_search(self, common: CommonAttentionMetadata) -> bool:
        """Return False for a batch of decode steps that FlashAttention computes faster."""
        if not self._layers or common.max_query_len > 1 + self._drafted:
            return True
        return batch_searches(self.vllm_config, common, self._layers[0].impl.codes.limit)

    def _build_sparse(
        self, common: CommonAttentionMetadata, sparse: list[SparseChunk]
    ) -> FlashAttentionMetadata:
        """Build the metadata of a batch in which some sequences are read with sparse attention."""
        check_causal(common.causal)
        tables, lengths = common.block_table_tensor, common.seq_lens
        self._opened().begin(tables, lengths, common.slot_mapping, rows=0)
        metadata = super().build(0, common, True)  # for other attributes
        rest, tokens = others(common, sparse)
        theirs = None if rest is None else super().build(0, rest, True)
        metadata.searching = ReadingSparsely(sparse, tokens, theirs, tables)
        metadata.measuring = self._measuring(common)
        return metadata

    def _parts(
        self, common: CommonAttentionMetadata, starts: list[int], first: int
    ) -> list[tuple[Part, FlashAttentionMetadata]]:
        """Divide the sequences from number `first` on into groups. Return them with their metadata.

        The rows of a group are copied from host memory together. In the copy, each sequence has as
        many pages as the longest sequence of the group.
        """
        host, lengths = self._host, common.seq_lens_cpu_upper_bound
        assert host is not None  # parts exist only if keys and values are in host memory
        known = (common.seq_lens if lengths is None else lengths)[: common.num_reqs].tolist()
        sizes = dict(page_tokens=host.scratch.shape[2], room=len(host.scratch))
        found = []
        for part in split(starts, known, first=first, **sizes):
            some = part.of(
                common, host.table(part.sequences.stop - part.sequences.start, part.width)
            )
            found.append((part, super().build(0, some, True)))
        return found

    @in_plain_torch
    def _opened(self) -> PagedSteps:
        """Return the object that runs the fused decode steps of all layers.

        It is created again if vLLM has replaced the KV cache of a layer since the last call.
        """
        caches = caches_of(self._layers)
        if are_same(caches, self._caches):
            assert self._steps is not None
            return self._steps
        config, options = self.vllm_config, self._options
        assert options is not None  # an engine with an index has options
        scheduler, most_rows = config.scheduler_config, most_rows_of(config)
        if len(self._geometries) > 1:
            refuse(
                f"model: got full-attention layers of different shapes, {self._geometries}, "
                "allowed is a model in which they have one shape"
            )
        limit = self._layers[0].impl.codes.limit
        if options.allowed_error is not None and self._errors is None:
            self._errors = PageLimits(
                self._layers[0].impl.geometry,
                layers=len(self._layers),
                error=options.allowed_error,
                dense_below=limit.dense_below,
                most_rows=most_rows,
            )
            for layer in self._layers:
                layer.impl.codes.errors = self._errors
        shared: dict[str, Any] = dict(
            limits=self._errors,
            k=options.most_rows,
            sink=options.sink,
            local_window=options.local_window,
            dense_below=limit.dense_below,
            most_rows=most_rows,
            new_tokens=max(scheduler.max_num_batched_tokens, most_rows),
            loads=has_connector(config),
        )
        codes = [layer.impl.codes.records for layer in self._layers]
        if self._host is None:
            shared |= dict(tokens=config.model_config.max_model_len)
            rows = [layer.impl.codes.rows(layer.kv_cache) for layer in self._layers]
            pages = Pages(codes, rows, scales=self._scales())
            self._steps = PagedSteps(self._layers[0].impl.geometry, options.config, pages, **shared)
        else:
            try:
                shared |= dict(scales=self._scales())
                self._steps = self._host.open(options.config, codes, **shared)
            except MemoryError as error:
                refuse_memory(error)
            logger.info_once("kvindex: %s", self._host.explain())
        self._caches = caches
        assert self._steps is not None
        if options.reading.sparse and not self._compiled:
            self._compile_for_prompts(options.reading)
            self._compiled = True
        return self._steps

    def _compile_for_prompts(self, reading: Reading) -> None:
        """Read prompts of arbitrary keys with sparse attention, so that Triton compiles its kernels
        when the engine starts. Otherwise the first requests would wait for it."""
        most = self.vllm_config.model_config.max_model_len
        kernels = prompt_kernels(self._layers[0].kv_cache.device)
        for length in [most] if kernels is None else kernels.compiled_lengths(most):
            try:
                self._read_any_prompt(length, reading)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "kvindex: prefill='sparse': too little GPU memory for prompts of %d tokens, "
                    "because keys and values are copied; set a lower gpu_memory_utilization or "
                    "max_model_len (%s)",
                    length,
                    error,
                )
                return

    def _read_any_prompt(self, length: int, reading: Reading) -> None:
        """Compute the sparse attention of the last two blocks of a prompt, whose keys and values
        are those in the first page."""
        layer = self._layers[0]
        g, rows = layer.impl.geometry, layer.impl.codes.rows(layer.kv_cache)
        table = torch.zeros(-(-length // rows.shape[2]), dtype=torch.int32, device=rows.device)
        read = read_rows(rows, table, 0, length, g, layer.impl.scales(layer))
        first = max(length // BLOCK - 2, 0) * BLOCK
        queries = read.keys.new_zeros((length - first, g.q_heads, g.head_dim))
        attend_prompt(queries, read, Prompt(2 * length + reading.prefill_last, reading), g)

    def _scales(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return the scales of keys and values of each layer, if they are in FP8."""
        if not self._layers[0].impl.fp8:
            return None
        return [device_scales(layer) for layer in self._layers]


def admitting(
    layers: list[Any], common: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Tensor, Tensor | None]:
    """Treat the requests that a step admits as prompts, if a KV connector may have loaded their
    blocks (see `loaded`).

    Args:
        layers: vLLM's layers with an index that have codes of their own.
        common: vLLM's metadata of the step.

    Returns:
        The metadata, and the slots of the step's new tokens and of the last tokens of these blocks,
        int64 `[T]`. All blocks that end at these slots are encoded before the next step. The third
        result is bool `[R]` on the device: the sequences that have such blocks, None if there are
        none. They must not search in this step.
    """
    counts = admitted() if layers else []
    if not counts:
        return common, common.slot_mapping, None
    layer, tables = layers[0], common.block_table_tensor[: common.num_reqs]
    count, _, page_tokens, _ = layer.impl.codes.rows(layer.kv_cache).shape
    more = last_slots(tables, counts, page_tokens)
    shared = sharing(tables, more, count, page_tokens)
    reading = as_prompts(common.is_prefilling, counts, common.num_reqs)
    slots = torch.cat([common.slot_mapping, more])
    return replace(common, is_prefilling=reading), slots, shared


def one_by_one(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Treat each new token of a batch as a sequence that ends with this token.

    Args:
        common: vLLM's metadata of the batch, with `T` new tokens.

    Returns:
        Block tables int32 `[T, blocks]`, lengths int32 `[T]`, and the number of each token's
        sequence, int64 `[T]`. The host does not wait for the device.
    """
    starts, count = common.query_start_loc, common.num_actual_tokens
    tokens = torch.arange(count, dtype=starts.dtype, device=starts.device)
    ends = starts[1 : common.num_reqs + 1]
    owner = torch.searchsorted(ends, tokens, right=True).clamp_max(common.num_reqs - 1)
    later = ends[owner] - 1 - tokens  # new tokens of the same sequence after this one
    lengths = (common.seq_lens[owner] - later).masked_fill(later < 0, 0)  # below 0 for padding
    return common.block_table_tensor[owner], lengths.to(common.seq_lens.dtype), owner


def prompt_chunks(common: CommonAttentionMetadata, least: int, decoded: int) -> list[int]:
    """Return the numbers of the sequences of a batch that read a chunk of their prompt.

    Args:
        common: vLLM's metadata of the batch.
        least: Shorter sequences are left out if the host knows their lengths.
        decoded: Largest number of new tokens of a sequence in a decode step.
    """
    counts = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
    found, reading = counts > decoded, common.is_prefilling
    if reading is not None:
        prompts = reading[: common.num_reqs]  # may have no entries for padding
        found[: len(prompts)] |= prompts & (counts[: len(prompts)] > 0)
    if (known := common.seq_lens_cpu_upper_bound) is not None:
        found[: len(known)] &= known[: len(found)] >= least
    numbers: list[int] = found.nonzero()[:, 0].tolist()
    return numbers


def short_prompts(common: CommonAttentionMetadata) -> Tensor | None:
    """Return which sequences of a batch of decode steps read the last tokens of their prompt, bool
    `[R]` on the device of the batch, or None if there are none.

    Such a token attends to all tokens before it, like the other tokens of its prompt. vLLM may
    still replay the CUDA graph of a decode step, so the choice must be data on the device.
    """
    if not reads(common):
        return None
    found = torch.zeros(common.num_reqs, dtype=torch.bool)
    prompts = common.is_prefilling[: common.num_reqs]  # may have no entries for padding
    found[: len(prompts)] = prompts
    return found.to(common.seq_lens.device, non_blocking=True)


@dataclass(frozen=True)
class SparseChunk:
    """A chunk of a prompt of which some tokens attend to chosen blocks.

    Args:
        number: Number of the sequence in the batch.
        tokens: Range of the new tokens among those of the batch.
        length: Number of tokens of the sequence, the new ones included.
        prompt: The prompt.
    """

    number: int
    tokens: slice
    length: int
    prompt: Prompt


def sparse_chunks(
    common: CommonAttentionMetadata, prompts: list[Prompt | None]
) -> list[SparseChunk]:
    """Return the chunks of a batch of which some tokens attend to chosen blocks.

    Args:
        common: vLLM's metadata of the batch.
        prompts: The prompt of each sequence that is read with sparse attention, None for others.
    """
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    known = common.seq_lens_cpu_upper_bound  # exact for sequences that read their prompts
    lengths = (common.seq_lens if known is None else known).tolist()
    found = []
    for number, prompt in enumerate(prompts[: common.num_reqs]):
        own, length = slice(starts[number], starts[number + 1]), lengths[number]
        first = length - (own.stop - own.start)
        if prompt is not None and prompt.has_blocks(first, length):
            found.append(SparseChunk(number, own, length, prompt))
    return found


def others(
    common: CommonAttentionMetadata, chunks: list[SparseChunk]
) -> tuple[CommonAttentionMetadata | None, Tensor | None]:
    """Return vLLM's metadata of the sequences of a batch that are not in `chunks`, and the places
    of their new tokens, int64 `[T]`. Both are None if there are no such tokens."""
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    counts = starts.diff()
    left = counts > 0
    left[[chunk.number for chunk in chunks]] = False
    if not left.any():
        return None, None
    tokens = torch.arange(int(starts[-1]))[left.repeat_interleave(counts)]
    begin = torch.nn.functional.pad(counts[left].cumsum(0), (1, 0)).int()
    device, known = common.query_start_loc.device, common.seq_lens_cpu_upper_bound
    numbers, tokens = left.nonzero()[:, 0].to(device), tokens.to(device)
    rest = type(common)(
        query_start_loc=begin.to(device),
        query_start_loc_cpu=begin,
        seq_lens=common.seq_lens[numbers],
        num_reqs=len(numbers),
        num_actual_tokens=len(tokens),
        max_query_len=int(counts[left].max()),
        max_seq_len=common.max_seq_len,
        block_table_tensor=common.block_table_tensor[numbers],
        slot_mapping=common.slot_mapping[tokens],
        causal=common.causal,
        seq_lens_cpu_upper_bound=None if known is None else known[: len(left)][left],
    )
    return rest, tokens


def caches_of(layers: list[Any]) -> list[Tensor]:
    """Return the pages of layers, and then those of their codes."""
    return [one.kv_cache for one in (*layers, *(layer.impl.codes for layer in layers))]


def are_same(new: list[Tensor], old: list[Tensor]) -> bool:
    """Return True if two lists contain the same tensors."""
    return len(new) == len(old) and all(map(operator.is_, new, old))


def most_rows_of(config: VllmConfig) -> int:
    """Return the largest number of queries of decode steps in a batch."""
    most = config.scheduler_config.max_num_seqs * (1 + drafted_tokens(config))
    # the size of a graph is its number of tokens
    return max(most, config.compilation_config.max_cudagraph_capture_size or 0)


def searches(impl: Any) -> bool:
    """Return True if an attention implementation belongs to the plug-in and has an index."""
    return isinstance(impl, SearchingFlashAttention) and impl.geometry is not None
