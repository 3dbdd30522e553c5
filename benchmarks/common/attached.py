"""Time decode steps of a transformers model with an index, and of kvindex's own decoder.

The transformers model and the decoder have the same weights, and each uses the same kind of index.
`attach` connects the transformers model to its index.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, model_of
from benchmarks.common.timing import Figures, check_floor, drained, in_turns, of_tokens, settled
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.graph.run_ahead import decoding_options
from kvindex_adapters.hf.graph.token_graph import TokenGraph
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.llama.fused import device_refusal
from kvindex_adapters.llama.weights import read_weights


class Marks(BaseStreamer):
    """A transformers streamer that records the time in seconds at which each token arrives.

    The first recorded time is the one at which transformers passes the prompt to the streamer.
    """

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """Record the time of a token. Before the answer's first token, wait for the device."""
        if len(self.at) == 1:
            drained()
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing. transformers calls this method at the end of the answer."""

    def figures(self) -> Figures:
        """Return the times between tokens in milliseconds, beginning after the first token."""
        return of_tokens(self.at[1:])


class Attached:
    """A transformers model with an index, which samples tokens in the same way as `kvhf.generate`.

    The constructor fills the empty cache with `tokens` synthetic tokens in each layer, and reserves
    memory for `room` more tokens.
    """

    def __init__(self, model: Any, cache: IndexCache, tokens: int, room: int) -> None:
        self._model, self._cache = model, cache
        size = (1, tokens + 1)  # the first decode step reads the last token
        self._ids = torch.randint(model.config.vocab_size, size, device=model.device)
        first = token.first()
        prefill(model, self._ids[0], cache, stop=first, chunk=first)
        for number, layer in enumerate(cache.attention_layers()):
            token.fill(layer, number, tokens, room)
        settled()

    def turn(self, count: int, graph: TokenGraph | None) -> Figures:
        """Generate `count` tokens, and return the times between tokens in milliseconds.

        Times are taken when the host receives a token. The first token is not timed. If `graph` is
        given, it runs a whole decode step as one CUDA graph. If it is None, the decode step of each
        layer is a CUDA graph of its own.
        """
        drained()
        self._cache.token_graph = graph
        marks, options = Marks(), dict(max_new_tokens=count, do_sample=True, top_k=0, top_p=1.0)
        self._ids = self._model.generate(
            input_ids=self._ids,
            attention_mask=torch.ones_like(self._ids),
            **{CACHE: self._cache},
            streamer=marks,
            **decoding_options(self._model, None, self._cache, marks, {**options, **ONE_ANSWER}),
        )
        return marks.figures()


def measured(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Time kvindex's decoder and transformers with each kind of CUDA graph, alternately.

    In each round, every variant is measured once. Yield the results so far after each round.
    """
    shape = SHAPES[given.decoder]
    g = shape.geometry(getattr(torch, given.dtype), given.device)
    # Number of tokens that are generated in all. Before the timed tokens, other tokens are
    # generated to warm up the GPU, or to bring the row cache to a certain hit rate.
    room = 4 * given.written + (given.written // given.turn + 4) * token.WARM
    model = model_of(shape, g, given.context + room)
    weights = read_weights(model)
    rate, read = token.read_rate(g.device), weights.read_bytes
    layers = token.indexed(g, given.index, given.context, shape.layers, room, k=given.k)
    decoder = token.Plan(shape, g, weights, layers, fused=not given.torch_products)
    decoder.turn(token.WARM)
    about: dict[str, Any] = dict(shape=shape._asdict(), context=given.context, k=given.k)
    about |= dict(sink=token.SINK, window=token.LOCAL, update_every=token.UPDATE)
    about |= dict(weights_bytes=read, read_bytes_per_s=rate, floor_ms=1e3 * read / rate)
    about["sharpness"] = token.sharpen_for(weights, decoder, given.hit_rate)
    options: Any = dict(k=given.k, sink=token.SINK, local_window=token.LOCAL)
    options |= dict(update_every=token.UPDATE, dense_below=0, token_graph=True)
    fused = not given.torch_products and device_refusal(torch.device(given.device)) is None
    with attach(model, index=given.index, fused=fused, **options) as cache:
        writer, hits = Attached(model, cache, given.context, room), token.Hits()
        graphs = {"fused": cache.token_graph} if fused else {}
        graphs |= {"token_graph": TokenGraph(), "layer_graphs": None}
        plans: dict[str, Any] = {"decoder": decoder.turn}
        plans |= {name: partial(writer.turn, graph=graph) for name, graph in graphs.items()}
        about["hit_rates"] = {name: [] for name in plans}

        def turn(name: str) -> Figures:
            plans[name](token.WARM)
            hits.rate()
            found: Figures = plans[name](given.turn)
            about["hit_rates"][name].append(hits.rate())
            return found

        turns = {name: partial(turn, name) for name in plans}
        for warm in turns.values():
            warm()
        workload.free()
        about["hit_rates"] = {name: [] for name in plans}
        for found in in_turns(turns, given.written // given.turn, end, "decoder"):
            reports = {name: graph.report for name, graph in graphs.items() if graph is not None}
            check_floor(found, plans, about["floor_ms"])
            yield about | found | {"replays": reports}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line of text for each measured variant."""
    if not found["rounds"]:
        return
    yield f"floor {found['floor_ms']:.2f} ms: {found['weights_bytes'] / 1e9:.2f} GB of weights"
    for plan, rates in found["hit_rates"].items():
        ms, low, high = (found[plan][f"token_ms{part}"] for part in ("", "_low", "_high"))
        line = f"{plan:12} {ms:6.2f} ms ({low:.2f} to {high:.2f})"
        line += f", hits {statistics.median(rates):.2f}"
        if plan in found["ratio"]:
            line += f", {found['ratio'][plan]['token_ms']:.3f} of the decoder's"
        yield line
    for plan, report in found["replays"].items():
        yield f"{plan}: {report}"
