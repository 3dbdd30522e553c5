"""Tables of GPU results: decode steps, appends, generated tokens, device caches, kernel limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.reporting.parts import Result, machine, stored, table

PLACES = ("host", "cached", "device")
"""Where keys and values are stored: host memory, host memory with a device cache, or device
memory."""

SLOTS = 4096
"""Size of the device cache for which the hit rate of each layer is shown, in tokens per KV head."""


# A step


def decode_step(result: Result) -> str:
    """Make the table of the times of decode steps and of dense attention, up to 4M tokens.

    A second results file has the times for 4M tokens.
    """
    longer = stored("decode_step_4m")
    return steps(result, [longer] if longer else [], found_in_texts())


def steps(result: Result, longer: Sequence[Result] = (), in_texts: float | None = None) -> str:
    """Make the table of the times of an index's decode steps.

    Times are given as ratios to the time of dense attention in the same run.

    Args:
        result: Results of `benchmarks/latency.py`.
        longer: Further results of the same index, with other numbers of tokens.
        in_texts: Hit rate of the device cache while a real model generates text, or None.
    """
    points = [point for part in (result, *longer) for point in part["points"]]
    rows: list[tuple[str, ...]] = []
    split = any("step_split" in point for point in points)
    places = (*PLACES, "split", "split_cached") if split else PLACES
    for point in points:
        rivals = (_median(point, part) for part in ("dense", "topk"))
        ours = (_over_dense(point, f"step_{place}") for place in places)
        rows.append((f"{point['tokens']:,}", str(point["batch"]), *rivals, *ours))
    head = ["tokens", "sequences", "dense (SDPA)", "exact search, topk", "rows on the host"]
    head += ["on the host, cached", "rows on the device"]
    if places is not PLACES:
        head += ["rows in both places", "in both places, cached"]
    about = [
        "The table shows the time of one layer's decode step with "
        f"`{result['index']}` in µs, and in parentheses this time divided by the time of dense "
        f"attention. A decode step retrieves k = {result['shape']['k']} tokens per KV head. *Rows* "
        "are the keys and values of tokens: they are in host memory, in host memory with a cache "
        "on the device, or in device memory. Times are medians of 50 replays of a CUDA graph of up "
        "to 16 layers with cold caches. The layer has 32 query heads, 8 KV heads, D = 128, and "
        "keys and values in bfloat16."
    ]
    hits = [point["hit_rate"] for point in result["points"] if "hit_rate" in point]
    if hits:
        fraction = " to ".join(dict.fromkeys(f"{each:.1%}" for each in (min(hits), max(hits))))
        about.append(
            f"In the columns *cached*, {fraction} of the rows that a step reads are in the cache "
            "on the device."
        )
    about += _caches(points)
    if hits and in_texts is not None:
        about.append(
            f"While a model generates text, the cache contains {in_texts:.0%} of these rows."
        )
    ending = machine(result)
    for part in longer:
        lengths = " and ".join(f"{point['tokens']:,}" for point in part["points"])
        same = machine(part) == machine(result)
        where = " on the same kind of machine." if same else f". {machine(part)}"
        ending += f" The lines with {lengths} tokens are from another run{where}"
    return f"{' '.join(about)}\n\n{table(head, rows)}\n\n{ending}"


def _caches(points: Sequence[Result]) -> list[str]:
    """Return sentences about the device caches of keys and values: size, codec and hit rate."""
    used = [use for p in points for use in p.get("caches", {}).values() if use["cache_rows"]]
    if not used:
        return []
    slots = " or ".join(dict.fromkeys(f"{use['cache_rows']:,}" for use in used))
    kept = " or ".join(dict.fromkeys(f"`{use['row_codec']}`" for use in used))
    sentences = [
        f"The cache has room for {slots} rows per KV head, in the format (row codec) {kept}."
    ]
    for name, plan in (("on the host", "cached"), ("in both places", "split_cached")):
        hits = [
            p["caches"][f"step_{plan}"] for p in points if f"step_{plan}" in p.get("caches", {})
        ]
        if hits:
            fraction = ", ".join(f"{use['hit_rate']:.1%}" for use in hits)
            sentences.append(f"With rows {name}, its hit rate in each line is {fraction}.")
    return sentences


def latents(_: Result) -> str:
    """Make the table of times of decode steps with latent attention (MLA).

    The table also has the time that reading all latents once takes.
    """
    results = [found for heads in (16, 128) if (found := stored(f"latents_{heads}"))]
    rows = []
    for result, point in ((one, p) for one in results for p in one["points"]):
        rivals = (_median(point, part) for part in ("dense", "read"))
        ours = (_over_dense(point, f"step_{place}") for place in ("host", "device"))
        rows.append((str(result["shape"]["q_heads"]), f"{point['tokens']:,}", *rivals, *ours))
    head = ("query heads", "tokens", "dense, absorbed", "reading all latents")
    about = (
        "The table is for latent attention (MLA). It shows the time of one layer's decode step "
        f"with `{results[0]['index']}` in µs, and in parentheses this time divided by the time of "
        f"dense attention. A decode step retrieves k = {results[0]['shape']['k']} rows (a row is "
        "the latent of one token), which are stored in host memory or in device memory. Dense "
        "attention is two matrix products of torch with a softmax between them. Times are medians "
        "of 50 replays of a CUDA graph of 8 layers with cold caches. A latent has D = 512 + 64 "
        "coordinates in bfloat16."
    )
    head = (*head, "rows on the host", "rows on the device")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(results[0])}"


def others(result: Result) -> str:
    """Make a table that compares the decode step of several indexes.

    It has the time of one index in µs. The times of the other indexes are divided by this time.
    """
    rows = []
    for point in result["points"]:
        own = (_median(point, f"step_{place}") for place in ("cached", "device"))
        rows.append((f"{point['tokens']:,}", f"`{result['index']}`, µs", *own))
        for spec, found in point["others"].items():
            places = (f"step_{place}" for place in ("cached", "device"))
            each = (
                f"{found[p]:.3f} ({found[f'{p}_low']:.3f} to {found[f'{p}_high']:.3f})"
                for p in places
            )
            rows.append((f"{point['tokens']:,}", f"`{spec}`, ratio to it", *each))
    head = ("tokens", "index", "rows on the host, cached", "rows on the device")
    about = (
        "The table shows the time of one layer's decode step: in µs for one index, and for other "
        "indexes as a ratio to this time. *Rows* are keys and values. Times are medians. A ratio "
        "compares times of the same round, and its quartiles are in parentheses. The steps are "
        "replays of CUDA graphs with cold caches."
    )
    return f"{table(head, rows)}\n\n{about} {machine(result)}"


def presets(_: Result) -> str:
    """Make the table of the times of decode steps with each preset of pariskv that has kernels.

    There is one results file for each preset.
    """
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
    about = (
        "The table shows the time of one layer's decode step with presets of `pariskv` in µs, for "
        "one sequence. In parentheses is this time divided by the time of dense attention in the "
        "same run. *Rows* are keys and values. Steps are measured as in the tables above."
    )
    ending = machine(next(iter(there.values())))
    return f"{about}\n\n{table(('tokens', 'dense (SDPA)', *head), rows)}\n\n{ending}"


def _median(point: Result, part: str) -> str:
    """Return a table cell with the median time of `part` in µs, or `–` if it was not measured."""
    return f"{point[part]['median_us']:,.0f}" if part in point else "–"


def _over_dense(point: Result, part: str) -> str:
    """Return a table cell with the median time of `part` in µs, and its ratio to dense attention.

    The ratio is left out if dense attention was not measured.
    """
    if not {part, "dense"} <= point.keys():
        return _median(point, part)
    return f"{_median(point, part)} ({point[part]['median_us'] / point['dense']['median_us']:.2f})"


# An append

PLANS = {
    "at_once": "all layers in one step, on the steps' stream",
    "concurrent": "one layer at a time, concurrently with steps (the default)",
    "room": "the same, with memory reserved before",
}
"""Name of a way to run updates -> its description in the table. An update moves tokens from a
layer's local window into its index."""
STEPS = {
    "plain": "a token only",
    "updated": "an update of a layer's window begins or ends",
    "pinning": "host memory is pinned for later updates",
}
"""Kind of a decode step -> its description in the table."""


