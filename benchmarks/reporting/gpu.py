"""Tables of GPU results: decoding step, append, token in a model, row cache, kernel limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.reporting.parts import Result, machine, stored, table

PLACES = ("host", "cached", "device")
"""Of rows; `cached`: on the host, with a cache on the device."""

SLOTS = 4096
"""Of the cache of rows: those of which each layer is shown."""


# A step


def decode_step(result: Result) -> str:
    """Whole steps beside dense attention; those of 4M tokens from a file beside the result's."""
    longer = stored("decode_step_4m")
    return steps(result, [longer] if longer else [], found_in_texts())


def steps(result: Result, longer: Sequence[Result] = (), in_texts: float | None = None) -> str:
    """Whole steps of results of the same index, each beside its own run's dense attention.

    in_texts: share of a step's rows that caches find where a model writes.
    """
    points = [point for part in (result, *longer) for point in part["points"]]
    rows: list[tuple[str, ...]] = []
    split = any("step_split" in point for point in points)
    places = (*PLACES, "split", "split_cached") if split else PLACES
    for point in points:
        rivals = (_median(point, part) for part in ("dense", "topk"))
        ours = (_over_dense(point, f"step_{place}") for place in places)
        rows.append((f"{point['tokens']:,}", str(point["batch"]), *rivals, *ours))
    head = ["tokens", "B", "dense (SDPA)", "exact scores, topk", "rows on the host"]
    head += ["and a cache of rows", "rows on the device"]
    if places is not PLACES:
        head += ["rows in both places", "and a cache of rows"]
    about = [
        "µs for a layer and step, and over dense: medians of 50 replays of a CUDA graph of up to "
        "16 layers, cold caches; H = 32, G = 8, D = 128, bfloat16, "
        f"k = {result['shape']['k']}, `{result['index']}`."
    ]
    hits = [point["hit_rate"] for point in result["points"] if "hit_rate" in point]
    if hits:
        share = " to ".join(dict.fromkeys(f"{each:.1%}" for each in (min(hits), max(hits))))
        about.append(f"Of the rows asked for {share} lie in the cache.")
    about += _caches(points)
    if hits and in_texts is not None:
        about.append(f"Where a model writes, {in_texts:.0%} do.")
    ending = machine(result)
    for part in longer:
        lengths = " and ".join(f"{point['tokens']:,}" for point in part["points"])
        ending += f" {lengths} tokens: a run of its own. {machine(part)}"
    return f"{' '.join(about)}\n\n{table(head, rows)}\n\n{ending}"


def _caches(points: Sequence[Result]) -> list[str]:
    """What is kept in caches and how, and what was measured to be found there."""
    used = [use for p in points for use in p.get("caches", {}).values() if use["cache_rows"]]
    if not used:
        return []
    slots = " or ".join(dict.fromkeys(f"{use['cache_rows']:,}" for use in used))
    kept = " or ".join(dict.fromkeys(f"`{use['row_codec']}`" for use in used))
    told = [f"Caches have room for {slots} rows per KV head, kept as {kept}."]
    for name, plan in (("on the host", "cached"), ("in both places", "split_cached")):
        hits = [
            p["caches"][f"step_{plan}"] for p in points if f"step_{plan}" in p.get("caches", {})
        ]
        if hits:
            share = ", ".join(f"{use['hit_rate']:.1%}" for use in hits)
            told.append(f"Found of the host's rows, rows {name}: {share}.")
    return told


def latents(_: Result) -> str:
    """Steps of a layer of latents beside dense attention over them."""
    results = [found for heads in (16, 128) if (found := stored(f"latents_{heads}"))]
    rows = []
    for result, point in ((one, p) for one in results for p in one["points"]):
        rivals = (_median(point, part) for part in ("dense", "read"))
        ours = (_over_dense(point, f"step_{place}") for place in ("host", "device"))
        rows.append((str(result["shape"]["q_heads"]), f"{point['tokens']:,}", *rivals, *ours))
    head = ("query heads", "tokens", "dense, absorbed", "reading all latents")
    about = (
        "µs for a layer and step, and over dense: medians of 50 replays of a CUDA graph of 8 "
        f"layers, cold caches; D = 512 + 64, bfloat16, k = {results[0]['shape']['k']}, "
        f"`{results[0]['index']}`. Dense: two products of torch and a softmax between them."
    )
    head = (*head, "rows on the host", "rows on the device")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(results[0])}"


