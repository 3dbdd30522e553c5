"""Measure the time per token and the throughput of vLLM, with kvindex's plug-in and without.

The benchmark needs a GPU, and vLLM 0.26 or newer. It compares vLLM engines with the same random
weights in the shape of a model. Each runs in a process of its own:

- `stock` uses the attention that vLLM selects.
- `stock-fp8` does so too, with keys and values in FP8 (`kv_cache_dtype="fp8"`).
- `kvindex` uses the plug-in.
- `kvindex-fp8` does so too, with keys and values in FP8.
- `kvindex-sparse` uses the plug-in, and reads prompts with sparse attention (`prefill="sparse"`).

The last two are measured only if `--plans` names them.

    python -m benchmarks.serving [--shape SHAPE] [--layers L]
        [--context N --batch B … | --cases NxB …] [--shared]
        [--index SPEC] [--k K] [--rows WHERE] [--dense-below TOKENS] [--[no-]dense-graphs]
        [--prefill-selector NAME] [--prefill-mass F]
        [--written T] [--rounds R] [--stock-block TOKENS] [--plain] [--gpus N]
        [--arrivals PER_S --requests N] [--without-check] [--plans PLAN …]
        [--resume FILE] [--seconds S] --json OUT

**Check.** First, each engine generates tokens greedily with a model that has only four layers. The
plug-in retrieves all tokens (k is as large as the sequence). The engines must generate the same
tokens, for single sequences and for a batch. They may differ only where the log probabilities of
the two best tokens are so close that rounding decides. If there is another difference, nothing is
timed. `kvindex-sparse` is not checked, because sparse attention changes the tokens.

**Batches.** Each engine reads B sequences of N random tokens, and then generates T tokens for each
sequence. It does so R times, and later rounds find the prompts in the prefix cache. With
`--shared`, the sequences have all tokens in common except the last 256, so that they share pages of
the KV cache and fit on a smaller GPU. Results:

- `token_ms`: time between two tokens of the batch as the host receives them. It is a median with
  quartiles, and the values of each round.
- `ratio`: `token_ms` of an engine divided by that of `stock`.
- `prefill_s`: time in seconds to read all sequences one after another.

**--arrivals.** Instead of batches, requests arrive at random times. The times are the same for all
engines. At most `--batch` requests run at a time. Results:

- `first_ms` and `between_ms`: time in milliseconds from the arrival of a request to its first
  token, and between two tokens of a request. Both are medians. `first_ms_99` and `between_ms_99`
  are 99th percentiles.
- `seconds`: time in seconds from the first arrival until the last request has ended.
- `requests_per_s` and `tokens_per_s`: throughput, the number of requests and of generated tokens
  divided by `seconds`.
- `throughput_ratio`: `requests_per_s` of an engine divided by that of `stock`.

Before the first arrival, each engine generates tokens for `--batch` other prompts, so that no
kernel is compiled while requests run. The prompts of the requests have no tokens in common (without
`--shared`), so none is found in the prefix cache. All answers have `--written` tokens.

**--arrivals inf** measures the largest throughput: all requests arrive at the beginning. If
requests arrive more slowly than an engine could process them, its throughput is only their rate. If
they arrive faster, its queue of waiting requests grows. Here the queue is never empty while the
engine has room for another request. So the throughput is the rate of arrivals at which the queue of
this engine just holds its length. Let `--requests` be a multiple of `--batch`, because vLLM reads
the prompts of a batch one after another, and then generates most of their tokens together.

This command compares three engines with the whole model, as in `throughput_128k.json`:

    python -m benchmarks.serving --context 131072 --batch 4 --arrivals inf --requests 4
        --written 1024 --k 256 --plans stock kvindex kvindex-sparse --without-check
        --resume THROUGHPUT --json OUT

With `--layers 9`, it takes about a quarter of the time. Nearly all times are proportional to the
number of layers. The output head, and vLLM's work on the host, are not. So with fewer layers,
ratios are closer to 1.

**--prefill-mass.** Random weights do not concentrate their attention on few blocks. So
`kvindex-sparse` reads about the fraction `--prefill-mass` of the blocks, which is nearly all with
the plug-in's default of 0.95. The default of this benchmark is 0.21. This is an estimate of the
fraction of blocks that the plug-in's default reads in real texts of 131,072 tokens
(`docs/prompts.md`).

**--resume.** To start an engine takes about a minute. With this option, each result is written to a
file as soon as it is measured. If the benchmark ends early, because an engine fails or after
`--seconds`, the same command measures what is missing, on the same kind of GPU and with the same
versions of torch and vLLM. Use another file after a change of kvindex. Without the option, all
results are lost.

`--cases 131072x1 131072x4 32768x16` measures several lengths with one start of each engine.

`--rows host` stores keys and values in pinned host memory, with a device cache for 2,048 tokens of
each sequence. The engine then gets as many pages as the sequences need. `--plain` lets the engines
start faster: it turns off torch.compile, and captures CUDA graphs only for decode steps. `--gpus 2`
divides each engine's model among two GPUs of this machine (tensor parallelism).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.resumed import Results
from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.common.timing import spread
from kvindex.layer.arguments import DEFAULT_K
from kvindex.layer.sparse import SELECTORS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json

PLANS = "stock", "stock-fp8", "kvindex", "kvindex-fp8", "kvindex-sparse"
"""Names of the engines that can be compared."""

USUAL_PLANS = PLANS[:3]
"""Engines that are measured by default."""

CHECKED_PLANS = {"kvindex": "stock", "kvindex-fp8": "stock-fp8"}
"""Engine with the plug-in -> the engine that must generate the same tokens."""

BLOCK, TAIL = 256, 256
"""`BLOCK`: number of tokens in a page of the KV cache with the plug-in. `TAIL`: number of tokens at
the end of a prompt that differ between sequences with `--shared`."""

CHECKED, CHECK_LAYERS, CHECK_TOKENS = (700, 20, 1500, 3000), 4, 24
"""Sizes in the check: lengths of the prompts in tokens, number of layers, and number of generated
tokens."""

WARM_UP, WARM_UP_TOKENS = 16_384, 64
"""`WARM_UP`: number of tokens of the shorter prompts before requests arrive, two steps of vLLM.
`WARM_UP_TOKENS`: number of tokens that are generated for each of these prompts."""

CLOSE = {"kvindex": 0.1, "kvindex-fp8": 0.4}
"""Difference between the log probabilities of the two best tokens, by the engine with the plug-in.
If it is not larger, rounding may decide which of them is generated. With FP8, FlashAttention also
rounds queries, which the plug-in does not."""


class Case(NamedTuple):
    """A batch to measure with.

    Args:
        context: Number of tokens of each prompt.
        batch: Number of sequences.
    """

    context: int
    batch: int

    @staticmethod
    def of(text: str) -> Case:
        """Convert a case from its text, for example "32768x4"."""
        context, batch = text.split("x")
        return Case(int(context), int(batch))

    def __str__(self) -> str:
        return f"{self.context}x{self.batch}"


def tokens_or_auto(text: str) -> int | str:
    """Convert the option `--dense-below` from its text."""
    return text if text == "auto" else int(text)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="qwen3-8b",
        help="Name of a model. The benchmark uses its shape with random weights.",
    )
    parser.add_argument(
        "--layers", type=int, help="Number of layers (default: as many as the model has)"
    )
    parser.add_argument(
        "--context", type=int, default=131_072, help="Number of tokens of each prompt"
    )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1],
        help="Batch sizes to measure with: numbers of sequences that generate tokens together",
    )
    parser.add_argument(
        "--cases",
        type=Case.of,
        nargs="+",
        metavar="NxB",
        help="Number of tokens of each prompt and batch size of all batches to measure with, in "
        "place of --context and --batch",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="Use prompts that are equal except for their last 256 tokens, so that they share "
        "pages of the KV cache",
    )
    parser.add_argument(
        "--index",
        default="pariskv:sign_decoder=mean",
        help="Name and options of the index, as in kvindex.create",
    )
    parser.add_argument(
        "--k", type=int, default=DEFAULT_K, help="Number of tokens that each KV head retrieves"
    )
    parser.add_argument(
        "--rows",
        choices=("device", "host"),
        default="device",
        help="Memory in which the plug-in stores keys and values",
    )
    parser.add_argument(
        "--dense-below",
        type=tokens_or_auto,
        default="auto",
        help="Length in tokens below which the plug-in uses full attention, or auto",
    )
    parser.add_argument(
        "--dense-graphs",
        action=argparse.BooleanOptionalAction,
        help="Whether vLLM captures a second CUDA graph with FlashAttention for each batch size, "
        "for batches in which a search does not pay (default: that of the plug-in)",
    )
    parser.add_argument(
        "--prefill-selector",
        choices=SELECTORS,
        default="sampled",
        help="Rule by which the engine kvindex-sparse chooses blocks of keys in prompts",
    )
    parser.add_argument(
        "--prefill-mass",
        type=float,
        default=0.21,
        help="Fraction of the attention weight that the blocks of kvindex-sparse have, in (0, 1]. "
        "With random weights, it is also about the fraction of blocks that are read",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=128,
        help="Number of tokens that are generated for each sequence in a round",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="Number of measurements of each batch size"
    )
    parser.add_argument(
        "--stock-block",
        type=int,
        help="Number of tokens in a page of the KV cache without the plug-in (default: that of "
        "vLLM)",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="Run vLLM without torch.compile, both with the plug-in and without the plug-in",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="Number of GPUs of this machine among which the model is divided (tensor parallelism)",
    )
    parser.add_argument(
        "--arrivals",
        type=float,
        help="Mean number of requests that arrive per second at random times, or inf if all arrive "
        "at the beginning. Without this option, batches are measured.",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=32,
        help="Total number of requests if --arrivals is given",
    )
    parser.add_argument(
        "--without-check",
        action="store_true",
        help="Do not check that vLLM generates the same tokens with the plug-in and without it",
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=PLANS,
        default=[*USUAL_PLANS],
        help="Engines to measure: stock (without the plug-in), kvindex (with the plug-in), the "
        "same with keys and values in FP8 (stock-fp8, kvindex-fp8), and kvindex-sparse (with the "
        "plug-in, and sparse attention in prompts)",
    )
    parser.add_argument(
        "--resume",
        type=output(".json"),
        help="JSON file to which each result is written when it is measured. A later run with the "
        "same settings measures what is missing in it",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="End after this time, even if results are missing. Needs --resume",
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--json",
        type=output(),
        required=True,
        help="JSON file to which the results are written",
    )
    found = parser.parse_args(given)
    if found.cases is None:
        found.cases = [Case(found.context, batch) for batch in found.batch]
    elif found.arrivals is not None:
        parser.error("cases: allowed is --context and --batch with --arrivals")
    found.context = max(case.context for case in found.cases)
    found.batch = [case.batch for case in found.cases]
    if found.resume is not None and found.resume == found.json:
        parser.error(f"resume: got {found.resume}, which is the file of --json, too")
    if found.seconds is not None and found.resume is None:
        parser.error("seconds: got no --resume, without which the results would be lost")
    low_context = min(case.context for case in found.cases)
    if low_context < 2 * TAIL:
        parser.error(f"context: got {low_context}, allowed is at least {2 * TAIL}")
    least = dict(k=1, written=8, rounds=1, requests=2, gpus=1)
    for name, low in least.items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    if not 0 < found.prefill_mass <= 1:
        parser.error(f"prefill_mass: got {found.prefill_mass}, allowed is more than 0, at most 1")
    if found.arrivals is not None and not found.arrivals > 0:
        parser.error(f"arrivals: got {found.arrivals}, allowed is more than 0")
    if min(found.batch) < 1:
        parser.error(f"batch: got {min(found.batch)}, allowed is at least 1")
    return found


def configuration(shape: Shape, layers: int, tokens: int) -> dict[str, Any]:
    """Return the content of config.json for a model of this shape and maximum length."""
    kind = "Qwen3" if shape.normed else "Llama"
    return dict(
        architectures=[f"{kind}ForCausalLM"],
        model_type=kind.lower(),
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_act="silu",
        max_position_embeddings=tokens,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=shape.tied,
        attention_bias=False,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
    )


def randomize(model: torch.nn.Module) -> None:
    """Set random weights that preserve the variance of activations, the same in every engine.

    If the model is divided among several GPUs, each of them has other weights.

    Rounding should rarely change which token the model generates. Therefore, in the output head,
    the weights of token 1 are those of token 0 with the opposite sign, and the weights of all other
    tokens are small. So the model generates token 0 or 1, depending on the sign of one logit, and
    rounding rarely changes this sign.
    """
    from vllm.distributed import get_tensor_model_parallel_rank as rank_of
    from vllm.distributed import get_tensor_model_parallel_world_size as size_of

    rank, size = rank_of(), size_of()
    draw = torch.Generator(next(model.parameters()).device).manual_seed(1 + rank)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            elif "embed" in name:
                weight.normal_(generator=draw)
            else:
                # the outputs of these two layers are added up over all GPUs
                parts = size if "o_proj" in name or "down_proj" in name else 1
                weight.normal_(std=(parts * weight.shape[-1]) ** -0.5, generator=draw)
            if "lm_head" in name:
                weight[1] = -weight[0]
                weight[0 if rank else 2 :] *= 2**-12  # the first GPU has tokens 0 and 1


def opened(given: argparse.Namespace, plan: str, folder: str, **options: Any) -> Any:
    """Start a vLLM engine with random weights.

    Args:
        given: The parsed command line.
        plan: One of `PLANS`.
        folder: Folder for the file config.json.
        options: `layers` (number of layers; None for as many as the model has), `tokens` (maximum
            length of a sequence), `rows` (maximum number of sequences), `pages` (pages of the KV
            cache with rows on the host), and options of the plug-in.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    layers, tokens, rows = (options.pop(name) for name in ("layers", "tokens", "rows"))
    pages = options.pop("pages")
    shape = SHAPES[given.shape]
    config = configuration(shape, layers or shape.layers, tokens)
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = sorted({1, 2, 4, rows, *(batch for batch in given.batch if batch < rows)})
    compilation: dict[str, Any] = dict(cudagraph_capture_sizes=sizes)
    if given.plain:
        compilation |= dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
    extra: dict[str, Any] = {}
    if plan.endswith("-fp8"):
        extra |= dict(kv_cache_dtype="fp8")
    if plan.startswith("kvindex"):
        if given.rows == "host":
            cached = max(4096, 1 << (2048 * rows - 1).bit_length())
            options |= dict(rows="host", cached_rows=cached)
            extra |= dict(num_gpu_blocks_override=pages + 1)
        extra |= dict(attention_backend="KVINDEX", additional_config={"kvindex": options})
    elif given.stock_block:
        extra |= dict(block_size=given.stock_block)
    if given.gpus > 1:
        extra |= dict(tensor_parallel_size=given.gpus, distributed_executor_backend="mp")
    if "disable_cascade_attn" in vars(EngineArgs):  # not in vLLM 0.33
        extra |= dict(disable_cascade_attn=True)
    made = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=tokens,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=True,
        compilation_config=compilation,
        **extra,
    )
    made.apply_model(randomize)
    return made


