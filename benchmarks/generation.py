"""Time per generated token of a model, beside dense attention, with CUDA graphs and without.

    python -m benchmarks.generation --text FILE [--tokens N] [--written T] [--turn T] [--layers L]
        [--context N] [--steps S] [--seconds S] [--index SPEC] [--model … --gguf-file … --lora …]
        [--dtype …] [--device …] [--without-graphs] --json OUT
    python -m benchmarks.generation --decoder SHAPE [--context N] [--index SPEC] [--written T]
        [--turn T] [--batch B] [--hit-rate R] [--weights fp8] [--torch-products] [--device …]
        --json OUT
    python -m benchmarks.generation --decoder SHAPE --through transformers [--context N] …
        --json OUT
    python -m benchmarks.generation --decoder SHAPE --prefill N [--weights fp8] … --json OUT

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

`--decoder`: tokens of the minimal decoder, each one CUDA graph, with random weights of a model's
shape (`common/token.py`), every layer over N synthetic tokens of each of B sequences (Triton's
products take 16 at most, torch's more): without attention (`weights`), with full attention over all
of them in device memory (where it fits; `dense`: torch's kernel over just so many rows; `growing`:
the decoder's own, which the device tells how many there are), and through the index, where
attention is so sharp that `--hit-rate` of the rows wanted from the host lie in the cache of rows
(`cached`), and where that is emptied before each token (`uncached`). Inputs are new each time;
`tokens_per_s` is of all sequences together. Milliseconds of the device (`device_ms`), and as the
host reads tokens (`token_ms`: the mean of a turn, from a device without work to the turn's last
token, `between_ms`: of single ones), updates of the windows among them; `ratio`: to `dense`, or to
`weights`; `floor_ms`: the weights' bytes at the rate at which a sum reads memory. A round of which
a figure is below the floor ends the run with an error, and is not written.
Before that the tokens of two layers by graphs must be those by steps; else nothing is timed.

`--through transformers` (key `transformers`): a model of transformers of that shape, with random
weights, writes tokens drawn at random through `attach`, whole tokens as graphs of the decoder's
kernels (`fused`, on a GPU with Triton) or of the model's own forward (`token_graph`), or a graph
for each layer's step (`layer_graphs`), beside the `decoder` with the same weights, which `ratio` is
to; both hold N tokens a layer, in indexes of their own. `token_ms` and `floor_ms` alone, from the
first token of a turn on.

`--prefill N` (key `prefill`): the decoder reads N random tokens layer by layer, into an index
(`indexed`) and without one (`full`, where all rows fit), the last token's logits alone: seconds of
the `first` reading and of warm ones, the device's memory at most (`peak_bytes`), and that over the
bytes of the weights, one layer's keys and values, and a chunk's activations (`memory`).
Each part is a run, and a file, of its own.

Figures are medians with quartiles (`_low`, `_high`) and each round's (`_rounds`); `ratio`: of a
plan's time to that with graphs in the same round, unless said. No turn begins before all memory
that is pinned ahead is pinned, no round after `--seconds`; `left_out` says how many were not begun.
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

from benchmarks.common import attached, decoder, prompt
from benchmarks.common.attached import Marks
from benchmarks.common.decoding import LOCAL, Decoding
from benchmarks.common.reading import add_model, described, loaded, write
from benchmarks.common.shapes import SHAPES
from benchmarks.common.timing import Figures, drained, in_turns
from benchmarks.common.workload import D, G, H
from kvindex.core.geometry import Geometry
from kvindex_adapters.decoder.quantized import PLAIN, WEIGHTS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.generation.prefill import prefill

OF_DECODER = {"decoder": decoder, "transformers": attached, "prefill": prompt}
"""What is measured and shown of a decoder, by part."""

SHAPE = dict(q_heads=H, kv_heads=G, head_dim=D)
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Steps whose results are compared."""

WARM, CHUNK = 16, 1024
"""Tokens that a model writes before any is timed; of the prompt, read at a time."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--decoder", choices=SHAPES, help="shape of its random weights")
    parser.add_argument("--through", choices=("transformers",), help="beside the decoder")
    parser.add_argument("--prefill", type=int, metavar="N", help="tokens that the decoder reads")
    parser.add_argument("--batch", type=int, default=1, help="sequences of the decoder")
    parser.add_argument("--torch-products", action="store_true", help="of the decoder: no Triton")
    parser.add_argument("--weights", choices=WEIGHTS, default=PLAIN, help="of the decoder")
    parser.add_argument("--hit-rate", type=float, default=0.93, help="of the decoder's rows")
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
    least = dict(batch=1, tokens=1, turn=2, layers=1, context=LOCAL + 256)
    least |= dict(written=found.turn, steps=found.turn)
    least |= dict(turn=8) if found.decoder else {}
    least |= {} if found.prefill is None else dict(prefill=2)
    for name, low in least.items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    part = found.through or found.prefill
    if (part and not found.decoder) or (found.through and found.prefill):
        parser.error("through, prefill: got one without --decoder or both, allowed is one with it")
    if found.batch > 1 and (part or not found.decoder):
        parser.error(f"batch: got {found.batch}, allowed is 1 but for --decoder's own tokens")
    if found.through and found.weights != PLAIN:
        parser.error(f"weights: got {found.weights}, allowed is {PLAIN} through transformers")
    if not found.decoder and (found.text is None or not found.text.is_file()):
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


class Writer:
    """A model that has read a prompt, ids int64 `[N]`, and writes on by a plan until `until`.

    ids: int64 `[1, N + written]`.
    """

    def __init__(self, model: Any, plan: str, ids: Tensor, index: str, until: ExitStack) -> None:
        self._model, self.ids = copy.deepcopy(model), ids[None].to(model.device)
        self._cache: Any = DynamicCache(config=model.config)
        if plan != "dense":
            graphs = plan == "graphs"  # of layers
            attached = attach(self._model, index=index, graphs=graphs, token_graph=False)
            self._cache = until.enter_context(attached)
        stop, start = max(len(ids) - CHUNK, 0), time.perf_counter()
        prefill(self._model, self.ids[0], self._cache, stop=stop, chunk=CHUNK)
        self.prefill_s = time.perf_counter() - start

    def turn(self, count: int) -> Figures:
        """Milliseconds per token of `count` more, from the first to the last."""
        drained()
        marks, options = Marks(), dict(max_new_tokens=count, min_new_tokens=count)
        self.ids = self._model.generate(
            input_ids=self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self._cache,
            streamer=marks,
            do_sample=False,
            **options,
            **ONE_ANSWER,
        )
        return marks.figures()


def measured_model(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Every plan, after each round. Raises ValueError for a text that is too short."""
    model, tokenizer = loaded(given, dtype=getattr(torch, given.dtype))
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])[
        : given.tokens
    ]
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
    result: dict[str, Any] = {"index": given.index, "dtype": given.dtype}
    if given.decoder:
        result |= {"model": given.decoder, "machine": describe(given.device)}
    else:
        result |= described(given)
    parts = {"layers": measured_layers, "model_run": measured_model}
    if given.without_graphs:
        del parts["layers"]
    if given.decoder:
        name = given.through or ("prefill" if given.prefill else "decoder")
        parts = {name: OF_DECODER[name].measured}
    with torch.no_grad():
        for part, measured in parts.items():
            for result[part] in measured(given, end):
                write(result, given.json)
            lines: Any = [{part: result[part]}]
            if given.decoder:
                lines = OF_DECODER[part].shown(result[part])
            print(*lines, sep="\n", flush=True)
            gc.collect()  # its memory is unpinned now, not in what comes next


if __name__ == "__main__":
    main()
