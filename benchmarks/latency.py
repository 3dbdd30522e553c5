"""Measure the time of one layer's decode step on a GPU or a CPU, compared with dense attention.

The layer has an index and contains synthetic tokens. The time of its decode step is compared with
the time of dense attention over the same number of tokens.

    python -m benchmarks.latency [--tokens N …] [--batch B …] [--index SPEC] [--hit-rate H]
        [--k K] [--on-device F] [--latents H] [--layers L] [--replays R] [--seconds S] [--no-dense]
        [--json OUT]
    python -m benchmarks.latency --device cpu [--tokens N …] [--index SPEC] [--others SPEC …]
        [--layers L] [--replays R] [--json OUT]

**On a GPU**, the layer has 32 query heads, 8 KV heads, D = 128 and bfloat16. The index
must have a fused step (kernels for a whole decode step), like `pariskv:preset=paper`. First, the
result of a decode step is checked. Nothing is timed if it is wrong. A CUDA graph contains
`index.attend` of L layers, one after another (fewer layers if memory is short). CUDA events time
the replays of the graph, and the time is divided by L. Each replay has different queries. Before
each replay, the L2 cache is filled with other data. These times are measured:

- `step_host`: all rows (keys and values) are in host memory. The device cache contains none of the
  retrieved rows.
- `step_cached`: all rows are in host memory. The device cache contains a fraction `--hit-rate` of
  the retrieved rows.
- `step_device`: all rows are in device memory.
- `step_split`: a fraction `--on-device` of all rows is in device memory, and all others are in host
  memory. The device cache contains none of the retrieved rows.
- `step_split_cached`: the same, with a fraction `--hit-rate` of the retrieved host rows in the
  device cache.

`caches` has the size and the hit rate of the device cache for each of these times. Two more times
are measured for comparison: dense attention over all keys and values (SDPA, the faster of two ways
to call it), and an exact search (all scores, then topk).

With `--latents H`, the layer has latent attention (MLA) with H query heads, and latents of 512 + 64
coordinates as in DeepSeek-V3. SDPA has no kernel for such latents. Therefore the decode step is
compared with two matrix products of torch and a softmax between them, and with the time to read all
latents once (`read`).

**On a CPU** (`benchmarks/common/cpu_steps.py`), the layer has 9 query heads, 3 KV heads, D = 64,
float32 and k = 100. Three kinds of decode steps run in alternation: an `AttentionLayer` with the
index, an `AttentionLayer` with each of the other indexes (`--others`), and SDPA. They are measured
with one thread and with all threads of torch.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import report
from benchmarks.common import cpu_steps, workload
from benchmarks.common.correctness import check
from benchmarks.common.timing import GraphTimer, Timed, spread
from benchmarks.common.workload import Layers
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Placement
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Backends of SDPA that compute attention in one kernel.

The backend `MATH` is left out. It stores all logits, and needs several times the memory.
"""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="Device that is measured"
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        help="Context lengths to measure, in tokens",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[1],
        help="Batch sizes to measure: numbers of sequences that the layer contains",
    )
    add_index(parser)
    parser.add_argument(
        "--k",
        type=int,
        default=workload.K,
        help="On a GPU, number of tokens that a step retrieves per KV head",
    )
    parser.add_argument(
        "--on-device",
        type=float,
        help="Also measure decode steps for which only this fraction of the keys and values is in "
        "device memory, and the rest in host memory.",
    )
    parser.add_argument(
        "--latents",
        type=int,
        help="Number of query heads of a layer with latent attention (MLA), which is measured in "
        "place of the usual layer",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="Number of layers that run one after another (default: 16 on a GPU, 4 on a CPU)",
    )
    parser.add_argument(
        "--others",
        nargs="*",
        help="Names and options of other indexes that are measured in alternation with --index",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="Time in seconds after which no new measurement begins",
    )
    parser.add_argument(
        "--no-dense",
        action="store_true",
        help="Do not measure dense attention and exact search (all scores, then torch.topk)",
    )
    parser.add_argument("--json", type=output(), help="JSON file to which the results are written")
    found = parser.parse_args(given)
    on_cpu = found.device == "cpu"
    found.others = (["quest"] if on_cpu else []) if found.others is None else found.others
    found.tokens = found.tokens or (cpu_steps.TOKENS if on_cpu else [2**15, 2**17, 2**20])
    found.layers = found.layers or (4 if on_cpu else 16)
    least = 1024 if on_cpu else 4096
    refuse(parser, found, tokens=least, batch=1, layers=1, replays=10, k=1)
    if found.on_device is not None and not 0 < found.on_device < 1:
        parser.error(f"on-device: got {found.on_device}, allowed is more than 0 and less than 1")
    return found


