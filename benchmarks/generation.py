"""Measure the time per generated token of a whole model, with an index and with full attention.

Each command compares several ways to generate tokens, which are called plans. In each round, every
plan generates a few tokens (`--turn`), so that a slow moment of the host affects all plans. Results
are medians with quartiles (`_low`, `_high`) and the values of each round (`_rounds`). `ratio` is
the time of a plan divided by the time of another plan in the same round. No measurement begins
while a background thread pins memory. No round begins after `--seconds` seconds. `left_out` is the
number of rounds that were therefore not run.

    python -m benchmarks.generation --text FILE [--tokens N] [--written T] [--turn T] [--layers L]
        [--context N] [--steps S] [--seconds S] [--index SPEC] [--model … --gguf-file … --lora …]
        [--dtype …] [--device …] [--without-graphs] --json OUT
    python -m benchmarks.generation --decoder SHAPE [--context N] [--index SPEC] [--written T]
        [--turn T] [--batch B] [--hit-rate R] [--k K] [--rows N…] [--drafts N…]
        [--verified N=K…] [--weights fp8] [--torch-products] [--device …] --json OUT
    python -m benchmarks.generation --decoder SHAPE --through transformers [--context N] …
        --json OUT
    python -m benchmarks.generation --decoder SHAPE --prefill N [--sparse SELECTOR=F…]
        [--through transformers] [--weights fp8] … --json OUT

**With --text** there are two parts:

- `layers`: L attention layers (32 query heads, 8 KV heads, D = 128) with N synthetic tokens each.
  First, results with CUDA graphs are compared with results without graphs. Nothing is timed unless
  they are equal bit by bit. Then S decode steps are timed, in which layers also move tokens into
  their index. Two times per layer are measured in microseconds: the time that the host spends, and
  the time until the device is done. The device is idle at the start of each step.
- `model_run`: the first N tokens of the text are the prompt. transformers reads the prompt and
  generates T tokens greedily, with its own cache (`dense`) and with the index, each with a copy of
  the model. Two times are measured: milliseconds per token, and the seconds of reading the prompt
  without its last chunk.

`--without-graphs` is for a CPU. It measures only `model_run`, with `dense` and with the index.

**With --decoder**, kvindex's own decoder generates tokens with random weights in the shape of a
model (`common/token.py`). Each decode step is one CUDA graph. Every layer contains N synthetic
tokens for each of B sequences. (Matrix products in Triton support at most 16 sequences.) Plans:

- `weights`: a decode step without attention.
- `dense`: full attention with torch's kernel, over keys and values in device memory. Buffers have
  exactly the length of the sequence. This plan is left out if keys and values do not fit.
- `growing`: full attention with the decoder's own kernel, in buffers that grow.
- `cached`: the index. Attention logits are multiplied by a factor. The factor is chosen so that the
  device cache contains a fraction `--hit-rate` of the retrieved keys and values, which are then not
  read from host memory.
- `uncached`: the index. The device cache is emptied before each token.
- `auto`: only with `--rows`: the index with `k="auto"`. The allowed error of each layer is chosen
  so that searches find the given mean number of rows per KV head. (In these synthetic layers, all
  KV heads of a layer need about as many rows. `rows` contains the numbers that were found.)

Results of each plan:

- `device_ms`: time per token on the device.
- `token_ms`: time between two tokens as the host receives them, as a mean over each round.
- `between_ms`: the single times between two tokens as the host receives them.
- `tokens_per_s`: number of tokens per second, of all sequences together.
- `cached+N`, `weights+N`: only with `--drafts`: steps of one token and `N` drafted ones of each
  sequence, of which half are accepted. `token_ms` is the time of a step for the host, which reads
  the results and counts the accepted tokens. In a batch, sequences keep different numbers of
  tokens, as they do with real drafts: every second one accepts one draft less, and the next one
  accepts one more. So do those of `verified+N`.
- `verified+N`: only with `--verified N=K`: rounds in which the index writes `N` drafts and full
  attention verifies them (`verify="full"`). K tokens of a round stay. `token_ms` is the time of a
  round divided by K. With N = 0, full attention computes one token at a time, over the rows of the
  index.
- `ratio`: ratio to the time of `dense`, or of `weights` if `dense` does not fit. With `--rows` or
  `--drafts`, it is the ratio to the time of `cached`, which retrieves `--k` rows.

`floor_ms` is the time to read the weights from memory. A time per token below it is not possible,
and ends the run with an error. Before anything is timed, a model of two layers must generate the
same tokens with CUDA graphs and without.

**With --through transformers**, two models with the same random weights generate sampled tokens: a
transformers model, and kvindex's decoder (the plan `decoder`). Each has an index of N tokens per
layer. `ratio` is the ratio to the time of the decoder. Plans of transformers:

- `fused`: one CUDA graph per token with the decoder's kernels, on a GPU with Triton.
- `token_graph`: one CUDA graph per token, of the model's own forward pass.
- `layer_graphs`: one CUDA graph for the decode step of each layer.

**With --prefill N**, the decoder reads a prompt of N random tokens, and computes the logits of the
last token. It reads the prompt with an index (`indexed`), and with full attention (`full`) if all
keys and values fit. Results are the seconds of the `first` reading and of later readings, and the
peak device memory (`peak_bytes`). `memory` is the peak divided by the memory that is at least
needed: for the weights, the keys and values of one layer, and the activations of a chunk. `floor`
is the time of the matrix products and of attention alone (`common.prompt.floor`), and `ratio` the
ratio to it. `--sparse SELECTOR=F` also reads the prompt with sparse attention (plan `SELECTOR=F`).
Random weights have no sparsity, so random blocks replace those that the selector chooses, a
fraction F of all blocks. With `--through transformers`, a transformers model with the same weights
reads the prompt, too: with the index (plan `transformers`) and without kvindex, in one call (plan
`stock`). Ratios are those to the decoder with the index.
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
from kvindex.layer.arguments import AUTO_ROWS, DEFAULT_K
from kvindex.pariskv.row_budget import LEAST
from kvindex_adapters.decoder.quantized import PLAIN, WEIGHTS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generate import ONE_ANSWER
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.model.cache_argument import CACHE

OF_DECODER = {"decoder": decoder, "transformers": attached, "prefill": prompt}
"""Part of the results -> module that makes and prints the measurements of this part."""

SHAPE = dict(q_heads=H, kv_heads=G, head_dim=D)
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Number of decode steps whose results with and without CUDA graphs are compared."""

