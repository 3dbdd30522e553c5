"""Rows that a cache would find."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.tabling.parts import RESULTS, machine, table

SLOTS = 4096
"""Of `kvindex_cuda.memory.row_cache`: those of which each layer is shown."""


def found_in_texts() -> float | None:
    """Share of rows found with so many slots, mean over texts and lengths; None: not measured."""
    path = RESULTS / "hit_rate.json"
    if not path.exists():
        return None
    cells = json.loads(path.read_text())["cells"]
    shares = [c["hit_rate"] for cell in cells for c in cell["caches"] if c["rows"] == SLOTS]
    return sum(shares) / len(shares) if shares else None


def hit_rate(result: dict[str, Any]) -> str:
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
