"""A decoding step on a GPU: whole, and kernel by kernel."""

from __future__ import annotations

from typing import Any

from benchmarks.decode.show import FAISS
from benchmarks.tabling.parts import machine, table

SEARCHED = (
    " FAISS's GPU indexes search alone, a call for each KV head, no rows read and no output made, "
    "timed by events without a graph, which they cannot be captured in; in parentheses the share "
    "of the best keys that they find."
)

_COUNTED = ("launches", "attend_nodes")


def decode_step(result: dict[str, Any]) -> str:
    """Whole steps beside dense attention."""
    rows = []
    faiss = {found["tokens"]: found for found in result["faiss"]}
    for point in result["points"]:
        dense = point["dense"]["median_us"] if "dense" in point else None
        line = [f"{point['tokens']:,}", str(point["batch"])]
        for part in ("dense", "topk"):
            line.append(f"{point[part]['median_us']:,.0f}" if part in point else "–")
        if faiss:
            found = faiss.get(point["tokens"], {}) if point["batch"] == 1 else {}
            line += [_searched(found, name) for name in FAISS]
        for place in ("host", "cached", "device"):
            ours = point.get(f"step_{place}")
            median = ours and ours["median_us"]
            share = f" ({median / dense:.2f})" if ours and dense else ""
            line.append(f"{median:.0f}{share}" if ours else "–")
        floor = sum(stage.get("floor_us", 0) for stage in point["stages"])
        rows.append((*line, f"{floor:.0f}"))
    hits = [point["hit_rate"] for point in result["points"] if "hit_rate" in point]
    head = ("tokens", "B", "dense (SDPA)", "exact scores, topk")
    head = (*head, *(FAISS.values() if faiss else ()), "rows on the host")
    head = (*head, "and a cache of rows", "rows on the device", "what must move")
    return (
        "µs for a layer and step, and over dense: medians of 50 replays of a CUDA graph of 16 "
        "layers, cold caches; H = 32, G = 8, D = 128, bfloat16, "
        f"k = {result['shape']['k']}, `{result['index']}`."
        + (f" Of the rows asked for {hits[0]:.0%} lie in the cache." if hits else "")
        + _launched(result["points"])
        + (SEARCHED if faiss else "")
        + "\n\n"
        + table(head, rows)
        + f"\n\n{machine(result)}"
    )


def _launched(points: list[dict[str, Any]]) -> str:
    """Launches of the bare step and of the public call, where they were counted."""
    bare, public = ({p[part] for p in points if p.get(part)} for part in _COUNTED)
    if not public:
        return ""
    counts = (" or ".join(map(str, sorted(each))) for each in (bare, public))
    return " Launches of the bare step: {}; of `index.attend`, captured: {}.".format(*counts)


def _searched(found: dict[str, Any], name: str) -> str:
    """Median of FAISS's search, and the share of the best keys that it finds."""
    if name not in found:
        return "–"
    return f"{found[name]['median_us']:.0f} ({found[f'{name}_recall']:.0%})"


def decode_stages(result: dict[str, Any]) -> str:
    """Each kernel of a step: bytes, floor, measured, ratio."""
    points = [point for point in result["points"] if point["batch"] == 1]
    rows = []
    for of_each in zip(*(point["stages"] for point in points), strict=True):
        line = [f"`{of_each[0]['name']}`"]
        for stage in of_each:
            moved = (stage["bytes"] + stage["host_bytes"]) / 1e6
            share = f"{stage['floor_us'] / stage['us']:.0%}" if stage["us"] > 0 else "–"
            line += [f"{moved:.1f}", f"{stage['floor_us']:.1f}", f"{stage['us']:.1f}", share]
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
