"""What a decoded token costs beside dense attention, with graphs and without.

    PYTHONPATH=.:adapters python benchmarks/generate_speed.py --text FILE [--tokens N]
        [--written T] [--turn T] [--layers L] [--context N] [--steps S] [--seconds S]
        [--model … --gguf-file … --lora …] [--dtype …] [--device …] --json OUT

What is compared is measured in turns, round after round, a few tokens of each plan at a time
(`--turn`), so that what slows a host for a while slows them all. `layers`: L attention layers
(H = 32, G = 8, D = 128, `pariskv`) over N made-up tokens each. First what they give with graphs is
compared with what they give without, which must be the same to the bit; else nothing is timed. Then
the microseconds that the host spends on a layer and token, the device being idle at the start of
each step, and those until the device is done, over S steps, updates of the windows among them.
`model`: the text's first N tokens are a prompt, after which T tokens are written greedily, by
transformers with its own cache (`dense`) and through `pariskv`, each by a copy of the model;
milliseconds per token of a turn, between its first and its last one, and of single tokens.

Figures are medians with quartiles (`_low`, `_high`) and each round's (`_rounds`); `ratio`: of a
plan's time to that with graphs in the same round; `replayed`: how many of a plan's `layer_steps`
were replays of a graph; `captured`: graphs made while it was timed. No turn begins before all
memory that is pinned ahead is pinned (`settled_s`), no round after `--seconds`; `left_out` says how
many were not begun.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import kvindex
from benchmarks.reading import add_model, described, write
from benchmarks.turns import Figures, counted, in_turns
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.place import placed
from kvindex_adapters.hf.reading import prefill
from kvindex_adapters.models import load, smollm2

H, G, D = 32, 8, 128
INDEX, LOCAL = "pariskv", 256
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Steps whose results are compared."""

WARM = 16
"""Tokens that a model writes before any is timed."""

CHUNK = 1024
"""Tokens of the prompt read at a time."""


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
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    add_model(parser)
    found = parser.parse_args(given)
    least = dict(tokens=1, update_phase=2, layers=1, context=LOCAL + 256)
    least |= dict(written=found.turn, steps=found.turn)
    for name, low in least.items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    if not found.text.is_file():
        parser.error(f"text: got {found.text}, allowed is a file that exists")
    return found


# Layers


class Layers:
    """Attention layers that hold `context` tokens, and attend from one token after the other."""

    def __init__(self, given: argparse.Namespace, *, graphs: bool) -> None:
        self._device, self._token = torch.device(given.device), 0
        dtype = getattr(torch, given.dtype)
        geometry = dict(q_heads=H, kv_heads=G, head_dim=D, dtype=dtype, device=self._device)
        draw = torch.Generator(self._device).manual_seed(0)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=self._device).to(dtype)

        self._layers = []
        for number in range(given.layers):
            made = kvindex.create(INDEX, **geometry, **placed(self._device, INDEX))  # type: ignore[arg-type]  # of strings and more
            turn = number / given.layers
            layer = AttentionLayer(made, update_phase=turn, dense_below=0, graphs=graphs)
            keys, values = new(1, G, given.context, D), new(1, G, given.context, D)
            first = given.context - LOCAL
            made.append(keys[:, :, :first], values[:, :, :first])  # nobody attends from these
            layer.step(new(1, H, LOCAL, D), keys[:, :, first:], values[:, :, first:])
            self._layers.append(layer)
        self._queries = new(64, given.layers, 1, H, 1, D)
        self._rows = new(2, 64, given.layers, 1, G, 1, D)

    def step(self) -> list[Tensor]:
        """A token of every layer; what each gives."""
        queries, (keys, values) = self._queries[self._token % 64], self._rows[:, self._token % 64]
        self._token += 1
        return [
            layer.step(*token)
            for layer, *token in zip(self._layers, queries, keys, values, strict=True)
        ]

    def turn(self, steps: int) -> Figures:
        """Microseconds per layer of each step: of the host, and until the device is done."""
        found: Figures = {"host_us": [], "done_us": []}
        each = 1e6 / len(self._layers)
        for _ in range(steps):
            self._wait()
            start = time.perf_counter()
            self.step()
            found["host_us"].append(each * (time.perf_counter() - start))
            self._wait()
            found["done_us"].append(each * (time.perf_counter() - start))
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measured_layers(given: argparse.Namespace, clock: float) -> Iterator[dict[str, Any]]:
    """Both plans, after each round. Raises SystemExit where they do not give the same."""
    turn, rounds = given.turn, given.steps // given.turn
    about = {"layers": given.layers, "context": given.context, "checked": CHECKED, "turn": turn}
    with counted(torch.device(given.device).type) as counts:
        plans = {"eager": Layers(given, graphs=False), "graphs": Layers(given, graphs=True)}
        for step in range(CHECKED):
            mine, theirs = (plan.step() for plan in plans.values())
            if not all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True)):
                raise SystemExit(
                    f"layers: step {step} is not the same with graphs; nothing is timed"
                )
        turns = {name: partial(plan.turn, turn) for name, plan in plans.items()}
        for found in in_turns(turns, rounds, turn * given.layers, clock, counts):
            yield about | found