def text(shape: Shape, count: int, seed: int) -> list[int]:
    """Return `count` random token ids."""
    draw = torch.Generator().manual_seed(seed)
    ids: Tensor = torch.randint(3, shape.vocabulary, (count,), generator=draw)
    return ids.tolist()


def prompts(given: argparse.Namespace, case: Case) -> list[list[int]]:
    """Return the prompts of a batch as token ids."""
    (context, batch), shape = case, SHAPES[given.shape]
    # other tokens for each case, because the engine finds the beginnings of earlier prompts again
    seeds = [(context * 1000 + batch) * 1000 + row for row in range(batch)]
    if not given.shared:
        return [text(shape, context, seed) for seed in seeds]
    start = text(shape, context - TAIL, seeds[0])
    return [start + text(shape, TAIL, -seed) for seed in seeds]


def answered(engine: Any, ids: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Generate `count` tokens greedily for each prompt.

    Return the tokens of each prompt, and `gaps`: the difference in log probability between each
    token and the second best token.
    """
    from vllm import SamplingParams

    options = dict(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=2)
    given = [{"prompt_token_ids": one} for one in ids]
    found = []
    for outcome in engine.generate(given, SamplingParams(**options), use_tqdm=False):
        (answer,) = outcome.outputs
        sizes = [sorted(entry.logprob for entry in step.values()) for step in answer.logprobs]
        gaps = [size[-1] - size[-2] for size in sizes]
        found.append(dict(tokens=list(answer.token_ids), gaps=gaps))
    return found


def checked(given: argparse.Namespace, plan: str, folder: str) -> Any:
    """Let an engine generate tokens, for a check that two engines generate the same tokens.

    The tokens are generated for single sequences and for a batch. The model has few layers, and the
    index retrieves all tokens of a sequence.
    """
    tokens = max(CHECKED) + CHECK_TOKENS + BLOCK
    options = dict(index=given.index, k=tokens, dense_below=0, sink=4, local_window=16)
    sizes = dict(layers=CHECK_LAYERS, tokens=tokens, rows=len(CHECKED))
    sizes |= dict(pages=pages_of(tokens, len(CHECKED)))
    engine = opened(given, plan, folder, **options, **sizes)
    shape = SHAPES[given.shape]
    ids = [text(shape, count, seed) for seed, count in enumerate(CHECKED)]
    return [answered(engine, [one], CHECK_TOKENS)[0] for one in ids] + answered(
        engine, ids, CHECK_TOKENS
    )


def pages_of(tokens: int, batch: int) -> int:
    """Return the number of pages for `batch` sequences of `tokens` tokens, one more for each."""
    return batch * (-(-tokens // BLOCK) + 1)


def large(given: argparse.Namespace, plan: str, folder: str) -> Any:
    """Start the engine that is timed."""
    tokens = given.context + given.written + BLOCK
    sizes = dict(layers=given.layers, tokens=tokens, rows=max(given.batch))
    more = given.written + BLOCK
    sizes |= dict(pages=max(pages_of(context + more, batch) for context, batch in given.cases))
    options = dict(index=given.index, k=given.k, dense_below=given.dense_below)
    if given.dense_graphs is not None:
        options |= dict(dense_graphs=given.dense_graphs)
    if plan == "kvindex-sparse":
        how = dict(prefill_selector=given.prefill_selector, prefill_mass=given.prefill_mass)
        options |= dict(prefill="sparse", **how)
    return opened(given, plan, folder, **options, **sizes)


def timed(given: argparse.Namespace, plan: str, folder: str, results: Results) -> None:
    """Measure the milliseconds between tokens in each round, and add a result for each case that
    `results` does not have."""
    engine = large(given, plan, folder)
    for case in given.cases:
        if (name := f"time {plan} {case}") in results:
            continue
        ids, start = prompts(given, case), time.perf_counter()
        for one in ids:
            written(engine, [one], 1)
        prefill_s = time.perf_counter() - start
        rounds = [written(engine, ids, given.written) for _ in range(given.rounds)]
        found = dict(prefill_s=prefill_s, token_ms=rounds)
        results.add(name, found)
        print(name, json.dumps(figures(found)), flush=True)


def written(engine: Any, ids: list[list[int]], count: int) -> list[float]:
    """Generate tokens for a batch, and return the milliseconds between two tokens of the batch.

    Only intervals in which all sequences of the batch generate tokens are returned. Intervals in
    which vLLM still reads prompts, or in which some sequences have ended, are left out.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    core, lengths, marks = engine.llm_engine, dict.fromkeys(map(str, range(len(ids))), 0), []
    for name, one in enumerate(ids):
        core.add_request(str(name), {"prompt_token_ids": one}, params)
    while core.has_unfinished_requests():
        outcomes = core.step()
        for outcome in outcomes:
            lengths[outcome.request_id.split("-")[0]] = len(outcome.outputs[0].token_ids)
        if outcomes and min(lengths.values()) >= 2 and max(lengths.values()) < count:
            marks.append(time.perf_counter())
    pairs = zip(marks[1:], marks, strict=False)
    return [1e3 * (later - before) for later, before in pairs]


def arrived(given: argparse.Namespace, plan: str, folder: str) -> Any:
    """Measure waiting times and throughput if requests arrive at random times."""
    engine = large(given, plan, folder)
    ids = prompts(given, Case(given.context, given.requests))
    warm_up(given, engine)
    draw = random.Random(0)
    gaps = [0.0, *(draw.expovariate(given.arrivals) for _ in ids[1:])]
    due = list(itertools.accumulate(gaps))
    return arriving(engine.llm_engine, list(zip(due, ids, strict=True)), given.written)


def warm_up(given: argparse.Namespace, engine: Any) -> None:
    """Compile the kernels of all kinds of steps before requests arrive.

    As many sequences as can run at a time are generated: one of full length, and shorter ones. So
    some steps read a prompt while other sequences generate tokens, and others only generate.
    """
    lengths = [given.context, *[min(given.context, WARM_UP)] * (max(given.batch) - 1)]
    shape = SHAPES[given.shape]
    ids = [text(shape, count, seed) for seed, count in enumerate(lengths, 1)]
    written(engine, ids, WARM_UP_TOKENS)


def arriving(core: Any, due: list[tuple[float, list[int]]], count: int) -> dict[str, Any]:
    """Send requests to an engine at given times, and measure how long they wait for their tokens.

    Args:
        core: The engine.
        due: Time of arrival in seconds and prompt of each request, in the order of arrival.
        count: Number of tokens to generate for each request.

    Returns:
        `first_ms`: milliseconds from the arrival of each request to its first token. `between_ms`:
        milliseconds between two successive tokens of a request. `seconds`: seconds from the first
        arrival to the last token.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    came: dict[str, list[float]] = {}  # request -> seconds of its arrival and of each token
    start = time.perf_counter()
    while len(came) < len(due) or core.has_unfinished_requests():
        now = time.perf_counter() - start
        while len(came) < len(due) and due[len(came)][0] <= now:
            at, ids = due[len(came)]
            name = f"{len(came)}"
            came[name] = [at]
            core.add_request(name, {"prompt_token_ids": ids}, params)
        if not core.has_unfinished_requests():
            time.sleep(due[len(came)][0] - now)
            continue
        outcomes, now = core.step(), time.perf_counter() - start
        for outcome in outcomes:
            seen = came[outcome.request_id.split("-")[0]]
            if len(outcome.outputs[0].token_ids) >= len(seen):
                seen.append(now)
    waits = [[1e3 * (b - a) for a, b in itertools.pairwise(seen)] for seen in came.values()]
    seconds = max(seen[-1] for seen in came.values()) - due[0][0]
    first_ms, between_ms = [w[0] for w in waits], [ms for w in waits for ms in w[1:]]
    return dict(first_ms=first_ms, between_ms=between_ms, seconds=seconds)


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that determine the results of an engine."""
    others = "json", "worker", "resume", "seconds", "plans", "without_check"
    found = {name: value for name, value in vars(given).items() if name not in others}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found |= dict(gpu=gpu, torch=torch.__version__, vllm=find_version("vllm"))
    if given.arrivals is not None and math.isinf(given.arrivals):
        found |= dict(arrivals="inf")  # JSON has no infinite numbers
    return found | dict(cases=[str(case) for case in given.cases])


def find_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def worker(given: argparse.Namespace) -> None:
    """Run one engine in this process for the check or a measurement, and add its results to a
    file."""
    what, plan, to = given.worker
    results = Results(Path(to), settings_of(given))
    with tempfile.TemporaryDirectory() as folder:
        if what == "time":
            timed(given, plan, folder, results)
        else:
            work = {"check": checked, "arrive": arrived}[what]
            results.add(f"{what} {plan}", work(given, plan, folder))


def ran(what: str, plan: str, to: Path, seconds: float | None) -> str:
    """Run one engine in a new process, which adds its results to a file.

    Args:
        what: "check", "time" or "arrive".
        plan: The engine, one of `PLANS`.
        to: File of the results.
        seconds: Time after which the process is stopped, or None.

    Returns:
        Why the process ended early, or an empty text.
    """
    settings = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, "-m", "benchmarks.serving", *sys.argv[1:], "--worker"]
    try:
        run = subprocess.run(
            [*command, what, plan, str(to)], env=os.environ | settings, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"the process for {what!r} was stopped, because the time was over"
    return (
        f"the process for {what!r} ended with exit code {run.returncode}" if run.returncode else ""
    )


class Engines:
    """Runs the engines whose results are missing.

    Args:
        given: The parsed command line.
        path: File of the results.
    """

    def __init__(self, given: argparse.Namespace, path: Path) -> None:
        self._given, self._path, self._started = given, path, time.monotonic()
        self._results = Results(path, settings_of(given))
        self._missing: list[str] = []

    def check(self) -> dict[str, int] | None:
        """Compare the tokens of each engine that has the plug-in with those of vLLM, and print how
        many are equal. Return None if results are missing.

        Raises:
            SystemExit: The tokens differ. They are then measured again by the next run.
        """
        equal = dict(equal=0, tokens=0)
        for plan in self._given.plans:
            if plan not in CHECKED_PLANS:
                continue
            names = CHECKED_PLANS[plan], plan
            found = [self._one("check", name) for name in names]
            if None in found:
                return None
            try:
                mine = compared(*found, close=CLOSE[plan])
            except SystemExit:
                self._results.discard(*(f"check {name}" for name in names))
                raise
            print(f"check: {mine['equal']} of {mine['tokens']} tokens are equal", flush=True)
            equal = {name: equal[name] + mine[name] for name in equal}
        return equal

    def arrivals(self) -> dict[str, Any]:
        """Return waiting times and throughput, for each engine with results."""
        found = {plan: self._one("arrive", plan) for plan in self._given.plans}
        plans = {plan: arrival_figures(one) for plan, one in found.items() if one is not None}
        for plan, mine in plans.items():
            if plan != "stock" and "stock" in plans:
                mine["throughput_ratio"] = mine["requests_per_s"] / plans["stock"]["requests_per_s"]
        return plans

    def times(self) -> list[dict[str, Any]]:
        """Return the times of all cases, for each engine with results."""
        plans, cases = self._given.plans, self._given.cases
        for plan in plans:
            if not all(f"time {plan} {case}" in self._results for case in cases):
                self._run("time", plan)
        found = [
            {plan: self._results.get(f"time {plan} {case}") for plan in plans} for case in cases
        ]
        known = [{plan: one for plan, one in case.items() if one is not None} for case in found]
        return summarized(cases, known)

    def end(self) -> None:
        """Raise SystemExit if an engine has not returned all its results."""
        if not self._missing:
            return
        resume = self._given.resume
        rest = "nothing is written"
        if resume is not None:
            rest += f" but {resume}; the same command measures what is missing"
        raise SystemExit(f"{'; '.join(self._missing)}; {rest}")

    def _one(self, what: str, plan: str) -> Any:
        """Return the only result of an engine, or None if it is missing."""
        if f"{what} {plan}" not in self._results:
            self._run(what, plan)
        return self._results.get(f"{what} {plan}")

    def _run(self, what: str, plan: str) -> None:
        """Run one engine, and read its results."""
        left = None
        if self._given.seconds is not None:
            left = self._given.seconds - (time.monotonic() - self._started)
            if left <= 0:
                self._missing.append(f"{plan}: the time was over before the process for {what!r}")
                return
        why = ran(what, plan, self._path, left)
        self._results = Results(self._path, settings_of(self._given))
        if why:
            self._missing.append(f"{plan}: {why}")
            if self._given.resume is None:
                self.end()


def compared(
    stock: list[dict[str, Any]], mine: list[dict[str, Any]], *, close: float
) -> dict[str, int]:
    """Compare the tokens that vLLM generated without the plug-in (`stock`) and with it (`mine`).

    Return the number of equal tokens and the number of all tokens. Log probabilities that differ by
    at most `close` are almost equal. If two tokens differ because
    their probabilities are almost equal, rounding explains the difference. Raise SystemExit if
    vLLM's token was clearly more probable than any other.
    """
    equal = total = 0
    for number, (one, other) in enumerate(zip(stock, mine, strict=True)):
        for place, (token, gap) in enumerate(zip(one["tokens"], one["gaps"], strict=True)):
            if token != other["tokens"][place]:
                if gap > close:
                    raise SystemExit(
                        f"check: the engines generate different tokens; nothing is timed. In "
                        f"answer {number}, token {place} is {token} without the plug-in and "
                        f"{other['tokens'][place]} with it. Without the plug-in, the log "
                        f"probability of the second best token was lower by {gap:.3f}, which is "
                        f"more than rounding can explain (at most {close})."
                    )
                break  # the texts differ from here on
            equal += 1
        total += len(one["tokens"])
    return dict(equal=equal, tokens=total)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the median time of one engine and case, with quartiles and the times of its rounds."""
    rounds = found["token_ms"]
    shown = dict(prefill_s=found["prefill_s"])
    shown |= spread("token_ms", [ms for part in rounds for ms in part])
    return shown | dict(token_ms_rounds=[statistics.median(part) for part in rounds])


def summarized(cases: list[Case], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median times of all engines for each case, and their ratios to `stock`."""
    batches = []
    for (context, batch), engines in zip(cases, found, strict=True):
        plans = {plan: figures(one) for plan, one in engines.items()}
        for plan, mine in plans.items():
            if plan != "stock" and "stock" in plans:
                mine["ratio"] = mine["token_ms"] / plans["stock"]["token_ms"]
        batches.append(dict(context=context, batch=batch, plans=plans))
    return batches


def arrival_figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the median and the 99th percentile of each kind of waiting time, and the throughput.

    `found` is what `arriving` returns.
    """
    fractions = {"": 0.5, "_99": 0.99}
    shown = {
        f"{kind}{end}": float(torch.tensor(found[kind]).quantile(fraction))
        for kind in ("first_ms", "between_ms")
        for end, fraction in fractions.items()
    }
    requests, seconds = len(found["first_ms"]), found["seconds"]
    tokens = requests + len(found["between_ms"])
    rates = dict(requests_per_s=requests / seconds, tokens_per_s=tokens / seconds)
    return shown | dict(seconds=seconds) | rates


def measured(given: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Check the engines, measure them, and return the results.

    Args:
        given: The parsed command line.
        path: File for results of single engines.

    Raises:
        SystemExit: Tokens differ, or results are missing.
    """
    engines = Engines(given, path)
    check = None
    if not given.without_check and (check := engines.check()) is None:
        engines.end()  # nothing is timed without the check
    settings = settings_of(given) | dict(plans=given.plans, without_check=given.without_check)
    part: dict[str, Any] = dict(settings=settings, check=check)
    if given.arrivals is None:
        part["batches"] = engines.times()
        for row in part["batches"]:
            for plan, shown in row["plans"].items():
                print(row["context"], row["batch"], plan, json.dumps(shown), flush=True)
    else:
        part["arrivals"] = engines.arrivals()
        print(json.dumps(part["arrivals"]), flush=True)
    engines.end()
    return part


def main() -> None:
    """Run the command line.

    Check that the engines with and without kvindex give the same tokens, measure the times of
    both, and print and write the results.
    """
    given = arguments()
    if given.worker:
        worker(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        part = measured(given, given.resume or Path(folder) / "results.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_json(given.json, {"machine": describe(device), "serving": part})


if __name__ == "__main__":
    main()