def append_layers(result: Result) -> str:
    """Make the table of the times of decode steps, with and without an update of an index.

    An update is an append of the oldest tokens of a layer's local window to the layer's index.
    """
    rows, about = [], []
    for part in result["layers"]:
        about.append(
            f"The table shows the time of a decode step of {part['layers']} layers with "
            f"{part['tokens']:,} tokens each. An update moves tokens from a layer's local window "
            "into its index. The layers are launched one by one, without a CUDA graph."
        )
        for plan, kind in [(name, kind) for name in PLANS for kind in part.get(name, {})]:
            found = part[plan][kind]
            if kind == "amortised" or not isinstance(found, dict) or not found["steps"]:
                continue
            delay = "" if kind == "plain" else f"{found['delay_median']:.1%}"
            times = (f"{found[name] / 1e3:.1f}" for name in ("median_us", "worst_us"))
            rows.append((PLANS[plan], STEPS[kind], f"{found['steps']:,}", *times, delay))
    head = ("how updates run", "what happens in the step", "steps", "ms, median", "ms, worst")
    head = (*head, "median delay")
    prompts = "".join(
        f" To append {one['tokens']:,} tokens of a prompt, with keys and values in "
        f"{one['place']} memory, takes {one['median_us'] / 1e3:,.1f} ms ({one['GB_s']:,.0f} GB/s)."
        for one in result.get("prompts", [])
    )
    return f"{about[-1]}{prompts}\n\n{table(head, rows)}"