WARM, CHUNK = 16, 1024
"""`WARM`: number of tokens that a model generates before the timed tokens.

`CHUNK`: number of tokens of the prompt that the model reads in one forward pass.
"""


def drafts_and_kept(text: str) -> tuple[int, int]:
    """Parse `N=K`, a number of drafts and how many tokens of a round stay."""
    drafts, _, kept = text.partition("=")
    if not (drafts.isdecimal() and kept.isdecimal() and 1 <= int(kept) <= int(drafts) + 1):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is N=K with 1 <= K <= N + 1")
    return int(drafts), int(kept)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--text", type=Path, help="Text file whose first tokens are the prompt of a real model"
    )
    parser.add_argument(
        "--decoder",
        choices=SHAPES,
        help="Measure kvindex's own decoder with random weights in the shape of this model",
    )
    parser.add_argument(
        "--through",
        choices=("transformers",),
        help="In addition to the decoder, measure a transformers model with the same weights",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="N",
        help="Measure time and memory while the decoder reads a prompt of N tokens",
    )
    parser.add_argument(
        "--sparse",
        nargs="+",
        metavar="SELECTOR=F",
        help="With --prefill, also read the prompt with sparse attention: name of the selector, "
        "and fraction of the blocks of keys that attention reads (pooled=0.2)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        help="Batch size: number of sequences that the decoder extends in each decode step",
    )
    parser.add_argument(
        "--torch-products",
        action="store_true",
        help="Compute the decoder's matrix products with torch instead of Triton",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=PLAIN,
        help="Data type of the weights of kvindex's decoder: plain (the one of --dtype) or fp8",
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        default=0.93,
        help="Fraction of the retrieved keys and values that are already in the cache in GPU "
        "memory (the benchmark simulates this rate)",
    )
    parser.add_argument(
        "--k", type=int, default=DEFAULT_K, help="With --decoder, tokens that a search retrieves"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        metavar="N",
        help='With --decoder, also measure k="auto". N is the mean number of tokens that a search '
        "retrieves per KV head. Several numbers are those of successive layers, in turn",
    )
    parser.add_argument(
        "--drafts",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="With --decoder, also measure steps of one token and N drafted ones",
    )
    parser.add_argument(
        "--verified",
        nargs="+",
        type=drafts_and_kept,
        default=[],
        metavar="N=K",
        help="With --decoder, also measure rounds in which the index writes N drafts, full "
        "attention verifies them, and K tokens stay",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=7000,
        help="Length of the prompt (the beginning of --text) in tokens",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=160,
        help="Number of tokens to generate with each variant that is compared",
    )
    parser.add_argument(
        "--turn",
        type=int,
        default=20,
        help="Number of tokens that a variant generates before the next variant takes its turn",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=16,
        help="Number of attention layers to time without a model (ignored with --decoder)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=32_768,
        help="Number of synthetic tokens that each layer contains",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="Number of timed decode steps of the layers that --layers sets (only without "
        "--decoder)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="Start no new round of measurements after this time, in seconds",
    )
    parser.add_argument(
        "--index", default="pariskv", help="Name and options of the index, as in kvindex.create"
    )
    parser.add_argument(
        "--without-graphs",
        action="store_true",
        help="Measure only the generation of tokens by the whole model, not the time of single "
        "attention layers (--layers). Needed on a CPU, which has no CUDA graphs",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help="Data type in which the model computes",
    )
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
    if part and not found.decoder:
        parser.error("through, prefill: got one without --decoder; pass --decoder as well")
    if found.batch > 1 and (part or not found.decoder):
        parser.error(
            f"batch: got {found.batch}, but several sequences need --decoder without --through "
            "and --prefill; pass --batch 1"
        )
    if found.rows and (part or not found.decoder):
        parser.error(
            f"rows: got {found.rows}, allowed with --decoder, without --through and --prefill"
        )
    if found.drafts and (part or not found.decoder or min(found.drafts) < 1):
        parser.error(
            f"drafts: got {found.drafts}, allowed are numbers from 1 on with --decoder, without "
            "--through and --prefill"
        )
    if found.verified and (part or not found.decoder):
        parser.error(
            f"verified: got {found.verified}, allowed with --decoder, without --through and "
            "--prefill"
        )
    if found.rows and not all(LEAST <= rows <= AUTO_ROWS for rows in found.rows):
        parser.error(f"rows: got {found.rows}, allowed are {LEAST} to {AUTO_ROWS}")
    if found.through and found.weights != PLAIN:
        parser.error(
            f"weights: got {found.weights} with --through transformers, allowed is {PLAIN}"
        )
    if not found.decoder and (found.text is None or not found.text.is_file()):
        parser.error(f"text: got {found.text}, allowed is a file that exists")
    return found


