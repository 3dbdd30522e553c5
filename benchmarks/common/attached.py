"""Timing of a transformers model's tokens through `attach`, beside the decoder's: same weights."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, model_of
from benchmarks.common.timing import Figures, in_turns, settled
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.prefill import prefill
from kvindex_adapters.hf.run_ahead import decoding_options
from kvindex_adapters.hf.token_graph import TokenGraph
from kvindex_adapters.llama.fused import device_refusal
from kvindex_adapters.llama.weights import read_weights


class Marks(BaseStreamer):
    """When tokens come, in seconds; the prompt is the first."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """One more."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """No more come."""


class Attached:
    """A model that writes on by `kvhf.generate`'s loop, tokens drawn at random, in an empty cache.

    All layers first hold so many tokens; there is memory for `room` more.
    """

    def __init__(self, model: Any, cache: IndexCache, tokens: int, room: int) -> None:
        self._model, self._cache = model, cache
        size = (1, tokens + 1)  # the last is the first that is read by a step
        self._ids = torch.randint(model.config.vocab_size, size, device=model.device)
        first = token.first()
        prefill(model, self._ids[0], cache, stop=first, chunk=first)
        for number, layer in enumerate(cache.attention_layers()):
            token.fill(layer, number, tokens, room)
        settled()

    def turn(self, count: int, graph: TokenGraph | None) -> Figures:
        """Milliseconds between two of so many tokens that the host reads; graph: of whole ones."""
        self._cache.token_graph = graph
        marks, options = Marks(), dict(max_new_tokens=count, do_sample=True, top_k=0, top_p=1.0)
        self._ids = self._model.generate(
            input_ids=self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._cache,
            streamer=marks,
            **decoding_options(self._model, None, self._cache, marks, {**options, **ONE_ANSWER}),
        )
        return {"token_ms": [1e3 * (new - old) for old, new in pairwise(marks.at[1:])]}


def measured(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Tokens of the decoder and of transformers with token graphs and without, in turns."""
    shape = SHAPES[given.decoder]
    g = shape.geometry(getattr(torch, given.dtype), given.device)
    # of all turns, their warm tokens among them, and those that sharpen
    room = 4 * given.written + (given.written // given.turn + 4) * token.WARM
    model = model_of(shape, g, given.context + room)
    weights = read_weights(model)
    layers = token.indexed(g, given.index, given.context, shape.layers, room)
    decoder = token.Plan(shape, g, weights, layers, fused=not given.torch_products)
    decoder.turn(token.WARM)
    about: dict[str, Any] = dict(shape=shape._asdict(), context=given.context, k=token.K)
    about |= dict(sink=token.SINK, window=token.LOCAL, update_every=token.UPDATE)
    about["sharpness"] = token.sharpen_for(weights, decoder, given.hit_rate)
    options: Any = dict(k=token.K, sink=token.SINK, local_window=token.LOCAL)
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
            yield about | found | {"replays": reports}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """What was measured, a line for each plan."""
    if not found["rounds"]:
        return
    for plan, rates in found["hit_rates"].items():
        ms, low, high = (found[plan][f"token_ms{part}"] for part in ("", "_low", "_high"))
        line = f"{plan:12} {ms:6.2f} ms ({low:.2f} to {high:.2f})"
        line += f", hits {statistics.median(rates):.2f}"
        if plan in found["ratio"]:
            line += f", {found['ratio'][plan]['token_ms']:.3f} of the decoder's"
        yield line
    for plan, report in found["replays"].items():
        yield f"{plan}: {report}"