# A token

WORDS = {
    "dense": "transformers, dense attention",
    "eager": "`{index}`, `graphs=False`",
    "graphs": "`{index}`",
}
RATIOS = {"dense": "dense attention", "eager": "`graphs=False`"}


def generate_speed(result: Result) -> str:
    """Make the table of the time per generated token, and of the host's time per layer."""
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
            rows.append((f"ratio of {words} to `{index}`", *figures, ""))
    head = ("", "host, µs per layer", "until the device is done, µs", "model, ms per token")
    head = (*head, "tokens/s")
    ran = "nothing was measured"
    if model.get("written"):
        ran = f"{result['model']} generates {model['written']} tokens after a "
        ran += f"prompt of {model['tokens']:,} tokens"
    return (
        "The table has times of attention layers, and times of a whole model. The times per layer "
        f"are for {layers['layers']} layers with {layers['context']:,} tokens, 32 query heads, 8 "
        "KV heads and D = 128. The device is idle when a decode step begins. For the times of the "
        f"model, {ran}. Keys and values are {result['dtype']}. Times are medians, with quartiles "
        "in parentheses. Ratios compare times of the same round."
        f"\n\n{table(head, rows)}\n\n{machine(result)}"
    )


def _figures(layers: Result, model: Result, form: str) -> tuple[str, ...]:
    """Return the cells of one line of the table `generate_speed`.

    A cell has a median, and its quartiles in parentheses if they are known.

    Args:
        layers: Times of a decode step per layer.
        model: Time of a generated token of the model.
        form: Format of the times per layer, such as ".2f".
    """
    forms, cells = {"host_us": form, "done_us": form, "token_ms": ".2f"}, []
    for name, each in forms.items():
        found = model if name == "token_ms" else layers
        parts = [name, f"{name}_low", f"{name}_high"]
        said = [f"{found[one]:{each}}" for one in parts if one in found]
        cells.append(f"{said[0]} ({said[1]} to {said[2]})" if said[1:] else "".join(said))
    return tuple(cells)


# The cache of rows


def found_in_texts() -> float | None:
    """Return the hit rate of a device cache for `SLOTS` tokens, as a mean over texts and lengths.

    It was measured while a real model generated text. Return None if there are no results.
    """
    cells = (stored("hit_rate") or {"cells": []})["cells"]
    fractions = [c["hit_rate"] for cell in cells for c in cell["caches"] if c["rows"] == SLOTS]
    return sum(fractions) / len(fractions) if fractions else None


