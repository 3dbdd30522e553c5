"""List the kernels of a decode step on a GPU, sorted by the time that they take.

```
PYTHONPATH=.:adapters python tools/token_kernels.py [--decoder SHAPE] [--context N]
    [--index SPEC] [--without-attention] [--weights fp8] [--torch-products] [--apart]
    [--rows R]
```

The decoder is the one in `benchmarks/common/token.py`. The command runs a few decode steps, and
prints a line for each kernel: microseconds per step, launches per step, and name. The first line
has the time of a step, and the sum of the times of all kernels. The sum is usually smaller, because
there are gaps between kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import token
from benchmarks.common.shapes import SHAPES, weights_of
from kvindex_adapters.decoder.quantized import PLAIN, WEIGHTS

REPLAYS = 8


def lines(plan: token.Plan, rows: int) -> Iterator[str]:
    """Replay decode steps, and yield lines to print.

    The first line has the time of a whole decode step. The next lines have the times of the `rows`
    slowest kernels.
    """
    whole = sorted(plan.turn(4 * REPLAYS)["device_ms"])[2 * REPLAYS] * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        plan.turn(REPLAYS)
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    kernels = [one for one in kernels if one.self_device_time_total > 0]
    busy = sum(one.self_device_time_total for one in kernels) / REPLAYS
    count = sum(one.count for one in kernels) / REPLAYS
    yield f"{whole:8.0f} us per step; kernels {busy:.0f} us, {count:.0f} launches"
    for one in kernels[:rows]:
        us, launches = one.self_device_time_total / REPLAYS, one.count / REPLAYS
        yield f"{us:8.1f} us {launches:7.1f} x {one.key[:100]}"


def main() -> None:
    """Parse the command line, create a decoder, and print the kernels of its decode step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decoder", choices=SHAPES, default="qwen3-8b", help="shape of the model")
    parser.add_argument(
        "--context", type=int, default=32_768, help="number of tokens that each index stores"
    )
    parser.add_argument("--index", default="pariskv", help="name and options of the index")
    parser.add_argument(
        "--without-attention", action="store_true", help="run the decoder without attention"
    )
    parser.add_argument(
        "--torch-products",
        action="store_true",
        help="compute matrix products with torch, not with Triton kernels",
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default=PLAIN, help="precision of the model's weights"
    )
    parser.add_argument(
        "--apart", action="store_true", help="start each kernel only after the previous one ended"
    )
    parser.add_argument("--rows", type=int, default=24, help="number of kernels in the table")
    given = parser.parse_args()
    shape = SHAPES[given.decoder]
    g = shape.geometry(torch.bfloat16, "cuda")
    with torch.no_grad():
        weights = weights_of(shape, g, given.weights)
        layers = [token.Nothing()] * shape.layers
        if not given.without_attention:
            layers = token.indexed(g, given.index, given.context, shape.layers, 1024)
        overlap, fused = False if given.apart else None, not given.torch_products
        plan = token.Plan(shape, g, weights, layers, fused=fused, overlap=overlap)
        plan.turn(token.WARM)
        print(*lines(plan, given.rows), sep="\n")


if __name__ == "__main__":
    main()
