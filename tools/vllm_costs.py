"""Compute the table by which the vLLM plug-in decides when a search pays.

```
PYTHONPATH=.:adapters python tools/vllm_costs.py [--check]
```

Fits the model of `kvindex_adapters/vllm/costs.py` to the times in the benchmark's result files
`decode_step*.json`, and writes `costs.json` next to that module. The fit minimizes the relative
errors. What further rows cost follows from `serving.json` and `serving_k100.json`. `--check` only
compares the file with the result, and fails if they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.shapes import SHAPES
from kvindex_adapters.vllm.costs import HEADS

ROOT = Path(__file__).parents[1]

RESULTS = ROOT / "benchmarks" / "results"

FILES = (
    "decode_step.json",
    "decode_step_fast.json",
    "decode_step_4m.json",
    "decode_step_h100.json",
)
"""Result files with times of an index that vLLM supports on a GPU."""

WRITTEN = ROOT / "adapters" / "kvindex_adapters" / "vllm" / "costs.json"

SERVED = "serving.json", "serving_k100.json"
"""Result files with times of the same batches in vLLM, with more rows and with fewer."""

GPUS = "H100", "H200"

PAGES_BYTES = 131_072 * 8 * 512 / 280
"""Bytes that the kernel `attend_pages` reads in a microsecond: the rows of 131,072 tokens in 0.28
ms (decision 0056, on an H200). This is less than the memory of either GPU allows."""


@dataclass(frozen=True)
class Point:
    """A measurement.

    Args:
        gpu: Kind of GPU.
        batch: Number of sequences.
        tokens: Length of each sequence.
        shape: Names and sizes of the layer.
        full: Time of full attention in microseconds.
        search: Time of a step that searches, with all rows on the device.
    """

    gpu: str
    batch: int
    tokens: int
    shape: dict[str, Any]
    full: float
    search: float


def points() -> Iterator[Point]:
    """Read the measurements."""
    for file in FILES:
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        gpu = next(kind for kind in GPUS if kind in found["machine"]["gpu"].split())
        for point in found["points"]:
            times = (point[name]["median_us"] for name in ("dense", "step_device"))
            yield Point(gpu, point["batch"], point["tokens"], found["shape"], *times)


def fitted(times: list[float], *columns: list[float]) -> list[float]:
    """Return the factors of a constant and of each column whose sum has the smallest relative
    errors."""
    wanted = np.array(times)
    parts = np.stack([np.ones(len(times)), *columns], axis=1) / wanted[:, None]
    return [float(factor) for factor in np.linalg.lstsq(parts, np.ones(len(times)), rcond=None)[0]]


def row_us() -> float:
    """Return what a search takes for one more row and query head of a sequence, in microseconds."""
    added = list(further_rows())
    heads, times = (np.array(column) for column in zip(*added, strict=True))
    return float(np.linalg.lstsq(heads[:, None], times, rcond=None)[0][0])


def further_rows() -> Iterator[tuple[float, float]]:
    """Return for each batch that was measured with more and with fewer rows: the number of further
    rows of all query heads together, and the microseconds that a layer takes longer with them.

    The two files are of two GPUs of one kind, and everything takes 1% to 2% longer on one of them.
    So the times with fewer rows are multiplied by the ratio of full attention's times. Differences
    from full attention would not do: it reads about ten times as many bytes as a search, so a
    slower memory adds more to its time than further rows add to that of a search.
    """
    more, fewer = (
        json.loads((RESULTS / file).read_text(encoding="utf-8"))["serving"] for file in SERVED
    )
    shape = SHAPES[more["settings"]["shape"]]
    rows = more["settings"]["k"] - fewer["settings"]["k"]
    before = {(one["context"], one["batch"]): one["plans"] for one in fewer["batches"]}
    for one in more["batches"]:
        found, old = one["plans"], before[one["context"], one["batch"]]
        slower = found["stock"]["token_ms"] / old["stock"]["token_ms"]
        added_ms = found["kvindex"]["token_ms"] - slower * old["kvindex"]["token_ms"]
        yield float(one["batch"] * shape.q_heads * rows), 1e3 * added_ms / shape.layers


def costs_of(found: list[Point]) -> dict[str, float]:
    """Fit the model to the measurements on one kind of GPU."""
    tokens = [float(point.batch * point.tokens) for point in found]
    shapes = [point.shape for point in found]
    rows = [shape["kv_heads"] * shape["head_dim"] * 2 * 2 for shape in shapes]  # in bfloat16
    keys = [max(shape["kv_heads"], shape["q_heads"] / HEADS) for shape in shapes]
    full_us, byte_us = fitted(
        [point.full for point in found],
        [count * size for count, size in zip(tokens, rows, strict=True)],
    )
    search_us, head_us, key_us = fitted(
        [point.search for point in found],
        [float(point.batch * point.shape["q_heads"]) for point in found],
        [count * number for count, number in zip(tokens, keys, strict=True)],
    )
    numbers = dict(
        full_us=full_us,
        full_bytes=1 / byte_us,
        search_us=search_us,
        head_us=head_us,
        row_us=row_us(),
        key_us=key_us,
        pages_bytes=PAGES_BYTES,
    )
    return {name: float(f"{number:.3g}") for name, number in numbers.items()}


def table() -> dict[str, Any]:
    """Return the content of `costs.json`."""
    found = list(points())
    gpus = {gpu: costs_of([point for point in found if point.gpu == gpu]) for gpu in GPUS}
    return {"written_by": "tools/vllm_costs.py", "from": [*FILES, *SERVED], "gpus": gpus}


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Only compare the file")
    given, text = parser.parse_args(), json.dumps(table(), indent=1) + "\n"
    if given.check:
        if WRITTEN.read_text(encoding="utf-8") != text:
            print(f"{WRITTEN}: run tools/vllm_costs.py", file=sys.stderr)
            return 1
        return 0
    WRITTEN.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
