"""A decoding step on a GPU: whole, beside FAISS, with rows as codes, and kernel by kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.decode.show import FAISS, joined
from benchmarks.tabling.hits import found_in_texts
from benchmarks.tabling.parts import NOT_MEASURED, RESULTS, STAGE, beside_its_floor, machine, table

_COUNTED = ("launches", "attend_nodes")


def decode_step(result: dict[str, Any]) -> str:
    """Whole steps beside dense attention; those of 4M tokens from a file beside the result's."""
    path = RESULTS / "decode_step_4m.json"
    longer = [json.loads(path.read_text())] if path.exists() else []
    return steps(result, longer, found_in_texts())


def steps(
    result: dict[str, Any], longer: Sequence[dict[str, Any]] = (), in_texts: float | None = None
) -> str:
    """Whole steps of results of the same index, each beside its own run's dense attention.

    in_texts: share of a step's rows that caches find where a model writes.
    """
    points, rows = joined([result, *longer])["points"], []
    for point in points:
        dense = point["dense"]["median_us"] if "dense" in point else None
        line = [f"{point['tokens']:,}", str(point["batch"])]
        line += [_median(point, part) for part in ("dense", "topk")]
        for place in ("host", "cached", "device"):
            ours = point.get(f"step_{place}")
            share = f" ({ours['median_us'] / dense:.2f})" if ours and dense else ""
            line.append(_median(point, f"step_{place}") + share)
        floor = sum(stage.get("floor_us", 0) for stage in point.get("stages", []))
        rows.append((*line, f"{floor:.0f}" if floor else "–"))
    head = ("tokens", "B", "dense (SDPA)", "exact scores, topk", "rows on the host")
    head = (*head, "and a cache of rows", "rows on the device", "what must move")
    about = [
        "µs for a layer and step, and over dense: medians of 50 replays of a CUDA graph of 16 "
        "layers, cold caches; H = 32, G = 8, D = 128, bfloat16, "
        f"k = {result['shape']['k']}, `{result['index']}`."
    ]
    hits = [point["hit_rate"] for point in result["points"] if "hit_rate" in point]
    if hits:
        low, high = f"{min(hits):.1%}", f"{max(hits):.1%}"
        share = low if low == high else f"{low} to {high}"
        about.append(f"Of the rows asked for {share} lie in the cache.")
    if hits and in_texts is not None:
        about.append(f"Where a model writes, {in_texts:.0%} do.")
    if "note" in result:
        about.append(result["note"])
    about += [*_launched(points), *_fewer_layers(points)]
    ending = machine(result)
    if longer:
        lengths = sorted({f"{point['tokens']:,}" for part in longer for point in part["points"]})
        ending += f" {' and '.join(lengths)} tokens: a run of its own. {machine(longer[0])}"
    return f"{' '.join(about)}\n\n{table(head, rows)}\n\n{ending}"


PRESETS = ("fast", "scan", "paper", "accurate")


def decode_presets(_: dict[str, Any]) -> str:
    """Whole steps of the presets, a result each."""
    return presets(_presets())


def _presets() -> dict[str, dict[str, Any]]:
    """A result of each preset that has one."""
    paths = {preset: RESULTS / f"decode_step_{preset}.json" for preset in PRESETS}
    return {preset: json.loads(path.read_text()) for preset, path in paths.items() if path.exists()}


def presets(results: dict[str, dict[str, Any]]) -> str:
    """Steps of several presets beside each other, and where one stage gives way to two."""
    at: dict[int, dict[str, dict[str, Any]]] = {}
    for preset, result in results.items():
        for point in result["points"]:
            if point["batch"] == 1 and "step_host" in point:
                at.setdefault(point["tokens"], {})[preset] = point
    rows, parts = [], ("step_host", "step_device")
    for tokens, points in sorted(at.items()):
        full = next((_median(p, "dense") for p in points.values() if "dense" in p), "–")
        line = [f"{tokens:,}", full]
        for part in parts:
            for preset in results:
                point = points.get(preset, {})
                dense = point.get("dense", {}).get("median_us")
                share = f" ({point[part]['median_us'] / dense:.2f})" if dense else ""
                line.append(_median(point, part) + share)
        rows.append(tuple(line))
    places = "rows on the host", "rows on the device"
    head = [f"`{preset}`, {place}" for place in places for preset in results]
    about = "µs for a layer and step, batch 1, and over dense of the same run; set as above."
    switch = _switch(at)
    text = f"{about}\n\n{table(('tokens', 'dense (SDPA)', *head), rows)}\n\n"
    return text + (f"{switch} " if switch else "") + machine(next(iter(results.values())))


def _switch(at: dict[int, dict[str, dict[str, Any]]]) -> str:
    """In words, up to which length one stage is as fast as two, rows on the host."""
    known = {n: p for n, p in sorted(at.items()) if {"fast", "scan"} <= p.keys()}
    if not known:
        return ""
    slower = [
        tokens
        for tokens, p in known.items()
        if p["scan"]["step_host"]["median_us"] > p["fast"]["step_host"]["median_us"]
    ]
    before = [tokens for tokens in known if not slower or tokens < slower[0]]
    words = f"as fast up to {before[-1]:,} tokens, " if before else ""
    ending = f"slower from {slower[0]:,} on" if slower else "the longest measured"
    return f"One stage (`scan`) beside two (`fast`): {words}{ending}."