def beside(result: Result) -> str:
    """Steps of other indexes over those of the result's own."""
    rows = []
    for point in result["points"]:
        own = (_median(point, f"step_{place}") for place in ("cached", "device"))
        rows.append((f"{point['tokens']:,}", f"`{result['index']}`, µs", *own))
        for spec, found in point["beside"].items():
            places = (f"step_{place}" for place in ("cached", "device"))
            each = (
                f"{found[p]:.3f} ({found[f'{p}_low']:.3f} to {found[f'{p}_high']:.3f})"
                for p in places
            )
            rows.append((f"{point['tokens']:,}", f"`{spec}`, relative to it", *each))
    head = ("tokens", "index", "rows on the host, with the row cache", "rows on the device")
    about = (
        "Medians; ratios are of the same round, with quartiles in parentheses. "
        "CUDA graphs, cold caches."
    )
    return f"{table(head, rows)}\n\n{about} {machine(result)}"


def presets(_: Result) -> str:
    """Steps of the presets that kernels serve, a result each, beside each other."""
    results = {name: stored(f"decode_step_{name}") for name in ("fast", "precise", "paper")}
    there = {name: result for name, result in results.items() if result}
    at: dict[int, dict[str, Result]] = {}
    for name, result in there.items():
        for point in result["points"]:
            if point["batch"] == 1 and "step_host" in point:
                at.setdefault(point["tokens"], {})[name] = point
    parts = [(f"step_{place}", name) for place in ("host", "device") for name in there]
    rows = []
    for tokens, points in sorted(at.items()):
        full = next((_median(p, "dense") for p in points.values() if "dense" in p), "–")
        ours = (_over_dense(points.get(name, {}), part) for part, name in parts)
        rows.append((f"{tokens:,}", full, *ours))
    head = [f"`{name}`, rows on the {part.removeprefix('step_')}" for part, name in parts]
    about = "µs for a layer and step, batch 1, and over dense of the same run; set as above."
    ending = machine(next(iter(there.values())))
    return f"{about}\n\n{table(('tokens', 'dense (SDPA)', *head), rows)}\n\n{ending}"


def _median(point: Result, part: str) -> str:
    """Microseconds; `–` where it was not measured."""
    return f"{point[part]['median_us']:,.0f}" if part in point else "–"


def _over_dense(point: Result, part: str) -> str:
    """Microseconds, and over dense attention's where there are some."""
    if not {part, "dense"} <= point.keys():
        return _median(point, part)
    return f"{_median(point, part)} ({point[part]['median_us'] / point['dense']['median_us']:.2f})"


# An append

PLANS = {
    "at_once": "all layers at once, on the steps' stream",
    "beside": "as a layer does by itself",
    "room": "the same, memory taken before",
}


def append_layers(result: Result) -> str:
    """By how much steps of layers that update by themselves are longer than plain ones."""
    rows, about = [], []
    for part in result["layers"]:
        about.append(f"{part['layers']} layers, {part['tokens']:,} tokens, steps launched one by")
        for plan, kind in [(name, kind) for name in PLANS for kind in part.get(name, {})]:
            found = part[plan][kind]
            if kind == "amortised" or not isinstance(found, dict) or not found["steps"]:
                continue
            delay = "" if kind == "plain" else f"{found['delay_median']:.1%}"
            times = (f"{found[name] / 1e3:.1f}" for name in ("median_us", "worst_us"))
            rows.append((PLANS[plan], found["is"], f"{found['steps']:,}", *times, delay))
    head = ("updates", "what a step has", "steps", "ms, median", "ms, worst", "longer than plain")
    prompts = "".join(
        f" {one['tokens']:,} tokens, rows on the {one['place']}, are appended in "
        f"{one['median_us'] / 1e3:,.1f} ms, {one['GB_s']:,.0f} GB/s."
        for one in result.get("prompts", [])
    )
    return f"{about[-1]} one.{prompts}\n\n{table(head, rows)}"


# A token

WORDS = {
    "dense": "transformers, dense attention",
    "eager": "`{index}`, `graphs=False`",
    "graphs": "`{index}`",
}
RATIOS = {"dense": "dense attention", "eager": "`graphs=False`"}


def generate_speed(result: Result) -> str:
    """Host time of a layer and token, and tokens per second of a model, medians and quartiles."""
    layers, model, index = result["layers"], result.get("model_run", {}), result["index"]
    rows = []
    for plan, words in WORDS.items():
        run = model.get(plan, {})
        speed = f"{1e3 / run['token_ms']:.0f}" if run else ""
        rows.append(
            (words.format(index=index), *_figures(layers.get(plan, {}), run, ",.0f"), speed)
        )
    for plan, words in RATIOS.items():
        step, run = (part.get("ratio", {}).get(plan, {}) for part in (layers, model))
        if step or run:
            figures = _figures(step, run, ".2f")
            rows.append((f"{words} over `{index}`, round by round", *figures, ""))
    head = ("", "host, µs a layer", "until done, µs", "model, ms a token", "tokens/s")
    ran = "not measured"
    if model.get("written"):
        ran = f"{result['model']} after {model['tokens']:,} tokens, {model['written']} written"
    return (
        f"Layers: {layers['layers']} of {layers['context']:,} tokens, H = 32, G = 8, D = 128, the "
        f"device idle at the start of each step; medians (quartiles). Model: {ran}. "
        f"{result['dtype']}.\n\n{table(head, rows)}\n\n{machine(result)}"
    )