def add_index(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for the index and its decode step."""
    parser.add_argument(
        "--index", default="pariskv", help="Name and options of the index, as in kvindex.create"
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        default=0.9,
        help="Fraction of the retrieved keys and values that the device cache contains",
    )
    parser.add_argument(
        "--replays", type=int, default=50, help="Number of timed replays of each CUDA graph"
    )


def refuse(parser: argparse.ArgumentParser, found: argparse.Namespace, **least: int) -> None:
    """Exit with an error message if an option is invalid.

    `least` contains the smallest allowed value of options by name.
    """
    for name, low in least.items():
        values = getattr(found, name)
        for value in values if isinstance(values, list) else [values]:
            if value < low:
                parser.error(f"{name}: got {value}, allowed is at least {low}")
    if not 0 <= found.hit_rate <= 1:
        parser.error(f"hit-rate: got {found.hit_rate}, allowed is 0 to 1")
    try:
        workload.measurable(found.index)
    except (KeyError, TypeError, ValueError) as error:
        parser.error(f"index: {error}")
    if not torch.cuda.is_available() and getattr(found, "device", "cuda") == "cuda":
        parser.error("this measures a CUDA device, and torch sees none")


def steps(
    g: Geometry,
    spec: str,
    tokens: int,
    batch: int,
    layers: int,
    timed: Timed,
    *,
    hit_rate: float,
    on_device: float | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Time decode steps with keys and values on the host, on the device, or partly on each.

    Args:
        g: Shapes of the layer.
        spec: Name and options of the index.
        tokens: Number of tokens in each layer and sequence.
        batch: Number of sequences.
        layers: Number of layers.
        timed: Function that times the layers.
        hit_rate: Fraction of the retrieved keys and values that the device cache contains.
        on_device: Fraction of keys and values that are on the device, with all others on the host.
            None to measure only steps with all of them in one place.
        sizes: Further options of `Layers`.

    Returns:
        Times per layer in microseconds, and the use of the device caches.

    Raises:
        SystemExit: The attention outputs depend on the place of keys and values.
    """
    found: dict[str, Any] = {"layers": layers, "hit_rate": hit_rate, "caches": {}}
    answers = {}
    places: dict[str, str | float] = {"host": "host", "device": "device"}
    if on_device is not None:
        places["split"] = on_device
    for name, place in places.items():
        work = Layers(g, spec, place, tokens=tokens, batch=batch, layers=layers, **sizes)
        answers[name] = work.answers()
        plans: dict[str, Any] = {f"step_{name}": work.ask}
        if name != "device":
            cached = "step_cached" if name == "host" else f"step_{name}_cached"
            plans[cached] = partial(work.ask, hit_rate=hit_rate)
        for plan, ask in plans.items():
            if ask is not work.ask:
                work.fill()
            before = work.placement()
            found[plan] = timed(work.run, layers, ask)
            found["caches"][plan] = cache_use(before, work.placement())
        del work, plans, ask
        workload.free()
    agree(answers)
    return found


def cache_use(before: Placement, after: Placement) -> dict[str, Any]:
    """Return the sizes of the row caches in device memory, and their hit rate in some decode steps.

    `before` and `after` are the results of `Layers.placement` before and after these steps.
    """
    used = replace(
        after, looked_up=after.looked_up - before.looked_up, found=after.found - before.found
    )
    return asdict(used) | {"hit_rate": used.hit_rate}


def relative(
    g: Geometry,
    specs: list[str],
    tokens: int,
    batch: int,
    layers: int,
    timed: Timed,
    *,
    hit_rate: float,
    k: int,
    rounds: int = 6,
) -> dict[str, Any]:
    """Time decode steps of several indexes in alternation.

    For each index after the first, return its time divided by that of the first index in the same
    round.
    """
    found: dict[str, Any] = {spec: {} for spec in specs[1:]}
    for place, name in (("host", "step_cached"), ("device", "step_device")):
        works = {
            spec: Layers(g, spec, place, tokens=tokens, batch=batch, layers=layers, k=k)
            for spec in specs
        }
        turns: dict[str, list[float]] = {spec: [] for spec in specs}
        for work in works.values():
            work.answers()
            work.fill()
        for _ in range(rounds):
            for spec, work in works.items():
                ask = partial(work.ask, hit_rate=hit_rate if place == "host" else 0.0)
                turns[spec].append(timed(work.run, layers, ask)["median_us"])
        for spec in specs[1:]:
            pairs = zip(turns[spec], turns[specs[0]], strict=True)
            found[spec] |= spread(name, [mine / theirs for mine, theirs in pairs])
        del work, works, ask
        workload.free()
    return found


def agree(answers: dict[str, Tensor]) -> None:
    """Raise SystemExit if attention outputs depend on where keys and values are stored."""
    want = answers["host"].float()
    for place, answer in answers.items():
        if not torch.allclose(want, answer.float(), rtol=2e-2, atol=1e-2):
            raise SystemExit(
                "the decode step is wrong and is not timed: attention outputs with keys and values "
                f"on the host and on the {place} differ"
            )


def rivals(
    g: Geometry, tokens: int, batch: int, layers: int, timed: Timed, k: int = workload.K
) -> dict[str, Any]:
    """Time dense attention, and an exact search for the best `k` tokens, on the device.

    Dense attention is timed in two ways with the same result: SDPA with `enable_gqa`, and SDPA with
    the query heads of a KV head as several queries of one head. `dense` is the faster one.
    """
    shape = (layers, 2, batch, g.kv_heads, tokens, g.head_dim)
    keys, values = torch.empty(shape, dtype=g.dtype, device=g.device).normal_().unbind(1)
    asked = workload.queries_of(g, layers, batch)
    alone = asked[..., None, :]  # [L, B, H, 1, D]
    folded = asked.unflatten(2, (g.kv_heads, g.group_size))  # [L, B, G, g, D]

    def attention(queries: Tensor, gqa: bool) -> Tensor:
        layered = zip(queries, keys, values, strict=True)
        return [sdpa(*layer, enable_gqa=gqa) for layer in layered][-1]

    def best() -> Tensor:
        layered = zip(folded, keys, strict=True)
        return [(q @ k_.mT).amax(2).topk(k, sorted=False).indices for q, k_ in layered][-1]

    ways = {
        "dense_gqa": partial(attention, alone, True),
        "dense_folded": partial(attention, folded, False),
    }
    found: dict[str, Any] = {"dense_layers": layers}
    with sdpa_kernel(FUSED if g.device.type == "cuda" else [SDPBackend.MATH]):
        one, other = (run().float().flatten() for run in ways.values())
        if not float((one - other).norm() / one.norm()) < 2e-2:
            raise SystemExit("the two ways of dense attention differ")
        found |= {name: timed(run, layers) for name, run in ways.items()}
        found["topk"] = timed(best, layers)
    found["dense"] = min((found[name] for name in ways), key=lambda times: times["median_us"])
    return found


def latent_rivals(
    g: Geometry, tokens: int, batch: int, layers: int, timed: Timed, k: int = workload.K
) -> dict[str, Any]:
    """Time three operations of torch: latent attention over all latents, exact search, and reading.

    Reading (`read`) is a sum over all latents, which reads each of them from memory once.
    """
    shape = (layers, batch, 1, tokens, g.head_dim)
    latents = torch.empty(shape, dtype=g.dtype, device=g.device).normal_()
    folded = workload.queries_of(g, layers, batch)[:, :, None]  # [L, B, 1, H, D]

    def attention() -> Tensor:
        return [
            (q @ rows.mT * g.scale).softmax(-1) @ rows[..., : g.value_dim]
            for q, rows in zip(folded, latents, strict=True)
        ][-1]

    def best() -> Tensor:
        layered = zip(folded, latents, strict=True)
        return [(q @ rows.mT).amax(2).topk(k, sorted=False).indices for q, rows in layered][-1]

    def read() -> Tensor:
        return [rows.view(torch.int32).sum(dtype=torch.int32) for rows in latents][-1]

    runs = {"dense": attention, "topk": best, "read": read}
    return {"dense_layers": layers} | {name: timed(run, layers) for name, run in runs.items()}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Check that a decode step computes the correct output, and then measure times.

    Measures every combination of a number of tokens and a number of sequences. After each
    measurement, all results so far are written to a file.
    """
    g, timed = workload.geometry("cuda", given.latents), GraphTimer(given.replays)
    start, dense = time.monotonic(), rivals if given.latents is None else latent_rivals
    result: dict[str, Any] = {
        "shape": dict(q_heads=g.q_heads, kv_heads=g.kv_heads, head_dim=g.head_dim, k=given.k),
        "index": given.index,
        "near": workload.WINDOW,
        "machine": describe("cuda"),
        "check": check(g, given.index, batch=max(2, *given.batch), k=given.k),
        "points": [],
        "notes": [],
    }
    workload.free()
    for tokens, batch in [(n, b) for n in given.tokens for b in given.batch]:
        about = f"{tokens:,} tokens, batch {batch}"
        layers = workload.layers_that_fit(g, tokens, batch, given.layers)
        if time.monotonic() - start > given.seconds or not layers:
            why = "the time was over" if layers else "the memory is too small"
            result["notes"].append(f"{about}: not measured, because {why}")
            continue
        point = {"tokens": tokens, "batch": batch}
        if not given.no_dense:
            point |= dense(g, tokens, batch, layers, timed, given.k)
            workload.free()
        sizes = tokens, batch, layers
        places = dict(hit_rate=given.hit_rate, on_device=given.on_device, k=given.k)
        point |= steps(g, given.index, *sizes, timed, **places)
        if given.others:
            workload.free()
            specs = [given.index, *given.others]
            few = tokens, batch, max(1, layers // (2 * len(specs)))
            point["others"] = relative(g, specs, *few, timed, hit_rate=given.hit_rate, k=given.k)
        result["points"].append(point)
        result["seconds"] = time.monotonic() - start
        if given.json:
            write_json(given.json, result)
        print(f"{result['seconds']:5.0f} s  {about}", flush=True)
    return result


def main() -> None:
    """Run the command line: check a decode step, time steps, then write and print the times."""
    given = arguments()
    if given.device == "cpu":
        specs = [given.index, *given.others]
        found = cpu_steps.measure(specs, given.tokens, given.layers, given.replays)
        found |= {"index": given.index, "machine": describe()}
        if given.json:
            write_json(given.json, found)
        print(report.TABLES["cpu_steps"](found))
        return
    with torch.no_grad():
        result = measure(given)
    print(report.TABLES["decode_step_h100"](result), *result["notes"], sep="\n")


if __name__ == "__main__":
    main()
