"""Time per generated token of a model, beside dense attention, with CUDA graphs and without.

    python -m benchmarks.generation --text FILE [--tokens N] [--written T] [--turn T] [--layers L]
        [--context N] [--steps S] [--seconds S] [--index SPEC] [--model … --gguf-file … --lora …]
        [--dtype …] [--device …] [--without-graphs] --json OUT

What is compared is measured in turns, round after round, a few tokens of each plan at a time
(`--turn`), so that what slows a host for a while slows them all. `layers`: L attention layers
(H = 32, G = 8, D = 128) over N synthetic tokens each. First what they give with graphs is compared
with what they give without, which must be the same to the bit; else nothing is timed. Then the
microseconds that the host spends on a layer and token, the device being idle at the start of each
step, and those until the device is done, over S steps, updates of the windows among them. `model`:
the text's first N tokens are a prompt, after which T tokens are written greedily, by transformers
with its own cache (`dense`) and through the index, each by a copy of the model; milliseconds per
token of a turn, between its first and its last one, and seconds that all of the prompt but its last
chunk took. `--without-graphs`, for a CPU: the `model` alone, `dense` and through the index.

Figures are medians with quartiles (`_low`, `_high`) and each round's (`_rounds`); `ratio`: of a
plan's time to that with graphs in the same round. No turn begins before all memory that is pinned
ahead is pinned, no round after `--seconds`; `left_out` says how many were not begun.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.common.decoding import LOCAL, Decoding
from benchmarks.common.reading import add_model, described, loaded, write
from benchmarks.common.timing import Figures, in_turns
from benchmarks.common.workload import D, G, H
from kvindex.core.geometry import Geometry
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.prefill import prefill

SHAPE = dict(q_heads=H, kv_heads=G, head_dim=D)
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Steps whose results are compared."""

WARM, CHUNK = 16, 1024
"""Tokens that a model writes before any is timed; of the prompt, read at a time."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=7000, help="of the prompt")
    parser.add_argument("--written", type=int, default=160, help="tokens that are timed")
    parser.add_argument("--turn", type=int, default=20, help="tokens until it is another's turn")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=32_768, help="tokens of each layer")
    parser.add_argument("--steps", type=int, default=300, help="of the layers that are timed")
    parser.add_argument("--seconds", type=float, default=600, help="after which no round is begun")
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--without-graphs", action="store_true", help="the model alone, on a CPU")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    add_model(parser)
    found = parser.parse_args(given)
    least = dict(tokens=1, turn=2, layers=1, context=LOCAL + 256)
    least |= dict(written=found.turn, steps=found.turn)
    for name, low in least.items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    if not found.text.is_file():
        parser.error(f"text: got {found.text}, allowed is a file that exists")
    return found


def turn(decoding: Decoding, steps: int) -> Figures:
    """Microseconds per layer of each step: of the host, and until the device is done."""
    found: Figures = {"host_us": [], "done_us": []}
    each = 1e6 / len(decoding.layers)
    for _ in range(steps):
        decoding.wait()
        start = time.perf_counter()
        decoding.step()
        found["host_us"].append(each * (time.perf_counter() - start))
        decoding.wait()
        found["done_us"].append(each * (time.perf_counter() - start))
    return found


def measured_layers(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Both plans, after each round. Raises SystemExit where they do not give the same."""
    about = {"layers": given.layers, "context": given.context, "turn": given.turn}
    g = Geometry.of(**SHAPE, dtype=getattr(torch, given.dtype), device=given.device)
    of = g, given.index, given.context, given.layers
    plans = {name: Decoding(*of, graphs=name == "graphs") for name in ("eager", "graphs")}
    for step in range(CHECKED):
        mine, theirs = (plan.step() for plan in plans.values())
        if not all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True)):
            raise SystemExit(f"layers: step {step} is not the same with graphs; nothing is timed")
    turns = {name: partial(turn, plan, given.turn) for name, plan in plans.items()}
    for found in in_turns(turns, given.steps // given.turn, end):
        yield about | found


class _Marks(BaseStreamer):
    """When tokens come; the prompt is the first."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """One more."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """No more come."""


class Writer:
    """A model that has read a prompt, ids int64 `[N]`, and writes on by a plan until `until`.

    ids: int64 `[1, N + written]`.
    """

    def __init__(self, model: Any, plan: str, ids: Tensor, index: str, until: ExitStack) -> None:
        self._model, self.ids = copy.deepcopy(model), ids[None].to(model.device)
        self._cache: Any = DynamicCache(config=model.config)
        if plan != "dense":
            attached = attach(self._model, index=index, graphs=plan == "graphs")
            self._cache = until.enter_context(attached)
        stop, start = max(len(ids) - CHUNK, 0), time.perf_counter()
        prefill(self._model, self.ids[0], self._cache, stop=stop, chunk=CHUNK)
        self.prefill_s = time.perf_counter() - start

    def turn(self, count: int) -> Figures:
        """Milliseconds per token of `count` more, from the first to the last."""
        marks, options = _Marks(), dict(max_new_tokens=count, min_new_tokens=count)
        self.ids = self._model.generate(
            input_ids=self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self._cache,
            streamer=marks,
            do_sample=False,
            **options,
            **ONE_ANSWER,
        )
        at = [1e3 * mark for mark in marks.at[1:]]
        return {"token_ms": [(at[-1] - at[0]) / (len(at) - 1)]}


def measured_model(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Every plan, after each round. Raises ValueError for a text that is too short."""
    model, tokenizer = loaded(given, dtype=getattr(torch, given.dtype))
    ids = torch.tensor(tokenizer(given.text.read_text())["input_ids"])[: given.tokens]
    if len(ids) < given.tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed are at least {given.tokens}")
    about: dict[str, Any] = {"tokens": given.tokens, "turn": given.turn}
    plans = [plan for plan in PLANS if plan != "eager" or not given.without_graphs]
    with ExitStack() as until:
        writers = {plan: Writer(model, plan, ids, given.index, until) for plan in plans}
        about["prefill_s"] = {plan: writer.prefill_s for plan, writer in writers.items()}
        for writer in writers.values():
            writer.turn(WARM)
        gc.collect()  # what is let go of may unpin memory
        turns = {plan: partial(writer.turn, given.turn) for plan, writer in writers.items()}
        for found in in_turns(turns, given.written // given.turn, end):
            same = torch.equal(writers[plans[-2]].ids, writers["graphs"].ids)
            yield about | found | {"written": given.turn * found["rounds"], "same_text": same}


def main() -> None:
    """Check, measure, print and write, after each round what there is."""
    given = arguments()
    end = time.monotonic() + given.seconds
    result: dict[str, Any] = {"index": given.index, "dtype": given.dtype, **described(given)}
    parts = {"layers": measured_layers, "model_run": measured_model}
    if given.without_graphs:
        del parts["layers"]
    with torch.no_grad():
        for part, measured in parts.items():
            for result[part] in measured(given, end):
                write(result, given.json)
            print({part: result[part]}, flush=True)
            gc.collect()  # its memory is unpinned now, not in what comes next


if __name__ == "__main__":
    main()