# A model


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

    ids: int64 `[1, N + written]`; indexed: layers with an index.
    """

    def __init__(self, model: Any, plan: str, ids: Tensor, until: ExitStack) -> None:
        self._model, self.ids = copy.deepcopy(model), ids[None].to(model.device)
        self._cache: Any = DynamicCache(config=model.config)
        if plan != "dense":
            attached = attach(self._model, index=INDEX, graphs=plan == "graphs")
            self._cache = until.enter_context(attached)
        self.indexed = 0 if plan == "dense" else len(self._cache.indexed)
        stop = max(len(ids) - CHUNK, 0)
        prefill(self._model, self.ids[0], self._cache, stop=stop, chunk=CHUNK)

    def turn(self, count: int) -> Figures:
        """Milliseconds per token of `count` more, in all and of each that follows another."""
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
        singles = [after - before for before, after in pairwise(at)]
        return {"token_ms": [statistics.mean(singles)], "single_ms": singles}


def measured_model(given: argparse.Namespace, clock: float) -> Iterator[dict[str, Any]]:
    """Every plan, after each round. Raises ValueError for a text that is too short."""
    folder, file = smollm2() if given.model is None else (given.model, given.gguf_file)
    dtype = getattr(torch, given.dtype)
    model, tokenizer = load(
        folder, gguf_file=file, lora=given.lora, dtype=dtype, device=given.device
    )
    ids = torch.tensor(tokenizer(given.text.read_text())["input_ids"])[: given.tokens]
    if len(ids) < given.tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed are at least {given.tokens}")
    turn, rounds = given.turn, given.written // given.turn
    about: dict[str, Any] = {"tokens": given.tokens, "turn": turn, "warm": WARM}
    with counted(torch.device(given.device).type) as counts, ExitStack() as until:
        writers = {}
        for plan in PLANS:
            if time.monotonic() > clock:
                yield about | {"rounds": 0, "left_out": rounds, "written": 0}
                return
            writers[plan] = Writer(model, plan, ids, until)
            writers[plan].turn(WARM)
        gc.collect()  # what is let go of may unpin memory
        turns = {plan: partial(writer.turn, turn) for plan, writer in writers.items()}
        for found in in_turns(turns, rounds, turn * writers["graphs"].indexed, clock, counts):
            same = torch.equal(writers["eager"].ids, writers["graphs"].ids)
            yield about | found | {"written": turn * found["rounds"], "same_text": same}


def main() -> None:
    """Check, measure, print and write, after each round what there is."""
    given, console = arguments(), Console(width=120)
    clock = time.monotonic() + given.seconds
    result: dict[str, Any] = {"index": INDEX, "dtype": given.dtype, **described(given)}
    parts = {"layers": measured_layers, "model_run": measured_model}
    with torch.no_grad():
        for part, measured in parts.items():
            for result[part] in measured(given, clock):
                write(result, given.json)
            console.print({part: result[part]})
            gc.collect()  # its memory is unpinned now, not in what comes next


if __name__ == "__main__":
    main()
