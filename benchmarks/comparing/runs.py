"""What cells come to, and runs of several lengths as one result."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, median
from typing import Any

from benchmarks.comparing.truth import MEASURES

CHANGES = ("machine", "load_average", "seconds", "measured", "notes", "indexes", "failed")
"""What two measurements of the same setting need not share."""


LEAST = 1e-9
"""An error below this counts as this where a ratio is taken."""


def summary(cells: Sequence[dict[str, Any]], k: int) -> dict[str, Any]:
    """Over texts and layers: means, medians of times, errors of the worst layer.

    of_exact: geometric mean of the error over that of exact search, in which a layer with small
    errors counts as much as another; by_layer: with k rows, the heads' errors rounded.
    """

    def over(each: list[dict[str, Any]]) -> dict[str, float]:
        ratios = [max(one["error"], LEAST) / max(one["error_exact"], LEAST) for one in each]
        return {
            **{name: sum(one[name] for one in each) / len(each) for name in MEASURES},
            "of_exact": geometric_mean(ratios),
            "error_worst_layer": max(one["error"] for one in each),
            "search_ms": 1e3 * median(one["search_s"] for one in each),
        }

    found = {
        part: {str(at): over([cell[part][at] for cell in cells]) for at in cells[0][part]}
        for part in ("rows", "along")
        if cells[0][part]
    }
    build = 1e3 * median(cell["build_s"] for cell in cells)
    layers = {cell["layer"]: cell["rows"][k] for cell in cells}
    by_layer = {
        name: {
            **{part: at[part] for part in ("error", "coverage")},
            "heads": [round(error, 4) for error in at["heads"]],
        }
        for name, at in layers.items()
    }
    return {"layers": len(cells), "build_ms": build, **found, "by_layer": by_layer}


def joined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """`{"machine", "runs"}` with the run `new`, and what `old` has of other lengths and indexes.

    What says how it was measured (`CHANGES`) is `new`'s. Raises ValueError for a run of the same
    length and model, sampled or not, in another setting.
    """
    runs = []
    for run in old["runs"] if old else []:
        if _kind(run) != _kind(new):
            runs.append(run)
            continue
        for name in new:
            if name not in CHANGES and run[name] != new[name]:
                raise ValueError(f"add: got {name} = {new[name]!r}, allowed is {run[name]!r}")
        measured = {line["index"] for line in new["indexes"]} | set(new["failed"])
        lines = [line for line in run["indexes"] if line["index"] not in measured]
        failed = {spec: why for spec, why in run["failed"].items() if spec not in measured}
        failed |= new["failed"]
        new = {**new, "indexes": lines + new["indexes"], "failed": failed}
    return {"machine": new["machine"], "runs": sorted([*runs, new], key=_kind)}


def _kind(run: dict[str, Any]) -> tuple[int, bool, str]:
    return run["setting"]["tokens"], run["sampled"], run["lora"] or ""
