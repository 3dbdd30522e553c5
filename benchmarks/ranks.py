"""Time per generated token of several GPUs of a host beside one, by heads and by tokens.

    torchrun --nproc-per-node=2 -m benchmarks.ranks [--decoder SHAPE] [--context N] [--index SPEC]
        [--written T] [--turn T] [--parts heads tokens] [--hit-rate R] [--dtype …] [--device …]
        --json OUT

Tokens of the minimal decoder, each one CUDA graph with its collectives, with random weights of a
model's shape, every layer over synthetic tokens with rows on the host. In one run: rank 0 alone
over N tokens, while the others wait (`one`); every rank with the whole model and N tokens of a
sequence of as many times N (`tokens`, by an index `+sharded`); all ranks over N tokens, each with
its heads (`heads`: sums by NCCL; `one_shot`: in one kernel over memory that all GPUs see, where
that is to be had; `silent`: no sums at all, which computes nonsense and shows what sums take).
Attention is as sharp as it takes for `--hit-rate` of one GPU's rows.

First what ranks give together is compared, in two layers: logits of tokens that attend to all rows
with those of one process and full attention (`check`: their distance, relative to the norm), and
tokens by graphs with those of the same launches op by op; else nothing is timed. Milliseconds of
the device (`device_ms`) and as the host reads tokens (`token_ms`, a mean of a turn), of rank 0,
updates of the windows among them: medians with quartiles (`_low`, `_high`) and each round's
(`_rounds`).
`ratio`: of medians of `device_ms`, to `one`. `sum_us`: a sum of one token's activations, of 64 in a
graph of nothing else. Each rank pins its own rows: twice N tokens' in all, of `--index`.
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
    "tokens": "by tokens",
    "heads": "by heads",
    "one_shot": "by heads, sums in one kernel",
    "silent": "by heads, without sums: nonsense",
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decoder", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=2**20, help="tokens of one GPU")
    parser.add_argument("--index", default="pariskv:row_codec=int8")
    parser.add_argument("--block", type=int, default=256, help="of `sharded`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--written", type=int, default=120, help="tokens that are timed")
    parser.add_argument("--turn", type=int, default=20, help="tokens until it is another's turn")
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
    """What was measured, a line for each plan."""
    lines = [f"check: {found['check']}; {found['seconds']:.0f} s so far"]
    for plan in (plan for plan in PLANS if plan in found):
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio = found.get("ratio", {}).get(plan)
        line = f"{PLANS[plan]:34} {ms:6.2f} ms ({low:.2f} to {high:.2f})"
        lines.append(line + ("" if ratio is None else f", {ratio:.3f} of one GPU's"))
    return lines + [f"a sum, {way}: {us:.1f} µs" for way, us in found.get("sum_us", {}).items()]


def main() -> None:
    """Check, measure, print and write, after each part what there is."""
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
