"""Measure the time of one layer's decode step on a GPU or a CPU, compared with dense attention.

    python -m benchmarks.latency [--tokens N …] [--batch B …] [--index SPEC] [--hit-rate H]
        [--on-device SHARE] [--latents H] [--layers L] [--replays R] [--seconds S] [--no-dense]
        [--json OUT]
    python -m benchmarks.latency --device cpu [--tokens N …] [--index SPEC] [--beside SPEC …]
        [--layers L] [--replays R] [--json OUT]

**On a GPU**, the layer has 32 query heads, 8 KV heads, D = 128, bfloat16 and k = 100. The index
must have a fused step, like `pariskv:preset=paper`. First the result is checked. Nothing is timed
if it is wrong. A CUDA graph contains the public call `index.attend` of L layers one after another
(fewer layers if memory is short). CUDA events time the replays of the graph. The result is divided
by L. Each replay has other queries, and before it the L2 cache is filled with other data. These
times are measured:

- `step_host`: all rows are on the host, and none of the selected rows is in the device cache.
- `step_cached`: all rows are on the host, and a fraction `--hit-rate` of the selected rows is in
  the device cache.
- `step_device`: all rows are on the device.
- `step_split`, `step_split_cached`: a fraction `--on-device` of all rows is on the device, and the
  others are on the host, without and with a device cache.

`caches` has the size and the hit rate of the cache for each time. The step is compared with
attention over all keys and values (SDPA, the faster of two ways to call it), and with exact scores
and topk.

With `--latents H`, the layer has H query heads, and latents of 512 + 64 coordinates as in
DeepSeek-V3. No kernel of SDPA supports them. So the step is compared with two matrix products of
torch with a softmax between them, and with one read of all latents (`read`).

**On a CPU** (`benchmarks/common/cpu_steps.py`), the layer has 9 query heads, 3 KV heads, D = 64,
float32 and k = 100. Steps of `AttentionLayer` around this index and around other indexes
(`--beside`), and SDPA, take turns. All are measured with one thread, and with all of torch's
threads.
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
"""All backends of SDPA except the one that stores the logits, which would need several times the
memory."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with an error message if it cannot be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    add_index(parser)
    parser.add_argument(
        "--on-device",
        type=float,
        help="fraction of rows on the device, with the others on the host",
    )
    parser.add_argument("--latents", type=int, help="query heads of a layer over latents")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--beside", nargs="*", help="other indexes that are measured in turns with this one"
    )
    parser.add_argument("--seconds", type=float, default=480, help="begin no point after this time")
    parser.add_argument(
        "--no-dense", action="store_true", help="do not measure dense attention and topk"
    )
    parser.add_argument("--json", type=output())
    found = parser.parse_args(given)
    on_cpu = found.device == "cpu"
    found.beside = (["quest"] if on_cpu else []) if found.beside is None else found.beside
    found.tokens = found.tokens or (cpu_steps.TOKENS if on_cpu else [2**15, 2**17, 2**20])
    found.layers = found.layers or (4 if on_cpu else 16)
    least = 1024 if on_cpu else 4096
    refuse(parser, found, tokens=least, batch=1, layers=1, replays=10)
    if found.on_device is not None and not 0 < found.on_device < 1:
        parser.error(f"on-device: got {found.on_device}, allowed is more than 0 and less than 1")
    return found


def add_index(parser: argparse.ArgumentParser) -> None:
    """Add options for the measured step."""
    parser.add_argument("--index", default="pariskv", help="index, as kvindex.create takes it")
    parser.add_argument(
        "--hit-rate", type=float, default=0.9, help="fraction of rows that are in the cache of rows"
    )
    parser.add_argument("--replays", type=int, default=50, help="replays of each graph")


def refuse(parser: argparse.ArgumentParser, found: argparse.Namespace, **least: int) -> None:
    """Exit with an error message if a number is below its `least`, or for a wrong index."""
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
    """Measure microseconds of a layer's step, for each place in which rows can be stored.

    sizes: Further options of `Layers`. Raises SystemExit if the results depend on the place.
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
    """Return where rows are, and the hit rate of the caches between two placements."""
    used = replace(
        after, looked_up=after.looked_up - before.looked_up, found=after.found - before.found
    )
    return asdict(used) | {"hit_rate": used.hit_rate}


def beside(
    g: Geometry,
    specs: list[str],
    tokens: int,
    batch: int,
    layers: int,
    timed: Timed,
    *,
    hit_rate: float,
    rounds: int = 6,
) -> dict[str, Any]:
    """Time other indexes in turns with the first one. Return the ratios of their times to the first
    one's time.
    """
    found: dict[str, Any] = {spec: {} for spec in specs[1:]}
    for place, name in (("host", "step_cached"), ("device", "step_device")):
        works = {
            spec: Layers(g, spec, place, tokens=tokens, batch=batch, layers=layers)
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
    """Raise SystemExit if outputs with rows on the host and elsewhere differ."""
    want = answers["host"].float()
    for place, answer in answers.items():
        if not torch.allclose(want, answer.float(), rtol=2e-2, atol=1e-2):
            raise SystemExit(f"the step is wrong: rows on the host and on the {place} differ")


def rivals(
    g: Geometry, tokens: int, batch: int, layers: int, timed: Timed, k: int = workload.K
) -> dict[str, Any]:
    """Measure dense attention, and exact scores with the best k, over all rows on the device.

    Dense attention is timed as SDPA with `enable_gqa`, and with a group's heads as several queries
    of one KV head, which gives the same result. The faster one is `dense`.
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
    """Time dense attention over all latents in torch, one read of all latents, and exact topk."""
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
    """Check the result, then measure point by point. Write the results so far after each point."""
    g, timed = workload.geometry("cuda", given.latents), GraphTimer(given.replays)
    start, dense = time.monotonic(), rivals if given.latents is None else latent_rivals
    result: dict[str, Any] = {
        "shape": dict(q_heads=g.q_heads, kv_heads=g.kv_heads, head_dim=g.head_dim, k=workload.K),
        "index": given.index,
        "near": workload.WINDOW,
        "machine": describe("cuda"),
        "check": check(g, given.index, batch=max(2, *given.batch)),
        "points": [],
        "notes": [],
    }
    workload.free()
    for tokens, batch in [(n, b) for n in given.tokens for b in given.batch]:
        about = f"{tokens:,} tokens, batch {batch}"
        layers = workload.layers_that_fit(g, tokens, batch, given.layers)
        if time.monotonic() - start > given.seconds or not layers:
            result["notes"].append(f"{about}: not begun, for {'time' if layers else 'memory'}")
            continue
        point = {"tokens": tokens, "batch": batch}
        if not given.no_dense:
            point |= dense(g, tokens, batch, layers, timed)
            workload.free()
        sizes = tokens, batch, layers
        places = dict(hit_rate=given.hit_rate, on_device=given.on_device)
        point |= steps(g, given.index, *sizes, timed, **places)
        if given.beside:
            workload.free()
            specs = [given.index, *given.beside]
            few = tokens, batch, max(1, layers // (2 * len(specs)))
            point["beside"] = beside(g, specs, *few, timed, hit_rate=given.hit_rate)
        result["points"].append(point)
        result["seconds"] = time.monotonic() - start
        if given.json:
            write_json(given.json, result)
        print(f"{result['seconds']:5.0f} s  {about}", flush=True)
    return result


def main() -> None:
    """Check the result and time steps. Write and print the times."""
    given = arguments()
    if given.device == "cpu":
        specs = [given.index, *given.beside]
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
