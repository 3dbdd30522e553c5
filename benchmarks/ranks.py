"""Measure the time per generated token on several GPUs that share the heads or the tokens.

    torchrun --nproc-per-node=2 -m benchmarks.ranks [--decoder SHAPE] [--context N] [--index SPEC]
        [--written T] [--turn T] [--parts heads tokens] [--hit-rate R] [--dtype …] [--device …]
        --json OUT

The minimal decoder generates tokens on GPUs of one host, with random weights in a model's shape.
Each decode step is one CUDA graph, which contains the collectives. Every layer has synthetic tokens
with rows on the host. One run measures:

- `one`: rank 0 alone generates after N tokens, while the other ranks wait.
- `tokens`: every rank has the whole model, and N tokens of a longer sequence, with the wrapper
  `+sharded` around the index.
- `heads`: all ranks have the same N tokens, and each rank has a part of the heads. NCCL adds up the
  activations.
- `one_shot`: like `heads`, but one kernel adds up the activations, in memory that all GPUs can
  access. This is left out if there is no such memory.
- `silent`: like `heads`, but without sums. Results are wrong, but the difference to `heads` shows
  how long sums take.

The sharpness of attention is set so that one GPU's cache contains a fraction `--hit-rate` of the
rows that a step selects.

First a model of two layers is checked. Nothing is timed if the check fails. With k as large as the
sequence, logits must agree with those of one process with full attention (`check` has the distance
relative to the norm). The tokens from graphs must equal those of the same launches without a graph.

Figures are milliseconds per token of rank 0, including updates of the windows. `device_ms` is the
time of the device, and `token_ms` the time between tokens as the host reads them. Both are medians
with quartiles (`_low`, `_high`) and the values of each round (`_rounds`). `ratio` compares medians
of `device_ms` with `one`. `sum_us` is the microseconds of one sum of a token's activations, in a
graph of 64 sums. Each rank pins memory for its own rows, and all ranks together for the rows of 2 N
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
    """Parse the command line. Exits with an error message if it cannot be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decoder", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=2**20, help="tokens of one GPU")
    parser.add_argument("--index", default="pariskv:row_codec=int8")
    parser.add_argument("--block", type=int, default=256, help="tokens of a block of `+sharded`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--written", type=int, default=120, help="tokens that are timed")
    parser.add_argument(
        "--turn", type=int, default=20, help="tokens of a plan before the next plan's turn"
    )
    parser.add_argument("--hit-rate", type=float, default=0.93)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=output())
    found = parser.parse_args(given)
    for name, low in dict(context=token.LOCAL + 256, turn=8, written=found.turn, block=1).items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    return found


def shown(found: dict[str, Any]) -> list[str]:
    """Return a line for each plan that was measured."""
    lines = [f"check: {found['check']}; {found['seconds']:.0f} s so far"]
    for plan in (plan for plan in PLANS if plan in found):
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio = found.get("ratio", {}).get(plan)
        line = f"{PLANS[plan]:34} {ms:6.2f} ms ({low:.2f} to {high:.2f})"
        lines.append(line + ("" if ratio is None else f", {ratio:.3f} of one GPU's"))
    return lines + [f"a sum, {way}: {us:.1f} µs" for way, us in found.get("sum_us", {}).items()]


def main() -> None:
    """Check and measure. Print and write the results after each part."""
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
