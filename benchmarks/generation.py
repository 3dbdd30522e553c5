"""Measure the time per generated token, with an index and with full attention.

    python -m benchmarks.generation --text FILE [--tokens N] [--written T] [--turn T] [--layers L]
        [--context N] [--steps S] [--seconds S] [--index SPEC] [--model … --gguf-file … --lora …]
        [--dtype …] [--device …] [--without-graphs] --json OUT
    python -m benchmarks.generation --decoder SHAPE [--context N] [--index SPEC] [--written T]
        [--turn T] [--batch B] [--hit-rate R] [--weights fp8] [--torch-products] [--device …]
        --json OUT
    python -m benchmarks.generation --decoder SHAPE --through transformers [--context N] …
        --json OUT
    python -m benchmarks.generation --decoder SHAPE --prefill N [--weights fp8] … --json OUT

Each command compares several plans (ways to generate). Plans take turns, a few tokens at a time
(`--turn`), round after round, so that a slow moment of the host affects all of them. Figures are
medians with quartiles (`_low`, `_high`) and the values of each round (`_rounds`). `ratio` compares
a plan's time with another plan's time in the same round. No turn begins while a background thread
pins memory. No round begins after `--seconds`; `left_out` is the number of rounds that were
therefore not run.

**With --text** there are two parts:

- `layers`: L attention layers (32 query heads, 8 KV heads, D = 128) over N synthetic tokens each.
  First, results with CUDA graphs must equal results without graphs to the bit; else nothing is
  timed. Then S steps are timed, including updates of the windows. One figure is the microseconds
  that the host spends on a layer, with an idle device at the start of each step. The other figure
  is the microseconds until the device is done.
- `model_run`: the first N tokens of the text are a prompt. transformers reads it and generates T
  tokens greedily, with its own cache (`dense`) and with the index, each with a copy of the model.
  Figures are milliseconds per token of a turn, and the seconds that the prompt took without its
  last chunk.

`--without-graphs` is for a CPU. It measures only `model_run`, with `dense` and with the index.

**With --decoder**, the minimal decoder generates tokens with random weights in a model's shape
(`common/token.py`). Each decode step is one CUDA graph. Every layer has N synthetic tokens of each
of B sequences (at most 16 with Triton's matrix products). Plans:

- `weights`: no attention.
- `dense`: full attention over all rows in device memory, if they fit, with torch's kernel over
  buffers of exactly this length.
- `growing`: the same with the decoder's own kernel over buffers that grow.
- `cached`: the index. The sharpness of attention is set so that the device cache contains a
  fraction `--hit-rate` of the rows that steps read from the host.
- `uncached`: the index, with this cache emptied before each token.

`device_ms` is the milliseconds per token of the device. The host measures milliseconds between two
tokens as it reads them: `token_ms` is the mean of a turn, and `between_ms` has single intervals.
`tokens_per_s` counts all sequences. `ratio` is the ratio to `dense`, or to `weights` if `dense`
does not fit. `floor_ms` is the time to read the bytes of the weights as fast as a sum reads memory;
a figure below it ends the run with an error. Before timing, a model of two layers must generate the
same tokens with graphs and without.

**With --through transformers**, a transformers model of that shape and the decoder with the same
weights generate sampled tokens, each with an index of N tokens per layer. Plans of transformers:
`fused` (one graph per token with the decoder's kernels, on a GPU with Triton), `token_graph` (one
graph per token of the model's own forward pass) and `layer_graphs` (one graph per layer). `ratio`
is the ratio to the plan `decoder`.

**With --prefill N**, the decoder reads N random tokens layer by layer, into an index (`indexed`)
and without an index (`full`, if all rows fit), and computes the logits of the last token. Figures
are the seconds of the `first` reading and of later readings, and the device's peak memory
(`peak_bytes`). `memory` is the ratio of the peak to the sum of the weights, one layer's keys and
values, and a chunk's activations.
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
"""Part of the result -> module that measures the decoder and prints the results."""

SHAPE = dict(q_heads=H, kv_heads=G, head_dim=D)
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Number of steps whose results are compared."""

WARM, CHUNK = 16, 1024
"""Number of tokens that a model generates before any is timed, and of tokens in a chunk of the
prompt."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with an error message if it cannot be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument(
        "--decoder", choices=SHAPES, help="measure the decoder with random weights in this shape"
    )
    parser.add_argument(
        "--through",
        choices=("transformers",),
        help="measure transformers with the same weights, too",
    )
    parser.add_argument(
        "--prefill", type=int, metavar="N", help="measure how the decoder reads N tokens"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences that the decoder generates")
    parser.add_argument(
        "--torch-products",
        action="store_true",
        help="compute the decoder's products in torch, not Triton",
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default=PLAIN, help="how the decoder stores its weights"
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        default=0.93,
        help="fraction of the decoder's rows that are in the cache of rows",
    )
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of the prompt")
    parser.add_argument("--written", type=int, default=160, help="tokens that are timed")
    parser.add_argument(
        "--turn", type=int, default=20, help="tokens of a plan before the next plan's turn"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=32_768, help="tokens in each layer")
    parser.add_argument("--steps", type=int, default=300, help="steps of the layers that are timed")
    parser.add_argument("--seconds", type=float, default=600, help="begin no round after this time")
    parser.add_argument("--index", default="pariskv")
    parser.add_argument(
        "--without-graphs", action="store_true", help="measure only the model, on a CPU"
    )
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
    """Run steps. Return microseconds per layer: of the host, and until the device is done."""
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
    """Yield both plans' times after each round. Raises SystemExit if their results differ."""
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
    """A model that has read a prompt, ids int64 `[N]`, and generates tokens as a plan does.

    `ids` are int64 `[1, N + written]`. The model is detached when `until` closes.
    """

    def __init__(self, model: Any, plan: str, ids: Tensor, index: str, until: ExitStack) -> None:
        self._model, self.ids = copy.deepcopy(model), ids[None].to(model.device)
        self._cache: Any = DynamicCache(config=model.config)
        if plan != "dense":
            graphs = plan == "graphs"  # one graph for each layer's step
            attached = attach(self._model, index=index, graphs=graphs, token_graph=False)
            self._cache = until.enter_context(attached)
        stop, start = max(len(ids) - CHUNK, 0), time.perf_counter()
        prefill(self._model, self.ids[0], self._cache, stop=stop, chunk=CHUNK)
        self.prefill_s = time.perf_counter() - start

    def turn(self, count: int) -> Figures:
        """Generate `count` tokens. Return milliseconds per token, from the first to the last."""
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
    """Yield all plans' times after each round. Raises ValueError for a text that is too short."""
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
        gc.collect()  # freed objects may unpin memory
        turns = {plan: partial(writer.turn, given.turn) for plan, writer in writers.items()}
        for found in in_turns(turns, given.written // given.turn, end):
            same = torch.equal(writers[plans[-2]].ids, writers["graphs"].ids)
            yield about | found | {"written": given.turn * found["rounds"], "same_text": same}


def main() -> None:
    """Check and measure. Print and write the results after each round."""
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
            gc.collect()  # unpin memory now, not during the next measurement


if __name__ == "__main__":
    main()