def _figures(layers: Result, model: Result, form: str) -> tuple[str, ...]:
    """Host, until done (by `form`), a model's token: medians, quartiles where there are some."""
    forms, cells = {"host_us": form, "done_us": form, "token_ms": ".2f"}, []
    for name, each in forms.items():
        found = model if name == "token_ms" else layers
        parts = [name, f"{name}_low", f"{name}_high"]
        said = [f"{found[one]:{each}}" for one in parts if one in found]
        cells.append(f"{said[0]} ({said[1]} to {said[2]})" if said[1:] else "".join(said))
    return tuple(cells)


# The cache of rows


def found_in_texts() -> float | None:
    """Share of rows found with `SLOTS`, mean over texts and lengths; None: not measured."""
    cells = (stored("hit_rate") or {"cells": []})["cells"]
    shares = [c["hit_rate"] for cell in cells for c in cell["caches"] if c["rows"] == SLOTS]
    return sum(shares) / len(shares) if shares else None


def hit_rate(result: Result) -> str:
    """Shares by text, length and slots, then of each layer, means over both."""
    rows, whole = [], []
    for cell in result["cells"]:
        for cache in cell["caches"]:
            shares = (cache[name] for name in ("hit_rate", "worst_layer", "best_layer"))
            shown = (f"{share:.2f}" for share in shares)
            rows.append((cell["text"], f"{cell['tokens']:,}", f"{cache['rows']:,}", *shown))
            if cache["rows"] == SLOTS:
                whole.append(cache["layers"])
    each = [f"{sum(shares) / len(shares):.2f}" for shares in zip(*whole, strict=True)]
    by_layer = f"By layer, {SLOTS:,} slots, means over texts and lengths: {', '.join(each)}.\n\n"
    return (
        f"The newest {result['steps']} tokens, written by the model, whose first half fills the "
        f"cache; k = {result['k']} rows per KV head, `{result['index']}`. Share of the rows "
        "found, means over layers.\n\n"
        + table(("text", "tokens", "slots", "found", "worst layer", "best layer"), rows)
        + f"\n\n{by_layer if each else ''}{machine(result)}"
    )


# What limits kernels

STALLS = (
    *("barrier", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "short_scoreboard"),
    *("sleeping", "tex_throttle", "wait"),
)
"""Why a warp does not issue (Nsight Compute's names), but for another one that was chosen."""


def limits(result: Result) -> str:
    """A row for each launch, by the work that it is of."""
    rows = []
    for work, launches in result["works"].items():
        for one in launches:
            moved = f"{(one['read_bytes'] + one['written_bytes']) / 1e6:,.1f}"
            shares = (f"{one[name]:.0f}%" for name in ("memory", "issue", "shared"))
            line = f"`{work}`", f"`{one['kernel']}`", f"{one['us']:,.1f}", moved
            rows.append((*line, *shares, f"{one['warps']:.1f}", _limit(one)))
    head = ["of", "launch", "µs", "MB of memory", "memory", "issue", "shared memory's pipe"]
    about = (
        f"Counters of `ncu`, each launch alone, its caches cold: a step over {result['tokens']:,} "
        f"tokens, {result['keys']:,} keys appended. Percent of what there is; warps of a "
        "multiprocessor while it has any. Where none of the three is above 60%, what its warps "
        "wait for most (Nsight Compute's names; a long scoreboard is memory's), and shares of it. "
        "Of PCIe, which `attend`, `write_rows` and `gather_blocks` wait for, it has no counter."
    )
    return f"{about}\n\n{table([*head, 'warps', 'limited by'], rows)}\n\n{machine(result)}"


def _limit(one: dict[str, Any]) -> str:
    """What limits a launch; where it waits, for what two things most."""
    if not one["limit"].startswith("latency"):
        return str(one["limit"])
    stalls = sorted(STALLS, key=lambda name: -one[name])
    whole = sum(one[name] for name in STALLS)
    parts = (f"{name.replace('_', ' ')} {one[name] / whole:.0%}" for name in stalls[:2])
    return "latency: " + ", ".join(parts)
