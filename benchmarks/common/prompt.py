"""Measure time and memory while kvindex's decoder reads a prompt, with an index and without."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, Shape, model_of
from benchmarks.common.timing import Figures, drained, in_turns, settled
from kvindex.layer.sparse import SparsePrompt
from kvindex.selectors.base import kept_always
from kvindex_adapters.decoder import layers
from kvindex_adapters.decoder.decoder import Decoder
from kvindex_adapters.decoder.prefill import default_chunk, token_bytes
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import default_chunk as default_chunk_of
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.llama.weights import Weights

ROUNDS = 3
"""Number of timed readings of the prompt with the index, and also without it. One reading of each
kind comes before these, and its time is reported separately."""

REPEATED = 5
"""Number of timed repetitions of the parts of `floor`."""


def read(
    decoder: Decoder, ids: Tensor, index: str | None, attach_options: dict[str, Any] | None = None
) -> Figures:
    """Read a prompt with token ids int64 `[N]`, and return the time in seconds.

    On a GPU, also return the peak memory: the largest number of bytes that torch had allocated,
    including the model's weights.
    """
    on_gpu = decoder.device.type == "cuda"
    session = decoder.session(index=index, attach_options=attach_options)
    gc.collect()
    settled()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(decoder.device)
    start = time.perf_counter()
    decoder.read(ids, session)
    if on_gpu:
        torch.cuda.synchronize(decoder.device)
    found: Figures = {"seconds": [time.perf_counter() - start]}
    if on_gpu:
        found["peak_bytes"] = [torch.cuda.max_memory_allocated(decoder.device)]
    return found


def read_through(model: Any, ids: Tensor, index: str) -> Figures:
    """Read a prompt like `read`, with a transformers model that `attach` connects to an index."""
    ids = ids.to(model.device)
    with attach(model, index=index) as cache:
        gc.collect()
        settled()
        start = time.perf_counter()
        prefill(model, ids, cache, stop=len(ids), chunk=default_chunk_of(model), room=len(ids))
        drained()
        return {"seconds": [time.perf_counter() - start]}


@torch.no_grad()
def read_stock(model: Any, ids: Tensor) -> Figures:
    """Read a prompt with a transformers model in one call, without kvindex."""
    ids, cache = ids[None].to(model.device), DynamicCache(config=model.config)
    gc.collect()
    settled()
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    drained()
    return {"seconds": [time.perf_counter() - start]}


def read_sparsely(
    decoder: Decoder, ids: Tensor, index: str, fraction: float, selector: str
) -> Figures:
    """Read a prompt with sparse attention to a given fraction of the blocks of keys.

    A model with random weights has no attention that concentrates on few blocks. Therefore the
    blocks are chosen as usual, but then replaced by random ones.
    """
    choose = SparsePrompt.choose

    def random(prompt: SparsePrompt, *given: Any) -> Tensor:
        chosen = choose(prompt, *given)
        (QB, KB), device = chosen.shape[2:], chosen.device
        first = KB - QB
        causal = torch.arange(KB, device=device) <= torch.arange(first, KB, device=device)[:, None]
        drawn = torch.rand(chosen.shape, device=device) < fraction
        return (drawn & causal) | kept_always(QB, KB, first, device)

    with mock.patch.object(SparsePrompt, "choose", random):
        return read(decoder, ids, index, {"prefill": "sparse", "prefill_selector": selector})


def floor(decoder: Decoder, tokens: int, chunk: int) -> Figures:
    """Estimate the least time in seconds for reading a prompt of `tokens` tokens.

    It is the time of the matrix products and of attention alone, of all layers. The products of one
    chunk are timed, and the attention of one chunk to half of the prompt, without a mask and with
    cuDNN on a GPU.
    """
    config, layer = decoder.config, decoder.weights.layers[0]
    chunk = min(chunk, tokens)
    like = decoder.weights.embedding
    hidden = like.new_empty(chunk, like.shape[1]).normal_()
    wide = like.new_empty(chunk, len(layer.gate.weight)).normal_()
    many = like.new_empty(chunk, config.q_heads * config.head_dim).normal_()
    inputs = [(hidden, one) for one in (layer.query, layer.key, layer.value, layer.gate, layer.up)]
    inputs += [(many, layer.output), (wide, layer.down)]

    def products() -> None:
        for x, linear in inputs:
            layers.linear(x, linear)

    shapes = (config.q_heads, chunk), *[(config.kv_heads, max(tokens // 2, 1))] * 2
    given = [like.new_empty(1, heads, n, config.head_dim).normal_() for heads, n in shapes]

    def attention() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if like.is_cuda else nullcontext():
            scaled_dot_product_attention(*given, enable_gqa=True)

    each = sum(statistics.median(_times(work)) for work in (products, attention))
    return {"seconds": [each * config.layers * tokens / chunk]}


def _times(work: Callable[[], None]) -> list[float]:
    """Return the seconds that `work` takes, in several rounds after a first one."""
    found = []
    for _ in range(1 + REPEATED):
        drained()
        start = time.perf_counter()
        work()
        drained()
        found.append(time.perf_counter() - start)
    return found[1:]


def least(shape: Shape, weights: Weights, tokens: int, chunk: int) -> dict[str, int]:
    """Return the bytes that reading `tokens` tokens needs in addition to the weights.

    The result has three entries: `layer` for the keys and values of one layer, `chunk` for the
    activations of a chunk, and `states` for the hidden states of the whole prompt.
    """
    size = weights.embedding.element_size()
    rows = 2 * shape.kv_heads * shape.head_dim
    return {
        "layer": tokens * rows * size,
        "chunk": min(chunk, tokens) * token_bytes(weights),
        "states": tokens * shape.hidden * size,
    }


def measured(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Read random tokens with an index and with full attention. Yield the results after each round.

    Full attention is measured only if the keys and values of all layers fit into device memory.
    """
    shape, tokens = SHAPES[given.decoder], given.prefill
    g = shape.geometry(getattr(torch, given.dtype), given.device)
    model = model_of(shape, g, tokens)
    decoder = Decoder.of(model, weights=given.weights)
    if not given.through:
        del model
    workload.free()
    embedding = 0 if shape.tied else decoder.weights.embedding.nbytes
    needed = {"weights": decoder.weights.read_bytes + embedding}
    chunk = default_chunk(decoder.weights, 1, decoder.device)
    needed |= least(shape, decoder.weights, tokens, chunk)
    over = sum(needed[name] for name in ("weights", "layer", "chunk"))
    ids = torch.randint(shape.vocabulary, (tokens,))
    indexes: dict[str, str | None] = {"indexed": given.index}
    if token.fits(g, tokens, shape.layers):
        indexes["full"] = None
    turns: dict[str, Callable[[], Figures]] = {
        plan: partial(read, decoder, ids, index) for plan, index in indexes.items()
    }
    if given.through:
        turns[given.through] = partial(read_through, model, ids, given.index)
        turns["stock"] = partial(read_stock, model, ids)
    for plan in given.sparse or ():
        selector, fraction = plan.split("=")
        turns[plan] = partial(read_sparsely, decoder, ids, given.index, float(fraction), selector)
    first = {plan: turn() for plan, turn in turns.items()}
    about = dict(shape=shape._asdict(), tokens=tokens, chunk=chunk, kind=given.weights)
    about |= dict(first=first, needed_bytes=needed, over_bytes=over)
    turns["floor"] = partial(floor, decoder, tokens, chunk)
    for found in in_turns(turns, ROUNDS, end, "indexed" if given.through else "floor"):
        peaks = {plan: found[plan].get("peak_bytes") for plan in turns if found["rounds"]}
        yield about | found | {"memory": {p: peak / over for p, peak in peaks.items() if peak}}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines to print: one line for each kind of attention that was measured, and one line
    for the memory that is needed."""
    for plan, first in found["first"].items():
        line = f"{plan:8} first {first['seconds'][0]:.2f} s"
        if found["rounds"]:
            line += f", then {found[plan]['seconds']:.2f} s"
        if plan in found.get("ratio", {}):
            over = "the decoder with the index" if "transformers" in found["first"] else "the floor"
            line += f", {found['ratio'][plan]['seconds']:.3f} times {over}"
        if plan in found["memory"]:
            line += f"; {found[plan]['peak_bytes'] / 1e9:.2f} GB at most"
            line += f", {found['memory'][plan]:.3f} of weights, a layer's rows and a chunk"
        yield line
    needed = found["needed_bytes"].items()
    yield ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed)
