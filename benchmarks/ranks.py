"""Measure the time per generated token if several GPUs share the heads or the tokens of a model.

kvindex's own decoder generates tokens on GPUs of one host, with random weights in the shape of a
model. Each decode step is one CUDA graph, which contains the communication. Every layer contains
synthetic tokens, with keys and values in host memory. Decode steps on one GPU are compared with
decode steps on several GPUs.

    torchrun --nproc-per-node=2 -m benchmarks.ranks [--decoder SHAPE] [--context N] [--index SPEC]
        [--written T] [--turn T] [--parts heads tokens] [--hit-rate R] [--dtype …] [--device …]
        --json OUT

One run measures:

- `one`: rank 0 alone generates tokens after a context of N tokens, while all other ranks wait.
- `tokens`: the GPUs share the tokens of one long sequence. Every rank has the whole model, and N
  tokens of the sequence. The index has the wrapper `+sharded`.
- `heads`: the GPUs share the heads. All ranks have the same N tokens, and each rank computes some
  of the heads. NCCL adds up the activations of the ranks.
- `one_shot`: like `heads`, but one kernel adds up the activations, in memory that all GPUs can
  access. This measurement is left out if there is no such memory.
- `silent`: like `heads`, but activations are not added up. Results are wrong, but the difference
  from `heads` shows how long it takes to add them up.

Attention logits are multiplied by a factor. The factor is chosen so that the device cache of one
GPU contains a fraction `--hit-rate` of the keys and values that a decode step retrieves.

**Check.** First, a model of two layers is checked. Nothing is timed if the check fails. With k as
large as the sequence, logits must agree with those of one process with full attention. (`check` in
the results is the norm of the difference, relative to the norm of the logits.) With CUDA graphs,
the model must generate the same tokens as without graphs.

**Results.** Times are milliseconds per token on rank 0. They include the time of moving tokens from
the local window into the index. `device_ms` is the time on the device, and `token_ms` the time
between two tokens as the host receives them. Each is a median with quartiles (`_low`, `_high`) and
the values of each round (`_rounds`). `ratio` is the median of `device_ms` divided by that of `one`.
`sum_us` is the time in microseconds to add up the activations of one token, measured in a CUDA
graph that adds up activations 64 times.

Each rank pins host memory for its own keys and values. All ranks together need memory for 2 N
tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import ranks, token
from benchmarks.common.reading import write
from benchmarks.common.shapes import SHAPES
from kvindex_adapters.common import parallel
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output

PARTS = ("heads", "tokens")
PLANS = {
    "one": "one GPU",
    "tokens": "tokens shared",
    "heads": "heads shared",
    "one_shot": "heads shared, sums in one kernel",
    "silent": "heads shared, no sums (wrong)",
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--decoder",
        choices=SHAPES,
        default="llama-3.1-8b",
        help="Name of a model. The benchmark uses its shape with random weights.",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=2**20,
        help="Number of tokens of the context that one GPU stores",
    )
    parser.add_argument(
        "--index",
        default="pariskv:row_codec=int8",
        help="Name and options of the index, as in kvindex.create",
    )
    parser.add_argument(
        "--block",
        type=int,
        default=256,
        help="Number of successive tokens that the wrapper +sharded gives to the same GPU",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="What is divided among the GPUs: heads, tokens, or both in separate measurements",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=120,
        help="Number of tokens to generate with each variant that is compared",
    )
    parser.add_argument(
        "--turn",
        type=int,
        default=20,
        help="The compared variants generate tokens alternately, this many tokens at a time",
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        default=0.93,
        help="Fraction of the retrieved keys and values that the device cache already contains "
        "(the benchmark simulates this hit rate)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help="Data type in which the model computes",
    )
    parser.add_argument("--device", default="cuda", help="Device on which the model runs")
    parser.add_argument("--json", type=output(), help="JSON file to which the results are written")
    found = parser.parse_args(given)
    for name, low in dict(context=token.LOCAL + 256, turn=8, written=found.turn, block=1).items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    return found


def shown(found: dict[str, Any]) -> list[str]:
    """Return lines of text with the results: one for each way of dividing the work among GPUs."""
    lines = [f"check: {found['check']}; {found['seconds']:.0f} s so far"]
    for plan in (plan for plan in PLANS if plan in found):
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio = found.get("ratio", {}).get(plan)
        line = f"{PLANS[plan]:34} {ms:6.2f} ms ({low:.2f} to {high:.2f})"
        lines.append(line + ("" if ratio is None else f", {ratio:.3f} of one GPU's"))
    return lines + [f"a sum, {way}: {us:.1f} µs" for way, us in found.get("sum_us", {}).items()]


def main() -> None:
    """Check that the results with several ranks are correct, measure times, and print and store
    them."""
    given = arguments()
    if parallel.launched():
        given.device = parallel.join(given.device, ranks.WAIT_S)
    result: dict[str, Any] = {"index": given.index, "dtype": given.dtype, "model": given.decoder}
    result["machine"] = describe(given.device)
    if given.device.startswith("cuda"):
        result["machine"] |= {"gpus": torch.cuda.device_count()}
    first = parallel.rank()[0] == 0
    with torch.no_grad():
        for result["ranks"] in ranks.measured(given):
            if first:
                write(result, given.json)
                print(*shown(result["ranks"]), sep="\n", flush=True)
    parallel.leave()


if __name__ == "__main__":
    main()