def decode_faiss(result: dict[str, Any]) -> str:
    """Searches of FAISS's GPU indexes, beside the step's whole."""
    if not result["faiss"]:
        return NOT_MEASURED
    at = {point["tokens"]: point for point in result["points"] if point["batch"] == 1}
    rows = []
    for found in result["faiss"]:
        point = at.get(found["tokens"], {})
        searched = (_searched(found, name) for name in FAISS)
        ours = (_median(point, part) for part in ("topk", "step_host", "step_device"))
        rows.append((f"{found['tokens']:,}", *searched, *ours))
    head = ("tokens", *FAISS.values(), "exact scores, topk", "step, rows on the host")
    return (
        "µs for a layer, batch 1. FAISS searches alone, a call for each KV head, no rows read and "
        "no output made, timed by events without a graph, which its calls cannot be captured in; "
        "in parentheses the share of the best keys that it finds. The step is whole.\n\n"
        + table((*head, "on the device"), rows)
        + f"\n\n{machine(result)}"
    )


def decode_rows(result: dict[str, Any]) -> str:
    """Whole steps with rows on the host as they are and as codes of a byte."""
    points = [point for point in result["points"] if "step_int8" in point]
    if not points:
        return NOT_MEASURED
    parts = ("step_host", "step_int8", "step_fp8")
    rows = [
        (f"{p['tokens']:,}", str(p["batch"]), *(_median(p, part) for part in parts)) for p in points
    ]
    return (
        "µs for a layer and step, rows on the host, no cache; the run above.\n\n"
        + table(("tokens", "B", "bfloat16", "`int8`", "`fp8`"), rows)
        + f"\n\n{machine(result)}"
    )


def _median(point: dict[str, Any], part: str) -> str:
    """Microseconds; `–` where it was not measured."""
    return f"{point[part]['median_us']:,.0f}" if part in point else "–"


def _launched(points: list[dict[str, Any]]) -> list[str]:
    """Launches of the bare step and of the public call, where they were counted."""
    bare, public = ({p[part] for p in points if p.get(part)} for part in _COUNTED)
    if not public:
        return []
    counts = (" or ".join(map(str, sorted(each))) for each in (bare, public))
    return ["Launches of the bare step: {}; of `index.attend`, captured: {}.".format(*counts)]


def _fewer_layers(points: list[dict[str, Any]]) -> list[str]:
    """In words, where memory let fewer layers of dense attention be in a graph than of the step."""
    fewer = [
        f"{p['dense_layers']} ({p['tokens']:,} tokens, batch {p['batch']})"
        for p in points
        if "dense" in p and 0 < p.get("dense_layers", 0) < p.get("layers", 0)
    ]
    if not fewer:
        return []
    return [f"Dense attention in graphs of fewer layers, for memory: {', '.join(fewer)}."]


def _searched(found: dict[str, Any], name: str) -> str:
    """Median of FAISS's search, and the share of the best keys that it finds."""
    if name not in found:
        return "–"
    return f"{found[name]['median_us']:,.0f} ({found[f'{name}_recall']:.0%})"


def _measured(stage: dict[str, Any]) -> tuple[str, str, str, str]:
    """`beside_its_floor`, of all bytes that a launch moves."""
    return beside_its_floor(stage["bytes"] + stage["host_bytes"], stage["floor_us"], stage["us"])


def stage(*names: str) -> Callable[[dict[str, Any]], str]:
    """A table for the page of a stage: its launches at each length."""

    def render(result: dict[str, Any]) -> str:
        rows = [
            (f"`{found['name']}`", f"{point['tokens']:,}", *_measured(found))
            for name in names
            for point in result["points"]
            for found in point.get("stages", [])
            if point["batch"] == 1 and found["name"] == name
        ]
        return table(STAGE, rows) + f"\n\nOf [the step](../cuda.md#how-fast). {machine(result)}"

    return render


def preset_stages(_: dict[str, Any]) -> str:
    """The launches of the presets that have steps of their own, at the longest length measured."""
    rows, found = [], _presets()
    for preset, result in found.items():
        points = [point for point in result["points"] if point["batch"] == 1 and "stages" in point]
        if preset != "fast" and points:
            tokens = f"{points[-1]['tokens']:,}"
            rows += [
                (f"`{preset}`", f"`{one['name']}`", tokens, *_measured(one))
                for one in points[-1]["stages"]
                if "floor_us" in one
            ]
    about = (
        "The longest runs, batch 1, rows on the host; by what the step takes longer with a launch."
    )
    return f"{about}\n\n{table(('preset', *STAGE), rows)}\n\n{machine(next(iter(found.values())))}"


def decode_stages(result: dict[str, Any]) -> str:
    """Each kernel of a step: bytes, floor, measured, ratio."""
    points = [point for point in result["points"] if point["batch"] == 1 and "stages" in point]
    rows = []
    for of_each in zip(*(point["stages"] for point in points), strict=True):
        line = [f"`{of_each[0]['name']}`"]
        for stage in of_each:
            line += _measured(stage)
        rows.append(tuple(line))
    head = ["launch"]
    for point in points:
        head += [f"{point['tokens']:,}: MB", "floor, µs", "measured, µs", "ratio"]
    read, pinned = (result["ceilings"][name]["GB_s"] for name in ("read", "pinned"))
    return (
        table(tuple(head), rows)
        + f"\n\nRows on the host. Floors at {read / 1e3:.2f} TB/s of reading and {pinned:.0f} GB/s "
        f"over PCIe, measured in the same run. {machine(result)}"
    )
