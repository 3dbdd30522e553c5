"""Measure time and memory while kvindex's decoder reads a prompt, with an index and without."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, Shape, bytes_read, model_of
from benchmarks.common.timing import Figures, in_turns, settled
from kvindex_adapters.decoder.decoder import Decoder
from kvindex_adapters.decoder.prefill import default_chunk, token_bytes
from kvindex_adapters.llama.weights import Weights

ROUNDS = 3
"""Number of timed readings of the prompt with the index, and also without it. One reading of each
kind comes before these, and its time is reported separately."""


def read(decoder: Decoder, ids: Tensor, index: str | None) -> Figures:
    """Read a prompt with token ids int64 `[N]`, and return the time in seconds.

    On a GPU, also return the peak memory: the largest number of bytes that torch had allocated,
    including the model's weights.
    """
    on_gpu = decoder.device.type == "cuda"
    session = decoder.session(index=index)
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
    decoder = Decoder.of(model_of(shape, g, tokens), weights=given.weights)
    workload.free()
    embedding = 0 if shape.tied else decoder.weights.embedding.nbytes
    needed = {"weights": bytes_read(decoder.weights) + embedding}
    chunk = default_chunk(decoder.weights, 1, decoder.device)
    needed |= least(shape, decoder.weights, tokens, chunk)
    over = sum(needed[name] for name in ("weights", "layer", "chunk"))
    ids = torch.randint(shape.vocabulary, (tokens,))
    indexes: dict[str, str | None] = {"indexed": given.index}
    if token.fits(g, tokens, shape.layers):
        indexes["full"] = None
    turns = {plan: partial(read, decoder, ids, index) for plan, index in indexes.items()}
    first = {plan: turn() for plan, turn in turns.items()}
    about = dict(shape=shape._asdict(), tokens=tokens, chunk=chunk, kind=given.weights)
    about |= dict(first=first, needed_bytes=needed, over_bytes=over)
    for found in in_turns(turns, ROUNDS, end, [*turns][-1]):
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
            line += f", {found['ratio'][plan]['seconds']:.3f} of full attention's"
        if plan in found["memory"]:
            line += f"; {found[plan]['peak_bytes'] / 1e9:.2f} GB at most"
            line += f", {found['memory'][plan]:.3f} of weights, a layer's rows and a chunk"
        yield line
    needed = found["needed_bytes"].items()
    yield ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed)
