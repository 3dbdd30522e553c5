"""`attach`: context manager inside which a transformers model attends through indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.core.graphs import GRAPHS
from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import DEFAULT_K
from kvindex.ops.block_sparse import BLOCK
from kvindex_adapters.common.context import context
from kvindex_adapters.common.layer_options import IndexFactory, LayerOptions, Ropes
from kvindex_adapters.common.parallel import check_shards
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.graph.fused_token import (
    FusedGraph,
    FusedToken,
    check_fused,
    check_fused_indexes,
)
from kvindex_adapters.hf.graph.token_graph import TokenGraph
from kvindex_adapters.hf.model.attachment import claimed
from kvindex_adapters.hf.model.attention import NAME
from kvindex_adapters.hf.model.info import attention_request, find_decoder, layer_geometry
from kvindex_adapters.hf.model.patch import private_configurations, subclassed
from kvindex_adapters.hf.model.reread import patched_classes
from kvindex_adapters.hf.model.rotary import rotary_frequencies
from kvindex_adapters.hf.model.wrapped import unwrapped
from kvindex_adapters.hf.unsupported import check_model, sharing_of


@context("with attach(model, …) as cache:")
def attach(
    model: PreTrainedModel,
    *,
    index: str | IndexFactory = "pariskv",
    k: int | str = DEFAULT_K,
    coverage: float | None = None,
    error: float | None = None,
    sink: int = 64,
    local_window: int = 256,
    update_every: int = 256,
    dense_below: int = 2048,
    search_up_to: int = 1,
    dense_layers: Sequence[int] = (),
    index_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[int, Mapping[str, Any]] | None = None,
    layer: type[AttentionLayer] = AttentionLayer,
    graphs: bool = True,
    token_graph: bool | None = None,
    fused: bool = False,
    prefill: str = "dense",
    prefill_mass: float = 0.95,
    prefill_last: int = 128,
    prefill_selector: str = "sampled",
) -> Iterator[IndexCache]:
    """Context manager that makes a model attend through indexes, and yields the cache to use.

    Pass the cache, or a `copy.deepcopy` of the cache, to the model as `past_key_values`. At the end
    of the `with` block the model's own attention is restored, while hooks and configuration options
    that the caller changed stay. Only one thread at a time may use the model or its caches.

    One token's key and value are called a row.

    Args:
        model: A transformers model, or a `PeftModel` whose adapters change only the weights.
        index: Name of an index, a name with options such as `"pariskv:beta=.05"`, or a function
            that makes an index from its geometry. An index given by name runs with CUDA kernels and
            stores its rows in pinned host memory, if the model is on a GPU that can run the
            kernels.
        k: Number of rows that a decode step retrieves per KV head, at least 1. Or "auto" for as
            many as `error` asks for, at most 1,024.
        coverage: Fraction of the attention weight, in (0, 1]. A step retrieves fewer than `k` rows
            if the index estimates that fewer rows already have this fraction. None: always `k`
            rows.
        error: Error of the output of each layer with an index, relative to the size of its outputs.
            A step retrieves fewer than `k` rows if the index expects a smaller error with fewer.
            None: always `k` rows, or with `k="auto"` the same as 0.1. Only for indexes that
            predict this error, such as the default index, and not together with `coverage`.
        sink: Number of first tokens that every step attends to exactly.
        local_window: Number of newest tokens that every step attends to exactly.
        update_every: Number of tokens after which new tokens are appended to the index. Until then,
            each step attends to the new tokens exactly.
        dense_below: Sequences with fewer tokens use full attention. Their tokens are nevertheless
            appended to the index.
        search_up_to: A call of the model with at most this number of new tokens searches the index.
            A longer one, such as a prompt, attends to all tokens. Use a value above 1 for assisted
            decoding.
        dense_layers: Numbers of the layers that keep transformers' own cache and attention.
        index_options: Further keyword arguments of the index (`preset`, `store`, …). Sizes such as
            `head_dim` are not allowed, because the model determines them.
        layer_options: Maps a layer number to keyword arguments for the index of this layer only.
        layer: The class of the attention layer around each index: `AttentionLayer` or a subclass.
        graphs: On a GPU, replay repeated steps of an attention layer as a CUDA graph.
        token_graph: On a GPU, replay the model's whole decode step as a CUDA graph, if possible. If
            not, `cache.report()` states the reason. None means True on a GPU, or False with
            `graphs=False`.
        fused: In the graph of the whole decode step, use fused kernels instead of the model's own
            forward pass. Requires a model of the Llama family, a GPU, Triton, and at most 16
            sequences.
        prefill: How prompts attend in layers with an index. "dense" attends to all tokens.
            "sparse" attends to chosen blocks of 128 tokens, which is faster for long prompts, but
            changes the result a little (docs/prompts.md).
        prefill_mass: With `prefill="sparse"`, fraction of the estimated attention weight that the
            chosen blocks of each query head have, in (0, 1].
        prefill_last: With `prefill="sparse"`, number of tokens at the end of a prompt that attend
            to all tokens, for example a question after a long text.
        prefill_selector: With `prefill="sparse"`, how blocks are chosen: "sampled" or "pooled" (see
            `AttentionLayer`).

    Yields:
        The cache to pass as `past_key_values`.

    Raises:
        UnsupportedError: The model is not supported. (UnsupportedError is a ValueError.)
        ValueError: An argument is wrong, or the model is already attached. The model is unchanged.
        TypeError: `model` is not a transformers model, or an argument is unknown.

    Examples:
        ```python
        with kvhf.attach(model, index="pariskv") as cache:
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
            print(cache.report())
        ```
    """
    model = unwrapped(model)
    config = check_model(model)
    options = LayerOptions(
        index=index,
        k=k,
        coverage=coverage,
        error=error,
        sink=sink,
        local_window=local_window,
        update_every=update_every,
        dense_below=dense_below,
        search_up_to=search_up_to,
        dense_layers=dense_layers,
        index_options=index_options,
        layer_options=layer_options,
        layer=layer,
        graphs=graphs,
        prefill=prefill,
        prefill_mass=prefill_mass,
        prefill_last=prefill_last,
        prefill_selector=prefill_selector,
    )
    if token_graph is not None:
        check.flag("token_graph", token_graph)
    if check.flag("fused", fused):
        check_fused(model, options, token_graph=token_graph)
    decoder, ropes = find_decoder(model), Ropes()
    by_kernels = FusedToken(decoder) if fused else None
    with claimed(model) as attachment:
        attachment.sharing, make = sharing_of(config), partial(options.make, ropes)
        wanted = graphs and model.device.type in GRAPHS if token_graph is None else token_graph
        tokens = TokenGraph(asked=token_graph is not None) if wanted else None
        tokens = tokens if by_kernels is None else FusedGraph(by_kernels)
        cache = IndexCache(config, make, dense_layers, attachment, tokens)
        cache.chunk_unit = BLOCK if prefill == "sparse" else 1
        ropes.update(rotary_frequencies(decoder, cache.indexed))
        # make trial indexes, so that wrong arguments raise an error before the first forward pass
        probed = options.probe(ropes, partial(layer_geometry, config, decoder))
        for made in probed:
            check_shards(model, made)
        if by_kernels is not None:
            check_fused_indexes(probed, options)
        with private_configurations(model, NAME) as copies:
            model.set_attn_implementation(attention_request(model, NAME))
            copies.substitute(NAME)
            if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
                raise UnsupportedError(
                    f"model: got {type(model).__name__}, whose attention does not go through "
                    "transformers' AttentionInterface"
                )
            generates = hasattr(model, "generate")
            model_class, decoder_class = patched_classes(model)
            patched_model = subclassed(model, model_class) if generates else nullcontext()
            packed = nullcontext() if by_kernels is None else by_kernels.laid_together()
            with subclassed(decoder, decoder_class), patched_model, packed:
                attachment.decoder = decoder
                try:
                    yield cache
                finally:
                    if tokens is not None:
                        tokens.forget()
