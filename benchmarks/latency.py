"""Latency of a decoding step of one layer on a GPU or a CPU, beside dense attention.

    python -m benchmarks.latency [--tokens N …] [--batch B …] [--index SPEC] [--hit-rate H]
        [--on-device SHARE] [--latents H] [--layers L] [--replays R] [--seconds S] [--no-dense]
        [--json OUT]
    python -m benchmarks.latency --device cpu [--tokens N …] [--index SPEC] [--beside SPEC …]
        [--layers L] [--replays R] [--json OUT]

On a GPU: H = 32, G = 8, D = 128, bfloat16, k = 100; the index is one that fused kernels serve, as
`pariskv:preset=paper`. First the answer is checked; a wrong one is not timed. Times are of replays
of a CUDA graph that holds the public call, `index.attend`, of L layers one after another (of fewer
where memory is short), divided by L, by CUDA events, after the L2 cache was filled with something
else and with other queries in each replay. Rows lie on the host and none is in the cache
(`step_host`), on the host and as many in the cache as --hit-rate says (`step_cached`), or on the
device (`step_device`); with --on-device that share of them is there and the others are on the host
(`step_split`, with a cache `step_split_cached`). Rows that the cache has room for, and how many it
had, are told beside each time (`caches`). Rivals are attention over all keys and values (SDPA, the
faster of two ways), and exact scores with topk. With --latents a layer has latents of 512 + 64
coordinates, as DeepSeek-V3's, and so many query heads; no kernel of SDPA takes them, so the rival
is two products of torch with a softmax between them, or what reading all latents takes (`read`).

On a CPU (`benchmarks/common/cpu_steps.py`): H = 9, G = 3, D = 64, float32, k = 100; a step of
`AttentionLayer` around this index and others (`--beside`), and SDPA, in turns, one layer after
another, with one thread and with as many as torch has.
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
"""All but the one that writes the logits down, which would need several times the memory."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    add_index(parser)
    parser.add_argument("--on-device", type=float, help="a share of rows, the others on the host")
    parser.add_argument("--latents", type=int, help="query heads of a layer of latents")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--beside", nargs="*", help="other indexes, in turns with this one")
    parser.add_argument("--seconds", type=float, default=480, help="after which nothing is begun")
    parser.add_argument("--no-dense", action="store_true", help="measure no rivals")
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
    """Options of the step that is measured."""
    parser.add_argument("--index", default="pariskv", help="as kvindex.create takes it")
    parser.add_argument("--hit-rate", type=float, default=0.9, help="of the cache of rows")
    parser.add_argument("--replays", type=int, default=50, help="of a graph")


def refuse(parser: argparse.ArgumentParser, found: argparse.Namespace, **least: int) -> None:
    """Exits with words where a number is below its `least`, or the index cannot be measured."""
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
    """Microseconds of a layer's step, with rows here and there.

    sizes: more for `Layers`. Raises SystemExit where all places do not give the same.
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
    """Where rows are, and what the caches had of them between two looks."""
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
    """Of other indexes, their steps' times over the first one's in the same round, in turns."""
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
    """Raises SystemExit if outputs over rows on the host and elsewhere differ."""
    want = answers["host"].float()
    for place, answer in answers.items():
        if not torch.allclose(want, answer.float(), rtol=2e-2, atol=1e-2):
            raise SystemExit(f"the step is wrong: rows on the host and on the {place} differ")


def rivals(
    g: Geometry, tokens: int, batch: int, layers: int, timed: Timed, k: int = workload.K
) -> dict[str, Any]:
    """Attention over all keys and values, and exact scores with the best k, in device memory.

    Attention is timed as SDPA with `enable_gqa`, and with a group's heads as so many queries of
    one KV head, which is the same; the faster one is `dense`.
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
    """Attention over all latents by products of torch, one pass over them, and exact topk."""
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
    """Check, then measure point by point; what is known is written after each."""
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
    """Check, measure, write and print."""
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