def hit_rate(result: Result) -> str:
    """Make the table of hit rates of device caches by text, length and size of the cache.

    Below the table, a sentence lists the hit rate of each layer.
    """
    rows, whole = [], []
    for cell in result["cells"]:
        for cache in cell["caches"]:
            fractions = (cache[name] for name in ("hit_rate", "worst_layer", "best_layer"))
            shown = (f"{fraction:.2f}" for fraction in fractions)
            rows.append((cell["text"], f"{cell['tokens']:,}", f"{cache['rows']:,}", *shown))
            if cache["rows"] == SLOTS:
                whole.append(cache["layers"])
    each = [f"{sum(fractions) / len(fractions):.2f}" for fractions in zip(*whole, strict=True)]
    by_layer = (
        f"With a device cache of {SLOTS:,} slots for keys and values, the hit rates of the layers "
        f"are as follows, in the order of the layers (means over texts and lengths): "
        f"{', '.join(each)}.\n\n"
    )
    return (
        "The table is for keys and values in host memory, of which a cache on the device contains "
        "some. A slot of the cache has the key and value (the row) of one token and KV head. "
        f"`{result['index']}` retrieves k = {result['k']} rows per KV head, and the hit rate is "
        "the fraction of these rows that the cache contains, as a mean over layers. The model "
        f"generates the last {result['steps']} tokens of each text. The first half of these tokens "
        "only fills the cache, and hits are counted for the second half.\n\n"
        + table(("text", "tokens", "slots", "hit rate", "worst layer", "best layer"), rows)
        + f"\n\n{by_layer if each else ''}{machine(result)}"
    )


# What limits kernels

STALLS = (
    *("barrier", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "short_scoreboard"),
    *("sleeping", "tex_throttle", "wait"),
)
"""Nsight Compute's names of the reasons why a warp does not issue an instruction.

The reason `selected` (another warp was selected) is left out.
"""


def limits(result: Result) -> str:
    """Make a table that shows for each kernel launch which part of the GPU limits its speed."""
    rows = []
    for work, launches in result["works"].items():
        for one in launches:
            moved = f"{(one['read_bytes'] + one['written_bytes']) / 1e6:,.1f}"
            fractions = (f"{one[name]:.0f}%" for name in ("memory", "issue", "shared"))
            line = f"`{work}`", f"`{one['kernel']}`", f"{one['us']:,.1f}", moved
            rows.append((*line, *fractions, f"{one['warps']:.1f}", _limit(one)))
    head = [
        "work",
        "kernel",
        "µs",
        "MB read and written",
        "memory",
        "issue",
        "shared memory's pipe",
    ]
    about = (
        "The table shows counters of the profiler Nsight Compute (`ncu`). Each kernel runs alone "
        f"with cold caches, in a decode step over {result['tokens']:,} tokens or an append of "
        f"{result['keys']:,} keys.\n\n"
        "- *Memory*, *issue* and *shared memory's pipe* say how busy a part of the GPU is, in "
        "percent of its peak rate: the memory, the issue of instructions, and the pipeline of "
        "shared memory.\n"
        "- *Warps* is the number of resident warps of a busy multiprocessor.\n"
        "- *Limited by*: if none of the three percentages is above 60%, latency limits the kernel. "
        "The column then has the two most frequent reasons why warps wait, with their percentages, "
        "in the words of the profiler (*long scoreboard* means waiting for memory).\n\n"
        "The kernels `attend`, `write_rows` and `gather_blocks` also wait for PCIe, for which the "
        "profiler has no counter."
    )
    return f"{about}\n\n{table([*head, 'warps', 'limited by'], rows)}\n\n{machine(result)}"


def _limit(one: dict[str, Any]) -> str:
    """Return what limits a kernel launch: memory, instruction issue, shared memory or latency.

    For latency, the two most frequent reasons why warps wait are added.
    """
    if not one["limit"].startswith("latency"):
        return str(one["limit"])
    stalls = sorted(STALLS, key=lambda name: -one[name])
    whole = sum(one[name] for name in STALLS)
    parts = (f"{name.replace('_', ' ')} {one[name] / whole:.0%}" for name in stalls[:2])
    return "latency: " + ", ".join(parts)