def turn(decoding: Decoding, steps: int) -> Figures:
    """Measure decode steps of attention layers.

    Return two durations for each step, in microseconds per layer. `host_us` is the time until the
    host has launched the step. `done_us` is the time until the device has finished the step.
    """
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
    """Time decode steps of attention layers with CUDA graphs and without.

    Yield the results after each round. Raise SystemExit if graphs change an attention output.
    """
    about = {"layers": given.layers, "context": given.context, "turn": given.turn}
    g = Geometry.of(**SHAPE, dtype=getattr(torch, given.dtype), device=given.device)
    of = g, given.index, given.context, given.layers
    plans = {name: Decoding(*of, graphs=name == "graphs") for name in ("eager", "graphs")}
    for step in range(CHECKED):
        mine, theirs = (plan.step() for plan in plans.values())
        if not all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True)):
            raise SystemExit(
                f"layers: decode step {step} gives other outputs with CUDA graphs than without; "
                "nothing is timed"
            )
    turns = {name: partial(turn, plan, given.turn) for name, plan in plans.items()}
    for found in in_turns(turns, given.steps // given.turn, end):
        yield about | found


class Writer:
    """A transformers model that reads a prompt and then generates tokens.

    With the plan "dense", it uses full attention. With "graphs", it uses the index, and one CUDA
    graph for each layer. With "eager", it uses the index without graphs. `until` is a stack of
    contexts (`ExitStack`); when it is closed, the `attach` context of the model ends. The attribute
    `ids` contains the token ids of the prompt and of the generated tokens, int64
    `[1, N + written]`.
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
        """Generate `count` tokens, and return the milliseconds between tokens."""
        drained()
        marks, options = Marks(), dict(max_new_tokens=count, min_new_tokens=count)
        self.ids = self._model.generate(
            input_ids=self.ids,
            attention_mask=torch.ones_like(self.ids),
            **{CACHE: self._cache},
            streamer=marks,
            do_sample=False,
            **options,
            **ONE_ANSWER,
        )
        return marks.figures()


def measured_model(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Time the tokens that a real model generates, with full attention and with the index.

    Yield the results after each round.

    Raises:
        ValueError: The text has fewer than `--tokens` tokens.
    """
    model, tokenizer = loaded(given, dtype=getattr(torch, given.dtype))
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"])[
        : given.tokens
    ]
    if len(ids) < given.tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed is at least {given.tokens}")
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
    """Run the command line: check results, then measure. Results are written after each round."""
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
        name = "prefill" if given.prefill else given.through or "decoder"
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
